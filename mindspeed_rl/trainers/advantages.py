"""From rewards to advantages, returns and loss masks, on the driver, over the whole batch at once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mindspeed_rl.algorithms.advantages import compute_advantages
from mindspeed_rl.algorithms.interfaces import AdvantageInputs
from mindspeed_rl.algorithms.kl import kl_penalty
from mindspeed_rl.algorithms.masks import entropy_threshold, overlong_filter
from mindspeed_rl.config import Run
from mindspeed_rl.dataplane.client import DataPlane
from mindspeed_rl.dataplane.columns import Batch, objects, ragged
from mindspeed_rl.observability.metrics import Metrics
from mindspeed_rl.rewards.samples import reward_functions
from mindspeed_rl.rewards.totals import MODEL_PART, TRAJECTORY_PART, reward_metrics
from mindspeed_rl.trainers.admission import admission_of
from mindspeed_rl.trainers.greedy_baselines import GreedyBaselines, NoBaselines
from mindspeed_rl.trainers.key_data import KeyData
from mindspeed_rl.trainers.rollout_logger import RolloutLogger
from mindspeed_rl.trainers.rollout_record import save_rollout
from mindspeed_rl.trainers.schedule import Schedule
from mindspeed_rl.trainers.staleness import check_versions, staleness_metrics, young_tokens

#: what this stage puts into the data plane
ADVANTAGE_COLUMNS = ("advantages", "returns", "scored_mask", "loss_mask")

#: prefix of the score metrics by stage
SCORE_PREFIX = {"ray_grpo": "grpo", "ray_dapo": "dapo", "ray_ppo": "critic"}


class Advantages:
    """Reads scored rows, writes advantages.

    Attributes:
        entropy_threshold: of top-entropy masking in the last batch, None without.
    """

    def __init__(
        self,
        run: Run,
        plane: DataPlane,
        logger: RolloutLogger,
        baselines: GreedyBaselines | NoBaselines,
        schedule: Schedule,
    ) -> None:
        self._run, self._plan = run, run.plan
        self._plane, self._logger, self._baselines, self._schedule = plane, logger, baselines, schedule
        self._key_data = KeyData(run, plane)
        self.entropy_threshold: float | None = None
        self._admission, self._token_limit = admission_of(run), run.rl.off_policy_token_limit
        self._unscored_limit = run.rl.unscored_iterations_limit
        self._unscored = 0  # iterations in a row

    def compute(self, iteration: int, *, kl_coef: float) -> Metrics:
        """Rows have advantages, returns, scored_mask (what counts at all) and loss_mask (what trains).

        Raises:
            RuntimeError: responses come from other weights than the newest, or none has had a score for too long.
        """
        rows, objective = range(self._plan.num_train_samples), self._schedule.objective
        columns = ["rewards", "reward_results", "response_mask", "truncated", "weight_versions"]
        if objective.kl_place == "reward":
            columns += ["old_log_probs", "ref_log_probs"]
        if objective.has_critic:
            columns.append("values")
        if objective.masks_by_entropy:
            columns.append("entropies")
        batch, _ = self._plane.get("compute_advantage", columns, indexes=rows, timeout_s=self._run.deadlines.rows_s)
        versions, version = list(batch["weight_versions"]), self._admission.version(iteration)
        check_versions(versions, version, self._admission.bound, iteration)
        masks = ragged(batch["response_mask"])
        rewards = ragged(batch["rewards"]).tensor()
        sampled, lengths = masks.padded(0), masks.lengths().tolist()
        width = sampled.size(1)
        scored = ~rewards.isnan()
        self._unscored = 0 if scored.any() else self._unscored + 1
        if self._unscored:
            results: Sequence[Any] = batch["reward_results"]
            self._say_unscored(iteration, [result.state for result in results])
        response_mask = sampled & scored[:, None]  # a row whose score failed and was dropped takes no part
        metrics = self._score_metrics(batch, rewards[scored])
        # masked out is not enough: 0 times NaN is NaN
        inputs = self._inputs(batch, rewards.nan_to_num(0.0), scored, response_mask, kl_coef, metrics)
        advantages, returns, estimator_metrics = compute_advantages(inputs, objective)
        metrics.merge(estimator_metrics)
        loss_mask = young = response_mask & young_tokens(versions, version, self._token_limit, width)
        if self._admission.bound:
            metrics.merge(staleness_metrics(versions, version))
            metrics.add_mean("rollout/old_tokens_masked", (response_mask & ~young).sum().item(), response_mask.sum().item())
        if objective.overlong_filter:
            loss_mask = overlong_filter(loss_mask, ragged(batch["truncated"]).tensor().bool())
        if objective.masks_by_entropy:
            entropies = ragged(batch["entropies"]).padded(0.0, width)
            shards = [(entropies, loss_mask)]
            # the overlong filter may have left no token: any threshold will do
            self.entropy_threshold = entropy_threshold(shards, objective.top_entropy_quantile) if loss_mask.any() else 0.0
        self._plane.put(
            {
                "advantages": [row[:length] for row, length in zip(advantages, lengths)],
                "returns": [row[:length] for row, length in zip(returns, lengths)],
                "scored_mask": [row[:length] for row, length in zip(response_mask, lengths)],
                "loss_mask": [row[:length] for row, length in zip(loss_mask, lengths)],
            },
            rows,
        )
        with_trainer = self._schedule.computes_old_log_probs(iteration)
        with_ratios = self._schedule.writes_ratios(iteration)
        masks = response_mask, loss_mask
        self._logger.completions(
            iteration + 1, self._plane, advantages, *masks, with_trainer=with_trainer, with_ratios=with_ratios
        )
        with_reference = self._schedule.needs_reference
        self._key_data.save(iteration, advantages, loss_mask, with_trainer=with_trainer, with_reference=with_reference)
        if self._schedule.saves_rollout(iteration):
            path = self._run.folder / "rollouts" / f"iteration_{iteration + 1:07d}.safetensors"
            save_rollout(path, self._run, self._plane, inputs, young, kl_coef=kl_coef, with_reference=with_reference)
        return metrics

    def _inputs(
        self, batch: Batch, rewards: Tensor, scored: Tensor, response_mask: Tensor, kl_coef: float, metrics: Metrics
    ) -> AdvantageInputs:
        objective, width = self._schedule.objective, response_mask.size(1)
        tensors: dict[str, Any] = {"scored": scored}
        if objective.kl_place == "reward":
            old, ref = (ragged(batch[name]).padded(0.0, width) for name in ("old_log_probs", "ref_log_probs"))
            kl = torch.where(response_mask, kl_penalty(old, ref, objective.kl, clamp=objective.kl_clamp), 0.0)
            tensors |= {"kl": kl, "kl_coef": kl_coef}
            metrics.add_mean("reward/kl", kl.sum().item(), response_mask.sum().item())
        if objective.has_critic:
            tensors["values"] = ragged(batch["values"]).padded(0.0, width)
        if "reward_parts" in objective.needs:
            results = objects(batch["reward_results"])
            names, weights = reward_functions(self._run.rl)
            for part, weight in (
                (TRAJECTORY_PART, self._run.rl.trajectory_reward_weight),
                (MODEL_PART, self._run.rl.reward_model_weight),
            ):
                if any(part in result.parts for result in results):
                    names, weights = [*names, part], [*weights, weight]
            tensors["reward_components"] = torch.tensor([[float(r.parts.get(name, 0.0)) for name in names] for r in results])
            tensors["reward_weights"] = tuple(weights)
        if "greedy_baseline" in objective.needs:
            tensors["greedy_rewards"] = self._baselines.rewards()
        return AdvantageInputs(rewards, response_mask, group_size=self._plan.n_samples_per_prompt, **tensors)

    def _score_metrics(self, batch: Batch, scores: Tensor) -> Metrics:
        metrics = Metrics()
        metrics.add_spread(f"{SCORE_PREFIX[self._run.stage]}/score", scores.tolist())
        results = objects(batch["reward_results"])
        for name, value in reward_metrics(results, group_size=self._plan.n_samples_per_prompt).items():
            metrics.add_mean(name, value)
        return metrics

    def _say_unscored(self, iteration: int, states: Sequence[str]) -> None:
        """Warns of an iteration that teaches nothing, and stops a run in which there are too many of them.

        Raises:
            RuntimeError: `unscored_iterations_limit` iterations in a row.
        """
        limit = self._unscored_limit
        counts = ", ".join(f"{count} {state}" for state, count in Counter(states).most_common())
        text = (
            f"iteration {iteration + 1}: none of {len(states)} responses got a score ({counts}), so nothing is learnt; a "
            "reward function that returns None has no opinion."
        )
        if limit and self._unscored >= limit:
            raise RuntimeError(f"{text} That is iteration {self._unscored} in a row (rl_config.unscored_iterations_limit).")
        self._logger.note(f"warning: {text}")
