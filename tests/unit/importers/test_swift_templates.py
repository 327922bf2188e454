"""Chat templates of ms-swift's commands: system prompts, thoughts, and the tokens that train."""

from __future__ import annotations

import pytest

from mindspeed_rl.config import ConfigError
from mindspeed_rl.importers.importer import import_command
from mindspeed_rl.importers.result import Import, ImportSettings
from mindspeed_rl.importers.swift import PROJECT
from mindspeed_rl.rewards import REWARDS

SFT = "NPROC_PER_NODE=8 swift sft --dataset rows.jsonl --max_steps 3 --model"
DPO = "NPROC_PER_NODE=8 swift rlhf --rlhf_type dpo --dataset pairs.jsonl --max_steps 3 --model"
GRPO = "NPROC_PER_NODE=8 swift rlhf --rlhf_type grpo --dataset p.jsonl --reward_funcs accuracy --vllm_mode colocate --model"


def take(command: str) -> Import:
    return import_command(PROJECT, command, ImportSettings(rewards=REWARDS))


def words(command: str) -> str:
    return take(command).translated["--dataset"].partition("Handler ")[2].rstrip(")")


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        (f"{SFT} Qwen/Qwen3-8B", "qwen3 --drop-thinking false"),
        (f"{SFT} /models/Qwen3-30B-A3B-Base --enable_thinking false", "qwen3 --drop-thinking false"),
        (f"{SFT} Qwen/Qwen3-8B --preserve_thinking false", "qwen3 --drop-thinking true"),
        (f"{SFT} Qwen/Qwen3-8B --disable_ignore_empty_think true", "qwen3 --enable-thinking true --drop-thinking false"),
        (f"{SFT} Qwen/Qwen3-8B --loss_scale ignore_empty_think", "qwen3 --drop-thinking false"),
        (f"{SFT} Qwen/Qwen3-8B --loss_scale default+ignore_empty_think", "qwen3 --drop-thinking false"),
        (f"{SFT} Qwen/Qwen3-8B --system 'Be \"kind\".'", "qwen3 --drop-thinking false --system-prompt 'Be \"kind\".'"),
        (f"{DPO} Qwen/Qwen3-8B", "qwen3 --drop-thinking true"),
        (f"{DPO} Qwen/Qwen3.8-27B", "qwen3 --drop-thinking false; rows with tools need --prompt-type hf"),
        (f"{DPO} Qwen/Qwen3-8B --loss_scale last_round+ignore_empty_think", "qwen3 --drop-thinking true"),
        (f"{SFT} Qwen/Qwen3.5-4B", "qwen3 --drop-thinking false; rows with tools need --prompt-type hf"),
        (f"{SFT} Qwen/Qwen3-8B --template_backend jinja", "hf"),
        (f"{SFT} Qwen/Qwen3-4B-Instruct-2507", "hf"),
        (f"{SFT} Qwen/Qwen3-4B-Thinking-2507", "hf"),
        (f"{SFT} Qwen/Qwen3-Coder-30B-A3B-Instruct", "hf"),
        (f"{SFT} Qwen/Qwen2.5-7B-Instruct --system Brief.", "hf --system-prompt Brief."),
        (
            f"{SFT} Qwen/Qwen2.5-7B",
            "hf --system-prompt 'You are Qwen, created by Alibaba Cloud. You are a helpful assistant.'",
        ),
    ],
)
def test_rows_are_written_with_the_thoughts_and_system_prompt_of_ms_swift(command: str, expected: str) -> None:
    assert words(command) == f"--prompt-type {expected}"


def test_a_system_prompt_of_rows_is_no_key_of_the_run() -> None:
    run = take(f"{SFT} Qwen/Qwen3-8B --system Brief.")
    assert run.get("megatron_training.system_prompt") is None
    assert run.translated["--system"] == "--system-prompt of preprocess"


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ("Qwen/Qwen3-8B", ["hf", False, None]),
        ("Qwen/Qwen3-8B --enable_thinking true", ["hf", True, None]),
        ("Qwen/Qwen3-4B-Thinking-2507", ["hf", None, None]),
        ("zai-org/GLM-4.5-Air", ["hf", False, None]),
        ("Qwen/Qwen2.5-7B-Instruct", ["hf", None, None]),
        ("Qwen/Qwen2.5-7B", ["hf", None, "You are Qwen, created by Alibaba Cloud. You are a helpful assistant."]),
        ("Qwen/Qwen2.5-7B --system Brief.", ["hf", None, "Brief."]),
    ],
)
def test_prompts_of_rollouts_are_in_the_chat_template_and_hybrid_models_do_not_think(
    options: str, expected: list[object]
) -> None:
    run = take(f"{GRPO} {options}")
    assert [run.get(f"megatron_training.{name}") for name in ("prompt_type", "enable_thinking", "system_prompt")] == expected


def test_the_empty_thoughts_of_hybrid_models_do_not_train_with_the_name_and_without_it() -> None:
    runs = [take(f"{SFT} zai-org/GLM-4.5-Air{loss}") for loss in ("", " --loss_scale ignore_empty_think")]
    assert runs[0].tree == runs[1].tree


@pytest.mark.parametrize(
    ("options", "feature"),
    [
        (f"{DPO} models/base --loss_scale last_round+ignore_empty_think", "of another model than Qwen3 and Qwen3.5"),
        (f"{SFT} models/base --loss_scale ignore_empty_think", "without empty thoughts in ms-swift; --accept trained_tokens"),
        (f"{SFT} Qwen/Qwen3-8B --loss_scale hermes+ignore_empty_think", "hermes+ignore_empty_think; available are default"),
        (f"{SFT} Qwen/Qwen3-8B --loss_scale last_round", "last_round; available are default"),
        (f"{DPO} Qwen/Qwen3-8B --loss_scale all", "all; available are last_round, default"),
        (f"{SFT} Qwen/Qwen3-8B --add_non_thinking_prefix false", "without the empty thought"),
    ],
)
def test_other_weights_of_tokens_are_refused_by_name(options: str, feature: str) -> None:
    with pytest.raises(ConfigError, match=feature.replace("+", r"\+")):
        take(options)
