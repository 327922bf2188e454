"""Hooks that pass results of a Megatron model to a sink: activations, loss inputs, gradients by weight."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from mindspeed_rl.algorithms.interfaces import LossInputs, LossOutput
from mindspeed_rl.dumps.record import Cut, Sink
from mindspeed_rl.engine.batching import MicroBatch
from mindspeed_rl.engine.built_model import BuiltModel
from mindspeed_rl.engine.train_engine import TrainEngine
from mindspeed_rl.engine.weights import LocalWeight, list_model_ops

_Result = TypeVar("_Result")
_Batch = TypeVar("_Batch")

#: positions in the forward pass of a micro-batch; layer n has _PER_LAYER positions from _LAYERS + n * _PER_LAYER on
_EMBEDDING, _LAYERS, _PER_LAYER, _FINAL_NORM, _HEAD, _INPUTS, _LOSS = 0, 10, 4, 90_000, 90_001, 90_010, 90_900
_PER_MICRO_BATCH, _MICRO_BATCHES = 100_000, 10_000


class ModelProbe:
    """Recorder of the passes of one engine inside `recording`. Outside of it the model has no hooks.

    Activations are [tokens of this rank, rows, hidden] as Megatron computes them, without the padding after the last token;
    with sequence parallelism a rank has its slice of the tokens. Recomputed activations are not recorded again.
    """

    def __init__(self, engine: TrainEngine, sink: Sink, *, modules: bool = True) -> None:
        """Create the recorder.

        Args:
            modules: activations and gradients too, not only the loss and its inputs.
        """
        self._engine, self._sink, self._modules = engine, sink, modules
        self._started: Counter[int] = Counter()  # micro-batches that a chunk has started in this update
        self._inside: set[int] = set()
        self._num_tokens: dict[int, int] = {}
        self._update = 0
        self._trains = engine.optimizer is not None
        config = engine.model.transformer_config
        tp = config.tensor_model_parallel_size
        self._cut = Cut(0, parallel_state.get_tensor_model_parallel_rank(), tp) if config.sequence_parallel else None

    @contextlib.contextmanager
    def recording(self) -> Iterator[ModelProbe]:
        """Record passes of the engine in the block."""
        handles = list(self._hooks()) if self._modules else []
        self._engine.on_gradients.append(self._end_update)
        try:
            yield self
        finally:
            self._engine.on_gradients.remove(self._end_update)
            for handle in handles:
                handle.remove()

    def inputs(self, function: Callable[[LossInputs], _Result]) -> Callable[[LossInputs], _Result]:
        """Return the function with its loss inputs recorded."""

        def record(inputs: LossInputs) -> _Result:
            # the engine also counts, without gradient
            if not torch.is_grad_enabled():
                return function(inputs)
            # the key -1 counts losses, because hooks may be off
            micro = self._started[-1]
            self._started[-1] += 1
            for index, output in enumerate(inputs.outputs):
                self._add(micro, _HEAD + 1 + index, f"loss_inputs.outputs.{index}", output)
            self._add(micro, _INPUTS, "loss_inputs.mask", inputs.mask)
            for index, (name, column) in enumerate(sorted(inputs.columns.items())):
                self._add(micro, _INPUTS + 1 + index, f"loss_inputs.{name}", column)
            return function(inputs)

        return record

    def loss(self, function: Callable[[_Batch], LossOutput]) -> Callable[[_Batch], LossOutput]:
        """Return the function with the sum and the count that it returns recorded. It takes results of `inputs`."""

        def record(batch: _Batch) -> LossOutput:
            result = function(batch)
            if not torch.is_grad_enabled():
                return result
            micro = self._started[-1] - 1
            self._add(micro, _LOSS, "loss.sum", result.loss_sum)
            self._add(micro, _LOSS + 1, "loss.count", result.count)
            return result

        return record

    # ------------------------------------------------------------------ hooks

    def _hooks(self) -> Iterator[RemovableHandle]:
        layout, stage = self._engine.model.plan.layout, parallel_state.get_pipeline_model_parallel_rank()
        for chunk, model in enumerate(self._engine.model.models):
            embedding, norm = getattr(model, "embedding", None), model.decoder.final_layernorm
            yield model.register_forward_pre_hook(partial(self._enter, chunk), with_kwargs=True)
            if isinstance(embedding, nn.Module):  # on the first stage
                yield embedding.register_forward_hook(self._hook(chunk, _EMBEDDING, "embedding"))
            for index, layer in zip(layout.chunk_layers(stage, chunk), model.decoder.layers):
                if not isinstance(layer, TransformerLayer) or index is None:
                    continue  # a no-op layer
                first, name = _LAYERS + index * _PER_LAYER, f"layers.{index}"
                # modules built from specs, as which Megatron declares them
                attention, mlp = cast(nn.Module, layer.self_attention), cast(nn.Module, layer.mlp)
                yield attention.register_forward_hook(self._hook(chunk, first, f"{name}.attention"))
                yield mlp.register_forward_hook(self._hook(chunk, first + 1, f"{name}.mlp"))
                yield layer.register_forward_hook(self._hook(chunk, first + 2, f"{name}.output"))
            if isinstance(norm, nn.Module):  # on the last stage
                yield norm.register_forward_hook(self._hook(chunk, _FINAL_NORM, "final_norm"))
            yield model.register_forward_hook(partial(self._leave, chunk))

    def _enter(self, chunk: int, module: nn.Module, inputs: object, named: dict[str, Any]) -> None:
        self._inside.add(chunk)
        self._num_tokens[chunk] = _count_tokens(named["labels"].micro_batch)
        self._started[chunk] += 1

    def _leave(self, chunk: int, module: nn.Module, inputs: object, output: tuple[Tensor, ...]) -> None:
        self._inside.discard(chunk)
        if getattr(module, "post_process", False):
            self._add(self._started[chunk] - 1, _HEAD, "head", torch.stack(output))

    def _hook(self, chunk: int, position: int, name: str) -> Callable[[nn.Module, object, Tensor | tuple[Tensor, ...]], None]:
        def record(module: nn.Module, inputs: object, output: Tensor | tuple[Tensor, ...]) -> None:
            if chunk in self._inside:  # a recomputation runs outside of the chunk's forward
                tensor = output[0] if isinstance(output, tuple) else output
                first = tensor.size(0) * self._cut.shard if self._cut else 0
                length, kind, micro = max(0, self._num_tokens[chunk] - first), type(module).__name__, self._started[chunk] - 1
                self._add(micro, position, name, tensor[:length], self._cut, kind)
                if self._sink.takes_backward and tensor.requires_grad:

                    def record_gradient(gradient: Tensor) -> None:
                        self._add(micro, position, name, gradient[:length], self._cut, kind, is_gradient=True)

                    tensor.register_hook(record_gradient)

        return record

    def _add(
        self, micro: int, position: int, name: str, tensor: Tensor, cut: Cut | None = None, kind: str = "Tensor",
        *, is_gradient: bool = False,
    ) -> None:  # fmt: skip
        prefix = f"update_{self._update}.micro_{micro}" if self._trains else f"micro_{micro}"
        position += (self._update * _MICRO_BATCHES + micro) * _PER_MICRO_BATCH
        self._sink.add(f"{prefix}.{name}", position, tensor, cut=cut, kind=kind, is_gradient=is_gradient)

    # ------------------------------------------------------------------ gradients

    def _end_update(self) -> None:
        if self._modules:
            first = ((self._update + 1) * _MICRO_BATCHES - 1) * _PER_MICRO_BATCH
            names = (name for op in list_model_ops(self._engine.model) for name in op.hf)
            positions = {name: first + index for index, name in enumerate(dict.fromkeys(names))}
            for name, gradient, cut in _list_gradients(self._engine):
                position = positions.get(name, first + len(positions))  # adapters come last
                self._sink.add(f"update_{self._update}.gradients.{name}", position, gradient, cut=cut, everywhere=True)
        self._update += 1
        self._started.clear()


@torch.no_grad()
def _list_gradients(engine: TrainEngine) -> Iterator[tuple[str, Tensor, Cut | None]]:
    """Yield (name, gradient, its cut) of this rank's trained weights, between the backward pass and the optimizer's step.

    Names come from the HF checkpoint, parts are cut from its tensors, without padding, so that ranks of another layout have
    parts of the same tensors. Gradients cover the full batch, before clipping. Collective over the training world.
    """
    _gather_gradients(engine)
    for weight in engine.weights():
        gradient = getattr(weight.parameter, "main_grad", None)
        if gradient is not None:
            yield from _to_hf(weight, gradient)
    yield from _list_adapter_gradients(engine.model)


def _gather_gradients(engine: TrainEngine) -> None:
    """Gather full gradients on every rank; a distributed optimizer sums each shard only on the rank that steps it."""
    for buffer in engine.model.gradient_buffers():
        if not buffer.ddp_config.use_distributed_optimizer:
            continue
        group = buffer.data_parallel_group
        for bucket in buffer.buckets:
            shards = list(bucket.grad_data.chunk(group.size()))
            # the other shards are partial sums, which are not read any more
            dist.all_gather(shards, shards[group.rank()].clone(), group=group)


def _to_hf(weight: LocalWeight, gradient: Tensor) -> Iterator[tuple[str, Tensor, Cut | None]]:
    op, count, shard = weight.op, weight.num_shards, weight.shard
    for name, split, part in zip(op.hf, op.splits, op.packing.unpack(gradient)):
        if split.dim is None:
            yield name, part, None
            continue
        if split.padded:
            rows = split.padded // count
            part = part.narrow(split.dim, 0, min(max(split.size - shard * rows, 0), rows))
        blocks = tuple(split.part_rows(count * part.size(split.dim), count)) if split.sections or split.blocks > 1 else ()
        cut = None if count == 1 else Cut(split.dim, shard, count, blocks, split.size if split.padded else 0)
        yield name, part, cut


def _list_adapter_gradients(model: BuiltModel) -> Iterator[tuple[str, Tensor, Cut | None]]:
    """Yield gradients of low-rank adapters, under Megatron's names; each rank's part is compared with the same rank's."""
    layout = model.plan.layout
    tp, pp = parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_pipeline_model_parallel_rank()
    ep = parallel_state.get_expert_model_parallel_rank() if layout.num_experts else 0
    for stage, module in enumerate(model.models):
        for name, parameter in module.named_parameters():
            gradient = getattr(parameter, "main_grad", None)
            if ".lora_" in name and gradient is not None:
                suffix = f"@tp{tp}of{layout.tp}" if layout.tp > 1 else ""
                yield layout.global_name(name, pp, stage, tp, ep) + suffix, gradient, None


def _count_tokens(micro_batch: MicroBatch) -> int:
    """Return the number of this rank's tokens before the padding at the end of the micro-batch, which depends on the layout.

    Slices of a context-parallel rank stay unchanged: they have padding inside.
    """
    width = micro_batch.input_ids.size(1)
    if parallel_state.get_context_parallel_world_size() > 1:
        return width
    if micro_batch.packed is not None:
        return micro_batch.num_tokens
    rows = micro_batch.input_ids.size(0)
    return min(width, int(micro_batch.hidden_index.max()) // rows + 2)  # the last token has no prediction
