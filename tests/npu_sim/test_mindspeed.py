"""Our engine through our MindSpeed adaptor: the real MindSpeed sources on the simulated NPU, every layout against one process.

Needs a checkout of MindSpeed core_r0.16.0: MINDSPEED_SRC=<folder> tests/npu_sim/run.sh test_mindspeed.py
"""

from __future__ import annotations

import os
from typing import Any

import pytest
from ranks import run_ranks
from test_engine import losses

SOURCE = os.environ.get("MINDSPEED_SRC")
pytestmark = pytest.mark.skipif(not SOURCE, reason="MINDSPEED_SRC does not point to a checkout of MindSpeed core_r0.16.0")

LAYERS, STEPS, MICRO_BATCHES = 4, 4, 4
#: bf16 keeps 8 bits; the layouts round differently
BF16 = 2e-3

LAYOUTS = {
    "TP2 with sequence parallelism": (2, {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
    "PP2": (2, {"pipeline_model_parallel_size": 2}),
    "DP2 with distributed optimizer": (2, {}),
    "TP2 x PP2": (4, {"tensor_model_parallel_size": 2, "sequence_parallel": True, "pipeline_model_parallel_size": 2}),
    "CP2 ring": (2, {"context_parallel_size": 2, "context_parallel_algo": "megatron_cp_algo"}),
    "CP2 Ulysses": (2, {"context_parallel_size": 2, "context_parallel_algo": "ulysses_cp_algo"}),
}


@pytest.fixture(scope="module")
def single_process() -> list[dict[str, Any]]:
    layout = {"hccl_group_buffer": "tp:64"}  # changes no number
    return run_ranks("engine", 1, {"mode": "mindspeed", "steps": STEPS, "bf16": True, "layout": layout})


@pytest.mark.slow
@pytest.mark.parametrize("model", ["qwen2", "qwen2_yarn"])
def test_one_process_in_fp32_equals_the_cpu(model: str) -> None:
    on_cpu = run_ranks("engine", 1, {"mode": "cpu", "steps": STEPS, "model": model})
    on_npu = run_ranks("engine", 1, {"mode": "mindspeed", "steps": STEPS, "model": model})
    assert losses(on_npu) == [pytest.approx(step, rel=2e-5) for step in losses(on_cpu)]


def test_every_layer_runs_on_fused_kernels(single_process: list[dict[str, Any]]) -> None:
    fused = single_process[0]["fused"]
    passes = LAYERS * STEPS * MICRO_BATCHES
    assert fused["npu::npu_fusion_attention"] == passes
    assert fused["npu::npu_swiglu"] == passes
    assert fused["npu::npu_rotary_mul"] == 2 * passes  # query and key
    assert fused["npu::npu_rms_norm"] == 2 * passes + STEPS * MICRO_BATCHES  # and the final norm
    for forward, backward in (("fusion_attention", "fusion_attention_grad"), ("swiglu", "swiglu_backward")):
        assert fused[f"npu::npu_{forward}"] == fused[f"npu::npu_{backward}"]


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_trains_like_one_process(name: str, single_process: list[dict[str, Any]]) -> None:
    size, layout = LAYOUTS[name]
    reports = run_ranks("engine", size, {"mode": "mindspeed", "steps": STEPS, "bf16": True, "layout": layout}, timeout_s=600)
    for got, want in zip(losses(reports), losses(single_process), strict=True):
        assert got[0] == pytest.approx(want[0], rel=BF16)
        assert got[1] == pytest.approx(want[1], rel=5 * BF16)
    assert all(report["fused"]["npu::npu_rms_norm"] > 0 for report in reports)


@pytest.mark.slow
def test_ring_attention_calls_the_fused_kernel_once_a_block(single_process: list[dict[str, Any]]) -> None:
    size, layout = LAYOUTS["CP2 ring"]
    reports = run_ranks("engine", size, {"mode": "mindspeed", "steps": 1, "layout": layout})
    assert all(report["fused"]["npu::npu_fusion_attention"] == 2 * LAYERS * MICRO_BATCHES for report in reports)


@pytest.mark.slow
def test_expert_parallelism_trains_like_one_process() -> None:
    settings = {"mode": "mindspeed", "steps": STEPS, "bf16": True, "model": "qwen3_moe"}
    alone = losses(run_ranks("engine", 1, settings))
    together = losses(run_ranks("engine", 2, {**settings, "layout": {"expert_model_parallel_size": 2}}))
    for got, want in zip(together, alone, strict=True):
        assert got[0] == pytest.approx(want[0], rel=BF16)


@pytest.mark.parametrize("model", ["qwen3_moe", pytest.param("deepseek3", marks=pytest.mark.slow)])
def test_experts_on_the_grouped_matrix_product_equal_the_cpu(model: str) -> None:
    settings = {"steps": 2, "model": model, "bf16": True, "layout": {"moe_grouped_gemm": True}}
    on_cpu = losses(run_ranks("engine", 1, {"mode": "cpu", **settings}))
    on_npu = losses(run_ranks("engine", 1, {"mode": "mindspeed", **settings}))
    for got, want in zip(on_npu, on_cpu, strict=True):
        assert got[0] == pytest.approx(want[0], rel=BF16)
        assert got[1] == pytest.approx(want[1], rel=5 * BF16)


@pytest.mark.parametrize("grouped", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_experts_on_fused_kernels_unless_told_otherwise(grouped: bool) -> None:
    settings = {"steps": 1, "model": "qwen3_moe", "bf16": True, "mode": "mindspeed"}
    fused, plain = (
        run_ranks("engine", 1, {**settings, "layout": {"moe_grouped_gemm": grouped, **keys}})[0]["fused"]
        for keys in ({}, {"use_fused_moe_token_permute_and_unpermute": False})
    )
    passes = 2 * MICRO_BATCHES  # two layers
    experts = 1 if grouped else 4  # products, and so activations, of a layer
    for name in ("npu_swiglu", "npu_swiglu_backward"):
        assert fused[f"npu::{name}"] == plain[f"npu::{name}"] == passes * experts
    for name in ("npu_moe_token_permute_with_routing_map", "_npu_moe_token_unpermute_with_routing_map"):
        assert fused[f"npu::{name}"] == passes
        assert f"npu::{name}" not in plain


_RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "size", "layout"),
    [
        ("deepseek32", 1, {"dsa_indexer_loss_coeff": 3.0}),
        ("deepseek32", 2, LAYOUTS["TP2 with sequence parallelism"][1] | {"dsa_indexer_loss_coeff": 3.0}),
        ("glm5", 1, {}),
        ("glm5", 2, LAYOUTS["PP2"][1] | _RECOMPUTE),
    ],
)
def test_attention_to_the_tokens_of_an_indexer_trains_as_on_one_process_of_the_cpu(
    model: str, size: int, layout: dict[str, Any]
) -> None:
    settings = {"steps": 2, "model": model}
    alone = {name: value for name, value in layout.items() if name == "dsa_indexer_loss_coeff"}
    on_cpu = losses(run_ranks("engine", 1, {"mode": "cpu", **settings, "layout": alone}))
    on_npu = losses(run_ranks("engine", size, {"mode": "mindspeed", **settings, "layout": layout}, timeout_s=600))
    assert on_npu == [pytest.approx(step, rel=2e-5) for step in on_cpu]


PREDICTING = {"mtp_num_layers": 1, "mtp_loss_scaling_factor": 0.5}


@pytest.mark.slow
@pytest.mark.parametrize("model", ["deepseek3_predicting", "qwen3_5_predicting"])
def test_prediction_layers_train_as_on_the_cpu(model: str) -> None:
    settings = {"steps": STEPS, "model": model, "layout": PREDICTING}
    (on_cpu,) = run_ranks("engine", 1, {"mode": "cpu", **settings})
    (on_npu,) = run_ranks("engine", 1, {"mode": "mindspeed", **settings})
    for got, want in zip(on_npu["steps"], on_cpu["steps"], strict=True):
        assert (got["loss"], got["mtp_loss"]) == pytest.approx((want["loss"], want["mtp_loss"]), rel=2e-5)
        assert got["grad_norm"] == pytest.approx(want["grad_norm"], rel=1e-4)
    assert on_cpu["steps"][-1]["mtp_loss"] < on_cpu["steps"][0]["mtp_loss"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "model"),
    [
        ("TP2 with sequence parallelism", "deepseek3_predicting"),
        ("PP2", "qwen3_5_predicting"),
        ("CP2 ring", "deepseek3_predicting"),
    ],
)
def test_prediction_layers_of_a_layout_train_as_on_one_process_of_the_cpu(layout: str, model: str) -> None:
    settings = {"steps": 2, "model": model}
    (on_cpu,) = run_ranks("engine", 1, {"mode": "cpu", **settings, "layout": PREDICTING})
    size, keys = LAYOUTS[layout]
    on_npu = run_ranks("engine", size, {"mode": "mindspeed", **settings, "layout": PREDICTING | keys}, timeout_s=600)
    assert losses(on_npu) == [pytest.approx(step, rel=2e-5) for step in losses([on_cpu])]
    for step, want in enumerate(on_cpu["steps"]):
        got = [report["steps"][step]["mtp_loss"] for report in on_npu if "mtp_loss" in report["steps"][step]]
        assert got[0] == pytest.approx(want["mtp_loss"], rel=2e-5)


def test_a_prediction_layer_runs_on_the_fused_kernels_of_another_layer() -> None:
    settings = {"mode": "mindspeed", "steps": 1, "bf16": True, "model": "deepseek3_predicting"}
    plain, predicting = (run_ranks("engine", 1, {**settings, "layout": keys})[0]["fused"] for keys in ({}, PREDICTING))
    more = {name: count - plain.get(name, 0) for name, count in predicting.items() if count != plain.get(name, 0)}
    assert more["npu::npu_fusion_attention"] == more["npu::npu_fusion_attention_grad"] == MICRO_BATCHES
    # its decoder layer has five (latent attention two); one each before and after the projection's two inputs
    norms = predicting["npu::npu_rms_norm"] / plain["npu::npu_rms_norm"]
    per_layer = (plain["npu::npu_rms_norm"] / MICRO_BATCHES - 1) / 2
    assert more["npu::npu_rms_norm"] == (per_layer + 3) * MICRO_BATCHES, norms


@pytest.mark.slow
@pytest.mark.parametrize("model", ["qwen2", "deepseek3"])
def test_a_prompt_that_is_computed_once_for_two_samples_trains_like_one_for_each(model: str) -> None:
    settings = {"steps": 2, "model": model, "bf16": True, "pairs": True, "layout": {"moe_grouped_gemm": model == "deepseek3"}}
    on_cpu = losses(run_ranks("engine", 1, {"mode": "cpu", **settings}))
    on_npu = losses(run_ranks("engine", 1, {"mode": "mindspeed", "shares_prefixes": True, **settings}))
    for got, want in zip(on_npu, on_cpu, strict=True):
        assert got[0] == pytest.approx(want[0], rel=BF16)
        assert got[1] == pytest.approx(want[1], rel=5 * BF16)
