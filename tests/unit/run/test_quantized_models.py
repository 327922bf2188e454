"""Models that NPUs quantize are those that a test quantizes on the simulated NPU."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from mindspeed_rl.models import ARCHITECTURES, find_architecture
from mindspeed_rl.run.rules.quantized_models import explain_unquantized

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
        TOWERS: ("qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"),
    },
    "mxfp8": {
        "test_rollout.test_mxfp8_experts_of_a_950_have_the_log_probs_of_their_definition_after_every_sync": ("qwen3_moe",),
        "test_rollout.test_mxfp8_of_a_family_on_a_950_has_the_log_probs_of_its_definition": (
            *("qwen2_moe", "mixtral", "glm4_moe", "ernie4_5_moe", "hy_v3", "deepseek_v2"),
            *("qwen3_next", "qwen3_5", "qwen3_5_moe"),
        ),
        "test_rollout.test_latent_attention_in_mxfp8_has_the_log_probs_of_its_definition": ("deepseek_v3",),
        MINIMAX_M2: ("minimax_m2",),
        TOWERS: ("qwen2_5_vl", "qwen3_vl"),
    },
    "w4a8": {
        "test_rollout.test_int4_experts_of_a_family_have_the_log_probs_of_their_definition": (
            *("qwen2_moe", "mixtral", "glm4_moe", "ernie4_5_moe", "hy_v3", "deepseek_v2", "qwen3_next", "qwen3_5_moe"),
        ),
        "test_rollout.test_int4_experts_next_to_int8_have_the_log_probs_of_their_definition_after_every_sync": ("qwen3_moe",),
        "test_rollout.test_int4_experts_have_the_log_probs_of_their_definition_combined_with": ("deepseek_v3",),
        MINIMAX_M2: ("minimax_m2",),
    },
}
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
    assert accepted == {name for families in RUNS[quantization].values() for name in families}


def test_the_simulated_runs_are_there() -> None:
    for test in {test for tests in RUNS.values() for test in tests}:
        file, _, name = test.partition(".")
        source = ast.parse((SIMULATED / f"{file}.py").read_text(encoding="utf-8"))
        assert name in {node.name for node in source.body if isinstance(node, ast.FunctionDef)}, test
