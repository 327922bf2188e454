"""Which rollout engine a run has: vLLM, or transformers' own module where vLLM does not serve the model on the device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from test_engine_limits import PLAIN, run

from mindspeed_rl.run.explain.plan_page import explain, render
from mindspeed_rl.run.rules.validation import validate

SPARSE = {**PLAIN, "kv_lora_rank": 32, "qk_rope_head_dim": 16, "index_topk": 8}
MODULE = {"engine": "transformers", "infer_tensor_parallel_size": 1}


@pytest.mark.parametrize(
    ("config", "platform", "engine"),
    [(SPARSE, "cpu", "transformers"), (PLAIN, "cpu", "vllm"), (SPARSE, "npu", "vllm"), (PLAIN, "npu", "vllm")],
)
def test_a_run_file_that_names_no_engine_gets_the_one_that_serves_its_model(
    tmp_path: Path, config: dict[str, Any], platform: str, engine: str
) -> None:
    made = run(tmp_path / "m", config, platform=platform)
    assert made.generate.engine == engine
    text = render(explain(made))
    assert ("a response at a time: slow" in text) == (engine == "transformers")
    assert not any("latent" in violation.message for violation in validate(made)) or platform == "npu"


def test_the_engine_that_a_run_file_names_is_kept(tmp_path: Path) -> None:
    assert run(tmp_path / "m", SPARSE, generate_config={"engine": "vllm"}).generate.engine == "vllm"
    assert run(tmp_path / "m", PLAIN, generate_config={"engine": "transformers"}).generate.engine == "transformers"


def test_a_module_has_no_kernels_whose_sizes_a_model_must_have(tmp_path: Path) -> None:
    odd = {**PLAIN, "head_dim": 48}
    assert any("is 48" in item.message for item in validate(run(tmp_path / "m", odd)))
    assert [item.message for item in validate(run(tmp_path / "m", odd, generate_config=MODULE))] == []


REFUSED: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"infer_tensor_parallel_size": 2}, {}, "infer_tensor_parallel_size (2)"),
    ({"enable_expert_parallel": True}, {}, "enable_expert_parallel"),
    ({"quantization": "int8"}, {}, "quantization (int8)"),
    ({"kv_cache_dtype": "fp8"}, {}, "kv_cache_dtype (fp8)"),
    ({"speculative_config": {"method": "ngram", "num_speculative_tokens": 1}}, {}, "speculative_config"),
    ({"lora_push": "adapter"}, {}, "lora_push (adapter)"),
    ({"enable_prefix_caching": True}, {}, "enable_prefix_caching"),
    ({"eplb_token_collects": True}, {}, "eplb_token_collects"),
    ({"engine_kwargs": {"block_size": 16}}, {}, "engine_kwargs"),
    ({"sampling_config": {"max_tokens": 16, "stop": ["x"]}}, {}, "sampling_config.stop"),
    ({"sampling_config": {"max_tokens": 16, "structured_output": {"regex": "a"}}}, {}, "structured_output"),
    ({}, {"router_replay": {"mode": "R3"}}, "R2 works"),
    ({}, {"exact_log_probs": True}, "exact_log_probs"),
    ({}, {"use_integrated_worker": False, "rollout_resource": {"num_npus": 1}}, "with servers"),
]


@pytest.mark.parametrize(("generate", "rl", "words"), REFUSED, ids=[words for *_, words in REFUSED])
def test_what_a_module_does_not_serve_is_refused(
    tmp_path: Path, generate: dict[str, Any], rl: dict[str, Any], words: str
) -> None:
    made = run(tmp_path / "m", SPARSE, devices=2, rl_config=rl, generate_config=MODULE | generate)
    found = [item.message for item in validate(made) if item.rule == "module_engine"]
    assert any(words in message and "generate_config.engine (transformers)" in message for message in found), found


def test_keys_of_vllm_are_listed_as_without_effect(tmp_path: Path) -> None:
    made = run(tmp_path / "m", PLAIN, generate_config=MODULE | {"kv_cache_memory_gib": 1.0, "max_num_batched_tokens": 4096})
    idle = explain(made)["keys_without_effect"]
    for name in ("kv_cache_memory_gib", "max_num_batched_tokens"):
        assert idle[f"generate_config.{name}"] == "engine is transformers"


def test_a_family_that_only_transformers_computes_is_generated_by_its_module(tmp_path: Path) -> None:
    neox = {**PLAIN, "architectures": ["GPTNeoXForCausalLM"], "model_type": "gpt_neox"}
    made = run(tmp_path / "m", neox, megatron_training={"engine": "fsdp"})
    assert made.generate.engine == "transformers"
    assert any("with padded rows where it takes no packed ones" in text for text in explain(made)["warnings"])
    qwen = {**neox, "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "num_hidden_layers": 2, "vocab_size": 64}
    assert run(tmp_path / "m", qwen, megatron_training={"engine": "fsdp"}).generate.engine == "vllm"


def test_a_row_is_no_longer_than_the_frequencies_of_a_model_stay_the_same(tmp_path: Path) -> None:
    rope = {"type": "longrope", "short_factor": [1.0], "long_factor": [2.0], "factor": 32.0}
    long = {**PLAIN, "max_position_embeddings": 131072, "original_max_position_embeddings": 40, "rope_scaling": rope}
    found = [item.message for item in validate(run(tmp_path / "m", long)) if item.rule == "rollout.length"]
    assert len(found) == 1 and "must be at most 40" in found[0]
