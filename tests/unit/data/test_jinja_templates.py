"""Exported chat templates: transformers writes with them what the package's renderer writes, text for text."""

from __future__ import annotations

import random
from typing import Any

import pytest
from jinja2 import TemplateError
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from mindspeed_rl.data import templates
from mindspeed_rl.data.conversation import Conversation, MalformedRowError, Message, user
from mindspeed_rl.data.jinja_templates import renders_alike, write_jinja
from mindspeed_rl.data.templates import Template, Thinking, Token

NAMES = [name for name in templates._list_template_names() if name != templates.HF_TEMPLATE]
#: texts with what a template's source may escape, and with marks of thoughts
TEXTS = (
    "2 + 3",
    '  a\'b "c" \\n\n{{ x }} {% if %}\n',
    "\u4f60\u597d \U0001f600",
    "<think>\nso\n</think>\n\nYes",
    "<think>a</think>b</think>c",
    "only</think>\n\nan end",
    "said <think>late</think>",
    "<tool_response>7</tool_response>",
    "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>done",
    "/nothink",
    "\n\nlines\n",
)


def build_tokenizer(chat_template: str | None = None) -> PreTrainedTokenizerFast:
    vocabulary = {"<s>": 0, "</s>": 1, "a": 2}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(vocabulary, unk_token="a")), bos_token="<s>", eos_token="</s>"
    )
    tokenizer.chat_template = chat_template
    return tokenizer


def render(template: Template, conversation: Conversation, thinking: Thinking, effort: str | None = None) -> str:
    """The renderer's text, with the tokenizer's names of its special tokens."""
    names = {"bos_token": "<s>", "eos_token": "</s>"}
    turns = template.render(conversation, thinking, effort=effort).turns
    parts = [part for turn in turns for part in (*turn.source, *turn.target)]
    return "".join(names.get(part.name, part.name) if isinstance(part, Token) else part for part in parts)


def random_conversation(generator: random.Random, can_think: bool) -> Conversation:
    messages: list[Message] = []
    for _ in range(generator.choice([1, 1, 2, 3, 4])):
        messages.append(user(generator.choice(TEXTS)))
        reasoning = generator.choice(["", "because\n", "\n x "]) if can_think else ""
        messages.append(Message("assistant", (generator.choice(TEXTS),), reasoning=reasoning))
    if generator.random() < 0.6:
        messages.pop()
    return Conversation(messages, system=generator.choice([None, "", "Be brief.", "\u4e2d 'x'"]))


def as_messages(conversation: Conversation) -> list[dict[str, Any]]:
    system = [] if conversation.system is None else [{"role": "system", "content": conversation.system}]
    return system + [
        {"role": message.role, "content": message.content}
        | ({"reasoning_content": message.reasoning} if message.reasoning else {})
        for message in conversation.messages
    ]


@pytest.mark.parametrize("name", NAMES)
def test_transformers_writes_what_the_renderer_writes(name: str) -> None:
    template = templates.load_template(name)
    assert isinstance(template, Template)
    generator, compared = random.Random(name), 0
    tokenizers = {default: build_tokenizer(write_jinja(template, default)) for default in ("none", "true", "false")}
    for _ in range(150):
        conversation = random_conversation(generator, template.can_think)
        thinking = generator.choice(["none", "true", "false"]) if template.can_think else "none"
        effort = generator.choice([None, *template.efforts])
        try:
            expected = render(template, conversation, thinking, effort)
        except MalformedRowError:  # a text and a key with different thoughts
            continue
        messages = as_messages(conversation)
        # by default, and where a request asks for it
        for default, asked in ((thinking, {}), ("none", {} if thinking == "none" else {"enable_thinking": thinking == "true"})):
            extra = asked | ({} if effort is None else {"reasoning_effort": effort})
            written = tokenizers[default].apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **extra)
            assert written == expected, (thinking, messages)
        compared += 1
    assert compared > 75


def test_what_the_template_refuses_is_refused_in_one_sentence() -> None:
    tokenizer = build_tokenizer(write_jinja(templates.load_template("qwen")))
    question, answer = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
    tool = {"type": "function", "function": {"name": "f", "description": "x", "parameters": {}}}
    with pytest.raises(TemplateError, match="trained without tools"):
        tokenizer.apply_chat_template([question], tools=[tool], tokenize=False)
    for messages in ([answer], [question, question], [question, {"role": "tool", "content": "7"}]):
        with pytest.raises(TemplateError, match="messages of user and assistant must alternate"):
            tokenizer.apply_chat_template(messages, tokenize=False)
    with pytest.raises(TemplateError, match="has texts only"):
        tokenizer.apply_chat_template([{"role": "user", "content": [{"type": "image"}]}], tokenize=False)


CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def test_a_tokenizers_own_template_is_told_from_another() -> None:
    own = build_tokenizer(CHATML)
    own.add_special_tokens({"eos_token": "<|im_end|>"})
    plain = {"slots": ["<|im_start|>user\n{{content}}<|im_end|>\n<|im_start|>assistant\n"]}
    entry = {"name": "x", "format_user": plain, "format_system": {"slots": ["<|im_start|>system\n{{content}}<|im_end|>\n"]}}
    same = Template(entry | {"format_separator": {"slots": ["\n"]}}, "here")
    assert renders_alike(same, own)
    # without the line end between turns, and with another default
    assert not renders_alike(Template(entry, "here"), own)
    assert not renders_alike(Template(entry | {"format_separator": {"slots": ["\n"]}, "default_system": "Hi."}, "here"), own)
    assert not renders_alike(same, build_tokenizer())
    refusing = build_tokenizer("{{ raise_exception('no system') if messages[0].role == 'system' }}" + CHATML)
    refusing.add_special_tokens({"eos_token": "<|im_end|>"})
    assert not renders_alike(same, refusing)
