"""Tokenizers, input files, and what the tests compare with."""

from __future__ import annotations

import json
import os
from collections.abc import Callable

os.environ["TOKENIZERS_PARALLELISM"] = "false"

import numpy as np
import pytest
from byte_tokenizer import TEST_DATA, Trained, build_tokenizer
from transformers import PreTrainedTokenizerFast


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    return build_tokenizer()


@pytest.fixture
def with_chat_template() -> Callable[..., PreTrainedTokenizerFast]:
    """Build a tokenizer with a chat template of tests/data/chat_templates."""

    def build(name: str, **special: str) -> PreTrainedTokenizerFast:
        built = build_tokenizer(**special)
        built.chat_template = (TEST_DATA / "chat_templates" / f"{name}.jinja").read_text(encoding="utf-8")
        return built

    return build


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("tokenizer")
    build_tokenizer().save_pretrained(folder)
    return str(folder)


@pytest.fixture
def chat_tokenizer_folder(tmp_path, with_chat_template) -> Callable[..., str]:
    def save(name: str, **special: str) -> str:
        folder = tmp_path / f"tokenizer-{name}"
        with_chat_template(name, **special).save_pretrained(folder)
        return str(folder)

    return save


@pytest.fixture
def expected() -> Callable[..., tuple[list[int], list[int]]]:
    """(input_ids, labels) of texts written in the test; `Trained` pieces have labels. Special tokens are found in the text."""
    plain = build_tokenizer()

    def build(*pieces: str) -> tuple[list[int], list[int]]:
        input_ids: list[int] = []
        labels: list[int] = []
        for piece in pieces:
            ids = plain(str(piece), add_special_tokens=False)["input_ids"]
            input_ids += ids
            labels += ids if isinstance(piece, Trained) else [-100] * len(ids)
        return input_ids, labels

    return build


@pytest.fixture
def write_jsonl(tmp_path) -> Callable[..., str]:
    def write(rows: list, name: str = "rows.jsonl") -> str:
        path = tmp_path / name
        path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
        return str(path)

    return write


@pytest.fixture
def read_columns() -> Callable[[str], dict[str, list[list[int]]]]:
    """Every column under a prefix as lists, read with megatron-core's IndexedDataset."""
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    def read(prefix: str) -> dict[str, list[list[int]]]:
        folder, name = os.path.split(prefix)
        columns = {}
        for file in sorted(os.listdir(folder)):
            if file.startswith(f"{name}_packed_") and file.endswith("_document.idx"):
                dataset = IndexedDataset(os.path.join(folder, file[:-4]))
                assert dataset.index.dtype == np.int32
                column = file.removeprefix(f"{name}_packed_").removesuffix("_document.idx")
                columns[column] = [dataset[k].tolist() for k in range(len(dataset))]
        return columns

    return read
