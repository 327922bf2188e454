"""Megatron's forward pass by the functions of `exact_kernels` (`rl_config.exact_log_probs`), on the CPU.

| patch | symbol | why |
|---|---|---|
| products | tensor_parallel.layers: `torch.matmul` | blocks of rows; its only uses are in forward passes |
| products that ranks add up | tensor_parallel.layers.RowParallelLinear.forward | in slices |
| products with frozen weights | backward pass of tensor_parallel.layers.LinearWithFrozenWeight | blocks of rows |
| their sums | forward passes of two functions of tensor_parallel.mappings | in pairs of neighbours, where a collective \
has an order of its own |
| routers, experts | moe_utils.RouterGatingLinearFunction.forward, token_dispatcher.unpermute | blocks of rows; outputs of \
experts are added up in the order of their numbers |
| rotation | rope_utils._apply_rotary_pos_emb_bshd | in float32, by operations that round alike at every place |

Attention, SiLU and the sums of the head are called through `adaptors`. It can go when torch's own operators are
batch-invariant; `tests/dist/test_exact_log_probs.py` compares with the rollout engine.
"""

from __future__ import annotations

import importlib
import types
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mindspeed_rl.adaptors import cpu_rope, exact_kernels

#: fields of Megatron's TransformerConfig
TRANSFORMER_SETTINGS = {"activation_func": exact_kernels.silu}

_PREFIX = "megatron.core"
_applied = False


class _ExactTorch(types.ModuleType):
    """torch as a module of Megatron has it, with another `matmul`."""

    def __init__(self, original: Any) -> None:
        super().__init__("torch")
        self._original, self.slices = original, 1

    def matmul(self, x: Tensor, matrix: Tensor) -> Tensor:
        return exact_kernels.matmul(x, matrix, self.slices)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)


def _make_tables(freqs: Tensor, mscale: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    half = freqs[..., : freqs.size(-1) // 2].float()
    return half.cos(), half.sin()


def _all_reduce(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
    if group.size() == 1:
        return x
    parts = x.new_empty(group.size() * x.size(0), *x.shape[1:])
    dist.all_gather_into_tensor(parts, x.contiguous(), group=group)
    return exact_kernels.add_slices(parts.chunk(group.size()))


def _reduce_scatter(
    ctx: Any, x: Tensor, group: dist.ProcessGroup, input_split_sizes: list[int] | None = None, use_global_buffer: bool = False
) -> Tensor:
    ctx.group, ctx.input_split_sizes, ctx.use_global_buffer = group, input_split_sizes, use_global_buffer
    if group.size() == 1:
        return x
    assert input_split_sizes is None  # of experts in several groups of tensor parallelism
    parts = torch.empty_like(x, memory_format=torch.contiguous_format)
    dist.all_to_all_single(parts, x.contiguous(), group=group)
    return exact_kernels.add_slices(parts.chunk(group.size()))


def _multiply_back(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    (weight,) = ctx.saved_tensors
    grad_input = exact_kernels.matmul(grad, weight)
    if ctx.allreduce_dgrad:
        grad_input = _all_reduce(ctx, grad_input, ctx.tp_group)
    return grad_input, None, None, None, None


def _route(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    ctx.save_for_backward(x, weight, bias)
    ctx.router_dtype, ctx.input_dtype, ctx.weight_dtype = dtype, x.dtype, weight.dtype
    logits = exact_kernels.matmul(x.to(dtype), weight.to(dtype).t())
    return logits if bias is None else logits + bias.to(dtype)


def apply(slices: int) -> None:
    """Patch Megatron in this process, after `megatron_cpu`. Imports parts of it; idempotent.

    Args:
        slices: number of slices of a sum over tensor-parallel ranks: the larger number of ranks of both sides.

    Raises:
        RuntimeError: products of this processor depend on the number of rows.
    """
    global _applied
    if _applied:
        return
    exact_kernels.check(slices=slices)
    layers: Any = importlib.import_module(f"{_PREFIX}.tensor_parallel.layers")
    layers.torch = products = _ExactTorch(layers.torch)
    multiply = layers.RowParallelLinear.forward

    def forward(self: Any, input_: Tensor) -> tuple[Tensor, Tensor | None]:
        # another model of this process may have more ranks
        products.slices = max(1, slices // self.tp_group.size())
        try:
            return multiply(self, input_)
        finally:
            products.slices = 1

    layers.RowParallelLinear.forward = forward
    layers.LinearWithFrozenWeight.backward = staticmethod(_multiply_back)
    mappings: Any = importlib.import_module(f"{_PREFIX}.tensor_parallel.mappings")
    mappings._ReduceFromModelParallelRegion.forward = staticmethod(_all_reduce)
    mappings._ReduceScatterToSequenceParallelRegion.forward = staticmethod(_reduce_scatter)
    experts: Any = importlib.import_module(f"{_PREFIX}.transformer.moe.token_dispatcher")
    scatter = experts.unpermute

    def unpermute(outputs: Tensor, tokens: Tensor, restore_shape: torch.Size, **named: Any) -> Tensor:
        counts = tokens.bincount(minlength=restore_shape[0])
        # another model, whose ranks may each add up only some experts of a token
        if named.get("probs") is not None or counts.min() != counts.max():
            return scatter(outputs, tokens, restore_shape, **named)
        return exact_kernels.unpermute(outputs, tokens, restore_shape[0])

    experts.unpermute = unpermute
    routers: Any = importlib.import_module(f"{_PREFIX}.transformer.moe.moe_utils")
    routers.RouterGatingLinearFunction.forward = staticmethod(_route)
    rotary: Any = importlib.import_module(f"{_PREFIX}.models.common.embeddings.rope_utils")
    # another factor is of a model that plays no part in the rollout
    cpu_rope.adapt(rotary, exact_kernels.rotate, _make_tables, scales=False)
    _applied = True
