"""Tokens of raw prompts that are kept: a later start reads the same prompts, and never those of other data or settings."""

from __future__ import annotations

import datetime
import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from byte_tokenizer import build_tokenizer

from mindspeed_rl.data import cache_folders, prompt_cache
from mindspeed_rl.data.prompts import PromptDataset, PromptSettings, open_prompts
from mindspeed_rl.data.tokenizer import load_tokenizer

SETTINGS = PromptSettings(map_keys={"prompt": "q", "query": "", "response": "a", "system": ""}, on_bad_row="skip")
#: a prompt that is left out, one that is cut, labels that are no text, columns of all kinds of JSON
ROWS: list[dict[str, Any]] = [
    {"q": "one", "a": "1", "more": {"deep": [1, 2.5, None, True, "x"], "of": {}}},
    {"q": " ", "a": "2", "more": 0},
    {"q": "three is long", "a": 3, "more": [[], "三"]},
    {"q": {"no": "text"}, "a": "4", "more": None},
    {"q": "five", "a": "5", "more": 1e-310},
]
Write = Callable[[list[dict[str, Any]]], str]


@pytest.fixture(autouse=True)
def small_data_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_cache, "SMALL_BYTES", 0)


def open_all(folder: str, data: str, cache: Path | None, settings: PromptSettings = SETTINGS, **more: Any) -> PromptDataset:
    options = {"max_prompt_length": 8, "long_prompts": "cut_left", "dataset_additional_keys": ["labels", "more"], **more}
    return open_prompts(data, load_tokenizer(folder), settings=settings, cache=cache, **options)


def ids(text: str) -> list[int]:
    return build_tokenizer()(text, add_special_tokens=False)["input_ids"]


def contents(prompts: PromptDataset) -> list[object]:
    rows = [(prompts[index], prompts.where(index)) for index in range(len(prompts))]
    return [rows, prompts.lengths.tolist(), prompts.describe(), prompts.dropped, prompts.num_read]


def folders(cache: Path) -> list[Path]:
    return sorted(cache.iterdir()) if cache.exists() else []


def test_prompts_are_the_same_with_and_without_the_cache(tokenizer_folder: str, write_jsonl: Write, tmp_path: Path) -> None:
    data, cache = write_jsonl(ROWS), tmp_path / "cache"
    plain, first = open_all(tokenizer_folder, data, None), open_all(tokenizer_folder, data, cache)
    (folder,) = folders(cache)
    stamps = [(file.name, file.stat().st_mtime_ns) for file in sorted(folder.iterdir())]
    again = open_all(tokenizer_folder, data, cache)
    assert repr(contents(plain)) == repr(contents(first)) == repr(contents(again)) and "malformed" in plain.describe()
    assert [(file.name, file.stat().st_mtime_ns) for file in sorted(folder.iterdir())] == stamps
    # limits are applied after it
    assert len(open_all(tokenizer_folder, data, cache, max_prompt_length=5, long_prompts="drop")) == 2
    assert folders(cache) == [folder]


def test_what_rows_depend_on_is_in_the_name(tokenizer_folder: str, write_jsonl: Write, tmp_path: Path) -> None:
    cache, data = tmp_path / "cache", write_jsonl(ROWS)
    templates = tmp_path / "templates.json"
    entries = [{"name": "mine", "format_user": {"slots": [f"{{{{content}}}}{end}"]}} for end in "!?"]
    kept = []
    for settings, more in (
        (SETTINGS, {}),
        (replace(SETTINGS, system_prompt="Be brief."), {}),
        (replace(SETTINGS, prompt_type="qwen"), {}),
        (SETTINGS, {"dataset_additional_keys": ["labels"]}),
    ):
        kept.append(contents(open_all(tokenizer_folder, data, cache, settings, **more)))
        assert len(folders(cache)) == len(kept)
    assert len(contents(open_all(tokenizer_folder, f"{data}[2:5]", cache))[0]) == 2 and len(folders(cache)) == 5
    Path(data).write_text(json.dumps({"q": "six", "a": "6", "more": 6}) + "\n")
    assert open_all(tokenizer_folder, data, cache)[0]["label"] == "6" and len(folders(cache)) == 6
    own = replace(SETTINGS, prompt_type="mine", prompt_type_path=str(templates))
    for number, entry in enumerate(entries):
        templates.write_text(json.dumps([entry]))
        assert open_all(tokenizer_folder, data, cache, own)[0]["prompt_ids"][-1:] == ids("!?"[number])
        assert len(folders(cache)) == 7 + number


@pytest.mark.parametrize("damage", ["cut", "missing", "no record", "other rows", "other lengths", "no array"])
def test_a_damaged_folder_is_not_read(damage: str, tokenizer_folder: str, write_jsonl: Write, tmp_path: Path) -> None:
    data, cache = write_jsonl(ROWS), tmp_path / "cache"
    expected = contents(open_all(tokenizer_folder, data, cache))
    (folder,) = folders(cache)
    tokens, lengths, rows = (folder / name for name in ("tokens.npy", "lengths.npy", "rows.jsonl"))
    if damage == "cut":
        tokens.write_bytes(tokens.read_bytes()[:-4])
    elif damage == "missing":
        rows.unlink()
    elif damage == "no record":
        (folder / "prompts.json").unlink()
    elif damage == "other rows":
        rows.write_bytes(b"x" * rows.stat().st_size)
    elif damage == "other lengths":
        np.save(lengths, np.load(lengths) + 1)
    else:
        tokens.write_bytes(bytes(tokens.stat().st_size))
    assert repr(contents(open_all(tokenizer_folder, data, cache))) == repr(expected)


def test_rows_that_json_would_change_are_read_anew(tokenizer_folder: str, tmp_path: Path) -> None:
    cache, data = tmp_path / "cache", tmp_path / "rows.parquet"
    table = {"q": ["one", "two"], "a": ["1", "2"], "more": [float("nan"), 1.0]}
    pyarrow.parquet.write_table(pyarrow.table(table), data)
    for _ in range(2):
        assert math.isnan(cast("float", open_all(tokenizer_folder, str(data), cache)[0]["columns"]["more"]))
    assert folders(cache) == []
    pyarrow.parquet.write_table(pyarrow.table(table | {"more": [{"a": [1, 2]}, {"a": []}]}), data)
    for _ in range(2):
        assert open_all(tokenizer_folder, str(data), cache)[0]["columns"] == {"more": {"a": [1, 2]}}
    assert len(folders(cache)) == 1


@pytest.mark.parametrize("value", [datetime.date(2026, 1, 2), b"bytes", {"at": datetime.datetime(2026, 1, 2)}])
def test_a_column_that_is_no_json_is_a_malformed_row(value: object, tokenizer_folder: str, tmp_path: Path) -> None:
    data = tmp_path / "rows.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"q": ["one"], "a": ["1"], "more": [value]}), data)
    with pytest.raises(ValueError, match=r"row 1: column 'more' has a value of type \w+, which JSON cannot write"):
        open_all(tokenizer_folder, str(data), None, replace(SETTINGS, on_bad_row="error"))


@pytest.mark.parametrize("on_bad_row", ["skip", "error"])
def test_several_processes_read_the_same_prompts(
    on_bad_row: str, tokenizer_folder: str, write_jsonl: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = write_jsonl([{**ROWS[0], "q": f"{'long ' * (number % 7)}{number}"} for number in range(3000)] + ROWS)
    settings = replace(SETTINGS, on_bad_row=on_bad_row)
    outcomes = []
    for large in (1 << 40, 0):
        monkeypatch.setattr(cache_folders, "_LARGE_BYTES", large)
        try:
            outcomes.append(repr(contents(open_all(tokenizer_folder, data, None, settings))))
        except ValueError as error:
            outcomes.append(str(error))
    assert outcomes[0] == outcomes[1] and ("row 3004: " in outcomes[0]) == (on_bad_row == "error")
