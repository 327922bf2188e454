"""What the rollout engine cannot do is said from one table, of a run file before anything starts."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import transformers

from mindspeed_rl.config import build_run_config
from mindspeed_rl.config.model_metadata import EngineShape, keeps_states, read_model_metadata
from mindspeed_rl.run import Run
from mindspeed_rl.run.draft import draft, load_run
from mindspeed_rl.run.resolve import resolve
from mindspeed_rl.run.rules.engine_limits import EngineRequest, engine_limits, engine_obstacles
from mindspeed_rl.run.rules.validation import validate


def run(
    folder: Path, config: dict[str, Any], *, devices: int = 1, tensor: int = 1, platform: str = "cpu", **changes: Any
) -> Run:
    """The draft of a run file that names the folder of a model with this config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    tree = {
        "platform": platform,
        "megatron_training": {
            "stage": "ray_grpo",
            "global_batch_size": 16,
            "micro_batch_size": 16,
            "bf16": False,
            "load": str(folder),
            "train_iters": 1,
            **changes.get("megatron_training", {}),
        },
        "rl_config": {
            "actor_resource": {"num_npus": devices},
            "mini_batch_size": 16,
            "n_samples_per_prompt": 12,
            "max_prompt_length": 32,
            **changes.get("rl_config", {}),
        },
        "generate_config": {
            "infer_tensor_parallel_size": tensor,
            "dtype": "float32",
            "sampling_config": {"max_tokens": 16},
            **changes.get("generate_config", {}),
        },
    }
    return draft(build_run_config(tree, config_name="test"))


PLAIN = {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 256, "intermediate_size": 512}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, None),
        ({"hidden_size": 64}, ["head_dim", "is 16", "32, 64, 80", "and 512"]),
        ({"hidden_size": 64, "head_dim": 32}, None),
        ({"head_dim": 48}, ["is 48"]),
        ({"hidden_size": 64, "model_type": "qwen3"}, None),  # 128 wide by itself
        ({"kv_lora_rank": 512, "qk_rope_head_dim": 64, "hidden_size": 64}, None),
        ({"kv_lora_rank": 32, "qk_rope_head_dim": 16, "hidden_size": 64}, ["kv_lora_rank + qk_rope_head_dim is 48", "576"]),
    ],
)
def test_widths_of_heads_that_the_cpu_has_no_kernels_for_are_named(
    tmp_path: Path, changes: dict[str, Any], words: list[str] | None
) -> None:
    results = [str(violation) for violation in validate(run(tmp_path / "m", {**PLAIN, **changes}))]
    assert len(results) == (words is not None)
    if words is not None:
        assert all(word in results[0] for word in (*words, str(tmp_path / "m")))
    assert validate(run(tmp_path / "m", {**PLAIN, **changes}, platform="npu")) == []


HYBRID = {
    "hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "intermediate_size": 512,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 64, "linear_value_head_dim": 64,
}  # fmt: skip


def test_gated_delta_nets_that_the_cpu_has_no_kernels_for_are_named(tmp_path: Path) -> None:
    result = validate(run(tmp_path / "m", HYBRID))
    assert [item.rule for item in result] == ["rollout.linear_dtype"]
    assert "generate_config.dtype (float32) must be bfloat16" in str(result[0])
    small = {**HYBRID, "linear_key_head_dim": 32}
    assert {item.rule for item in validate(run(tmp_path / "m", small))} == {"rollout.linear_dtype", "rollout.linear_size"}
    split = validate(run(tmp_path / "m", HYBRID, devices=4, tensor=4))
    assert "linear_num_key_heads (2) must be divisible by" in str(next(i for i in split if i.rule == "rollout.linear_heads"))
    assert [item.rule for item in validate(run(tmp_path / "m", HYBRID, platform="npu"))] == ["rollout.linear_dtype"]


def test_states_of_gated_delta_nets_fit_blocks_of_the_cache_on_npus(tmp_path: Path) -> None:
    keys: dict[str, Any] = {"megatron_training": {"bf16": True}, "generate_config": {"dtype": "bfloat16"}}
    # 4 heads x 64 x 64 are 2 heads x 64 of 128 tokens, and half of it is not
    assert validate(run(tmp_path / "m", HYBRID, **keys, platform="npu")) == []
    narrow = {**HYBRID, "linear_value_head_dim": 32}
    (found,) = validate(run(tmp_path / "m", narrow, **keys, platform="npu"))
    assert found.rule == "rollout.linear_state" and "has 16384 bytes" in str(found) and "multiple of 32768" in str(found)
    # in float32 it has twice the bytes
    wide = {**narrow, "model_type": "qwen3_5_text", "mamba_ssm_dtype": "float32"}
    assert validate(run(tmp_path / "m", wide, **keys, platform="npu")) == []


@pytest.mark.parametrize("platform", ["cpu", "npu"])
def test_gated_delta_nets_have_no_cached_prefixes(tmp_path: Path, platform: str) -> None:
    keys: dict[str, Any] = {
        "megatron_training": {"bf16": True},
        "generate_config": {"dtype": "bfloat16", "enable_prefix_caching": True},
    }
    (found,) = validate(run(tmp_path / "m", HYBRID, **keys, platform=platform))
    assert found.rule == "rollout.linear_prefixes" and str(tmp_path / "m") in str(found)
    assert "generate_config.enable_prefix_caching must be false" in str(found)
    assert validate(run(tmp_path / "m", HYBRID, **keys, platform="cuda")) == validate(run(tmp_path / "m", PLAIN, **keys)) == []


def test_a_model_block_has_delta_nets_as_config_json_has(tmp_path: Path) -> None:
    """A run file that is read where the weights are not."""
    keys = ["generate_config.enable_prefix_caching=true", "platform=npu"]
    found = validate(load_run("grpo_qwen35_4b_A3", None, keys))
    assert [item.rule for item in found] == ["rollout.linear_prefixes"]
    split = validate(load_run("grpo_qwen35_4b_A3", None, ["generate_config.infer_tensor_parallel_size=3"]))
    assert "linear_num_key_heads (16) must be divisible by" in str(next(i for i in split if i.rule == "rollout.linear_heads"))


def test_gated_delta_nets_have_drafts_on_the_cpu_and_no_draft_model_is_one(tmp_path: Path) -> None:
    def said(platform: str, config: dict[str, Any], **drafts: Any) -> list[str]:
        generate = {"dtype": "bfloat16", "speculative_config": {"num_speculative_tokens": 2, **drafts}}
        keys: dict[str, Any] = {"megatron_training": {"bf16": True}, "generate_config": generate}
        return [str(item) for item in validate(run(tmp_path / "m", config, **keys, platform=platform))]

    (tmp_path / "plain").mkdir()
    (tmp_path / "plain" / "config.json").write_text(json.dumps(PLAIN))
    (tmp_path / "plain" / "model.safetensors").write_bytes(b"")
    other: dict[str, Any] = {"model": str(tmp_path / "plain")}
    for method, named in {"mtp": {}, "ngram": {}, "suffix": {}, "draft_model": other, "eagle": other, "eagle3": other}.items():
        found = said("cpu", HYBRID, method=method, **named)
        assert len(found) == bool(named) and all("(method: " + method + ")" in text for text in found)
        assert all("of drafts only mtp, ngram, suffix are proven on cpu" in text for text in found)
        for platform in ("npu", "cuda"):
            (refused,) = said(platform, HYBRID, method=method, **named)
            assert f"of drafts none is proven on {platform}" in refused
    assert said("npu", PLAIN, method="suffix") == []
    for name, config in (("plain", PLAIN), ("states", HYBRID), ("tower", {"text_config": HYBRID})):
        (tmp_path / name).mkdir(exist_ok=True)
        (tmp_path / name / "config.json").write_text(json.dumps(config))
        (tmp_path / name / "model.safetensors").write_bytes(b"")
        found = said("cpu", PLAIN, method="draft_model", model=str(tmp_path / name))
        assert len(found) == (name != "plain") and all("linear attention" in text and "method: mtp" in text for text in found)


#: model types whose layers keep states
WITH_STATES = (
    "mamba mamba2 falcon_mamba rwkv recurrent_gemma lfm2 lfm2_moe minimax jamba bamba zamba2 nemotron_h qwen3_next "
    "qwen3_5_text kimi_linear xlstm"
)


@pytest.mark.parametrize("kind", WITH_STATES.split())
def test_families_with_states_are_found_by_their_config(kind: str) -> None:
    assert keeps_states(transformers.CONFIG_MAPPING[kind]().to_dict())


def test_states_are_found_by_the_kinds_of_layers() -> None:
    assert keeps_states({"layer_types": ["conv", "full_attention"]}) and keeps_states({"attn_type_list": [0, 1]})
    assert not keeps_states({"layer_types": ["full_attention", "sliding_attention"], "attn_type_list": [1, 1]})


@pytest.mark.parametrize("kind", ["llama", "qwen3_moe", "gemma3_text", "deepseek_v32", "deepseek_v4", "gpt_oss", "minimax_m2"])
def test_families_of_attention_alone_have_no_states(kind: str) -> None:
    assert not keeps_states(transformers.CONFIG_MAPPING[kind]().to_dict())


#: names of the number of experts in config.json
EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts")


def test_adapters_are_not_sent_to_an_engine_with_gated_delta_nets_experts_or_to_a_tower(tmp_path: Path) -> None:
    def said(config: dict[str, Any], **actor: Any) -> str:
        changes = {"megatron_training": {"lora_target_modules": ["linear_qkv"], **actor}}
        generate = {"lora_push": "adapter", "dtype": "bfloat16"}
        pushed = run(tmp_path / "m", config, platform="npu", generate_config=generate, **changes)
        return str(next((item for item in validate(pushed) if item.rule == "lora_push_adapter"), None))

    assert "no adapters of gated delta nets" in said(HYBRID)
    assert "no adapters of a vision tower" in said(HYBRID, freeze_vit=False)
    for name in EXPERTS:
        assert "no adapters of experts" in said({**PLAIN, name: 4})
    assert said(PLAIN) == "None"


def test_adapters_of_queries_and_keys_are_refused_where_attention_is_latent(tmp_path: Path) -> None:
    latent = {**PLAIN, "kv_lora_rank": 512, "qk_rope_head_dim": 64}

    def rules(config: dict[str, Any], *targets: str) -> set[str]:
        return {
            item.rule for item in validate(run(tmp_path / "m", config, megatron_training={"lora_target_modules": [*targets]}))
        }

    assert "lora_latent" in rules(latent, "linear_qkv", "linear_fc1")
    assert "lora_latent" not in rules(latent, "linear_proj", "linear_fc1") | rules(PLAIN, "linear_qkv", "linear_fc1")


def test_exact_log_probs_know_the_experts_of_config_json(tmp_path: Path) -> None:
    def said(config: dict[str, Any], mode: str) -> str:
        rl = {"exact_log_probs": True, "router_replay": {"mode": mode}}
        exact = run(tmp_path / "m", config, rl_config=rl)
        return " ".join(str(item) for item in validate(exact) if item.rule == "exact_log_probs")

    for name in EXPERTS:
        assert "set R3, so that both sides choose the same experts" in said({**PLAIN, name: 4}, "disabled")
        assert not said({**PLAIN, name: 4}, "R3")
    assert not said(PLAIN, "disabled")


def test_a_split_that_heads_or_mlp_do_not_follow_is_named(tmp_path: Path) -> None:
    violations = validate(run(tmp_path / "m", PLAIN, devices=3, tensor=3))
    results = [str(item) for item in violations if item.rule.startswith("rollout.")]
    assert [text.split(";")[0].split(" must")[0] for text in results] == [
        "num_attention_heads (4)",
        "num_query_groups (2) and generate_config.infer_tensor_parallel_size (3)",
        "ffn_hidden_size (512)",
    ]


def test_the_model_of_a_training_checkpoint_is_known_too(tmp_path: Path) -> None:
    actor = run(tmp_path / "checkpoints" / "huggingface", {**PLAIN, "head_dim": 48}).config.actor_config
    facts = read_model_metadata(dataclasses.replace(actor, load=str(tmp_path / "checkpoints")))
    assert facts is not None and facts.shape.head_size == 48


def test_a_run_file_that_leaves_the_device_open_is_held_against_the_device_that_is_found(tmp_path: Path) -> None:
    wide = run(tmp_path / "m", {**PLAIN, "head_dim": 48}, platform="auto")
    assert validate(wide) == []
    with pytest.raises(ValueError, match=r"head_dim in config.json.* is 48"):
        resolve(wide.config, platform="cpu")
    sound = run(tmp_path / "m", PLAIN, platform="auto")
    assert sound.generate.max_num_seqs == 192
    assert resolve(sound.config, platform="cpu").generate.max_num_seqs == 32


def test_commands_are_answered_in_their_own_words() -> None:
    shape = EngineShape(source="m", num_heads=4, num_kv_heads=4, head_size=32, ffn_hidden_size=96, max_length=128)
    request = EngineRequest(3, 4096, "--tensor-parallel-size", "--max-length")
    assert [obstacle.message for obstacle in engine_obstacles(shape, request, "cpu")] == [
        "num_attention_heads (4) must be divisible by --tensor-parallel-size (3): the rollout engine splits whole heads",
        "num_query_groups (4) and --tensor-parallel-size (3) must divide one another: key/value heads are split or repeated "
        "whole",
        "--max-length (4096) must be at most 128, the longest sequence of the model in m",
    ]


def test_the_table_is_that_of_the_engine_that_is_installed() -> None:
    pytest.importorskip("vllm")
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
    from vllm.v1.attention.backends.mla.cpu_mla import CPUMLABackend

    limits = engine_limits("cpu")
    assert list(limits.head_sizes) == CPUAttentionBackend.get_supported_head_sizes()
    assert list(limits.latent_sizes) == CPUMLABackend.get_supported_head_sizes()


KINDS = "qwen3 gemma2 glm4 qwen2 llama qwen3_moe mistral mixtral qwen3_next qwen3_5_text".split()


@pytest.mark.parametrize("kind", KINDS)
def test_widths_that_config_json_leaves_out_are_those_of_transformers(tmp_path: Path, kind: str) -> None:
    from transformers import AutoConfig

    config = AutoConfig.for_model(kind, num_attention_heads=4, num_key_value_heads=2, hidden_size=256)
    width = getattr(config, "head_dim", None) or 64
    facts = read_model_metadata(run(tmp_path / "m", {**PLAIN, "model_type": kind}).config.actor_config)
    assert facts is not None and facts.shape.head_size == width
