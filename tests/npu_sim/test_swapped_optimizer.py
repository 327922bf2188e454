"""Optimizer state in host memory by MindSpeed's own class: every number of the run that keeps it on the device.

Both steps call the same kernel on the device, so losses, gradient norms and the weights that the rollout engine gets are
equal bit by bit, also after a checkpoint and in either direction.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks

SOURCE = os.environ.get("MINDSPEED_SRC")
with_mindspeed = pytest.mark.skipif(not SOURCE, reason="MINDSPEED_SRC does not point to a checkout of MindSpeed core_r0.16.0")
slow = pytest.mark.slow

STEPS, SAVED = 4, 2
#: rates differ in every step, so that one from before a load is found
SCHEDULE = {"lr_decay_style": "linear", "train_iters": 8, "min_lr": 0.0, "lr": 5e-3}
SWAPPED = {"swap_optimizer": True}


def train(folder: Path | None = None, size: int = 1, *, swaps: bool, layout: dict[str, Any], **settings: Any) -> list[Any]:
    """The reports of a run with weights that are streamed after each step; up to `SAVED` where `folder` is saved to."""
    keys = SCHEDULE | layout | (SWAPPED if swaps else {})
    steps = STEPS
    if folder is not None:
        settings, steps = settings | {"save": str(folder)}, SAVED
    settings = {"mode": "mindspeed", "bf16": True, "stream_each_step": True, "steps": steps} | settings
    return run_ranks("engine", size, settings | {"layout": keys}, timeout_s=600)


def numbers(reports: list[Any]) -> list[list[Any]]:
    """Per rank and step: everything but memory."""
    return [[{**step, "resident": None} for step in report["steps"]] for report in reports]


def check(reports: list[Any], want: list[Any], first: int = 0) -> None:
    """The reports of steps from `first` on have the numbers of all steps in `want`."""
    assert numbers(reports) == [steps[first : first + len(reports[0]["steps"])] for steps in numbers(want)]
    assert all(report["steps"] for report in reports)


def check_swapped(reports: list[Any]) -> None:
    """Each step called MindSpeed's kernel, and left nothing on the device."""
    for report in reports:
        assert report["fused"]["npu::npu_apply_fused_adamw_v2"] > 0
        assert all(step["resident"]["optimizer"] == 0 for step in report["steps"])


@with_mindspeed
def test_training_saving_and_resuming_equal_the_state_on_the_device(tmp_path: Path) -> None:
    plain = train(swaps=False, layout={})
    assert all(step["resident"]["optimizer"] > 0 for step in plain[0]["steps"])
    assert "npu::npu_apply_fused_adamw_v2" not in plain[0]["fused"]
    first = train(tmp_path, swaps=True, layout={})
    again = train(swaps=True, layout={}, load=str(tmp_path))
    check(first, plain)
    check(again, plain, SAVED)
    assert again[0]["log_probs"] == plain[0]["log_probs"]
    check_swapped(first + again)
    # the allocator of the device has as much less as the state takes, and what its blocks of 512 bytes add
    held, swapped = (report[0]["steps"][-1]["resident"] for report in (plain, again))
    assert held["allocated"] - swapped["allocated"] == pytest.approx(held["optimizer"], rel=0.05)


RECOMPUTED = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
CASES: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "one process": (1, {}, {}),
    "fp32": (1, {}, {"bf16": False}),
    "offloaded between steps": (1, {}, {"offload": True}),
    "DP2, gathered while computing": (2, {"overlap_grad_reduce": True, "overlap_param_gather": True}, {}),
    "TP2 with sequence parallelism": (2, {"tensor_model_parallel_size": 2, "sequence_parallel": True}, {}),
    "PP2 with virtual stages": (2, {"pipeline_model_parallel_size": 2, "num_layers_per_virtual_pipeline_stage": 1}, {}),
    "EP2 with recomputation": (2, {"expert_model_parallel_size": 2, **RECOMPUTED}, {"model": "qwen3_moe"}),
    "a stage without experts": (2, {"pipeline_model_parallel_size": 2}, {"model": "deepseek3"}),
    "grouped experts": (1, {"moe_grouped_gemm": True}, {"model": "qwen3_moe"}),
    "latent attention": (1, {}, {"model": "deepseek3"}),
    "all at once": (1, {"swap_optimizer_times": 1}, {}),
    "many parts": (2, {"swap_optimizer_times": 1000}, {}),
    "adapters": (1, {"lora_target_modules": ["linear_qkv", "linear_proj"], "lora_r": 4, "lora_alpha": 8}, {}),
}


@slow
@with_mindspeed
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("saved", ["swapped", "on the device"])
def test_a_checkpoint_goes_on_with_and_without_swapping(name: str, saved: str, tmp_path: Path) -> None:
    size, layout, settings = CASES[name]
    plain = train(size=size, swaps=False, layout=layout, **settings)
    first = train(tmp_path, size, swaps=saved == "swapped", layout=layout, **settings)
    check(first, plain)
    for swaps in (False, True):
        again = train(size=size, swaps=swaps, layout=layout, load=str(tmp_path), **settings)
        check(again, plain, SAVED)
        if swaps:
            check_swapped(again)


@slow
@with_mindspeed
def test_a_swapped_checkpoint_goes_on_in_another_layout(tmp_path: Path) -> None:
    train(tmp_path, 2, swaps=True, layout={"tensor_model_parallel_size": 2})
    plain, swapped = (train(size=2, swaps=swaps, layout={}, load=str(tmp_path)) for swaps in (False, True))
    check(swapped, plain)


@slow
@with_mindspeed
@pytest.mark.parametrize("keys", [{"finetune": True}, {"no_load_optim": True}])
def test_loaded_weights_without_their_optimizer_become_main_weights(keys: dict[str, bool], tmp_path: Path) -> None:
    train(tmp_path, swaps=False, layout={})
    plain, swapped = (train(swaps=swaps, layout=keys, load=str(tmp_path)) for swaps in (False, True))
    check(swapped, plain)


@pytest.mark.parametrize(("amsgrad", "maximize"), [(False, False), (True, False), (False, True)])
def test_the_kernel_equals_torchs_adamw(amsgrad: bool, maximize: bool) -> None:
    torch.manual_seed(0)
    start = torch.randn(200)
    mine, theirs = start.to("npu").requires_grad_(), start.double().requires_grad_()
    settings = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "amsgrad": amsgrad, "maximize": maximize}
    fused, reference = torch.optim.AdamW([mine], fused=True, **settings), torch.optim.AdamW([theirs], **settings)
    for _ in range(5):
        gradient = torch.randn(200)
        mine.grad, theirs.grad = gradient.to("npu"), gradient.double()
        fused.step()
        reference.step()
    assert torch.allclose(mine.detach().cpu().double(), theirs.detach(), rtol=0, atol=2e-6)
    assert (mine.detach().cpu() - start).abs().mean() > 1e-2


def test_the_kernel_names_a_tensor_whose_memory_was_freed() -> None:
    tensor = torch.ones(4, device="npu").requires_grad_()
    optimizer = torch.optim.AdamW([tensor], fused=True)
    tensor.grad = torch.ones(4, device="npu")
    optimizer.step()
    optimizer.state[tensor]["exp_avg"].untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match="exp_avg has no memory"):
        optimizer.step()
