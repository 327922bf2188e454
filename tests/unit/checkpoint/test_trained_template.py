"""Exported folders have the tokenizer, the end token and the chat template of the training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from mindspeed_rl.checkpoint.trained_template import TrainedTemplate, read_trained_prompt_type
from mindspeed_rl.config import MegatronConfig

OWN = "{% for m in messages %}{{ m.role + ': ' + m.content + eos_token }}{% endfor %}{{ 'assistant: ' }}"
WORDS = ["<|endoftext|>", "<|im_end|>", "<|im_start|>", "a", "Q", "A", "hi"]
TEMPLATE = {
    "name": "mine",
    "format_user": {"slots": ["Q {{content}} A "]},
    "format_assistant": {"slots": ["{{content}}", ["eos_token"]]},
    "stop_words": ["<|im_end|>"],
    "replace_eos": True,
}
QUESTIONS = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "a"}, {"role": "user", "content": "a"}]


def make_model(folder: Path, *, eos: str = "<|endoftext|>", chat_template: str | None = OWN) -> Path:
    folder.mkdir()
    words = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="a"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token=eos)
    tokenizer.chat_template = chat_template
    tokenizer.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen2", "eos_token_id": WORDS.index(eos)}))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": WORDS.index(eos)}))
    return folder


def export(tmp_path: Path, base: Path, **keys: Any) -> Path:
    (tmp_path / "templates.json").write_text(json.dumps([TEMPLATE]))
    config = MegatronConfig(**{"prompt_type_path": str(tmp_path / "templates.json"), **keys})
    made = tmp_path / "exported"
    made.mkdir()
    for path in base.iterdir():
        (made / path.name).write_bytes(path.read_bytes())
    TrainedTemplate.from_config(config, base).write(made)
    return made


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "mindspeed_rl.json"}


def read(folder: Path) -> tuple[str, str, Any]:
    """(end token, prompt of a conversation, ids at which generation stops)."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompt = tokenizer.apply_chat_template(QUESTIONS, tokenize=False, add_generation_prompt=True)
    return tokenizer.eos_token, prompt, json.loads((folder / "generation_config.json").read_text())["eos_token_id"]


def test_the_template_of_prompt_type_replaces_end_token_and_chat_template(tmp_path: Path) -> None:
    base = make_model(tmp_path / "base")
    assert read(base) == ("<|endoftext|>", "user: hi<|endoftext|>assistant: a<|endoftext|>user: a<|endoftext|>assistant: ", 0)
    assert read(export(tmp_path, base, prompt_type="mine")) == ("<|im_end|>", "Q hi A a<|im_end|>Q a A ", [1, 0])


def test_a_chat_template_in_the_settings_of_the_tokenizer_does_not_stay(tmp_path: Path) -> None:
    base = make_model(tmp_path / "base")
    (base / "chat_template.jinja").unlink(missing_ok=True)
    settings = json.loads((base / "tokenizer_config.json").read_text()) | {"chat_template": OWN}
    (base / "tokenizer_config.json").write_text(json.dumps(settings))
    made = export(tmp_path, base, prompt_type="mine")
    assert read(made)[1] == "Q hi A a<|im_end|>Q a A "
    assert "chat_template" not in json.loads((made / "tokenizer_config.json").read_text())


@pytest.mark.parametrize("prompt_type", [None, "hf"])
def test_the_models_own_template_stays_as_it_is(tmp_path: Path, prompt_type: str | None) -> None:
    base = make_model(tmp_path / "base")
    made = export(tmp_path, base, prompt_type=prompt_type, tokenizer_name_or_path=str(base))
    assert files_of(made) == files_of(base)


def test_a_template_that_writes_what_the_models_own_writes_changes_nothing(tmp_path: Path) -> None:
    by_role = "'Q ' + m.content + ' A ' if m.role == 'user' else m.content + eos_token"
    chatml = OWN.replace("m.role + ': ' + m.content + eos_token", by_role)
    base = make_model(tmp_path / "base", eos="<|im_end|>", chat_template=chatml.replace("{{ 'assistant: ' }}", ""))
    entry = {key: value for key, value in TEMPLATE.items() if key not in ("stop_words", "replace_eos")}
    (tmp_path / "same.json").write_text(json.dumps([entry | {"format_system": {"slots": ["{{content}}", ["eos_token"]]}}]))
    made = export(tmp_path, base, prompt_type="mine", prompt_type_path=str(tmp_path / "same.json"))
    assert files_of(made) == files_of(base)


def test_a_tokenizer_of_another_folder_is_exported_with_its_template_and_end_token(tmp_path: Path) -> None:
    base = make_model(tmp_path / "base")
    other = make_model(tmp_path / "instruct", eos="<|im_end|>", chat_template=OWN.replace("assistant: ", "bot: "))
    made = export(tmp_path, base, tokenizer_name_or_path=str(other))
    assert read(made) == ("<|im_end|>", "user: hi<|im_end|>assistant: a<|im_end|>user: a<|im_end|>bot: ", [1, 0])
    assert json.loads((made / "config.json").read_text()) == {"model_type": "qwen2", "eos_token_id": 1}


def test_an_adapter_has_tokenizer_and_settings_where_they_differ_from_the_bases(tmp_path: Path) -> None:
    base, (same, adapter) = make_model(tmp_path / "base"), (tmp_path / "same", tmp_path / "adapter")
    (tmp_path / "templates.json").write_text(json.dumps([TEMPLATE]))
    for folder, prompt_type in ((same, "hf"), (adapter, "mine")):
        folder.mkdir()
        config = MegatronConfig(prompt_type=prompt_type, prompt_type_path=str(tmp_path / "templates.json"))
        TrainedTemplate.from_config(config, base).write_beside_adapter(folder)
    assert files_of(same) == {} and read_trained_prompt_type(same) == "hf"
    assert read(adapter) == ("<|im_end|>", "Q hi A a<|im_end|>Q a A ", [1, 0])
    assert not (adapter / "config.json").exists()


@pytest.mark.parametrize(("prompt_type", "recorded"), [("mine", "hf"), ("hf", "hf"), ("empty", "empty"), (None, None)])
def test_an_export_records_how_the_training_rendered_prompts(
    tmp_path: Path, prompt_type: str | None, recorded: str | None
) -> None:
    path = str(tmp_path / "templates.json") if prompt_type == "mine" else ""
    made = export(tmp_path, make_model(tmp_path / "base"), prompt_type=prompt_type, prompt_type_path=path)
    assert read_trained_prompt_type(made) == recorded
    assert json.loads((made / "mindspeed_rl.json").read_text())["base_model"] == str(tmp_path / "base")
    (made / "mindspeed_rl.json").write_text('{"prompt_type": "qwen"}')
    with pytest.raises(ValueError, match="prompt_type is 'qwen', but must be hf or empty"):
        read_trained_prompt_type(made)
