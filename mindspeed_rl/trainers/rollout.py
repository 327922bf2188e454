"""From prompts to scored responses in the data plane, with or without filtering of groups."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from mindspeed_rl.config import BatchPlan, Run
from mindspeed_rl.data.prompts import PromptDataset, PromptItem
from mindspeed_rl.data.samplers import BatchSampler
from mindspeed_rl.dataplane.client import DataPlane
from mindspeed_rl.dataplane.columns import Batch, concatenate, take
from mindspeed_rl.observability.metrics import Metrics
from mindspeed_rl.runtime.reports import WorkerReport
from mindspeed_rl.trainers.group_filter import GroupFilter
from mindspeed_rl.trainers.model_rewards import ModelRewards, NoModelRewards
from mindspeed_rl.trainers.prompt_groups import prompt_rows
from mindspeed_rl.trainers.services import Services
from mindspeed_rl.workers.columns import WORKER_COLUMNS, worker_columns

#: what `PromptFeed` puts into the data plane
PROMPT_COLUMNS = ("prompt_ids", "labels", "extra")

#: what a scored row consists of
SCORED_COLUMNS = (*PROMPT_COLUMNS, *WORKER_COLUMNS["actor_rollout"], *WORKER_COLUMNS["rule_reward"])


class Rollout(Protocol):
    """Fills the data plane with the rows that an iteration trains on."""

    def before_push(self, iteration: int) -> int | None:
        """The version of the weights that the engine is to hold from now on; None while it keeps those that it has.

        Args:
            iteration: the next to train. What is being generated has been interrupted, or has ended.
        """

    def after_push(self, iteration: int) -> None:
        """The engine holds those weights."""

    def run(self, iteration: int) -> list[WorkerReport]:
        """Rows have responses and the scores of the reward functions."""

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs to draw what the uninterrupted one would have drawn, as plain values."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues where `state_dict` was taken."""


class PromptFeed:
    """The prompts of a run in their order; puts those of an iteration into the data plane, each n_samples_per_prompt times."""

    def __init__(self, prompts: PromptDataset, plane: DataPlane, plan: BatchPlan, *, seed: int, shuffle: bool) -> None:
        self._prompts, self._plane, self._plan = prompts, plane, plan
        self._sampler = BatchSampler(len(prompts), seed=seed, shuffle=shuffle)

    def item(self, number: int) -> PromptItem:
        """The prompt of this number, counted from the beginning of the run over all epochs."""
        return self._prompts[next(self._sampler.batches(number, 1))[0]]

    def put(self, draw: int) -> None:
        """The data plane holds the prompts of draw number `draw` and nothing else."""
        size = self._plan.num_prompts
        items = [self._prompts[index] for index in next(self._sampler.batches(draw * size, size))]
        repeat = self._plan.n_samples_per_prompt
        self._plane.clear(size)
        self._plane.put(prompt_rows(items, repeat), range(size * repeat))


class SynchronousRollout:
    """One draw of prompts by the weights that were pushed last, all groups kept."""

    def __init__(self, run: Run, services: Services, feed: PromptFeed) -> None:
        self._blocking, self._num_samples = run.rl.blocking, run.plan.num_samples
        self._actors, self._rewards, self._feed = services.actors, services.rewards, feed

    def before_push(self, iteration: int) -> int:
        return iteration

    def after_push(self, iteration: int) -> None:
        pass

    def run(self, iteration: int) -> list[WorkerReport]:
        return self.draw(iteration, iteration)

    def state_dict(self) -> dict[str, Any]:
        return {}  # the iteration's number is the draw's number

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        pass

    def draw(self, iteration: int, draw: int) -> list[WorkerReport]:
        """Generates and scores one draw. Scoring runs beside generation unless `blocking` is set."""
        self._feed.put(draw)
        if self._blocking:
            generated = self._actors.generate(draw).wait()
            return generated + self._rewards.start(self._num_samples).wait()
        # begun first: it waits in the data plane and scores rows as they come
        scoring = self._rewards.start(self._num_samples)
        generated, scored = self._actors.generate(draw).wait_with(scoring)
        return generated + scored


class FilteredRollout:
    """Draws until enough groups have a spread in their scores (DAPO's dynamic sampling, arXiv:2503.14476).

    `filter_groups_enable` looks at one reward function and stops the run when `filter_groups_max_batches` draws do not do;
    `dynamic_sample` looks at the total reward and, after `max_resample_times` more draws, fills up with groups without spread.
    """

    def __init__(
        self, run: Run, plane: DataPlane, draws: SynchronousRollout, model_rewards: ModelRewards | NoModelRewards
    ) -> None:
        """
        Args:
            draws: of which groups are kept.
            model_rewards: adds its scores to every draw before groups are looked at.
        """
        self._plan, self._plane, self._synchronous, self._model_rewards = run.plan, plane, draws, model_rewards
        self._filter = GroupFilter(run)
        self._timeout_s = run.deadlines.rows_s
        rollout = worker_columns(run.config)["actor_rollout"]
        # what is merged is put anew, so whatever the rollout put has to be read back
        self._columns = [*SCORED_COLUMNS, *(name for name in rollout if name not in SCORED_COLUMNS)]
        self._draws = 0

    def before_push(self, iteration: int) -> int:
        return iteration

    def after_push(self, iteration: int) -> None:
        pass

    def run(self, iteration: int) -> list[WorkerReport]:
        reports: list[WorkerReport] = []
        kept: list[Batch] = []
        spare: list[Batch] = []
        wanted, num_kept, draws = self._plan.num_train_prompts, 0, 0
        while num_kept < wanted:
            if draws == self._filter.limit and self._filter.limit > 0:
                break
            reports += self._synchronous.draw(iteration, self._draws)
            reports += self._model_rewards.run(self._plan.num_samples)
            self._draws, draws = self._draws + 1, draws + 1
            batch, _ = self._plane.get(
                "dynamic_sampling", self._columns, indexes=range(self._plan.num_samples), timeout_s=self._timeout_s
            )
            good, rest = self._filter.split(batch)
            kept.append(good)
            spare.append(rest)
            num_kept += len(good["rewards"]) // self._plan.n_samples_per_prompt
        if num_kept < wanted:
            self._filter.give_up(iteration, f"{draws} rollouts", num_kept, wanted)
        size = self._plan.num_train_samples
        # kept ones first: the others only fill up what is missing
        parts = kept + spare
        merged = {name: take(concatenate([part[name] for part in parts]), range(size)) for name in self._columns}
        self._plane.clear(wanted)
        self._plane.put(merged, range(size))
        metrics = Metrics()
        metrics.add_sum("train/num_gen_batches", draws)
        metrics.add_mean("train/kept_groups_fraction", num_kept, draws * self._plan.num_prompts)
        return [*reports, WorkerReport(metrics)]

    def state_dict(self) -> dict[str, Any]:
        return {"draws": self._draws}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._draws = state["draws"]
