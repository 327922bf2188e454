"""Devices of the rollout that train while it is ahead, and generate again once it falls behind.

Between two iterations the run saves, ends its processes and resumes on the other division of its devices, as a user would
resume it by hand with other numbers of devices; `Recovery` starts the attempts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace

from mindspeed_rl.observability.observer import RunObserver
from mindspeed_rl.run import Run
from mindspeed_rl.run.divisions import list_moved_keys, move_devices
from mindspeed_rl.run.models import resolve_run
from mindspeed_rl.trainers.admission import Hysteresis
from mindspeed_rl.trainers.group_sources import QUEUE_LEVEL
from mindspeed_rl.trainers.termination import DevicesMovedError, Termination

#: timers of the waits for responses, and of what an iteration has only now and then, which no division makes shorter
_WAITS = ("timing/rollout", "timing/rollout_pause")
_OCCASIONAL = ("timing/evaluate", "timing/save", "timing/audit")


class ElasticTraining(RunObserver):
    """Choose the division of the devices by queue and waits, and end the loop of an attempt where it changes."""

    def __init__(self, run: Run) -> None:
        """Resolve the run on both divisions.

        Raises:
            ValueError: a rule or a file is against the division in which devices of the rollout train.
        """
        rl = run.rl
        moved = resolve_run(replace(move_devices(run.config), run_dir=str(run.folder)), run.num_nodes)
        self._runs = {False: run, True: moved}
        self._marks = Hysteresis(rl.elastic_training_high, rl.elastic_training_wait, rl.elastic_training_patience)
        self._termination: Termination | None = None
        self._is_moved = False

    @property
    def run(self) -> Run:
        """The run on the division of its next attempt."""
        return self._runs[self._is_moved]

    @property
    def changes(self) -> str:
        """The keys with which a user would resume there, as "key=value"."""
        keys = list_moved_keys(self._runs[False].rl).items() if self._is_moved else ()
        return " ".join(f"{name}={json.dumps(value)}" for name, value in keys) or "the keys of its run file"

    def follow(self, termination: Termination) -> None:
        """End the loop of the attempt that starts by its termination."""
        self._termination = termination
        self._marks.restart()
        self._marks.is_moved = self._is_moved

    def on_figures(self, iteration: int, results: Mapping[str, float]) -> None:
        """Take the level of the queue and the waits; the first iteration of an attempt has no level, and does not count."""
        termination, level = self._termination, results.get(QUEUE_LEVEL)
        if termination is None or level is None or termination.restart is not None:
            return
        waited_s, occasional_s = (sum(results.get(name, 0.0) for name in names) for names in (_WAITS, _OCCASIONAL))
        if self._marks.add(level, waited_s, max(0.0, results["timing/all"] - occasional_s)):
            text = "the rollout was ahead, so devices of it train"
            if not self._marks.is_moved:
                text = "the trainers waited and iterations were not faster, so devices of the rollout generate again"
            termination.restart = DevicesMovedError(text)

    def move(self) -> Run:
        """Return the run on the other division."""
        self._is_moved = not self._is_moved
        return self.run
