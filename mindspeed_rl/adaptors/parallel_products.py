"""Products of tensor parallel layers fused with their collectives (`use_ascend_mc2`): a part is sent while others are computed.

| patch | symbol | why |
|---|---|---|
| layers | ColumnParallelLinear.forward, RowParallelLinear.forward | with sequence parallelism Megatron gathers rows before a \
product, and scatters sums after it |

`npu_all_gather_base_mm` is the forward pass of a layer that is divided over its outputs and the backward pass of one that is
divided over its inputs, `npu_mm_reduce_scatter_base` the forward pass of the latter. The backward pass of the former has two
products, and its two collectives run at the same time as these, as in Megatron. MindSpeed's classes of this name do not take
the process group that Megatron 0.16 gives them. Layers of experts, float32 layers, and products of fewer than 256 columns are
left as they are.

Losses equal the plain layers' bit for bit on the simulated NPU; not verified on NPU hardware.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mindspeed_rl.adaptors.gradient_products import compute_weight_gradient

#: columns of the left matrix that the operators take
_LEAST_WIDTH, _WIDTH_LIMIT = 256, 65535
#: ranks of a group; 16 on A3
_SIZES = (2, 4, 8, 16)
#: torch_npu's number of an Ascend 950
_SOC_950 = 260

_Group = dist.ProcessGroup


def apply(*, asked: bool) -> None:
    """Patch the layers of megatron.core; those are fused whose configuration has `tp_comm_overlap`. Idempotent.

    Args:
        asked: a role of this process has `use_ascend_mc2`.

    Raises:
        ValueError: this device has no such operators.
    """
    import torch_npu

    if asked and torch_npu.npu.get_soc_version() >= _SOC_950:
        raise ValueError("use_ascend_mc2: the operators are those of A2 and A3; an Ascend 950 does not have them.")
    layers: Any = importlib.import_module("megatron.core.tensor_parallel.layers")
    for owner, build in ((layers.ColumnParallelLinear, _build_column), (layers.RowParallelLinear, _build_row)):
        if owner.forward.__module__ != __name__:
            owner.forward = build(owner.forward)


def _is_fused(layer: Any) -> bool:
    is_asked = layer.config.tp_comm_overlap and layer.sequence_parallel and not layer.is_expert
    return is_asked and layer.tp_group.size() in _SIZES and layer.weight.dtype in (torch.bfloat16, torch.float16)


def _add_bias(layer: Any, output: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return the output and the bias that the caller adds, as Megatron's layers do."""
    return (output, layer.bias) if layer.skip_bias_add or layer.bias is None else (output + layer.bias, None)


def _build_column(plain: Callable[..., Any]) -> Callable[..., Any]:
    def forward(
        self: Any, input_: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> tuple[Tensor, Tensor | None]:
        gathers = self.gather_output or runtime_gather_output
        if weight is not None or gathers or self.disable_grad_reduce or not _is_fused(self):
            return plain(self, input_, weight, runtime_gather_output)
        output = _GatheredProduct.apply(input_, self.weight, self.tp_group, self.gradient_accumulation_fusion)
        return _add_bias(self, output)

    return functools.update_wrapper(forward, plain, assigned=("__doc__",))


def _build_row(plain: Callable[..., Any]) -> Callable[..., Any]:
    def forward(self: Any, input_: Tensor) -> tuple[Tensor, Tensor | None]:
        if not self.input_is_parallel or not _is_fused(self):
            return plain(self, input_)
        output = _ScatteredProduct.apply(input_, self.weight, self.tp_group, self.gradient_accumulation_fusion)
        return _add_bias(self, output)

    return functools.update_wrapper(forward, plain, assigned=("__doc__",))


def _save_for_backward(ctx: Any, inputs: Tensor, weight: Tensor, group: _Group, *, adds: bool) -> None:
    ctx.save_for_backward(inputs, weight)
    ctx.group, ctx.main_grad = group, getattr(weight, "main_grad", None) if adds else None


class _GatheredProduct(torch.autograd.Function):
    """[tokens / ranks, batch, in] and [out / ranks, in] -> [tokens, batch, out / ranks]."""

    @staticmethod
    def forward(  # pyrefly: ignore[bad-override]  (torch: the arguments of `apply`)
        ctx: Any, inputs: Tensor, weight: Tensor, group: _Group, adds: bool
    ) -> Tensor:
        _save_for_backward(ctx, inputs, weight, group, adds=adds)
        product, _ = _gather_and_multiply(inputs.flatten(0, 1), weight.t(), group)
        return product.view(-1, inputs.size(1), weight.size(0))

    @staticmethod
    def backward(  # pyrefly: ignore[bad-override]  (as above)
        ctx: Any, upstream: Tensor
    ) -> tuple[Tensor | None, ...]:
        inputs, weight = ctx.saved_tensors
        rows, upstream = inputs.flatten(0, 1).contiguous(), upstream.flatten(0, 1).contiguous()
        gathered = handle = None
        if weight.requires_grad:
            gathered = rows.new_empty(len(upstream), rows.size(1))
            handle = dist.all_gather_into_tensor(gathered, rows, group=ctx.group, async_op=True)
        sums = upstream.matmul(weight)
        if handle is not None:
            handle.wait()
        of_inputs, of_weight = torch.empty_like(rows), None
        handle = dist.reduce_scatter_tensor(of_inputs, sums, group=ctx.group, async_op=True)
        if gathered is not None:
            of_weight = compute_weight_gradient(gathered, upstream, weight, ctx.main_grad)
        handle.wait()
        return of_inputs.view_as(inputs), of_weight, None, None


class _ScatteredProduct(torch.autograd.Function):
    """[tokens, batch, in / ranks] and [out, in / ranks] -> [tokens / ranks, batch, out], the sum over ranks."""

    @staticmethod
    def forward(  # pyrefly: ignore[bad-override]  (torch: the arguments of `apply`)
        ctx: Any, inputs: Tensor, weight: Tensor, group: _Group, adds: bool
    ) -> Tensor:
        _save_for_backward(ctx, inputs, weight, group, adds=adds)
        product = _multiply_and_scatter(inputs.flatten(0, 1), weight.t(), group)
        return product.view(-1, inputs.size(1), weight.size(0))

    @staticmethod
    def backward(  # pyrefly: ignore[bad-override]  (as above)
        ctx: Any, upstream: Tensor
    ) -> tuple[Tensor | None, ...]:
        inputs, weight = ctx.saved_tensors
        of_inputs, gathered = _gather_and_multiply(upstream.flatten(0, 1), weight, ctx.group)
        of_weight = compute_weight_gradient(inputs.flatten(0, 1), gathered, weight, ctx.main_grad)
        return of_inputs.view_as(inputs), of_weight, None, None


def _has_operator(rows: Tensor) -> bool:
    """Return True for a left matrix [n, k] that the operators take."""
    return _LEAST_WIDTH <= rows.size(1) < _WIDTH_LIMIT


def _gather_and_multiply(rows: Tensor, matrix: Tensor, group: _Group) -> tuple[Tensor, Tensor]:
    """Return the product of all ranks' rows [n, k] with a matrix [k, m], and these rows: [ranks * n, m], [ranks * n, k]."""
    import torch_npu

    rows = rows.contiguous()
    if _has_operator(rows):
        return torch_npu.npu_all_gather_base_mm(rows, matrix, _get_name(group), group.size())
    gathered = rows.new_empty(group.size() * len(rows), rows.size(1))
    dist.all_gather_into_tensor(gathered, rows, group=group)
    return gathered.matmul(matrix), gathered


def _multiply_and_scatter(rows: Tensor, matrix: Tensor, group: _Group) -> Tensor:
    """Return this rank's rows of the sum over ranks of [n, k] times [k, m]: [n / ranks, m]."""
    import torch_npu

    rows = rows.contiguous()
    if _has_operator(rows):
        return torch_npu.npu_mm_reduce_scatter_base(rows, matrix, _get_name(group), group.size())
    product = rows.matmul(matrix)
    share = product.new_empty(len(product) // group.size(), product.size(1))
    dist.reduce_scatter_tensor(share, product, group=group)
    return share


def _get_name(group: _Group) -> str:
    """Return the name of the group's communicator in HCCL, on this process's device."""
    import torch_npu

    backend: Any = group._get_backend(torch.device("npu"))
    # torch_npu takes a rank, and finds the device by it: that of the same number
    return backend.get_hccl_comm_name(torch_npu.npu.current_device())
