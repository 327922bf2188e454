"""Experts of imports: the balancing loss and the routers' bias come from the source, not from config.json."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mindspeed_rl.importers.command import PROJECTS
from mindspeed_rl.importers.importer import import_command
from mindspeed_rl.importers.result import Import, ImportSettings
from mindspeed_rl.rewards import REWARDS

COMMANDS = {
    "verl": "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo data.train_files=/data/gsm8k/train.parquet "
    "data.train_batch_size=64 actor_rollout_ref.actor.ppo_mini_batch_size=16 actor_rollout_ref.model.path=MODEL "
    "actor_rollout_ref.rollout.n=8 trainer.n_gpus_per_node=8",
    "swift": "NPROC_PER_NODE=8 swift rlhf --rlhf_type grpo --model MODEL --dataset /d/x.jsonl --reward_funcs accuracy "
    "--num_generations 8 --per_device_train_batch_size 8 --tuner_type full --max_length 512",
    "trl": "trl grpo --model_name_or_path MODEL --dataset_name /d/x.jsonl --reward_funcs accuracy_reward --num_generations 8 "
    "--per_device_train_batch_size 8 --num_processes 8 --scale_rewards none --loss_type dr_grpo",
    "openrlhf": "deepspeed --num_gpus 8 --module openrlhf.cli.train_sft --model.model_name_or_path MODEL --data.dataset /d/x "
    "--train.batch_size 64 --train.micro_batch_size 8",
}
_MEGATRON = "actor_rollout_ref.actor.megatron"
#: project -> weight of the balancing loss without an option, and the option with its value
WEIGHTS = {
    "verl": (
        0.0,
        "model_engine=megatron +actor_rollout_ref.actor.megatron.override_transformer_config.moe_aux_loss_coeff=0.01",
    ),
    "swift": (0.0, "--router_aux_loss_coef 0.01"),
    "trl": (0.001, "--router_aux_loss_coef 0.01"),
    "openrlhf": (0.0, "--model.aux_loss_coef 0.01"),
}


def model(folder: Path, **config: object) -> str:
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def imported(project: str, path: str, words: str = "") -> Import:
    text = f"{COMMANDS[project].replace('MODEL', path)} {words}"
    return import_command(PROJECTS[project], text, ImportSettings(rewards=REWARDS))


def balance(run: Import) -> list[object]:
    return [run.get(f"megatron_training.{name}") for name in ("moe_aux_loss_coeff", "moe_router_bias_update_rate")]


@pytest.mark.parametrize("project", COMMANDS)
def test_experts_train_as_in_the_source_whatever_config_json_has(tmp_path: Path, project: str) -> None:
    weight, option = WEIGHTS[project]
    experts = model(tmp_path, model_type="qwen3_moe", num_experts=8, router_aux_loss_coef=0.002)
    assert balance(imported(project, experts)) == [weight, 0.0]
    run = imported(project, experts, option)
    assert balance(run) == [0.01, 0.0]
    # Megatron in verl has no form of that loss unless the command names one
    assert run.get("megatron_training.moe_router_load_balancing_type") == ("none" if project == "verl" else None)


@pytest.mark.parametrize("project", COMMANDS)
def test_a_dense_model_needs_none_of_these_keys_and_a_model_elsewhere_has_them(tmp_path: Path, project: str) -> None:
    assert balance(imported(project, model(tmp_path, model_type="qwen3"))) == [None, None]
    assert balance(imported(project, "/models/elsewhere")) == [WEIGHTS[project][0], 0.0]


def test_experts_of_a_model_that_reads_images_are_found(tmp_path: Path) -> None:
    experts = model(tmp_path, model_type="qwen3_vl_moe", text_config={"num_experts": 8})
    assert balance(imported("swift", experts)) == [0.0, 0.0]


def test_the_rate_of_the_bias_is_an_option_of_megatron_swift() -> None:
    text = (
        "NPROC_PER_NODE=8 megatron sft --model /m --dataset /d/x.jsonl --micro_batch_size 1 --global_batch_size 16 "
        "--train_iters 10 --max_length 64 --moe_router_bias_update_rate 0.002"
    )
    assert balance(import_command(PROJECTS["swift"], text, ImportSettings(rewards=REWARDS)))[1] == 0.002


def test_megatrons_arguments_without_a_balancing_loss_have_none() -> None:
    text = (
        "torchrun --nproc_per_node 8 pretrain_gpt.py --num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 "
        "--num-experts 8 --moe-router-topk 2 --micro-batch-size 1 --global-batch-size 8 --train-iters 10 --lr 1e-5 "
        "--data-path data/x --tokenizer-type PretrainedFromHF --tokenizer-name-or-path /m --bf16"
    )
    run = import_command(PROJECTS["mindspeed-llm"], text, ImportSettings(rewards=REWARDS))
    # the rate of the bias is the same 1e-3 in both
    assert balance(run) == [0.0, None]
