"""Distillation on a mixture of the student's responses and the data's: the choice of each iteration, and the data's tokens."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from data.byte_tokenizer import build_tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from mindspeed_rl.config import load_run_config
from mindspeed_rl.data import handler_class
from mindspeed_rl.data.handlers.base import HandlerSettings
from mindspeed_rl.data.prompts import RESPONSE_IDS, PromptSettings, open_prompts
from mindspeed_rl.run import Run
from mindspeed_rl.run.resolve import resolve
from mindspeed_rl.trainers.prompt_loader import load_prompts
from mindspeed_rl.trainers.schedule import Schedule

CHAT = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
GKD = (
    "{enabled: true, teacher_models: [./teacher], loss_mode: jsd_topk, use_task_rewards: false, "
    "on_policy_fraction: 0.5, supervised_coef: 0.25}"
)


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerBase:
    built = build_tokenizer(eos_token="<|im_end|>")
    built.chat_template = CHAT
    return built


def write(folder: Path, *rows: dict[str, Any]) -> Path:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def run_of(folder: Path, *keys: str) -> Run:
    changes = [f"run_dir={folder}", f"+rl_config.distillation={GKD}", "rl_config.init_kl_coef=0", *keys]
    return resolve(load_run_config("grpo_tiny_cpu", None, changes), platform="cpu")


@pytest.mark.parametrize(("mini_batch", "steps"), [(16, 1), (4, 4)])
def test_the_choice_is_the_one_of_ms_swift_for_the_seed_and_the_optimizer_step(
    tmp_path: Path, mini_batch: int, steps: int
) -> None:
    sizes = ["megatron_training.global_batch_size=16", "actor_config.micro_batch_size=8"]
    batch = [*sizes, f"rl_config.mini_batch_size={mini_batch}", "megatron_training.seed=7"]
    schedule = Schedule(run_of(tmp_path, *batch))
    made = [schedule.samples_responses(iteration) for iteration in range(200)]
    # its trainer: random.Random(seed + global_step).random() <= lmbda
    assert made == [random.Random(7 + steps * iteration).random() <= 0.5 for iteration in range(200)]
    assert 70 < sum(made) < 130


def test_responses_of_the_data_have_no_log_probs_of_an_engine_and_a_supervised_loss(tmp_path: Path) -> None:
    schedule = Schedule(run_of(tmp_path))
    for iteration in range(8):
        plan, is_sampled = schedule.update_plan(iteration, None), schedule.samples_responses(iteration)
        assert ("rollout_log_probs" in plan.columns) is is_sampled
        assert plan.supervised_coef == (0.0 if is_sampled else 0.25)
        assert {"teacher_log_probs", "teacher_ids"} < set(plan.columns)


@pytest.mark.parametrize("prompt_type", ["empty", "qwen", "qwen3", "hf"])
def test_prompt_and_response_are_the_tokens_that_supervised_tuning_trains(
    tokenizer: PreTrainedTokenizerBase, tmp_path: Path, prompt_type: str
) -> None:
    rows = [{"prompt": "1+1?", "labels": "2"}, {"prompt": "What is it?", "labels": "<think>\nhm\n</think>\n\nIt is so."}]
    settings = PromptSettings(prompt_type=prompt_type)
    prompts = open_prompts(write(tmp_path, *rows), tokenizer, max_prompt_length=512, settings=settings)
    prompts.add_responses("labels", tokenizer, settings, 200)
    supervised = handler_class("AlpacaStyleInstructionHandler")(
        HandlerSettings(tokenizer=tokenizer, template=settings.load_template(tokenizer), seq_length=1000)
    )
    alpaca = [{"instruction": row["prompt"], "input": "", "output": row["labels"]} for row in rows]
    for item, expected in zip(prompts, supervised.encode(list(enumerate(alpaca))).rows, strict=True):  # type: ignore[call-overload]
        response = item["columns"][RESPONSE_IDS]
        ids, labels = (list(expected.columns[name]) for name in ("input_ids", "labels"))
        last = max(index for index, label in enumerate(labels) if label != -100)
        # a text without a template ends with the end token, as the student's responses do
        end = [tokenizer.eos_token_id] if prompt_type == "empty" else []
        assert [*item["prompt_ids"], *response] == [*ids[: last + 1], *end]
        trained = [*(label for label in labels if label != -100), *end]
        assert list(response)[-len(trained) :] == trained and len(response) - len(trained) <= 20  # an empty thought


def test_the_last_of_messages_is_the_response_and_is_not_in_the_prompt(
    tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    turns = [("system", "S"), ("user", "1"), ("assistant", "a"), ("user", "2"), ("assistant", "b")]
    row = {"messages": [{"role": role, "content": text} for role, text in turns]}
    settings = PromptSettings(
        prompt_type="hf",
        handler_name="R1SharegptStyleInstructionHandler",
        map_keys={"messages": "messages", "response": "messages"},
    )
    keys = ("labels", "messages")
    prompts = open_prompts(
        write(tmp_path, row), tokenizer, max_prompt_length=512, dataset_additional_keys=keys, settings=settings
    )
    for column in keys:
        prompts.add_responses(column, tokenizer, settings, 100)
        item = prompts[0]
        response = item["columns"][RESPONSE_IDS]
        assert isinstance(response, tuple)
        assert tokenizer.decode(response) == "b<|im_end|>"
        full = tokenizer.apply_chat_template(row["messages"], tokenize=False)
        assert full == tokenizer.decode([*item["prompt_ids"], *response]) + "\n"


@pytest.mark.parametrize(
    ("row", "column", "sentence"),
    [
        ({"labels": "x" * 40}, "labels", r"with its prompt it has \d+ tokens, more than .*max_model_len \(70\)"),
        ({"labels": "2", "answer": "  "}, "answer", "row 1: column 'answer' is not a response of the data: it is empty"),
        ({"labels": "2", "answer": 3}, "answer", "it is 3"),
        ({"labels": "2", "answer": [{"role": "user", "content": "q"}]}, "answer", "the last message is not from the assistant"),
    ],
)
def test_a_row_without_a_usable_response_is_named(
    tokenizer: PreTrainedTokenizerBase, tmp_path: Path, row: dict[str, Any], column: str, sentence: str
) -> None:
    settings, path = PromptSettings(prompt_type="qwen"), write(tmp_path, {"prompt": "1+1?", **row})
    keys = tuple(row)
    prompts = open_prompts(path, tokenizer, max_prompt_length=512, dataset_additional_keys=keys, settings=settings)
    with pytest.raises(ValueError, match=sentence):
        prompts.add_responses(column, tokenizer, settings, 70)


def test_the_run_file_names_the_column(tiny_model: Path, tmp_path: Path) -> None:
    path = write(tmp_path, {"prompt": "1+1=", "labels": "2", "answer": "two"})
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    keys = ["megatron_training.dataset_additional_keys=[labels,answer]", "+rl_config.distillation.response_column=answer"]
    data = [f"megatron_training.data_path='{path}'", "megatron_training.eval_data_path=null"]
    (item,) = load_prompts(run_of(tmp_path, *keys, *data), tokenizer)[0]  # type: ignore[misc]
    expected = [*tokenizer("two", add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
    assert list(item["columns"][RESPONSE_IDS]) == expected
