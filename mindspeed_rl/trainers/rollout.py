"""From prompts to scored responses in the data plane, with or without filtering of groups."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Protocol

import torch

from mindspeed_rl.algorithms.masks import groups_with_signal, rows_of_groups
from mindspeed_rl.config import RLConfig, Run
from mindspeed_rl.config.phases import GENERATE, RULE_REWARDS, worker_columns
from mindspeed_rl.dataplane.client import DataPlane
from mindspeed_rl.dataplane.columns import Batch, concatenate, objects, ragged, take
from mindspeed_rl.observability.metrics import Metrics
from mindspeed_rl.runtime.reports import WorkerReport
from mindspeed_rl.trainers.model_rewards import ModelRewards, NoModelRewards
from mindspeed_rl.trainers.prompt_loader import PROMPT_COLUMNS, PromptLoader
from mindspeed_rl.trainers.services import Services

#: columns of a scored row
SCORED_COLUMNS = (*PROMPT_COLUMNS, *GENERATE.columns, *RULE_REWARDS.columns)


class Rollout(Protocol):
    """Fill the data plane with the rows that an iteration trains on."""

    def before_push(self, iteration: int) -> int | None:
        """Return the version of the weights that the engine is to have from now on; None while it keeps those that it has.

        Responses in flight have been interrupted, or have ended.

        Args:
            iteration: the next to train.
        """

    def after_push(self, iteration: int) -> None:
        """Take note that the engine has those weights."""

    def run(self, iteration: int) -> list[WorkerReport]:
        """Put rows with responses and the scores of the reward functions into the data plane."""

    def state_dict(self) -> dict[str, Any]:
        """Return, as plain values, the state from which a resumed run generates as the uninterrupted one would have."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state_dict` was taken."""


class SynchronousRollout:
    """One batch of prompts by the newest weights, all groups kept."""

    def __init__(self, run: Run, services: Services, loader: PromptLoader) -> None:
        self._blocking, self._num_samples = run.rl.blocking, run.plan.num_samples
        self._actors, self._rewards, self._loader = services.actors, services.rewards, loader

    def before_push(self, iteration: int) -> int:
        """See `Rollout`: each iteration has its version."""
        return iteration

    def after_push(self, iteration: int) -> None:
        """See `Rollout`."""

    def run(self, iteration: int) -> list[WorkerReport]:
        """See `Rollout`: an iteration has one rollout of the same index."""
        return self.generate(iteration)

    def state_dict(self) -> dict[str, Any]:
        """Return nothing: the index of the iteration is that of the rollout."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `Rollout`."""

    def generate(self, rollout_index: int) -> list[WorkerReport]:
        """Generate and score one batch of prompts. Scoring overlaps with generation unless `blocking` is set."""
        self._loader.put(rollout_index)
        if self._blocking:
            generated = self._actors.generate(rollout_index).wait()
            return generated + self._rewards.start(self._num_samples).wait()
        # started first: it waits in the data plane and scores rows as they come
        scoring = self._rewards.start(self._num_samples)
        generated, scored = self._actors.generate(rollout_index).wait_with(scoring)
        return generated + scored


class FilteredRollout:
    """Generate until enough groups have a spread in their scores (DAPO's dynamic sampling, arXiv:2503.14476).

    `filter_groups_enable` reads one reward function and stops the run when `filter_groups_max_batches` rollouts do not
    suffice; `dynamic_sample` reads the total reward and, after `max_resample_times` further rollouts, fills up with groups
    without spread.
    """

    def __init__(
        self,
        run: Run,
        plane: DataPlane,
        synchronous: SynchronousRollout,
        group_filter: GroupFilter,
        model_rewards: ModelRewards | NoModelRewards,
    ) -> None:
        """Generate nothing yet.

        Args:
            synchronous: generates the groups of which some are kept.
            model_rewards: adds its scores to every rollout before groups are filtered.
        """
        self._plan, self._plane, self._synchronous, self._model_rewards = run.plan, plane, synchronous, model_rewards
        self._filter = group_filter
        self._timeout_s = run.deadlines.rows_s
        rollout = worker_columns(run.config)["actor_rollout"]
        # merged rows are put anew, so all columns that the rollout put have to be read back
        self._columns = [*SCORED_COLUMNS, *(name for name in rollout if name not in SCORED_COLUMNS)]
        self._next_rollout = 0

    def before_push(self, iteration: int) -> int:
        """See `Rollout`: each iteration has its version."""
        return iteration

    def after_push(self, iteration: int) -> None:
        """See `Rollout`."""

    def run(self, iteration: int) -> list[WorkerReport]:
        """See `Rollout`; as many rollouts as it takes."""
        reports: list[WorkerReport] = []
        kept: list[Batch] = []
        spare: list[Batch] = []
        expected, num_kept, num_rollouts = self._plan.num_train_prompts, 0, 0
        while num_kept < expected:
            if num_rollouts == self._filter.limit and self._filter.limit > 0:
                break
            reports += self._synchronous.generate(self._next_rollout)
            reports += self._model_rewards.run(self._plan.num_samples)
            self._next_rollout, num_rollouts = self._next_rollout + 1, num_rollouts + 1
            batch, _ = self._plane.get(
                "dynamic_sampling", self._columns, indexes=range(self._plan.num_samples), timeout_s=self._timeout_s
            )
            good, others = self._filter.split(batch)
            kept.append(good)
            spare.append(others)
            num_kept += len(good["rewards"]) // self._plan.n_samples_per_prompt
        if num_kept < expected:
            self._filter.give_up(iteration, f"{num_rollouts} rollouts", num_kept, expected)
        size = self._plan.num_train_samples
        # kept ones first: the others only fill up the batch
        parts = kept + spare
        rows = {name: take(concatenate([part[name] for part in parts]), range(size)) for name in self._columns}
        self._plane.clear(expected)
        self._plane.put(rows, range(size))
        metrics = Metrics()
        metrics.add_sum("train/num_gen_batches", num_rollouts)
        metrics.add_mean("train/kept_groups_fraction", num_kept, num_rollouts * self._plan.num_prompts)
        return [*reports, WorkerReport(metrics)]

    def state_dict(self) -> dict[str, Any]:
        """See `Rollout`."""
        return {"draws": self._next_rollout}  # the key of earlier checkpoints

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `Rollout`."""
        self._next_rollout = state["draws"]


class GroupFilter:
    """Keep the groups whose scores vary: by one reward function, or by the total reward.

    Attributes:
        limit: rollouts' worth of prompts that an iteration may generate for; 0 or less: no limit.
    """

    def __init__(self, metric: str | None, group_size: int, limit: int) -> None:
        """Keep the rule.

        Args:
            metric: the reward function whose scores have to vary; None for the total reward.
        """
        self._metric, self._group_size, self.limit = metric, group_size, limit

    @classmethod
    def from_config(cls, rl: RLConfig, group_size: int) -> GroupFilter | None:
        """Return the filter that the run file asks for: `filter_groups_enable`, or `dynamic_sample`."""
        if rl.filter_groups_enable:
            return cls(rl.filter_groups_metric, group_size, rl.filter_groups_max_batches)
        return cls(None, group_size, 1 + rl.max_resample_times) if rl.dynamic_sample else None

    def split(self, batch: Batch) -> tuple[Batch, Batch]:
        """Return the rows of the groups whose scores vary, and the others."""
        if (name := self._metric) is None:
            scores = ragged(batch["rewards"]).tensor()
        else:
            results = objects(batch["reward_results"])
            scores = torch.tensor([float(result.parts.get(name, math.nan)) for result in results])
        varies = groups_with_signal(scores, self._group_size)
        indexes = (rows_of_groups(groups, self._group_size).tolist() for groups in (varies, ~varies))
        good, others = ({name: take(column, rows) for name, column in batch.items()} for rows in indexes)
        return good, others

    def give_up(self, iteration: int, generated: str, num_kept: int, expected: int) -> None:
        """Accept that too few groups vary: without a metric, others fill up the batch.

        Raises:
            RuntimeError: there is a metric.
        """
        if self._metric is not None:
            raise RuntimeError(
                f"iteration {iteration + 1}: {generated} gave {num_kept} of {expected} groups whose {self._metric} varies "
                "(filter_groups_max_batches); raise that limit, or train on prompts that are neither too easy nor too hard."
            )
