"""The logger of a run with rollouts: throughput by phase, and completions.jsonl."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from mindspeed_rl.algorithms.interfaces import PolicyBatch
from mindspeed_rl.algorithms.policy_losses import update_ratios
from mindspeed_rl.config import Run
from mindspeed_rl.dataplane.client import DataPlane
from mindspeed_rl.dataplane.columns import Batch, objects, ragged
from mindspeed_rl.observability.completions import Completion, CompletionWriter, Tokens, decode_tokens, is_due
from mindspeed_rl.observability.console import IterationProgress
from mindspeed_rl.observability.curves import round_values
from mindspeed_rl.observability.metrics import Metrics
from mindspeed_rl.observability.timers import Interval, throughput_metrics
from mindspeed_rl.observability.trackers import Trackers
from mindspeed_rl.trainers.run_logger import RunLogger


class RolloutLogger(RunLogger):
    """Writes one record an iteration, and the completions that are due."""

    def __init__(self, run: Run, trackers: Trackers, progress: IterationProgress, tokenizer: Any) -> None:
        super().__init__(run.folder, trackers, progress)
        rl = run.rl
        self._run, self._plan, self._tokenizer = run, run.plan, tokenizer
        interval = rl.log_completions_interval if rl.log_completions else 0
        self._pending: tuple[int, list[Completion]] | None = None
        self._update: tuple[DataPlane, Tensor, Tensor, Tensor] | None = None
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

    def completions(
        self,
        iteration: int,
        plane: DataPlane,
        advantages: Tensor,
        response_mask: Tensor,
        loss_mask: Tensor,
        *,
        with_trainer: bool,
        with_ratios: bool,
    ) -> None:
        """The first rows of the batch will stand in completions.jsonl once they are trained on, in iterations that are due.

        Args:
            iteration: the first is 1.
            plane: has the rows.
            advantages, response_mask, loss_mask: [B, R].
            with_trainer: rows have the trainer's log-probs from before the update.
            with_ratios: the update will leave those of its last step.
        """
        if not is_due(iteration, self._completions.interval):
            return
        count = min(self._run.rl.log_completions_keep, len(advantages))
        columns = ["prompt_ids", "responses", "labels", "rewards", "reward_results", "truncated"]
        columns += ["rollout_log_probs", "weight_versions", *(["old_log_probs"] if with_trainer else [])]
        batch, _ = plane.get("metrics", columns, indexes=range(count), timeout_s=60.0)
        prompts = self._tokenizer.batch_decode([ids.tolist() for ids in batch["prompt_ids"]])
        # a row without a score takes no part, and has no token in the mask
        means = (advantages * response_mask).sum(1) / response_mask.sum(1).clamp(min=1)
        group_size = self._plan.n_samples_per_prompt
        written = []
        for row in range(count):
            result, reward = objects(batch["reward_results"])[row], float(batch["rewards"][row])
            tokens = self._tokens(batch, row, advantages[row], loss_mask[row])
            extra = {"label": batch["labels"][row], "truncated": bool(batch["truncated"][row]), "state": result.state}
            written.append(
                Completion(
                    prompts[row],
                    "".join(tokens.texts),
                    None if math.isnan(reward) else reward,
                    result.parts,
                    float(means[row]),
                    extra,
                    group=row // group_size,
                    sample=row % group_size,
                    tokens=tokens,
                )
            )
        self._pending = iteration, written
        self._update = None
        if with_ratios:
            self._update = plane, advantages[:count], response_mask[:count], loss_mask[:count]

    def hold(self, iteration: int, metrics: Metrics, intervals: list[Interval]) -> None:
        """See `RunLogger.hold`; the completions are recorded now: a run that repeats the iteration writes them again."""
        self._write_completions()
        super().hold(iteration, metrics, intervals)

    def write(self, iteration: int, metrics: Metrics, intervals: list[Interval]) -> None:
        """Records the iteration, and its completions."""
        self._write_completions()
        super().write(iteration, metrics, intervals)

    def _write_completions(self) -> None:
        """What was drawn is recorded, with what the update made of it."""
        if self._pending is None:
            return
        number, written = self._pending
        if self._update is not None:
            written = self._with_ratios(written, *self._update)
        self._completions.write(number, written)
        self._trackers.completions(number, written)
        self._pending = self._update = None

    def _with_ratios(
        self, written: list[Completion], plane: DataPlane, advantages: Tensor, response_mask: Tensor, loss_mask: Tensor
    ) -> list[Completion]:
        """The completions with the ratios of the update's last step, and with what it clipped."""
        assert self._run.objective is not None  # there is a rollout
        columns = ["update_log_probs", "old_log_probs"]
        batch, _ = plane.get("metrics", columns, indexes=range(len(written)), timeout_s=60.0)
        width = advantages.size(1)
        new, old = (ragged(batch[name]).padded(0.0, width) for name in columns)
        rows = PolicyBatch(new, advantages, response_mask, loss_mask, old_log_probs=old)
        ratios, clipped = update_ratios(rows, self._run.objective)
        found = []
        for row, completion in enumerate(written):
            assert completion.tokens is not None
            length = len(completion.tokens.ids)
            tokens = replace(completion.tokens, ratios=_short(ratios[row, :length]), clipped=clipped[row, :length].tolist())
            found.append(replace(completion, tokens=tokens))
        return found

    def _tokens(self, batch: Batch, row: int, advantages: Tensor, loss_mask: Tensor) -> Tokens:
        ids = batch["responses"][row].tolist()
        log_probs = batch["rollout_log_probs"][row].float()
        versions = torch.as_tensor(batch["weight_versions"][row]).reshape(-1).expand(len(ids))
        trainer = batch["old_log_probs"][row].float() if "old_log_probs" in batch else None
        return Tokens(
            ids,
            decode_tokens(self._tokenizer.decode, ids),
            _short(log_probs),
            _short(advantages[: len(ids)]),
            loss_mask[: len(ids)].tolist(),
            None if trainer is None else _short(trainer),
            None if trainer is None else _short((trainer - log_probs).exp()),
            versions.tolist(),
        )


def _short(values: Tensor) -> list[float]:
    """Five digits: the file is for reading."""
    return round_values(values.tolist())
