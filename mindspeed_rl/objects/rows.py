"""Rows of a program as a file of a run: lists, generators, `datasets.Dataset`, and what their columns are for."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mindspeed_rl.data.conversation import MalformedRowError, Row
from mindspeed_rl.data.forms import read_first_row
from mindspeed_rl.data.prompts import LABELS
from mindspeed_rl.data.sources import open_data
from mindspeed_rl.files import replace_file

#: what a dataset argument may be: a file, folder or name on a hub; or rows
Dataset = str | Path | Iterable[Mapping[str, Any]]
#: columns of prompts, and of reference answers; the first that a row has is taken
_PROMPTS = ("prompt", "question", "messages", "instruction")
_ANSWERS = ("label", LABELS, "answer", "solution", "ground_truth", "response")


def write_rows(dataset: Dataset, path: Path, name: str) -> str:
    """Return `data_path` of a dataset: what it names, or the file that its rows are written to.

    Args:
        path: file for rows, JSON lines.
        name: name of the argument, for messages.

    Raises:
        ValueError: it is not a dataset, has no rows, or a row has no form in JSON; names row and column.
    """
    if isinstance(dataset, (str, Path)):
        file = Path(dataset).expanduser()
        return str(file.absolute() if file.exists() else dataset)
    if isinstance(dataset, Mapping) or not isinstance(dataset, Iterable):
        raise ValueError(
            f"{name} is a {type(dataset).__name__}; give a list of dicts, a datasets.Dataset, a file, or hf://owner/name"
        )
    count = 0
    with replace_file(path, makes_folder=True) as partial, partial.open("w", encoding="utf-8") as file:
        for count, row in enumerate(dataset, start=1):
            if not isinstance(row, Mapping):
                raise ValueError(f"{name}, row {count} is a {type(row).__name__}, not a dict of columns")
            file.write(_format_row(row, f"{name}, row {count}") + "\n")
        if not count:
            raise ValueError(f"{name} has no rows")
    return str(path)


def _format_row(row: Mapping[str, Any], where: str) -> str:
    """Return a row as a line of JSON; numbers and arrays of NumPy as plain ones."""
    try:
        return json.dumps(dict(row), ensure_ascii=False, default=_as_plain, allow_nan=False)
    except (TypeError, ValueError):
        pass
    for column, value in row.items():
        try:
            json.dumps({column: value}, default=_as_plain, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{where}, column {column!r}: {error}; write it as text, numbers, lists or dicts") from None
    raise ValueError(f"{where} has no form in JSON")


def _as_plain(value: object) -> object:
    """Return an array or a number of NumPy or torch as plain ones; `json` calls it for what it does not know."""
    for name in ("tolist", "item"):
        if (convert := getattr(value, name, None)) is not None:  # of another library
            return convert()
    raise TypeError(f"a {type(value).__name__} has no form in JSON")


@dataclass(frozen=True)
class PromptColumns:
    """What the columns of prompts are for.

    Attributes:
        prompt: column of the prompt.
        answer: column of the reference answer; empty without one.
        others: columns that reward functions get under their names.
        has_messages: prompts are messages, not texts.
    """

    prompt: str
    answer: str
    others: tuple[str, ...]
    has_messages: bool

    def list_keys(self) -> dict[str, object]:
        """Return the keys of a run file that say so; a text reaches the model as it is, as in TRL."""
        columns = {"prompt": self.prompt, "query": ""} | ({"response": self.answer} if self.answer else {})
        keys: dict[str, object] = {
            "map_keys": columns,
            "prompt_type": "hf" if self.has_messages else "empty",
            "dataset_additional_keys": [*([LABELS] if self.answer else []), *self.others],
        }
        return {f"megatron_training.{name}": value for name, value in keys.items()}


def read_first(data_path: str, name: str) -> Row:
    """Return the first row of a dataset.

    Raises:
        ValueError: it cannot be read, or has no rows.
    """
    first = read_first_row(open_data(data_path))
    if first is None or isinstance(first[1], MalformedRowError):
        raise ValueError(f"{name}: {data_path} has no row that can be read")
    return first[1]


def find_prompt_columns(row: Row, name: str) -> PromptColumns:
    """Return what the columns of prompts are for.

    Raises:
        ValueError: no column is known to be the prompt.
    """
    columns = [str(column) for column in row]
    prompt = next((column for column in _PROMPTS if column in columns), None)
    if prompt is None:
        raise ValueError(f"{name} has the columns {', '.join(columns)}; one of {', '.join(_PROMPTS)} is needed as the prompt")
    answer = next((column for column in _ANSWERS if column in columns), "")
    others = tuple(column for column in columns if column not in (prompt, LABELS))
    return PromptColumns(prompt, answer, others, isinstance(row[prompt], (list, tuple)))


def has_messages(row: Row) -> bool:
    """Return True where a row of supervised training is messages, and not texts."""
    return any(isinstance(value, (list, tuple)) and value and isinstance(value[0], Mapping) for value in row.values())
