"""Low-rank adapters of vLLM's CPU build (0.32): products of the rows of each adapter, and none for rows without one.

| patch | symbol | why |
|---|---|---|
| products | punica_cpu.bgmv_shrink, bgmv_expand, bgmv_expand_slice, sgmv_* | they copy a matrix for every token, and give \
tokens without an adapter (-1) the last slot's |

Rows are computed by `adaptors.multiply_rows`, so that with exact log-probs a row's bits depend on nothing but the row and its
adapter. It can go when vLLM's own functions multiply by adapter; `tests/unit/adaptors/test_vllm_cpu_adapters.py` shows that
theirs give rows without an adapter one.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from mindspeed_rl import adaptors

_applied = False


def _multiply(inputs: Tensor, weights: Tensor, indices: Tensor, dtype: torch.dtype) -> Tensor:
    """Return [rows, out]: each row times its adapter's matrix, of [slots, 1, out, in] or [slots, out, in]; 0 without one."""
    weights = weights.squeeze(1) if weights.dim() == 4 else weights
    outputs = torch.zeros(len(inputs), weights.size(1), dtype=dtype)
    # a batch may be padded: indices are of its rows
    indices = indices[: len(inputs)]
    for index in torch.unique(indices).tolist():
        if index >= 0:
            rows = (indices == index).nonzero().flatten()
            product = partial(functional.linear, weight=weights[index].to(dtype))
            outputs[rows] = adaptors.multiply_rows(product, inputs[rows].to(dtype))
    return outputs


def _shrink(inputs: Tensor, weights: Tensor, output: Tensor, indices: Tensor, scaling: float = 1.0) -> None:
    product = _multiply(inputs, weights, indices, output.dtype)
    output[: len(product), : product.size(1)] = scaling * product


def _expand(inputs: Tensor, weights: Tensor, output: Tensor, indices: Tensor, add_inputs: bool = True) -> None:
    _expand_slice(inputs, weights, output, indices, 0, output.size(1), add_inputs)


def _expand_slice(
    inputs: Tensor, weights: Tensor, output: Tensor, indices: Tensor, offset: int, size: int, add_inputs: bool = True
) -> None:
    product = _multiply(inputs, weights, indices, output.dtype)
    # the base layer may be padded otherwise
    width = min(product.size(1), size)
    place = output[: len(product), offset : offset + width]
    if add_inputs:
        place += product[:, :width]
    else:
        place.copy_(product[:, :width])


def _by_sequence(function: Any) -> Any:
    """Return the function of tokens as one of sequences, which have an adapter each."""

    def multiply(
        inputs: Tensor,
        weights: Tensor,
        output: Tensor,
        starts: Tensor,
        lengths: Tensor,
        indices: Tensor,
        batches: int,
        max_length: int,
        num_tokens: int,
        *others: object,
    ) -> None:
        function(inputs, weights, output, torch.repeat_interleave(indices, lengths), *others)

    return multiply


def apply() -> None:
    """Patch vLLM in this process. Imports vLLM; idempotent."""
    global _applied
    if _applied:
        return
    from vllm.lora.punica_wrapper import punica_cpu

    module: Any = punica_cpu
    for name, function in (("shrink", _shrink), ("expand", _expand), ("expand_slice", _expand_slice)):
        setattr(module, f"bgmv_{name}", function)
        setattr(module, f"sgmv_{name}", _by_sequence(function))
    _applied = True
