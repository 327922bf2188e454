"""Experts are balanced under FSDP2 as on Megatron: losses of the routers, and the bias that moves."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import fsdp_jobs
import numpy as np
import pytest
import tiny_families
import training_jobs
from ranks import Ranks
from training_jobs import Setting

#: families with experts
_FAMILIES = tiny_families.EXPERTS
_AUX = {"moe_aux_loss_coeff": 0.1, "moe_router_bias_update_rate": 0.01}
_SEQUENCE = {"moe_aux_loss_coeff": 0.1, "moe_router_load_balancing_type": "seq_aux_loss", "moe_z_loss_coeff": 0.05}
_BIAS = {"moe_aux_loss_coeff": 0.0, "moe_router_bias_update_rate": 0.01}

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """Name of a family -> the folder of its tiny model."""
    return cache(lambda name: str(tiny_families.save(name, tmp_path_factory.mktemp(name))))


def _check(actual: Any, expected: Any) -> None:
    assert actual["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-5)
    for name, weight in expected["weights"].items():
        gap = np.abs(actual["weights"][name] - weight).max()
        assert gap <= 2e-5 * max(np.abs(weight).max(), 1e-30), name


@pytest.mark.parametrize("name", _FAMILIES)
def test_losses_and_biases_are_megatrons(ranks: Callable[[int], Ranks], folders: Callable[[str], str], name: str) -> None:
    setting = Setting(folders(name), _AUX)
    (expected,) = ranks(1).run(training_jobs.train, setting=setting, steps=3)
    (actual,) = ranks(1).run(fsdp_jobs.train, setting=setting, steps=3)
    _check(actual, expected)
    start = tiny_families.build(name).state_dict()
    for key, value in actual["weights"].items():
        if "bias" in key and "correction" in key and key in start:  # three steps of the rate, up or down, or none of them
            moved = np.abs(value - start[key].float().numpy().reshape(value.shape)) / 0.01
            assert moved.max() > 0.9 and np.abs(moved - moved.round()).max() < 1e-3 and moved.max() < 3.1


#: family, ranks, keys, keys of the layout, packed
_LAYOUTS: list[tuple[str, int, dict[str, Any], dict[str, Any], bool]] = [
    ("qwen3_moe", 2, _SEQUENCE, {}, True),
    ("qwen3_moe", 4, _SEQUENCE, {"fsdp_size": 2, "context_parallel_size": 2}, True),
    ("qwen3_moe", 2, _SEQUENCE, {"context_parallel_size": 2}, False),
    ("qwen3_moe", 2, _SEQUENCE, {"recompute_granularity": "full"}, True),
    ("qwen3_next", 2, _SEQUENCE, {}, True),
    ("deepseek_v3", 2, _BIAS, {"recompute_granularity": "full"}, True),
    ("deepseek_v3", 2, _BIAS, {"context_parallel_size": 2}, True),
    ("ernie4_5_moe", 4, _BIAS, {"fsdp_size": 2}, True),
    ("minimax_m2", 3, _BIAS, {}, False),
]


@pytest.mark.parametrize(("name", "size", "keys", "layout", "packed"), _LAYOUTS)
def test_the_balance_does_not_depend_on_the_layout(
    ranks: Callable[[int], Ranks],
    folders: Callable[[str], str],
    name: str,
    size: int,
    keys: dict[str, Any],
    layout: dict[str, Any],
    packed: bool,
) -> None:
    (expected,) = ranks(1).run(training_jobs.train, setting=Setting(folders(name), keys), steps=3)
    actual, *_ = ranks(size).run(fsdp_jobs.train, setting=Setting(folders(name), keys | layout, packed=packed), steps=3)
    _check(actual, expected)


def test_micro_batches_of_each_rank_are_balanced_as_megatrons(
    ranks: Callable[[int], Ranks], folders: Callable[[str], str]
) -> None:
    setting = Setting(folders("mixtral"), _AUX)
    expected, *_ = ranks(2).run(training_jobs.train, setting=setting, steps=3)
    actual, *_ = ranks(2).run(fsdp_jobs.train, setting=setting, steps=3)
    _check(actual, expected)


def test_adapters_leave_the_biases(ranks: Callable[[int], Ranks], folders: Callable[[str], str], tmp_path: Any) -> None:
    keys = _AUX | fsdp_jobs.ADAPTED | {"lora_target_modules": ["linear_proj"]}
    setting = Setting(folders("deepseek_v3"), keys)
    (expected,) = ranks(1).run(fsdp_jobs.megatron_adapters, setting=setting, folder=str(tmp_path / "adapter"))
    (actual,) = ranks(1).run(fsdp_jobs.fsdp_adapters, setting=setting, folder=str(tmp_path / "adapter"))
    _check(actual, expected)
    for matrix, gradient in expected["gradients"].items():
        assert np.abs(actual["gradients"][matrix] - gradient).max() <= 1e-5 * np.abs(gradient).max(), matrix
