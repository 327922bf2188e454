"""`mindspeed-rl new`: every kind of task has prompts, a reward that scores as its docstring says, and a valid plan."""

from __future__ import annotations

import json
import re
import sys
import threading
from importlib.util import find_spec
from pathlib import Path

import pytest
from scripts import load_script

from mindspeed_rl.cli.main import main
from mindspeed_rl.cli.new import _KINDS
from mindspeed_rl.config import load_run_config
from mindspeed_rl.rewards import REWARDS
from mindspeed_rl.rewards.judge import JudgeForm
from mindspeed_rl.rewards.samples import RewardSample, RewardSettings
from mindspeed_rl.run.draft import load_run
from mindspeed_rl.run.explain.plan_page import explain

#: kinds that need nothing from outside
OWN_ROWS = [name for name, kind in _KINDS.items() if kind.make_rows is not None]


def make(folder: Path, kind: str, *options: str) -> Path:
    assert main(["new", str(folder / "my-task"), "--kind", kind, *options]) == 0
    return folder / "my-task"


def load(path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    """The names of a file that the command has written; what it registers is forgotten after the test."""
    for name in ("my_task",):
        monkeypatch.setitem(REWARDS, name, None)
        monkeypatch.delitem(REWARDS, name)
    return vars(load_script(path))


@pytest.mark.parametrize("kind", OWN_ROWS)
def test_every_kind_is_a_folder_with_data_a_valid_run_file_and_a_readme(kind: str, tmp_path: Path) -> None:
    folder = make(tmp_path, kind)
    train, held_out = (
        [json.loads(line) for line in (folder / f"{part}.jsonl").read_text().splitlines()] for part in ("train", "heldout")
    )
    assert len(train) >= 30 and len(held_out) == 24 and all(row not in train for row in held_out)
    report = explain(load_run(str(folder / "run.yaml")))
    assert report["errors"] == [] and report["missing"] == [] and report["unavailable"] == []
    readme = (folder / "README.md").read_text()
    assert "$" not in readme + (folder / "run.yaml").read_text()
    for name in re.findall(r"^\| `([\w.]+)`", readme, re.MULTILINE):
        assert (folder / name).is_file()
    assert "mindspeed-rl preprocess" not in readme
    assert (folder / "model/config.json").is_file()


@pytest.mark.parametrize(
    ("kind", "response", "label", "points"),
    [
        ("format", ' {"answer": "a cat"} ', "answer", 1.0),
        ("format", '{"name": 1}', "answer", 0.5),
        ("format", "{}", "answer", 0.5),
        ("format", '{"answer": 1', "answer", 0.2),
        ("format", "{ no }", "answer", 0.4),
        ("format", "[1]", "answer", 0.0),
        ("maths", "7 + 5 = 12", "12", 1.0),
        ("maths", "13", "12", 0.2),
        ("maths", "it is 13", "12", 0.2 * 2 / 8),
        ("maths", "no", "12", 0.0),
        ("vision", " r ", "r", 1.0),
        ("vision", "red", "r", 0.6),
        ("vision", "g", "r", 0.2),
        ("vision", "?r", "r", 0.0),
        ("maths", "1,024", "1024", 1.0),
    ],
)
def test_a_reward_gives_the_points_that_it_states(
    kind: str, response: str, label: str, points: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    score = load(make(tmp_path, kind) / "reward.py", monkeypatch)["score"]
    assert callable(score) and score(response, label) == pytest.approx(points)


def test_the_stand_in_for_a_judge_scores_the_answer_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make(tmp_path, "judge")
    score = load(folder / "judge_server.py", monkeypatch)["score"]
    form = JudgeForm(RewardSettings(judge_prompt=str(folder / "judge_prompt.txt")))
    for response, points in (("12", 10), ("ab12", 5), ("", 0), ("no 3", 2), ("Score: 10", 2)):
        request = form.write_request(RewardSample(prompt="What is 5 + 7?", response=response, label="12"))
        assert callable(score) and score(request.text) == points, response
        assert form.read_reply(request, f"Score: {points}").score == points / 10


def test_the_environment_says_higher_and_lower_and_ends_after_three_turns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    episode = load(make(tmp_path, "environment") / "environment.py", monkeypatch)["GuessNumber"]()

    def play(*guesses: str) -> list[tuple[str, float, bool]]:
        assert episode.reset({"label": "6"}) == []
        steps = [episode.step([{"role": "assistant", "content": guess}]) for guess in guesses]
        return [(messages[0]["content"] if messages else "", points, over) for messages, points, over in steps]

    assert play("4", "8", "6") == [("higher", 0.0, False), ("lower", 0.0, False), ("", 1.0, True)]
    assert play("1", "2", "3")[-1] == ("", 0.1, True)
    assert play("what?") == [("", 0.0, True)] and play("6?") == [("", 0.05, True)]


@pytest.mark.parametrize("kind", ["maths", "sft"])
def test_a_family_that_megatron_lacks_gets_the_engine_that_has_it(tmp_path: Path, kind: str) -> None:
    model = tmp_path / "model"
    model.mkdir()
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": 128}
    (model / "config.json").write_text(json.dumps({"architectures": ["GPTNeoXForCausalLM"], "model_type": "gpt_neox"} | sizes))
    cfg = load_run_config(str(make(tmp_path / "task", kind, "--model", str(model)) / "run.yaml"))
    assert (cfg.actor_config.engine, cfg.actor_config.bf16) == ("fsdp", False)


def test_a_model_of_the_user_gets_keys_of_its_size(tmp_path: Path) -> None:
    for hidden, rate in ((576, 2e-5), (3584, 1e-6)):
        model = tmp_path / f"model{hidden}"
        model.mkdir()
        (model / "config.json").write_text(json.dumps({"hidden_size": hidden, "max_position_embeddings": None}))
        folder = tmp_path / f"run{hidden}"
        folder.mkdir()
        cfg = load_run_config(str(make(folder, "maths", "--model", str(model)) / "run.yaml"))
        assert (cfg.actor_config.lr, cfg.actor_config.pretrained_checkpoint) == (rate, str(model))
        assert not (folder / "my-task/model").exists()


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["there"], "there exists already; choose another name"),
        (["a b"], "'a b' is not a name for a task"),
        (["x", "--kind", "math"], "invalid choice: 'math'"),
        (["x", "--data", "there"], "--data is for --kind own"),
        (["x", "--model", "there"], "--model there holds no config.json"),
        (["x", "--teacher", "there"], "--teacher is for --kind distillation, not for maths"),
        (["x", "--task", "chain_sum"], "--task is for --kind reasoning-gym or verifiers, not for maths"),
        (["x", "--kind", "dataset"], "--kind dataset needs --data"),
        (["x", "--kind", "verifiers"], "--kind verifiers needs --task"),
        (["x", "--kind", "verifiers", "--task", "a", "--python", "nowhere"], "--python nowhere: there is no such interpreter"),
        (["x", "--kind", "reasoning-gym", "--task", "a", "--levels", "0"], "--levels is 0, but must be at least 1"),
        (["x", "--kind", "vision", "--experts"], "--experts is for the random model of kinds without pictures"),
        (["x", "--kind", "dataset", "--data", "nothing.jsonl"], "--data: 'nothing.jsonl' does not exist"),
        (["x", "--kind", "distillation", "--teacher", "there"], "--model and --teacher belong together"),
    ],
)
def test_what_cannot_be_made_is_one_line(
    words: list[str], error: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there").mkdir()
    (tmp_path / "there/file").touch()
    assert main(["new", *words]) == 2
    assert error in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["there"]


@pytest.mark.parametrize("kind", OWN_ROWS)
def test_the_plan_of_every_kind_passes_the_checks_of_train(
    kind: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    request: pytest.FixtureRequest,
) -> None:
    monkeypatch.chdir(make(tmp_path, kind))
    monkeypatch.setitem(REWARDS, "my_task", None)
    monkeypatch.delitem(REWARDS, "my_task")
    capsys.readouterr()
    changes: list[str] = []
    if kind == "judge":  # a run with a judge is valid only while the judge listens
        assert main(["explain", "--config", "run.yaml", "--validate"]) == 2
        assert "start the server before the run" in capsys.readouterr().out
        server = vars(load_script(Path("judge_server.py").absolute()))["make_server"](0)
        request.addfinalizer(server.server_close)
        request.addfinalizer(server.shutdown)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        changes = [f"rl_config.judge_url=http://127.0.0.1:{server.server_address[1]}/v1"]
    assert main(["explain", "--config", "run.yaml", "--validate", *changes]) == 0, capsys.readouterr().out
    shown = capsys.readouterr().out
    assert shown == "valid\n" or kind == "ppo" and shown.startswith("valid\nwarning: critic: ") and "fresh one" in shown


def test_explain_opens_with_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(make(tmp_path, "maths"))
    monkeypatch.setitem(REWARDS, "my_task", None)
    monkeypatch.delitem(REWARDS, "my_task")
    capsys.readouterr()
    assert main(["explain", "--config", "run.yaml"]) == 0
    first, promise = capsys.readouterr().out.split("\n\n")[1:3]
    assert [line.split()[0] for line in first.splitlines()] == ["model", "rows", "lengths", "steps", "planned", "chosen"]
    assert "s an iteration on cpu" in first and promise.startswith("Promise\n")


@pytest.mark.parametrize("columns", [("question", "answer"), ("prompt", "completion"), ("instruction", "output")])
def test_own_data_becomes_questions_and_answers(columns: tuple[str, str], tmp_path: Path) -> None:
    data = tmp_path / "data.csv"
    data.write_text(",".join((*columns, "more")) + "\n" + "".join(f"{number}?,{number}!,x\n" for number in range(20)))
    folder = make(tmp_path, "own", "--data", str(data))
    rows = [json.loads(line) for name in ("train", "heldout") for line in (folder / f"{name}.jsonl").read_text().splitlines()]
    assert sorted(rows, key=str) == sorted(({"question": f"{n}?", "answer": f"{n}!"} for n in range(20)), key=str)


@pytest.mark.parametrize(
    ("rows", "error"),
    [
        (["a,b", *["1,2"] * 9], "rows have the columns a, b, but question and answer"),
        (["question,answer", *["1,2"] * 3], "has 3 rows; 8 or more are needed"),
        (["question,answer", "1,2", "3,"], "row 2: question and answer must not be empty"),
    ],
)
def test_own_data_that_cannot_be_used_is_one_line(
    rows: list[str], error: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "data.csv").write_text("\n".join(rows) + "\n")
    assert main(["new", str(tmp_path / "my-task"), "--kind", "own", "--data", str(tmp_path / "data.csv")]) == 2
    assert error in capsys.readouterr().err and not (tmp_path / "my-task").exists()


def write_rows(path: Path, rows: list[dict[str, object]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def read_rows(folder: Path) -> list[dict[str, object]]:
    return [json.loads(line) for name in ("train", "heldout") for line in (folder / f"{name}.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    ("row", "question", "answer", "scoring"),
    [
        # as GSM8K, DeepScaleR, verl, TRL, ms-swift and ShareGPT write them
        ({"question": "{}?", "answer": "So it is\n#### {}"}, "{}?", "So it is\n#### {}", "verifier_function: [gsm8k_flexible]"),
        ({"problem": "{}?", "answer": "{}", "solution": "x"}, "{}?", "{}", "external_plugins: [reward.py]"),
        (
            {"prompt": [{"role": "user", "content": "{}?"}], "reward_model": {"ground_truth": "{}", "style": "rule"}},
            [{"role": "user", "content": "{}?"}], "{}", "external_plugins: [reward.py]",
        ),
        ({"prompt": "{}?", "completion": "Yes, {}"}, "{}?", "Yes, {}", "external_plugins: [reward.py]"),
        (
            {"messages": [{"role": "user", "content": "{}?"}, {"role": "assistant", "content": "{}!"}]},
            [{"role": "user", "content": "{}?"}], "{}!", "external_plugins: [reward.py]",
        ),
        (
            {"conversations": [{"from": "human", "value": "{}?"}, {"from": "gpt", "value": "{}!"}]},
            [{"role": "user", "content": "{}?"}], "{}!", "external_plugins: [reward.py]",
        ),
    ],
)  # fmt: skip
def test_rows_of_data_sets_become_questions_and_answers(
    row: dict[str, object], question: object, answer: str, scoring: str, tmp_path: Path
) -> None:
    def fill(value: object, number: int) -> object:
        return json.loads(json.dumps(value).replace("{}", str(number)))

    rows = [fill(row, number) for number in range(20)]
    folder = make(tmp_path, "dataset", "--data", write_rows(tmp_path / "data.jsonl", rows))  # type: ignore[arg-type]
    expected = [{"question": fill(question, number), "answer": fill(answer, number)} for number in range(20)]
    assert sorted(read_rows(folder), key=str) == sorted(expected, key=str)
    assert scoring in (folder / "run.yaml").read_text()
    report = explain(load_run(str(folder / "run.yaml")))
    assert report["errors"] == [] and report["missing"] == [] and report["unavailable"] == []


def test_levels_of_a_data_set_become_keys_of_the_run(tmp_path: Path) -> None:
    rows = [{"question": f"{number}?", "answer": "x", "hard": number % 3} for number in range(20)]
    data = write_rows(tmp_path / "data.jsonl", rows)
    cfg = load_run_config(str(make(tmp_path, "dataset", "--data", data, "--level", "hard") / "run.yaml"))
    assert cfg.rl_config is not None and cfg.rl_config.prompt_level_key == "level"
    assert cfg.actor_config.dataset_additional_keys == ["level"]
    assert {row["level"] for row in read_rows(tmp_path / "my-task")} == {0.0, 1.0, 2.0}


@pytest.mark.parametrize(
    ("rows", "options", "error"),
    [
        ([{"a": 1, "b": 2}] * 9, [], "rows have the columns a, b; question and answer"),
        ([{"question": "1", "answer": "2"}] * 3, [], "has 3 rows; 8 or more are needed"),
        ([{"question": "1", "answer": None}] * 9, [], "row 1: question and answer must have a question and an answer"),
        ([{"messages": [{"role": "user", "content": "1"}]}] * 9, [], "row 1: messages must have a question and an answer"),
        ([{"question": "1", "answer": "2"}] * 9, ["--level", "hard"], "row 1 has no such column; it has question, answer"),
        ([{"question": "1", "answer": "2", "hard": "no"}] * 9, ["--level", "hard"], "has 'no', but a level is a number"),
        ([{"question": "1" * 600, "answer": "2"}] * 9, [], "start from a real one with --model"),
    ],
)
def test_data_sets_that_cannot_be_used_are_one_line(
    rows: list[dict[str, object]], options: list[str], error: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = write_rows(tmp_path / "data.jsonl", rows)
    assert main(["new", str(tmp_path / "my-task"), "--kind", "dataset", "--data", data, *options]) == 2
    assert error in capsys.readouterr().err and not (tmp_path / "my-task").exists()


def test_a_model_with_experts_is_asked_for_by_an_option(tmp_path: Path) -> None:
    folder = make(tmp_path, "maths", "--experts")
    assert json.loads((folder / "model/config.json").read_text())["architectures"] == ["Qwen3MoeForCausalLM"]
    report = explain(load_run(str(folder / "run.yaml")))
    assert report["errors"] == []


def test_an_environment_of_verifiers_gives_rows_and_a_run_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module = tmp_path / "verifiers"
    module.mkdir()
    (module / "__init__.py").write_text(
        "class Environment:\n"
        "    def __init__(self, count):\n        self.count = count\n"
        "    def get_dataset(self):\n"
        "        for n in range(self.count):\n"
        "            yield {'prompt': [{'role': 'user', 'content': f'{n}?'}], 'example_id': n, 'answer': str(n), 'more': 1}\n"
        "def load_environment(name, **arguments):\n"
        "    if name != 'counting':\n        raise ValueError(f'Could not import {name!r} environment.')\n"
        "    return Environment(**arguments)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    folder = make(tmp_path, "verifiers", "--task", "counting", "--arguments", '{"count": 12}')
    rows = read_rows(folder)
    assert sorted(int(str(row["example_id"])) for row in rows) == list(range(12)) and "more" not in rows[0]
    assert all(row["question"] == row["prompt"] for row in rows)
    assert "environment: verifiers:counting\nargs: {\"count\": 12}\n" in (folder / "environment.yaml").read_text()
    cfg = load_run_config(str(folder / "run.yaml"))
    assert cfg.actor_config.dataset_additional_keys == ["prompt", "example_id", "answer"]
    assert cfg.rl_config is not None and str(cfg.rl_config.environment).endswith("environment.yaml")
    assert main(["new", str(tmp_path / "other"), "--kind", "verifiers", "--task", "countng"]) == 2
    assert "ValueError: Could not import 'countng' environment.." in capsys.readouterr().err


def test_a_library_that_is_not_there_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for module in ("reasoning_gym", "verifiers"):
        monkeypatch.setitem(sys.modules, module, None)
    (tmp_path / "verifiers.py").write_text("raise ModuleNotFoundError(\"No module named 'verifiers'\")\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    for kind, words in (("reasoning-gym", "pip install reasoning-gym"), ("verifiers", "No module named 'verifiers'. --python")):
        assert main(["new", str(tmp_path / "task"), "--kind", kind, "--task", "chain_sum"]) == 2
        assert words in capsys.readouterr().err
    assert not (tmp_path / "task").exists()


@pytest.mark.skipif(find_spec("reasoning_gym") is None, reason="reasoning-gym is not here: bash envs/cpu/extras.sh")
def test_a_task_of_reasoning_gym_has_levels_and_its_own_checker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make(tmp_path, "reasoning-gym", "--task", "chain_sum", "--levels", "3")
    rows = read_rows(folder)
    assert {row["level"] for row in rows} == {0, 1, 2}
    score = load(folder / "reward.py", monkeypatch)["score"]
    assert callable(score)
    for row in rows[:50]:
        assert score(f" {row['answer']} ", row["entry"]) == 1.0 and score("no", row["entry"]) < 1.0
    report = explain(load_run(str(folder / "run.yaml")))
    assert report["errors"] == [] and report["missing"] == []
    for options, error in (
        (["--task", "chain_sun"], "did you mean 'chain_sum'?"),
        (["--task", "chain_sum", "--arguments", '{"min_trems": 2}'], "chain_sum does not take them: it has no min_trems"),
        (["--task", "rubiks_cube"], "accepts none of its own answers"),
    ):
        assert main(["new", str(tmp_path / "other"), "--kind", "reasoning-gym", *options]) == 2
        assert error in capsys.readouterr().err
