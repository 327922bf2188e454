"""A share of the optimizer's states in host memory or in a file on the simulated NPU: every number of the run without.

The kernel of the simulated device rounds as the host's here, so that what is compared are the ways of gradients, states and
weights between device and host; whether a real device rounds in the same way is another question.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from ranks import run_ranks

SOURCE = os.environ.get("MINDSPEED_SRC")
with_mindspeed = pytest.mark.skipif(not SOURCE, reason="MINDSPEED_SRC does not point to a checkout of MindSpeed core_r0.16.0")
slow = pytest.mark.slow

STEPS, SAVED = 4, 2
SCHEDULE = {"lr_decay_style": "linear", "train_iters": 8, "min_lr": 0.0, "lr": 5e-3}


def train(
    fraction: float, size: int, layout: dict[str, Any], folder: Path | None = None, disk: Path | None = None, **settings: Any
) -> list[Any]:
    """Reports of a run with weights that are streamed after each step; up to `SAVED` where `folder` is saved to."""
    keys = SCHEDULE | layout | {"optimizer_offload_fraction": fraction, "optimizer_offload_path": disk and str(disk)}
    steps = STEPS
    if folder is not None:
        settings, steps = settings | {"save": str(folder)}, SAVED
    settings = {
        "mode": "mindspeed" if SOURCE else "npu",
        "bf16": True,
        "stream_each_step": True,
        "steps": steps,
        "adamw_of_the_host": True,
    } | settings
    return run_ranks("engine", size, settings | {"layout": keys}, timeout_s=600)


def numbers(reports: list[Any], first: int = 0) -> list[list[Any]]:
    """Per rank and step from `first` on: everything but memory."""
    return [[{**step, "resident": None} for step in report["steps"][first:]] for report in reports]


def resident(reports: list[Any]) -> list[int]:
    return [step["resident"]["optimizer"] for report in reports for step in report["steps"]]


def test_every_share_gives_the_numbers_of_the_device_and_resumes_with_another(tmp_path: Path) -> None:
    plain = train(0.0, 1, {})
    first = train(0.4, 1, {}, tmp_path)
    assert numbers(first) == [steps[:SAVED] for steps in numbers(plain)]
    again = train(1.0, 1, {}, disk=tmp_path, load=str(tmp_path))
    assert numbers(again) == numbers(plain, SAVED)
    assert set(resident(again)) == {0}
    # half of the states at most, with what the smallest parameters of the tiny model leave
    assert 0.5 * max(resident(plain)) < max(resident(first)) <= 0.6 * max(resident(plain))


RECOMPUTED = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
CASES: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "fp32": (1, {}, {"bf16": False}),
    "states on every rank": (1, {"use_distributed_optimizer": False}, {}),
    "states on every rank, fp32": (1, {"use_distributed_optimizer": False}, {"bf16": False}),
    "muon": (1, {"use_distributed_optimizer": False, "optimizer": "muon"}, {}),
    "muon, TP2": (2, {"use_distributed_optimizer": False, "optimizer": "muon", "tensor_model_parallel_size": 2}, {}),
    "offloaded between steps": (1, {}, {"offload": True}),
    "gradients in bf16, DP2": (2, {"grad_reduce_in_fp32": False}, {}),
    "gradients in bf16, TP2": (2, {"grad_reduce_in_fp32": False, "tensor_model_parallel_size": 2}, {}),
    "DP2, gathered while computing": (2, {"overlap_grad_reduce": True, "overlap_param_gather": True}, {}),
    "TP2 with sequence parallelism": (2, {"tensor_model_parallel_size": 2, "sequence_parallel": True}, {}),
    "PP2 with virtual stages": (2, {"pipeline_model_parallel_size": 2, "num_layers_per_virtual_pipeline_stage": 1}, {}),
    "EP2 with recomputation": (2, {"expert_model_parallel_size": 2, **RECOMPUTED}, {"model": "qwen3_moe"}),
    "a stage without experts": (2, {"pipeline_model_parallel_size": 2}, {"model": "deepseek3"}),
    "adapters": (1, {"lora_target_modules": ["linear_qkv", "linear_proj"], "lora_r": 4, "lora_alpha": 8}, {}),
}


@slow
@with_mindspeed
@pytest.mark.parametrize("name", CASES)
def test_layouts_give_the_numbers_of_the_device_and_resume_with_another_share(name: str, tmp_path: Path) -> None:
    size, layout, settings = CASES[name]
    plain = train(0.0, size, layout, **settings)
    first = train(1.0, size, layout, tmp_path, tmp_path, **settings)
    assert numbers(first) == [steps[:SAVED] for steps in numbers(plain)]
    for fraction in (0.0, 0.4, 1.0):
        again = train(fraction, size, layout, load=str(tmp_path), **settings)
        assert numbers(again) == numbers(plain, SAVED)
    assert set(resident(first)) == {0}


@slow
@with_mindspeed
def test_a_checkpoint_of_one_layout_resumes_in_another(tmp_path: Path) -> None:
    train(1.0, 2, {"tensor_model_parallel_size": 2}, tmp_path)
    plain, moved = (train(fraction, 2, {}, load=str(tmp_path)) for fraction in (0.0, 0.6))
    assert numbers(moved) == numbers(plain)


@slow
@with_mindspeed
def test_a_save_in_the_background_has_the_states_of_its_step(tmp_path: Path) -> None:
    plain = train(0.0, 1, {"use_distributed_optimizer": False})
    train(1.0, 1, {"use_distributed_optimizer": False, "async_save": True}, tmp_path)
    again = train(0.4, 1, {"use_distributed_optimizer": False}, load=str(tmp_path))
    assert numbers(again) == numbers(plain, SAVED)
