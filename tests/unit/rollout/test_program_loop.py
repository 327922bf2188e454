"""Programs that ask for turns: what they say is told, what was drawn stays, and whatever they do ends no run."""

from __future__ import annotations

import asyncio
import json
import socket
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest
import yaml
from aiohttp import web
from test_agent_loops import END, PROMPT, SAMPLING, TOKENIZER, Speaker, settings, told
from test_in_process import Stepped

from mindspeed_rl.config.keys.rl import AgentKeys
from mindspeed_rl.data.templates import load_template
from mindspeed_rl.data.turns import ChatTurns
from mindspeed_rl.rollout.agents import load_agent_loop
from mindspeed_rl.rollout.agents.loop import AgentRunner, Task
from mindspeed_rl.rollout.in_process import InProcessEngine
from mindspeed_rl.rollout.requests import Completion
from mindspeed_rl.rollout.trajectory import Trajectory
from mindspeed_rl.tools.agent_program import check_program

STANDIN = Path(__file__).parents[1] / "tools" / "verifiers_standin"
ALONE = ChatTurns(load_template("qwen"), TOKENIZER)
QUESTION = [{"role": "user", "content": "6 times 7?"}]


@pytest.fixture
def with_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(STANDIN))


def played(folder: Path, rows: Sequence[dict[str, Any]], *texts: str, **more: Any) -> list[Trajectory]:
    """Episodes of the stand-in's environment beside each other, each with a speaker of its own."""
    file = folder / "guess.yaml"
    file.write_text(yaml.safe_dump({"environment": "verifiers:guess", "args": {"number": 2}, **more}))

    async def run() -> list[Trajectory]:
        agents = AgentRunner(load_agent_loop("environment")(settings(turns=ALONE, environment=str(file))))
        await agents.start()
        try:
            tasks = [Task(PROMPT, SAMPLING, 5, "2", row) for row in rows]
            return list(await asyncio.gather(*(agents.sample(Speaker(texts), task) for task in tasks)))
        finally:
            await agents.close()

    return asyncio.run(asyncio.wait_for(run(), 180))


def test_an_episode_is_a_trajectory_with_the_programs_reward(with_library: None, tmp_path: Path) -> None:
    result = played(tmp_path, [{"prompt": QUESTION, "example_id": number} for number in range(3)], "1", "2")
    for trajectory in result:
        (sequence,) = trajectory.sequences
        assert sequence.prompt_ids == ALONE.render(QUESTION)
        assert TOKENIZER.decode(trajectory.token_ids[:2]) == "1<|im_end|>" and "No." in told(trajectory)
        assert trajectory.final_reward == 0.5 and trajectory.finish == "stop" and not trajectory.failure
        assert trajectory.metrics == {"turns": 2.0, "branches": 0.0, "environment_turns": 2.0}
        sampled = [token for token, is_sampled in zip(trajectory.token_ids, trajectory.sampled) if is_sampled]
        assert TOKENIZER.decode(sampled) == "1<|im_end|>2<|im_end|>"


def test_what_a_program_does_wrong_fails_its_own_sample(with_library: None, tmp_path: Path) -> None:
    (late,) = played(tmp_path, [{"prompt": "hang"}], "2", timeout_s=0.5)
    assert "the episode took longer than 0.5 s" in late.failure
    without, good = played(tmp_path, [{}, {"prompt": QUESTION}], "2")
    assert "no column 'prompt'" in without.failure and "dataset_additional_keys" in without.failure
    assert good.final_reward == 1.0 and not good.failure


class Stubborn(Stepped):
    """Stands where vLLM's engine does, and says 1 whatever it is told."""

    def check_prompt_length(self, num_tokens: int) -> None:
        pass

    def step(self) -> list[tuple[str, Completion]]:
        self.steps.append(len(self._running))
        ended = []
        for name, (*_, tokens) in list(self._running.items()):
            tokens.append(END if tokens else TOKENIZER.encode("1")[0])
            if len(tokens) == 2:
                ended.append((name, Completion(list(tokens), [-1.0, -1.0], truncated=False)))
                del self._running[name]
        return ended


def test_rollouts_of_a_training_worker_are_played_one_after_the_other(with_library: None, tmp_path: Path) -> None:
    file = tmp_path / "guess.yaml"
    file.write_text(yaml.safe_dump({"environment": "verifiers:guess", "args": {"number": 2}}))
    stepped: Any = Stubborn()
    engine = InProcessEngine(stepped)
    agents = AgentRunner(load_agent_loop("environment")(settings(turns=ALONE, environment=str(file))))
    engine.run_without_steps(agents.start)

    async def rollout() -> list[Trajectory]:
        tasks = [Task(PROMPT, SAMPLING, seed, "2", {"prompt": QUESTION}) for seed in range(4)]
        return list(await asyncio.gather(*(agents.sample(engine, task) for task in tasks)))

    for _ in range(2):
        result = engine.run(rollout)
        assert result is not None
        # three turns, none of them right, and two tokens a turn
        assert [trajectory.final_reward for trajectory in result] == [pytest.approx(1 / 3)] * 4
        assert all(
            sum(trajectory.sampled) == 6 and trajectory.metrics["turns"] == 3 and not trajectory.failure
            for trajectory in result
        )
    engine.run_without_steps(agents.close)
    engine._loop.close()
    assert sum(stepped.steps) == 2 * 4 * 3 * 2 and all(stepped.steps)  # no step without work


# --- programs of rl_config.agent ------------------------------------------------------------------------------------------

#: does what its row says, after a turn of the model
PLAYER = """
import json, os, pathlib, subprocess, sys, time, urllib.error, urllib.request

def post(path, body):
    data = json.dumps(body).encode()
    url = path if path.startswith("http") else f"{os.environ['OPENAI_BASE_URL']}/{path}"
    request = urllib.request.Request(url, data, {"content-type": "application/json"})
    return json.load(urllib.request.urlopen(request))

reward_file = pathlib.Path(os.environ["AGENT_REWARD_URL_FILE"])
reward_url = reward_file.read_text()
task = json.loads(pathlib.Path(os.environ["AGENT_TASK"]).read_text())
do, question = task["do"], sys.argv[1]
if do != "nothing":
    made = post("chat/completions", {"model": os.environ["AGENT_MODEL"], "messages": [{"role": "user", "content": question}]})
    answer = made["choices"][0]["message"]["content"]
    print(f"the answer is {answer}")
if do == "file":
    pathlib.Path(os.environ["AGENT_RESULT"]).write_text(json.dumps({"reward": 0.5, "metrics": {"a/b": 2}, "output": "mine"}))
elif do == "line":
    print(json.dumps({"reward": -1.5}))
elif do == "http":
    post(reward_url, {"reward": 0.25}), post(reward_url, {"reward": 0.5, "id": made["id"]})
elif do == "policy":  # what a command of the model can find
    found = [reward_file.exists(), *(reward_url in place for place in (str(os.environ), json.dumps(task)))]
    try:
        post("reward", {"reward": 100})
    except urllib.error.HTTPError as error:
        found.append(error.code)
    try:
        post(reward_url.replace("/reward", "/chat/completions"), {"messages": []})
    except urllib.error.HTTPError as error:
        found.append(error.code)
    print(json.dumps({"reward": None, "output": json.dumps(found)}))
elif do == "bool":
    print('{"reward": true}')
elif do == "huge":
    print('{"reward": 1e308}')
elif do == "metric":
    print('{"reward": 1, "metrics": {"a": 1e308}}')
elif do == "metrics":
    print(json.dumps({"reward": 1, "metrics": {f"m{i}": 1 for i in range(101)}}))
elif do == "name":
    print(json.dumps({"reward": 1, "metrics": {"x\\ty": 1}}))
elif do == "two":
    print('{"reward": 1, "metrics": {"a/b": 1, "a_b": 2}}')
elif do == "raise":
    raise KeyError("no answer")
elif do == "error":
    pathlib.Path(os.environ["AGENT_RESULT"]).write_text(json.dumps({"error": "gave up"}))
elif do == "nan":
    print('{"reward": NaN}')
elif do == "memory":
    bytearray(1 << 30)
elif do in ("hang", "orphan"):
    child = subprocess.Popen(["sleep", "600"], start_new_session=True)
    pathlib.Path(os.environ["MARKS"], str(child.pid)).touch()
    time.sleep(600 if do == "hang" else 0)
elif do == "write":
    pathlib.Path("answer.txt").write_text(answer)
"""


def programmed(folder: Path, rows: Sequence[dict[str, Any]], *texts: str, **keys: Any) -> list[Trajectory]:
    """Samples of these rows, which a program plays at once, each with a speaker of its own."""
    (folder / "player.py").write_text(PLAYER)
    (folder / "marks").mkdir()
    if "url" not in keys:
        keys = {"command": [sys.executable, str(folder / "player.py"), "{question}?"], "env": {"MARKS": "{marks}"}} | keys
    marks = {"question": "6 times 7", "marks": str(folder / "marks")}

    async def run() -> list[Trajectory]:
        agents = AgentRunner(load_agent_loop("program")(settings(turns=ALONE, agent=AgentKeys(**keys))))
        await agents.start()
        try:
            tasks = [Task(PROMPT, SAMPLING, 5, "42", marks | row) for row in rows]
            return list(await asyncio.gather(*(agents.sample(Speaker(texts), task) for task in tasks)))
        finally:
            await agents.close()

    before = {process.pid for process in psutil.Process().children(recursive=True)}
    result = asyncio.run(asyncio.wait_for(run(), 180))
    assert {process.pid for process in psutil.Process().children(recursive=True)} == before
    return result


def test_a_command_reports_its_reward_in_a_file_a_line_or_a_request(tmp_path: Path) -> None:
    result = programmed(tmp_path, [{"do": "file"}, {"do": "line"}, {"do": "http"}, {"do": "none"}], "42")
    assert [trajectory.final_reward for trajectory in result] == [0.5, -1.5, 0.25, None] and not any(
        trajectory.failure for trajectory in result
    )
    assert [trajectory.turn_rewards for trajectory in result] == [(None,), (None,), (0.5,), (None,)]
    assert [trajectory.reward_columns()["output"] for trajectory in result] == [
        "mine",
        'the answer is 42\n{"reward": -1.5}',
        *["the answer is 42"] * 2,
    ]
    assert result[0].metrics["agent_a_b"] == 2
    for trajectory in result:
        assert TOKENIZER.decode(list(trajectory.sequences[0].prompt_ids)).count("6 times 7?") == 1
        assert TOKENIZER.decode(trajectory.token_ids) == "42<|im_end|>" and all(trajectory.sampled)


def test_the_url_of_rewards_is_gone_before_the_model_says_anything_and_the_base_url_takes_none(tmp_path: Path) -> None:
    (result,) = programmed(tmp_path, [{"do": "policy"}], "42")
    # neither file nor variable nor task has it; the one URL takes no rewards, the other one serves no turns
    assert json.loads(result.output or "") == [False, False, False, 403, 403]
    assert result.final_reward is None and result.turn_rewards == (None,)


def test_reports_with_numbers_or_names_that_no_metric_can_have_fail_their_samples(tmp_path: Path) -> None:
    reasons = {
        "bool": "the last line: reward is 'True', but must be a finite number",
        "huge": "the last line: reward is '1e+308', but must be a finite number",
        "metric": "the last line: metrics: a is '1e+308', but must be a finite number",
        "metrics": "the last line: metrics has 101 names, but may have at most 100",
        "name": "the last line: metrics: a name is 'x\\ty', but must be 1 to 100 printable characters",
        "two": "the last line: metrics: two names are 'a_b'",
    }
    results = programmed(tmp_path, [{"do": do} for do in reasons], "42")
    for reason, result in zip(reasons.values(), results, strict=True):
        assert reason in result.failure and result.final_reward is None and set(result.metrics) == {"turns", "branches"}


def test_with_a_grader_no_posted_reward_counts_and_its_crash_or_silence_is_a_zero(tmp_path: Path) -> None:
    for number, grader in enumerate((["sh", "-c", "kill -9 $$"], ["false"], ["true"])):
        (folder := tmp_path / str(number)).mkdir()
        (result,) = programmed(folder, [{"do": "http"}], "42", grader=grader)
        assert (result.final_reward, result.turn_rewards) == (float(grader == ["true"]), (None,)) and not result.failure
        assert [event.reward for event in result.events] == [None]


def test_a_program_that_fails_hangs_or_takes_too_much_fails_its_sample_and_leaves_nothing(tmp_path: Path) -> None:
    rows = [
        {"do": "raise"},
        {"do": "error"},
        {"do": "nan"},
        {"do": "nothing"},
        {"do": "hang"},
        {"do": "memory"},
        {"do": "orphan"},
    ]
    *failed, orphan, unknown = programmed(tmp_path, [*rows, {"question": None}], "42", timeout_s=15, memory_gib=0.5)
    reasons = [
        "it ended with status 1: KeyError: 'no answer'",
        "gave up",
        "the last line: reward is 'nan', but must be a finite number",
        "it ended before it requested a turn",
        "it took longer than 15 s",
        "it ended with status 1: MemoryError",
    ]
    for trajectory, reason in zip(failed, reasons, strict=True):
        assert reason in trajectory.failure and trajectory.failure.startswith("agent: "), trajectory.failure
        assert trajectory.final_reward is None and trajectory.reward_columns()["trajectory_failure"] == trajectory.failure
    assert "rl_config.agent.command names {question}, but the row has" in unknown.failure and not orphan.failure
    children = [int(path.name) for path in (tmp_path / "marks").iterdir()]
    assert len(children) == 2 and not any(psutil.pid_exists(child) for child in children)


@pytest.mark.parametrize(
    ("grader", "reward", "failure"),
    [
        (["grep", "-qx", "{label}", "answer.txt"], 1.0, ""),
        (["grep", "-qx", "41", "answer.txt"], 0.0, ""),
        (["sh", "-c", 'echo tests: 3; echo "{{\\"reward\\": 0.75}}"'], 0.75, ""),
        (["sh", "-c", 'echo "{{\\"reward\\": null, \\"error\\": \\"no judge\\"}}"'], None, "no judge"),
        (["sh", "-c", "echo {proof}"], 1.0, ""),
        (["sh", "-c", "echo {proof}; exit 1"], 0.0, ""),
        (["sh", "-c", ": {proof}; echo done"], 0.0, ""),
        (["sh", "-c", 'echo "{{\\"reward\\": 0.75, \\"proof\\": \\"{proof}\\"}}"'], 0.75, ""),
        (["sh", "-c", ': {proof}; echo "{{\\"reward\\": 0.75}}"; echo "{{\\"reward\\": 0.5, \\"proof\\": 1}}"'], 0.0, ""),
    ],
)
def test_a_grader_reads_what_the_program_left_in_its_folder(
    tmp_path: Path, grader: list[str], reward: float | None, failure: str
) -> None:
    (result,) = programmed(tmp_path, [{"do": "write"}], "42", grader=grader)
    assert result.final_reward == reward and failure in result.failure and bool(failure) == bool(result.failure)


@pytest.mark.parametrize("status", [2, 3, 5, 126, 127, 255])
def test_a_grader_that_code_of_the_sample_ends_gives_a_zero_and_a_line(
    tmp_path: Path, status: int, caplog: pytest.LogCaptureFixture
) -> None:
    # pytest ends with 2 where a file of the sample is not Python, and code that it imports may end it with any status
    (result,) = programmed(tmp_path, [{"do": "write"}], "42", grader=["sh", "-c", f"echo broken >&2; exit {status}"])
    assert (result.final_reward, result.failure, result.metrics["agent_grader_errors"]) == (0.0, "", 1.0)
    assert f"the grader: it ended with status {status}: broken; the reward is 0" in caplog.text


def test_a_service_is_called_for_each_sample(tmp_path: Path) -> None:
    async def play(request: web.Request) -> web.Response:
        call = await request.json()
        if call["task"]["do"] == "refuse":
            return web.Response(status=503, text="too busy")
        async with openai.AsyncOpenAI(base_url=call["base_url"], api_key=call["api_key"]) as client:
            question: Any = [{"role": "user", "content": call["task"]["question"]}]
            made = await client.chat.completions.create(model=call["model"], messages=question)
        return web.json_response({"reward": float(made.choices[0].message.content == "42"), "output": "done"})

    listening = socket.socket()
    listening.bind(("127.0.0.1", 0))
    port = listening.getsockname()[1]

    def serve() -> None:
        app = web.Application()
        app.router.add_post("/play", play)
        web.run_app(app, sock=listening, print=None, handle_signals=False, loop=asyncio.new_event_loop())

    threading.Thread(target=serve, daemon=True).start()
    good, bad = programmed(tmp_path, [{"do": "play"}, {"do": "refuse"}], "42", url=f"http://127.0.0.1:{port}/play")
    assert (good.final_reward, good.output, good.failure) == (1.0, "done", "")
    assert "replied with status 503: too busy" in bad.failure


def test_a_wrong_program_is_found_before_workers_start() -> None:
    with pytest.raises(ValueError, match="rl_config.agent.command: there is no program 'no-such-agent'"):
        check_program(AgentKeys(command=["no-such-agent", "{prompt}"]))
    with pytest.raises(ValueError, match="rl_config.agent.url is 'localhost:80'"):
        check_program(AgentKeys(url="localhost:80"))
    check_program(AgentKeys(command=["{program}"], grader=["true"]))


def test_programs_and_graders_get_no_variable_of_the_run_unless_it_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "DATABASE_URL", "http_proxy", "PGPASSWORD", "MY_SETTING"):
        monkeypatch.setenv(name, "planted")
    look = "import json, os, pathlib; pathlib.Path(os.environ['MARKS'], '{}').write_text(json.dumps(dict(os.environ)))"
    command, grader = ([sys.executable, "-c", look.format(name)] for name in ("program", "grader"))
    env = {"MARKS": "{marks}", "NAMED": "<${HF_TOKEN}>"}
    programmed(tmp_path, [{}], "42", command=command, grader=grader, env=env)
    for name in ("program", "grader"):
        found = json.loads((tmp_path / "marks" / name).read_text())
        assert found.pop("NAMED") == "<planted>" and "PATH" in found
        assert "planted" not in str(found)
