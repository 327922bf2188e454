"""Every shipped run file and model block loads and is sound, and says what MindSpeed-RL's file of that name says."""

from __future__ import annotations

import cProfile
import sys
from pathlib import Path

import pytest
import yaml
from sample_runs import prompt_level

from mindspeed_rl.config import build_run_config, load_run_config
from mindspeed_rl.config.run_files import apply_values, find_project_configs
from mindspeed_rl.run.draft import draft, load_run
from mindspeed_rl.run.explain.effects import find_keys_without_effect
from mindspeed_rl.run.rules.validation import unavailable, validate
from mindspeed_rl.tools.tool_file import build_tools, read_tools

CONFIGS = find_project_configs()
RUN_FILES = sorted(path.stem for path in CONFIGS.glob("*.yaml"))
BLOCKS = sorted(path.stem for path in (CONFIGS / "model").glob("*.yaml"))

# prompts, responses of a prompt, kept prompts, mini-batch | seq, max_tokens, max_model_len | devices, TP, PP, EP, CP -> TP, EP
UPSTREAM = {
    "dapo_qwen25_32b_A2_20k": (256, 16, None, 32, 2048, 20480, 22528, 64, 8, 2, 1, 2, 4, 1),
    "dapo_qwen25_32b_A3": (32, 8, 32, 32, 2048, 2048, 4096, 16, 8, 1, 1, 1, 8, 1),
    "dapo_qwen25_32b_A3_32k": (256, 16, None, 32, 2048, 30720, 32768, 64, 8, 2, 1, 2, 4, 1),
    "dapo_qwen25_7b_A2_multi_turn": (32, 8, None, 32, 2048, 2048, 4096, 8, 4, 1, 1, 1, 1, 1),
    "dapo_qwen3_30b_a3b_A3": (32, 8, 32, 32, 2048, 2048, 4096, 16, 4, 1, 2, 1, 1, 8),
    "dapo_qwen3_32b_A3": (32, 8, 32, 32, 2048, 2048, 4096, 16, 8, 2, 1, 1, 8, 1),
    "grpo_deepseek_r1_671b_A2": (384, 16, None, 384, 8196, 2048, 10240, 256, 4, 8, 8, 1, 4, 16),
    "grpo_deepseek_r1_671b_A3": (512, 16, None, 512, 1024, 2048, 3072, 256, 4, 8, 8, 1, 4, 64),
    "grpo_deepseek_r1_671b_A3_eplb": (128, 16, None, 128, 1024, 512, 2048, 256, 4, 8, 8, 1, 4, 64),
    "grpo_lora_qwen25_32b_A2": (32, 8, None, 32, 2048, 2048, 4096, 16, 4, 4, 1, 1, 4, 1),
    "grpo_qwen25_32b_A2": (64, 16, None, 64, 1024, 1024, 2048, 16, 4, 4, 1, 1, 2, 1),
    "grpo_qwen25_32b_A3": (64, 16, None, 64, 1024, 2048, 3072, 16, 4, 4, 1, 1, 2, 1),
    "grpo_qwen25_7b_A3": (32, 8, None, 32, 2048, 2048, 4096, 16, 2, 2, 1, 1, 1, 1),
    "grpo_qwen3_235b_a22b_A2": (256, 8, None, 256, 8192, 8192, 16384, 128, 2, 16, 4, 1, 4, 8),
    "grpo_qwen3_8b_A3": (32, 8, None, 32, 2048, 8192, 10240, 16, 2, 2, 1, 1, 1, 1),
    "ppo_qwen25_32b_A3": (128, 8, None, 128, 2048, 2048, 4096, 32, 8, 1, 1, 1, 8, 1),
}

# layers, hidden, ffn, heads, key/value heads, vocabulary, experts
SHAPES = {
    "qwen25_0p5b": (24, 896, 4864, 14, 2, 151936, None),
    "qwen25_1p5b": (28, 1536, 8960, 12, 2, 151936, None),
    "qwen25_7b": (28, 3584, 18944, 28, 4, 152064, None),
    "qwen25_32b": (64, 5120, 27648, 40, 8, 152064, None),
    "qwen3_0p6b": (28, 1024, 3072, 16, 8, 151936, None),
    "qwen3_8b": (36, 4096, 12288, 32, 8, 151936, None),
    "qwen3_32b": (64, 5120, 25600, 64, 8, 151936, None),
    "qwen3_30b_a3b": (48, 2048, 6144, 32, 4, 151936, 128),
    "qwen3_235b_a22b": (94, 4096, 12288, 64, 4, 151936, 128),
    "deepseekv3_671b": (61, 7168, 18432, 128, 1, 129280, 256),
    "llama32_1b": (16, 2048, 8192, 32, 8, 128256, None),
    "llama3_8b": (32, 4096, 14336, 32, 8, 128256, None),
    "mixtral_8x7b": (32, 4096, 14336, 32, 8, 32000, 8),
    "tiny_qwen25": (4, 128, 384, 4, 2, 128, None),
}


@pytest.mark.parametrize("name", RUN_FILES)
def test_every_run_file_is_sound(name: str) -> None:
    run = load_run(name)
    assert validate(run) == []
    assert run.plan.num_samples > 0


@pytest.mark.parametrize("name", UPSTREAM)
def test_a_run_file_for_ascend_has_the_numbers_its_users_know(name: str) -> None:
    run = load_run(name)
    actor, rl, generate = run.config.actor_config, run.rl, run.generate
    assert UPSTREAM[name] == (
        actor.global_batch_size,
        rl.n_samples_per_prompt,
        rl.filter_groups_train_batch_size if rl.filter_groups_enable else None,
        rl.mini_batch_size,
        actor.seq_length,
        generate.sampling_config.max_tokens,
        generate.max_model_len,
        rl.actor_resource.num_npus,
        actor.tensor_model_parallel_size,
        actor.pipeline_model_parallel_size,
        actor.expert_model_parallel_size,
        actor.context_parallel_size,
        generate.infer_tensor_parallel_size,
        generate.infer_expert_parallel_size,
    )
    assert actor.bf16 and generate.dtype == "bfloat16"


def test_every_model_of_the_tables_has_a_block() -> None:
    assert set(BLOCKS) >= set(SHAPES)


@pytest.mark.parametrize("name", SHAPES)
def test_a_model_block_has_the_shape_of_its_model(name: str) -> None:
    block = yaml.safe_load((CONFIGS / "model" / f"{name}.yaml").read_text(encoding="utf-8"))
    tree = {"model": block, "megatron_training": {"stage": "sft", "model": name, "global_batch_size": 1}}
    run = draft(build_run_config(tree))
    model = run.config.actor_config
    shape = (model.num_layers, model.hidden_size, model.ffn_hidden_size, model.num_attention_heads, model.num_query_groups)
    assert (*shape, model.padded_vocab_size, model.num_experts) == SHAPES[name]
    assert validate(run) == []


def test_run_files_for_ascend_set_no_key_without_effect_but_names_that_users_expect() -> None:
    kept = {"tokenizer_type", "kl_penalty", "kl_ctrl_type", "init_kl_coef", "max_packing_token_size", "async_engine"}
    kept |= {"gamma", "infer_expert_parallel_size", "sequence_parallel", "logprobs", "detokenize"}
    kept |= {
        "reset_attention_mask",
        "no_pad_to_seq_lengths",
        "attention_softmax_in_fp32",
        "init_method_std",
        "moe_token_dispatcher_type",
    }
    kept |= {"clip_ratio", "clip_higher_enable", "clip_ratio_low", "clip_ratio_high"}  # most of them make one step a rollout
    kept |= {"use_flash_attn", "use_fused_rmsnorm", "use_fused_swiglu", "use_fused_rotary_pos_emb", "attention_mask_type"}
    for name in UPSTREAM:
        idle = {key.rpartition(".")[2] for key in find_keys_without_effect(load_run(name))}
        assert idle <= kept, (name, idle - kept)


def test_no_run_file_asks_for_something_this_version_lacks() -> None:
    assert [name for name in RUN_FILES if unavailable(load_run(name))] == []


def test_a_run_file_of_mindspeed_rl_loads_unchanged(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "small-1b.yaml").write_text("small-1b:\n  num_layers: 2\n  norm_epsilon: 1e-5\n")
    (tmp_path / "old_style.yaml").write_text(
        "defaults:\n  - model:\n      - small-1b\n\n"
        "megatron_training:\n"
        "  model: small-1b\n  use_fused_rmsnorm: true\n  distributed_backend: nccl\n  stage: ray_grpo\n  global_batch_size: 4\n"
        "  split: 100,0,0\n  dataset_additional_keys: ['labels',]\n  recompute-granularity: full\n"
        "actor_config:\n"
        "  model: small-1b\n  micro_batch_size: 1\n  tensor_model_parallel_size: 4\n  pipeline_model_parallel_size: 1\n"
        "  lr: 5e-7\n  min-lr: 5e-8\n  initial_loss_scale: 4096\n  num_layer_list: 2\n  no_load_optim: True\n"
        "rl_config:\n"
        "  n_samples_per_prompt: 8\n  mini_batch_size: 4\n  verifier_function: ['math_17k_acc']\n  verifier_weight: [1.0]\n"
        "  actor_resource:\n    num_npus: 8\n  advantage_whiten: true\n  verifier_parallel: 4\n  max_prompt_length: 1024\n"
        "generate_config:\n"
        "  infer_tensor_parallel_size: 2\n  max_model_len: 4096\n  dtype: 'bfloat16'\n  num_scheduler_steps: 1\n"
        "  sampling_config:\n    logprobs: 1\n    max_tokens: 64\n    min_p: 0.01\n    temperature: 0.8\n"
        "profiler_config:\n  integrated:\n    profile: true\n    stage: actor_update\n    profile_ranks: [0]\n"
        "msprobe_config:\n  msprobe: false\n  dump_path: './msprobe_dump'\n"
    )
    run = load_run("old_style", tmp_path)
    cfg = run.config
    assert (cfg.actor_config.lr, cfg.actor_config.min_lr, cfg.actor_config.recompute_granularity) == (5e-7, 5e-8, "full")
    assert cfg.actor_config.num_layer_list == "2"
    assert cfg.profiler_config.integrated.profile_ranks == [0]
    assert cfg.generate_config.sampling_config.temperature == 0.8
    assert validate(run) == []


def test_changes_reach_nested_keys_whatever_their_spelling_and_leave_the_run_file_alone() -> None:
    tree = {"generate-config": {"sampling-config": {"max-tokens": 4}}, "rl_config": None}
    changed = apply_values(tree, {"generate_config.sampling_config.max_tokens": 8, "rl_config.epochs": 2})
    assert changed == {"generate_config": {"sampling_config": {"max_tokens": 8}}, "rl_config": {"epochs": 2}}
    assert tree == {"generate-config": {"sampling-config": {"max-tokens": 4}}, "rl_config": None}


@pytest.mark.parametrize("guide", ["agents.md", "zh/agents.md"])
def test_the_first_run_file_of_the_guide_of_agents_works_when_copied(guide: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(CONFIGS.parent)
    block = Path("docs", guide).read_text().split("```yaml\n")[1].split("```")[0]
    run = prompt_level(rl_config=yaml.safe_load(block)["rl_config"])
    assert validate(run) == [] and run.config.response_limit == 4096 - 2048
    assert run.rl.tool_config_path is not None
    tools = build_tools(read_tools(run.rl.tool_config_path))
    names = [schema["function"]["name"] for tool in tools for schema in tool.schemas]
    assert names == ["calculator", "code_interpreter", "finish"]


def test_a_run_file_is_read_under_a_profiler() -> None:
    profile = cProfile.Profile()
    cfg = profile.runcall(load_run_config, "grpo_tiny_cpu", None, [])
    assert cfg.platform == "cpu" and sys.getprofile() is None
