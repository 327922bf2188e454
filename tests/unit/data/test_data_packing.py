"""Packing, truncation and label rules, against numbers computed by hand and against a naive loop."""

import random

import numpy as np
import pytest

from mindspeed_rl.data.encoding import _fit_lengths, join_turns
from mindspeed_rl.data.preprocess import _greedy_packs, _pack_row


def naive_packs(lengths, capacity):
    """Sort ascending; take the largest that fits until nothing does; start a new pack."""
    waiting = sorted(lengths)
    packs = []
    while waiting:
        pack, room = [], capacity
        while True:
            fitting = [length for length in waiting if length <= room]
            if not fitting:
                break
            pack.append(fitting[-1])
            waiting.remove(fitting[-1])
            room -= fitting[-1]
        packs.append(pack)
    return packs


def test_the_documented_example():
    lengths = [5, 3, 9, 2, 7, 1]
    packs = _greedy_packs(lengths, 9)
    assert [[lengths[index] for index in pack] for pack in packs] == [[9], [7, 2], [5, 3, 1]]


@pytest.mark.parametrize("seed", range(20))
def test_packs_equal_a_naive_loop_and_hold_every_sample_once(seed):
    generator = random.Random(seed)
    capacity = generator.randint(1, 60)
    lengths = [generator.randint(1, capacity) for _ in range(generator.randint(0, 200))]
    packs = _greedy_packs(lengths, capacity)
    assert [[lengths[index] for index in pack] for pack in packs] == naive_packs(lengths, capacity)
    assert sorted(index for pack in packs for index in pack) == list(range(len(lengths)))


def test_samples_of_one_length_go_in_order():
    assert _greedy_packs([4, 4, 4, 4], 8) == [[0, 1], [2, 3]]


def test_a_sample_beyond_the_capacity_is_an_error():
    with pytest.raises(ValueError, match="sample 1 has 10 tokens, more than the capacity 9"):
        _greedy_packs([3, 10], 9)


SAMPLES = [(np.array([11, 12, 13]), np.array([-100, 12, 13])), (np.array([21, 22]), np.array([-100, 22]))]


def test_a_plain_pack_has_mask_one_everywhere():
    input_ids, mask, labels = _pack_row(SAMPLES, 8, pad_id=0, neat=False)
    assert input_ids.tolist() == [11, 12, 13, 21, 22, 0, 0, 0]
    assert mask.tolist() == [1] * 8
    assert labels.tolist() == [-100, 12, 13, -100, 22, -100, -100, -100]


def test_a_neat_pack_numbers_its_samples_and_leaves_padding_zero():
    _, mask, _ = _pack_row(SAMPLES, 8, pad_id=0, neat=True)
    assert mask.tolist() == [1, 1, 1, 2, 2, 0, 0, 0]


@pytest.mark.parametrize(
    ("source", "target", "budget", "plain", "fitting_half"),
    [
        (4, 4, 8, (4, 4), (4, 4)),  # fits
        (8, 8, 8, (4, 4), (4, 4)),  # both too long: in proportion
        (12, 4, 8, (6, 2), (6, 2)),  # neither 12 nor 4 is below half of 8: in proportion, 8 * 4 / 16 = 2
        (100, 1, 10, (9, 1), (9, 1)),  # the target keeps at least one token
        (2, 30, 10, (1, 9), (2, 8)),  # a short source stays whole under the second rule
        (30, 2, 10, (9, 1), (8, 2)),  # a short target stays whole under the second rule
    ],
)
def test_truncation_rules(source, target, budget, plain, fitting_half):
    assert _fit_lengths(source, target, budget, keeps_fitting_half=False) == plain
    assert _fit_lengths(source, target, budget, keeps_fitting_half=True) == fitting_half


def as_lists(got):
    return got[0].tolist(), got[1].tolist(), got[2]


def test_turns_past_the_budget_are_left_out_and_reported():
    turns = [([1, 2], [3, 4]), ([5, 6], [7, 8]), ([9], [10])]
    got = join_turns(turns, eos_id=0, efficient_eos=False, budget=6, keeps_fitting_half=False)
    assert as_lists(got) == ([1, 2, 3, 4, 5, 7], [-100, -100, 3, 4, -100, 7], True)


def test_efficient_eos_teaches_the_end_at_the_next_turns_first_token():
    turns = [([1, 2], [3]), ([4, 5], [6])]
    got = join_turns(turns, eos_id=0, efficient_eos=True, budget=100, keeps_fitting_half=False)
    assert as_lists(got) == ([1, 2, 3, 4, 5, 6, 0], [-100, -100, 3, 0, -100, 6, 0], False)
