"""`chat_template_kwargs`: every rendering of a run has them, and what a template does not read is refused."""

import json

import pytest
from byte_tokenizer import build_tokenizer

from mindspeed_rl.cli.preprocess import main
from mindspeed_rl.data.conversation import Conversation, assistant, user
from mindspeed_rl.data.preprocess_config import PreprocessConfig
from mindspeed_rl.data.prompts import PromptSettings, open_prompts
from mindspeed_rl.data.templates import choose_thinking, load_template
from mindspeed_rl.data.turns import ChatTurns
from mindspeed_rl.inference.prompt_format import PromptFormat

CHAT = (
    "{% if effort %}<|im_start|>system\nEffort: {{ effort }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% if enable_thinking is false %}<off>{% endif %}{% endif %}"
)
SYSTEM = "<|im_start|>system\nEffort: low<|im_end|>\n"
PROMPT = "<|im_start|>user\nQ<|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture
def tokenizer():
    built = build_tokenizer(eos_token="<|im_end|>")
    built.chat_template = CHAT
    return built


def test_prompts_turns_and_answers_have_the_arguments(tokenizer, tmp_path):
    arguments = {"effort": "low", "enable_thinking": False}
    expected = SYSTEM + PROMPT + "<off>"
    template = load_template("hf", tokenizer, arguments=arguments)
    thinking = choose_thinking(None, arguments)
    turns = ChatTurns(template, tokenizer, thinking=thinking)
    assert tokenizer.decode(turns.render([{"role": "user", "content": "Q"}])) == expected
    (ids,) = PromptFormat(tokenizer, "hf", arguments=arguments).encode([Conversation([user("Q")])])
    assert tokenizer.decode(ids) == expected
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "Q", "labels": "1"}\n')
    settings = PromptSettings(prompt_type="hf", enable_thinking=thinking, chat_template_kwargs=arguments)
    prompts = open_prompts(path, tokenizer, max_prompt_length=200, settings=settings)
    assert tokenizer.decode(prompts[0]["prompt_ids"]) == expected
    text = "".join(part for turn in template.render(Conversation([user("Q"), assistant("A")])).turns for part in turn.source)
    assert text == SYSTEM + PROMPT + "\n"


def test_preprocess_has_them_as_an_option_and_in_its_files(tokenizer, tmp_path, capsys):
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    (tmp_path / "rows.jsonl").write_text(json.dumps({"messages": [user_row("Q"), {"role": "assistant", "content": "A"}]}))
    words = ["--input", tmp_path / "rows.jsonl", "--output-prefix", tmp_path / "out", "--prompt-type", "hf"]
    words += ["--tokenizer-name-or-path", tmp_path / "tokenizer", "--handler-name", "OpenAIInstructionHandler"]
    assert main([*map(str, words), "--chat-template-kwargs", '{"effort": "low"}']) == 0
    assert f"{SYSTEM}{PROMPT}⟦A<|im_end|>⟧" in capsys.readouterr().out
    assert main([*map(str, words), "--chat-template-kwargs", '{"efort": "low"}']) == 2
    assert "chat_template_kwargs has 'efort', which the tokenizer's chat template does not read" in capsys.readouterr().err


def user_row(text):
    return {"role": "user", "content": text}


@pytest.mark.parametrize(
    ("name", "arguments", "problem"),
    [
        ("hf", {"efort": 1}, "'efort', which the tokenizer's chat template does not read"),
        ("hf", {"messages": []}, "'messages', which is set for each conversation"),
        ("hf", {"add_generation_prompt": True}, "which is set for each conversation"),
        ("qwen3", {"effort": "low"}, "'effort', but prompt_type='qwen3' reads only enable_thinking"),
    ],
)
def test_arguments_that_would_have_no_effect_are_refused(tokenizer, name, arguments, problem):
    with pytest.raises(ValueError, match=problem):
        load_template(name, tokenizer, arguments=arguments)


def test_the_thinking_mode_is_one_by_either_name():
    assert [choose_thinking(value, {}) for value in (None, True, False, "none", "true")] == [
        "none", "true", "false", "none", "true"
    ]  # fmt: skip
    assert choose_thinking(None, {"enable_thinking": False}) == choose_thinking("none", {"enable_thinking": False}) == "false"
    assert choose_thinking(True, {"enable_thinking": True}) == "true"
    with pytest.raises(ValueError, match="enable_thinking is true, but chat_template_kwargs.enable_thinking is false"):
        choose_thinking(True, {"enable_thinking": False})
    with pytest.raises(ValueError, match="must be true or false"):
        choose_thinking(None, {"enable_thinking": "off"})
    config = PreprocessConfig("x", "y", tokenizer_name_or_path="t", chat_template_kwargs={"enable_thinking": True})
    assert config.enable_thinking == "true"
