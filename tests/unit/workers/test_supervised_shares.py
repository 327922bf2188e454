"""Which items of a global batch a data-parallel rank of a supervised stage gets."""

from __future__ import annotations

from mindspeed_rl.workers.stages.stage import split_batches

ITEMS = ["a" * length for length in (9, 8, 1, 1, 7, 2, 3, 4)]
BATCHES = [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_ranks_take_consecutive_items() -> None:
    assert list(split_batches(iter(BATCHES), ITEMS, 2, 0)) == [ITEMS[0:2], ITEMS[4:6]]
    assert list(split_batches(iter(BATCHES), ITEMS, 2, 1)) == [ITEMS[2:4], ITEMS[6:8]]


def test_balanced_ranks_have_equally_many_items_and_close_tokens() -> None:
    ours, theirs = (list(split_batches(iter(BATCHES), ITEMS, 2, rank, len)) for rank in range(2))
    for batch, mine, others in zip(BATCHES, ours, theirs):
        assert sorted(mine + others) == sorted(ITEMS[number] for number in batch)
        assert len(mine) == len(others) == 2
        assert abs(sum(map(len, mine)) - sum(map(len, others))) <= 2  # 10 and 9, 9 and 7
