"""One device's worker of a supervised stage: reads its data by memory map and trains with Megatron.

The methods are the phases of the loop; `SupervisedTrainer` calls them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from mindspeed_rl import registry
from mindspeed_rl.algorithms.interfaces import LossOutput
from mindspeed_rl.checkpoint.model_source import load_tokenizer_of
from mindspeed_rl.checkpoint.newest import BEST_ITERATION
from mindspeed_rl.config import MegatronConfig
from mindspeed_rl.engine.batching import MicroBatching, Rows
from mindspeed_rl.engine.parallel import init_distributed, is_output_source
from mindspeed_rl.models.costs import ModelFlops
from mindspeed_rl.observability.metrics import Metric, Metrics
from mindspeed_rl.rollout.requests import Sampling
from mindspeed_rl.run import Run
from mindspeed_rl.run.phases import Phases
from mindspeed_rl.run.rules.resume_rules import list_keys_on_resume
from mindspeed_rl.runtime.reports import DataSummary, WorkerReport
from mindspeed_rl.workers.answer_requests import AnswerRequest, GeneratedAnswer
from mindspeed_rl.workers.answers import generate_answers
from mindspeed_rl.workers.device_worker import DeviceWorker
from mindspeed_rl.workers.engines import PassSettings
from mindspeed_rl.workers.responses import read_image_rules
from mindspeed_rl.workers.roles import Role, build_micro_batching, build_ref
from mindspeed_rl.workers.stages import choose_stage
from mindspeed_rl.workers.stages.stage import Stage, split_batches

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def _make_stage(config: MegatronConfig, tokenizer: PreTrainedTokenizerBase) -> Stage[Any]:
    """Make the stage that the run file names."""
    return registry.load(choose_stage(config), f"stage {config.stage}")(config, tokenizer)


class SupervisedWorker(DeviceWorker):
    """The trained model (and the reference, where the stage has one) of one rank.

    Attributes:
        consumed: samples that were trained on, over all replicas and since the start of the run.
    """

    def __init__(self, run: Run, *, rank: int) -> None:
        """Join the training world, open the data and build the models."""
        super().__init__(run, rank)
        cfg, plan = run.config, run.plan
        config = self.config = cfg.actor_config
        model_plan = run.models["actor"].plan
        tokenizer = load_tokenizer_of(config, run.models["actor"].source)
        self.stage = _make_stage(run.data_config, tokenizer)
        self.stage.image_rules = read_image_rules(run.models["actor"])
        init_distributed(config, model_plan.layout.vpp)
        self.flops = ModelFlops.count(model_plan.architecture, model_plan.model_config)
        self.is_output = is_output_source()
        self.replica = parallel_state.get_data_parallel_world_size(), parallel_state.get_data_parallel_rank()
        self.train_items, self.held_out = self.stage.datasets(plan)
        self._build(tokenizer.pad_token_id)
        self.role.write_lost_export()
        self.role.restore_random()
        state: Mapping[str, Any] = self.role.resumed["run_state"] if self.role.resumed else {}
        self.consumed: int = state.get("consumed_samples", 0)
        self._order = self.stage.describe_order(self.train_items, plan)
        # other samples than in the checkpoint begin with a new pass
        start = state.get("pass_start", 0) if state.get("order", self._order) == self._order else self.consumed
        self._state = {"pass_start": start, "order": self._order, "keys": list_keys_on_resume(cfg)}
        if self.run.attention is not None:
            self._state["cpu_attention"] = self.run.attention.kernel
        self.add_hooks(self.resumed_state().get("iteration", 0))
        batches = self.stage.order(len(self.train_items), plan, self.consumed - start)
        balanced = cfg.rl_config is not None and cfg.rl_config.use_dp_batch_balance
        num_tokens = self.stage.num_tokens if balanced else None
        self._batches = split_batches(batches, self.train_items, *self.replica, num_tokens)

    def _build(self, pad_id: int) -> None:
        cfg, config, size = self.run.config, self.config, self.run.plan.micro_batch_size
        rl = cfg.rl_config
        packed = self.stage.packed or (rl is not None and bool(rl.use_remove_padding))
        self.batching = MicroBatching(size) if rl is None else build_micro_batching(rl, "update", size)
        width = 0 if config.no_pad_to_seq_lengths else config.seq_length or 0
        passes = PassSettings(packed=packed, pad_id=pad_id, temperature=1.0, fixed_width=width)
        self.role = Role("megatron_training", self.run.models["actor"], passes, steps_per_iteration=1)
        self.role.engine.outputs = self.stage.outputs
        self.ref: Role | None = None
        if "ref" in self.run.models:
            self.ref = build_ref(self.run, passes)

    def resident_bytes(self) -> Mapping[str, int]:
        """Return the bytes that are on the device now, by owner in the planner's words."""
        owners = dict(self.role.offloader.resident_bytes())
        if self.ref is not None:
            owners["reference"] = sum(self.ref.offloader.resident_bytes().values())
        return owners

    def resumed_state(self) -> dict[str, Any]:
        """Return {"iteration": ..., "run_state": ...} of the checkpoint when the run resumes from one, else nothing."""
        return self.role.resumed or {}

    def data(self) -> DataSummary:
        """Return the summary of the data."""
        held_out = 0 if self.held_out is None else len(self.held_out)
        num_cut = self.stage.count_cut(self.train_items) if self.rank == 0 else (0, 0)
        return DataSummary(self.stage.unit, len(self.train_items), held_out, self.stage.num_too_long, *num_cut, self._order)

    # ------------------------------------------------------------------ phases

    def train(self) -> WorkerReport:
        """Make one optimizer step on this replica's share of the next global batch."""
        metrics, num_samples = Metrics(), self.run.plan.num_samples
        with self.phase(Phases.TRAIN, metrics):
            rows = self._rows(next(self._batches))
            with self.phase(Phases.TRAIN_STEP, metrics, self.role) as observer:
                loss = observer.loss(observer.inputs(self.stage.loss))
                result = self.role.engine.train_step(rows, self.batching, loss)
                self.role.finish_saves(wait=False)
        self.consumed += num_samples
        metrics.merge(_name_metrics("train/", result.losses))
        metrics.add_last("train/lr", result.lr)
        if not result.is_skipped:
            metrics.add_last("train/grad_norm", result.grad_norm)
        elif self.rank == 0:
            metrics.add_sum("train/skipped_steps", 1)
        if self.is_output:
            # divided, because one rank of each replica adds them
            metrics.add_sum("train/samples", num_samples / self.replica[0])
            metrics.add_sum("train/tokens", sum(rows.lengths))
            metrics.add_sum("train/model_tflop", self.flops.training(rows.lengths) / 1e12)
        metrics.add_max("train/memory_gib", self.memory.peak_gib)
        return self._report(metrics)

    def evaluate(self) -> WorkerReport:
        """Compute the loss on at most `eval_iters` batches of held-out items, without a remainder for only some replicas."""
        num_ranks, batch, held_out = self.replica[0], self.run.plan.num_samples, self.held_out
        assert held_out is not None  # the loop has called `data` before
        count = min(len(held_out), self.config.eval_iters * batch) // num_ranks * num_ranks
        batches = iter([list(range(first, min(first + batch, count))) for first in range(0, count, batch)])
        metrics = Metrics()
        with self.phase(Phases.EVALUATE, metrics):
            for items in split_batches(batches, held_out, *self.replica):
                losses = self.role.engine.measure(self._rows(items), self.batching, self.stage.loss)
                metrics.merge(_name_metrics("eval/", losses))
        return self._report(metrics)

    def generate_answers(
        self, requests: Sequence[AnswerRequest], sampling: Sampling
    ) -> tuple[WorkerReport, list[GeneratedAnswer] | None]:
        """Answer every n-th prompt, from this replica's index on; None on ranks that return no results."""
        count, index = self.replica
        metrics = Metrics()
        with self.phase(Phases.GENERATE_ANSWERS, metrics):
            answers = generate_answers(self.role.megatron.model, requests[index::count], sampling)
        return self._report(metrics), answers if self.is_output else None

    def save(self, iteration: int, best_iteration: int | None = None) -> WorkerReport:
        """Write a checkpoint from which a run can resume after `iteration` steps.

        Args:
            best_iteration: iteration of the best evaluation so far.
        """
        state = {"consumed_samples": self.consumed, BEST_ITERATION: best_iteration, **self._state}
        with self.timers(Phases.SAVE.timer):
            self.role.save(iteration, state)
        return self._report()

    def finish(self) -> WorkerReport:
        """Wait for background saves."""
        self.role.finish_saves()
        return self._report()

    # ------------------------------------------------------------------ shared

    def _rows(self, items: list[object]) -> Rows:
        """Return the engine's rows, with the reference's log-prob of each answer and their KL where the loss needs them."""
        rows = self.stage.rows(items)
        if not self.stage.needs_ref:
            return rows
        with self.timers(Phases.REF_LOG_PROBS.timer):
            columns = {"ref_log_probs": self._sum_log_probs(rows, is_ref=True)}
            mismatched = self.stage.mismatched_rows(items)
            if mismatched is not None:
                ours, theirs = (sum(self._sum_log_probs(mismatched, is_ref=which)) for which in (False, True))
                # over the global batch, so that the loss is the same in every layout
                total = torch.tensor([float(ours - theirs), len(mismatched)], device=self.role.engine.device)
                dist.all_reduce(total, group=parallel_state.get_data_parallel_group())
                columns["kl"] = [(total[0] / total[1]).clamp(min=0.0).cpu()] * len(rows)
        return replace(rows, columns={**rows.columns, **columns})

    def _sum_log_probs(self, rows: Rows, *, is_ref: bool) -> list[Tensor]:
        """Return the log-prob of each answer under policy or reference; only the last pipeline stage has and needs it."""
        # without a model of its own the reference is the policy without its adapters
        shares = is_ref and self.ref is None
        with self.role.require_adapters().disabled() if shares else nullcontext():
            result = ((self.ref if is_ref else None) or self.role).engine.forward(rows, self.batching)
        log_probs = result[0] if result is not None else [mask * 0.0 for mask in rows.columns["loss_mask"]]
        return [(values * mask).sum() for values, mask in zip(log_probs, rows.columns["loss_mask"])]


def _name_metrics(prefix: str, losses: Iterable[LossOutput]) -> Metrics:
    """Return the losses and their own metrics, under names with this prefix."""
    metrics = Metrics()
    for loss in losses:
        metrics.add(f"{prefix}loss", Metric("mean", loss.loss_sum.item(), loss.count.item()))
        for name, metric in loss.metrics.items():
            metrics.add(f"{prefix}{name}", metric)
    return metrics
