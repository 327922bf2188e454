"""Answers to held-out prompts, scored as the run scores its rollouts."""

from __future__ import annotations

import math
from collections.abc import Sequence

from mindspeed_rl.config import Run
from mindspeed_rl.data.prompts import PromptDataset, PromptItem
from mindspeed_rl.observability.metrics import Metrics
from mindspeed_rl.rewards.samples import RewardResult, reward_functions
from mindspeed_rl.rollout.trajectory import Trajectory
from mindspeed_rl.trainers.model_rewards import ModelRewards, NoModelRewards
from mindspeed_rl.trainers.services import Services


class Evaluator:
    """Evaluates the weights that the rollout engine holds."""

    def __init__(
        self,
        run: Run,
        prompts: PromptDataset | None,
        services: Services,
        model_rewards: ModelRewards | NoModelRewards,
    ) -> None:
        actor = run.config.actor_config
        self._items: list[PromptItem] = []
        if prompts is not None:
            self._items = [prompts[index] for index in range(min(len(prompts), actor.eval_num_prompts or len(prompts)))]
        self._actors, self._rewards, self._model_rewards = services.actors, services.rewards, model_rewards
        self._first = next(iter(reward_functions(run.rl)[0]), None)
        self._greedy, self._seed = run.rl.eval_greedy, actor.seed

    def run(self) -> Metrics:
        """eval/reward, eval/<part> and, where the first reward function says whether an answer is right, eval/accuracy.

        The accuracy is the share of responses with that function's full score.
        """
        responses, results = self.score(self._items, greedy=self._greedy)
        results = self._model_rewards.add(results, self._items, responses)
        metrics = Metrics()
        if (first := self._accuracy()) is not None:
            metrics.add_mean("eval/accuracy", sum(result.parts.get(first, 0.0) >= 1.0 for result in results), len(results))
        metrics.add_mean("eval/reward", math.fsum(result.total or 0.0 for result in results), len(results))
        for result in results:
            for name, value in result.parts.items():
                metrics.add_mean(f"eval/{name}", float(value), 1)
        metrics.add_mean("eval/response_length", sum(map(len, responses)), len(responses))
        return metrics

    def _accuracy(self) -> str | None:
        """The first reward function, if it says whether an answer is right."""
        return self._first if self._first in self._rewards.accuracies else None

    def describe(self, metrics: Metrics) -> str:
        """One line for the console."""
        results = metrics.results()
        sampling = "greedy" if self._greedy else "sampled"
        shown = (
            f"accuracy {results['eval/accuracy']:.1%}"
            if "eval/accuracy" in results
            else f"mean reward {results['eval/reward']:.3f}"
        )
        return f"held-out {shown} on {len(self._items)} prompts ({sampling})"

    def score(self, items: Sequence[PromptItem], *, greedy: bool) -> tuple[list[list[int]], list[RewardResult]]:
        """Responses to the items' prompts, and what the reward functions say about them."""
        trajectories = self._answer(items, greedy=greedy)
        results = self._rewards.score_now(list(items), trajectories)
        return [trajectory.token_ids for trajectory in trajectories], results

    def _answer(self, items: Sequence[PromptItem], *, greedy: bool) -> list[Trajectory]:
        """Trajectories in the order of the prompts, by the run's own agent loop; replica i answers every n-th from i on."""
        shares = [share for share in self._actors.answer(list(items), self._seed, greedy) if share is not None]
        found = {
            replica + place * len(shares): trajectory
            for replica, share in enumerate(shares)
            for place, trajectory in enumerate(share)
        }
        return [found[number] for number in range(len(items))]
