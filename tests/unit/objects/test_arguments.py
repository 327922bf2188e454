"""Arguments of trainers become the keys that the same command of TRL becomes, and wrong ones are named."""

from __future__ import annotations

import shlex
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import yaml

from mindspeed_rl.config import ConfigError
from mindspeed_rl.importers import trl
from mindspeed_rl.importers.importer import import_command
from mindspeed_rl.importers.result import ImportSettings
from mindspeed_rl.objects import (
    DistillationConfig,
    DistillationTrainer,
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    PPOConfig,
    PPOTrainer,
    SFTConfig,
    SFTTrainer,
    TrainerConfig,
)

ROWS = [{"prompt": f"{number} + 1 =", "answer": str(number + 1), "place": number} for number in range(16)]
PAIRS = [{"prompt": "a", "chosen": "b", "rejected": "c"}] * 8
CONFIGS: list[type[TrainerConfig]] = [SFTConfig, DPOConfig, GRPOConfig, PPOConfig, DistillationConfig]


def digits(response: str) -> float:
    return float(response.isdigit())


def flatten(tree: dict[str, Any], path: str = "") -> dict[str, object]:
    parts = ((f"{path}{name}", value) for name, value in tree.items())
    return {
        key: item
        for name, value in parts
        for key, item in (flatten(value, f"{name}.") if isinstance(value, dict) else {name: value}).items()
    }


def written(trainer: SFTTrainer | DPOTrainer | GRPOTrainer) -> dict[str, object]:
    return flatten(yaml.safe_load(trainer.run_file.read_text(encoding="utf-8")))


@pytest.mark.parametrize("config", CONFIGS)
def test_each_option_is_one_of_trl(config: type[TrainerConfig]) -> None:
    options = {item.name for item in fields(config) if item.metadata.get("option")}
    assert options <= set(trl.PROJECT.tables[config.program])


@pytest.mark.parametrize("config", CONFIGS)
def test_each_argument_is_described(config: type[TrainerConfig]) -> None:
    text = "".join(item.__doc__ or "" for item in config.__mro__)
    assert [item.name for item in fields(config) if f"{item.name}" not in text] == []


#: keys that say where things are, or that this machine decides
WHERE = (
    "run_dir platform actor_config.load actor_config.save actor_config.save_hf actor_config.finetune "
    "actor_config.pretrained_checkpoint megatron_training.tokenizer_name_or_path megatron_training.data_path "
    "megatron_training.bf16 generate_config.dtype generate_config.max_model_len rl_config.max_prompt_length "
    "megatron_training.prompt_type megatron_training.map_keys.prompt megatron_training.map_keys.query "
    "megatron_training.map_keys.response megatron_training.dataset_additional_keys rl_config.reward_funcs "
    "rl_config.reward_weights rl_config.verifier_function rl_config.verifier_weight rl_config.external_plugins "
    "rl_config.rule_reward rl_config.log_completions"
).split()


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"learning_rate": 3e-5, "lr_scheduler_type": "cosine", "warmup_steps": 0.1, "max_steps": 40},
        {"num_generations": 4, "per_device_train_batch_size": 16, "gradient_accumulation_steps": 2, "num_iterations": 2},
        {"beta": 0.04, "epsilon": 0.1, "epsilon_high": 0.3, "loss_type": "dr_grpo", "scale_rewards": "none"},
        {"importance_sampling_level": "sequence", "temperature": 0.7, "top_k": 20, "mask_truncated_completions": True},
        {"loss_type": "cispo", "epsilon_high": 5.0, "weight_decay": 0.1, "adam_beta2": 0.95, "seed": 7, "save_steps": 20},
        {"loss_type": "sapo", "gradient_checkpointing": False, "max_grad_norm": 0.5, "num_train_epochs": 2.0},
    ],
)
def test_grpo_has_the_keys_of_the_command_of_trl(arguments: dict[str, Any], tiny_model: Path, tmp_path: Path) -> None:
    words = [f"--{name} {value}" for name, value in arguments.items()]
    command = f"trl grpo --model_name_or_path {shlex.quote(str(tiny_model))} --dataset_name rows.jsonl " + " ".join(words)
    command += " --reward_funcs module:digits --max_completion_length 8 --vllm_max_model_length 120"
    expected = flatten(import_command(trl.PROJECT, command, ImportSettings(rows=len(ROWS), devices=1)).tree)
    config = GRPOConfig(output_dir=str(tmp_path / "out"), vllm_max_model_length=120, max_completion_length=8, **arguments)
    actual = written(GRPOTrainer(model=tiny_model, reward_funcs=digits, train_dataset=ROWS, args=config))
    assert {name: actual.get(name) for name in expected if name not in WHERE} == {
        name: value for name, value in expected.items() if name not in WHERE
    }
    assert set(actual) - set(expected) <= set(WHERE)


def test_columns_of_rows_are_prompt_answer_and_arguments_of_rewards(tiny_model: Path, tmp_path: Path) -> None:
    args = GRPOConfig(output_dir=str(tmp_path / "out"), max_completion_length=8)
    keys = written(GRPOTrainer(tiny_model, digits, args, train_dataset=ROWS, eval_dataset=ROWS[:2]))
    assert keys["megatron_training.map_keys.response"] == "answer" and keys["megatron_training.map_keys.prompt"] == "prompt"
    assert keys["megatron_training.dataset_additional_keys"] == ["labels", "answer", "place"]
    assert keys["megatron_training.prompt_type"] == "empty"  # a text reaches the model as it is
    assert keys["megatron_training.eval_data_path"] == str(tmp_path / "out/data/eval.jsonl")
    assert keys["rl_config.verifier_function"] == ["digits"]


def test_keys_of_a_run_file_win(tiny_model: Path, tmp_path: Path) -> None:
    values = {"rl_config.clip_ratio_low": 0.05, "megatron_training.seed": 11}
    args = GRPOConfig(output_dir=str(tmp_path / "out"), max_completion_length=8, epsilon=0.3, keys=values)
    trainer = GRPOTrainer(tiny_model, digits, args, train_dataset=ROWS)
    assert trainer.run.config.rl_config is not None and trainer.run.config.rl_config.clip_ratio_low == 0.05
    assert trainer.run.config.actor_config.seed == 11


def test_ppo_has_a_critic_and_distillation_a_teacher(tiny_model: Path, tmp_path: Path) -> None:
    args = PPOConfig(output_dir=str(tmp_path / "ppo"), max_completion_length=8, lam=0.9, beta=0.05, value_learning_rate=1e-5)
    keys = written(PPOTrainer(tiny_model, digits, args, train_dataset=ROWS))
    assert keys["megatron_training.stage"] == "ray_ppo" and keys["rl_config.adv_estimator"] == "gae"
    assert keys["critic_config.lr"] == 1e-5 and keys["critic_config.pretrained_checkpoint"] == str(tiny_model)
    assert keys["rl_config.lam"] == 0.9 and keys["rl_config.init_kl_coef"] == 0.05
    assert keys["rl_config.use_kl_in_reward"] is True
    assert "rl_config.adv_epsilon" not in keys  # nothing is divided by a spread
    distilled = DistillationConfig(output_dir=str(tmp_path / "distilled"), max_completion_length=8, topk=16)
    trainer = DistillationTrainer(tiny_model, tiny_model, distilled, train_dataset=ROWS)
    keys = written(trainer)
    assert keys["rl_config.distillation.teacher_models"] == [str(tiny_model)] and keys["rl_config.rule_reward"] is False
    assert keys["rl_config.distillation.topk"] == 16 and keys["rl_config.distillation.use_task_rewards"] is False
    both = DistillationTrainer(tiny_model, "http://127.0.0.1:1/v1", distilled, train_dataset=ROWS, reward_funcs=[digits])
    keys = written(both)
    assert keys["rl_config.distillation.teacher_models"] == ["http://127.0.0.1:1/v1"]
    assert keys["rl_config.verifier_function"] == ["digits"] and "rl_config.distillation.use_task_rewards" not in keys


def test_supervised_rows_are_texts_or_messages(tiny_model: Path, tmp_path: Path) -> None:
    def build(rows: list[dict[str, Any]], name: str) -> dict[str, object]:
        args = SFTConfig(output_dir=str(tmp_path / name), max_length=64, loss_type="dft")
        return written(SFTTrainer(tiny_model, args, train_dataset=rows))

    texts = build([{"prompt": "a", "completion": "b"}], "texts")
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    messages = build([{"messages": turns}], "messages")
    assert (texts["megatron_training.prompt_type"], messages["megatron_training.prompt_type"]) == ("completion", "hf")
    assert texts["megatron_training.sft_loss_type"] == "dft" and texts["megatron_training.seq_length"] == 64
    args = DPOConfig(output_dir=str(tmp_path / "pairs"), max_length=64, beta=0.3, loss_type="ipo")
    pairs = written(DPOTrainer(tiny_model, args, train_dataset=PAIRS, ref_model=tiny_model))
    assert pairs["megatron_training.dpo_beta"] == 0.3 and pairs["megatron_training.dpo_loss_type"] == "ipo"
    assert pairs["megatron_training.ref_model"] == str(tiny_model)


def test_adapters_are_those_of_peft(tiny_model: Path, tmp_path: Path) -> None:
    from peft import LoraConfig

    lora = LoraConfig(r=4, lora_alpha=8, lora_dropout=0.0, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"])
    args = SFTConfig(output_dir=str(tmp_path / "out"), max_length=64)
    keys = written(SFTTrainer(tiny_model, args, train_dataset=[{"prompt": "a", "completion": "b"}], peft_config=lora))
    assert keys["megatron_training.lora_target_modules"] == ["linear_qkv", "linear_proj"]
    assert (keys["megatron_training.lora_r"], keys["megatron_training.lora_alpha"]) == (4, 8)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": "seven"}, r"seed .*'seven'.*\(seed of GRPOConfig\)"),
        ({"learning_rate": "fast"}, "learning_rate is 'fast', but must be a number"),
        ({"lr_scheduler_type": "polynomial"}, "lr_scheduler_type polynomial: not available"),
        ({"per_device_train_batch_size": 6}, "6 completions of a rollout are not whole groups of 8"),
        ({"keys": {"rl_config.clip_ratoi": 1}}, "clip_ratoi.* is not a known key"),
        ({"optim": "adafactor"}, "unexpected keyword argument 'optim'"),
        ({"reward_weights": [1.0, 2.0]}, "reward_weights: 2 weights for 1 reward functions"),
    ],
)
def test_a_wrong_argument_is_named(change: dict[str, Any], message: str, tiny_model: Path, tmp_path: Path) -> None:
    with pytest.raises((ConfigError, ValueError, TypeError), match=message):
        args = GRPOConfig(output_dir=str(tmp_path / "out"), **{"max_completion_length": 8, **change})
        GRPOTrainer(tiny_model, digits, args, train_dataset=ROWS)


def test_arguments_of_another_trainer_are_refused(tiny_model: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="args of SFTTrainer are a GRPOConfig, but must be a SFTConfig"):
        SFTTrainer(tiny_model, GRPOConfig(output_dir=str(tmp_path)), train_dataset=PAIRS)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="model is a int; give a folder"):
        SFTTrainer(3, SFTConfig(output_dir=str(tmp_path)), train_dataset=PAIRS)  # type: ignore[arg-type]


def test_a_model_of_the_program_is_saved_with_its_tokenizer(tiny_model: Path, tmp_path: Path) -> None:
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_model)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny_model)
    args = SFTConfig(output_dir=str(tmp_path / "out"), max_length=64)
    rows = [{"prompt": "a", "completion": "b"}]
    keys = written(SFTTrainer(model, args, train_dataset=rows, processing_class=tokenizer))
    folder = tmp_path / "out/model"
    assert keys["actor_config.pretrained_checkpoint"] == keys["megatron_training.tokenizer_name_or_path"] == str(folder)
    again = transformers.AutoModelForCausalLM.from_pretrained(folder).state_dict()
    assert all(tensor.equal(again[name]) for name, tensor in model.state_dict().items())
    model.config.name_or_path = model.name_or_path = ""
    with pytest.raises(ValueError, match="model is an object without a tokenizer: give it as processing_class"):
        SFTTrainer(model, args, train_dataset=rows)


def test_what_needs_a_trained_model_says_so(tiny_model: Path, tmp_path: Path) -> None:
    args = SFTConfig(output_dir=str(tmp_path / "out"), max_length=64)
    trainer = SFTTrainer(tiny_model, args, train_dataset=[{"prompt": "a", "completion": "b"}])
    with pytest.raises(ValueError, match="has no trained model: call train first"):
        trainer.save_model()
    with pytest.raises(ValueError, match="there is nothing to evaluate on"):
        trainer.evaluate()
    with pytest.raises(ValueError, match="has no checkpoint"):
        trainer.train(resume_from_checkpoint=True)
    (tmp_path / "out/checkpoints/iter_0000002").mkdir(parents=True)
    with pytest.raises(ValueError, match="has checkpoints of an earlier run"):
        trainer.train(resume_from_checkpoint=False)


def test_a_command_in_float32_has_an_engine_in_float32(tiny_model: Path) -> None:
    command = f"trl grpo --model_name_or_path {shlex.quote(str(tiny_model))} --dataset_name rows.jsonl --bf16 false"
    command += " --reward_funcs module:digits --max_completion_length 8 --vllm_max_model_length 120"
    tree = import_command(trl.PROJECT, command, ImportSettings(devices=1)).tree
    assert tree["megatron_training"]["bf16"] is False and tree["generate_config"]["dtype"] == "float32"
