"""When prompts are started and which responses an iteration takes, so that none trains that is too old: pure arithmetic."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from mindspeed_rl.config import Run

Strategy = Literal["pace", "wait", "drop"]


@dataclass(frozen=True)
class InFlight:
    """A prompt that was started and did not train yet.

    Attributes:
        number: of the prompt, counted from the beginning of the run.
        version: of the oldest weights that its responses come from, or will.
        is_ready: all its responses are there, scored.
    """

    number: int
    version: int
    is_ready: bool


@dataclass(frozen=True)
class Admission:
    """How far the rollout may be ahead of training. Prompts are counted in whole groups of responses.

    With version v of the weights, threshold f, B prompts an iteration and k iterations a version, (f + v + 1) k B prompts may
    have been started that were taken or are in flight. All that were started by the end of version v have then trained by the
    end of version v + ceil(f), if the oldest go first where it matters: `chosen` sees to that.

    Attributes:
        strategy: "pace": as above; what is ready is taken in the order of the prompts, and what would become too old is waited
            for. "wait": as above, and prompts are taken strictly in their order. "drop": one version's prompts more are
            started, what is too old is thrown away, nothing old is waited for.
        threshold: f, in versions of the weights; a fraction is a part of the last version's prompts.
        batch_prompts: B.
        sync_step: k.
    """

    strategy: Strategy
    threshold: float
    batch_prompts: int
    sync_step: int = 1

    @property
    def bound(self) -> int:
        """Versions that a token may be older than the weights that train on it."""
        return math.ceil(self.threshold)

    def version(self, iteration: int) -> int:
        """Of the weights in the engine while this iteration trains; the first is 0."""
        return iteration // self.sync_step

    def room(self, version: int, num_taken: int, num_in_flight: int) -> int:
        """How many prompts may be started now.

        Args:
            version: of the weights that they will be answered with.
            num_taken: prompts that iterations took, those that are used up or rejected not counted twice.
            num_in_flight: started and not taken.
        """
        ahead = self.threshold + (1 if self.strategy == "drop" else 0)
        # a fraction times whole numbers may fall short of a whole number by rounding
        limit = math.floor((ahead + version + 1) * self.sync_step * self.batch_prompts + 1e-9)
        return max(0, limit - num_taken - num_in_flight)

    def overdue(self, iteration: int, in_flight: Sequence[InFlight]) -> list[int]:
        """Numbers of prompts that are too old to train in this iteration."""
        oldest = self.version(iteration) - self.bound
        return [prompt.number for prompt in in_flight if prompt.version < oldest]

    def chosen(self, iteration: int, count: int, in_flight: Sequence[InFlight]) -> list[int] | None:
        """Numbers of the `count` prompts that train next, in their order; None while some of these are not ready.

        Args:
            in_flight: in the order of their numbers.
        """
        if self.strategy == "wait":
            first = in_flight[:count]
            return [prompt.number for prompt in first] if len(first) == count and all(p.is_ready for p in first) else None
        ready = [prompt for prompt in in_flight if prompt.is_ready]
        if len(ready) < count:
            return None
        taken: list[InFlight] = []
        if self.strategy == "pace":
            for deadline in sorted({self._deadline(prompt) for prompt in in_flight}):
                due = [prompt for prompt in in_flight if self._deadline(prompt) <= deadline]
                # the iterations after this one, up to the deadline, take so many; the rest must go now
                must = min(count, len(due) - (deadline - iteration) * self.batch_prompts)
                missing = must - sum(self._deadline(prompt) <= deadline for prompt in taken)
                candidates = [prompt for prompt in due if prompt.is_ready and prompt not in taken]
                if missing > len(candidates):
                    return None
                taken += candidates[: max(0, missing)]
        taken += [prompt for prompt in ready if prompt not in taken][: count - len(taken)]
        return sorted(prompt.number for prompt in taken)

    def _deadline(self, prompt: InFlight) -> int:
        """The last iteration that may train on it."""
        return (prompt.version + self.bound + 1) * self.sync_step - 1


def admission_of(run: Run) -> Admission:
    """How far the rollout of this run may be ahead of training."""
    rl, batch = run.rl, run.plan.num_train_prompts
    if rl.trainer_mode == "async":
        return Admission(rl.max_off_policy_strategy, rl.max_off_policy_threshold, batch, rl.parameter_sync_step)
    if rl.trainer_mode == "one_step_off":
        return Admission("wait", 1.0, batch)
    # a response has ended after so many rollouts, and twice as many prompts as train are under way
    split = rl.partial_rollout_max_split
    return Admission("pace", float(split) if split > 1 else 0.0, batch)
