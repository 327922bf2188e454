"""The logger of a run with rollouts: throughput by phase, and completions.jsonl."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from mindspeed_rl.config import Run
from mindspeed_rl.dataplane.client import DataPlane
from mindspeed_rl.observability.completions import Completion, CompletionWriter
from mindspeed_rl.observability.progress import IterationProgress
from mindspeed_rl.observability.timers import throughput_metrics
from mindspeed_rl.observability.trackers import Trackers
from mindspeed_rl.trainers.run_logger import RunLogger


class RolloutLogger(RunLogger):
    """Writes one record an iteration, and the completions that are due."""

    def __init__(self, run: Run, trackers: Trackers, progress: IterationProgress, tokenizer: Any) -> None:
        super().__init__(run.folder, trackers, progress)
        rl = run.rl
        self._run, self._plan, self._tokenizer = run, run.plan, tokenizer
        interval = rl.log_completions_interval if rl.log_completions else 0
        self._completions = CompletionWriter(run.folder / "completions.jsonl", interval, rl.log_completions_keep)

    def derived(self, results: Mapping[str, float]) -> dict[str, float]:
        """Seconds of the weight update, and tokens per second and device."""
        push = results.get("timing/resharding_to_infer")
        return ({} if push is None else {"timing/update_weights": push}) | throughput_metrics(
            results, self._num_tokens(results), self._plan.world_size
        )

    def _num_tokens(self, results: Mapping[str, float]) -> float:
        """Prompt and response tokens of the iteration, by mean lengths or, as MindSpeed-RL counts, by the longest."""
        kind = "max" if self._run.rl.log_max_throughput and self._run.stage == "ray_grpo" else "mean"
        length = results.get(f"response_length/{kind}", 0.0) + results.get(f"prompt_length/{kind}", 0.0)
        return length * self._plan.num_samples

    def completions(self, iteration: int, plane: DataPlane, advantages: Tensor, response_mask: Tensor) -> None:
        """Writes the first rows of the batch to completions.jsonl, in the iterations that are due."""
        if not self._completions.wants(iteration):
            return
        count = min(self._run.rl.log_completions_keep, len(advantages))
        batch, _ = plane.get(
            "metrics",
            ["prompt_ids", "responses", "labels", "rewards", "reward_results", "truncated"],
            indexes=range(count),
            timeout_s=60.0,
        )
        prompts = self._tokenizer.batch_decode([ids.tolist() for ids in batch["prompt_ids"]])
        responses = self._tokenizer.batch_decode([ids.tolist() for ids in batch["responses"]])
        means = (advantages * response_mask).sum(1) / response_mask.sum(1).clamp(min=1)
        self._completions.write(
            iteration,
            [
                Completion(
                    prompt,
                    response,
                    None if math.isnan(reward) else float(reward),
                    result.parts,
                    float(mean),
                    {"label": label, "truncated": bool(cut), "state": result.state},
                )
                for prompt, response, reward, result, mean, label, cut in zip(
                    prompts, responses, batch["rewards"], batch["reward_results"], means, batch["labels"], batch["truncated"]
                )
            ],
        )
