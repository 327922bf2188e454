"""A fingerprint is a sum over bits and positions; its shares add up, and the memory it reads stays as it was."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest
import torch

from mindspeed_rl.resharding import bit_sums as module
from mindspeed_rl.resharding.bit_sums import MASK, bit_sum, sum_groups
from mindspeed_rl.resharding.layouts import Slice

DTYPES = [torch.bfloat16, torch.float32]


@pytest.fixture(params=["torch", "loops", "both"], autouse=True)
def summing(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums are made by torch, by compiled loops, or by the one and, from so many elements of a call on, by the other."""
    monkeypatch.delitem(sys.modules, module._COMPILED, raising=False)
    monkeypatch.setattr(module, "_UNCOMPILED", {"torch": 1 << 60, "loops": -1, "both": 2_000}[request.param])
    monkeypatch.setattr(module, "_CHUNK_IN_CACHE", 1 << 10)


def weights(count: int, first: int, second: int) -> list[int]:
    """The odd weights of positions, from the formula of their mixing with Python's integers."""
    results = []
    for index in range(count):
        for shift, factor in ((15, first), (13, second), (16, first)):
            index = index * factor % 2**31
            index ^= index >> shift
        results.append(2 * index + 1 - (2**32 if index >= 2**30 else 0))
    return results


ROWS, COLUMNS = weights(1200, 0x2C1B3C6D, 0x297A2D39), weights(1200, 0x5F356495, 0x3D4D51CB)


def by_hand(tensor: torch.Tensor, row: int = 0, column: int = 0) -> int:
    bits = tensor.contiguous().view({2: torch.int16, 4: torch.int32}[tensor.element_size()])
    lines = bits.tolist() if bits.dim() == 2 else [bits.tolist()]
    return sum(x * ROWS[row + r] * COLUMNS[column + c] for r, line in enumerate(lines) for c, x in enumerate(line)) & MASK


def test_the_weights_are_odd_and_all_different() -> None:
    for series in module._compute_weights(1 << 18):
        assert bool((series % 2 == 1).all()) and len(set(series.tolist())) == 1 << 18


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "view",
    [lambda x: x[:, 2:5], lambda x: x[1:3], lambda x: x.t(), lambda x: x.t()[3:, 1:], lambda x: x[::2, ::3], lambda x: x[:, :0],
     lambda x: x[0], lambda x: x[:, 0], lambda x: x[:, :1], lambda x: x[:1], lambda x: x[0].expand(4, 1000)],
)  # fmt: skip
def test_a_view_is_summed_as_its_elements_are(dtype: torch.dtype, view: Callable[[torch.Tensor], torch.Tensor]) -> None:
    part = view(torch.randn(60, 1000).to(dtype))
    assert bit_sum(part) == by_hand(part)
    row, column = (0 if part.dim() == 1 else 7), 11
    sides = ((row, row + part.size(0)), (column, column + part.size(-1)))
    assert int(sum_groups([[(sides[-part.dim() :], part)]])) & MASK == by_hand(part, row, column)


@pytest.mark.parametrize("dtype", DTYPES)
def test_shares_of_any_parts_add_up_in_any_layout(dtype: torch.dtype) -> None:
    tensor = torch.randn(24, 40).to(dtype)
    boxes: list[Slice] = [((0, 8), (0, 40)), ((8, 24), (0, 15)), ((8, 24), (15, 40))]
    parts = [tensor[slice(*rows), slice(*columns)] for rows, columns in boxes]
    layouts = [parts, [part.clone() for part in parts], [part.t().contiguous().t() for part in parts]]
    fused = torch.cat([part.flatten() for part in parts])  # one after the other in one parameter
    layouts.append([flat.view(part.shape) for flat, part in zip(fused.split([part.numel() for part in parts]), parts)])
    whole = by_hand(tensor)
    assert [int(total) & MASK for total in sum_groups(zip(boxes, some) for some in layouts)] == [whole] * 4
    assert sum(sum_groups([(box, part)] for box, part in zip(boxes, parts)).tolist()) & MASK == whole


@pytest.mark.parametrize("dtype", DTYPES)
def test_stacked_experts_have_the_fingerprints_of_their_matrices(dtype: torch.dtype) -> None:
    experts = torch.randn(5, 6, 16).to(dtype)  # gate and up, one above the other
    halves = [half for expert in experts for half in expert.chunk(2)]
    halves += [half for expert in experts.transpose(1, 2) for half in expert.chunk(2)]
    sums = sum_groups([(((0, half.size(0)), (0, half.size(1))), half)] for half in halves)
    assert [int(total) & MASK for total in sums] == [by_hand(half) for half in halves]


def test_hundreds_of_tensors_of_both_widths_are_not_mixed_up() -> None:
    tensors = []
    for index in range(150):
        tensor = torch.randn((5, 7) if index % 3 else (20, 70 * (index % 7))).to(DTYPES[index % 2])
        tensors.append(tensor.t() if index % 5 == 0 else tensor[1:])
    sums = sum_groups([(((0, x.size(0)), (0, x.size(1))), x)] for x in tensors)
    assert [int(total) & MASK for total in sums] == [by_hand(tensor) for tensor in tensors]


def slices(tensor: torch.Tensor, first_row: int, first_column: int) -> Slice:
    columns = (first_column, first_column + tensor.size(-1))
    return (columns,) if tensor.dim() == 1 else ((first_row, first_row + tensor.size(0)), columns)


@pytest.mark.parametrize("dtype", DTYPES)
def test_small_parts_that_are_summed_together_keep_their_rows_columns_and_order(dtype: torch.dtype) -> None:
    shapes = [(3, 8), (8,), (5, 8), (1, 8), (40, 8), (200, 8), (8, 3), (3,)]
    parts = [torch.randn(shape).to(dtype) for shape in shapes]
    places = [(0, 0), (0, 0), (7, 0), (3, 0), (60, 0), (0, 0), (0, 2), (0, 5)]

    def compute(some: list[torch.Tensor], at: list[tuple[int, int]]) -> list[int]:
        return [int(total) & MASK for total in sum_groups([(slices(x, *place), x)] for x, place in zip(some, at))]

    expected = compute(parts, places)
    # a vector is one row, the first
    assert expected == [by_hand(x, row if x.dim() == 2 else 0, column) for x, (row, column) in zip(parts, places)]
    # two parts in one group
    both = sum_groups([[(slices(parts[0], 0, 0), parts[0]), (slices(parts[2], 7, 0), parts[2])]])
    assert int(both) & MASK == (expected[0] + expected[2]) & MASK

    flipped = [x.clone() for x in parts]
    flipped[2].view(torch.int8).view(-1)[5] ^= 1
    swapped = [parts[0], parts[1], parts[2].flip(0), *parts[3:]]
    exchanged = [parts[0], parts[3][0], parts[2], parts[1][None], *parts[4:]]
    moved = [(0, 0), (0, 0), (8, 0), *places[3:]]
    shifted = [*places[:6], (0, 3), (0, 5)]
    for found, changed in (
        (compute(flipped, places), {2}),
        (compute(swapped, places), {2}),
        (compute(exchanged, places), {1, 3}),
        (compute(parts, moved), {2}),
        (compute(parts, shifted), {6}),
    ):
        assert {index for index, pair in enumerate(zip(found, expected)) if pair[0] != pair[1]} == changed


def test_a_tensor_larger_than_a_chunk_of_a_device_is_summed_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = torch.randn(300, 1001)
    whole = bit_sum(tensor)
    monkeypatch.setattr(module, "_CHUNK_IN_CACHE", 1 << 20)
    assert bit_sum(tensor) == whole
    assert (
        sum(sum_groups([[(((0, 300), (0, 1)), tensor[:, :1])], [(((0, 300), (1, 1001)), tensor[:, 1:])]]).tolist()) & MASK
        == whole
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_single_bit_matters(dtype: torch.dtype) -> None:
    tensor = torch.randn(3, 3).to(dtype)
    integers, width = {torch.bfloat16: (torch.int16, 16), torch.float32: (torch.int32, 32)}[dtype]
    before = bit_sum(tensor)
    for element in range(9):
        for bit in range(width):
            bits = tensor.clone().view(integers)
            bits.view(-1)[element] ^= torch.tensor(1 << bit if bit < width - 1 else -(1 << bit), dtype=integers)
            assert bit_sum(bits.view(dtype)) != before


def test_changes_that_a_sum_of_values_or_squares_would_miss_are_found() -> None:
    result, other = (torch.tensor(bits, dtype=torch.int16).view(torch.bfloat16) for bits in ((0, 4, 5), (1, 2, 6)))
    assert sum((0, 4, 5)) == sum((1, 2, 6)) and sum(x * x for x in (0, 4, 5)) == sum(x * x for x in (1, 2, 6))
    assert bit_sum(result) != bit_sum(other)
    assert bit_sum(torch.tensor([1.0, -1.0])) != bit_sum(torch.tensor([-1.0, 1.0]))


def test_a_storage_that_was_summed_may_still_be_emptied_and_filled() -> None:
    for tensor in (torch.arange(6.0), torch.arange(12.0).view(3, 4)[:, :2], torch.arange(12.0).view(3, 4).T):
        assert bit_sum(tensor) == by_hand(tensor)
        storage = tensor.untyped_storage()
        storage.resize_(0)
        storage.resize_(48)


def test_nothing_sums_to_nothing() -> None:
    assert bit_sum(torch.zeros(0)) == bit_sum(torch.zeros(0, 3)) == bit_sum(torch.zeros(5)) == 0
    assert sum_groups([]).tolist() == []
