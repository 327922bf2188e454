# ruff: noqa: E402  (the folders must be on the path first)
"""The byte tokenizer of tests/unit/data and the tiny models of tests/unit/models serve here too."""

from __future__ import annotations

import sys
from pathlib import Path

for folder in ("data", "models"):
    sys.path.append(str(Path(__file__).parents[1] / folder))

import pytest
from byte_tokenizer import TEST_DATA, build_tokenizer
from scripted_engine import ScriptedEngine
from transformers import PreTrainedTokenizerFast


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte; <|im_end|> ends, and the chat template is Qwen2.5's."""
    built = build_tokenizer(eos_token="<|im_end|>")
    built.chat_template = (TEST_DATA / "chat_templates" / "qwen25.jinja").read_text(encoding="utf-8")
    return built


@pytest.fixture
def engine(tokenizer: PreTrainedTokenizerFast) -> ScriptedEngine:
    """An engine whose answers the test writes down."""
    return ScriptedEngine(tokenizer)
