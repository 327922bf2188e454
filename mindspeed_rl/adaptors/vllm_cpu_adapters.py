"""Low-rank adapters of vLLM's CPU build (0.32): products of the rows of each adapter, and none for rows without one.

| patch | symbol | why |
|---|---|---|
| products | punica_cpu.bgmv_shrink, bgmv_expand, bgmv_expand_slice, sgmv_* | they copy a matrix for every token, and give \
tokens without an adapter (-1) the last slot's |
| prompts | CPUModelRunner._get_prompt_logprobs_dict | an adapter of the output layer is applied by the order of the sampled \
tokens, which the tokens of a prompt do not have |

Rows are computed by `adaptors.multiply_rows`, so that with exact log-probs a row's bits depend on nothing but the row and its
adapter. It can go when vLLM's own functions multiply by adapter; `tests/unit/adaptors/test_vllm_cpu_adapters.py` shows that
theirs give rows without an adapter one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache, partial
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
    for index, rows in _group_rows(tuple(indices[: len(inputs)].tolist())):
        product = partial(functional.linear, weight=weights[index].to(dtype))
        # a copy: a matrix that begins in the middle of another one may be multiplied otherwise
        outputs[rows] = adaptors.multiply_rows(product, inputs[rows].to(dtype, copy=True))
    return outputs


@lru_cache(maxsize=16)
def _group_rows(indices: tuple[int, ...]) -> list[tuple[int, slice | Tensor]]:
    """Return the rows of each adapter; every layer of a step asks for the same."""
    found: dict[int, list[int]] = {}
    for row, index in enumerate(indices):
        if index >= 0:
            found.setdefault(index, []).append(row)
    adjacent = {index: rows[-1] - rows[0] + 1 == len(rows) for index, rows in found.items()}
    return [
        (index, slice(rows[0], rows[-1] + 1) if adjacent[index] else torch.tensor(rows)) for index, rows in found.items()
    ]


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
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    runner: Any = CPUModelRunner
    read_prompts = runner._get_prompt_logprobs_dict

    def read_with_adapters(self: Any, hidden_states: Tensor, num_scheduled: dict[str, int]) -> dict[str, object]:
        """Read the log-probs of one prompt after the other, each with the adapter of its request."""
        waiting = self.num_prompt_logprobs
        if not waiting or self.lora_config is None:
            return read_prompts(self, hidden_states, num_scheduled)
        results: dict[str, object] = {}
        left: dict[str, int] = {}
        try:
            for name, count in waiting.items():
                self.num_prompt_logprobs = {name: count}
                with _head_adapter_of(self, self.requests[name].lora_request):
                    results |= read_prompts(self, hidden_states, num_scheduled)
                left |= self.num_prompt_logprobs  # a prompt that has further parts
        finally:
            self.num_prompt_logprobs = waiting
        waiting.clear()
        waiting.update(left)
        return results

    runner._get_prompt_logprobs_dict = read_with_adapters
    _applied = True


@contextmanager
def _head_adapter_of(runner: Any, request: Any) -> Iterator[None]:
    """Apply one request's adapter of the output layer to all rows in the block."""
    manager = runner.lora_manager._adapter_manager
    wrapper = manager._get_punica_wrapper("lm_head")
    slot = -1 if request is None else manager.lora_index_to_id.index(request.lora_int_id)
    kept, length = wrapper._sampler_indices.clone(), wrapper.indices_len[1]
    wrapper._sampler_indices.fill_(slot)
    wrapper.indices_len[1] = len(kept)
    try:
        yield
    finally:
        wrapper._sampler_indices.copy_(kept)
        wrapper.indices_len[1] = length
