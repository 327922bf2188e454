"""Products of adapters in vLLM's CPU build: each row with its own adapter, rows without one with none."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mindspeed_rl.adaptors.vllm_cpu_adapters import _add_lora_embedding, _add_lora_linear, _add_lora_logits, _Slices

SLOTS, RANK, INPUTS = 3, 4, 6
#: outputs of the slices of a layer
SIZES = (5, 2, 2)
INDICES = torch.tensor([2, -1, 0, 2])


class Layer:
    """A layer of three slices with adapters, as vLLM fills it; adapter 1 has none, and no slice of adapter 0 but the first."""

    def __init__(self, *, shares: tuple[bool, bool]) -> None:
        generator = torch.Generator().manual_seed(1)
        self.rows = torch.randn(4, INPUTS, generator=generator)
        self.a = tuple(torch.zeros(SLOTS, 1, RANK, INPUTS) for _ in SIZES)
        self.b = _Slices.lay_out([torch.zeros(SLOTS, 1, size, RANK) for size in SIZES])
        for index, size in enumerate(SIZES):
            for slot in (0, 2):
                is_same = index > 0 and shares[index - 1]
                self.a[index][slot] = self.a[index - 1][slot] if is_same else torch.randn(RANK, INPUTS, generator=generator)
                if index == 0 or slot == 2:
                    self.b[index][slot] = torch.randn(size, RANK, generator=generator)

    def expected(self, scale: float) -> torch.Tensor:
        """Products by definition, row by row and slice by slice."""
        result = torch.ones(4, sum(SIZES))
        for row, slot in enumerate(INDICES.tolist()):
            if slot >= 0:
                parts = [b[slot, 0] @ (scale * (a[slot, 0] @ self.rows[row])) for a, b in zip(self.a, self.b)]
                result[row] += torch.cat(parts)
        return result


@pytest.mark.parametrize("shares", [(True, True), (True, False), (False, True), (False, False)])
def test_each_row_has_the_products_of_its_adapter_and_none_without_one(shares: tuple[bool, bool]) -> None:
    layer, outputs = Layer(shares=shares), torch.ones(4, sum(SIZES))
    # a batch may be padded: more indices than rows
    wrapper = SimpleNamespace(token_lora_indices=torch.cat([INDICES, torch.tensor([0, 1])]))
    for _ in range(2):  # the second time from what the first has found
        outputs.fill_(1)
        _add_lora_linear(wrapper, outputs, layer.rows, layer.a, layer.b, 0.5, SIZES)
        torch.testing.assert_close(outputs, layer.expected(0.5))
    assert torch.equal(outputs[1], torch.ones(sum(SIZES)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_multiplied_is_the_memory_that_is_proven(dtype: torch.dtype) -> None:
    layer = Layer(shares=(False, False))
    layer.a = tuple(matrix.to(dtype) for matrix in layer.a)
    slices = _Slices.lay_out([matrix.to(dtype) for matrix in layer.b])
    for mine, given in zip(slices, layer.b):
        mine.copy_(given)
    wrapper = SimpleNamespace(token_lora_indices=INDICES)

    def multiply() -> torch.Tensor:
        outputs = torch.zeros(4, sum(SIZES), dtype=dtype)
        _add_lora_linear(wrapper, outputs, layer.rows.to(dtype), layer.a, slices, 1.0, SIZES)
        return outputs

    before = multiply()
    layer.a[1][2] *= 2  # a power of two: products are twice as large to the bit
    slices[2][2] *= 4
    expected = before.clone()
    expected[[0, 3], SIZES[0] :] *= torch.tensor([2] * SIZES[1] + [4] * SIZES[2], dtype=dtype)
    assert not torch.equal(before, expected) and torch.equal(multiply(), expected)


def test_slices_with_the_same_first_matrix_take_one_product() -> None:
    shared, apart = Layer(shares=(True, True)), Layer(shares=(False, False))
    counts = [[len(layer.b.find_parts(slot, layer.a, torch.float32)) for slot in (0, 1, 2)] for layer in (shared, apart)]
    assert counts == [[1, 0, 1], [1, 0, 3]]


def test_outputs_of_the_head_and_of_embeddings_are_products_of_the_rows_of_each_adapter() -> None:
    layer = Layer(shares=(False, False))
    a, b, logits = layer.a[0], layer.b[0], torch.ones(4, SIZES[0] - 1)  # a head that is not padded as its adapter
    _add_lora_logits(SimpleNamespace(sampler_indices=INDICES), logits, layer.rows, a, b, 1.0)
    torch.testing.assert_close(logits, layer.expected(1.0)[:, : SIZES[0] - 1])
    hidden = torch.stack([a[max(slot, 0), 0] @ row for slot, row in zip(INDICES.tolist(), layer.rows)])
    embedded = torch.ones(4, SIZES[0])
    _add_lora_embedding(SimpleNamespace(token_lora_indices=INDICES), embedded, hidden, b)
    torch.testing.assert_close(embedded, layer.expected(1.0)[:, : SIZES[0]])


def test_vllm_gives_a_row_without_an_adapter_the_last_one() -> None:
    lora_ops: Any = pytest.importorskip("vllm.lora.ops.torch_ops.lora_ops")
    layer, hidden = Layer(shares=(False, False)), torch.zeros(4, RANK)
    lora_ops.bgmv_shrink(layer.rows, layer.a[0], hidden, INDICES)
    torch.testing.assert_close(hidden[1], layer.a[0][-1, 0] @ layer.rows[1])
