"""Sums over bits leave the memory they read as it was."""

from __future__ import annotations

import sys

import pytest
import torch

from mindspeed_rl.resharding import bit_sums as module
from mindspeed_rl.resharding.bit_sums import MASK, bit_sum, bit_sums, sum_groups


@pytest.fixture(params=["torch", "loops", "both"], autouse=True)
def summing(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums are made by torch, by compiled loops, or by the one and, from so many elements of a call on, by the other."""
    monkeypatch.delitem(sys.modules, module._COMPILED, raising=False)
    monkeypatch.setattr(module, "_UNCOMPILED", {"torch": 1 << 60, "loops": -1, "both": 2_000}[request.param])
    monkeypatch.setattr(module, "_CHUNK_IN_CACHE", 1 << 10)


def test_places_count_where_sums_are_ordered() -> None:
    tensors = [torch.arange(float(count)).sub(count // 2).to(torch.bfloat16) for count in (1, 700, 5000)]
    bits = [[int(value) for value in tensor.view(torch.int16)] for tensor in tensors]
    odd = 0x9E3779B97F4A7C15

    def weighed(values: list[int]) -> int:
        return sum(x * (x + odd) * (2 * place * odd + 1) for place, x in enumerate(values)) & MASK

    found = [int(value) & MASK for value in sum_groups([[tensor] for tensor in tensors] + [tensors], ordered=True)]
    assert found == [*(weighed(values) for values in bits), weighed([x for values in bits for x in values])]


def test_a_storage_that_was_summed_may_still_be_emptied_and_filled() -> None:
    for tensor in (torch.arange(6.0), torch.arange(12.0).view(3, 4)[:, :2], torch.arange(12.0).view(3, 4).T):
        bits = [int(value) for value in tensor.contiguous().view(torch.int32).flatten()]
        assert bit_sum(tensor) == sum(x * (x + 0x9E3779B97F4A7C15) for x in bits) & MASK
        storage = tensor.untyped_storage()
        storage.resize_(0)
        storage.resize_(48)


def test_nothing_sums_to_nothing() -> None:
    assert bit_sum(torch.zeros(0)) == bit_sum(torch.zeros(0, 3)) == 0


def test_hundreds_of_tensors_of_both_widths_are_told_apart() -> None:
    generator = torch.Generator().manual_seed(0)
    tensors = []
    for number in range(150):
        shape = (3, 5, 7) if number % 3 else (40, 700 * (number % 7))
        tensor = torch.randn(shape, generator=generator).to(torch.bfloat16 if number % 2 else torch.float32)
        tensors.append(tensor.transpose(0, 1) if number % 5 == 0 else tensor[1:])

    def by_hand(tensor: torch.Tensor) -> int:
        bits = tensor.contiguous().view(torch.int16 if tensor.element_size() == 2 else torch.int32).long()
        # thousands of squares of 2^62 fit into no integer, those of halves do
        low, high = bits & 0xFFFF, bits >> 16
        squares = int((low * low).sum()) + (2 * int((low * high).sum()) << 16) + (int((high * high).sum()) << 32)
        return (squares + int(bits.sum()) * 0x9E3779B97F4A7C15) & MASK

    assert bit_sums(tensors) == [by_hand(tensor) for tensor in tensors]
