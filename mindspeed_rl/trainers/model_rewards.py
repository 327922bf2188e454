"""A reward model's scores: added to the results of the reward functions, in the data plane or for given responses."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from mindspeed_rl.data.prompts import PromptItem
from mindspeed_rl.dataplane.client import DataPlane
from mindspeed_rl.dataplane.columns import objects, ragged
from mindspeed_rl.observability.metrics import Metrics
from mindspeed_rl.rewards.samples import LARGEST_SCORE, RewardResult
from mindspeed_rl.rewards.totals import MODEL_PART
from mindspeed_rl.runtime.reports import WorkerReport
from mindspeed_rl.workers.fleet import Fleet


def _add_model_scores(results: Sequence[RewardResult], scores: Sequence[float], *, weight: float = 1.0) -> list[RewardResult]:
    """Return the results with a reward model's scores as an additional part; a row without rule scores has only this part.

    A failed sample stays failed; one whose score or total is no finite number in float32 fails.

    Raises:
        ValueError: not one score for each result.
    """
    if len(results) != len(scores):
        raise ValueError(f"there are {len(results)} samples but {len(scores)} reward model scores")
    new_results = []
    for result, score in zip(results, scores):
        parts = {**result.parts, MODEL_PART: float(score)}
        if result.failed:
            new_results.append(RewardResult(result.total, parts, result.state, result.error, result.penalty))
            continue
        # a row that the rules skipped has no total that could include its penalty
        total = (result.penalty if result.total is None else result.total) + weight * float(score)
        if abs(total) <= LARGEST_SCORE:
            new_results.append(RewardResult(total, parts, "ok", "", result.penalty))
            continue
        # a part that is no number would reach the metrics
        error = f"{MODEL_PART}: its score {float(score):g}, or the total with it, is not a finite number in float32"
        new_results.append(RewardResult(None, dict(result.parts), "failed", error, result.penalty))
    return new_results


@dataclass(frozen=True)
class ModelRewards:
    """Scores by a reward model.

    Attributes:
        scorers: workers with the model; None where functions alone score: nothing is added.
        weight: of the model's score in the total.
        timeout_s: longest wait for rows.
        part_weights: weight of each part of a reward, those of functions first.
    """

    scorers: Fleet | None
    plane: DataPlane
    weight: float
    timeout_s: float
    part_weights: Mapping[str, float] = field(default_factory=dict)

    def run(self, num_rows: int) -> list[WorkerReport]:
        """Add the model's score, as the last part, to `rewards` and `reward_results` of the first rows."""
        if self.scorers is None:
            return []
        reports = self.scorers.compute_model_rewards(num_rows)
        rows = range(num_rows)
        batch, _ = self.plane.get("reward_scores", ["reward_results", "rm_scores"], indexes=rows, timeout_s=self.timeout_s)
        scores = ragged(batch["rm_scores"]).tensor().tolist()
        results = _add_model_scores(objects(batch["reward_results"]), scores, weight=self.weight)
        # the reward functions have filled these cells before
        self.plane.put({"rewards": reward_totals(results), "reward_results": results}, rows, overwrite=True)
        metrics = Metrics()
        metrics.add_spread("reward_model/score", scores)
        return [*reports, WorkerReport(metrics)]

    def add(
        self, results: Sequence[RewardResult], items: Sequence[PromptItem], responses: Sequence[list[int]]
    ) -> list[RewardResult]:
        """Return the results of given responses with the model's score of each."""
        if self.scorers is None:
            return list(results)
        prompts = [list(item["prompt_ids"]) for item in items]
        replicas = [part for part in self.scorers.score(prompts, list(responses)) if part is not None]
        scores = [0.0] * len(prompts)
        for replica, part in enumerate(replicas):
            scores[replica :: len(replicas)] = part
        return _add_model_scores(results, scores, weight=self.weight)


def reward_totals(results: Sequence[RewardResult]) -> list[float]:
    """Return the column `rewards`: NaN where there is no score."""
    return [math.nan if result.total is None else result.total for result in results]
