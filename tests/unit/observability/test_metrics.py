"""Metrics reduce to the same figure however the work was split."""

import math
import pickle
import random

import pytest
import torch

from mindspeed_rl.observability.metrics import Metric, Metrics, merge


def test_a_mean_is_the_sum_over_the_count_and_not_a_mean_of_means():
    first, second = Metrics(), Metrics()
    first.add_mean("loss", 6.0, 3)  # three tokens
    second.add_mean("loss", 2.0, 1)  # one token
    assert merge([first, second]).results() == {"loss": 2.0}


def test_any_split_and_order_gives_the_same_figures():
    values = [random.Random(0).uniform(-5, 5) for _ in range(40)]
    expected = {"x/mean": math.fsum(values) / 40, "x/max": max(values), "x/min": min(values), "n": 40.0}
    for seed in range(5):
        shuffled = random.Random(seed).sample(values, len(values))
        parts = [Metrics() for _ in range(7)]
        for i, value in enumerate(shuffled):
            parts[(i * seed) % 7].add_spread("x", [value])
            parts[(i * seed) % 7].add_sum("n", 1)
        assert merge(parts).results() == pytest.approx(expected, rel=1e-12)


def test_last_is_the_one_merged_last():
    metrics = Metrics()
    metrics.add_last("lr", 1e-4)
    metrics.add_last("lr", 5e-5)
    assert metrics.results() == {"lr": 5e-5}


def test_a_part_that_saw_nothing_changes_nothing():
    empty = Metrics({"loss": Metric("mean", 0.0, 0.0), "top": Metric("max", -math.inf, 0.0)})
    full = Metrics({"loss": Metric("mean", 3.0, 2.0), "top": Metric("max", -7.0)})
    assert merge([empty, full, empty]).results() == {"loss": 1.5, "top": -7.0}
    # a mean over nothing is not a number to show
    assert math.isnan(empty["loss"].result()) and list(empty.results()) == ["top"]


def test_one_element_tensors_count_as_numbers_and_parts_pickle():
    metrics = Metrics()
    metrics.add_mean("loss", torch.tensor(4.0), torch.tensor(8))
    metrics.add_max("top", torch.tensor([3.0]))
    again = pickle.loads(pickle.dumps(metrics))
    assert again.results() == {"loss": 0.5, "top": 3.0}


def test_no_values_add_no_metric():
    metrics = Metrics()
    metrics.add_spread("length", [])
    assert metrics.results() == {}


def test_two_reductions_under_one_name_are_refused():
    metrics = Metrics()
    metrics.add_mean("loss", 1.0)
    with pytest.raises(ValueError, match="loss: .*'mean' here and by 'sum' there"):
        metrics.add_sum("loss", 1.0)


def test_an_unknown_reduction_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match="'maen'. Did you mean 'mean'.*mean, sum, max, min, last"):
        Metric("maen", 1.0)
