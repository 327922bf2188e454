"""Greedy answers to held-out prompts, scored by the run's own reward functions."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from mindspeed_rl.data.prompts import PromptDataset
from mindspeed_rl.observability.metrics import Metrics
from mindspeed_rl.workers.launch import RewardGroup, WorkerGroup


class Evaluator:
    """Evaluates the weights that the rollout engine holds."""

    def __init__(
        self, prompts: PromptDataset | None, workers: WorkerGroup, rewards: RewardGroup, *, num_prompts: int | None, seed: int
    ) -> None:
        count = 0 if prompts is None else min(len(prompts), num_prompts or len(prompts))
        self._items = [prompts[index] for index in range(count)]
        self._workers, self._rewards, self._seed = workers, rewards, seed

    def run(self) -> Metrics:
        """eval/accuracy (share of responses with the full score of the first reward function), eval/<part>, eval/reward."""
        responses = self._answer([item["prompt_ids"] for item in self._items])
        results = self._rewards.score_now(self._items, responses)
        metrics = Metrics()
        first = next(iter(results[0].parts), None)
        right = sum(result.parts.get(first, 0.0) >= 1.0 for result in results)
        metrics.add_mean("eval/accuracy", right, len(results))
        metrics.add_mean("eval/reward", math.fsum(result.total or 0.0 for result in results), len(results))
        for result in results:
            for name, value in result.parts.items():
                metrics.add_mean(f"eval/{name}", float(value), 1)
        metrics.add_mean("eval/response_length", sum(map(len, responses)), len(responses))
        return metrics

    def describe(self, metrics: Metrics) -> str:
        """One line for the console."""
        results = metrics.results()
        return f"held-out accuracy {results['eval/accuracy']:.1%} on {len(self._items)} prompts (greedy)"

    def greedy_rewards(self, batch: Mapping[str, Any]) -> torch.Tensor:
        """[rows] reward of the greedy response to each row's prompt; equal prompts are answered once (ReMax)."""
        prompts = [ids.tolist() for ids in batch["prompt_ids"]]
        distinct = list(dict.fromkeys(map(tuple, prompts)))
        position = {prompt: index for index, prompt in enumerate(distinct)}
        rows = {prompt: row for row, prompt in reversed(list(enumerate(map(tuple, prompts))))}
        items = [
            {"prompt_ids": list(p), "label": batch["labels"][rows[p]], "columns": batch["extra"][rows[p]]} for p in distinct
        ]
        results = self._rewards.score_now(items, self._answer([item["prompt_ids"] for item in items]))
        totals = torch.tensor([result.total or 0.0 for result in results])
        return totals[[position[tuple(prompt)] for prompt in prompts]]

    def _answer(self, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
        """Greedy responses in the order of the prompts; replica i answers every n-th prompt from i on."""
        shares = [
            share for share in self._workers.evaluate([list(prompt) for prompt in prompts], self._seed) if share is not None
        ]
        answers: list[list[int]] = [[] for _ in prompts]
        for replica, share in enumerate(shares):
            answers[replica :: len(shares)] = share
        return answers
