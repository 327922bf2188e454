"""Which groups of a rollout teach something: those whose scores vary (DAPO's dynamic sampling, arXiv:2503.14476)."""

from __future__ import annotations

import math

import torch

from mindspeed_rl.algorithms.masks import groups_with_signal, rows_of_groups
from mindspeed_rl.config import Run
from mindspeed_rl.dataplane.columns import Batch, objects, ragged, take


class GroupFilter:
    """`filter_groups_enable` looks at one reward function, `dynamic_sample` at the total reward.

    Attributes:
        limit: rollouts' worth of prompts that an iteration may look at; 0 or less: no limit.
    """

    def __init__(self, run: Run) -> None:
        rl = run.rl
        self._metric = rl.filter_groups_metric if rl.filter_groups_enable else None
        self._group_size = run.plan.n_samples_per_prompt
        self.limit = rl.filter_groups_max_batches if rl.filter_groups_enable else 1 + rl.max_resample_times

    def split(self, batch: Batch) -> tuple[Batch, Batch]:
        """The rows of the groups that teach something, and the others."""
        groups = groups_with_signal(self._scores(batch), self._group_size)
        return self._rows(batch, groups), self._rows(batch, ~groups)

    def give_up(self, iteration: int, looked_at: str, num_kept: int, wanted: int) -> None:
        """What was looked at did not do: with `dynamic_sample` groups without spread take part.

        Raises:
            RuntimeError: with `filter_groups_enable`.
        """
        if self._metric is not None:
            raise RuntimeError(
                f"iteration {iteration + 1}: {looked_at} gave {num_kept} of {wanted} groups whose {self._metric} varies "
                "(filter_groups_max_batches); raise that limit, or train on prompts that are neither too easy nor too hard."
            )

    def _scores(self, batch: Batch) -> torch.Tensor:
        if self._metric is None:
            return ragged(batch["rewards"]).tensor()
        name = self._metric
        return torch.tensor([float(result.parts.get(name, math.nan)) for result in objects(batch["reward_results"])])

    def _rows(self, batch: Batch, groups: torch.Tensor) -> Batch:
        rows = rows_of_groups(groups, self._group_size).tolist()
        return {name: take(column, rows) for name, column in batch.items()}
