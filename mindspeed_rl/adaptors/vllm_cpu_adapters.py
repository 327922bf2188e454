"""Low-rank adapters of vLLM's CPU build (0.32): products of the rows of each adapter, and none for rows without one.

| patch | symbol | why |
|---|---|---|
| products | PunicaWrapperCPU.add_lora_linear, add_lora_logits, add_lora_embedding | they copy a matrix for every token, and \
give tokens without an adapter (-1) the last slot's |
| matrices | create_lora_weights, reset_lora of linear layers | slices of a layer (query, key, value) have matrices of their \
own, which lie side by side here, so that slices whose first matrix is the same take one product |
| prompts | CPUModelRunner._get_prompt_logprobs_dict | an adapter of the output layer is applied by the order of the sampled \
tokens, which the tokens of a prompt do not have |

A step of a small model spends as long on its adapters' many small products as on the base, so each layer has two for each
adapter, not two for each of its slices. Rows are computed by `adaptors.multiply_rows`: with exact log-probs a row's bits depend
on nothing but the row and its adapter. It can go when vLLM's own functions multiply by adapter;
`tests/unit/adaptors/test_vllm_cpu_adapters.py` shows that theirs give rows without an adapter one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from mindspeed_rl import adaptors

_applied = False


@dataclass(frozen=True)
class _Part:
    """The matrices of an adapter for outputs of a layer from `start` on: the engine's memory, whose bits are proven, no copies.

    Attributes:
        a: [rank, inputs]; None where the inputs are products with it already.
        b: [outputs, rank].
        dtype: format of the outputs.
    """

    start: int
    a: Tensor | None
    b: Tensor
    dtype: torch.dtype

    def multiply(self, rows: Tensor, scale: float) -> Tensor:
        """Return [n, outputs] of [n, inputs] float32."""
        hidden = rows if self.a is None else functional.linear(rows, self.a.float())
        return functional.linear((hidden if scale == 1.0 else scale * hidden).to(self.dtype), self.b.to(self.dtype))


class _Slices(tuple[Tensor, ...]):
    """vLLM's second matrices of a layer's slices, each [slots, 1, outputs, rank], that lie in one [slots, all outputs, rank].

    Attributes:
        whole: the one.
        parts: adapters of the slots that were multiplied with, until a slot gets another one.
    """

    whole: Tensor
    parts: dict[int, list[_Part]]

    @classmethod
    def lay_out(cls, matrices: Sequence[Tensor]) -> _Slices:
        """Return matrices of 0 with the shapes of these."""
        slots, _, _, rank = matrices[0].shape
        sizes = [matrix.size(2) for matrix in matrices]
        whole = matrices[0].new_zeros(slots, sum(sizes), rank)
        slices = cls(part.unsqueeze(1) for part in whole.split(sizes, 1))
        slices.whole, slices.parts = whole, {}
        return slices

    def find_parts(self, slot: int, first: Sequence[Tensor], dtype: torch.dtype) -> list[_Part]:
        """Return the adapter of a slot.

        Args:
            first: first matrices of the slices, [slots, 1, rank, inputs] each.
            dtype: format of the outputs.
        """
        if slot not in self.parts:
            self.parts[slot] = list(self._list_parts(slot, first, dtype))
        return self.parts[slot]

    def _list_parts(self, slot: int, first: Sequence[Tensor], dtype: torch.dtype) -> Iterator[_Part]:
        """Yield the parts of slices side by side with the same first matrix; one without an adapter adds 0, and has none."""
        begin = start = 0
        for index, matrix in enumerate(self):
            end = start + matrix.size(2)
            is_last = index + 1 == len(self)
            if is_last or not torch.equal(first[index][slot], first[index + 1][slot]):
                b = self.whole[slot, begin:end]
                if b.any():
                    yield _Part(begin, first[index][slot, 0], b, dtype)
                begin = end
            start = end


def _add_products(
    outputs: Tensor, inputs: Tensor, indices: Tensor, find_parts: Callable[[int], Sequence[_Part]], scale: float
) -> None:
    """Add to each row of `outputs` the product of its input with its adapter; nothing where it has none (-1)."""
    # a batch may be padded: indices are of its rows
    for slot, rows in _group_rows(tuple(indices[: len(inputs)].tolist())):
        parts = find_parts(slot)
        if not parts:
            continue
        # a copy: a matrix that begins in the middle of another one may be multiplied otherwise
        own = inputs[rows].to(torch.float32, copy=True)
        for part in parts:
            product = adaptors.multiply_rows(partial(part.multiply, scale=scale), own)
            # the base layer may be padded otherwise
            place = outputs[:, part.start : part.start + product.size(1)]
            product = product[:, : place.size(1)]
            if isinstance(rows, slice):
                place[rows].add_(product)
            else:
                place.index_add_(0, rows, product)


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


def _add_lora_linear(
    self: Any,
    y: Tensor,
    x: Tensor,
    lora_a_stacked: Sequence[Tensor],
    lora_b_stacked: _Slices,
    scale: float,
    output_slices: Sequence[int],
    **others: object,
) -> None:
    outputs, inputs = y.view(-1, y.size(-1)), x.view(-1, x.size(-1))
    find_parts = partial(lora_b_stacked.find_parts, first=lora_a_stacked, dtype=y.dtype)
    _add_products(outputs, inputs, self.token_lora_indices, find_parts, scale)


def _add_lora_logits(
    self: Any, y: Tensor, x: Tensor, lora_a_stacked: Tensor, lora_b_stacked: Tensor, scale: float, **others: object
) -> None:
    def find_parts(slot: int) -> list[_Part]:
        return [_Part(0, lora_a_stacked[slot, 0], lora_b_stacked[slot, 0], y.dtype)]

    _add_products(y.view(-1, y.size(-1)), x.view(-1, x.size(-1)), self.sampler_indices, find_parts, scale)


def _add_lora_embedding(self: Any, y: Tensor, x: Tensor, lora_b_stacked: Tensor, **others: object) -> None:
    def find_parts(slot: int) -> list[_Part]:
        return [_Part(0, None, lora_b_stacked[slot, 0], y.dtype)]

    _add_products(y, x, self.token_lora_indices, find_parts, 1.0)


def _lay_out_slices(layer: Any) -> None:
    """Let the classes of linear layers with adapters, of which this is one, have `_Slices`."""
    if "create_lora_weights" in vars(layer):
        create = layer.create_lora_weights

        def create_lora_weights(self: Any, *arguments: object, **keywords: object) -> None:
            create(self, *arguments, **keywords)
            if not isinstance(self.lora_b_stacked, _Slices):  # a class may call the one that it extends
                self.lora_b_stacked = _Slices.lay_out(self.lora_b_stacked)

        layer.create_lora_weights = create_lora_weights
    if "reset_lora" in vars(layer):
        reset = layer.reset_lora

        def reset_lora(self: Any, index: int) -> None:
            reset(self, index)
            self.lora_b_stacked.parts.pop(index, None)

        layer.reset_lora = reset_lora


def apply() -> None:
    """Patch vLLM in this process. Imports vLLM; idempotent."""
    global _applied
    if _applied:
        return
    from vllm.lora.layers.base_linear import BaseLinearLayerWithLoRA
    from vllm.lora.layers.column_parallel_linear import MergedColumnParallelLinearWithLoRA
    from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    wrapper: Any = PunicaWrapperCPU
    wrapper.add_lora_linear, wrapper.add_lora_logits = _add_lora_linear, _add_lora_logits
    wrapper.add_lora_embedding = _add_lora_embedding
    for layer in (BaseLinearLayerWithLoRA, MergedColumnParallelLinearWithLoRA):
        _lay_out_slices(layer)

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
