"""Programs that call a trainer of TRL: what a reader of the file would write as the command, and what only a run knows."""

from __future__ import annotations

from pathlib import Path

import pytest

from mindspeed_rl.config import ConfigError
from mindspeed_rl.importers.command import PROJECTS
from mindspeed_rl.importers.importer import import_command
from mindspeed_rl.importers.result import Import, ImportSettings
from mindspeed_rl.rewards import REWARDS

GRPO = '''
import os
from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer
from trl.rewards import accuracy_reward

raise SystemExit("a program that is imported or run")
MODEL = "Qwen/Qwen3-4B"
GROUP = 8

def length_reward(completions, answer, **kwargs):
    return [float(len(text)) + len(kwargs["level"][0]) for text in completions]

def main():
    dataset = load_dataset("owner/name", split="train").shuffle(seed=1)
    config = GRPOConfig(
        output_dir=f"out/{MODEL}", num_generations=GROUP, per_device_train_batch_size=GROUP // 2,
        gradient_accumulation_steps=4, learning_rate=float(os.environ.get("LR", "2e-6")), max_steps=100, loss_type="grpo",
        max_completion_length=2**10, beta=0.04,
    )
    config.temperature = 0.9
    trainer = GRPOTrainer(model=MODEL, reward_funcs=[length_reward, accuracy_reward], args=config, train_dataset=dataset)
    trainer.train()

if __name__ == "__main__":
    main()
'''
SFT = '''
from datasets import load_dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer

model = AutoModelForCausalLM.from_pretrained("m", torch_dtype="bfloat16")
tokenizer = AutoTokenizer.from_pretrained("m")
tokenizer.pad_token = tokenizer.eos_token
trainer = SFTTrainer(
    model, args=SFTConfig(max_length=512, completion_only_loss=True, max_steps=10), processing_class=tokenizer,
    train_dataset=load_dataset("json", data_files="rows.jsonl", split="train"),
    peft_config=LoraConfig(task_type="CAUSAL_LM"),
)
'''


def take(folder: Path, text: str, name: str = "mine.py", command: str = "{}", **variables: str) -> Import:
    path = folder / name
    path.write_text(text)
    settings = ImportSettings(devices=8, rewards=REWARDS, variables=variables, folder=folder)
    return import_command(PROJECTS["trl"], command.format(path), settings)


def refuse(folder: Path, text: str, **variables: str) -> str:
    with pytest.raises(ConfigError) as caught:
        take(folder, text, **variables)
    return str(caught.value)


@pytest.mark.parametrize(
    ("before", "argument", "after"),
    [
        ("cbs = []\ncbs.append(Stop())", "callbacks=cbs", ""),
        ("cbs = []\ncbs.extend([Stop()])", "callbacks=cbs", ""),
        ("cbs = []\ncbs += [Stop()]", "callbacks=cbs", ""),
        ("cbs = []\nif model:\n    cbs += [Stop()]", "callbacks=cbs", ""),
        ("cbs = []\ncbs[:] = [Stop()]", "callbacks=cbs", ""),
        ("cbs = []\nfill(cbs)", "callbacks=cbs", ""),
        ("", "", "trainer.add_callback(callback=Stop())"),
        ("", "", "trainer.callback_handler.callbacks.append(Stop())"),
        ("", "", "trainer.callback_handler.callbacks.insert(0, Stop())"),
        ("class WandbCallback:\n    pass", "callbacks=[WandbCallback()]", ""),
        ("from mine import WandbCallback", "callbacks=[WandbCallback()]", ""),
        ("from transformers import EarlyStoppingCallback as PrinterCallback", "callbacks=[PrinterCallback()]", ""),
        ("WandbCallback = Stop", "callbacks=[WandbCallback()]", ""),
    ],
)
def test_a_callback_that_may_end_the_training_is_named(tmp_path: Path, before: str, argument: str, after: str) -> None:
    given = f"    {argument}, peft_config" if argument else "    peft_config"
    text = SFT.replace("trainer = ", f"{before}\ntrainer = ").replace("    peft_config", given)
    assert "may end the training or change weights" in refuse(tmp_path, f"{text}\n{after}\n")


def test_callbacks_that_only_show_are_left_out(tmp_path: Path) -> None:
    before = "from transformers import ProgressCallback\ncbs = [ProgressCallback]\ncbs.append(ProgressCallback())"
    text = SFT.replace("trainer = ", f"{before}\ntrainer = ").replace("    peft_config", "    callbacks=cbs, peft_config")
    assert take(tmp_path, f"{text}\ntrainer.add_callback(ProgressCallback)\n").tree == take(tmp_path, SFT).tree


def test_a_value_that_code_multiplies_is_computed_or_asked_for(tmp_path: Path) -> None:
    text = GRPO.replace("    config.temperature = 0.9", "    config.temperature = 0.9\n    config.temperature *= 2 / 3")
    assert take(tmp_path, text).get("generate_config.sampling_config.temperature") == pytest.approx(0.6)
    text = GRPO.replace("    config.temperature = 0.9", "    config.learning_rate *= 2")
    assert "write --set learning_rate=VALUE" in refuse(tmp_path, text)
    assert "is set in a branch or a loop" in refuse(tmp_path, text.replace("config.learning", "if MODEL: config.learning"))


def test_a_program_is_the_command_with_the_same_values(tmp_path: Path) -> None:
    run = take(tmp_path, GRPO)
    command = (
        "accelerate launch --num_processes 8 trl/scripts/grpo.py --model_name_or_path Qwen/Qwen3-4B --dataset_name owner/name "
        "--output_dir out/Qwen/Qwen3-4B --num_generations 8 --per_device_train_batch_size 4 --gradient_accumulation_steps 4 "
        "--learning_rate 2e-6 --max_steps 100 --loss_type grpo --max_completion_length 1024 --beta 0.04 --temperature 0.9 "
        "--reward_funcs accuracy_reward --dataset_train_split train"
    )
    there = import_command(PROJECTS["trl"], command, ImportSettings(rewards=REWARDS)).tree
    functions = ["mine:length_reward", "trl_accuracy"]
    assert run.tree["rl_config"] == {**there["rl_config"], "reward_funcs": functions, "reward_weights": [1.0, 1.0]}
    columns = {"dataset_additional_keys": ["solution", "answer", "level"]}
    assert run.tree["megatron_training"] == {**there["megatron_training"], **columns}
    assert run.tree["generate_config"] == there["generate_config"]


def test_values_of_the_user_take_the_place_of_those_that_only_a_run_knows(tmp_path: Path) -> None:
    assert take(tmp_path, GRPO, LR="5e-6").get("megatron_training.lr") == 5e-6
    unknown = GRPO.replace("GROUP = 8", "GROUP = pick()")
    assert "num_generations is pick(), which only a run knows; write --set num_generations=VALUE" in refuse(tmp_path, unknown)
    run = take(tmp_path, unknown, num_generations="8", per_device_train_batch_size="4")
    assert run.tree == take(tmp_path, GRPO).tree


def test_callbacks_that_show_are_left_out_and_the_first_argument_is_the_folder(tmp_path: Path) -> None:
    shown = GRPO.replace("    trainer.train()", "    if GROUP:\n        c = LogCompletionsCallback(trainer)\n        "
                         "trainer.add_callback(c)\n    trainer.train()").replace("output_dir=", "")  # fmt: skip
    assert take(tmp_path, shown).tree == take(tmp_path, GRPO).tree


def test_adapters_of_peft_have_its_own_defaults(tmp_path: Path) -> None:
    training = take(tmp_path, SFT).tree["megatron_training"]
    # LoraConfig: r 8, lora_alpha 8, no dropout, q_proj and v_proj of these models; trl's command line has 16, 32 and 0.05
    assert (training["lora_r"], training["lora_alpha"], training["lora_dropout"]) == (8, 8, 0.0)
    assert training["lora_target_modules"] == ["linear_qkv"]
    assert "rows.jsonl" in str(take(tmp_path, SFT).translated)


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        ('dataset = load_dataset("owner/name", split="train").shuffle(seed=1)',
         'dataset = load_dataset("owner/name", split="train")\n    dataset = dataset.map(str)',
         r"the rows are changed by .map \(line 16\): write them to a file"),
        ("    config.temperature = 0.9", "    if GROUP > 4:\n        config.temperature = 0.9",
         "config.temperature is set in a branch or a loop; write --set temperature=VALUE"),
        ('MODEL = "Qwen/Qwen3-4B"', 'MODEL = "a"\nif os.name:\n    MODEL = "b"', "model is MODEL, which a branch, a loop or"),
        ("    trainer.train()", "    trainer.args.beta = 0.5\n    trainer.train()", "trainer.args.beta is set by code"),
        ("train_dataset=dataset)", "train_dataset=dataset, callbacks=[EarlyStoppingCallback(3)])",
         "the callback EarlyStoppingCallback may end the training or change weights"),
        ("    trainer.train()", "    trainer.add_callback(Mine())\n    trainer.train()", "the callback Mine may end"),
        ('GRPOConfig(\n        output_dir=', 'GRPOConfig(\n        "x", True, run_name=', "write the arguments of GRPOConfig"),
        ("    trainer.train()", "    setattr(config, 'beta', 0.5)\n    trainer.train()", "is set by code"),
        ("beta=0.04", "beta=0.04, **extra()", r"\*\* extra\(\) cannot be read"),
        ("train_dataset=dataset)", "train_dataset=dataset, rollout_func=f)", "rollout_func of the trainer is code"),
        ("return [float(len(text))", 'return [float(len(text[0]["content"]))', "length_reward reads completions as messages"),
        ("(completions, answer,", "(completions, trainer_state,", "reads trainer_state, which is not available"),
        ('if __name__ == "__main__":\n    main()', "GRPOTrainer(model=MODEL)", "several trainers in lines"),
        ("model=MODEL,", "model=build(),", "the model is made by build"),
        ("from trl import GRPOConfig, GRPOTrainer", "from trl import GRPOConfig\nfrom mine import GRPOTrainer",
         "GRPOTrainer does not come from trl"),
        ("from trl import GRPOConfig, GRPOTrainer", "from trl import GRPOTrainer\nclass GRPOConfig: pass",
         "GRPOConfig does not come from trl"),
        ("from trl import GRPOConfig, GRPOTrainer", "from trl import GRPOConfig\nfrom trl.experimental.a import GRPOTrainer",
         "GRPOTrainer does not come from trl"),
        ("config = GRPOConfig(", "config = TrainingArguments(", "write them as GRPOConfig"),
        ("from datasets import", "from mine import", "load_dataset does not come from datasets"),
        ("GROUP = 8", "GROUP = 8\ndef more():\n    global GROUP\n    GROUP = 16", "num_generations is GROUP"),
        ("GROUP = 8", 'GROUP = 8\nos.environ["LR"] = pick()', "learning_rate is pick"),
    ],
)  # fmt: skip
def test_what_only_a_run_has_is_named_with_its_line(tmp_path: Path, old: str, new: str, sentence: str) -> None:
    assert old in GRPO
    with pytest.raises(ConfigError, match=sentence):
        take(tmp_path, GRPO.replace(old, new))


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        ('AutoTokenizer.from_pretrained("m")', 'AutoTokenizer.from_pretrained("other")', "and not the model's"),
        ("tokenizer.pad_token = tokenizer.eos_token", "tokenizer.chat_template = 'x'", "chat_template is set by code"),
        ('torch_dtype="bfloat16"', "quantization_config=q", "quantization_config of from_pretrained"),
        ('task_type="CAUSAL_LM"', 'init_lora_weights="pissa"', "init_lora_weights of LoraConfig"),
        ("trainer = ", "for p in f(model):\n    p.requires_grad = False\ntrainer = ", "p.requires_grad is set by code"),
    ],
)
def test_a_changed_model_or_tokenizer_is_named(tmp_path: Path, old: str, new: str, sentence: str) -> None:
    assert old in SFT
    assert sentence in refuse(tmp_path, SFT.replace(old, new))


def test_a_function_in_a_program_without_a_guard_would_start_it(tmp_path: Path) -> None:
    text = GRPO.replace("def main():\n", "").replace("\n    ", "\n").replace('if __name__ == "__main__":\nmain()', "")
    text = text.replace("\nreturn [float", "\n    return [float")
    assert "importing it would start the training: move it to a module of its own" in refuse(tmp_path, text)


def test_a_program_that_parses_a_command_has_the_options_of_the_command(tmp_path: Path) -> None:
    text = '''
from datasets import load_dataset
from trl import ModelConfig, ScriptArguments, SFTConfig, SFTTrainer, TrlParser
if __name__ == "__main__":
    parser = TrlParser((ScriptArguments, SFTConfig, ModelConfig))
    script_args, training_args, model_args = parser.parse_args_and_config()
    training_args.completion_only_loss = True
    dataset = load_dataset(script_args.dataset_name, name=script_args.dataset_config)
    trainer = SFTTrainer(model=model_args.model_name_or_path, args=training_args,
                         train_dataset=dataset[script_args.dataset_train_split])
'''
    options = "--model_name_or_path m --dataset_name d.jsonl --max_length 512 --max_steps 5"
    command = f"accelerate launch --num_processes 4 {{}} {options}"
    path = tmp_path / "my_sft.py"
    path.write_text(text)
    run = import_command(PROJECTS["trl"], command.format(path), ImportSettings(rewards=REWARDS, folder=tmp_path))
    training = run.tree["megatron_training"]
    assert (training["seq_length"], training["num_npus"], training["train_iters"]) == (512, 4, 5)


MADE = (
    "reward_funcs=[length_reward, get_soft_overlong_punishment(2048, soft_punish_cache=GROUP * 32), "
    "get_cosine_scaled_reward(max_len=1000, max_value_wrong=-0.25), get_repetition_penalty_reward(ngram_size=4), right]"
)


def use_rewards(rewards: str) -> str:
    names = "accuracy_reward as right, get_cosine_scaled_reward, get_repetition_penalty_reward, get_soft_overlong_punishment"
    text = GRPO.replace("reward_funcs=[length_reward, accuracy_reward]", rewards)
    return text.replace("import accuracy_reward", f"import {names}")


def test_rewards_that_functions_make_have_their_numbers(tmp_path: Path) -> None:
    rewards = take(tmp_path, use_rewards(MADE)).tree["rl_config"]
    functions = ["mine:length_reward", "soft_overlong", "trl_cosine", "trl_repetition", "trl_accuracy"]
    assert rewards["reward_funcs"] == functions
    numbers = {
        "soft_max_length": 2048, "soft_cache_length": 256, "cosine_max_len": 1000, "repetition_n_grams": 4,
        # TRL names its bounds by their size, the keys here by the length of the response
        "cosine_min_len_value_wrong": -1.0, "cosine_max_len_value_wrong": -0.25,
        "cosine_min_len_value_correct": 1.0, "cosine_max_len_value_correct": 0.5, "repetition_max_penalty": -1.0,
    }  # fmt: skip
    assert {key: rewards[key] for key in numbers} == numbers


def test_the_weight_of_a_reward_model_follows_it_to_the_front(tmp_path: Path) -> None:
    text = GRPO.replace("[length_reward, accuracy_reward]", '[length_reward, "rm", accuracy_reward]')
    text = text.replace("beta=0.04", "beta=0.04, reward_weights=[0.5, 0.25, 2.0]")
    rewards = take(tmp_path, text).tree["rl_config"]
    assert (rewards["reward_weights"], rewards["reward_model_weight"]) == ([0.5, 2.0], 0.25)


@pytest.mark.parametrize(
    ("rewards", "sentence"),
    [
        ("reward_funcs=[get_soft_overlong_punishment(2048, 0)]", "soft_punish_cache of get_soft_overlong_punishment is 0; it"),
        ("reward_funcs=[get_cosine_scaled_reward()]", "max_len of get_cosine_scaled_reward is None; it must be"),
        ("reward_funcs=[get_cosine_scaled_reward(pick())]", "max_len of get_cosine_scaled_reward is pick(), which only a run"),
        ("reward_funcs=[get_cosine_scaled_reward(9), get_cosine_scaled_reward(8)]", "twice with other numbers"),
        ('reward_funcs=["a", "b"]', "several reward models; one is read"),
        ("reward_funcs=[get_repetition_penalty_reward(size=3)]", "size of get_repetition_penalty_reward is not available"),
    ],
)
def test_a_reward_without_a_counterpart_is_named(tmp_path: Path, rewards: str, sentence: str) -> None:
    assert sentence in refuse(tmp_path, use_rewards(rewards))


def test_a_power_that_no_machine_computes_is_a_value_that_cannot_be_read(tmp_path: Path) -> None:
    text = GRPO.replace("GROUP = 8", "GROUP = 9**9**9")
    assert "num_generations is 9 ** 9 ** 9, which only a run knows" in refuse(tmp_path, text)


def test_a_function_inside_another_cannot_be_imported(tmp_path: Path) -> None:
    inner = "def main():\n    def inner(completions, **kwargs):\n        return [0.0 for _ in completions]\n"
    text = GRPO.replace("def main():\n", inner).replace("[length_reward, ", "[inner, ")
    assert "inner is defined inside a function, a class or a branch" in refuse(tmp_path, text)


def test_functions_of_a_module_are_taken_with_their_columns(tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "rewards.py").write_text(
        "def polite(completions, tone, **kwargs):\n    return [0.0 for _ in completions]\n"
        "def chat(completions, **kwargs):\n    return [len(text[0]['content']) for text in completions]\n"
    )
    command = "trl grpo --model_name_or_path m --dataset_name d.jsonl --reward_funcs {} --num_generations 8 --max_steps 10"
    settings = ImportSettings(devices=8, rewards=REWARDS, folder=tmp_path)
    run = import_command(PROJECTS["trl"], command.format("own.rewards.polite trl.rewards.think_format_reward"), settings)
    assert run.get("rl_config.reward_funcs") == ["own.rewards:polite", "trl_think_format"]
    assert run.get("megatron_training.dataset_additional_keys") == ["tone"]
    refused = {"own.rewards.chat": "reads completions as messages", "own.rewards.none": "defines no function none"}
    for name, sentence in refused.items():
        with pytest.raises(ConfigError, match=sentence):
            import_command(PROJECTS["trl"], command.format(name), settings)
