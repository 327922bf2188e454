"""What a worker of a supervised stage does, on this rank's models and data."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mindspeed_rl import platform
from mindspeed_rl.config import BatchPlan, RunConfig
from mindspeed_rl.observability.metrics import Metric, Metrics
from mindspeed_rl.observability.timers import Timers
from mindspeed_rl.workers.model_source import ModelSource, find_model, load_tokenizer_of
from mindspeed_rl.workers.supervised import DataSummary, has_own_reference, reference_of
from mindspeed_rl.workers.world import join_world, prepare_process

if TYPE_CHECKING:
    from mindspeed_rl.engine.batching import Rows


class SupervisedPhases:
    """Every public method is collective over the workers.

    Attributes:
        resumed: what the checkpoint that the run goes on from says, else None.
    """

    def __init__(self, cfg: RunConfig, plan: BatchPlan, timers: Timers) -> None:
        prepare_process(cfg)
        from megatron.core import parallel_state

        from mindspeed_rl.engine import parallel
        from mindspeed_rl.engine.build import plan_model
        from mindspeed_rl.models.flops import ModelFlops
        from mindspeed_rl.workers.stages.stage import make_stage, shares

        self.config, self.plan, self.timers = cfg.actor_config, plan, timers
        config = self.config
        source = find_model(config, "megatron_training")
        tokenizer = load_tokenizer_of(config, source)
        self.stage = make_stage(config, tokenizer)
        model_plan = plan_model(config, source.hf_folder, head=self.stage.head)
        join_world(config, model_plan)
        self.flops = ModelFlops.of(model_plan.architecture, model_plan.network)
        self.is_output = parallel.is_output_source()
        self.replica = parallel_state.get_data_parallel_world_size(), parallel_state.get_data_parallel_rank()
        self.train_items, self.held_out = self.stage.datasets(plan)
        self._build(cfg, model_plan, source, tokenizer.pad_token_id)
        self.consumed = self.resumed["run_state"]["consumed_samples"] if self.resumed else 0
        order = self.stage.order(len(self.train_items), plan, self.consumed)
        balanced = cfg.rl_config is not None and cfg.rl_config.use_dp_batch_balance
        num_tokens = self.stage.num_tokens if balanced else None
        self._batches: Iterator[list[Any]] = shares(order, self.train_items, *self.replica, num_tokens)

    def _build(self, cfg: RunConfig, model_plan: Any, source: ModelSource, pad_id: int) -> None:
        from mindspeed_rl.engine.train_engine import MicroBatching
        from mindspeed_rl.workers.role import Role

        rl = cfg.rl_config
        packed = self.stage.packed or (rl is not None and rl.use_remove_padding)
        self.batching = MicroBatching(self.plan.micro_batch_size)
        if rl is not None and rl.use_dynamic_bsz:
            self.batching = MicroBatching(
                self.plan.micro_batch_size, rl.update_max_packing_token_size, rl.update_dynamic_max_batch_size
            )
        width = 0 if self.config.no_pad_to_seq_lengths else self.config.seq_length or 0
        shared = {"packed": packed, "pad_id": pad_id, "temperature": 1.0, "fixed_width": width}
        self.role = Role("megatron_training", self.config, model_plan, source, steps_per_iteration=1, **shared)
        self.role.engine.choices = self.stage.choices
        self.resumed = self.role.resumed
        self.reference = None
        if self.stage.needs_reference and has_own_reference(self.config):
            from mindspeed_rl.engine.build import plan_model

            config, ref_source = reference_of(self.config, source)
            plan = plan_model(config, ref_source.hf_folder)
            named = config.ref_model and "refer_model_iter" in cfg.set_keys["megatron_training"]
            iteration = config.refer_model_iter if named else None
            self.reference = Role("ref", config, plan, ref_source, steps_per_iteration=None, iteration=iteration, **shared)

    def data(self) -> DataSummary:
        """What the run learns from."""
        held_out = 0 if self.held_out is None else len(self.held_out)
        return DataSummary(self.stage.unit, len(self.train_items), held_out, self.stage.num_too_long)

    # ------------------------------------------------------------------ phases

    def train(self) -> Metrics:
        """One optimizer step on this replica's share of the next global batch."""
        rows = self._rows(next(self._batches))
        with self.timers("update"):
            result = self.role.engine.step(rows, self.batching, self._measured("train/"))
            self.role.poll_save()
        self.consumed += self.plan.num_samples
        metrics = Metrics()
        metrics.merge(result.metrics)
        metrics.add_last("train/lr", result.lr)
        metrics.add_last("train/grad_norm", result.grad_norm)
        if self.is_output:
            metrics.add_sum("train/samples", self.plan.num_samples / self.replica[0])
            metrics.add_sum("train/tokens", sum(rows.lengths))
            metrics.add_sum("train/model_tflop", self.flops.training(rows.lengths) / 1e12)
        metrics.add_max("train/memory_gib", platform.current().memory_stats().peak_gib)
        return metrics

    def evaluate(self) -> Metrics:
        """The loss on at most `eval_iters` batches of the held-out items; what does not fill all replicas is left out."""
        from mindspeed_rl.workers.stages.stage import shares

        num_ranks, batch = self.replica[0], self.plan.num_samples
        count = min(len(self.held_out), self.config.eval_iters * batch) // num_ranks * num_ranks
        batches = iter([list(range(first, min(first + batch, count))) for first in range(0, count, batch)])
        metrics = Metrics()
        with self.timers("evaluate"):
            for items in shares(batches, self.held_out, *self.replica):
                metrics.merge(self.role.engine.measure(self._rows(items), self.batching, self._measured("eval/")))
        return metrics

    def save(self, iteration: int) -> Metrics:
        """A checkpoint that a run can go on from after `iteration` steps."""
        with self.timers("save"):
            self.role.save(iteration, {"consumed_samples": self.consumed})
        return Metrics()

    def finish(self) -> Metrics:
        """Waits for background saves."""
        self.role.finish_saves()
        return Metrics()

    # ------------------------------------------------------------------ shared

    def _rows(self, items: list[Any]) -> Rows:
        """The engine's rows, with the reference's log-prob of each answer where the loss needs it."""
        rows = self.stage.rows(items)
        if not self.stage.needs_reference:
            return rows
        with self.timers("reference_model"):
            if self.reference is not None:
                result = self.reference.engine.forward(rows, self.batching)
            else:
                from mindspeed_rl.engine.lora import adapters_disabled

                with adapters_disabled(self.role.model):
                    result = self.role.engine.forward(rows, self.batching)
        # only the last pipeline stage has them, and needs them
        log_probs = result[0] if result is not None else [mask * 0.0 for mask in rows.columns["loss_mask"]]
        sums = [(values * mask).sum() for values, mask in zip(log_probs, rows.columns["loss_mask"])]
        return replace(rows, columns={**rows.columns, "ref_log_probs": sums})

    def _measured(self, prefix: str) -> Any:
        """The stage's loss, which also reports itself, its metrics under this prefix."""
        from mindspeed_rl.algorithms.records import LossOutput

        def loss(micro_batch: Any, *outputs: Tensor) -> LossOutput:
            if micro_batch.is_filler:
                zero = sum(output.sum() for output in outputs if output is not None) * 0.0
                return LossOutput(zero, torch.zeros((), dtype=torch.int64, device=zero.device))
            result = self.stage.loss(micro_batch, *outputs)
            own = Metric("mean", result.loss_sum.item(), result.count.item())
            named = {f"{prefix}{name}": metric for name, metric in result.metrics.items()}
            return LossOutput(result.loss_sum, result.count, {f"{prefix}loss": own} | named)

        return loss
