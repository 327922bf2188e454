"""Bounds of what programs, models and services send."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from mindspeed_rl.bounds import add_numbers, check_depth, check_token_ids, is_number, read_metrics, read_number


@pytest.mark.parametrize("value", [0, -1.5, 3.4e38, 2**100, np.float32(0.5), np.int64(3)])
def test_finite_numbers_are_read(value: Any) -> None:
    assert read_number(value, "x") == float(value)


def test_everything_else_is_refused_in_a_sentence() -> None:
    for value in (None, True, "1", [1], {}, math.nan, math.inf, -math.inf, 1e39, -1e308, 10**400, 10**5000, 1j):
        with pytest.raises(ValueError, match=r"^x is .*, but must be a finite number of at most 3.4e38$"):
            read_number(value, "x")


def test_a_number_is_told_from_everything_else() -> None:
    assert all(map(is_number, (0, -1.5, 3.4e38, 2**100)))
    for value in (None, True, "1", [1], {}, math.nan, math.inf, -math.inf, 1e39, -1e308, 10**400, 10**5000, 1j):
        assert not is_number(value), value if isinstance(value, float) else type(value)


def test_a_sum_is_as_exact_as_its_numbers_and_no_larger_than_float32() -> None:
    assert add_numbers((0.1,) * 10, "x") == 1.0
    for values in ((3e38, 3e38), (1e308, 1e308), (math.inf, -math.inf)):
        with pytest.raises(ValueError, match="x"):
            add_numbers(values, "x")


def test_metrics_have_few_short_names_and_finite_numbers() -> None:
    assert read_metrics({"a/b": True, "c": 2}, "metrics") == {"a_b": 1.0, "c": 2.0}
    assert len(read_metrics({f"m{index}": 1 for index in range(100)}, "metrics")) == 100
    many = dict.fromkeys(range(101), 1)
    for wrong in ([], {"": 1}, {"x" * 101: 1}, {"a\n": 1}, {5: 1}, {"a": "1"}, {"a/b": 1, "a_b": 1}, many):
        with pytest.raises(ValueError, match="metrics"):
            read_metrics(wrong, "metrics")


def test_ids_are_whole_numbers_of_the_vocabulary() -> None:
    check_token_ids([0, 9], 10, "ids")
    for wrong in (10, -1, True, 1.0, "1", None, 2**70):
        with pytest.raises(ValueError, match="ids: token 1 is "):
            check_token_ids([0, wrong], 10, "ids")


def test_a_hundred_lists_within_each_other_are_the_most() -> None:
    value: Any = 1
    for _ in range(100):
        value = [value] if isinstance(value, dict) else {"a": value}
    check_depth(value, "x")
    with pytest.raises(ValueError, match="x is nested too deeply"):
        check_depth([value], "x")
