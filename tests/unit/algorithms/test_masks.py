import numpy as np
import pytest
import torch

from mindspeed_rl.algorithms.masks import entropy_threshold, filter_overlong, find_groups_with_signal


def test_the_overlong_filter_empties_truncated_rows_only():
    mask = torch.tensor([[True, True], [True, False]])
    got = filter_overlong(mask, torch.tensor([True, False]))
    assert got.tolist() == [[False, False], [True, False]]
    assert mask[0].all()


def test_the_top_quantile_of_ten_entropies_by_hand():
    entropy = torch.arange(10.0).view(2, 5)
    threshold = entropy_threshold([(entropy, torch.ones(2, 5, dtype=torch.bool))], 0.2)
    assert threshold == pytest.approx(7.2)
    assert (entropy >= threshold).sum() == 2


@pytest.mark.parametrize("share", [0.05, 0.2, 0.5, 0.99])
def test_the_threshold_is_the_quantile_over_all_shards_and_ignores_masked_tokens(share):
    rng = np.random.default_rng(0)
    entropy, mask = rng.random((7, 9)), rng.random((7, 9)) < 0.5
    poisoned = np.where(mask, entropy, np.nan)
    shards = [(torch.tensor(poisoned[rows]), torch.tensor(mask[rows])) for rows in ([0], [1, 2], [3, 4, 5, 6])]
    assert entropy_threshold(shards, share) == pytest.approx(np.quantile(entropy[mask], 1.0 - share))


def test_a_fraction_of_one_switches_the_entropy_mask_off():
    assert entropy_threshold([], 1.0) is None


@pytest.mark.parametrize("share", [0.0, 1.5])
def test_a_fraction_outside_zero_to_one_is_refused(share):
    with pytest.raises(ValueError, match="top_entropy_quantile"):
        entropy_threshold([(torch.ones(1, 1), torch.ones(1, 1, dtype=torch.bool))], share)


def test_a_quantile_of_no_tokens_is_refused():
    with pytest.raises(ValueError, match="no token"):
        entropy_threshold([(torch.ones(1, 1), torch.zeros(1, 1, dtype=torch.bool))], 0.5)


def test_groups_have_a_signal_when_some_but_not_all_are_right():
    right = torch.tensor([1.0, 1.0, 0.0, 1.0, 0.0, 0.0])
    kept = find_groups_with_signal(right, 2)
    assert kept.tolist() == [False, True, False]


def test_equal_scores_that_do_not_add_exactly_are_still_no_signal():
    assert find_groups_with_signal(torch.tensor([0.1] * 3), 3).tolist() == [False]


def test_a_failed_score_is_no_difference():
    nan = float("nan")
    metric = torch.tensor([1.0, nan, 1.0, nan, 0.0, 1.0, nan, nan, nan])
    assert find_groups_with_signal(metric, 3).tolist() == [False, True, False]


def test_groups_of_one_have_a_signal():
    assert find_groups_with_signal(torch.tensor([1.0, 0.0]), 1).tolist() == [True, True]


def test_rows_that_do_not_fill_groups_are_refused():
    with pytest.raises(ValueError, match="3 rows do not divide"):
        find_groups_with_signal(torch.ones(3), 2)
