"""`mindspeed-rl new`: every kind of task has prompts, a reward that scores as its docstring says, and a valid plan."""

from __future__ import annotations

import json
import re
import threading
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


def make(folder: Path, kind: str, *options: str) -> Path:
    assert main(["new", str(folder / "my-task"), "--kind", kind, *options]) == 0
    return folder / "my-task"


def load(path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    """The names of a file that the command has written; what it registers is forgotten after the test."""
    for name in ("my_task",):
        monkeypatch.setitem(REWARDS, name, None)
        monkeypatch.delitem(REWARDS, name)
    return vars(load_script(path))


@pytest.mark.parametrize("kind", _KINDS)
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
        ("maths", "it is 13", "12", 0.0),
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
        text = form.prompt(RewardSample(prompt="What is 5 + 7?", response=response, label="12"))
        assert callable(score) and score(text) == points, response
        assert form.read_reply(text, f"Score: {points}") == points / 10


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
    assert play("what?") == [("", 0.0, True)]


def test_a_model_of_the_user_gets_keys_of_its_size(tmp_path: Path) -> None:
    for hidden, rate in ((576, 2e-5), (3584, 1e-6)):
        model = tmp_path / f"model{hidden}"
        model.mkdir()
        (model / "config.json").write_text(json.dumps({"hidden_size": hidden}))
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


@pytest.mark.parametrize("kind", _KINDS)
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
    assert capsys.readouterr().out.startswith("valid\n")


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
