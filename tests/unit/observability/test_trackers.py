"""Trackers write what they are given; a missing package is named."""

import importlib.util
import json
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from mindspeed_rl.config import RLConfig
from mindspeed_rl.config.compat.aliases import apply_aliases
from mindspeed_rl.observability.trackers import TRACKERS, make_trackers


def tracker_files(run_dir: Path, rl_config: RLConfig) -> Path:
    trackers = make_trackers(rl_config, run_dir, {"lr": 1.0})
    trackers.log(1, {"actor/pg_loss": 0.5, "eval/accuracy": 0.25})
    trackers.log(2, {"actor/pg_loss": math.nan})
    trackers.close()
    return run_dir


def test_every_run_has_a_jsonl_of_its_metrics(tmp_path):
    tracker_files(tmp_path, RLConfig())
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [
        {"iteration": 1, "actor/pg_loss": 0.5, "eval/accuracy": 0.25},
        {"iteration": 2, "actor/pg_loss": None},
    ]
    assert not (tmp_path / "tensorboard").exists()


def test_tensorboard_reads_the_scalars_back(tmp_path):
    tracker_files(tmp_path, RLConfig(use_tensorboard=True))
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert sorted(events.Tags()["scalars"]) == ["eval/accuracy", "train/actor/pg_loss"]
    first = events.Scalars("train/actor/pg_loss")[0]
    assert first.step == 1 and first.value == 0.5


@pytest.mark.parametrize("package, wheel", [("wandb", "wandb"), ("swanlab", "swanlab"), ("mlflow", "mlflow-skinny")])
def test_a_tracker_without_its_package_is_an_error_that_names_it(tmp_path, monkeypatch, package, wheel):
    result = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == package else result(name, *rest))
    with pytest.raises(ValueError, match=f"use_{package} is true, but '{package}' is not installed: pip install {wheel}"):
        make_trackers(RLConfig(**{f"use_{package}": True}), tmp_path, {})
    assert not list(tmp_path.iterdir())


@pytest.fixture
def fake_wandb(tmp_path, monkeypatch):
    """A module by the name of wandb that keeps what it is told; what it kept is in its `asked`."""
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "wandb.py").write_text(
        "asked = {}\n"
        "class Run:\n"
        "    url = None\n"
        "    id = 'abc'\n"
        "    dir = 'here'\n"
        "    def log(self, figures, step): asked.update(step=step)\n"
        "    def finish(self): asked.update(finished=True)\n"
        "def init(**options):\n"
        "    asked.update(options)\n"
        "    return Run()\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    yield
    sys.modules.pop("wandb", None)


def test_wandb_switches_tensorboard_off(tmp_path, fake_wandb):
    tracker_files(tmp_path, RLConfig(use_tensorboard=True, use_wandb=True))
    assert sys.modules["wandb"].asked["finished"] and not (tmp_path / "tensorboard").exists()


def test_report_to_takes_several_and_switches_none_off(tmp_path, fake_wandb):
    rl = RLConfig(report_to=["tensorboard", "wandb"])
    rl, _, _ = apply_aliases(rl, None, {"rl_config": frozenset(("report_to",)), "sampling_config": frozenset()})
    tracker_files(tmp_path, rl)
    assert sys.modules["wandb"].asked["finished"] and (tmp_path / "tensorboard").exists()


class LineTracker:
    """A tracker as somebody else would write it: one class in a file of its own."""

    def __init__(self, rl_config: RLConfig, run_dir: Path, config: Mapping[str, Any]) -> None:
        self._lines, self._path = [f"lr {config['lr']}, project {rl_config.swanlab_project}"], run_dir / "lines.txt"

    def log(self, iteration: int, metrics: Mapping[str, float]) -> None:
        self._lines.append(f"{iteration}: {', '.join(metrics)}")

    def close(self) -> None:
        self._path.write_text("\n".join(self._lines))


@pytest.mark.parametrize("is_registered", [True, False])
def test_a_tracker_is_added_by_its_file_and_one_line_or_named_by_the_run_file(tmp_path, monkeypatch, is_registered):
    target = f"{__name__}:LineTracker"
    if is_registered:
        monkeypatch.setitem(TRACKERS, "lines", target)
    tracker_files(tmp_path, RLConfig(report_to=["lines" if is_registered else target], swanlab_project="mine"))
    assert (tmp_path / "lines.txt").read_text() == "lr 1.0, project mine\n1: actor/pg_loss, eval/accuracy\n2: actor/pg_loss"
    assert (tmp_path / "metrics.jsonl").is_file()


def test_an_unknown_tracker_is_an_error_that_names_the_known_ones(tmp_path):
    with pytest.raises(ValueError, match="report_to: 'tensorbord' is unknown; did you mean tensorboard"):
        make_trackers(RLConfig(report_to=["tensorbord"]), tmp_path, {})


def test_a_tracker_in_report_to_is_its_use_key():
    rl = RLConfig(report_to=["swanlab", "my_module:Tracker"])
    rl, _, _ = apply_aliases(rl, None, {"rl_config": frozenset(("report_to",)), "sampling_config": frozenset()})
    assert rl.use_swanlab and not rl.use_wandb


def test_every_tracker_of_ours_has_a_key_that_switches_it_on():
    assert all(getattr(RLConfig(), f"use_{name}") is False for name in TRACKERS)


@pytest.mark.parametrize("mode", ["offline", None])
def test_wandb_is_started_in_the_mode_that_the_run_file_says(tmp_path, fake_wandb, mode):
    trackers = make_trackers(RLConfig(use_wandb=True, wandb_mode=mode, wandb_project="mine"), tmp_path, {"lr": 1.0})
    trackers.log(1, {"actor/pg_loss": 0.5})
    trackers.close()
    asked = sys.modules["wandb"].asked
    assert (asked["mode"], asked["project"], asked["dir"], asked["step"], asked["finished"]) == (
        mode, "mine", str(tmp_path), 1, True
    )  # fmt: skip
