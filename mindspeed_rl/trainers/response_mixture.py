"""The choice of each iteration of distillation: responses of the student, or of the data (GKD, arXiv:2306.13649)."""

from __future__ import annotations

import random
from dataclasses import dataclass

from mindspeed_rl.run import Run


@dataclass(frozen=True)
class ResponseMixture:
    """The choice of each iteration: responses of the student, or of the data.

    It depends on the seed and the iteration only, so a resumed run makes the same choices. Like ms-swift it seeds a generator
    with the seed of the run plus the optimizer steps before the iteration.

    Attributes:
        on_policy_fraction: probability of the student's responses.
        seed: seed of the run.
        steps_per_iteration: optimizer steps of an iteration.
    """

    on_policy_fraction: float
    seed: int
    steps_per_iteration: int

    @classmethod
    def choose(cls, run: Run) -> ResponseMixture | None:
        """Return the mixture of a run; None where the student samples all responses."""
        term, plan = None if run.objective is None else run.objective.distillation, run.plan
        if term is None or not term.reads_data:
            return None
        steps = plan.epochs * (plan.num_train_samples // plan.mini_batch_size)
        return cls(term.on_policy_fraction, run.config.actor_config.seed, steps)

    def is_sampled(self, iteration: int) -> bool:
        """Return True where the student samples the responses of this iteration."""
        return random.Random(self.seed + iteration * self.steps_per_iteration).random() < self.on_policy_fraction
