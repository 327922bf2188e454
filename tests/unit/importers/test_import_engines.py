"""A source that divides all weights keeps doing so on our engine of transformers' modules, where that can train the run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mindspeed_rl.importers.command import PROJECTS
from mindspeed_rl.importers.importer import import_command
from mindspeed_rl.importers.result import Import, ImportSettings
from mindspeed_rl.importers.swift import PROJECT
from mindspeed_rl.importers.training_engine import Split, _find_form
from mindspeed_rl.rewards import REWARDS

SFT = "NPROC_PER_NODE=8 swift sft --dataset rows.jsonl --max_steps 3 --tuner_type full --model"
RLHF = "NPROC_PER_NODE=8 swift rlhf --dataset rows.jsonl --max_steps 3 --tuner_type full --model Qwen/Qwen2.5-7B-Instruct"
GRPO = f"{RLHF} --rlhf_type grpo --reward_funcs accuracy --vllm_mode colocate"
PPO = f"{RLHF} --rlhf_type ppo --reward_model models/reward"


def take(command: str, folder: Path | None = None) -> Import:
    accepted = frozenset({"total_steps", "aggregation"})
    return import_command(PROJECT, command, ImportSettings(rewards=REWARDS, accepted=accepted, folder=folder))


def engine(run: Import) -> object:
    return run.get("megatron_training.engine")


@pytest.mark.parametrize(
    "command",
    [
        f"{SFT} Qwen/Qwen2.5-7B --deepspeed zero3",
        f"{SFT} Qwen/Qwen3-8B --deepspeed zero3_offload",
        f"{SFT} Qwen/Qwen2.5-7B --deepspeed zero3 --sequence_parallel_size 2",
        f"{SFT} models/base --fsdp fsdp2",
        f"{SFT} Qwen/Qwen2.5-7B --deepspeed zero3 --tuner_type lora",
        f"{SFT} Qwen/Qwen3-30B-A3B --deepspeed zero3 --tuner_type lora --target_modules q_proj k_proj v_proj",
        f"{GRPO} --deepspeed zero3",
        f"{RLHF} --rlhf_type dpo --deepspeed zero3",
        f"{RLHF} --rlhf_type orpo --deepspeed zero3",
        f"{RLHF} --rlhf_type rm --deepspeed zero3",
    ],
)
def test_all_weights_stay_divided(command: str) -> None:
    run = take(command)
    assert engine(run) == "fsdp"
    assert "divides every weight over all devices" in run.added["megatron_training.engine"]


@pytest.mark.parametrize(
    ("options", "is_offloaded"),
    [
        ("--deepspeed zero3_offload", True),
        ("--deepspeed own.json", True),
        ("--deepspeed zero3", False),
        ("--deepspeed zero2_offload", False),  # Megatron's engine, which keeps gradients on the device
        ("--fsdp fsdp2", False),
        ("--fsdp 'full_shard offload'", True),
        ("--fsdp fsdp2 --fsdp_config '{\"offload_params\": true}'", True),
        ("--fsdp own_fsdp.json", True),
    ],
)
def test_what_is_in_host_memory_stays_there(tmp_path: Path, options: str, is_offloaded: bool) -> None:
    zero = {"stage": 3, "offload_optimizer": {"device": "cpu"}}
    (tmp_path / "own.json").write_text(json.dumps({"zero_optimization": zero}))
    (tmp_path / "own_fsdp.json").write_text(json.dumps({"fsdp": "full_shard", "fsdp_config": {"offload_params": True}}))
    run = take(f"{SFT} Qwen/Qwen2.5-7B {options}", tmp_path)
    assert run.get("megatron_training.offload_gradients") is (True if is_offloaded else None)
    assert run.get("megatron_training.optimizer_offload_fraction") == (1.0 if is_offloaded else None)


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        (f"{SFT} Qwen/Qwen3-30B-A3B --deepspeed zero3 --tuner_type lora", "Qwen/Qwen3-30B-A3B has experts, whose layers"),
        (
            f"{SFT} Qwen/Qwen3-Next-80B-A3B --deepspeed zero3 --sequence_parallel_size 2",
            "by its name Qwen/Qwen3-Next-80B-A3B has",
        ),
        (f"{SFT} Qwen/Qwen3.5-4B --deepspeed zero3 --sequence_parallel_size 2", "by its name Qwen/Qwen3.5-4B has layers"),
        (f"{GRPO} --deepspeed zero3 --sync_ref_model true", "a reference that moves"),
        (f"{PPO} --deepspeed zero3", "stage ray_ppo, which has not run on engine fsdp"),
    ],
)
def test_what_the_engine_cannot_do_becomes_a_layout_of_megatron_with_the_reason(command: str, reason: str) -> None:
    run = take(command)
    assert engine(run) is None
    assert f"a layout of Megatron, because of {reason}" in run.translated["--deepspeed"]


@pytest.mark.parametrize("model", ["Qwen/Qwen3.5-4B", "Qwen/Qwen2.5-VL-7B-Instruct", "openai/gpt-oss-20b"])
def test_models_of_images_and_of_stacked_experts_keep_the_engine(model: str) -> None:
    assert engine(take(f"{SFT} {model} --deepspeed zero3")) == "fsdp"


@pytest.mark.parametrize(
    ("model", "is_another"),
    [("Qwen/Qwen2-VL-7B", True), ("deepseek-ai/deepseek-vl2", True), ("Qwen/Qwen3-VL-8B", False), ("x/qwen2_5_vl", False)],
)
def test_models_of_other_images_are_known_by_their_names(model: str, is_another: bool) -> None:
    assert bool(_find_form(model, Split())) is is_another


@pytest.mark.parametrize("options", ["", "--deepspeed zero2", "--deepspeed zero0"])
def test_without_divided_weights_nothing_changes(options: str) -> None:
    run = take(f"{SFT} Qwen/Qwen2.5-7B {options}")
    assert engine(run) is None and "Megatron" not in run.translated.get("--deepspeed", "")


def test_a_file_of_deepspeed_says_its_stage(tmp_path: Path) -> None:
    for stage, expected in ((3, "fsdp"), (2, None)):
        (tmp_path / "ds.json").write_text(json.dumps({"zero_optimization": {"stage": stage}}))
        assert engine(take(f"{SFT} Qwen/Qwen2.5-7B --deepspeed ds.json", tmp_path)) == expected


def test_config_json_decides_where_it_is_here(tmp_path: Path) -> None:
    dense = {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 64, "intermediate_size": 128,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 128,
        "rms_norm_eps": 1e-6, "rope_theta": 1e4, "max_position_embeddings": 64, "tie_word_embeddings": False,
        "hidden_act": "silu",
    }  # fmt: skip
    experts = dense | {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2,
        "moe_intermediate_size": 32, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
    }  # fmt: skip
    for content, expected in ((dense, "fsdp"), (experts, "fsdp"), ({"hidden_size": 8}, None)):
        (tmp_path / "config.json").write_text(json.dumps(content))
        assert engine(take(f"{SFT} {tmp_path} --deepspeed zero3")) == expected


def test_commands_of_megatron_stay_with_it() -> None:
    base = "NPROC_PER_NODE=8 megatron sft --model models/base --dataset rows.jsonl --train_iters 3 --global_batch_size 16"
    assert engine(take(base)) is None


OPENRLHF_DPO = "deepspeed --module openrlhf.cli.train_dpo --model.model_name_or_path {} --data.dataset d --data.max_len 512"


@pytest.mark.parametrize(
    ("model", "options", "expected"),
    [
        ("models/base", "--ds.zero_stage 3", "fsdp"),
        ("models/base", "--ds.zero_stage 2", None),
        ("models/base", "", None),
        ("openai/gpt-oss-20b", "--ds.zero_stage 3", "fsdp"),
        ("x/llava-1.5-7b", "--ds.zero_stage 3", None),
        ("models/base", "--ds.zero_stage 3 --ds.lora.rank 8", "fsdp"),
    ],
)
def test_zero_3_of_openrlhf_keeps_weights_divided(model: str, options: str, expected: object) -> None:
    command = f"{OPENRLHF_DPO.format(model)} {options}"
    accepted = frozenset({"aggregation", "total_steps"})
    run = import_command(PROJECTS["openrlhf"], command, ImportSettings(devices=8, accepted=accepted, rows=8192))
    assert engine(run) == expected


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"deepspeed": "examples/deepspeed/ds_z3_config.json"}, "fsdp"),
        ({"deepspeed": "examples/deepspeed/ds_z3_offload_config.json"}, "fsdp"),
        ({"deepspeed": {"zero_optimization": {"stage": 3}}}, "fsdp"),
        ({"deepspeed": "examples/deepspeed/ds_z2_config.json"}, None),
        ({"deepspeed": "examples/deepspeed/ds_z3_config.json", "finetuning_type": "lora"}, "fsdp"),
        ({"deepspeed": "examples/deepspeed/ds_z3_config.json", "model_name_or_path": "openai/gpt-oss-20b"}, "fsdp"),
        ({}, None),
    ],
)
def test_zero_3_of_llama_factory_keeps_weights_divided(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, object], expected: object
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "dataset_info.json").write_text(json.dumps({"own": {"file_name": "own.json"}}))
    options = {
        "model_name_or_path": "Qwen/Qwen3-4B", "stage": "sft", "do_train": True, "finetuning_type": "full", "dataset": "own",
        "template": "qwen3_nothink", "max_steps": 100, "bf16": True,
    }  # fmt: skip
    (tmp_path / "train.yaml").write_text(json.dumps(options | changes))
    run = import_command(PROJECTS["llama-factory"], "train.yaml", ImportSettings(devices=8))
    assert engine(run) == expected
