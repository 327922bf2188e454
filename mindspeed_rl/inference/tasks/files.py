"""Files of benchmarks in their published forms: finding and reading them."""

from __future__ import annotations

import contextlib
import csv
import io
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mindspeed_rl.data.conversation import MalformedRowError
from mindspeed_rl.data.sources import find_separator, open_source, read_rows
from mindspeed_rl.files import open_regular, read_regular

#: largest JSON file of questions
_MAX_BYTES = 2 << 30
_SUFFIXES = (".csv", ".jsonl", ".json", ".parquet", ".arrow", ".jsonl.gz")
_CHOICE_COLUMNS = ("question", "A", "B", "C", "D", "answer")


def find_data_files(folder: Path) -> list[Path]:
    """Return the data files directly in a folder, by name."""
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if path.is_file() and path.name.endswith(_SUFFIXES))


def find_split_files(path: Path, splits: Sequence[str]) -> list[Path]:
    """Return the files of the first of these splits that exists.

    A split is a folder of that name, or files named `<subject>_<split>.*`, `<split>-*.*` or `<split>.*`. The path may be
    the split's folder itself, or a single file.
    """
    if path.is_file():
        return [path]
    if path.name in splits:
        return find_data_files(path)
    for split in splits:
        files = _find_split(path, split)
        if files:
            return files
    return []


def find_sibling_files(path: Path, split: str) -> list[Path]:
    """Return the files of another split of the same data: in the path, or next to it."""
    folders = [path, path.parent] if path.is_dir() else [path.parent, path.parent.parent]
    return next((files for folder in folders if (files := _find_split(folder, split))), [])


def _find_split(folder: Path, split: str) -> list[Path]:
    files = find_data_files(folder / split)
    if files:
        return files
    stems = [(file, file.name.partition(".")[0]) for file in find_data_files(folder)]
    return [file for file, stem in stems if stem == split or stem.endswith(f"_{split}") or stem.startswith(f"{split}-")]


def parse_subject(file: Path) -> str:
    """Return the subject in a file's name."""
    stem = file.name.partition(".")[0]
    for split in ("_test", "_val", "_dev"):
        stem = stem.removesuffix(split)
    return stem


def read_data_rows(file: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield (source for messages, row) of every row; a csv file without a header has the columns of a multiple-choice question.

    Raises:
        ValueError: a row cannot be read.
    """
    if file.suffix.lower() == ".csv":
        yield from _read_csv(file)
        return
    if file.suffix.lower() == ".json" and (content := _read_json(file)) is not None:
        rows = content if isinstance(content, list) else [content]
        for number, row in enumerate(rows, start=1):
            if not isinstance(row, dict):
                raise ValueError(f"{file}, row {number}: a row is a JSON object, not {type(row).__name__}")
            yield f"{file}, row {number}", row
        return
    for path, number, row in read_rows(open_source(str(file))):
        if isinstance(row, MalformedRowError):
            raise ValueError(f"{path}, row {number}: {row}")
        if not isinstance(row, Mapping):
            raise ValueError(f"{path}, row {number}: a row is a JSON object, not {type(row).__name__}")
        yield f"{path}, row {number}", row


def _read_json(file: Path) -> Any | None:
    """Read a file that is one JSON value; return None for one that has a value on each line."""
    try:
        # editors on Windows add a byte order mark, which JSON does not allow
        return json.loads(read_regular(file, _MAX_BYTES).decode("utf-8-sig"))
    except json.JSONDecodeError:
        return None
    except (RecursionError, UnicodeDecodeError) as error:
        raise ValueError(f"{file} is not valid JSON: {error}") from error
    except OSError as error:
        raise ValueError(f"{file} cannot be read: {error.strerror}") from error


@contextlib.contextmanager
def _open_text(file: Path) -> Iterator[io.TextIOWrapper]:
    """Open a file of text; what is wrong with it while it is read names it too."""
    try:
        with open_regular(file) as content:
            yield io.TextIOWrapper(content, encoding="utf-8-sig", newline="")
    except (UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"{file} is not text of UTF-8 with columns: {error}") from error
    except OSError as error:
        raise ValueError(f"{file} cannot be read: {error.strerror}") from error


def _read_csv(file: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    with _open_text(file) as stream:
        columns: Sequence[str] = _CHOICE_COLUMNS
        first = stream.readline()
        reader = csv.reader(itertools.chain([first], stream), delimiter=find_separator(first))
        for number, cells in enumerate(reader, start=1):
            if number == 1 and {"question", "answer"} <= {cell.strip().lower() for cell in cells}:
                columns = [cell.strip() for cell in cells]
                continue
            if not any(cell.strip() for cell in cells):
                continue
            if len(cells) != len(columns):
                raise ValueError(f"{file}, row {number}: {len(cells)} cells; expected {len(columns)} ({', '.join(columns)})")
            yield f"{file}, row {number}", dict(zip(columns, cells))


def column(row: Mapping[str, Any], names: Sequence[str], where: str) -> Any:
    """Return the value of the first of these columns that exists, in any case.

    Raises:
        ValueError: none exists.
    """
    folded = {str(name).lower(): value for name, value in row.items()}
    for name in names:
        if folded.get(name.lower()) is not None:
            return folded[name.lower()]
    raise ValueError(f"{where}: has no {' or '.join(names)}; it has {', '.join(map(str, row)) or 'nothing'}")
