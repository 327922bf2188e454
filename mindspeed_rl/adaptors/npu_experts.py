"""Fused kernels inside experts: SwiGLU, and the permutation of tokens around the exchange between experts.

| patch | symbol | why |
|---|---|---|
| activation of grouped experts | GroupedMLP.__init__ | Megatron takes two kernels for silu(gate) times up |
| activation of single experts | mlp.weighted_bias_swiglu_impl | the same; MindSpeed needs a Megatron-LM tree |
| permutation | token_dispatcher.permute, unpermute | see below |
| rows of each expert | MoEAlltoAllTokenDispatcher._maybe_dtoh_and_synchronize | the grouped product takes them on the device: \
Megatron reads them, and MindSpeed sends them back, with a wait for each product |
| order of local experts | token_dispatcher.sort_chunks_by_idxs | where no other rank has experts, rows are in order already, \
and Megatron waits for the sizes of chunks that it leaves where they are |

Plain permutation waits for the device twice, to learn how many rows there are, and takes about ten kernels. MindSpeed's
feature for it switches on `TransformerConfig.moe_permute_fusion`, which asks for TransformerEngine or a Triton kernel too, so
the two operators are called here. They can go when MindSpeed's features for experts need only the megatron-core package.

Checked on the simulated NPU (tests/npu_sim/test_mindspeed.py counts the kernels); not verified on NPU hardware.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mindspeed_rl.adaptors import gradient_products


def apply(*, fuse_permutation: bool) -> None:
    """Patch the experts of megatron.core, after MindSpeed's own patches and before a model is built. Idempotent.

    Args:
        fuse_permutation: tokens are permuted by the fused operators; needs the dispatcher "alltoall".
    """
    mlp: Any = importlib.import_module("megatron.core.transformer.mlp")
    mlp.weighted_bias_swiglu_impl = _weighted_swiglu
    grouped = getattr(importlib.import_module("megatron.core.transformer.moe.experts"), "GroupedMLP", None)
    if grouped is not None and not hasattr(grouped.__init__, "fuses_swiglu"):
        grouped.__init__ = _fuse_after(grouped.__init__)
    dispatcher: Any = importlib.import_module("megatron.core.transformer.moe.token_dispatcher")
    plain = importlib.import_module("megatron.core.transformer.moe.moe_utils")
    functions = (_permute, _unpermute) if fuse_permutation else (plain.permute, plain.unpermute)
    dispatcher.permute, dispatcher.unpermute = functions
    dispatcher.sort_chunks_by_idxs = _sort_chunks
    owner = dispatcher.MoEAlltoAllTokenDispatcher
    if not hasattr(owner._maybe_dtoh_and_synchronize, "keeps_counts"):
        owner._maybe_dtoh_and_synchronize = _keep_counts(owner._maybe_dtoh_and_synchronize)


def _weighted_swiglu(x: Tensor, bias: Tensor | None, probs: Tensor, fp8_input_store: bool = False) -> Tensor:
    """Compute silu(gate) * up * probs of [t, 2 * h] rows and [t, 1] probabilities, rounded once."""
    import torch_npu

    if bias is not None or fp8_input_store:
        raise NotImplementedError("experts with a bias or fp8 inputs have no fused SwiGLU on the NPU.")
    return (torch_npu.npu_swiglu(x, dim=-1) * probs).to(x.dtype)


def _fuse_after(init: Callable[..., None]) -> Callable[..., None]:
    """Return an initializer of grouped experts that replaces silu(gate) * up, which Megatron calls through the attribute."""

    @functools.wraps(init)
    def fused_init(self: Any, *args: Any, **kwargs: Any) -> None:
        import torch_npu

        init(self, *args, **kwargs)
        gradient_products.add_gradients_in_products(self)
        if self.config.gated_linear_unit and self.config.activation_func is torch.nn.functional.silu:
            self.activation_func = functools.partial(torch_npu.npu_swiglu, dim=-1)

    fused_init.fuses_swiglu = True  # pyrefly: ignore[missing-attribute]  (the mark of a patched class)
    return fused_init


def _keep_counts(read: Callable[..., Tensor | None]) -> Callable[..., Tensor | None]:
    """Return the dispatcher's reading of counts without the rows of each local expert.

    What is left are the sizes of the exchange with other ranks, one wait a layer and micro-batch. Experts that are computed one
    by one need all counts.
    """

    @functools.wraps(read)
    def read_sizes(self: Any, point: str, tokens_per_expert: Tensor | None = None) -> Tensor | None:
        if not self.config.moe_grouped_gemm:
            return read(self, point, tokens_per_expert)
        # an integer, unless a capacity drops tokens
        if self.ep_size * self.tp_size > 1 or isinstance(self.num_out_tokens, Tensor):
            read(self, point, None)
        return tokens_per_expert

    read_sizes.keeps_counts = True  # pyrefly: ignore[missing-attribute]  (the mark of a patched class)
    return read_sizes


def _sort_chunks(
    input: Tensor, split_sizes: Tensor, sorted_idxs: Tensor, probs: Tensor | None = None, fused: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Return the rows and their probabilities with the chunks in another order, which the host knows."""
    if sorted_idxs.tolist() == list(range(len(sorted_idxs))):
        return input, probs
    plain = importlib.import_module("megatron.core.transformer.moe.moe_utils")
    return plain.sort_chunks_by_idxs(input, split_sizes, sorted_idxs, probs=probs, fused=fused)


def _permute(
    tokens: Tensor,
    routing_map: Tensor,
    probs: Tensor | None = None,
    num_out_tokens: int | None = None,
    fused: bool = False,
    drop_and_pad: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Return the rows of [t, h] tokens expert by expert, their probabilities, and the order that `_unpermute` takes."""
    import torch_npu

    dtype = tokens.dtype
    if probs is not None and probs.dtype != dtype:  # the operator takes one format
        tokens, probs = tokens.float(), probs.float()
    rows, weights, order = torch_npu.npu_moe_token_permute_with_routing_map(
        tokens, routing_map, probs=probs, num_out_tokens=num_out_tokens, drop_and_pad=drop_and_pad
    )
    return rows.to(dtype), None if probs is None else weights, order


def _unpermute(
    permuted_tokens: Tensor,
    sorted_indices: Tensor,
    restore_shape: torch.Size,
    probs: Tensor | None = None,
    routing_map: Tensor | None = None,
    fused: bool = False,
    drop_and_pad: bool = False,
) -> Tensor:
    """Return the sum of each token's rows, times their probabilities where these are given."""
    import torch_npu

    if permuted_tokens.numel() == 0:  # the sum keeps the rank in the backward pass, whose exchange waits for every rank
        return permuted_tokens.new_zeros(restore_shape) + permuted_tokens.sum()
    return torch_npu.npu_moe_token_unpermute_with_routing_map(
        permuted_tokens, sorted_indices, restore_shape, probs=probs, routing_map=routing_map, drop_and_pad=drop_and_pad
    )
