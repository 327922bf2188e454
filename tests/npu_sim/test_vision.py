"""A model of images on the simulated NPU: tower, projector and language model train as on the CPU."""

from __future__ import annotations

import pytest
from ranks import run_ranks


def test_images_train_on_the_npu_as_on_the_cpu() -> None:
    (expected,), (result,) = (run_ranks("vision", 1, {"mode": mode, "model": "qwen3"}) for mode in ("cpu", "npu"))
    ours, theirs = result["steps"][0], expected["steps"][0]
    assert ours["count"] == theirs["count"]
    assert ours["loss"] == pytest.approx(theirs["loss"], rel=2e-5)
    assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=2e-5)
    # four layers of the language model and three blocks of the tower, two micro-batches of two steps
    assert result["fused"]["npu::npu_fusion_attention"] == 2 * 2 * (4 + 3) == result["fused"]["npu::npu_fusion_attention_grad"]


@pytest.mark.slow
def test_the_language_model_alone_trains_as_on_the_cpu() -> None:
    text = {"model": "qwen3", "layout": {"language_model_only": True, "freeze_vit": True, "freeze_aligner": True}}
    (expected,), (result,) = (run_ranks("vision", 1, {"mode": mode, **text}) for mode in ("cpu", "npu"))
    for step, other in zip(result["steps"], expected["steps"], strict=True):
        assert step == pytest.approx(other, rel=1e-4)


#: models, and the difference from transformers: delta nets add up more
SEEING = {"qwen2.5": 1e-4, "qwen3": 1e-4, "qwen3_5_vl": 1e-5}
#: prompts: two of text, images and videos
PROMPTS = {"", "t", "i", "ii", "v", "vv", "viv"}


@pytest.mark.slow
@pytest.mark.parametrize("model", SEEING)
def test_the_engine_of_the_npu_computes_with_images_and_videos_as_transformers_does(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NPU_SIM_MEMORY_GIB", "8")
    (report,) = run_ranks("vision_rollout", 1, {"model": model})
    for sync in report["syncs"]:
        assert sync["worst"].keys() == PROMPTS
        assert max(sync["worst"].values()) < SEEING[model], sync


#: matrices of a dense layer that engines have in bytes, of all layers the attention's, of delta nets their wide ones
MLP = ["mlp.down_proj.weight", "mlp.gate_up_proj.weight"]
STACKS = [f"mlp.experts.{end}" for end in ("w13_weight", "w2_weight")]
ATTENTION = ["self_attn.o_proj.weight", "self_attn.qkv_proj.weight"]
NETS = [f"linear_attn.{end}.weight" for end in ("in_proj_qkvz", "out_proj")]
SHARED = [name.replace("mlp", "mlp.shared_expert") for name in MLP]
A2, A5 = "Ascend910B3", "Ascend950DT_9582"
#: model, format, device, seed of the samples, largest difference with one of two sets of weights: with the other, and in W4A8
#: with both, more elements are at an edge of rounding, over which the tower's rounding may move them
QUANTIZED = {
    "Qwen2.5-VL in int8": ("qwen2.5", "int8", A2, 4, 2e-3),
    "Qwen3-VL in int8": ("qwen3", "int8", A2, 4, 2e-3),
    "Qwen3-VL-MoE in int8": ("qwen3_moe", "int8", A2, 4, 1e-2),
    "Qwen3.5 in int8": ("qwen3_5_vl", "int8", A2, 5, 1e-4),
    "Qwen3.5-MoE in int8": ("qwen3_5_moe_vl", "int8", A2, 50, 1e-4),
    "Qwen2.5-VL in MXFP8": ("qwen2.5", "mxfp8", A5, 50, 2e-2),
    "Qwen3-VL in MXFP8": ("qwen3", "mxfp8", A5, 50, 2e-2),
    "Qwen3-VL-MoE in MXFP8": ("qwen3_moe_blocks", "mxfp8", A5, 50, 1e-5),
    "Qwen3.5 in MXFP8": ("qwen3_5_vl", "mxfp8", A5, 5, 1e-5),
    "Qwen3.5-MoE in MXFP8": ("qwen3_5_moe_vl_blocks", "mxfp8", A5, 5, 1e-5),
    "Qwen3-VL-MoE in W4A8": ("qwen3_moe_groups", "w4a8", A2, 50, 2e-2),
    "Qwen3.5-MoE in W4A8": ("qwen3_5_moe_vl_groups", "w4a8", A2, 5, 0.3),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", QUANTIZED)
def test_the_engine_of_the_npu_quantized_has_the_tower_as_it_was(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, quantization, device, seed, limit = QUANTIZED[name]
    monkeypatch.setenv("NPU_SIM_MEMORY_GIB", "8")
    monkeypatch.setenv("NPU_SIM_SOC", device)
    (report,) = run_ranks("vision_rollout", 1, {"model": model, "quantization": quantization, "seed": seed})
    assert min(max(sync["worst"].values()) for sync in report["syncs"]) < limit, report["syncs"]
    for sync in report["syncs"]:  # before a sleep, and after it with other weights, in the tower too
        assert sync["worst"].keys() == PROMPTS and min(sync["worst"].values()) < 1e-4, sync
        # far from the model that is not quantized
        assert 5 * sum(sync["mean"].values()) < sum(sync["plain"].values()), sync
    experts = "moe" in model
    # experts in int4 are in int32
    layers = ([] if quantization == "w4a8" else STACKS) if experts else MLP
    layers = [*NETS, *layers, *(SHARED if experts else [])] if model.startswith("qwen3_5") else layers
    assert report["in_bytes"] == [*layers, *ATTENTION]
    assert len(set(report["proven"])) == 1 and report["damage"] == list_damage(report["in_bytes"], experts, quantization)


def list_damage(in_bytes: list[str], experts: bool, quantization: str) -> list[str]:
    """What the proof finds: elements and scales, and what kernels read beside them."""
    dense = ["down_proj.weight", "down_proj.weight_scale"] if any("down_proj" in name for name in in_bytes) else []
    stacked = ["w13_weight", "w2_weight_scale"] if experts else []
    copies = ["down_proj.weight_scale_fp32"] if dense and quantization != "mxfp8" else []
    copies += {"int8": ["w13_weight_scale_fp32"], "w4a8": ["w13_scale_bias"]}.get(quantization, []) if experts else []
    return [*dense, *stacked, *copies]
