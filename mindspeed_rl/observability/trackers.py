"""Where the metrics of an iteration go: metrics.jsonl, TensorBoard, Weights & Biases, SwanLab."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

from mindspeed_rl.config import RLConfig


class Tracker(Protocol):
    """Takes the figures of each iteration."""

    def log(self, iteration: int, metrics: Mapping[str, float]) -> None:
        """The figures of this iteration are recorded."""

    def close(self) -> None:
        """Everything recorded is on disk or sent."""


class JsonlTracker:
    """One JSON object a line, flushed at once: {"iteration": 3, "actor/pg_loss": 0.1, ...}; NaN and infinities are null."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a", encoding="utf-8")

    def log(self, iteration: int, metrics: Mapping[str, float]) -> None:
        finite = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        self._file.write(json.dumps({"iteration": iteration, **finite}) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class TensorBoardTracker:
    """TensorBoard event files; tags are prefixed with `train/` unless they say `eval/`."""

    def __init__(self, log_dir: Path) -> None:
        writer = _load("tensorboard.summary", "use_tensorboard", "tensorboard")
        self._writer = writer.Writer(str(log_dir))

    def log(self, iteration: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(tag(name), value, iteration)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WandbTracker:
    """A Weights & Biases run."""

    def __init__(self, project: str, name: str, save_dir: Path, config: Mapping[str, Any]) -> None:
        wandb = _load("wandb", "use_wandb", "wandb")
        self._run = wandb.init(project=project, name=name or None, dir=str(save_dir), config=dict(config))

    def log(self, iteration: int, metrics: Mapping[str, float]) -> None:
        self._run.log({tag(name): value for name, value in metrics.items()}, step=iteration)

    def close(self) -> None:
        self._run.finish()


class SwanlabTracker:
    """A SwanLab run."""

    def __init__(self, project: str, name: str, save_dir: Path, mode: str, config: Mapping[str, Any]) -> None:
        swanlab = _load("swanlab", "use_swanlab", "swanlab")
        options = {"experiment_name": name or None, "mode": mode or None, "logdir": str(save_dir)}
        self._run = swanlab.init(project=project, config=dict(config), **options)

    def log(self, iteration: int, metrics: Mapping[str, float]) -> None:
        self._run.log({tag(name): value for name, value in metrics.items()}, step=iteration)

    def close(self) -> None:
        self._run.finish()


class Trackers:
    """Several trackers as one."""

    def __init__(self, trackers: list[Tracker]) -> None:
        self._trackers = trackers

    def log(self, iteration: int, metrics: Mapping[str, float]) -> None:
        for tracker in self._trackers:
            tracker.log(iteration, metrics)

    def close(self) -> None:
        for tracker in self._trackers:
            tracker.close()


def make_trackers(rl_config: RLConfig, run_dir: Path, config: Mapping[str, Any]) -> Trackers:
    """The trackers that the run file asks for, metrics.jsonl always among them.

    `use_wandb` switches `use_tensorboard` off.

    Args:
        rl_config: its keys use_tensorboard, use_wandb, use_swanlab, wandb_*, swanlab_*.
        run_dir: where files go unless a *_save_dir is set.
        config: the run's configuration as plain values, shown beside the curves.

    Raises:
        ValueError: a tracker is asked for whose package is not installed.
    """
    run_dir = Path(run_dir)
    trackers: list[Tracker] = [JsonlTracker(run_dir / "metrics.jsonl")]
    if rl_config.use_tensorboard and not rl_config.use_wandb:
        trackers.append(TensorBoardTracker(run_dir / "tensorboard"))
    if rl_config.use_wandb:
        save_dir = Path(rl_config.wandb_save_dir or run_dir)
        trackers.append(WandbTracker(rl_config.wandb_project, rl_config.wandb_exp_name, save_dir, config))
    if rl_config.use_swanlab:
        save_dir = Path(rl_config.swanlab_save_dir or run_dir)
        name, mode = rl_config.swanlab_exp_name, rl_config.swanlab_mode
        trackers.append(SwanlabTracker(rl_config.swanlab_project, name, save_dir, mode, config))
    return Trackers(trackers)


def tag(name: str) -> str:
    """The metric's name in TensorBoard, wandb and SwanLab."""
    return name if name.startswith("eval/") else f"train/{name}"


def _load(module: str, key: str, package: str) -> ModuleType:
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        # A package that is there but broken should show its own error.
        if error.name is None or error.name.split(".")[0] != package:
            raise
        raise ValueError(f"rl_config.{key} is true, but '{package}' is not installed: pip install {package}.") from None
