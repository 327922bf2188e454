"""Coefficients of agreement against published examples, and against a naive loop."""

from __future__ import annotations

import random
from itertools import permutations

import pytest

from mindspeed_rl.rewards.agreement import cohen_kappa, fleiss_kappa, krippendorff_alpha, percent_agreement


def test_cohen_of_a_table_counted_by_hand() -> None:
    """50 units: both yes 20, both no 15, yes and no 5, no and yes 10: p_o 0.7, p_e 0.5 * 0.6 + 0.5 * 0.4 = 0.5."""
    pairs = [(True, True)] * 20 + [(True, False)] * 5 + [(False, True)] * 10 + [(False, False)] * 15
    one, other = zip(*pairs)
    assert percent_agreement(one, other) == pytest.approx(0.7) and cohen_kappa(one, other) == pytest.approx(0.4)


def test_fleiss_of_the_published_example() -> None:
    """Fourteen raters, ten units, five categories: kappa 0.210 (Fleiss 1971, as it is worked out in many texts)."""
    counts = [
        (0, 0, 0, 0, 14), (0, 2, 6, 4, 2), (0, 0, 3, 5, 6), (0, 3, 9, 2, 0), (2, 2, 8, 1, 1),
        (7, 7, 0, 0, 0), (3, 2, 6, 3, 0), (2, 5, 3, 2, 2), (6, 5, 2, 1, 0), (0, 2, 2, 3, 7),
    ]  # fmt: skip
    table = [[category for category, count in enumerate(row) for _ in range(count)] for row in counts]
    assert fleiss_kappa(table) == pytest.approx(0.210, abs=5e-4)


def test_krippendorff_of_the_published_example_with_missing_ratings() -> None:
    """Four observers, twelve units: nominal 0.743, interval 0.849 (Krippendorff 2011)."""
    raters = ["123321412...", "1233224125.3", ".3332342251.", "12332441251."]
    table = [[None if mark == "." else float(mark) for mark in unit] for unit in zip(*raters)]
    assert krippendorff_alpha(table) == pytest.approx(0.743, abs=5e-4)
    assert krippendorff_alpha(table, "interval") == pytest.approx(0.849, abs=5e-4)


@pytest.mark.parametrize("level", ["nominal", "interval"])
def test_krippendorff_is_that_of_a_naive_loop(level: str) -> None:
    draws = random.Random(3)
    for _ in range(20):
        table = [[draws.choice([None, 0.0, 0.5, 1.0]) for _ in range(3)] for _ in range(12)]
        units = [[value for value in row if value is not None] for row in table]
        units = [values for values in units if len(values) > 1]
        values = [value for unit in units for value in unit]

        def distance(a: float, b: float) -> float:
            return float(a != b) if level == "nominal" else (a - b) ** 2

        within = sum(distance(a, b) / (len(unit) - 1) for unit in units for a, b in permutations(unit, 2)) / len(values)
        among = sum(distance(a, b) for a, b in permutations(values, 2)) / (len(values) * (len(values) - 1))
        assert krippendorff_alpha(table, level) == pytest.approx(1 - within / among)  # type: ignore[arg-type]


def test_what_is_undefined_is_none() -> None:
    assert cohen_kappa([True, True], [True, True]) is None and percent_agreement([True, True], [True, True]) == 1.0
    assert percent_agreement([True, None], [None, False]) is None and cohen_kappa([None], [True]) is None
    assert fleiss_kappa([[1, 1], [1, 1]]) is None and fleiss_kappa([[1, None]]) is None and fleiss_kappa([[1], [0]]) is None
    assert krippendorff_alpha([[1.0, 1.0]]) is None and krippendorff_alpha([[1.0, None]]) is None
