"""The logger of a run with rollouts: throughput by phase, and completions.jsonl."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mindspeed_rl.algorithms.interfaces import PolicyBatch
from mindspeed_rl.algorithms.policy_losses import compute_update_ratios
from mindspeed_rl.data.images import IMAGES, make_thumbnail
from mindspeed_rl.data.prompts import PromptItem
from mindspeed_rl.dataplane.client import DataPlane
from mindspeed_rl.dataplane.columns import Batch, objects, ragged
from mindspeed_rl.observability.completions import Completion, Tokens, decode_tokens, is_due
from mindspeed_rl.observability.run_files import EXAMPLES
from mindspeed_rl.redaction import hide_in_record
from mindspeed_rl.rewards.samples import RewardResult
from mindspeed_rl.run import Run
from mindspeed_rl.trainers.advantages import TrainBatch
from mindspeed_rl.trainers.run_logger import LogOutputs, RunLogger

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class _CompletionWriter:
    """Append completions of every `interval`-th iteration to a JSONL file.

    Attributes:
        path: the file; lines of an earlier part of the run stay.
        interval: iterations between two writes; 0 writes none.
        limit: completions of one iteration; all when None.
        beside: folder of the checkpoints, where ms-swift has the file: it gets a link; None for none.
    """

    path: Path
    interval: int = 1
    limit: int | None = None
    beside: Path | None = None

    def write(self, iteration: int, completions: Sequence[Completion]) -> None:
        """Append the iteration's completions where it is one to be written."""
        if not is_due(iteration, self.interval):
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            for completion in completions[: self.limit]:
                record = {"iteration": iteration, **completion.to_record()}
                file.write(json.dumps(hide_in_record(record), ensure_ascii=False) + "\n")
        if self.beside is not None:
            _link(self.beside.expanduser().absolute() / self.path.name, self.path.absolute())


def _link(link: Path, path: Path) -> None:
    """Make a link to a file, in place of a link to an earlier run's file; a file of this name stays."""
    if os.path.realpath(link) == os.path.realpath(path) or (link.exists() and not link.is_symlink()):
        return
    with contextlib.suppress(OSError):  # a disk without links; the file itself is written
        link.parent.mkdir(parents=True, exist_ok=True)
        link.unlink(missing_ok=True)
        link.symlink_to(os.path.relpath(path, os.path.realpath(link.parent)))


def _compute_throughput(timing: Mapping[str, float], num_tokens: float, num_devices: int) -> dict[str, float]:
    """Return tokens (prompt and response) per second and device over the iteration, the update and the rollout."""
    phases = {"e2e_tps": "timing/all", "update_tps": "timing/update", "vllm_tps": "timing/rollout"}
    return {name: num_tokens / num_devices / timing[phase] for name, phase in phases.items() if timing.get(phase, 0.0) > 0.0}


class RolloutLogger(RunLogger):
    """Write one record an iteration, and the completions that are due."""

    def __init__(
        self,
        run: Run,
        outputs: LogOutputs,
        plane: DataPlane,
        tokenizer: PreTrainedTokenizerBase,
        further_figures: Callable[[], Mapping[str, float]],
    ) -> None:
        """Take the run.

        Args:
            further_figures: returns further figures of the iteration that ends.
        """
        super().__init__(outputs, self._derive_figures, self._write_completions)
        self._further_figures = further_figures
        rl = run.rl
        self._run, self._plane, self._tokenizer = run, plane, tokenizer
        interval = rl.log_completions_interval if rl.log_completions else 0
        save = run.config.actor_config.save
        beside = None if save is None else Path(save)
        self._writer = _CompletionWriter(run.folder / "completions.jsonl", interval, rl.log_completions_keep, beside)
        self._pending: tuple[TrainBatch, list[Completion]] | None = None

    def record_examples(self, iteration: int, examples: Sequence[tuple[PromptItem, list[int], RewardResult]]) -> None:
        """Append responses to held-out prompts to examples.jsonl; the report shows the first and the last evaluation."""
        decode = self._tokenizer.decode
        with contextlib.suppress(OSError), (self._run.folder / EXAMPLES).open("a", encoding="utf-8") as file:
            for index, (item, response, result) in enumerate(examples):
                texts = {"prompt": str(decode(item["prompt_ids"])), "response": str(decode(response))}
                record = {"iteration": iteration, "index": index, **texts, "label": item["label"], "reward": result.total}
                file.write(json.dumps(hide_in_record(record), ensure_ascii=False, default=str) + "\n")

    def _derive_figures(self, results: Mapping[str, float]) -> dict[str, float]:
        return {**self._derive_throughput(results), **self._further_figures()}

    def _derive_throughput(self, results: Mapping[str, float]) -> dict[str, float]:
        """Return the seconds of the weight sync, and tokens per second and device.

        Tokens are counted by mean lengths or, as MindSpeed-RL counts, by the longest.
        """
        sync = results.get("timing/resharding_to_infer")
        kind = "max" if self._run.rl.log_max_throughput and self._run.stage == "ray_grpo" else "mean"
        length = results.get(f"response_length/{kind}", 0.0) + results.get(f"prompt_length/{kind}", 0.0)
        plan = self._run.plan
        throughput = _compute_throughput(results, length * plan.num_samples, plan.world_size)
        return ({} if sync is None else {"timing/update_weights": sync}) | throughput

    def on_batch(self, batch: TrainBatch) -> None:
        """Keep the first rows of the batch for completions.jsonl, in iterations that are due, until they are trained on."""
        if not is_due(batch.iteration + 1, self._writer.interval):
            return
        count = min(self._run.rl.log_completions_keep, len(batch.advantages))
        columns = ["prompt_ids", "responses", "labels", "rewards", "reward_results", "truncated", "trajectories"]
        columns += ["rollout_log_probs", "weight_versions", *(["old_log_probs"] if batch.has_old_log_probs else [])]
        columns += [IMAGES] if self._run.config.reads_images else []
        rows, _ = self._plane.get("metrics", columns, indexes=range(count), timeout_s=_TIMEOUT_S)
        prompts = self._tokenizer.batch_decode([ids.tolist() for ids in rows["prompt_ids"]])
        if (vision := self._run.models["actor"].plan.model_config.vision) is not None:
            text = str(self._tokenizer.decode([vision.image_token_id]))
            prompts = [re.sub(f"(?:{re.escape(text)})+", text.replace("\\", r"\\"), prompt) for prompt in prompts]
        # a row without a score takes no part, and has no token in the mask
        response_mask = batch.inputs.response_mask
        means = (batch.advantages * response_mask).sum(1) / response_mask.sum(1).clamp(min=1)
        group_size = self._run.plan.n_samples_per_prompt
        completions = []
        for row in range(count):
            result, reward = objects(rows["reward_results"])[row], float(rows["rewards"][row])
            tokens = self._describe_tokens(rows, row, batch.advantages[row], batch.loss_mask[row])
            extra = {"label": rows["labels"][row], "truncated": bool(rows["truncated"][row]), "state": result.state}
            extra |= {"error": result.error} if result.error else {}
            # on the page a prompt is above all its samples
            if IMAGES in rows and row % group_size == 0:
                extra["images"] = [make_thumbnail(image) for image in objects(rows[IMAGES])[row]]
            completions.append(
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
                    events=objects(rows["trajectories"])[row].get("events"),
                )
            )
        self._pending = batch, completions

    def _write_completions(self) -> None:
        """Record the kept rows, with the ratios of the update; a run that repeats the iteration writes them again."""
        if self._pending is None:
            return
        batch, completions = self._pending
        if batch.has_ratios:
            completions = self._add_ratios(batch, completions)
        self._writer.write(batch.iteration + 1, completions)
        self._outputs.trackers.completions(batch.iteration + 1, completions)
        self._outputs.progress.show_completions(batch.iteration + 1, completions)
        for observer in self._outputs.observers:
            observer.on_samples(batch.iteration + 1, completions)
        self._pending = None

    def _add_ratios(self, batch: TrainBatch, completions: list[Completion]) -> list[Completion]:
        """Return the completions with the ratios of the update's last step, and the tokens that it clipped."""
        objective, count = self._run.objective, len(completions)
        assert objective is not None  # there is a rollout
        columns = ["update_log_probs", batch.old_column]
        rows, _ = self._plane.get("metrics", columns, indexes=range(count), timeout_s=_TIMEOUT_S)
        advantages, mask = batch.advantages[:count], batch.inputs.response_mask[:count]
        new, old = (ragged(rows[name]).pad(0.0, advantages.size(1)) for name in columns)
        ratios, clipped = compute_update_ratios(
            PolicyBatch(new, advantages, mask, batch.loss_mask[:count], old_log_probs=old), objective
        )
        updated = []
        for row, completion in enumerate(completions):
            assert completion.tokens is not None
            length = len(completion.tokens.ids)
            tokens = replace(completion.tokens, ratios=_round(ratios[row, :length]), clipped=clipped[row, :length].tolist())
            updated.append(replace(completion, tokens=tokens))
        return updated

    def _describe_tokens(self, rows: Batch, row: int, advantages: Tensor, loss_mask: Tensor) -> Tokens:
        ids = rows["responses"][row].tolist()
        log_probs = rows["rollout_log_probs"][row].float()
        versions = torch.as_tensor(rows["weight_versions"][row]).reshape(-1).expand(len(ids))
        trainer = rows["old_log_probs"][row].float() if "old_log_probs" in rows else None
        return Tokens(
            ids,
            decode_tokens(lambda ids: str(self._tokenizer.decode(ids)), ids),
            _round(log_probs),
            _round(advantages[: len(ids)]),
            loss_mask[: len(ids)].tolist(),
            None if trainer is None else _round(trainer),
            None if trainer is None else _round((trainer - log_probs).exp()),
            versions.tolist(),
        )


def _round(values: Tensor) -> list[float]:
    """Return values with five digits: the file is for reading."""
    return [float(f"{value:.5g}") for value in values.tolist()]
