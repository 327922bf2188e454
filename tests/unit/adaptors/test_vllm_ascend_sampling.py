"""Noise of the sampler: its distribution, and what it depends on."""

from __future__ import annotations

import math

import numpy as np
import torch

from mindspeed_rl.adaptors.vllm_ascend_sampling import hash_seeds, hash_tokens, sample_tokens

PROBS = torch.tensor([0.5, 0.2, 0.15, 0.1, 0.04, 0.01, 0.0])


def sampled(seeds: list[int], positions: list[int]) -> np.ndarray:
    keys = hash_seeds(seeds, positions)
    return sample_tokens(PROBS.repeat(len(seeds), 1), hash_tokens(len(PROBS)), keys).numpy()


def chance(counts: np.ndarray, probs: np.ndarray) -> float:
    """Probability of a larger chi-square, by the cube root's normal approximation (Wilson and Hilferty)."""
    expected = counts.sum() * probs[probs > 0]
    degrees = len(expected) - 1
    square = float(((counts[probs > 0] - expected) ** 2 / expected).sum())
    z = ((square / degrees) ** (1 / 3) - (1 - 2 / (9 * degrees))) / math.sqrt(2 / (9 * degrees))
    return 0.5 * math.erfc(z / math.sqrt(2))


def test_tokens_have_their_probabilities_over_seeds_and_over_the_steps_of_a_response() -> None:
    count = 20_000
    for seeds, positions in ((list(range(count)), [0] * count), ([7] * count, list(range(0, 4 * count, 4)))):
        tokens = np.bincount(sampled(seeds, positions), minlength=len(PROBS))
        assert tokens[-1] == 0  # of probability 0
        assert chance(tokens, PROBS.numpy()) > 1e-3


def test_a_token_says_nothing_about_the_next_one_nor_about_that_of_the_next_seed() -> None:
    count, size = 20_000, len(PROBS)
    both = np.outer(PROBS.numpy(), PROBS.numpy()).ravel()
    first, second = sampled(list(range(count)), [0] * count), sampled(list(range(count)), [4] * count)
    steps = sampled([3] * count, list(range(0, 4 * count, 4)))
    for left, other in ((first, second), (first[:-1], first[1:]), (steps[:-1], steps[1:])):
        assert chance(np.bincount(left * size + other, minlength=size**2), both) > 1e-3


def test_a_large_vocabulary_has_its_probabilities_too() -> None:
    """Of many tokens the smallest noise wins, whose low bits have to be as good as the others."""
    size, table = 20_000, hash_tokens(20_000)
    groups = np.zeros(10)
    for start in range(0, 400, 50):
        keys = hash_seeds(list(range(start, start + 50)), [8] * 50)
        groups += np.bincount(sample_tokens(torch.full((50, size), 1.0 / size), table, keys).numpy() % 10, minlength=10)
    assert chance(groups, np.full(10, 0.1)) > 1e-3


def test_the_token_of_a_request_is_the_same_alone_and_in_any_batch() -> None:
    seeds, positions = [11, 5, 2**31 - 1, 0, 5], [0, 8, 4, 400, 0]
    together = sampled(seeds, positions)
    assert [sampled([seed], [position])[0] for seed, position in zip(seeds, positions)] == together.tolist()
    assert sampled(seeds[::-1], positions[::-1]).tolist() == together[::-1].tolist()


def test_a_certain_token_is_sampled_whatever_the_noise() -> None:
    probs = torch.zeros(500, 64)
    probs[:, 17] = 1.0
    assert set(sample_tokens(probs, hash_tokens(64), hash_seeds(list(range(500)), [0] * 500)).tolist()) == {17}
