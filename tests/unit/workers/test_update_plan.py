"""Which rows go into which step and to which rank."""

from __future__ import annotations

import pytest

from mindspeed_rl.trainers.schedule import _plan_mini_batches
from mindspeed_rl.workers.update_plan import split_rows


def test_steps_are_consecutive_rows_and_every_epoch_sees_each_row_once() -> None:
    assert _plan_mini_batches(8, 4, 2, group_size=2, shuffle_seed=None) == [[0, 1, 2, 3], [4, 5, 6, 7]] * 2


def test_shuffling_keeps_groups_together_and_differs_between_epochs_and_seeds() -> None:
    steps = _plan_mini_batches(40, 8, 2, group_size=4, shuffle_seed=3)
    epochs = [sum(steps[:5], []), sum(steps[5:], [])]
    assert epochs[0] != epochs[1] != list(range(40))
    for rows in epochs:
        assert sorted(rows) == list(range(40))
        for first in range(0, 40, 4):
            assert rows[first : first + 4] == list(range(rows[first], rows[first] + 4)) and rows[first] % 4 == 0
    assert steps == _plan_mini_batches(40, 8, 2, group_size=4, shuffle_seed=3)
    assert steps != _plan_mini_batches(40, 8, 2, group_size=4, shuffle_seed=4)


def test_ranks_get_consecutive_equal_shares() -> None:
    assert [split_rows([5, 3, 9, 1], 2, rank) for rank in range(2)] == [[5, 3], [9, 1]]


def test_balanced_shares_have_equal_counts_and_close_tokens() -> None:
    rows, lengths = [10, 11, 12, 13], [100, 1, 99, 2]
    shares = [split_rows(rows, 2, rank, lengths) for rank in range(2)]
    assert sorted(sum(shares, [])) == rows
    tokens = dict(zip(rows, lengths))
    assert [sum(tokens[row] for row in share) for share in shares] == [101, 101] or [len(s) for s in shares] == [2, 2]
    assert max(sum(tokens[row] for row in share) for share in shares) <= 102


def test_balanced_groups_stay_whole_where_every_rank_gets_as_many() -> None:
    rows, lengths = list(range(10, 22)), [9, 9, 9, 1, 1, 1, 5, 6, 4, 5, 5, 5]
    shares = [split_rows(rows, 2, rank, lengths, group_size=3) for rank in range(2)]
    assert shares == [[10, 11, 12, 13, 14, 15], [16, 17, 18, 19, 20, 21]]  # 27 + 3 and 15 + 15
    uneven = [split_rows(rows, 4, rank, lengths, group_size=2) for rank in range(4)]  # six groups
    assert [len(share) for share in uneven] == [3] * 4 and sorted(sum(uneven, [])) == rows


def test_of_fewer_rows_than_ranks_each_goes_to_one_rank() -> None:
    for lengths in (None, [30, 20, 40]):
        shares = [split_rows([4, 9, 2], 5, rank, lengths) for rank in range(5)]
        assert sorted(map(len, shares)) == [0, 0, 1, 1, 1] and sorted(sum(shares, [])) == [2, 4, 9]


def test_rows_that_ranks_cannot_share_equally_are_not_lost_in_silence() -> None:
    for lengths in (None, [1, 2, 3, 4, 5, 6]):
        with pytest.raises(ValueError, match="6 sequences cannot be given to 4 ranks in equal counts"):
            split_rows([0, 1, 2, 3, 4, 5], 4, 0, lengths)


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_shares_are_a_partition_of_the_step(num_ranks: int) -> None:
    rows = [7, 2, 5, 0, 1, 3, 6, 4]
    plain = [split_rows(rows, num_ranks, rank) for rank in range(num_ranks)]
    balanced = [split_rows(rows, num_ranks, rank, [3, 1, 4, 1, 5, 9, 2, 6]) for rank in range(num_ranks)]
    assert sorted(sum(plain, [])) == sorted(sum(balanced, [])) == sorted(rows)
