"""Moments of AdamW in bfloat16, or off the device: the updates of FSDP2 stay what they are, and runs resume exactly."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import checkpoint_jobs
import fsdp_jobs
import numpy as np
import pytest
import tiny_families
from ranks import Ranks
from training_jobs import KEYS, Setting

_HALF = {"optimizer_state_dtype": "bfloat16"}
#: clipping would scale the gradients that are recorded, and the factor is another test's
_UNCLIPPED = {"clip_grad": 0.0, "moe_aux_loss_coeff": 0.0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_families.save("qwen3_moe", tmp_path_factory.mktemp("qwen3_moe")))


def _compute_moments(gradients: list[dict[str, Any]]) -> dict[str, np.ndarray]:
    """Moments of HF tensors in float64, by Adam's formula."""
    moments: dict[str, np.ndarray] = {}
    for step in gradients:
        for name, gradient in step.items():
            for moment, beta, value in (("exp_avg", 0.9, gradient), ("exp_avg_sq", KEYS.get("adam_beta2", 0.999), gradient**2)):
                key = f"{moment} {name}"
                moments[key] = beta * moments.get(key, 0.0) + (1 - beta) * np.asarray(value, np.float64)
    return moments


def test_half_precision_moments_are_neighbours_of_the_exact_ones(ranks: Callable[[int], Ranks], folder: str) -> None:
    keys = _UNCLIPPED | {"adam_beta1": 0.9, "adam_beta2": 0.999}
    (one,) = ranks(1).run(fsdp_jobs.read_states, setting=Setting(folder, keys | _HALF), steps=1)
    (plain,) = ranks(1).run(fsdp_jobs.read_states, setting=Setting(folder, keys), steps=1)
    for name, weight in plain["weights"].items():  # the update itself is computed in float32
        np.testing.assert_allclose(one["weights"][name], weight, rtol=1e-6, atol=1e-9)
    ups = count = 0
    for key, expected in _compute_moments(one["gradients"]).items():
        if key not in one["moments"]:  # experts are stacked
            continue
        dtype, actual = one["moments"][key]
        assert dtype == "torch.bfloat16" and np.all(np.abs(actual - expected) <= np.abs(expected) * 2.0**-7 + 1e-30), key
        ups, count = ups + int((np.abs(actual) > np.abs(expected)).sum()), count + actual.size
    assert 0.45 < ups / count < 0.55  # rounded by chance, and in the mean exactly
    assert plain["resident"] == 2 * one["resident"]


def test_second_moments_in_half_precision_decay(ranks: Callable[[int], Ranks], folder: str) -> None:
    # to nearest, 0.999 of a number is that number again in bfloat16
    keys = _UNCLIPPED | _HALF | {"adam_beta2": 0.999, "lr": 1e-12, "min_lr": 0.0, "lr_warmup_init": 0.0}
    (report,) = ranks(1).run(fsdp_jobs.read_states, setting=Setting(folder, keys), steps=12)
    expected = _compute_moments(report["gradients"])
    for key in (key for key in expected if key in report["moments"] and key.startswith("exp_avg_sq")):
        actual, exact = report["moments"][key][1].sum(dtype=np.float64), expected[key].sum()
        assert actual == pytest.approx(exact, rel=0.02), key


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("fraction", [0.4, 1.0])
@pytest.mark.parametrize("in_file", [False, True])
def test_states_off_the_device_are_updated_to_the_same_bits(
    ranks: Callable[[int], Ranks], folder: str, tmp_path: Path, size: int, fraction: float, in_file: bool
) -> None:
    keys = {"optimizer_offload_fraction": fraction} | ({"optimizer_offload_path": str(tmp_path)} if in_file else {})
    expected, *_ = ranks(size).run(fsdp_jobs.train, setting=Setting(folder), steps=3)
    report, *_ = ranks(size).run(fsdp_jobs.train, setting=Setting(folder, keys), steps=3)
    assert report["grad_norm"] == expected["grad_norm"]
    for name, weight in expected["weights"].items():
        np.testing.assert_array_equal(report["weights"][name], weight)
    if size == 1:
        (states,) = ranks(1).run(fsdp_jobs.read_states, setting=Setting(folder, keys), steps=1)
        total = sum(value.nbytes for _, value in states["moments"].values())
        assert states["resident"] <= (1 - fraction) * total


#: keys of the run that saves, and of the one that resumes; the bits are the same where they are
_RESUMED: list[tuple[dict[str, Any], dict[str, Any]]] = [
    (_HALF, _HALF),
    (_HALF | {"swap_optimizer": True}, _HALF),
    ({"optimizer_offload_fraction": 0.5}, {"optimizer_offload_fraction": 1.0}),
    ({"offload_gradients": True}, {"offload_gradients": True}),
    ({"optimizer_offload_fraction": 0.5, "optimizer_offload_path": "folder"}, {}),
    ({}, {"optimizer_offload_fraction": 0.5, "optimizer_offload_path": "folder"}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("keys", "later"), _RESUMED)
def test_runs_resume_exactly_and_on_other_ranks(
    ranks: Callable[[int], Ranks], folder: str, tmp_path: Path, keys: dict[str, Any], later: dict[str, Any]
) -> None:
    (tmp_path / "states").mkdir()
    path = {"optimizer_offload_path": str(tmp_path / "states")}
    first, second = (each | (path if "optimizer_offload_path" in each else {}) for each in (keys, later))
    saved = str(tmp_path / "saved")
    expected, *_ = ranks(2).run(fsdp_jobs.save, setting=Setting(folder, first), folder=saved, steps=2, more=2)
    same, *_ = ranks(2).run(fsdp_jobs.resume, setting=Setting(folder, second), folder=saved, more=2)
    other, *_ = ranks(1).run(fsdp_jobs.resume, setting=Setting(folder, second), folder=saved, more=2)
    assert same["grad_norm"] == expected["grad_norm"] and same["lr"] == expected["lr"]
    # a part on another rank is rounded by other chances: a moment by 2^-7 of itself, and a step in proportion
    bound = 2 * 2.0**-7 * 2e-3 if _HALF.items() <= keys.items() else 2e-6
    for name, weight in expected["weights"].items():
        np.testing.assert_array_equal(same["weights"][name], weight)
        assert np.abs(other["weights"][name] - weight).max() <= bound * max(1.0, np.abs(weight).max()), name


@pytest.mark.slow
def test_the_other_engine_takes_states_wherever_they_are(ranks: Callable[[int], Ranks], folder: str, tmp_path: Path) -> None:
    keys, saved, back = {"optimizer_offload_fraction": 0.5, "bf16": True}, str(tmp_path / "megatron"), str(tmp_path / "fsdp")
    setting = Setting(folder, keys | {"moe_aux_loss_coeff": 0.0})
    ranks(1).run(checkpoint_jobs.save_then_train, setting=setting, folder=saved, before=2, after=0)
    ranks(2).run(fsdp_jobs.pass_on, setting=setting, folder=saved, out=back)
    (report,) = ranks(1).run(checkpoint_jobs.load_then_train, setting=setting, folder=back, steps=1)
    (expected,) = ranks(1).run(checkpoint_jobs.load_then_train, setting=setting, folder=saved, steps=1)
    assert report["grad_norm"] == expected["grad_norm"]
    for name, weight in expected["weights"].items():
        np.testing.assert_array_equal(report["weights"][name], weight)


#: keys beside offloaded gradients, ranks, and whether a step has one micro-batch on each rank
_OFFLOADED: list[tuple[dict[str, Any], int, bool]] = [
    ({}, 1, False),
    ({}, 2, True),
    ({"optimizer_offload_fraction": 0.4}, 1, False),
    (_HALF, 1, False),
    ({"bf16": True}, 1, False),
    ({"fsdp_size": 1}, 2, True),
]


@pytest.mark.slow
@pytest.mark.parametrize(("keys", "size", "is_single"), _OFFLOADED)
def test_gradients_off_the_device_make_the_same_bits(
    ranks: Callable[[int], Ranks], folder: str, keys: dict[str, Any], size: int, is_single: bool
) -> None:
    plain = Setting(folder, keys, micro_batch_size=8 if is_single else 2)
    expected, *_ = ranks(size).run(fsdp_jobs.train, setting=plain, steps=3)
    moved = replace(plain, keys=keys | {"offload_gradients": True})
    report, *_ = ranks(size).run(fsdp_jobs.train, setting=moved, steps=3)
    assert report["grad_norm"] == expected["grad_norm"]
    for part in ("gradients", "weights"):
        assert report[part].keys() == expected[part].keys() and report[part]
        for name, value in expected[part].items():
            np.testing.assert_array_equal(report[part][name], value)


@pytest.mark.slow
def test_gradients_off_the_device_of_several_ranks_and_micro_batches_differ_by_rounding(
    ranks: Callable[[int], Ranks], folder: str
) -> None:
    expected, *_ = ranks(2).run(fsdp_jobs.train, setting=Setting(folder), steps=3)
    report, *_ = ranks(2).run(fsdp_jobs.train, setting=Setting(folder, {"offload_gradients": True}), steps=3)
    assert report["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-5)
    for name, value in expected["gradients"].items():
        assert np.abs(report["gradients"][name] - value).max() <= 1e-6 * np.abs(value).max(), name
