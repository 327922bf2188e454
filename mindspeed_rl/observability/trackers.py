"""Where the metrics of an iteration go: metrics.jsonl always, and the services that a run file names, several at once."""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from mindspeed_rl import registry
from mindspeed_rl.config import RLConfig
from mindspeed_rl.observability.background import BackgroundTracker
from mindspeed_rl.observability.completions import Completion
from mindspeed_rl.observability.lines import CONSUMED, LineWriter, forget_after, hold, recall, release

#: name of a tracker -> its class, made with (rl_config, run_dir, config) and read where it is asked for
TRACKERS = {
    "tensorboard": "mindspeed_rl.observability.services:TensorBoardTracker",
    "wandb": "mindspeed_rl.observability.services:WandbTracker",
    "swanlab": "mindspeed_rl.observability.services:SwanlabTracker",
    "mlflow": "mindspeed_rl.observability.services:MlflowTracker",
}

#: seconds that all trackers together have to finish when a run ends
CLOSE_S = 60.0

_logger = logging.getLogger(__name__)


@runtime_checkable
class Checked(Protocol):
    """The class of a tracker that can say before the run what it lacks."""

    @staticmethod
    def check() -> None:
        """Raises ValueError when the tracker cannot work on this machine."""


class JsonlTracker:
    """One JSON object a line, flushed at once: {"iteration": 3, "actor/pg_loss": 0.1, ...}; NaN and infinities are null.

    Written by the run itself: the report and the page are made of this file.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._file = path, LineWriter(path)
        self._has_failed = False

    def log(self, iteration: int, metrics: Mapping[str, float]) -> None:
        """The line is in the file, or a warning says once why lines are missing."""
        with self._forgiven():
            self._file.write(_record(iteration, metrics))
            release(self._path)

    def hold(self, iteration: int, metrics: Mapping[str, float]) -> None:
        """The iteration is about to be saved: a run that goes on behind it has this line, if `log` was not reached."""
        with self._forgiven():
            hold(self._path, _record(iteration, metrics))

    @contextlib.contextmanager
    def _forgiven(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if not self._has_failed:
                _logger.warning("%s cannot be written, lines will be missing; the run goes on: %s", self._path, error)
            self._has_failed = True

    def close(self) -> None:
        """The file is closed."""
        self._file.close()


def _record(iteration: int, metrics: Mapping[str, float]) -> dict[str, Any]:
    return {"iteration": iteration} | {name: value if math.isfinite(value) else None for name, value in metrics.items()}


class Trackers:
    """metrics.jsonl, and any number of trackers on threads of their own."""

    def __init__(self, lines: JsonlTracker, others: Sequence[BackgroundTracker], close_s: float = CLOSE_S) -> None:
        self._lines, self._others, self._close_s = lines, others, close_s

    def log(self, iteration: int, metrics: Mapping[str, float]) -> None:
        """The figures of this iteration are in metrics.jsonl and on their way to the others."""
        self._lines.log(iteration, metrics)
        for tracker in self._others:
            tracker.log(iteration, metrics)

    def hold(self, iteration: int, metrics: Mapping[str, float]) -> None:
        """See `JsonlTracker.hold`."""
        self._lines.hold(iteration, metrics)

    def completions(self, iteration: int, completions: Sequence[Completion]) -> None:
        """The completions of this iteration are on their way to the trackers that have tables."""
        for tracker in self._others:
            tracker.completions(iteration, completions)

    def close(self) -> None:
        """Every tracker is closed; one that takes longer than `close_s` for it is left behind, with a warning."""
        deadline_s = time.monotonic() + self._close_s
        for tracker in self._others:
            # all of them before the first is waited for: they share one deadline
            tracker.begin_to_close()
        for tracker in self._others:
            tracker.close(deadline_s)
        self._lines.close()


def make_trackers(rl_config: RLConfig, run_dir: Path, config: Mapping[str, Any], *, goes_on_after: int = 0) -> Trackers:
    """The trackers that the run file asks for, metrics.jsonl always among them; they start on their own threads.

    `use_wandb` switches `use_tensorboard` off, as upstream does; a tracker that `report_to` names is never switched off.
    The files with a line an iteration in a folder in which a run has gone further hold nothing of those that are repeated.

    Args:
        rl_config: `report_to`, the use_ keys, and those that a tracker reads itself.
        run_dir: where files go unless a *_save_dir is set.
        config: the run's configuration, shown beside the curves.
        goes_on_after: the last iteration that is not repeated.

    Raises:
        ValueError: a tracker is unknown, or its package is not installed.
    """
    switched_on = {
        "tensorboard": rl_config.use_tensorboard and not rl_config.use_wandb,
        "wandb": rl_config.use_wandb,
        "swanlab": rl_config.use_swanlab,
        "mlflow": rl_config.use_mlflow,
    }
    wanted = dict.fromkeys([*(name for name, is_on in switched_on.items() if is_on), *rl_config.report_to])
    classes: dict[str, Any] = {}
    for name in wanted:
        target = registry.target_of(TRACKERS, name, f"rl_config.report_to: {name!r}")
        classes[name] = registry.load(target, f"rl_config.report_to {name}")
        if isinstance(classes[name], Checked):
            classes[name].check()
    # cut back before `recall`, which looks at the last line that stays
    for name in ("metrics.jsonl", "completions.jsonl", CONSUMED):
        forget_after(run_dir / name, goes_on_after)
    recall(run_dir / "metrics.jsonl", goes_on_after)
    plain = json.loads(json.dumps(config, default=_plain))
    lines = JsonlTracker(run_dir / "metrics.jsonl")
    others = [BackgroundTracker(name, functools.partial(made, rl_config, run_dir, plain)) for name, made in classes.items()]
    return Trackers(lines, others)


def _plain(value: object) -> object:
    """What JSON has no word for: sets become lists, everything else text."""
    return sorted(map(str, value)) if isinstance(value, (set, frozenset)) else str(value)
