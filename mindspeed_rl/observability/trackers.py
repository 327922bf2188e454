"""Where the metrics of an iteration go: metrics.jsonl always, and the services that a run file names, several at once."""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from mindspeed_rl import registry
from mindspeed_rl.config import RLConfig
from mindspeed_rl.observability.completions import Completion
from mindspeed_rl.observability.run_files import CONSUMED, LineWriter, forget_after, hold, recall, release

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


#: records that wait for a slow tracker before further ones are left out
CAPACITY = 256

_logger = logging.getLogger(__name__)


class Tracker(Protocol):
    """Takes the figures of each iteration."""

    def log(self, iteration: int, metrics: Mapping[str, float]) -> None:
        """The figures of this iteration are recorded."""

    def close(self) -> None:
        """Everything recorded is on disk or sent."""


@runtime_checkable
class TableTracker(Tracker, Protocol):
    """A tracker that also shows what the model wrote; one without this method is not given it."""

    def completions(self, iteration: int, completions: Sequence[Completion]) -> None:
        """The completions of this iteration are recorded."""


class BackgroundTracker:
    """Calls a tracker on a thread of its own, its construction included; nothing here waits for it but `close`.

    The first thing that goes wrong is a warning, once; after an error the tracker is given nothing more. While it is slow,
    `CAPACITY` records wait for it, and those that come on top are left out.

    Args:
        name: in messages.
        make: constructs the tracker.
        capacity: records that may wait.
    """

    def __init__(self, name: str, make: Callable[[], Tracker], capacity: int = CAPACITY) -> None:
        self._name, self._make = name, make
        self._waiting: queue.Queue[Callable[[Tracker], None]] = queue.Queue(capacity)
        self._num_left_out = 0
        self._failed, self._closing = threading.Event(), threading.Event()
        # a daemon: what still hangs when the run is over does not keep the process
        self._thread = threading.Thread(target=self._run, name=f"tracker {name}", daemon=True)
        self._thread.start()

    def log(self, iteration: int, metrics: Mapping[str, float]) -> None:
        """The figures are queued; at once."""
        figures = dict(metrics)
        self._put(iteration, lambda tracker: tracker.log(iteration, figures))

    def completions(self, iteration: int, completions: Sequence[Completion]) -> None:
        """The completions are queued, for a tracker that takes them; at once."""
        rows = list(completions)

        def show(tracker: Tracker) -> None:
            if isinstance(tracker, TableTracker):
                tracker.completions(iteration, rows)

        self._put(iteration, show)

    def begin_to_close(self) -> None:
        """Nothing more comes: what waits is recorded, then the tracker is closed."""
        self._closing.set()

    def close(self, deadline_s: float) -> None:
        """The tracker has recorded everything and is closed, or is given up.

        Args:
            deadline_s: on the monotonic clock.
        """
        self.begin_to_close()
        self._thread.join(max(0.0, deadline_s - time.monotonic()))
        if self._thread.is_alive():
            _logger.warning(
                "%s has not finished in time and is left behind; %d record(s) still waited for it",
                self._name,
                self._waiting.qsize(),
            )
        elif self._num_left_out and not self._failed.is_set():
            _logger.warning("%s lacks %d record(s): it was too slow to take them", self._name, self._num_left_out)

    def _put(self, iteration: int, call: Callable[[Tracker], None]) -> None:
        if self._failed.is_set():
            return
        try:
            self._waiting.put_nowait(call)
        except queue.Full:
            if not self._num_left_out:
                _logger.warning(
                    "%s hangs or is slow: %d records wait for it, further ones are left out from iteration %d on",
                    self._name, self._waiting.maxsize, iteration,
                )  # fmt: skip
            self._num_left_out += 1

    def _run(self) -> None:
        try:
            tracker = self._make()
            while (call := self._next()) is not None:
                call(tracker)
            tracker.close()
        # whatever a service raises, SystemExit included, must not reach the run
        except BaseException as error:
            self._failed.set()
            _logger.warning(
                "%s failed and is given nothing more; the run goes on: %s: %s", self._name, type(error).__name__, error
            )

    def _next(self) -> Callable[[Tracker], None] | None:
        """The next record; None when there is none left and none to come."""
        while True:
            try:
                return self._waiting.get(timeout=0.2)
            except queue.Empty:
                if self._closing.is_set() and self._waiting.empty():
                    return None
