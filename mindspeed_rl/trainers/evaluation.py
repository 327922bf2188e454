"""Responses to held-out prompts, scored as the run scores its rollouts, and ReMax's baselines, which are made the same way."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

import torch

from mindspeed_rl.data.prompts import PromptDataset, PromptItem
from mindspeed_rl.dataplane.client import DataPlane
from mindspeed_rl.dataplane.columns import objects
from mindspeed_rl.observability.metrics import Metrics
from mindspeed_rl.rewards.samples import RewardResult
from mindspeed_rl.run import Run
from mindspeed_rl.runtime.reports import WorkerReport
from mindspeed_rl.trainers.model_rewards import ModelRewards, reward_totals
from mindspeed_rl.workers.fleet import Fleet
from mindspeed_rl.workers.reward_group import RewardGroup

#: responses of an evaluation that are recorded
_NUM_EXAMPLES = 8


class Evaluator:
    """Evaluate the weights that the rollout engine holds.

    Attributes:
        examples: prompts, responses and results of the last evaluation; the first few, always the same prompts.
    """

    examples: Sequence[tuple[PromptItem, list[int], RewardResult]] = ()

    def __init__(
        self,
        run: Run,
        prompts: PromptDataset | None,
        actors: Fleet,
        rewards: RewardGroup,
        model_rewards: ModelRewards,
    ) -> None:
        actor = run.config.actor_config
        self._items: list[PromptItem] = []
        if prompts is not None:
            self._items = [prompts[index] for index in range(min(len(prompts), actor.eval_num_prompts or len(prompts)))]
        self._actors, self._rewards, self._model_rewards = actors, rewards, model_rewards
        self._greedy, self._seed = run.rl.eval_greedy, actor.seed

    def run(self) -> Metrics:
        """Return eval/reward, eval/<part> and, where the first reward function tells right from wrong, eval/accuracy.

        The accuracy is the fraction of responses with that function's full score. Responses without a score are in no mean, and
        counted in eval/unscored.
        """
        responses, results = self.score(self._items, greedy=self._greedy)
        results = self._model_rewards.add(results, self._items, responses)
        self.examples = list(zip(self._items, responses, results))[:_NUM_EXAMPLES]
        metrics = Metrics()
        first = next(iter(self._model_rewards.part_weights), "")
        totals = [result.total for result in results if result.total is not None]
        if totals:
            metrics.add_mean("eval/reward", math.fsum(totals), len(totals))
            metrics.add_mean("eval/reward_std", statistics.pstdev(totals), 1)
        metrics.add_sum("eval/prompts", len(results))
        metrics.add_sum("eval/unscored", len(results) - len(totals))
        # failed samples that count as zero are wrong
        judged = [r.parts.get(first, 0.0) for r in results if first in r.parts or r.failed and r.total is not None]
        if judged and first in self._rewards.accuracies:
            metrics.add_mean("eval/accuracy", sum(part >= 1.0 for part in judged), len(judged))
        for result in results:
            for name, value in result.parts.items():
                metrics.add_mean(f"eval/{name}", float(value), 1)
        metrics.add_mean("eval/response_length", sum(map(len, responses)), len(responses))
        return metrics

    def describe(self, metrics: Metrics) -> str:
        """Return one line for the console."""
        results = metrics.results()
        sampling = "greedy" if self._greedy else "sampled"
        if "eval/accuracy" in results:
            shown = f"accuracy {results['eval/accuracy']:.1%}"
        else:
            shown = f"mean reward {results['eval/reward']:.3f}" if "eval/reward" in results else "responses have no score"
        unscored = f", {results['eval/unscored']:.0f} without a score" if results["eval/unscored"] else ""
        return f"held-out {shown} on {len(self._items)} prompts ({sampling}{unscored})"

    def score(self, items: Sequence[PromptItem], *, greedy: bool) -> tuple[list[list[int]], list[RewardResult]]:
        """Return responses to the items' prompts by the run's agent loop, and the results of the reward functions."""
        generated = self._actors.generate_responses(list(items), self._seed, greedy)
        replicas = [trajectories for trajectories in generated if trajectories is not None]
        # replica i of n generates for every n-th prompt from i on
        ordered = [replicas[index % len(replicas)][index // len(replicas)] for index in range(len(items))]
        results = self._rewards.score_now(list(items), ordered)
        return [trajectory.token_ids for trajectory in ordered], results


class GreedyBaselines:
    """ReMax's baselines: the reward of the greedy response to each prompt of the batch (arXiv:2310.10505).

    `generate` needs the rollout engine, `rewards` does not: between the two the device may be given to training. Estimators
    that need no baselines have none: then `generate` does nothing.
    """

    def __init__(self, run: Run, plane: DataPlane, evaluator: Evaluator, model_rewards: ModelRewards) -> None:
        self._plan, self._timeout_s = run.plan, run.deadlines.rows_s
        self._is_needed = run.objective is not None and "greedy_baseline" in run.objective.needs
        self._plane, self._evaluator, self._model_rewards = plane, evaluator, model_rewards

    def generate(self) -> list[WorkerReport]:
        """Generate a greedy response to each prompt of the batch, scored by the reward functions."""
        if not self._is_needed:
            return []
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
        """Return [rows] the reward of the greedy response to each row's prompt; NaN where it has no score."""
        results = self._model_rewards.add(self._results, self._items, self._responses)
        return torch.tensor(reward_totals(results)).repeat_interleave(self._plan.n_samples_per_prompt)
