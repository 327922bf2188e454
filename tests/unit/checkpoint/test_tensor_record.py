"""Bytes go from file to file, and from memory, as they are; what is strange in them is seen on the way."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from mindspeed_rl.checkpoint import tensor_record
from mindspeed_rl.checkpoint.tensor_record import TensorRecord

ROWS, COLUMNS, BEGIN = 37, 24, 5
DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.float8_e4m3fn, torch.bool]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_record, "_BLOCK_BYTES", 64)  # many to a tensor, and none with its rows


def stored(path: Path, tensor: Tensor, begin: int = BEGIN) -> TensorRecord:
    """A file that holds the tensor behind some bytes and before others."""
    content = tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    path.write_bytes(b"\xff" * begin + content + b"\xff" * 9)
    return TensorRecord(str(path), begin, tuple(tensor.shape), tensor.dtype)


def make_tensor(dtype: torch.dtype, *shape: int) -> Tensor:
    numbers = torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 3
    return numbers > 0 if dtype == torch.bool else numbers.to(dtype)


def same(first: Tensor, other: Tensor) -> bool:
    return first.dtype == other.dtype and torch.equal(
        first.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8)
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("begin", [BEGIN, 8])
def test_slices_of_files_and_of_memory_fill_their_place_and_nothing_else(
    dtype: torch.dtype, begin: int, tmp_path: Path
) -> None:
    whole = make_tensor(dtype, ROWS, COLUMNS)
    source = stored(tmp_path / "source", whole, begin)
    other = stored(tmp_path / "other", whole.flip(0), begin)
    read = source.read()
    changed = source.read()
    changed[3] = changed[4]  # only in memory: the file is as it was
    wanted = whole.clone()
    wanted[3] = wanted[4]
    slices = [read[5:20], other.read(0, 2, 9), read[:COLUMNS, 3:5], changed[2:6], whole[:1]]
    parts = [whole[5:20], whole.flip(0)[2:9], whole[:COLUMNS, 3:5], wanted[2:6], whole[:1]]
    expected = torch.cat([part.reshape(-1) for part in parts]).view(-1, COLUMNS)
    place = stored(tmp_path / "place", torch.zeros(expected.shape, dtype=dtype))
    assert place.write_tensors(slices)
    assert same(place.read(), expected)
    content = (tmp_path / "place").read_bytes()
    assert content[:BEGIN] == b"\xff" * BEGIN and content[-9:] == b"\xff" * 9
    assert same(source.read(), whole)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("strange", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("row", [0, ROWS - 1])
def test_strange_numbers_are_seen_wherever_they_come_from(dtype: torch.dtype, strange: float, row: int, tmp_path: Path) -> None:
    whole = make_tensor(dtype, ROWS, COLUMNS)
    place = stored(tmp_path / "place", whole)
    whole[row, 7] = strange
    if dtype == torch.float8_e4m3fn and strange == strange:
        pytest.skip("this format has no infinities")
    assert not place.write(whole)
    assert not place.write(stored(tmp_path / "source", whole).read())
    clean = stored(tmp_path / "clean", make_tensor(dtype, ROWS, COLUMNS)).read()
    assert place.write(clean) and place.write(clean[:].contiguous())


def test_a_tensor_is_taken_from_its_file_as_long_as_nobody_has_changed_it(tmp_path: Path) -> None:
    record = stored(tmp_path / "source", make_tensor(torch.float32, ROWS, COLUMNS), 8)
    tensor = record.read()
    row = COLUMNS * 4
    assert tensor_record._find_location(tensor[3:5]) == (record.path, 8 + 3 * row)
    assert tensor_record._find_location(record.read(0, 2, 4)) == (record.path, 8 + 2 * row)
    assert tensor_record._find_location(tensor[:, 1:]) is None and tensor_record._find_location(tensor.clone()) is None
    view = tensor[4:]
    view.add_(1)
    assert tensor_record._find_location(tensor[:2]) is None  # whichever part of it was


def test_a_file_that_is_cut_while_it_is_read_is_named(tmp_path: Path) -> None:
    record = stored(tmp_path / "source", make_tensor(torch.float32, ROWS, COLUMNS), 8)
    tensor, place = record.read(), stored(tmp_path / "place", torch.zeros(ROWS, COLUMNS))
    with open(record.path, "r+b") as file:
        file.truncate(1000)
    with pytest.raises(ValueError, match=r"source is truncated: it ends at byte 1000"):
        place.write(tensor)


def test_what_does_not_fit_is_refused_before_a_byte_is_written(tmp_path: Path) -> None:
    place = stored(tmp_path / "place", torch.zeros(4, 6))
    before = (tmp_path / "place").read_bytes()
    for slices in ([torch.ones(3, 6)], [torch.ones(4, 6, dtype=torch.bfloat16)], [torch.ones(4, 6), torch.ones(1)]):
        with pytest.raises(ValueError, match="place"):
            place.write_tensors(slices)
    assert (tmp_path / "place").read_bytes() == before
