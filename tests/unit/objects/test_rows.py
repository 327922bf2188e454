"""Rows of a program are a file of the run with the same values; what has no form in JSON is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch

from mindspeed_rl.objects.rows import find_prompt_columns, write_rows

ROWS: list[dict[str, Any]] = [{"prompt": "eins ü", "n": 1, "tags": ["a"]}, {"prompt": "zwei", "n": 2, "tags": []}]


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize(
    "make",
    [
        lambda rows: rows,
        tuple,
        iter,
        datasets.Dataset.from_list,
        lambda rows: datasets.Dataset.from_list(rows).to_iterable_dataset(),
    ],
    ids=["list", "tuple", "generator", "dataset", "stream"],
)
def test_every_form_of_a_dataset_has_the_same_rows(make: Any, tmp_path: Path) -> None:
    path = tmp_path / "data/rows.jsonl"
    assert write_rows(make(ROWS), path, "train_dataset") == str(path)
    assert read(path) == ROWS


def test_a_file_or_a_name_is_passed_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert write_rows("hf://owner/name", tmp_path / "rows.jsonl", "train_dataset") == "hf://owner/name"
    assert not (tmp_path / "rows.jsonl").exists()
    (tmp_path / "own.jsonl").write_text("{}\n")
    monkeypatch.chdir(tmp_path)
    assert write_rows("own.jsonl", tmp_path / "rows.jsonl", "train_dataset") == str(tmp_path / "own.jsonl")


def test_numbers_of_numpy_and_torch_are_plain(tmp_path: Path) -> None:
    rows = [{"prompt": "a", "n": np.int64(3), "x": np.arange(2), "t": torch.tensor([1.5])}]
    write_rows(rows, tmp_path / "rows.jsonl", "train_dataset")
    assert read(tmp_path / "rows.jsonl") == [{"prompt": "a", "n": 3, "x": [0, 1], "t": [1.5]}]


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        ([], "train_dataset has no rows"),
        ([{"prompt": "a"}, "b"], "train_dataset, row 2 is a str, not a dict of columns"),
        ([{"prompt": "a", "image": object()}], "train_dataset, row 1, column 'image': a object has no form in JSON"),
        ([{"prompt": "a", "x": float("nan")}], "train_dataset, row 1, column 'x'"),
        ({"train": []}, "train_dataset is a dict; give a list of dicts"),
        (7, "train_dataset is a int; give a list of dicts"),
    ],
)
def test_what_is_no_dataset_is_named(dataset: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        write_rows(dataset, tmp_path / "rows.jsonl", "train_dataset")
    assert not (tmp_path / "rows.jsonl").exists()


@pytest.mark.parametrize(
    ("row", "prompt", "answer", "others"),
    [
        ({"prompt": "a"}, "prompt", "", ()),
        ({"question": "a", "answer": "b"}, "question", "answer", ("answer",)),
        ({"prompt": [{"role": "user"}], "solution": "b", "level": 1}, "prompt", "solution", ("solution", "level")),
        ({"prompt": "a", "labels": "b", "source": "c"}, "prompt", "labels", ("source",)),
    ],
)
def test_columns_have_one_meaning(row: dict[str, Any], prompt: str, answer: str, others: tuple[str, ...]) -> None:
    columns = find_prompt_columns(row, "train_dataset")
    assert (columns.prompt, columns.answer, columns.others) == (prompt, answer, others)
    assert columns.has_messages == isinstance(row[prompt], list)


def test_rows_without_a_prompt_are_refused() -> None:
    with pytest.raises(ValueError, match="train_dataset has the columns text, id; one of prompt, question"):
        find_prompt_columns({"text": "a", "id": 1}, "train_dataset")
