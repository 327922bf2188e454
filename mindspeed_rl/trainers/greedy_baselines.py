"""ReMax's baselines: the reward of the greedy response to each prompt of the batch (arXiv:2310.10505)."""

from __future__ import annotations

import torch

from mindspeed_rl.config import Run
from mindspeed_rl.data.prompts import PromptItem
from mindspeed_rl.dataplane.client import DataPlane
from mindspeed_rl.dataplane.columns import objects
from mindspeed_rl.observability.metrics import Metrics
from mindspeed_rl.runtime.reports import WorkerReport
from mindspeed_rl.trainers.evaluation import Evaluator
from mindspeed_rl.trainers.model_rewards import ModelRewards, NoModelRewards


class GreedyBaselines:
    """`answer` needs the rollout engine, `rewards` does not: the device may have gone to training between the two."""

    def __init__(self, run: Run, plane: DataPlane, evaluator: Evaluator, model_rewards: ModelRewards | NoModelRewards) -> None:
        self._plan, self._timeout_s = run.plan, run.deadlines.rows_s
        self._plane, self._evaluator, self._model_rewards = plane, evaluator, model_rewards

    def answer(self) -> list[WorkerReport]:
        """Each prompt of the batch has been answered greedily and scored by the reward functions."""
        group, count = self._plan.n_samples_per_prompt, self._plan.num_train_samples
        batch, _ = self._plane.get(
            "compute_advantage", ["prompt_ids", "labels", "extra"], indexes=range(0, count, group), timeout_s=self._timeout_s
        )
        self._items = [
            PromptItem(prompt_ids=ids.tolist(), label=label, columns=columns)
            for ids, label, columns in zip(batch["prompt_ids"], objects(batch["labels"]), objects(batch["extra"]))
        ]
        self._responses, self._results = self._evaluator.score(self._items, greedy=True)
        metrics = Metrics()
        metrics.add_spread("remax/greedy_length", [len(response) for response in self._responses])
        return [WorkerReport(metrics)]

    def rewards(self) -> torch.Tensor:
        """[rows] reward of the greedy response to each row's prompt; 0 where its score failed."""
        results = self._model_rewards.add(self._results, self._items, self._responses)
        totals = torch.tensor([result.total or 0.0 for result in results])
        return totals.repeat_interleave(self._plan.n_samples_per_prompt)


class NoBaselines:
    """Stands in for the estimators that compare with something else."""

    def answer(self) -> list[WorkerReport]:
        return []

    def rewards(self) -> torch.Tensor:
        raise ValueError("greedy baselines are computed only for an adv_estimator that needs them")
