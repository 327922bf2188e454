"""Dense views of packed sequences and context-parallel slices: nothing lost, nothing doubled, work balanced."""

from __future__ import annotations

import random

import pytest
import torch

from mindspeed_rl.engine.sequence_layout import PackedLayout, _build_dense_view, zigzag_positions

CPU = torch.device("cpu")


def some_lengths(seed: int) -> list[int]:
    source = random.Random(seed)
    return [source.choice([0, 1, 2, 3, 10, source.randint(1, 60)]) for _ in range(source.randint(1, 12))]


@pytest.mark.parametrize("seed", range(20))
def test_each_block_row_is_one_sequence_from_its_first_token_and_restore_undoes_the_blocks(seed: int) -> None:
    lengths = some_lengths(seed)
    lengths[0] = max(lengths[0], 1)
    starts = {sum(lengths[:i]): length for i, length in enumerate(lengths) if length}
    view = _build_dense_view(lengths)
    seen = []
    for group in view.groups:
        for row in group.gather.view(group.rows, group.width).tolist():
            length = starts[row[0]]
            seen.append(row[0])
            last = row[0] + length - 1
            assert row == [*range(row[0], last + 1), *[last] * (group.width - length)]
    assert sorted(seen) == sorted(starts)
    order = torch.cat([group.gather for group in view.groups])
    assert order[view.restore].tolist() == list(range(sum(lengths)))


@pytest.mark.parametrize("seed", range(20))
def test_padding_is_at_most_a_quarter_of_every_block(seed: int) -> None:
    lengths = [max(length, 1) for length in some_lengths(seed)]
    view = _build_dense_view(lengths)
    for group in view.groups:
        block = group.gather.view(group.rows, group.width)
        real = sum(len(set(row.tolist())) for row in block)
        assert group.rows * group.width - real <= 0.25 * group.rows * group.width


@pytest.mark.parametrize("seed", range(20))
def test_rows_whose_first_tokens_have_no_query_see_all_their_keys(seed: int) -> None:
    source = random.Random(seed)
    lengths = [length + 1 for length in some_lengths(seed)]
    keys_only = [source.choice([0, 0, min(3, length - 1), source.randrange(length)]) for length in lengths]
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    asked = [length - count for length, count in zip(lengths, keys_only)]
    rows = {sum(asked[:i]): i for i in range(len(lengths))}  # by their first query
    view = _build_dense_view(lengths, keys_only)
    for group in view.groups:
        assert group.key_width - group.width == keys_only[rows[int(group.gather[0])]]
        queries, keys = group.gather.view(group.rows, group.width), group.keys.view(group.rows, group.key_width)
        for mine, seen in zip(queries.tolist(), keys.tolist()):
            row = rows[mine[0]]
            last = starts[row] + lengths[row] - 1
            assert mine == [*range(mine[0], mine[0] + asked[row]), *[mine[0] + asked[row] - 1] * (group.width - asked[row])]
            assert seen == [*range(starts[row], last + 1), *[last] * (group.key_width - lengths[row])]
    order = torch.cat([group.gather for group in view.groups])
    assert order[view.restore].tolist() == list(range(sum(asked)))


def test_sequences_of_equal_length_need_one_block() -> None:
    assert [(group.rows, group.width) for group in _build_dense_view([6, 6, 6]).groups] == [(3, 6)]


def test_zigzag_gives_a_rank_one_chunk_from_the_front_and_its_mirror_from_the_back() -> None:
    assert zigzag_positions([8], 2, 0).tolist() == [0, 1, 6, 7]
    assert zigzag_positions([8], 2, 1).tolist() == [2, 3, 4, 5]
    assert zigzag_positions([4, 8], 2, 1).tolist() == [1, 2, 6, 7, 8, 9]
    assert zigzag_positions([6], 3, 2).tolist() == [2, 3]


def test_the_ranks_slices_are_a_partition_with_equal_attention_work() -> None:
    lengths, cp_size = [12, 24, 36], 3
    slices = [zigzag_positions(lengths, cp_size, rank).tolist() for rank in range(cp_size)]
    assert sorted(sum(slices, [])) == list(range(72))
    starts = [0, 12, 36]
    keys_seen = [sum(p - max(s for s in starts if s <= p) for p in part) for part in slices]
    assert len(set(keys_seen)) == 1


def test_a_sequence_that_cannot_be_split_is_an_error_with_its_length() -> None:
    with pytest.raises(ValueError, match="a sequence of 10 tokens cannot be cut in 4 equal chunks"):
        zigzag_positions([8, 10], 2, 0)


def test_rank_major_and_natural_order_are_inverse() -> None:
    layout = PackedLayout.build([8, 4, 12], CPU, cp_size=2)
    rank_major = [*zigzag_positions([8, 4, 12], 2, 0).tolist(), *zigzag_positions([8, 4, 12], 2, 1).tolist()]
    assert layout.to_rank_major.tolist() == rank_major
    assert layout.to_natural[layout.to_rank_major].tolist() == list(range(24))
    assert layout.cu_seqlens_q.tolist() == [0, 8, 12, 24] and layout.max_seqlen_kv == 12
