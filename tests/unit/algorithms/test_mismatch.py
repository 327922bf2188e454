"""Differences of trainer and rollout engine by depth and class of token, against a loop over the tokens."""

from __future__ import annotations

from collections import defaultdict

import pytest
import torch

from mindspeed_rl.algorithms.mismatch import DEPTHS, find_places, measure_depths, measure_experts


def test_buckets_and_classes_are_those_of_a_loop_over_the_tokens() -> None:
    generator = torch.Generator().manual_seed(3)
    rows, width = 5, 300
    recorded = -5 * torch.rand(rows, width, generator=generator) ** 2
    computed = recorded + 0.1 * torch.randn(rows, width, generator=generator)
    mask = torch.rand(rows, width, generator=generator) < 0.8
    mask[0, :3] = False  # a response that begins with tokens of others
    mask[1] = False
    sums, counts = defaultdict[str, float](float), defaultdict[str, int](int)
    for row in range(rows):
        seen = False
        for token in range(width):
            if not mask[row, token]:
                continue
            begins = token == 0 or not mask[row, token - 1]
            names = [f"depth/{max(start for start in DEPTHS if start <= token)}"]
            names += ["first_token"] if begins and not seen else []
            names += ["after_tool"] if begins and seen else []
            names += ["rare_token"] if recorded[row, token] < torch.tensor(0.01).log() else []
            seen = True
            for name in names:
                sums[name] += abs(float(computed[row, token]) - float(recorded[row, token]))
                counts[name] += 1
    found = {name.removeprefix("mismatch/"): metric for name, metric in measure_depths(computed, recorded, mask).items()}
    assert {name: metric.count for name, metric in found.items()} == dict(counts)
    assert all(found[name].value == pytest.approx(sums[name], rel=1e-5) for name in sums)


def test_masked_tokens_may_have_any_value() -> None:
    computed, recorded = torch.tensor([[float("nan"), 1.0]]), torch.tensor([[0.0, 1.5]])
    found = measure_depths(computed, recorded, torch.tensor([[False, True]])).results()
    assert found["mismatch/first_token"] == 0.5 and "mismatch/after_tool" not in found


def test_places_are_those_of_the_largest_differences() -> None:
    mask = torch.ones(3, 70, dtype=torch.bool)
    mask[0, 3:6] = False  # of a tool
    mask[1, 40:] = False  # a shorter response
    scores = torch.zeros(3, 70)
    scores[0, 20], scores[1, 30], scores[2, 10], scores[2, 65] = 1.0, 3.0, 9.0, 8.0
    assert find_places("mismatch/depth/16", mask, scores) == [(1, 16, 30), (0, 16, 20), (2, 16, 16)]
    assert find_places("mismatch/depth/64", mask, scores) == [(2, 64, 65), (0, 64, 64)]
    assert find_places("mismatch/after_tool", mask, scores) == [(0, 6, 6)]
    assert find_places("mismatch/depth/4096", mask, scores) == []


def test_tokens_are_grouped_by_the_experts_that_both_would_choose() -> None:
    # two layers, two experts a token; order does not count
    replayed = torch.tensor([[[0, 1], [2, 3]], [[0, 1], [2, 3]], [[0, 1], [2, 3]], [[4, 5], [6, 7]], [[-1, -1], [0, 1]]])
    chosen = torch.tensor([[[1, 0], [3, 2]], [[0, 1], [2, 4]], [[0, 2], [5, 4]], [[4, 5], [6, 7]], [[0, 1], [0, 1]]])
    computed, recorded = torch.tensor([-1.0, -2.0, -3.0, -4.0, -5.0]), torch.full((5,), -1.0)
    mask = torch.tensor([True, True, True, False, True])  # the fourth is a tool's, the last has no experts
    found = {name: (total, count) for name, total, count in measure_experts(computed, recorded, mask, chosen, replayed)}
    # 4 of 4, 3 of 4 and 1 of 4 experts are equal
    assert found == {"mismatch/experts/0": (2.0, 1), "mismatch/experts/50": (1.0, 1), "mismatch/experts/100": (0.0, 1)}
