"""From prompts to scored responses in the data plane, with or without filtering of groups."""

from __future__ import annotations

import math
from typing import Protocol

import torch

from mindspeed_rl.algorithms.masks import groups_with_signal, rows_of_groups
from mindspeed_rl.config import BatchPlan, Run
from mindspeed_rl.data.prompts import PromptDataset
from mindspeed_rl.data.samplers import BatchSampler
from mindspeed_rl.dataplane.client import DataPlane
from mindspeed_rl.dataplane.columns import Batch, concatenate, objects, ragged, take
from mindspeed_rl.observability.metrics import Metrics
from mindspeed_rl.trainers.model_rewards import ModelRewards, NoModelRewards
from mindspeed_rl.trainers.services import Services
from mindspeed_rl.workers.reports import WorkerReport

#: what `PromptFeed` puts into the data plane
PROMPT_COLUMNS = ("prompt_ids", "labels", "extra")

#: what a scored row consists of
SCORED_COLUMNS = (
    "prompt_ids",
    "labels",
    "extra",
    "responses",
    "rollout_log_probs",
    "response_length",
    "input_ids",
    "prompt_length",
    "truncated",
    "weight_version",
    "rewards",
    "reward_results",
)


class Rollout(Protocol):
    """Fills the data plane with the rows that an iteration trains on."""

    def run(self, iteration: int) -> list[WorkerReport]:
        """Rows have responses and the scores of the reward functions."""

    def state_dict(self) -> dict[str, int]:
        """What a resumed run needs to draw what the uninterrupted one would have drawn."""

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continues where `state_dict` was taken."""


class PromptFeed:
    """Puts the prompts of an iteration into the data plane, each n_samples_per_prompt times."""

    def __init__(self, prompts: PromptDataset, plane: DataPlane, plan: BatchPlan, *, seed: int, shuffle: bool) -> None:
        self._prompts, self._plane, self._plan = prompts, plane, plan
        self._sampler = BatchSampler(len(prompts), seed=seed, shuffle=shuffle)

    def put(self, draw: int) -> None:
        """The data plane holds the prompts of draw number `draw` and nothing else."""
        size = self._plan.num_prompts
        items = [self._prompts[index] for index in next(self._sampler.batches(draw * size, size))]
        repeat = self._plan.n_samples_per_prompt
        rows = [item for item in items for _ in range(repeat)]
        self._plane.clear(size)
        self._plane.put(
            {
                "prompt_ids": [torch.tensor(item["prompt_ids"], dtype=torch.int64) for item in rows],
                "labels": [item["label"] for item in rows],
                "extra": [item["columns"] for item in rows],
            },
            range(len(rows)),
        )


class SynchronousRollout:
    """One draw of prompts by the weights that were pushed last, all groups kept."""

    def __init__(self, run: Run, services: Services, feed: PromptFeed) -> None:
        self._blocking, self._num_samples = run.rl.blocking, run.plan.num_samples
        self._actors, self._rewards, self._feed = services.actors, services.rewards, feed

    def run(self, iteration: int) -> list[WorkerReport]:
        return self.draw(iteration, iteration)

    def state_dict(self) -> dict[str, int]:
        return {}  # the iteration's number is the draw's number

    def load_state_dict(self, state: dict[str, int]) -> None:
        pass

    def draw(self, iteration: int, draw: int) -> list[WorkerReport]:
        """Generates and scores one draw. Scoring runs beside generation unless `blocking` is set."""
        self._feed.put(draw)
        if self._blocking:
            generated = self._actors.generate(draw).wait()
            return generated + self._rewards.start(self._num_samples).wait()
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
        rl = run.rl
        self._plan, self._plane, self._synchronous, self._model_rewards = run.plan, plane, draws, model_rewards
        self._metric = rl.filter_groups_metric if rl.filter_groups_enable else None
        self._limit = rl.filter_groups_max_batches if rl.filter_groups_enable else 1 + rl.max_resample_times
        self._timeout_s = rl.wait_timeout_s
        self._draws = 0

    def run(self, iteration: int) -> list[WorkerReport]:
        reports: list[WorkerReport] = []
        kept: list[Batch] = []
        spare: list[Batch] = []
        wanted, num_kept, draws = self._plan.num_train_prompts, 0, 0
        while num_kept < wanted:
            if draws == self._limit and self._limit > 0:
                break
            reports += self._synchronous.draw(iteration, self._draws)
            reports += self._model_rewards.run(self._plan.num_samples)
            self._draws, draws = self._draws + 1, draws + 1
            batch, _ = self._plane.get(
                "dynamic_sampling", list(SCORED_COLUMNS), indexes=range(self._plan.num_samples), timeout_s=self._timeout_s
            )
            groups = groups_with_signal(self._scores(batch), self._plan.n_samples_per_prompt)
            kept.append(self._rows(batch, groups))
            spare.append(self._rows(batch, ~groups))
            num_kept += int(groups.sum())
        if num_kept < wanted and self._metric is not None:
            raise RuntimeError(
                f"iteration {iteration + 1}: {draws} rollouts gave {num_kept} of {wanted} groups whose {self._metric} varies "
                "(filter_groups_max_batches); raise that limit, or train on prompts that are neither too easy nor too hard."
            )
        size = self._plan.num_train_samples
        parts = kept + spare
        merged = {name: take(concatenate([part[name] for part in parts]), range(size)) for name in SCORED_COLUMNS}
        self._plane.clear(wanted)
        self._plane.put(merged, range(size))
        metrics = Metrics()
        metrics.add_sum("train/num_gen_batches", draws)
        metrics.add_mean("train/kept_groups_fraction", num_kept, draws * self._plan.num_prompts)
        return [*reports, WorkerReport(metrics)]

    def _scores(self, batch: Batch) -> torch.Tensor:
        if self._metric is None:
            return ragged(batch["rewards"]).tensor()
        name = self._metric
        return torch.tensor([float(result.parts.get(name, math.nan)) for result in objects(batch["reward_results"])])

    def _rows(self, batch: Batch, groups: torch.Tensor) -> Batch:
        rows = rows_of_groups(groups, self._plan.n_samples_per_prompt).tolist()
        return {name: take(column, rows) for name, column in batch.items()}

    def state_dict(self) -> dict[str, int]:
        return {"draws": self._draws}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._draws = state["draws"]


def make_rollout(
    run: Run, services: Services, feed: PromptFeed, model_rewards: ModelRewards | NoModelRewards
) -> tuple[Rollout, ModelRewards | NoModelRewards]:
    """The rollout that the run file asks for, and the model rewards that are still to be added to what it yields.

    A filter that looks at one reward function leaves the reward model only the groups that are kept; one that looks at the
    total reward needs the model's scores of every draw.
    """
    rl = run.rl
    synchronous = SynchronousRollout(run, services, feed)
    if rl.filter_groups_enable:
        return FilteredRollout(run, services.plane, synchronous, NoModelRewards()), model_rewards
    if rl.dynamic_sample:
        return FilteredRollout(run, services.plane, synchronous, model_rewards), NoModelRewards()
    return synchronous, model_rewards
