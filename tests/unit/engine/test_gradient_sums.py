"""Gradients in bfloat16: sums whose mean is exact, and steps by windows that are the steps of Megatron."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import engine_steps
import pytest
import torch
from engine_steps import check_equal

from mindspeed_rl.engine import gradient_sums
from mindspeed_rl.engine.batching import Rows
from mindspeed_rl.engine.checkpoint import CheckpointSaver, load_checkpoint
from mindspeed_rl.engine.gradient_sums import GradientSums, add_rounded
from mindspeed_rl.engine.train_engine import TrainEngine

_ROWS = Rows([torch.arange(2, 9), torch.arange(11, 22), torch.arange(30, 41)], [3, 2, 1])
#: gradients of several micro-batches
steps = partial(engine_steps.steps, rows=_ROWS)
MakeEngine = Callable[..., TrainEngine]
LAYOUTS: list[dict[str, Any]] = [{}, {"use_distributed_optimizer": True}, {"optimizer": "muon"}]
HALF = {"bf16": True, "grad_reduce_in_fp32": False}


def test_small_parts_are_not_lost_in_the_mean() -> None:
    # the neighbours of 1 in bfloat16 are 2^-7 apart above and 2^-8 below, so a part of 2^-10 is lost by rounding to nearest
    part = 2.0**-10
    for sign in (1.0, -1.0):
        total = torch.full((20_000,), sign, dtype=torch.bfloat16)
        nearest, generator = total.clone(), torch.Generator().manual_seed(0)
        gradient = torch.full((20_000,), sign * part, dtype=torch.bfloat16)
        for _ in range(500):
            add_rounded(total, gradient, generator)
            nearest += gradient
        assert torch.equal(nearest, torch.full_like(nearest, sign))
        # a step of 2^-7 with probability 1/8 in each of 500 additions: the mean of 20000 has a deviation of 4e-4
        assert total.float().mean().item() == pytest.approx(sign * (1 + 500 * part), abs=2e-3)


@pytest.mark.parametrize("value", [0.0, -0.0, 1.5, -3.0, float("inf"), float("-inf")])
def test_a_first_part_and_infinity_are_exact(value: float) -> None:
    total, gradient = torch.zeros(100, dtype=torch.bfloat16), torch.full((100,), value, dtype=torch.bfloat16)
    add_rounded(total, gradient, torch.Generator().manual_seed(0))
    assert torch.equal(total, gradient)


def test_what_is_not_a_number_stays_so() -> None:
    total = torch.full((100,), float("nan"), dtype=torch.bfloat16)
    add_rounded(total, torch.ones(100, dtype=torch.bfloat16), torch.Generator().manual_seed(0))
    assert total.isnan().all()


@pytest.mark.parametrize("window", [1, 3000, 1 << 30])
@pytest.mark.parametrize("keys", LAYOUTS, ids=str)
def test_steps_by_windows_are_those_of_megatron(
    make_engine: MakeEngine, keys: dict[str, Any], window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gradient_sums, "_WINDOW", window)
    # gradients in float32, so that nothing but the windows differs; without clipping, whose factor has the sum's rounding
    keys = {"bf16": True, "weight_decay": 0.1, "clip_grad": 0.0, "lr_decay_style": "linear", **keys}
    plain, cut = make_engine(**keys), make_engine(**keys)
    cut._half_gradients = GradientSums([], 0)
    assert steps(cut, 4) == pytest.approx(steps(plain, 4), rel=1e-5)
    check_equal(plain, cut)


@pytest.mark.parametrize("keys", LAYOUTS, ids=str)
def test_updates_are_close_to_those_of_float32_gradients(make_engine: MakeEngine, keys: dict[str, Any]) -> None:
    # plain gradient descent at heart: with a large eps AdamW does not blow up small differences, as Muon's factors would
    keys = {"bf16": True, "lr": 1e-3 if "optimizer" in keys else 1e-1, "clip_grad": 1.0, "adam_eps": 1.0, **keys}
    exact, rounded = make_engine(**keys), make_engine(**{**keys, **HALF})
    # the relative error of a number in bfloat16 is at most 2^-8, of a norm far less
    assert steps(rounded, 3) == pytest.approx(steps(exact, 3), rel=2e-3)
    parameters = sum(parameter.numel() for model in rounded.model.models for parameter in model.parameters())
    held = [engine.offloader.resident_bytes()["gradients"] for engine in (exact, rounded)]
    assert held[0] == 2 * held[1] and 2 * parameters <= held[1]


@pytest.mark.parametrize("keys", LAYOUTS, ids=str)
def test_states_on_the_host_change_no_bit(make_engine: MakeEngine, keys: dict[str, Any], tmp_path: Path) -> None:
    keys = {**HALF, "weight_decay": 0.1, "clip_grad": 0.5, **keys}
    plain = make_engine(**keys)
    want = steps(plain, 3)
    for fraction, folder in ((0.4, None), (1.0, None), (1.0, str(tmp_path))):
        moved = make_engine(**keys, optimizer_offload_fraction=fraction, optimizer_offload_path=folder)
        assert steps(moved, 3) == want
        check_equal(plain, moved)


def test_a_run_repeats_and_resumes_bit_by_bit(make_engine: MakeEngine, tmp_path: Path) -> None:
    keys = {**HALF, "lr_decay_style": "linear"}
    first, again = make_engine(**keys), make_engine(**keys)
    want = steps(first, 4)
    assert steps(again, 2) == want[:2]
    CheckpointSaver(again, tmp_path).save(2, {})
    resumed = make_engine(**keys)
    load_checkpoint(resumed, tmp_path)
    assert steps(resumed, 2) == want[2:]
    check_equal(first, resumed)
    other = make_engine(**keys, seed=5)
    assert steps(other, 4) != want  # the noise is the seed's
