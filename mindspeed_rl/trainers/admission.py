"""Admission of prompts: how many are started and which responses train, so that none is too old. Pure arithmetic."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True)
class InFlight:
    """A prompt that was started and did not train yet.

    Attributes:
        index: index of the prompt, counted from the start of the run.
        version: version of the oldest weights that its responses come from, or will.
        is_ready: all its responses are there, scored.
    """

    index: int
    version: int
    is_ready: bool


@dataclass(frozen=True)
class Admission:
    """The limit of how far the rollout may be ahead of training. Prompts are counted in complete groups of responses.

    With version v of the weights, threshold f, B prompts an iteration and k iterations a version, (f + v + 1) k B prompts may
    have been started that were taken or are in flight. All that were started by the end of version v have then trained by the
    end of version v + ceil(f), if the oldest go first where it matters: `choose` sees to that.

    Attributes:
        strategy: "pace": as above; groups are taken in the order of their prompts as they are ready, and those that would
            become too old are waited for. "wait": as above, and prompts are taken strictly in their order. "drop": one
            version's prompts more are started, groups that are too old are dropped, and none is waited for.
        threshold: f, in versions of the weights; a fraction is a part of the last version's prompts.
        batch_prompts: B.
        sync_step: k.
    """

    strategy: Literal["pace", "wait", "drop"]
    threshold: float
    batch_prompts: int
    sync_step: int = 1

    @property
    def bound(self) -> int:
        """Versions that a token may be older than the weights that train on it."""
        return math.ceil(self.threshold)

    def version(self, iteration: int) -> int:
        """Return the version of the weights in the engine while this iteration trains; the first is 0."""
        return iteration // self.sync_step

    def is_synced(self, iteration: int) -> bool:
        """Return True where the engine has the weights that this iteration starts from, and not those of an earlier one."""
        return iteration % self.sync_step == 0

    def compute_room(self, version: int, num_taken: int, num_in_flight: int) -> int:
        """Return how many prompts may be started now.

        Args:
            version: version of the weights that will generate for them.
            num_taken: prompts that iterations took; a rejected one is not counted.
            num_in_flight: started and not taken.
        """
        ahead = self.threshold + (1 if self.strategy == "drop" else 0)
        # a fraction times whole numbers may fall short of a whole number by rounding
        limit = math.floor((ahead + version + 1) * self.sync_step * self.batch_prompts + 1e-9)
        return max(0, limit - num_taken - num_in_flight)

    def find_overdue(self, iteration: int, in_flight: Sequence[InFlight]) -> list[int]:
        """Return the indexes of prompts that are too old to train in this iteration."""
        oldest = self.version(iteration) - self.bound
        return [prompt.index for prompt in in_flight if prompt.version < oldest]

    def choose(self, iteration: int, count: int, in_flight: Sequence[InFlight]) -> list[int] | None:
        """Return the indexes of the `count` prompts that train next, in their order; None while some of these are not ready.

        Args:
            in_flight: in the order of their indexes.
        """
        if self.strategy == "wait":
            first = in_flight[:count]
            return [prompt.index for prompt in first] if len(first) == count and all(p.is_ready for p in first) else None
        ready = [prompt for prompt in in_flight if prompt.is_ready]
        if len(ready) < count:
            return None
        taken = self._take_due(iteration, count, in_flight) if self.strategy == "pace" else []
        if taken is None:
            return None
        taken += [prompt for prompt in ready if prompt not in taken][: count - len(taken)]
        return sorted(prompt.index for prompt in taken)

    def _take_due(self, iteration: int, count: int, in_flight: Sequence[InFlight]) -> list[InFlight] | None:
        """Return the prompts that would become too old if they did not train now; None while one of them is not ready."""
        taken: list[InFlight] = []
        # the last iteration that may train on a prompt
        deadlines = {prompt: (prompt.version + self.bound + 1) * self.sync_step - 1 for prompt in in_flight}
        for deadline in sorted(set(deadlines.values())):
            due = [prompt for prompt in in_flight if deadlines[prompt] <= deadline]
            # the iterations after this one, up to the deadline, take so many; the others must train now
            must = min(count, len(due) - (deadline - iteration) * self.batch_prompts)
            missing = must - sum(deadlines[prompt] <= deadline for prompt in taken)
            candidates = [prompt for prompt in due if prompt.is_ready and prompt not in taken]
            if missing > len(candidates):
                return None
            taken += candidates[: max(0, missing)]
        return taken


@dataclass(frozen=True)
class QueueMarks:
    """The numbers of ready prompts at which further engines start and end to generate; hysteresis is the distance of both.

    Attributes:
        low: they start below it.
        high: they end when so many are ready.
    """

    low: float
    high: float

    def decide(self, *, is_awake: bool, num_ready: int, num_in_flight: int) -> bool:
        """Return True where further engines are to generate for an iteration that waits.

        Args:
            is_awake: they generate now.
            num_ready: prompts whose responses are complete and scored.
            num_in_flight: these, and those with responses that are missing; when all are ready there is nothing to generate.
        """
        return num_ready < min(self.high if is_awake else self.low, num_in_flight)


@dataclass
class Hysteresis:
    """Decide when devices move: to the trainers while the queue is full, back to the rollout where that was no gain.

    They move back where the trainers wait and an iteration takes as long as before the move. Limits are for means of several
    iterations, and of twice as many after each move back, so that devices do not go to and fro. The queue may have an
    iteration's prompts while the trainers wait for the long ones that are due: waits are measured, not derived from it.

    Attributes:
        high: iterations' prompts that are ready in a full queue.
        wait: part of an iteration that the trainers may wait.
        patience: iterations whose mean decides.
        is_moved: devices of the rollout train.
    """

    high: float
    wait: float
    patience: int
    is_moved: bool = False
    _recent: list[tuple[float, float, float]] = field(default_factory=list, repr=False)
    _before_s: float = field(default=0.0, repr=False)

    def add(self, level: float, waited_s: float, seconds: float) -> bool:
        """Return True where devices move after this iteration.

        Args:
            level: iterations' prompts that were ready when updates ended.
            waited_s: seconds in which the trainers waited for responses.
            seconds: seconds of the iteration, without those of a save or an evaluation.
        """
        self._recent = [*self._recent, (level, waited_s, seconds)][-self.patience :]
        if len(self._recent) < self.patience:
            return False
        levels, waits, durations = (sum(values) for values in zip(*self._recent))
        if self.is_moved:
            is_due = waits > self.wait * durations and durations / self.patience >= self._before_s
        else:
            # a sum of equal levels may fall short of their multiple by rounding
            is_due = levels + 1e-9 >= self.high * self.patience
        if not is_due:
            return False
        self._recent = []
        if self.is_moved:
            self.patience *= 2
        else:
            self._before_s = durations / self.patience
        self.is_moved = not self.is_moved
        return True

    def restart(self) -> None:
        """Forget the iterations so far: a run that resumes has a queue that fills again."""
        self._recent = []
