"""`use_ascend_mc2`: products of tensor parallel layers with their collectives in one operator."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from ranks import run_ranks
from test_engine import losses

SOURCE = os.environ.get("MINDSPEED_SRC")
pytestmark = pytest.mark.skipif(not SOURCE, reason="MINDSPEED_SRC does not point to a checkout of MindSpeed core_r0.16.0")
GATHERS, SCATTERS = "npu::npu_all_gather_base_mm", "npu::npu_mm_reduce_scatter_base"
STEPS, SAVED = 3, 1
#: heads of 128 numbers, so that each rank's query, key and value and its part of the inner width have the least width
WIDE = {"hidden_size": 256, "intermediate_size": 1024, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 128}
TENSOR = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
RECOMPUTED = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
#: model, ranks, layout, more keys of the fused run
CASES: dict[str, tuple[str, int, dict[str, Any], dict[str, Any]]] = {
    "two ranks": ("qwen2", 2, TENSOR, {}),
    "computed again, reduced while computing, two replicas": (
        "qwen2", 4, TENSOR | RECOMPUTED | {"overlap_grad_reduce": True, "overlap_param_gather": True}, {},
    ),
    "two stages": ("qwen2", 4, TENSOR | {"pipeline_model_parallel_size": 2}, {}),
    "ring attention": ("qwen2", 4, TENSOR | {"context_parallel_size": 2, "context_parallel_algo": "megatron_cp_algo"}, {}),
    "experts": ("qwen3_moe", 2, TENSOR | {"moe_grouped_gemm": True}, {}),
    "four ranks": ("qwen2", 4, TENSOR | {"tensor_model_parallel_size": 4}, {}),
}  # fmt: skip


def train(case: tuple[str, int, dict[str, Any], dict[str, Any]], keys: dict[str, Any], **settings: Any) -> list[Any]:
    model, size, layout, _ = case
    common = {"mode": "mindspeed", "bf16": True, "model": model, "sizes": WIDE, "steps": STEPS, "layout": layout | keys}
    return run_ranks("engine", size, common | settings, timeout_s=600)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_run_saves_and_resumes_with_every_number_of_the_plain_one(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    fused = {"use_ascend_mc2": True, **case[3]}
    plain = train(case, {})
    assert not {GATHERS, SCATTERS} & set(plain[0]["fused"])
    whole = train(case, fused)
    assert all(report["fused"][GATHERS] > 0 and report["fused"][SCATTERS] > 0 for report in whole)
    assert losses(whole) == losses(plain)
    train(case, fused, save=str(tmp_path), steps=SAVED)
    assert losses(train(case, fused, load=str(tmp_path))) == losses(plain)[SAVED:]


@pytest.mark.slow
def test_it_adds_gradients_in_products_too() -> None:
    case, added = CASES["two ranks"], {"gemm_gradient_accumulation_fusion": True}
    both = train(case, {"use_ascend_mc2": True} | added)
    assert losses(both) == losses(train(case, added))
    assert both[0]["fused"]["npu::npu_grouped_matmul_add_"] > 0 and both[0]["fused"][GATHERS] > 0


@pytest.mark.slow
def test_frozen_weights_under_adapters_are_multiplied_by_it_too() -> None:
    case, adapters = CASES["two ranks"], {"lora_target_modules": ["linear_qkv", "linear_proj"], "lora_r": 4, "lora_alpha": 8}
    fused = train(case, {"use_ascend_mc2": True} | adapters)
    assert losses(fused) == losses(train(case, adapters))
    assert fused[0]["fused"][GATHERS] > 0 and fused[0]["fused"][SCATTERS] > 0
