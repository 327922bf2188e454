"""The suite's attention on Ascend's fused kernel equals attention written out, forward and backward."""

from __future__ import annotations

import pytest
from ranks import run_ranks


def test_packed_and_dense_fused_attention_equal_the_definition() -> None:
    (got,) = run_ranks("attention", 1, {"lengths": [24, 24, 24]})
    assert got["packed"] < 2e-5 and got["dense"] < 2e-5
    assert got["fused calls"] == 3


def test_packed_attention_takes_ragged_lengths() -> None:
    (got,) = run_ranks("attention", 1, {"lengths": [3, 17, 1, 40]})
    assert got["packed"] < 2e-5


def test_dropped_weights_have_their_gradients_and_the_others_are_scaled() -> None:
    (got,) = run_ranks("attention", 1, {"lengths": [64], "dropout": 0.25})
    dropout = got["dropout"]
    assert dropout["gradients"] < 2e-5 and dropout["factors"] < 1e-4 and dropout["differs"]
    # 8,320 weights: four standard deviations
    assert abs(dropout["kept"] - 0.75) < 4 * (0.25 * 0.75 / 8320) ** 0.5


def test_images_and_windows_of_a_vision_tower_are_attended_to_in_one_call() -> None:
    (got,) = run_ranks("attention", 1, {"lengths": [4, 16, 4, 36]})
    assert got["tower"] < 2e-5


@pytest.mark.parametrize("size", [2, 4])
def test_ring_attention_equals_the_definition_on_every_rank(size: int) -> None:
    for got in run_ranks("attention", size, {"lengths": [8, 32, 16]}):
        assert got["ring"] < 2e-5
        assert got["fused calls"] == size and got["updates"] == 0


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_ring_that_merges_in_one_kernel_equals_the_definition(size: int) -> None:
    for got in run_ranks("attention", size, {"lengths": [8, 32, 16], "fuse_ring_update": True}):
        assert got["ring"] < 2e-5
        assert got["updates"] == size - 1
