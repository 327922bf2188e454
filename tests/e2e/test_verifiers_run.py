"""Environments of the real `verifiers` library, in Pythons of their own: 0.3 trains, and 0.4 plays episodes of a taskset.

`bash envs/cpu/extras.sh` makes that Python; `tests/run.sh --all` does so and runs this.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from grpo_command import ONE_PROCESS, finished
from patience import patient
from safetensors.torch import load_file
from test_agent_runs import TEMPLATE

import mindspeed_rl
from mindspeed_rl.tools.endpoint import ChatReply, RecordingEndpoint
from mindspeed_rl.tools.interface import ParsedTurn
from mindspeed_rl.tools.request_forms import TurnRequest
from mindspeed_rl.tools.verifiers_program import VerifiersProgram, _EpisodeResult

PYTHON, PYTHON_4 = (Path(sys.prefix, name, "bin", "python") for name in ("verifiers", "verifiers4"))
HOST = Path(mindspeed_rl.__file__).parent / "tools" / "verifiers_host.py"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON.exists(), reason="there is no Python with verifiers here: bash envs/cpu/extras.sh"),
]
needs_4 = pytest.mark.skipif(
    not PYTHON_4.exists(), reason="there is no Python with verifiers 0.4 here: bash envs/cpu/extras.sh"
)
#: release 0.4: a digit is to be said, and the length of the answer is measured
TASKSET = """
import verifiers.v1 as vf


class DigitsData(vf.TaskData):
    answer: str


class DigitsTask(vf.Task[DigitsData, vf.State, vf.TaskConfig]):
    @vf.reward(weight=1.0)
    async def right(self, trace: vf.Trace) -> float:
        return float((trace.last_reply or "").strip() == self.data.answer)

    @vf.metric
    async def length(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply or ""))


class DigitsConfig(vf.TasksetConfig):
    count: int = 5


class DigitsTaskset(vf.Taskset[DigitsTask, DigitsConfig]):
    def load(self):
        for n in range(self.config.count):
            yield DigitsTask(DigitsData(prompt=f"Say {n}", answer=str(n)), self.config.task)


__all__ = ["DigitsTaskset"]
"""
#: two digits are to be copied; then the environment says them the other way round
ENVIRONMENT = """
import verifiers as vf
from datasets import Dataset


class Twice(vf.MultiTurnEnv):
    async def env_response(self, messages, state, **_):
        return [{"role": "user", "content": state["answer"][::-1] + "="}]


def right(completion, answer, **_):
    messages = [one if isinstance(one, dict) else one.model_dump() for one in completion]
    turns = [str(one["content"] or "").strip() for one in messages if one["role"] == "assistant"]
    return sum(turn == wanted for turn, wanted in zip(turns, (answer, answer[::-1]))) / 2


def load_environment(count):
    rows = [{"prompt": [{"role": "user", "content": f"{n:02d}="}], "answer": f"{n:02d}"} for n in range(count)]
    return Twice(dataset=Dataset.from_list(rows), rubric=vf.Rubric(funcs=[right]), max_turns=2)
"""


def test_a_run_learns_what_an_environment_of_verifiers_rewards(
    task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "twice_told.py").write_text(ENVIRONMENT)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")])))
    rows, arguments = tmp_path / "rows.jsonl", json.dumps({"count": 80})
    subprocess.run([PYTHON, HOST, "twice_told", "--arguments", arguments, "--rows", rows], check=True, timeout=patient(120))
    assert len(rows.read_text().splitlines()) == 80
    (tmp_path / "bare.json").write_text(json.dumps([TEMPLATE]))
    (tmp_path / "environment.yaml").write_text(
        f"environment: verifiers:twice_told\npython: {PYTHON}\nargs: {arguments}\ntimeout_s: 60\n"
    )
    count = 25
    command = finished(
        task,
        tmp_path / "run",
        *ONE_PROCESS,
        f"megatron_training.data_path={rows}",
        "megatron_training.map_keys={prompt: prompt, response: answer}",
        "megatron_training.dataset_additional_keys=[labels, prompt, example_id, answer]",
        f"megatron_training.train_iters={count}",
        "megatron_training.save_interval=null",
        "megatron_training.prompt_type=bare",
        f"megatron_training.prompt_type_path={tmp_path / 'bare.json'}",
        "rl_config.multi_turn_enable=true",
        f"rl_config.environment={tmp_path / 'environment.yaml'}",
        "rl_config.max_turns=2",
        "rl_config.max_total_response_length=24",
        "rl_config.verifier_function=[]",
        "rl_config.verifier_weight=[]",
        f"rl_config.save_rollouts_interval={count - 1}",  # of the first iteration and the last
    )
    scores = [record["grpo/score/mean"] for record in command.metrics]
    assert len(scores) == count
    assert statistics.fmean(scores[-5:]) > statistics.fmean(scores[:5]) + 0.05, scores
    # what the library's client asked for is what was drawn, and trainer and engine agree on it
    assert all(record["rollout/log_probs_diff_max"] < 1e-3 for record in command.metrics)
    assert all(1 < record["turns/mean"] <= 2 for record in command.metrics)
    batch = load_file(command.folder / "run" / f"rollouts/iteration_{count:07}.safetensors")
    told = 0
    # an empty answer is an error to the library, and nothing of such a sample trains
    assert not batch["response_mask"][~batch["scored"]].any()
    scored = (value[batch["scored"]] for value in map(batch.get, ("input_ids", "response_mask", "weight_versions")))
    for tokens, is_sampled, versions in zip(*scored):
        width = int((versions >= 0).nonzero().max()) + 1
        first, response = tokens[:3], tokens[3 : 3 + width]
        said = "".join(map(chr, response[~is_sampled[:width]].tolist()))
        told += bool(said)
        assert said in ("", "".join(map(chr, first[:2].flip(0).tolist())) + "=")
        assert torch.equal(versions[:width] == -1, ~is_sampled[:width])
    assert told


class Saying:
    """A model that says a text, whatever it is asked."""

    def __init__(self, text: str) -> None:
        self.text, self.asked, self.sessions = text, list[object](), list[str]()

    async def complete(self, request: TurnRequest) -> list[ChatReply]:
        self.asked.append(request.messages[-1]["content"])
        self.sessions.append(request.session)
        return [ChatReply(ParsedTurn(self.text), True, [1], [2], [-1.0])]


@needs_4
def test_a_taskset_of_release_4_lists_its_rows_and_plays_its_episodes_through_the_endpoint(tmp_path: Path) -> None:
    (tmp_path / "digits_v1.py").write_text(TASKSET)
    listed = subprocess.run(
        [PYTHON_4, HOST, "digits-v1", "--arguments", '{"count": 3}', "--rows", tmp_path / "rows.jsonl"],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        check=False,
        timeout=patient(120),
    )
    assert listed.returncode == 0
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert rows[2] == {"prompt": [{"role": "user", "content": "Say 2"}], "example_id": 2, "answer": "2"} and len(rows) == 3

    models = [Saying("1"), Saying("no")]
    right, wrong = asyncio.run(play(tmp_path, {"count": 3}, rows[1], models))
    assert (right.reward, right.metrics, right.error) == (1.0, {"length": 1.0}, None)
    assert (wrong.reward, wrong.metrics, wrong.error) == (0.0, {"length": 2.0}, None)
    assert [model.asked for model in models] == [["Say 1"]] * 2
    for result, model in ((right, models[0]), (wrong, models[1])):
        (session,) = model.sessions
        assert result.agents == [{"session": session, "name": "agent", "reward": result.reward, "trains": True}]


async def play(
    folder: Path, arguments: dict[str, object], row: dict[str, object], models: list[Saying]
) -> list[_EpisodeResult]:
    """Play an episode of the taskset in `folder` with each model."""
    endpoint = RecordingEndpoint()
    variables = {"PATH": f"{PYTHON_4.parent}:{os.environ['PATH']}", "HOME": str(folder)}
    program = VerifiersProgram("verifiers:digits-v1", arguments, str(PYTHON_4), [str(folder)], variables)
    await endpoint.start()
    await program.start()
    try:
        return [await program.run_episode(row, endpoint.open(model), endpoint.model, patient(200)) for model in models]
    finally:
        await program.close()
        await endpoint.close()


@needs_4
def test_a_simulated_user_of_release_4_does_not_train_and_each_attempt_has_its_reward(tmp_path: Path) -> None:
    (tmp_path / "digits_v1.py").write_text(TASKSET)
    row: dict[str, object] = {"prompt": [{"role": "user", "content": "Say 1"}], "example_id": 1, "answer": "1"}

    class Conversation(Saying):
        """An assistant that says 1, and a user that ends the conversation with its second turn."""

        async def complete(self, request: TurnRequest) -> list[ChatReply]:
            (reply,) = await super().complete(request)
            is_user = "USER" in str(request.messages[0]["content"])
            turns = sum(message["role"] == "assistant" for message in request.messages)
            text = ("###DONE###" if turns else "Which digit?") if is_user else "1"
            return [replace(reply, turn=ParsedTurn(text))]

    model = Conversation("")
    (result,) = asyncio.run(play(tmp_path, {"id": "user-sim", "count": 3}, row, [model]))
    assert isinstance(result.agents, list) and (result.reward, result.error) == (1.0, None)
    runs = {run["name"]: run for run in result.agents}
    earned = {name: (run["reward"], run["trains"]) for name, run in runs.items()}
    assert earned == {"assistant": (1.0, True), "user": (0.0, False)}
    # every turn is of one of both
    user, assistant = runs["user"]["session"], runs["assistant"]["session"]
    assert model.sessions == [user, assistant, user]

    class Guesses(Saying):
        """Attempts with digits that rise."""

        async def complete(self, request: TurnRequest) -> list[ChatReply]:
            (reply,) = await super().complete(request)
            return [replace(reply, turn=ParsedTurn(str(len(self.sessions) - 1)))]

    guesses = Guesses("")
    (result,) = asyncio.run(play(tmp_path, {"id": "best-of-n", "n": 3, "count": 3}, row, [guesses]))
    assert isinstance(result.agents, list) and result.reward == pytest.approx(1 / 3)
    assert {run["session"]: run["reward"] for run in result.agents} == dict(zip(guesses.sessions, (0.0, 1.0, 0.0)))


@needs_4
def test_a_run_whose_roles_are_agents_of_release_4(task: Path, tmp_path: Path) -> None:
    (tmp_path / "digits_v1.py").write_text(TASKSET)
    arguments = json.dumps({"id": "best-of-n", "n": 2, "count": 40})
    rows, variables = tmp_path / "rows.jsonl", {**os.environ, "PYTHONPATH": str(tmp_path)}
    command = [PYTHON_4, HOST, "digits-v1", "--arguments", arguments, "--rows", rows]
    subprocess.run(command, env=variables, check=True, timeout=patient(120))
    (tmp_path / "bare.json").write_text(json.dumps([TEMPLATE]))
    (tmp_path / "environment.yaml").write_text(
        f"environment: verifiers:digits-v1\npython: {PYTHON_4}\nargs: {arguments}\ntimeout_s: 300\n"
        f"env: {{PATH: '{PYTHON_4.parent}:{os.environ['PATH']}', HOME: '{tmp_path}', PYTHONPATH: '{tmp_path}'}}\n"
    )
    run = finished(
        task,
        tmp_path / "run",
        *ONE_PROCESS,
        f"megatron_training.data_path={rows}",
        "megatron_training.map_keys={prompt: prompt, response: answer}",
        "megatron_training.dataset_additional_keys=[labels, prompt, example_id, answer]",
        "megatron_training.train_iters=1",
        "megatron_training.save_interval=null",
        "megatron_training.global_batch_size=4",
        "megatron_training.prompt_type=bare",
        f"megatron_training.prompt_type_path={tmp_path / 'bare.json'}",
        "rl_config.multi_turn_enable=true",
        "rl_config.agent_loop=roles",
        f"rl_config.environment={tmp_path / 'environment.yaml'}",
        "rl_config.mini_batch_size=4",
        "rl_config.n_samples_per_prompt=2",
        "actor_config.micro_batch_size=8",
        "rl_config.max_turns=4",
        "rl_config.max_total_response_length=48",
        "rl_config.verifier_function=[]",
        "rl_config.verifier_weight=[]",
    )
    (metrics,) = run.metrics
    assert metrics["turns/mean"] == 2 and "roles/agent/reward" in metrics and metrics["rollout/log_probs_diff_max"] < 1e-3
