"""From rewards to advantages, returns and loss masks, on the driver, over the whole batch at once."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from mindspeed_rl.algorithms.advantages import compute_advantages
from mindspeed_rl.algorithms.interfaces import AdvantageInputs
from mindspeed_rl.algorithms.kl import kl_penalty
from mindspeed_rl.algorithms.masks import entropy_threshold, filter_overlong
from mindspeed_rl.algorithms.mismatch import measure_depths
from mindspeed_rl.dataplane.client import DataPlane
from mindspeed_rl.dataplane.columns import Batch, objects, ragged
from mindspeed_rl.observability.metrics import Metrics
from mindspeed_rl.rewards.samples import RewardResult
from mindspeed_rl.rewards.totals import compute_reward_metrics, list_components, read_part_weights
from mindspeed_rl.rollout.trajectory import NO_VERSION
from mindspeed_rl.run import Run
from mindspeed_rl.trainers.evaluation import GreedyBaselines
from mindspeed_rl.trainers.old_policy import RECORDED_DIFFERENCE
from mindspeed_rl.trainers.role_advantages import compute_role_advantages
from mindspeed_rl.trainers.schedule import Schedule
from mindspeed_rl.trainers.staleness import check_versions

_LOG = logging.getLogger(__name__)
_PERCENTILES = (50, 90, 99)

#: distinct reasons of failed samples that a run shows
_MAX_REASONS = 20

#: prefix of the score metrics by stage
_SCORE_PREFIX = {"ray_grpo": "grpo", "ray_dapo": "dapo", "ray_ppo": "critic"}


@dataclass(frozen=True)
class TrainBatch:
    """A batch as the update will read it.

    Attributes:
        iteration: the first is 0.
        inputs: inputs of the estimator; `inputs.response_mask` is False in rows without a score.
        totals: [B] total rewards, also where only teachers judge and no reward trains; NaN where there is none.
        advantages: [B, R].
        young_mask: [B, R] bool; tokens that are young enough to train.
        loss_mask: [B, R] bool; tokens that train.
        kl_coef: KL coefficient of this iteration.
        has_old_log_probs, has_ref_log_probs: rows have these columns.
        old_column: column with the log-probs of the old policy.
        has_ratios: the update leaves the log-probs of its last step in the rows.
        marked: [B, R] bool; tokens that the loss has chosen (`PolicyLoss.marks`); None for a loss that chooses none.
    """

    iteration: int
    inputs: AdvantageInputs
    totals: Tensor
    advantages: Tensor
    young_mask: Tensor
    loss_mask: Tensor
    kl_coef: float
    has_old_log_probs: bool
    has_ref_log_probs: bool
    old_column: str
    has_ratios: bool
    marked: Tensor | None = None


def _staleness_metrics(versions: Sequence[Tensor], version: int) -> Metrics:
    """Return rollout/staleness_* and rollout/mixed_fraction.

    A token's staleness is the number of versions by which it is older than the weights that train: percentiles (p50, p90, p99),
    mean and maximum. mixed_fraction: rows with tokens of several versions.
    """
    metrics = Metrics()
    versions = [row[row != NO_VERSION] for row in versions]
    ages = version - torch.cat([row.to(torch.int64) for row in versions])
    if not len(ages):
        return metrics
    ordered = ages.sort().values
    for percentile in _PERCENTILES:
        # the smallest age that so many percent of the tokens do not exceed
        index = -(-percentile * len(ordered) // 100) - 1
        metrics.add_last(f"rollout/staleness_p{percentile}", float(ordered[index]))
    metrics.add_mean("rollout/staleness_mean", float(ages.sum()), len(ages))
    metrics.add_max("rollout/staleness_max", float(ordered[-1]))
    mixed = [int(row.min()) != int(row.max()) for row in versions if len(row)]
    metrics.add_mean("rollout/mixed_fraction", sum(mixed), len(mixed))
    return metrics


def _young_tokens(versions: Sequence[Tensor], version: int, limit: float | None, width: int) -> Tensor:
    """Return [rows, width] bool; True on tokens that are at most `limit` versions older than the weights that train."""
    young = torch.zeros(len(versions), width, dtype=torch.bool)
    for index, row in enumerate(versions):
        young[index, : len(row)] = True if limit is None else version - row <= limit
    return young


class Advantages:
    """Read scored rows, write advantages.

    Attributes:
        COLUMNS: that it puts into the data plane.
        entropy_threshold: entropy threshold of top-entropy masking in the last batch, None without.
    """

    COLUMNS = ("advantages", "returns", "scored_mask", "loss_mask", "marked_tokens")

    def __init__(
        self,
        run: Run,
        plane: DataPlane,
        baselines: GreedyBaselines,
        schedule: Schedule,
        observers: Sequence[Callable[[TrainBatch], None]],
    ) -> None:
        """Compute nothing yet."""
        self._rl, self._plan, self._stage, self._timeout_s = run.rl, run.plan, run.stage, run.deadlines.rows_s
        self._plane, self._baselines, self._schedule = plane, baselines, schedule
        term = schedule.objective.distillation
        self._trains_rewards = term is None or term.use_task_rewards
        self._observers, self._has_roles = observers, run.rl.agent_loop_name == "roles"
        self._seed, self._marks = run.config.actor_config.seed, schedule.objective.loss.load_marks()
        self.entropy_threshold: float | None = None
        self._unscored = 0  # iterations in a row
        self._reasons: set[str] = set()  # of failed samples, as shown

    def compute(self, iteration: int, *, kl_coef: float) -> Metrics:
        """Add advantages, returns, scored_mask (tokens that count at all) and loss_mask (tokens that train) to the rows.

        Raises:
            RuntimeError: responses come from weights that are too old, or none has had a score for too long.
        """
        rows, objective, admission = range(self._plan.num_train_samples), self._schedule.objective, self._schedule.admission
        batch, _ = self._plane.get("compute_advantage", self._list_columns(), indexes=rows, timeout_s=self._timeout_s)
        versions, version = list(batch["weight_versions"]), admission.version(iteration)
        check_versions(versions, version, admission.bound, iteration)
        masks = ragged(batch["response_mask"])
        totals = rewards = ragged(batch["rewards"]).tensor()
        sampled, lengths = masks.pad(0), masks.lengths().tolist()
        width = sampled.size(1)
        measured = rewards[~rewards.isnan()]
        if not self._trains_rewards:
            # the teachers judge every row; rewards are only measured
            rewards = torch.zeros_like(rewards)
        scored = ~rewards.isnan()
        greedy_rewards = self._baselines.rewards() if "greedy_baseline" in objective.needs else None
        self._unscored = 0 if scored.any() else self._unscored + 1
        if self._unscored:
            self._warn_unscored(iteration, objects(batch["reward_results"]))
        else:
            self._warn_failed(iteration, objects(batch["reward_results"]))
        metrics = self._score_metrics(batch, measured)
        if greedy_rewards is not None:
            metrics.add_mean("remax/greedy_unscored", greedy_rewards.isnan().sum().item(), len(greedy_rewards))
            scored = scored & ~greedy_rewards.isnan()
        response_mask = sampled & scored[:, None]  # a row whose score or baseline failed and was dropped takes no part
        # masked out is not enough: 0 times NaN is NaN
        inputs = self._inputs(batch, rewards.nan_to_num(0.0), scored, response_mask, kl_coef, metrics)
        inputs = replace(inputs, greedy_rewards=greedy_rewards)
        if self._has_roles:
            advantages, returns, of_roles = compute_role_advantages(
                inputs,
                objects(batch["trajectories"]),
                objective,
                weight=self._rl.trajectory_reward_weight if self._trains_rewards else 0.0,
            )
            metrics.merge(of_roles)
        else:
            advantages, returns, estimator_metrics = compute_advantages(inputs, objective)
            metrics.merge(estimator_metrics)
        loss_mask = young = response_mask & _young_tokens(versions, version, self._rl.off_policy_token_limit, width)
        if admission.bound:
            metrics.merge(_staleness_metrics(versions, version))
            metrics.add_mean("rollout/old_tokens_masked", (response_mask & ~young).sum().item(), response_mask.sum().item())
        if objective.overlong_filter:
            loss_mask = filter_overlong(loss_mask, ragged(batch["truncated"]).tensor().bool())
        if objective.masks_by_entropy:
            entropies = ragged(batch["entropies"]).pad(0.0, width)
            shards = [(entropies, loss_mask)]
            # the overlong filter may have left no token: any threshold will do
            self.entropy_threshold = entropy_threshold(shards, objective.top_entropy_quantile) if loss_mask.any() else 0.0
        written = {"advantages": advantages, "returns": returns, "scored_mask": response_mask, "loss_mask": loss_mask}
        if self._marks is not None:
            old_log_probs = ragged(batch[self._schedule.old_policy.column]).pad(0.0, width)
            generator = torch.Generator().manual_seed(self._seed * 1_000_003 + iteration)  # the same after a resume
            written["marked_tokens"] = self._marks(advantages, old_log_probs, loss_mask, objective, generator)
        self._plane.put(
            {name: [row[:length] for row, length in zip(values, lengths)] for name, values in written.items()}, rows
        )
        prepared = TrainBatch(
            iteration,
            inputs,
            totals,
            advantages,
            young,
            loss_mask,
            kl_coef,
            has_old_log_probs=self._schedule.computes_old_log_probs(iteration) or self._schedule.old_policy.was_computed,
            has_ref_log_probs=self._schedule.needs_ref,
            old_column=self._schedule.old_policy.column,
            has_ratios=self._schedule.writes_ratios(iteration),
            marked=written.get("marked_tokens"),
        )
        for observer in self._observers:
            observer(prepared)
        return metrics

    def compare_log_probs(self, iteration: int, count: int) -> tuple[Metrics, bool]:
        """Return how far the log-probs that the rollout engine recorded are from the trainer's, over the first `count` rows.

        Returns:
            RECORDED_DIFFERENCE and `_max` of the tokens of the weights that train, else of older ones, which differ by what was
            learnt since too, and the differences by depth of rows that are of the weights that train; True where tokens are.
        """
        columns = ["old_log_probs", "rollout_log_probs", "response_mask", "weight_versions"]
        batch, _ = self._plane.get("compute_advantage", columns, indexes=range(count), timeout_s=self._timeout_s)
        newest, older, admission, metrics = list[Tensor](), list[Tensor](), self._schedule.admission, Metrics()
        version, is_synced = admission.version(iteration), admission.is_synced(iteration)
        for row in range(count):
            computed, recorded, mask, versions = (torch.as_tensor(batch[name][row]) for name in columns)
            distance, is_newest = (computed.float() - recorded.float()).abs(), (versions == version) & is_synced
            newest.append(distance[mask.bool() & is_newest])
            older.append(distance[mask.bool() & ~is_newest])
            if self._schedule.objective.log_rollout_offpolicy_metrics and not len(older[-1]):
                metrics.merge(measure_depths(computed[None], recorded[None], mask[None].bool()))
        is_current = any(map(len, newest))
        distance = torch.cat(newest if is_current else older)
        if len(distance):
            metrics.add_mean(f"{RECORDED_DIFFERENCE}_mean", float(distance.double().sum()), len(distance))
            metrics.add_max(f"{RECORDED_DIFFERENCE}_max", float(distance.max()))
        return metrics, is_current

    def _list_columns(self) -> list[str]:
        """Return the columns that the estimator and the masks read."""
        objective = self._schedule.objective
        reads_old = objective.kl_place == "reward" or self._marks is not None or "squared_probs" in objective.needs
        some = {
            "ref_log_probs": objective.kl_place == "reward",
            self._schedule.old_policy.column: reads_old,
            "values": "values" in objective.needs,
            "squared_probs": "squared_probs" in objective.needs,
            "entropies": objective.masks_by_entropy,
            "trajectories": self._has_roles,
        }
        always = ("rewards", "reward_results", "response_mask", "truncated", "weight_versions")
        return [*always, *(name for name, is_read in some.items() if is_read)]

    def _inputs(
        self, batch: Batch, rewards: Tensor, scored: Tensor, response_mask: Tensor, kl_coef: float, metrics: Metrics
    ) -> AdvantageInputs:
        objective, width = self._schedule.objective, response_mask.size(1)
        tensors: dict[str, Any] = {"scored": scored}
        if objective.kl_place == "reward":
            old, ref = (ragged(batch[name]).pad(0.0, width) for name in (self._schedule.old_policy.column, "ref_log_probs"))
            kl = torch.where(response_mask, kl_penalty(old, ref, objective.kl, clamp=objective.kl_clamp), 0.0)
            tensors |= {"kl": kl, "kl_coef": kl_coef}
            metrics.add_mean("reward/kl", kl.sum().item(), response_mask.sum().item())
        for name in ("values", "old_log_probs", "squared_probs"):
            if name in objective.advantage.needs:
                tensors[name] = ragged(batch[name]).pad(0.0, width)
        if "reward_parts" in objective.needs:
            results = objects(batch["reward_results"])
            weights, scores = list_components(read_part_weights(self._rl), results)
            tensors |= {"reward_components": torch.tensor(scores), "reward_weights": weights}
        return AdvantageInputs(rewards, response_mask, group_size=self._plan.n_samples_per_prompt, **tensors)

    def _score_metrics(self, batch: Batch, scores: Tensor) -> Metrics:
        metrics = Metrics()
        metrics.add_spread(f"{_SCORE_PREFIX[self._stage]}/score", scores.tolist())
        results = objects(batch["reward_results"])
        for name, value in compute_reward_metrics(results, group_size=self._plan.n_samples_per_prompt).items():
            metrics.add_mean(name, value)
        return metrics

    def _warn_failed(self, iteration: int, results: Sequence[RewardResult]) -> None:
        """Warn of failed samples with their most common reason, unless it was shown before."""
        failures = Counter(result.error for result in results if result.failed)
        if failures and (reason := failures.most_common(1)[0][0]) not in self._reasons and len(self._reasons) < _MAX_REASONS:
            self._reasons.add(reason)
            text = f"{failures.total()} of {len(results)} samples failed; {failures[reason]} of them: {reason}"
            _LOG.warning("warning: iteration %d: %s", iteration + 1, text)

    def _warn_unscored(self, iteration: int, results: Sequence[RewardResult]) -> None:
        """Warn of an iteration without any score, and stop a run in which there are too many of them.

        Raises:
            RuntimeError: `unscored_iterations_limit` iterations in a row.
        """
        limit = self._rl.unscored_iterations_limit
        states = Counter(result.state for result in results)
        counts = ", ".join(f"{count} {state}" for state, count in states.most_common())
        failures = Counter(result.error for result in results if result.failed)
        reason = "a reward function that returns None has no opinion"
        if failures:
            reason = f"the most common failure is {failures.most_common(1)[0][0]}"
        text = f"iteration {iteration + 1}: none of {len(results)} responses got a score ({counts}), so nothing is learnt; "
        text += f"{reason}."
        if limit and self._unscored >= limit:
            raise RuntimeError(f"{text} That is iteration {self._unscored} in a row (rl_config.unscored_iterations_limit).")
        _LOG.warning("warning: %s", text)
