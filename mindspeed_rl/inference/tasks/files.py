"""Finding and reading the files of a benchmark, in the forms in which they are handed around."""

from __future__ import annotations

import csv
import gzip
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mindspeed_rl.data.conversation import BadRow
from mindspeed_rl.data.sources import open_source, read_rows

_SUFFIXES = (".csv", ".jsonl", ".json", ".parquet", ".arrow", ".jsonl.gz")
_CHOICE_COLUMNS = ("question", "A", "B", "C", "D", "answer")


def data_files(folder: Path) -> list[Path]:
    """Data files right in a folder, by name."""
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if path.is_file() and path.name.endswith(_SUFFIXES))


def split_files(path: Path, splits: Sequence[str]) -> list[Path]:
    """The files of the first of these splits that is there.

    A split is a folder of that name, or files named `<subject>_<split>.*`, `<split>-*.*` or `<split>.*`. The path may be
    the split's folder itself, or a single file.
    """
    if path.is_file():
        return [path]
    if path.name in splits:
        return data_files(path)
    for split in splits:
        found = data_files(path / split) or [file for file in data_files(path) if _is_of_split(file, split)]
        if found:
            return found
    return []


def sibling_files(path: Path, split: str) -> list[Path]:
    """The files of another split of the same data: in the path, or beside it."""
    places = [path, path.parent] if path.is_dir() else [path.parent, path.parent.parent]
    for place in places:
        found = data_files(place / split) or [file for file in data_files(place) if _is_of_split(file, split)]
        if found:
            return found
    return []


def _is_of_split(file: Path, split: str) -> bool:
    stem = file.name.partition(".")[0]
    return stem == split or stem.endswith(f"_{split}") or stem.startswith(f"{split}-")


def subject_of(file: Path) -> str:
    """The subject a file is named after."""
    stem = file.name.partition(".")[0]
    for split in ("_test", "_val", "_dev"):
        stem = stem.removesuffix(split)
    return stem


def rows_of(file: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """(place for messages, row) of every row; a csv file without a header has the columns of a multiple-choice question.

    Raises:
        ValueError: a row cannot be read.
    """
    if file.name.endswith(".gz"):
        with gzip.open(file, "rt", encoding="utf-8") as stream:
            for number, line in enumerate(stream, start=1):
                if line.strip():
                    yield f"{file}, row {number}", _json_object(line, f"{file}, row {number}")
        return
    if file.suffix.lower() == ".csv":
        yield from _csv_rows(file)
        return
    if file.suffix.lower() == ".json" and (content := _whole_json(file)) is not None:
        rows = content if isinstance(content, list) else [content]
        for number, row in enumerate(rows, start=1):
            if not isinstance(row, dict):
                raise ValueError(f"{file}, row {number}: a row is a JSON object, not {type(row).__name__}")
            yield f"{file}, row {number}", row
        return
    for path, number, row in read_rows(open_source(str(file))):
        if isinstance(row, BadRow):
            raise ValueError(f"{path}, row {number}: {row}")
        if not isinstance(row, Mapping):
            raise ValueError(f"{path}, row {number}: a row is a JSON object, not {type(row).__name__}")
        yield f"{path}, row {number}", row


def _whole_json(file: Path) -> Any | None:
    """A file that is one JSON value; None for one that has a value on each line."""
    try:
        # editors on Windows put a mark in front, which JSON does not allow
        return json.loads(file.read_text(encoding="utf-8-sig"))
    except json.JSONDecodeError:
        return None


def _json_object(line: str, where: str) -> Mapping[str, Any]:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: is not valid JSON ({error})") from error
    if not isinstance(row, dict):
        raise ValueError(f"{where}: a row is a JSON object, not {type(row).__name__}")
    return row


def _csv_rows(file: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    with file.open(encoding="utf-8-sig", newline="") as stream:
        columns: Sequence[str] = _CHOICE_COLUMNS
        for number, cells in enumerate(csv.reader(stream), start=1):
            if number == 1 and {"question", "answer"} <= {cell.strip().lower() for cell in cells}:
                columns = [cell.strip() for cell in cells]
                continue
            if not any(cell.strip() for cell in cells):
                continue
            if len(cells) != len(columns):
                raise ValueError(f"{file}, row {number}: {len(cells)} cells; expected {len(columns)} ({', '.join(columns)})")
            yield f"{file}, row {number}", dict(zip(columns, cells))


def column(row: Mapping[str, Any], names: Sequence[str], where: str) -> Any:
    """The value of the first of these columns that is there, whatever its case.

    Raises:
        ValueError: none is there.
    """
    folded = {str(name).lower(): value for name, value in row.items()}
    for name in names:
        if folded.get(name.lower()) is not None:
            return folded[name.lower()]
    raise ValueError(f"{where}: has no {' or '.join(names)}; it has {', '.join(map(str, row)) or 'nothing'}")
