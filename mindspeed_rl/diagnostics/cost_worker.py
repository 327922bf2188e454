"""One iteration of a rank's actor under a cost ledger, and the same model trained by Megatron as its own scripts train it."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import accumulate
from typing import Any, cast

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.pipeline_parallel import get_forward_backward_func, schedules
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.module import Float16Module, MegatronModule
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from torch import Tensor, nn

from mindspeed_rl import platform
from mindspeed_rl.adaptors import fused_steps, vector_gradients
from mindspeed_rl.algorithms.interfaces import PolicyBatch
from mindspeed_rl.algorithms.policy_losses import policy_loss
from mindspeed_rl.diagnostics.cost_iteration import CountJob
from mindspeed_rl.engine import parallel, train_engine, vocab
from mindspeed_rl.engine.batching import Rows
from mindspeed_rl.engine.build import batch_shape, build_model, plan_transformer_config
from mindspeed_rl.engine.gated_delta import GatedDeltaNet
from mindspeed_rl.engine.optimizer import build_optimizer, ddp_config
from mindspeed_rl.engine.policy_model import PolicyModel
from mindspeed_rl.engine.sparse_attention import SparseCoreAttention
from mindspeed_rl.engine.train_engine import TrainEngine
from mindspeed_rl.models.builder import build_gpt_model, layer_spec
from mindspeed_rl.platform.cost_ledger import CostLedger
from mindspeed_rl.resharding.destinations import read_destinations
from mindspeed_rl.resharding.exchange import Exchange
from mindspeed_rl.resharding.layouts import InferenceLayout, Slice, slice_shape
from mindspeed_rl.resharding.push import WeightPush
from mindspeed_rl.resharding.transfer import WeightStream
from mindspeed_rl.workers.roles import build_micro_batching

#: parameters that vLLM makes of several tensors
_FUSED = ((re.compile(r"\b[qkv]_proj\b"), "qkv_proj"), (re.compile(r"\b(gate|up)_proj\b"), "gate_up_proj"))
_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")


def count(job: CountJob) -> dict[str, object]:
    """Return the cost of this rank's iteration; collective over all ranks."""
    parallel.init_distributed(job.config, job.plan.layout.vpp)
    if job.plain:
        plain = _MegatronTrainer(job)
        return _count_second(plain.iterate, plain.inner)
    trainer = _SuiteTrainer(job)
    return _count_second(trainer.iterate, trainer.inner) | {"least_bytes_of_push": trainer.least_bytes_of_push}


def _build_rows(job: CountJob) -> Rows:
    """Return equally long rows with every column that the policy loss may read."""
    generator = torch.Generator().manual_seed(1)
    prompt = job.tokens // 2
    response = job.tokens - prompt
    vocabulary = job.plan.model_config.vocab_size
    ids = torch.randint(0, vocabulary, (job.rows, job.tokens), generator=generator)
    # negative, as log-probs are, which most of these columns hold
    numbers = dict.fromkeys(("advantages", "rollout_log_probs", *job.columns), torch.linspace(-1.0, -0.5, response))
    masks = dict.fromkeys(("scored_mask", "loss_mask"), torch.ones(response, dtype=torch.bool))
    columns = {name: [value.clone() for _ in range(job.rows)] for name, value in (numbers | masks).items()}
    columns["row"] = [torch.tensor(row) for row in range(job.rows)]
    return Rows(list(ids), [prompt] * job.rows, columns)


#: (owner, name of a method, phase of its calls)
_Inner = list[tuple[object, str, str]]


def _count_second(iterate: Callable[[CostLedger], None], inner: _Inner) -> dict[str, object]:
    """Return the cost of the second iteration: the first one allocates what later ones reuse.

    Args:
        inner: calls that are counted separately, next to Megatron's forward and backward steps.
    """
    iterate(CostLedger())
    platform.current().synchronize()
    with CostLedger() as ledger:
        for owner, name, phase in ((schedules, "forward_step", "forward"), (schedules, "backward_step", "backward"), *inner):
            ledger.around(owner, name, phase)
        iterate(ledger)
    return ledger.record()


class _EngineModel(nn.Module):
    """Weights laid out as vLLM's: query, key and value fused, gate and up fused, experts stacked. It computes nothing."""

    def __init__(self, layout: InferenceLayout, stream: WeightStream, num_experts: int, dtype: torch.dtype) -> None:
        super().__init__()
        # HF tensor -> (slice, parameter, expert, first row) of each part on this rank
        self._parts: dict[str, list[tuple[Slice, str, int, int]]] = {}
        rows: dict[str, dict[int, int]] = {}
        columns: dict[str, tuple[int, ...]] = {}
        for tensor, slices in layout.list_slices(stream.ops, num_experts=num_experts).items():
            name, expert = tensor, 0
            if match := _EXPERT.fullmatch(tensor):
                name, expert = f"{match[1]}.{'w2' if match[3] == 'down' else 'w13'}_weight", int(match[2])
            for pattern, fused in _FUSED:
                name = pattern.sub(fused, name)
            name = name.replace(".", "-")  # a module's parameters have no dots
            for tensor_slice in (tensor_slice for tensor_slice, ranks in slices.items() if dist.get_rank() in ranks):
                height, *width = slice_shape(tensor_slice)
                of_experts = rows.setdefault(name, {})
                first = of_experts.get(expert, 0)
                self._parts.setdefault(tensor, []).append((tensor_slice, name, expert, first))
                of_experts[expert], columns[name] = first + height, tuple(width)
        self._experts = {name: sorted(of_experts) for name, of_experts in rows.items()}
        for name, of_experts in rows.items():
            stacked = (len(of_experts),) if "experts-w" in name else ()
            shape = (*stacked, max(of_experts.values()), *columns[name])
            zeros = torch.zeros(shape, dtype=dtype, device=stream.trained.device)
            self.register_parameter(name, nn.Parameter(zeros, requires_grad=False))

    def resize(self, *, awake: bool) -> None:
        """Give the weights their memory, or take it away, as an engine that sleeps while the trainer works."""
        for parameter in self.parameters():
            parameter.untyped_storage().resize_(parameter.nbytes if awake else 0)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Copy this rank's parts of full tensors to their parameters."""
        parameters = dict(self.named_parameters())
        for tensor, full in weights:
            for tensor_slice, name, expert, first in self._parts.get(tensor, ()):
                part = full[tuple(slice(*side) for side in tensor_slice)]
                data = parameters[name].data
                plane = data[self._experts[name].index(expert)] if data.dim() > part.dim() else data
                plane[first : first + part.size(0)].copy_(part)


class _SuiteTrainer:
    """The suite's engine: log-probs, an update, its weights pushed, training state off the device and back.

    Attributes:
        least_bytes_of_push: bytes from other ranks that a push cannot do without.
    """

    def __init__(self, job: CountJob) -> None:
        config, rl = job.config, job.rl
        shape = batch_shape(config, packed=bool(rl.use_remove_padding), pad_id=0, vision=job.plan.model_config.vision)
        self._rows = _build_rows(job)
        self._engine = TrainEngine(config, build_model(config, job.plan, trainable=True), shape, temperature=job.temperature)
        self._engine.start_training(1)
        self._update = build_micro_batching(rl, "update", config.micro_batch_size or 1)
        self._log_probs = build_micro_batching(rl, "actor", rl.actor_forward_micro_batch_size or config.micro_batch_size or 1)
        self._loss = partial(policy_loss, objective=job.objective)
        engine = self._engine
        stream = WeightStream(engine.model, bucket_bytes=job.bucket_bytes)
        world = dist.get_world_size()
        tensor = math.gcd(job.engine_ranks, world)
        sharing = math.gcd(job.engines_sharing_experts, world // tensor)
        layout = InferenceLayout(tensor, world // tensor, sharing > 1, sharing)
        dtype = getattr(torch, job.engine_dtype)
        self._rollout = _EngineModel(layout, stream, job.plan.layout.num_experts, dtype)
        trained = stream.trained
        places = read_destinations(self._rollout, self._rollout.load_weights, trained.shapes, dtype)
        self._push = WeightPush(trained, places, Exchange.from_world(), replica=dist.get_rank() // (tensor * sharing))
        self._rollout.resize(awake=False)
        self.least_bytes_of_push = self._push.needed_bytes
        self.inner: _Inner = [
            (engine, "_micro_batches", "micro-batches"),
            (PolicyModel, "_postprocess", "head"),
            (vocab._VocabLogProbs, "backward", "head, backward"),
            (engine, "loss_step", "loss"),
            (engine.model.transformer_config, "finalize_model_grads_func", "gradients"),
            (train_engine, "compute_squared_norms", "optimizer"),
            (train_engine, "step_with_norm", "optimizer"),
        ]

    def iterate(self, ledger: CostLedger) -> None:
        """Run one iteration, in phases."""
        engine = self._engine
        with ledger.at("log-probs"):
            engine.forward(self._rows, self._log_probs)
        with ledger.at("update"):
            engine.train_step(self._rows, self._update, self._loss, PolicyBatch.from_inputs)
        self._rollout.resize(awake=True)
        with ledger.at("push"):
            self._push.write(self._rollout)
            with ledger.at("proof"):
                self._push.prove(self._rollout)
        self._rollout.resize(awake=False)
        with ledger.at("offload"):
            engine.offloader.offload(optimizer=True, grads=True, params=True)
        with ledger.at("onload"):
            engine.offloader.onload(optimizer=True, grads=True, params=True)


class _MegatronTrainer:
    """Megatron's GPTModel, loss, data-parallel wrapper and optimizer, in the order of its own training script.

    Tokens come from pinned memory and go from the first tensor-parallel rank to the others; the loss is read back once a step.
    """

    def __init__(self, job: CountJob) -> None:
        config, plan = job.config, job.plan
        fused_steps.remove()
        vector_gradients.remove()
        self._rows, self._device = _build_rows(job), platform.current().current_device()
        transformer = plan_transformer_config(config, plan)
        # rows are equally long, so stages need not send each other shapes, as in Megatron's script
        transformer.variable_seq_lengths = False
        stage, stages = parallel_state.get_pipeline_model_parallel_rank(), plan.layout.pp
        # WrappedTorchNorm is not a module itself, but makes one
        norm = cast(type[nn.Module], WrappedTorchNorm)
        spec = layer_spec(
            plan.model_config,
            transformer,
            norm=norm,
            core_attention=DotProductAttention if plan.model_config.sparse_attention is None else SparseCoreAttention,
            linear_attention=GatedDeltaNet,
            layout=plan.layout,
        )
        model = build_gpt_model(plan.model_config, transformer, spec, pre_process=stage == 0, post_process=stage == stages - 1)
        model = model.to(self._device)
        inner: MegatronModule = Float16Module(transformer, model) if config.bf16 else model
        self._model = DistributedDataParallel(transformer, ddp_config(config), inner)
        self._optimizer: MegatronOptimizer = build_optimizer(config, [self._model])
        transformer.finalize_model_grads_func = finalize_model_grads
        transformer.grad_scale_func = self._optimizer.scale_loss
        self._transformer = transformer
        ends = [*accumulate(job.micro_batch_rows)]
        self._groups = [range(first, end) for first, end in zip([0, *ends], ends)]
        self._tokens = job.tokens
        self.inner: _Inner = [
            (self, "_batch", "micro-batches"),
            (GPTModel, "_postprocess", "head"),
            (self, "_loss", "loss"),
            (self._transformer, "finalize_model_grads_func", "gradients"),
            (self._optimizer, "step", "optimizer"),
        ]

    def _batch(self, rows: range) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return tokens, labels, mask and positions [rows, tokens], broadcast as in Megatron's scripts."""
        shape = len(rows), self._tokens
        ids = torch.stack([self._rows.input_ids[row] for row in rows])
        mask = torch.zeros(shape)
        # at the positions that predict a token of the response
        mask[:, self._tokens // 2 - 1 : -1] = 1.0
        parts = ids, ids.roll(-1, 1), mask, torch.arange(self._tokens).expand(shape).contiguous()
        first = parallel_state.get_tensor_model_parallel_rank() == 0
        group = parallel_state.get_tensor_model_parallel_group()
        tensors = []
        for part in parts:
            if first:
                tensor = part.pin_memory().to(self._device, non_blocking=True)
            else:
                tensor = torch.empty(shape, dtype=part.dtype, device=self._device)
            if group is not None and group.size() > 1:
                dist.broadcast(tensor, dist.get_global_rank(group, 0), group=group)
            tensors.append(tensor)
        return tensors[0], tensors[1], tensors[2], tensors[3]

    def _forward_step(self, groups: Iterator[range], model: nn.Module) -> tuple[Tensor, Callable[[Tensor], Any]]:
        tokens, labels, mask, positions = self._batch(next(groups))
        return model(tokens, positions, None, labels=labels), partial(self._loss, mask)

    def _loss(self, mask: Tensor, output: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        losses, weights = output.view(-1).float(), mask.view(-1).float()
        total, tokens = torch.sum(losses * weights), weights.sum().detach().to(torch.int)
        return total, tokens, torch.cat([total.detach().view(1), tokens.view(1)])

    def _pass(self, *, forward_only: bool) -> list[Tensor]:
        return get_forward_backward_func()(
            forward_step_func=self._forward_step,
            data_iterator=iter(self._groups),
            model=self._model,
            num_microbatches=len(self._groups),
            seq_length=self._tokens,
            micro_batch_size=len(self._groups[0]),
            forward_only=forward_only,
        )

    def iterate(self, ledger: CostLedger) -> None:
        """Run one iteration, in phases."""
        with ledger.at("log-probs"), torch.no_grad():
            self._model.eval()
            self._report(self._pass(forward_only=True))
        with ledger.at("update"):
            self._model.train()
            self._model.zero_grad_buffer()
            self._optimizer.zero_grad()
            losses = self._pass(forward_only=False)
            self._optimizer.step()
            self._report(losses)

    def _report(self, losses: list[Tensor]) -> None:
        if losses:
            total = torch.vstack(losses).sum(0)
            dist.all_reduce(total, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
            (total[0] / total[1]).item()
