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


@pytest.mark.slow
@pytest.mark.parametrize("model", ["qwen2.5", "qwen3"])
def test_the_engine_of_the_npu_computes_with_images_and_videos_as_transformers_does(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NPU_SIM_MEMORY_GIB", "8")
    (report,) = run_ranks("vision_rollout", 1, {"model": model})
    assert report["worst"].keys() == {"", "i", "ii", "v", "vv", "viv"}
    assert max(report["worst"].values()) < 1e-4, report["worst"]


#: matrices of a dense layer that engines have in bytes, of all layers the attention's
MLP = ["mlp.down_proj.weight", "mlp.gate_up_proj.weight"]
ATTENTION = ["self_attn.o_proj.weight", "self_attn.qkv_proj.weight"]
#: model, format, device, largest difference, ten times the mean's limit: the tower's rounding may move an element over an edge,
#: which are wide in MXFP8
QUANTIZED = {
    "Qwen2.5-VL in int8": ("qwen2.5", "int8", "Ascend910B3", 2e-3),
    "Qwen3-VL in int8": ("qwen3", "int8", "Ascend910B3", 2e-3),
    "Qwen3-VL-MoE in int8": ("qwen3_moe", "int8", "Ascend910B3", 1e-2),
    "Qwen2.5-VL in MXFP8": ("qwen2.5", "mxfp8", "Ascend950DT_9582", 2e-2),
    "Qwen3-VL in MXFP8": ("qwen3", "mxfp8", "Ascend950DT_9582", 2e-2),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", QUANTIZED)
def test_the_engine_of_the_npu_quantized_has_the_tower_as_it_was(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, quantization, device, limit = QUANTIZED[name]
    monkeypatch.setenv("NPU_SIM_MEMORY_GIB", "8")
    monkeypatch.setenv("NPU_SIM_SOC", device)
    (report,) = run_ranks("vision_rollout", 1, {"model": model, "quantization": quantization})
    assert max(report["worst"].values()) < limit, report["worst"]
    assert sum(report["mean"].values()) / len(report["mean"]) < limit / 10, report["mean"]
    experts = model == "qwen3_moe"
    stacks = [f"mlp.experts.{end}" for end in ("w13_weight", "w2_weight")]
    assert report["in_bytes"] == [*(stacks if experts else MLP), *ATTENTION]
    damage = ["down_proj.weight", "down_proj.weight_scale", "down_proj.weight_scale_fp32"]
    damage = ["w13_weight", "w2_weight_scale", "w13_weight_scale_fp32"] if experts else damage
    assert len(set(report["proven"])) == 1 and report["damage"] == (damage if quantization == "int8" else damage[:2])
