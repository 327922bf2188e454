"""Packed columns read like the lists they were made of."""

import pickle
from collections.abc import Hashable

import numpy as np
import pytest
import torch

from mindspeed_rl.dataplane.columns import Ragged, concatenate, describe_kind, pack, take


def test_ragged_rows_read_like_a_list_of_tensors():
    rows = [torch.tensor([1.5, 2.5]), torch.tensor([]), torch.tensor([3.0])]
    column = pack(rows)
    assert len(column) == 3
    assert [row.tolist() for row in column] == [[1.5, 2.5], [], [3.0]]
    assert column[-1].tolist() == [3.0] and column[0].dtype == torch.float32
    assert column.lengths().tolist() == [2, 0, 1]
    assert [row.tolist() for row in column[1:]] == [[], [3.0]]
    with pytest.raises(IndexError):
        column[3]


def test_a_column_compares_by_content_and_so_has_no_hash():
    assert pack([1, 2]) == pack([1, 2]) != pack([1, 3])
    assert pack([torch.tensor([1, 2])]) != pack([1, 2]) and not isinstance(pack([1, 2]), Hashable)


@pytest.mark.parametrize(
    "dtype", [torch.int64, torch.int32, torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.bool]
)
def test_every_dtype_survives_pickling(dtype):
    rows = [torch.tensor([0, 1, 1]).to(dtype), torch.tensor([1]).to(dtype)]
    column = pickle.loads(pickle.dumps(pack(rows), protocol=5))
    assert all(row.dtype == dtype and torch.equal(row, expected) for row, expected in zip(column, rows))


def test_token_ids_travel_as_32_bits_only_where_they_fit():
    assert pack([torch.tensor([5, 2**31 - 1])]).values.dtype == np.int32
    assert pack([torch.tensor([5, 2**31])]).values.dtype == np.int64
    joined = concatenate([pack([torch.tensor([5])]), pack([torch.tensor([2**40])])])
    assert [row.tolist() for row in joined] == [[5], [2**40]]


def test_scalars_objects_and_blocks_are_distinguished():
    assert pack([0.5, 1]).tensor().tolist() == [0.5, 1.0]
    assert pack([3, 4])[1].item() == 4 and pack([3, 4]).dtype == torch.int64
    assert pack([True, False]).dtype == torch.bool
    assert pack([torch.tensor(1.0), torch.tensor(2.0)]).offsets is None
    assert [row.tolist() for row in pack(torch.tensor([[1, 2], [3, 4]]))] == [[1, 2], [3, 4]]
    assert pack(["a", 1, None]) == ["a", 1, None]
    assert pack([np.array([1, 2]), np.array([3])])[0].tolist() == [1, 2]
    kinds = [describe_kind(pack(rows)) for rows in ([0.5], [torch.tensor([1])], ["a"])]
    assert kinds == ["scalars of torch.float32", "rows of torch.int64", "objects"]


@pytest.mark.parametrize(
    "rows, words",
    [
        ([torch.tensor([1]), "a"], "one kind; got Tensor, str"),
        ([torch.tensor([1]), torch.tensor([1.0])], "one dtype"),
        ([torch.tensor([1]), torch.tensor(1)], r"\[0, 1\] dimensions"),
        ([torch.zeros(2, 2)], r"\[2\] dimensions"),
        (torch.zeros(2, 2, 2), r"\[2, 2, 2\]"),
        ([torch.zeros(2, device="meta")], "CPU tensors; got one on meta"),
    ],
)
def test_rows_that_cannot_share_a_column_are_refused(rows, words):
    with pytest.raises(ValueError, match=words):
        pack(rows)


def test_take_picks_in_the_given_order():
    rows = [torch.arange(i) for i in range(5)]
    assert [row.tolist() for row in take(pack(rows), [4, 0, 2])] == [[0, 1, 2, 3], [], [0, 1]]
    assert take(["a", "b", "c"], [2, 0]) == ["c", "a"]
    assert take(pack([1.0, 2.0, 3.0]), [2, 2]).tensor().tolist() == [3.0, 3.0]


def test_padding_fills_behind_each_row():
    column = pack([torch.tensor([1, 2]), torch.tensor([3])])
    assert column.pad(0).tolist() == [[1, 2], [3, 0]]
    assert column.pad(-1, length=3).tolist() == [[1, 2, -1], [3, -1, -1]]
    with pytest.raises(ValueError, match="Row 0 has 2 values"):
        column.pad(0, length=1)
    with pytest.raises(ValueError, match="scalar"):
        pack([1.0]).pad(0)


def test_parts_of_a_column_join_unless_they_differ_in_kind():
    parts = [pack([torch.tensor([1])]), pack([torch.tensor([2, 3]), torch.tensor([4])])]
    assert concatenate(parts) == pack([torch.tensor([1]), torch.tensor([2, 3]), torch.tensor([4])])
    assert concatenate([["a"], ["b"]]) == ["a", "b"]
    with pytest.raises(ValueError, match="objects, scalars of torch.float32"):
        concatenate([pack([0.5]), ["a"]])


def test_columns_that_differ_anywhere_are_unequal():
    column = pack([torch.tensor([1, 2]), torch.tensor([3])])
    assert column != pack([torch.tensor([1]), torch.tensor([2, 3])])
    assert column != pack([torch.tensor([1.0, 2.0]), torch.tensor([3.0])])
    assert isinstance(column, Ragged) and column != [1, 2]
