"""Where the metrics of an iteration go: metrics.jsonl, TensorBoard, Weights & Biases, SwanLab."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

from mindspeed_rl import registry
from mindspeed_rl.config import RLConfig
from mindspeed_rl.observability.lines import LineWriter, forget_after

#: name of a tracker -> its class, made with (rl_config, run_dir, config) and read where it is asked for
TRACKERS = {
    "tensorboard": "mindspeed_rl.observability.trackers:TensorBoardTracker",
    "wandb": "mindspeed_rl.observability.trackers:WandbTracker",
    "swanlab": "mindspeed_rl.observability.trackers:SwanlabTracker",
}


class Tracker(Protocol):
    """Takes the figures of each iteration."""

    def log(self, iteration: int, metrics: Mapping[str, float]) -> None:
        """The figures of this iteration are recorded."""

    def close(self) -> None:
        """Everything recorded is on disk or sent."""


class JsonlTracker:
    """One JSON object a line, flushed at once: {"iteration": 3, "actor/pg_loss": 0.1, ...}; NaN and infinities are null."""

    def __init__(self, path: Path) -> None:
        self._file = LineWriter(path)

    def log(self, iteration: int, metrics: Mapping[str, float]) -> None:
        finite = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        self._file.write({"iteration": iteration, **finite})

    def close(self) -> None:
        self._file.close()


class TensorBoardTracker:
    """TensorBoard event files; tags are prefixed with `train/` unless they say `eval/`.

    Events are plain scalars: tensorboard.summary.Writer makes tensors, which `EventAccumulator.Scalars` does not find.
    """

    def __init__(self, rl_config: RLConfig, run_dir: Path, config: Mapping[str, Any]) -> None:
        files = _load("tensorboard.summary.writer.event_file_writer", "use_tensorboard", "tensorboard")
        self._events = import_module("tensorboard.compat.proto.event_pb2")
        self._summaries = import_module("tensorboard.compat.proto.summary_pb2")
        self._writer = files.EventFileWriter(str(run_dir / "tensorboard"))

    def log(self, iteration: int, metrics: Mapping[str, float]) -> None:
        values = [self._summaries.Summary.Value(tag=tag(name), simple_value=value) for name, value in metrics.items()]
        summary = self._summaries.Summary(value=values)
        self._writer.add_event(self._events.Event(wall_time=time.time(), step=iteration, summary=summary))
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WandbTracker:
    """A Weights & Biases run."""

    def __init__(self, rl_config: RLConfig, run_dir: Path, config: Mapping[str, Any]) -> None:
        wandb = _load("wandb", "use_wandb", "wandb")
        self._run = wandb.init(
            project=rl_config.wandb_project,
            name=rl_config.wandb_exp_name or None,
            dir=rl_config.wandb_save_dir or str(run_dir),
            mode=rl_config.wandb_mode,
            config=dict(config),
        )

    def log(self, iteration: int, metrics: Mapping[str, float]) -> None:
        self._run.log({tag(name): value for name, value in metrics.items()}, step=iteration)

    def close(self) -> None:
        self._run.finish()


class SwanlabTracker:
    """A SwanLab run."""

    def __init__(self, rl_config: RLConfig, run_dir: Path, config: Mapping[str, Any]) -> None:
        swanlab = _load("swanlab", "use_swanlab", "swanlab")
        self._run = swanlab.init(
            project=rl_config.swanlab_project,
            experiment_name=rl_config.swanlab_exp_name or None,
            mode=rl_config.swanlab_mode or None,
            logdir=rl_config.swanlab_save_dir or str(run_dir),
            config=dict(config),
        )

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
        with contextlib.ExitStack() as stack:  # all are closed, also behind one that fails
            for tracker in reversed(self._trackers):
                stack.callback(tracker.close)


def make_trackers(rl_config: RLConfig, run_dir: Path, config: Mapping[str, Any], *, goes_on_after: int = 0) -> Trackers:
    """The trackers that the run file asks for, metrics.jsonl always among them.

    `use_wandb` switches `use_tensorboard` off. metrics.jsonl and completions.jsonl of a folder in which a run has gone further
    hold nothing of the iterations that are repeated.

    Args:
        rl_config: `report_to`, the use_ keys, and those that a tracker reads itself.
        run_dir: where files go unless a *_save_dir is set.
        config: the run's configuration as plain values, shown beside the curves.
        goes_on_after: the last iteration that is not repeated.

    Raises:
        ValueError: a tracker is unknown, or its package is not installed.
    """
    switched_on = {"tensorboard": rl_config.use_tensorboard, "wandb": rl_config.use_wandb, "swanlab": rl_config.use_swanlab}
    wanted = dict.fromkeys([*(name for name, is_on in switched_on.items() if is_on), *rl_config.report_to])
    if rl_config.use_wandb:
        wanted.pop("tensorboard", None)
    for name in ("metrics.jsonl", "completions.jsonl"):
        forget_after(run_dir / name, goes_on_after)
    trackers: list[Tracker] = [JsonlTracker(run_dir / "metrics.jsonl")]
    for name in wanted:
        target = registry.target_of(TRACKERS, name, f"rl_config.report_to: {name!r}")
        trackers.append(registry.load(target, f"rl_config.report_to {name}")(rl_config, run_dir, config))
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
