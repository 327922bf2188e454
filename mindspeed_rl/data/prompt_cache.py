"""Tokens of raw prompts, kept in a folder next to the run folders: a later start or a resume does not tokenize again.

The folder is named after all that the rows depend on (`cache_folders`). It has the tokens of all prompts one after another, and
labels, columns and origins as JSON, a row a line. Rows that JSON would change are not kept; the data is then read anew.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np

from mindspeed_rl.data.cache_folders import (
    digest_code,
    digest_source,
    digest_tokenizer,
    make_folder,
    name_folder,
    read_record,
)
from mindspeed_rl.data.handlers.prompt import LABELS, PromptHandler, as_text
from mindspeed_rl.data.sources import Source
from mindspeed_rl.files import open_regular

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

#: data of fewer bytes is read anew, in about a second
SMALL_BYTES = 4 << 20
_RECORD = "prompts.json"
_KEYS = ("dropped", "paths")
_TOKENS, _LENGTHS, _ROWS = "tokens.npy", "lengths.npy", "rows.jsonl"


@dataclass
class TokenizedRows:
    """Raw prompts by row, at 4 bytes a token.

    Attributes:
        tokens: token ids of a prompt, [tokens] int32.
        labels: reference answer, or None.
        columns: further columns by name.
        origins: file and row.
        dropped: rows that are left out, by reason.
    """

    tokens: list[np.ndarray] = field(default_factory=list)
    labels: list[str | None] = field(default_factory=list)
    columns: list[dict[str, object]] = field(default_factory=list)
    origins: list[tuple[str, int]] = field(default_factory=list)
    dropped: dict[str, int] = field(default_factory=dict)

    def append(self, tokens: Sequence[int], values: Mapping[str, object], origin: tuple[str, int]) -> None:
        """Add a row; `values` has its label under LABELS, and its columns."""
        self.tokens.append(np.array(tokens, dtype=np.int32))
        self.origins.append(origin)
        self.labels.append(as_text(values[LABELS]) if LABELS in values else None)
        self.columns.append({name: value for name, value in values.items() if name != LABELS})


def find_folder(
    cache: Path, data_path: str, source: Source, tokenizer: PreTrainedTokenizerBase, handler: PromptHandler, settings: object
) -> Path | None:
    """Return the folder of the rows of a source, which need not exist; None where it cannot be known what they depend on.

    Args:
        tokenizer: one that was loaded from a folder as it is.
        handler: renders the rows.
        settings: what else the rows depend on, as values of JSON.
    """
    folder = Path(tokenizer.name_or_path).expanduser()
    if not folder.is_dir() or source.format == "stream":
        return None
    parts = [settings, type(tokenizer).__name__, digest_tokenizer(folder), digest_source(source), digest_code(type(handler))]
    return cache / name_folder(data_path, parts)


def read(folder: Path) -> TokenizedRows | None:
    """Return the rows of a folder; None where it is missing or damaged."""
    if (record := read_record(folder, _RECORD, _KEYS)) is None:
        return None
    rows = TokenizedRows()
    try:
        paths = list(map(str, cast("list[object]", record["paths"])))
        dropped = {name: int(count) for name, count in cast("dict[str, int]", record["dropped"]).items()}
        flat = np.load(folder / _TOKENS, allow_pickle=False)
        ends = np.cumsum(np.load(folder / _LENGTHS, allow_pickle=False)).tolist()
        with open_regular(folder / _ROWS) as file:
            for line in file:
                path, number, label, columns = json.loads(line)
                rows.origins.append((paths[path], number))
                rows.labels.append(label)
                rows.columns.append(columns)
    except (OSError, ValueError, TypeError, LookupError, AttributeError):
        return None
    if flat.dtype != np.int32 or len(ends) != len(rows.labels) or (ends[-1] if ends else 0) != len(flat):
        return None
    rows.tokens = [flat[first:end] for first, end in zip([0, *ends], ends)]
    rows.dropped = dropped
    return rows


def write(folder: Path, data_path: str, rows: TokenizedRows) -> None:
    """Write rows, unless JSON would change them.

    Raises:
        OSError: the cache cannot be written.
    """
    if not all(map(_is_plain, rows.columns)):
        return
    paths = {path: index for index, path in enumerate(dict.fromkeys(path for path, _ in rows.origins))}
    record: dict[str, object] = {"input": data_path, "dropped": rows.dropped, "paths": [*paths]}
    with make_folder(folder, _RECORD, record) as built:
        np.save(built / _TOKENS, np.concatenate(rows.tokens) if rows.tokens else np.empty(0, np.int32))
        np.save(built / _LENGTHS, np.array([len(tokens) for tokens in rows.tokens], np.int64))
        with (built / _ROWS).open("w", encoding="ascii") as file:
            for (path, number), label, columns in zip(rows.origins, rows.labels, rows.columns, strict=True):
                file.write(f"{json.dumps([paths[path], number, label, columns])}\n")


def _is_plain(value: object) -> bool:
    """Return whether a value is the same after it was written as JSON and read."""
    kind = type(value)
    if kind is dict:
        return all(type(key) is str and _is_plain(item) for key, item in cast("dict[object, object]", value).items())
    if kind is list:
        return all(map(_is_plain, cast("list[object]", value)))
    return value is None or kind in (str, int, bool) or (kind is float and math.isfinite(cast("float", value)))
