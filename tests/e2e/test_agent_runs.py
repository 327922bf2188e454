"""`train` with tools: the run file's keys lead from a tool file to rows in which no token of a tool trains, in every mode."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from grpo_command import ONE_PROCESS, Command, finished, overrides, preprocess_prompts, running
from measured_figures import select_computed
from patience import patient
from safetensors.torch import load_file
from test_rollout_modes import IN_TURN, consumed, responses, same_figures

from mindspeed_rl.config.run_files import find_project_configs

HERE = Path(__file__).parent
SERVER = [
    *ONE_PROCESS,
    "rl_config.use_integrated_worker=false",
    "rl_config.rollout_resource.num_npus=1",
    f"generate_config.vllm_server_timeout={patient(100):.0f}",
]
#: whatever is said stands as it is; tools may speak, and the digits they give are to be copied
TEMPLATE = {
    "name": "bare",
    "format_assistant": {"slots": ["{{content}}", ["eos_token"]]},
    "format_observation": {"slots": ["{{content}}="]},
    "format_tools": {"tool_format": "qwen"},
}


@pytest.fixture(scope="module")
def prompts(task: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The prefix of the task's preprocessed prompts."""
    return preprocess_prompts(task, tmp_path_factory.mktemp("prompts") / "prompts")


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["in process", "one_step_off", "async"])
def test_a_run_with_a_function_as_its_tool_trains_the_sampled_tokens(
    task: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")]))
    (tmp_path / "bare.json").write_text(json.dumps([TEMPLATE]))
    (tmp_path / "tools.yaml").write_text("tools:\n  - agent_plugins:flipped\n")
    where = ONE_PROCESS if mode == "in process" else [*SERVER, IN_TURN, f"rl_config.trainer_mode={mode}"]
    command = finished(
        task,
        tmp_path / "run",
        *where,
        *(["rl_config.max_off_policy_threshold=1"] if mode == "async" else []),
        f"megatron_training.data_path={prompts}",
        "megatron_training.train_iters=3",
        "megatron_training.prompt_type=bare",
        f"megatron_training.prompt_type_path={tmp_path / 'bare.json'}",
        "rl_config.multi_turn_enable=true",
        f"rl_config.tool_config_path={tmp_path / 'tools.yaml'}",
        "rl_config.tool_parser_format=agent_plugins:EveryTurn",
        "rl_config.max_turns=2",
        "rl_config.max_total_response_length=24",
        "rl_config.verifier_function=[agent_plugins:called]",
        "rl_config.save_rollouts_interval=1",
        "rl_config.log_completions=true",
    )
    folder = command.folder / "run"
    assert len(command.metrics) == 3
    assert all(record["tool_call_num/max"] == 1 and 0 < record["turns/mean"] <= 2 for record in command.metrics)
    num_iteration = 3
    batch = load_file(folder / f"rollouts/iteration_{num_iteration:07}.safetensors")
    mask = batch["response_mask"]
    prompt = 3  # two digits and "="
    told = 0
    age = 0 if mode == "in process" else 1
    for row in range(len(mask)):
        width = int((batch["weight_versions"][row] >= 0).nonzero().max()) + 1
        tokens = batch["input_ids"][row, prompt : prompt + width]
        sampled = mask[row, :width]
        versions = batch["weight_versions"][row, :width]
        assert not batch["rollout_log_probs"][row, :width][~sampled].any()
        assert (versions[~sampled] == -1).all() and (versions[sampled] >= num_iteration - 1 - age).all()
        if mode == "one_step_off":
            assert (versions[sampled] == num_iteration - 2).all()
        # where the same weights drew and train, their log-probs are the same
        fresh = versions == num_iteration - 1
        ours, theirs = (batch[name][row, :width][fresh] for name in ("log_probs", "rollout_log_probs"))
        assert torch.allclose(ours, theirs, atol=1e-3)
        said = "".join(map(chr, tokens[~sampled].tolist()))
        if said:
            told += 1
            first = "".join(map(chr, tokens[: int((~sampled).nonzero()[0]) - 1].tolist()))
            assert said == f"{first[::-1]}=" if first.isdigit() else said.startswith("Error")
    assert told


# --- killed in the middle -------------------------------------------------------------------------------------------------

TURNS = [
    "rl_config.multi_turn_enable=true",
    "rl_config.environment=agent_plugins:HeldUp",
    "rl_config.max_total_response_length=24",
    "rl_config.use_remove_padding=true",
    "rl_config.log_completions=true",
    "rl_config.log_completions_keep=1000",
    "rl_config.rule_reward=false",
    "rl_config.verifier_function=[]",
    "rl_config.verifier_weight=[]",
    "actor_config.lr_decay_style=constant",
    "megatron_training.train_iters=4",
]


def killed_and_resumed(task: Path, folder: Path, hold: Path, *keys: str) -> Command:
    """A run that was killed while samples were between two turns, and then ended by the same command."""
    with running(task, folder, *keys) as command:
        command.wait_until(lambda: len(command.metrics) >= 2 and list((folder / "save").glob("iter_*2*")))
        hold.touch()
        waits = hold.with_suffix(".waits")
        command.wait_until(lambda: waits.exists() and len(waits.read_text().splitlines()) >= 4)
        before = command.metrics
        os.kill(command.process.pid, signal.SIGKILL)
        command.process.wait()
        assert command.leftovers() == []
    assert 2 <= len(before) < 4
    hold.unlink()
    return finished(task, folder, *keys)


@pytest.fixture
def hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file; while it is there, no environment answers."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("AGENT_HOLD", str(tmp_path / "hold"))
    return tmp_path / "hold"


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["in process", "one_step_off"])
def test_a_run_that_is_killed_between_turns_goes_on_as_if_it_had_not_been(
    task: Path, tmp_path: Path, hold: Path, mode: str
) -> None:
    where = ONE_PROCESS if mode == "in process" else [*SERVER, IN_TURN, f"rl_config.trainer_mode={mode}"]
    whole = finished(task, tmp_path / "whole", *where, *TURNS)
    command = killed_and_resumed(task, tmp_path / "parts", hold, *where, *TURNS)
    assert [record["iteration"] for record in command.metrics] == [1, 2, 3, 4]
    # a killed run may have logged an iteration that it had not saved, and which is then made again
    assert responses(command)[-32:] == responses(whole)[-32:]
    assert set(responses(command)) == set(responses(whole))
    for metric, expected in zip(command.metrics, whole.metrics, strict=True):
        if mode == "in process":
            assert select_computed(metric) == select_computed(expected)
        else:
            same_figures(metric, expected)
    assert whole.metrics[-1]["turns/max"] == 2.0


@pytest.mark.slow
def test_an_asynchronous_run_that_is_killed_between_turns_loses_no_prompt(task: Path, tmp_path: Path, hold: Path) -> None:
    keys = ["rl_config.trainer_mode=async", "rl_config.max_off_policy_threshold=1"]
    command = killed_and_resumed(task, tmp_path, hold, *SERVER, *keys, *TURNS)
    records = consumed(command)
    assert [record["iteration"] for record in records] == [1, 2, 3, 4]
    taken = [prompt["prompt"] for record in records for prompt in record["prompts"]]
    assert len(set(taken)) == len(taken) == 4 * 8
    for record in records:
        versions = [span[0] for prompt in record["prompts"] for sample in prompt["samples"] for span in sample["versions"]]
        assert max(record["version"] - version for version in versions) <= 1
    assert all(record["turns/max"] == 2.0 for record in command.metrics)


# --- next to the run file -------------------------------------------------------------------------------------------------

WORLDS = '''
class Closed:
    """Gives a point for an answer; raises for half of the prompts."""

    def reset(self, task):
        if int(task["label"]) % 2:
            raise ValueError("the world of odd numbers is closed")
        return []

    def step(self, messages):
        return [], 1.0, True
'''


def test_an_environment_next_to_the_run_file_is_found_and_its_exceptions_are_shown(task: Path, tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "worlds.py").write_text(WORLDS)
    shutil.copy(find_project_configs() / "grpo_tiny_cpu.yaml", mine / "run.yaml")
    # the console script has not even the working directory on its path
    script = [str(Path(sys.executable).with_name("mindspeed-rl")), "train", "--config-name", str(mine / "run.yaml")]
    keys = [
        *TURNS[:1],
        "rl_config.environment=worlds:Closed",  # all other keys of several turns are left to their defaults
        *TURNS[4:9],
        "megatron_training.train_iters=1",
        "rl_config.save_rollouts_interval=0",
    ]
    done = subprocess.run(
        [*script, *overrides(task, tmp_path), *ONE_PROCESS, *keys],
        cwd=tmp_path,
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=patient(300),
    )
    assert done.returncode == 0, done.stderr[-3000:]
    reason = "environment: ValueError: the world of odd numbers is closed"
    assert reason in done.stderr and reason in (tmp_path / "run" / "run.log").read_text()
    lines = [json.loads(line) for line in (tmp_path / "run" / "completions.jsonl").read_text().splitlines()]
    failed = [line for line in lines if line["extra"]["state"] == "failed"]
    assert failed and len(failed) < len(lines)
    for line in lines:
        assert (line in failed) == bool(int(line["extra"]["label"]) % 2)
        assert (line["reward"], line["extra"].get("error")) == ((None, reason) if line in failed else (1.0, None))


# --- a program of the user ------------------------------------------------------------------------------------------------

PROGRAM = """
import json, os, urllib.error, urllib.request

# ids that the model does not have would end its engine: the request fails, and nothing else
for prompt in ([999999999], [1, 2**70], [-1], [2**63 - 1]):
    body = json.dumps({"prompt": prompt, "max_tokens": 2}).encode()
    url = os.environ["OPENAI_BASE_URL"] + "/completions"
    try:
        urllib.request.urlopen(urllib.request.Request(url, body, {"content-type": "application/json"}))
    except urllib.error.HTTPError as error:
        assert error.code == 400, error.read()
    else:
        raise AssertionError("ids outside of the vocabulary were taken")

def post(messages, **more):
    body = json.dumps({"model": "policy", "messages": messages, **more}).encode()
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    request = urllib.request.Request(url, body, {"content-type": "application/json"})
    return json.load(urllib.request.urlopen(request))["choices"]

label = json.load(open(os.environ["AGENT_TASK"]))["label"]
question = [{"role": "user", "content": f"{label}="}]
(first,) = post(question)
said = first["message"]
for reply, count in (("7", 1), ("8", 2)):
    post([*question, said, {"role": "tool", "content": reply}], n=count)
print(json.dumps({"reward": float(said["content"] == label)}))
"""


@pytest.mark.slow
def test_a_program_of_the_user_is_trained_with_all_its_branches(task: Path, tmp_path: Path) -> None:
    (tmp_path / "bare.json").write_text(json.dumps([TEMPLATE]))
    (tmp_path / "program.py").write_text(PROGRAM)
    command = finished(
        task,
        tmp_path / "run",
        *ONE_PROCESS,
        "rl_config.multi_turn_enable=true",
        f"rl_config.agent={{command: [{sys.executable}, {tmp_path / 'program.py'}], timeout_s: 100}}",
        *TURNS[4:9],
        "megatron_training.prompt_type=bare",
        f"megatron_training.prompt_type_path={tmp_path / 'bare.json'}",
        "megatron_training.train_iters=2",
        "megatron_training.save_interval=null",
        "rl_config.use_remove_padding=true",
        "rl_config.use_prefix_grouper=true",
    )
    assert len(command.metrics) == 2
    for record in command.metrics:
        assert record["turns/mean"] == 4 and record["branches/mean"] == 2 and record["rollout/failed_trajectories"] == 0
        assert record["rollout/log_probs_diff_max"] < 1e-3 and record["actor/computed_tokens_fraction"] <= 1
    line = json.loads((command.folder / "run" / "completions.jsonl").read_text().splitlines()[0])
    assert [event["parent"] for event in line["events"]] == [None, 0, 0, 0]
