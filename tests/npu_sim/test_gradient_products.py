"""`gemm_gradient_accumulation_fusion`: gradients that matrix products and norms add to their float32 sums."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from ranks import run_ranks
from test_engine import losses
from test_mindspeed import BF16

SOURCE = os.environ.get("MINDSPEED_SRC")
with_mindspeed = pytest.mark.skipif(not SOURCE, reason="MINDSPEED_SRC does not point to a checkout of MindSpeed core_r0.16.0")
OPERATOR = "npu::npu_grouped_matmul_add_"
FUSED = {"gemm_gradient_accumulation_fusion": True}
STEPS, SAVED = 4, 2
TENSOR = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
RECOMPUTED = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
#: a step of Adam is as large for a gradient that is nothing but rounding: at the rate of the others these part by more
SMALL_STEPS = {"lr": 1e-4, "min_lr": 1e-4}
#: model, ranks, layout
CASES: dict[str, tuple[str, int, dict[str, Any]]] = {
    "one process": ("qwen2", 1, {}),
    "tensor and sequence parallel, computed again": ("qwen2", 2, TENSOR | RECOMPUTED),
    "two stages, reduced while computing": ("qwen2", 4, {"pipeline_model_parallel_size": 2, "overlap_grad_reduce": True}),
    "grouped experts on two ranks": ("qwen3_moe", 2, {"expert_model_parallel_size": 2, "moe_grouped_gemm": True}),
    "single experts, latent attention, swapped optimizer": ("deepseek3", 1, {"swap_optimizer": True} | SMALL_STEPS),
    "prediction layers": ("deepseek3_predicting", 1, {"mtp_num_layers": 1, "mtp_loss_scaling_factor": 0.5} | SMALL_STEPS),
    "muon": ("qwen2", 1, {"optimizer": "muon", "use_distributed_optimizer": False}),
    "delta nets": ("qwen3_5_predicting", 1, {"lr": 1e-5, "min_lr": 1e-5}),
}


def train(case: tuple[str, int, dict[str, Any]], keys: dict[str, Any], **settings: Any) -> list[Any]:
    model, size, layout = case
    common = {"mode": "mindspeed", "bf16": True, "model": model, "steps": STEPS, "layout": layout | keys}
    return run_ranks("engine", size, common | settings, timeout_s=600)


def check(got: list[tuple[float, float]], want: list[tuple[float, float]]) -> None:
    for mine, theirs in zip(got, want, strict=True):
        assert mine[0] == pytest.approx(theirs[0], rel=BF16) and mine[1] == pytest.approx(theirs[1], rel=5 * BF16)


def test_products_add_to_sums_what_float64_adds() -> None:
    (results,) = run_ranks("gradient_products", 1, {})
    for name, result in results.items():
        # products of bfloat16 numbers are exact in float32; the plain path rounds a gradient to bfloat16
        rounded = name in ("wider", "norm, inputs")
        assert result["error"] < (2**-8 if rounded else 1e-5) * result["size"], name
    calls = {name: result["calls"] for name, result in results.items()}
    none = dict.fromkeys(("no rows", "wider", "norm", "norm, inputs"), 0)
    assert calls == {"some rows": 2, "as wide as may be": 2, "experts": 1} | none


@pytest.mark.slow
@with_mindspeed
@pytest.mark.parametrize("name", CASES)
def test_a_run_saves_and_resumes_with_the_numbers_of_the_plain_one(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    plain = train(case, {})
    assert OPERATOR not in plain[0]["fused"]
    whole = train(case, FUSED)
    assert all(report["fused"][OPERATOR] > 0 for report in whole)
    check(losses(whole), losses(plain))
    train(case, FUSED, save=str(tmp_path), steps=SAVED)
    again = train(case, FUSED, load=str(tmp_path))
    # a checkpoint has no sums of gradients: the run goes on to the bit
    assert losses(again) == losses(whole)[SAVED:]
    check(losses(train(case, {}, load=str(tmp_path))), losses(plain)[SAVED:])
