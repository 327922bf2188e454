"""The ten lines of YAML and of Python of the README are valid in the folder that `new` has written; a slow test trains them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from mindspeed_rl import Run
from mindspeed_rl.cli import new

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    assert new.main([str(tmp_path / "my_task")]) == 0
    monkeypatch.chdir(tmp_path / "my_task")
    return tmp_path / "my_task"


def code(language: str) -> str:
    match = re.search(rf"^```{language}\n(.*?)^```", (ROOT / "README.md").read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert match is not None
    return match[1]


def test_the_yaml_is_valid(task: Path) -> None:
    (task / "ten.yaml").write_text(code("yaml"), encoding="utf-8")
    report = Run.load("ten.yaml").explain(shows=False)
    assert report["errors"] == [] and report["unavailable"] == []


def test_the_python_is_valid_up_to_its_training(task: Path) -> None:
    names: dict[str, object] = {"__name__": "readme"}
    lines, last = code("python").rstrip().rsplit("\n", 1)
    assert last.startswith("print(trainer.train()")
    exec(compile(f"{lines}\nreport = trainer.explain(shows=False)\n", "README.md", "exec"), names)
    report = names["report"]
    assert isinstance(report, dict) and report["errors"] == [] and report["unavailable"] == []
