"""Gradients added to their float32 sums by the operators that compute them (`gemm_gradient_accumulation_fusion`).

| patch | symbol | why |
|---|---|---|
| linear layers | tensor_parallel.layers.fused_weight_gradient_mlp_cuda | Megatron looks for Apex's extension of this name |
| grouped experts | experts.gg.ops, mindspeed.ops.gmm.npu_groupmatmul_add_fp32 | see below |
| norms | fused_rms_norm.RMSNorm.fused_rmsnorm | its operator gives a gradient in float32, which autograd rounds to bfloat16 |

Without it, each micro-batch makes a gradient in bfloat16 and adds it to the sum by a kernel of its own. Here one operator does
both, `npu_grouped_matmul_add_`, with one group for a linear layer: the gradient is never rounded to bfloat16, and no memory
holds it. MindSpeed's feature of this name calls ATB's `_npu_matmul_add_fp32` instead, which is not used: in CANN 9.1.0 it was
seen on an A3 to leave cores in a state in which later kernels add to their output where they should overwrite it.

Not verified on NPU hardware.
"""

from __future__ import annotations

import functools
import importlib
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mindspeed_rl.adaptors import vector_gradients

#: the operator takes rows that are shorter
_WIDTH_LIMIT = 65536
#: attribute of a parameter of grouped experts whose gradient the product adds to its sum
_ADDS = "product_adds_gradient"


def apply() -> None:
    """Give Megatron's layers the operator, after MindSpeed's own patches and before a model is built. Idempotent.

    Which layers call it is a matter of `TransformerConfig.gradient_accumulation_fusion`.
    """
    layers: Any = importlib.import_module("megatron.core.tensor_parallel.layers")
    layers.fused_weight_gradient_mlp_cuda = types.SimpleNamespace(wgrad_gemm_accum_fp32=add_linear_gradient)
    layers._grad_accum_fusion_available = True
    products: Any = importlib.import_module("mindspeed.ops.gmm")
    products.npu_groupmatmul_add_fp32 = _add_groups
    # releases without grouped experts do not have it
    util: Any = getattr(importlib.import_module("megatron.core.transformer.moe.experts"), "gg", None)
    if util is not None and util.ops is not _AddingGroups:
        util.ops = _AddingGroups
    norm: Any = importlib.import_module("mindspeed.core.fusions.fused_rms_norm").RMSNorm
    if norm.fused_rmsnorm.__module__ != __name__:
        norm.fused_rmsnorm = _build_norm(norm.fused_rmsnorm)


def add_gradients_in_products(experts: Any) -> None:
    """Let the products of grouped experts add their gradients, where their configuration asks for it."""
    if experts.config.gradient_accumulation_fusion:
        for weight in (experts.weight1, experts.weight2):
            setattr(weight, _ADDS, True)


def add_linear_gradient(inputs: Tensor, upstream: Tensor, total: Tensor) -> None:
    """Add the gradient of a weight to its sum.

    Args:
        inputs: [tokens, in].
        upstream: [tokens, out], the gradient of the outputs.
        total: [out, in] float32.
    """
    if max(total.shape) >= _WIDTH_LIMIT:
        total.add_(upstream.t().matmul(inputs))
    elif len(inputs):
        _add(total.unsqueeze(0), upstream, inputs, _one_group(len(inputs), total.device))


def compute_weight_gradient(inputs: Tensor, upstream: Tensor, weight: Any, total: Tensor | None) -> Tensor | None:
    """Return the gradient of a weight, or what Megatron's hook ignores where the product adds it to its sum.

    Args:
        inputs: [tokens, in].
        upstream: [tokens, out], the gradient of the outputs.
        weight: [out, in]; a parameter with Megatron's marks.
        total: the sum, [out, in] float32; None where the caller wants the gradient.
    """
    if total is None:
        return upstream.t().matmul(inputs) if weight.requires_grad else None
    add_linear_gradient(inputs, upstream, total)
    weight.grad_added_to_main_grad = True
    return torch.empty_like(weight)


def _add_groups(inputs: Tensor, upstream: Tensor, ends: Tensor, total: Tensor) -> None:
    """Add the gradients of experts to their sums, as MindSpeed calls its operator in the backward pass.

    Args:
        inputs: [rows, in], expert by expert.
        upstream: [rows, out].
        ends: [experts] int64, on the device: end of each expert's rows.
        total: float32, the experts' [in, out] one after the other in memory.
    """
    if len(inputs):
        _add(total.view(len(ends), inputs.size(1), upstream.size(1)), inputs, upstream, ends)


def _add(total: Tensor, left: Tensor, right: Tensor, ends: Tensor) -> None:
    import torch_npu

    torch_npu.npu_grouped_matmul_add_(total, left, right, ends)


@functools.lru_cache(maxsize=64)
def _one_group(rows: int, device: torch.device) -> Tensor:
    """Return the end of the only group, [1] int64, which the layers of a micro-batch share."""
    return torch.full((1,), rows, dtype=torch.int64, device=device)


def _build_norm(plain: Callable[[Any, Tensor], Tensor]) -> Callable[[Any, Tensor], Tensor]:
    def fused_rmsnorm(self: Any, x: Tensor) -> Tensor:
        config, weight = self.config, self.weight
        # 1 + weight is not a parameter, and a frozen weight has no main_grad
        if not config.gradient_accumulation_fusion or config.layernorm_zero_centered_gamma or not hasattr(weight, "main_grad"):
            return plain(self, x)
        return _AddingNorm.apply(x, weight, self.eps)

    return fused_rmsnorm


class _AddingNorm(torch.autograd.Function):
    """RMSNorm whose backward pass adds the gradient of its weight to the sum as the operator gives it, in float32."""

    @staticmethod
    def forward(  # pyrefly: ignore[bad-override]  (torch: the arguments of `apply`)
        ctx: Any, x: Tensor, weight: Tensor, eps: float
    ) -> Tensor:
        import torch_npu

        normed, scales = torch_npu.npu_rms_norm(x, weight, epsilon=eps)
        ctx.save_for_backward(x, scales)
        ctx.weight = weight
        return normed

    @staticmethod
    def backward(  # pyrefly: ignore[bad-override]  (as above)
        ctx: Any, upstream: Tensor
    ) -> tuple[Tensor, Tensor | None, None]:
        import torch_npu

        (x, scales), weight = ctx.saved_tensors, ctx.weight
        of_x, of_weight = torch_npu.npu_rms_norm_backward(upstream, x, weight, scales)
        if not weight.requires_grad:
            return of_x, None, None
        vector_gradients.add(weight, of_weight)
        weight.grad_added_to_main_grad = True
        return of_x, torch.empty_like(weight), None


class _AddingGroups:
    """MindSpeed's grouped product, which is told the parameter where its gradient is to be added by the product."""

    @staticmethod
    def gmm(rows: Tensor, matrices: Tensor, counts: Tensor, trans_b: bool = False) -> Tensor:
        """Multiply each expert's rows [rows, in] by its matrix, one of [experts, in, out]."""
        util: Any = importlib.import_module("mindspeed.core.transformer.moe.grouped_gemm_util")
        # the experts' view of their parameter
        weight = matrices._base
        fuses = getattr(weight, _ADDS, False) and matrices.requires_grad and not trans_b and _is_narrow(matrices)
        return util.Ops.gmm(rows, matrices, counts, trans_b, gemm_fusion=fuses, original_weight=weight if fuses else None)


def _is_narrow(matrices: Tensor) -> bool:
    return max(matrices.shape[1:]) < _WIDTH_LIMIT
