"""A reward model's scores: added to what the reward functions said, in the data plane or for given responses."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from mindspeed_rl.config import Run
from mindspeed_rl.dataplane.client import DataPlane
from mindspeed_rl.dataplane.columns import objects, ragged
from mindspeed_rl.observability.metrics import Metrics
from mindspeed_rl.rewards.samples import RewardResult
from mindspeed_rl.rewards.totals import add_model_scores
from mindspeed_rl.runtime.reports import WorkerReport
from mindspeed_rl.workers.groups import ScoringGroup


class ModelRewards:
    """Scores by the reward model that these workers hold: those of the actor, or its own."""

    def __init__(self, run: Run, scorers: ScoringGroup, plane: DataPlane) -> None:
        self._weight = run.rl.reward_model_weight
        self._timeout_s = run.deadlines.rows_s
        self._scorers, self._plane = scorers, plane

    def run(self, num_rows: int) -> list[WorkerReport]:
        """`rewards` and `reward_results` of the first rows contain the model's score, as the last part."""
        reports = self._scorers.compute_model_rewards(num_rows)
        rows = range(num_rows)
        batch, _ = self._plane.get("reward_scores", ["reward_results", "rm_scores"], indexes=rows, timeout_s=self._timeout_s)
        scores = ragged(batch["rm_scores"]).tensor().tolist()
        results = self._add(objects(batch["reward_results"]), scores)
        totals = [math.nan if result.total is None else result.total for result in results]
        # the reward functions have filled these cells before
        self._plane.put({"rewards": totals, "reward_results": results}, rows, overwrite=True)
        metrics = Metrics()
        metrics.add_spread("reward_model/score", scores)
        return [*reports, WorkerReport(metrics)]

    def add(
        self, results: Sequence[RewardResult], items: Sequence[Mapping[str, Any]], responses: Sequence[list[int]]
    ) -> list[RewardResult]:
        """The results of given responses with the model's score of each.

        Args:
            items: have prompt_ids.
        """
        prompts = [list(item["prompt_ids"]) for item in items]
        shares = [share for share in self._scorers.score(prompts, list(responses)) if share is not None]
        scores = [0.0] * len(prompts)
        for replica, share in enumerate(shares):
            scores[replica :: len(shares)] = share
        return self._add(results, scores)

    def _add(self, results: Sequence[RewardResult], scores: Sequence[float]) -> list[RewardResult]:
        return add_model_scores(results, scores, weight=self._weight)


class NoModelRewards:
    """Stands in where only functions score."""

    def run(self, num_rows: int) -> list[WorkerReport]:
        return []

    def add(
        self, results: Sequence[RewardResult], items: Sequence[Mapping[str, Any]], responses: Sequence[list[int]]
    ) -> list[RewardResult]:
        return list(results)
