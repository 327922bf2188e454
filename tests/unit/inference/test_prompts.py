"""Prompts and end tokens."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
from tokenizers import processors
from transformers import PreTrainedTokenizerFast

from mindspeed_rl.data.conversation import Conversation, assistant, user
from mindspeed_rl.inference.prompt_format import PromptFormat, choose_template

TURNS = Conversation([user("2+2?"), assistant("4"), user("3+3?")], system="Be short.")


def test_the_tokenizers_own_template_writes_the_prompt_that_transformers_writes(tokenizer: PreTrainedTokenizerFast) -> None:
    messages = [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": "2+2?"},
        {"role": "assistant", "content": "4"},
        {"role": "user", "content": "3+3?"},
    ]
    expected = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    (ids,) = PromptFormat(tokenizer, "hf").encode([TURNS])
    assert tokenizer.decode(ids) == expected


def test_a_named_template_writes_its_turns(tokenizer: PreTrainedTokenizerFast) -> None:
    (ids,) = PromptFormat(tokenizer, "qwen").encode([TURNS])
    assert tokenizer.decode(ids) == (
        "<|im_start|>system\nBe short.<|im_end|>\n<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n4<|im_end|>\n"
        "<|im_start|>user\n3+3?<|im_end|>\n<|im_start|>assistant\n"
    )


def test_plain_text_is_continued_as_the_tokenizer_encodes_it(tokenizer: PreTrainedTokenizerFast) -> None:
    plain = PromptFormat(tokenizer, None)
    assert plain.encode([Conversation([user("once upon")])]) == [tokenizer("once upon")["input_ids"]]
    with pytest.raises(ValueError, match="need a chat template: --prompt-type"):
        plain.encode([TURNS])


def test_an_end_token_that_the_tokenizer_appends_does_not_end_the_prompt(tokenizer: PreTrainedTokenizerFast) -> None:
    ends, eos = copy.deepcopy(tokenizer), tokenizer.eos_token
    expected = tokenizer("once upon")["input_ids"]
    ends.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=f"$A {eos}", pair=f"$A $B {eos}", special_tokens=[(eos, tokenizer.eos_token_id)]
    )
    assert ends("once upon")["input_ids"] == [*expected, tokenizer.eos_token_id]
    for text, right in (("once upon", expected), (f"once upon{eos}", [*expected, tokenizer.eos_token_id])):
        assert PromptFormat(ends, None).encode([Conversation([user(text)])]) == [right]


def test_answers_end_at_every_end_token_that_anybody_names(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    def ids(*names: str) -> tuple[int, ...]:
        return tuple(sorted(tokenizer.convert_tokens_to_ids(list(names))))

    assert PromptFormat(tokenizer, None).stop_token_ids == ids("<|im_end|>")
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": list(ids("</s>", "<|im_end|>"))}))
    prompt_format = PromptFormat(tokenizer, None, hf_folder=tmp_path, end_tokens=["<|eot_id|>"])
    assert prompt_format.stop_token_ids == ids("<|im_end|>", "</s>", "<|eot_id|>")
    with pytest.raises(ValueError, match="<nowhere>"):
        PromptFormat(tokenizer, None, end_tokens=["<nowhere>"])


def test_end_tokens_may_be_ids_of_the_vocabulary(tokenizer: PreTrainedTokenizerFast) -> None:
    assert {40, 41} < set(PromptFormat(tokenizer, None, end_ids=[41, 40]).stop_token_ids)
    with pytest.raises(ValueError, match=f"--stop-token-ids -1 {len(tokenizer)}: the tokenizer's ids are from 0 to"):
        PromptFormat(tokenizer, None, end_ids=[-1, 5, len(tokenizer)])


def test_a_text_without_tokens_is_no_prompt(tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(ValueError, match="prompt 2 is empty"):
        PromptFormat(tokenizer, None).encode([Conversation([user("a")]), Conversation([user("")])])


def test_a_prompt_that_opens_a_thought_is_recognised(tokenizer: PreTrainedTokenizerFast) -> None:
    reasoning = PromptFormat(tokenizer, "qwen3")
    assert reasoning.thought_marks == ("<think>", "</think>")
    assert reasoning.opens_thought(tokenizer("assistant\n<think>\n")["input_ids"])
    assert not reasoning.opens_thought(tokenizer("<think>\n\n</think>\n\n")["input_ids"])


def test_options_name_one_template(tokenizer: PreTrainedTokenizerFast) -> None:
    assert choose_template(tokenizer, None, False) is None
    assert choose_template(tokenizer, "qwen", False) == "qwen"
    assert choose_template(tokenizer, None, True) == "hf"
    with pytest.raises(ValueError, match="exclude each other"):
        choose_template(tokenizer, "qwen", True)
    with pytest.raises(ValueError, match="needs a chat template"):
        PromptFormat(tokenizer, None, thinking="true")
