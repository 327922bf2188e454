"""From prompts to scored responses in the data plane, with or without filtering of groups."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mindspeed_rl.algorithms.advantages import combine_components
from mindspeed_rl.algorithms.interfaces import AdvantageInputs
from mindspeed_rl.algorithms.masks import find_groups_with_signal
from mindspeed_rl.catalogue.objective import Objective
from mindspeed_rl.config import RLConfig
from mindspeed_rl.dataplane.client import DataPlane
from mindspeed_rl.dataplane.columns import Batch, concatenate, objects, ragged, take
from mindspeed_rl.observability.metrics import Metrics
from mindspeed_rl.rewards.samples import RewardResult
from mindspeed_rl.rewards.totals import list_components
from mindspeed_rl.run import Run
from mindspeed_rl.run.columns import list_worker_columns
from mindspeed_rl.run.phases import Phases
from mindspeed_rl.run.resume import ResumePoint
from mindspeed_rl.runtime.reports import WorkerReport
from mindspeed_rl.trainers.model_rewards import ModelRewards
from mindspeed_rl.trainers.prompt_loader import PromptLoader
from mindspeed_rl.workers.fleet import Fleet
from mindspeed_rl.workers.reward_group import RewardGroup

#: normalized scores are about 1; a sum below this is what adv_epsilon and rounding leave of scores that cancel
_NO_SIGNAL = 1e-4
#: columns of a scored row
SCORED_COLUMNS = (*PromptLoader.COLUMNS, *Phases.GENERATE.columns, *Phases.RULE_REWARDS.columns)


class Rollout:
    """Fill the data plane with the rows that an iteration trains on.

    A subclass generates; by default each iteration has new weights, and the position in the prompts is all that a run needs to
    resume.
    """

    def __init__(self, loader: PromptLoader) -> None:
        self._loader = loader

    def before_push(self, iteration: int) -> int | None:
        """Return the version of the weights that the engine is to have from now on; None while it keeps those that it has.

        Responses in flight have been interrupted, or have ended.

        Args:
            iteration: the next to train.
        """
        return iteration

    def after_push(self, iteration: int) -> None:
        """Take note that the engine has those weights."""

    def run(self, iteration: int) -> list[WorkerReport]:
        """Put rows with responses and the scores of the reward functions into the data plane."""
        raise NotImplementedError

    def state_dict(self) -> dict[str, object]:
        """Return, as plain values, the state from which a resumed run generates as the uninterrupted one would have."""
        return self._loader.state_dict()

    def load_state_dict(self, state: Mapping[str, Any], resume: ResumePoint) -> None:
        """Continue where `state_dict` was taken, by the rollout of this or another mode."""
        self._loader.load_state_dict(state, resume.iteration)


class SynchronousRollout(Rollout):
    """One batch of prompts by the newest weights, all groups kept."""

    def __init__(self, actors: Fleet, rewards: RewardGroup, loader: PromptLoader, num_samples: int, *, blocking: bool) -> None:
        super().__init__(loader)
        self._actors, self._rewards = actors, rewards
        self._num_samples, self._blocking = num_samples, blocking

    def run(self, iteration: int) -> list[WorkerReport]:
        """Generate and score the rollout of this index. Scoring overlaps with generation unless `blocking` is set."""
        self._loader.put()
        if self._blocking:
            generated = self._actors.generate(iteration).wait()
            return generated + self._rewards.start(self._num_samples).wait() + self._loader.report()
        # started first: it waits in the data plane and scores rows as they come
        scoring = self._rewards.start(self._num_samples)
        generated, scored = self._actors.generate(iteration).wait_with(scoring)
        return generated + scored + self._loader.report()


class FilteredRollout(Rollout):
    """Generate until enough groups have a spread in their scores (DAPO's dynamic sampling, arXiv:2503.14476).

    `filter_groups_enable` reads one reward function and stops the run when `filter_groups_max_batches` rollouts do not
    suffice; `dynamic_sample` reads the rewards that advantages are made of and, after `max_resample_times` further rollouts,
    fills up with groups without spread.
    """

    def __init__(
        self,
        run: Run,
        plane: DataPlane,
        loader: PromptLoader,
        synchronous: SynchronousRollout,
        group_filter: GroupFilter,
        model_rewards: ModelRewards,
    ) -> None:
        """Generate nothing yet.

        Args:
            synchronous: generates the groups of which some are kept.
            model_rewards: adds its scores to every rollout before groups are filtered.
        """
        super().__init__(loader)
        self._plan, self._plane, self._synchronous, self._model_rewards = run.plan, plane, synchronous, model_rewards
        self._filter = group_filter
        self._timeout_s = run.deadlines.rows_s
        rollout = list_worker_columns(run.config, images=run.config.reads_images)["actor_rollout"]
        # merged rows are put anew, so all columns that the rollout put have to be read back
        self._columns = [*SCORED_COLUMNS, *(name for name in rollout if name not in SCORED_COLUMNS)]
        self._next_rollout = 0

    def run(self, iteration: int) -> list[WorkerReport]:
        """See `Rollout`; as many rollouts as it takes."""
        reports: list[WorkerReport] = []
        accepted: list[Batch] = []
        spare: list[Batch] = []
        accepted_prompts: list[int] = []
        rejected: list[int] = []
        expected, num_accepted, num_rollouts = self._plan.num_train_prompts, 0, 0
        while num_accepted < expected:
            if num_rollouts == self._filter.limit and self._filter.limit > 0:
                break
            reports += self._synchronous.run(self._next_rollout)
            reports += self._model_rewards.run(self._plan.num_samples)
            self._next_rollout, num_rollouts = self._next_rollout + 1, num_rollouts + 1
            batch, _ = self._plane.get(
                "dynamic_sampling", self._columns, indexes=range(self._plan.num_samples), timeout_s=self._timeout_s
            )
            self._loader.observe(ragged(batch["rewards"]).tensor())
            size = self._plan.n_samples_per_prompt
            indexes: Batch = {"prompt": [index for index in self._loader.batch for _ in range(size)]}
            good, others = self._filter.split({**batch, **indexes})
            accepted_prompts += [int(index) for index in good.pop("prompt")[::size]]
            rejected += [int(index) for index in others.pop("prompt")[::size]]
            accepted.append(good)
            spare.append(others)
            num_accepted += len(good["rewards"]) // self._plan.n_samples_per_prompt
        if num_accepted < expected:
            self._filter.give_up(iteration, f"{num_rollouts} rollouts", num_accepted, expected)
        size = self._plan.num_train_samples
        self._loader.batch = [*accepted_prompts, *rejected][:expected]
        # accepted ones first: the others only fill up the batch
        parts = accepted + spare
        rows = {name: take(concatenate([part[name] for part in parts]), range(size)) for name in self._columns}
        self._plane.clear(expected)
        self._plane.put(rows, range(size))
        metrics = Metrics()
        metrics.add_sum("train/num_gen_batches", num_rollouts)
        metrics.add_mean("train/kept_groups_fraction", num_accepted, num_rollouts * self._plan.num_prompts)
        return [*reports, WorkerReport(metrics)]

    def state_dict(self) -> dict[str, object]:
        """See `Rollout`."""
        return super().state_dict() | {"draws": self._next_rollout}  # the key of earlier checkpoints

    def load_state_dict(self, state: Mapping[str, Any], resume: ResumePoint) -> None:
        """See `Rollout`."""
        super().load_state_dict(state, resume)
        self._next_rollout = state.get("draws", resume.iteration)


@dataclass(frozen=True)
class GroupFilter:
    """Keep the groups whose scores vary.

    Attributes:
        part_weights: weight of each part of a reward.
        metric: the reward function whose scores have to vary; None for what the advantages are made of.
        objective: with the estimator of the advantages.
        limit: rollouts' worth of prompts that an iteration may generate for; 0 or less: no limit.
    """

    part_weights: Mapping[str, float]
    metric: str | None
    objective: Objective
    group_size: int
    limit: int

    @classmethod
    def from_config(
        cls, rl: RLConfig, group_size: int, objective: Objective, part_weights: Mapping[str, float]
    ) -> GroupFilter | None:
        """Return the filter that the run file asks for: `filter_groups_enable`, or `dynamic_sample`.

        The second drops groups whose advantages are 0. It is None for estimators that give equal rewards other advantages.
        """
        if rl.filter_groups_enable:
            return cls(part_weights, rl.filter_groups_metric, objective, group_size, rl.filter_groups_max_batches)
        if not rl.dynamic_sample or objective.advantage.group_signal == "none":
            return None
        return cls(part_weights, None, objective, group_size, 1 + rl.max_resample_times)

    def split(self, batch: Batch) -> tuple[Batch, Batch]:
        """Return the rows of the groups whose scores vary, and the others."""
        scores, results = ragged(batch["rewards"]).tensor(), objects(batch["reward_results"])
        if (name := self.metric) is not None:
            scores = torch.tensor([float(result.parts.get(name, math.nan)) for result in results])
        elif self.objective.advantage.group_signal == "parts":
            scores = self._combine(scores, results)
        varies = find_groups_with_signal(scores, self.group_size).repeat_interleave(self.group_size)
        indexes = (selected.nonzero().flatten().tolist() for selected in (varies, ~varies))
        good, others = ({name: take(column, rows) for name, column in batch.items()} for rows in indexes)
        return good, others

    def _combine(self, rewards: Tensor, results: Sequence[RewardResult]) -> Tensor:
        """Return the scores that a group's advantages are made of where these are not the totals; NaN where there is none."""
        weights, components = list_components(self.part_weights, results)
        combined = combine_components(
            AdvantageInputs(
                rewards.nan_to_num(0.0),
                torch.ones(len(rewards), 1, dtype=torch.bool),
                group_size=self.group_size,
                scored=~rewards.isnan(),
                reward_components=torch.tensor(components),
                reward_weights=weights,
            ),
            self.objective,
        )
        nothing = _NO_SIGNAL * max(map(abs, weights))
        return torch.where(combined.abs() <= nothing, 0.0, combined).masked_fill(rewards.isnan(), torch.nan)

    def give_up(self, iteration: int, generated: str, num_accepted: int, expected: int) -> None:
        """Accept that too few groups vary: without a metric, others fill up the batch.

        Raises:
            RuntimeError: there is a metric.
        """
        if self.metric is not None:
            raise RuntimeError(
                f"iteration {iteration + 1}: {generated} gave {num_accepted} of {expected} groups whose {self.metric} varies "
                "(filter_groups_max_batches); raise that limit, or train on prompts that are neither too easy nor too hard."
            )
