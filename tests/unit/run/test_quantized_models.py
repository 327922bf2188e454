"""Models that engines have quantized are those that a test quantizes, on the CPU and on the simulated NPU."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest
from published import MODELS

from mindspeed_rl.config import load_run_config
from mindspeed_rl.config.quantized_formats import QUANTIZATIONS
from mindspeed_rl.models import ARCHITECTURES, find_architecture
from mindspeed_rl.run.models import plan_models, with_model_configs
from mindspeed_rl.run.resolve import resolve
from mindspeed_rl.run.rules.quantized_models import explain_actor, explain_unquantized

SIMULATED = Path(__file__).parents[2] / "npu_sim"
TOWERS = "test_vision.test_the_engine_of_the_npu_quantized_has_the_tower_as_it_was"
MINIMAX_M2 = "test_rollout.test_minimax_m2_has_the_log_probs_of_its_definition_after_every_sync"
LATENT = "test_rollout.test_int8_with_latent_attention_and_shared_experts_has_the_log_probs_of_their_definition"
#: format -> test of tests/npu_sim -> the families that it compares with the format's definition
RUNS: dict[str, dict[str, tuple[str, ...]]] = {
    "int8": {
        "test_rollout.test_int8_experts_have_the_log_probs_of_their_definition_after_every_sync": ("qwen3_moe",),
        "test_rollout.test_int8_experts_of_a_family_have_the_log_probs_of_their_definition": (
            *("qwen2_moe", "mixtral", "glm4_moe", "ernie4_5_moe", "hy_v3", "deepseek_v2"),
        ),
        LATENT: ("deepseek_v3",),
        MINIMAX_M2: ("minimax_m2",),
        "test_rollout.test_delta_nets_in_int8_have_the_log_probs_of_their_definition_after_every_sync": (
            *("qwen3_next", "qwen3_5", "qwen3_5_moe"),
        ),
        TOWERS: ("qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5_vl", "qwen3_5_moe_vl"),
    },
    "mxfp8": {
        "test_rollout.test_mxfp8_experts_of_a_950_have_the_log_probs_of_their_definition_after_every_sync": ("qwen3_moe",),
        "test_rollout.test_mxfp8_of_a_family_on_a_950_has_the_log_probs_of_its_definition": (
            *("qwen2_moe", "mixtral", "glm4_moe", "ernie4_5_moe", "hy_v3", "deepseek_v2"),
            *("qwen3_next", "qwen3_5", "qwen3_5_moe"),
        ),
        "test_rollout.test_latent_attention_in_mxfp8_has_the_log_probs_of_its_definition": ("deepseek_v3",),
        MINIMAX_M2: ("minimax_m2",),
        TOWERS: ("qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5_vl", "qwen3_5_moe_vl"),
    },
    "w4a8": {
        "test_rollout.test_int4_experts_of_a_family_have_the_log_probs_of_their_definition": (
            *("qwen2_moe", "mixtral", "glm4_moe", "ernie4_5_moe", "hy_v3", "deepseek_v2", "qwen3_next", "qwen3_5_moe"),
        ),
        "test_rollout.test_int4_experts_next_to_int8_have_the_log_probs_of_their_definition_after_every_sync": ("qwen3_moe",),
        "test_rollout.test_int4_experts_have_the_log_probs_of_their_definition_combined_with": ("deepseek_v3",),
        TOWERS: ("qwen3_vl_moe", "qwen3_5_moe_vl"),
        MINIMAX_M2: ("minimax_m2",),
    },
}
#: file and test -> the families that it compares with the definitions of all formats on the CPU
ON_CPU: dict[str, tuple[str, ...]] = {
    "unit/rollout/test_int8_rollout.test_a_block_format_has_the_log_probs_of_its_definition": (
        *("qwen2_moe", "qwen3_moe", "mixtral", "deepseek_v2", "deepseek_v3"),
        *("glm4_moe", "minimax_m2", "ernie4_5_moe", "hy_v3"),
    ),
    "unit/rollout/test_int8_rollout.test_gated_delta_nets_have_their_wide_projections_quantized": (
        *("qwen3_next", "qwen3_5", "qwen3_5_moe"),
    ),
    "dist/test_video_rollout.test_the_quantized_language_model_answers_about_frames_of_the_tower_in_float32": (
        *("qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"),
    ),
    "dist/test_quantized_towers.test_the_products_and_log_probs_are_those_of_the_definition": ("qwen3_5_vl", "qwen3_5_moe_vl"),
}
#: families whose models have no experts
DENSE = {"qwen3_5", "qwen2_5_vl", "qwen3_vl", "qwen3_5_vl"}
#: config.json of experts in rows of whole blocks of every format
EXPERTS = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 256, "intermediate_size": 256,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 128,
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 256, "rms_norm_eps": 1e-6, "rope_theta": 1e4,
    "max_position_embeddings": 64, "tie_word_embeddings": False, "hidden_act": "silu", "norm_topk_prob": True,
    "decoder_sparse_step": 1, "mlp_only_layers": [],
}  # fmt: skip


@pytest.mark.parametrize("quantization", RUNS)
def test_families_that_npus_quantize_have_a_simulated_run(quantization: str) -> None:
    model_config = find_architecture("qwen3_moe").read_model_config(EXPERTS)
    accepted = {name for name in ARCHITECTURES if not explain_unquantized(name, model_config, quantization, "npu")}
    compared = {name for families in RUNS[quantization].values() for name in families}
    # in W4A8 only experts are in int4 there: a model without any is refused whatever its family is
    assert accepted - compared == (DENSE if quantization == "w4a8" else set()) and compared <= accepted


@pytest.mark.parametrize("quantization", QUANTIZATIONS)
def test_families_that_the_cpu_quantizes_have_a_run(quantization: str) -> None:
    model_config = find_architecture("qwen3_moe").read_model_config(EXPERTS)
    accepted = {name for name in ARCHITECTURES if not explain_unquantized(name, model_config, quantization, "cpu")}
    assert accepted == {name for families in ON_CPU.values() for name in families}


@pytest.mark.parametrize("quantization", QUANTIZATIONS)
@pytest.mark.parametrize("keys", [[], ["language_model_only", "freeze_vit", "freeze_aligner"]], ids=["tower", "text"])
@pytest.mark.parametrize("model", ["Qwen3.5-9B", "Qwen3.5-35B-A3B"])
def test_a_published_model_with_a_tower_is_planned_on_the_cpu(
    model: str, keys: list[str], quantization: str, tmp_path: Path
) -> None:
    words = [f"generate_config.quantization={quantization}", "actor_config.bf16=true"]
    words += ["model.tiny_qwen25.num_layers=null", "model.tiny_qwen25.padded_vocab_size=null"]
    words += ["generate_config.dtype=bfloat16", *(f"actor_config.{key}=true" for key in keys)]
    (tmp_path / "config.json").write_text(json.dumps(MODELS[model] | {"image_token_id": 248056}))
    (tmp_path / "model.safetensors").touch()
    words += [f"actor_config.{key}={tmp_path}" for key in ("load", "tokenizer_name_or_path")]
    words += ["rl_config.init_kl_coef=0", "actor_config.sequence_parallel=true"]  # without a reference
    cfg = with_model_configs(load_run_config("grpo_tiny_cpu", None, words))
    assert cfg.reads_images == (not keys) and not explain_actor(cfg, "cpu")
    plan = plan_models(resolve(cfg, platform="cpu")).models["actor"].plan
    assert (plan.model_config.vision is None) == bool(keys) and plan.model_config.linear_attention is not None


def test_the_runs_are_there() -> None:
    simulated = {f"{SIMULATED.name}/{test}" for tests in RUNS.values() for test in tests}
    for test in simulated | set(ON_CPU):
        file, _, name = test.rpartition(".")
        source = ast.parse((SIMULATED.parent / f"{file}.py").read_text(encoding="utf-8"))
        assert name in {node.name for node in source.body if isinstance(node, ast.FunctionDef)}, test
