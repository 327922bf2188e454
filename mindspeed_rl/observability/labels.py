"""Marks of people: responses of a run that somebody has called right or wrong, or better than another one.

A folder has `journal.jsonl`, with every mark in its order, and files that are made of it: `marked.jsonl` (rows with `human`,
for audits), `kto.jsonl` and `dpo.jsonl` (rows for the stages of these names). A later mark of the same response, or pair,
replaces the earlier one; each has a version, so that two people, or a request that is sent again, do not undo a mark that they
have not seen.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import combinations
from pathlib import Path
from typing import Any

from mindspeed_rl.files import write_file
from mindspeed_rl.observability.run_files import RunFiles, read_lines

JOURNAL, MARKED, KTO, DPO = "journal.jsonl", "marked.jsonl", "kto.jsonl", "dpo.jsonl"
#: responses that a page offers, the newest of a run, and pairs of a prompt
_MAX_ITEMS, _MAX_PAIRS = 500, 3


class ConflictError(ValueError):
    """A mark of a response that has another one since the page was read."""


@dataclass(frozen=True)
class Item:
    """A response to mark.

    Attributes:
        id: hash of prompt and response.
        prompt, response: their texts, as in the files of the run.
        label: reference answer; None where there is none.
        iteration: iteration of the run.
        reward: what it has earned; None where it has no score.
    """

    id: str
    prompt: str
    response: str
    label: Any = None
    iteration: int = 0
    reward: float | None = None

    @classmethod
    def make(cls, record: Mapping[str, Any]) -> Item:
        """Return the item of a line of completions.jsonl, examples.jsonl or audit.jsonl."""
        prompt, response = record["prompt"], record["response"]
        digest = blake2b(f"{len(prompt)}\n{prompt}{response}".encode("utf-8", "surrogatepass"), digest_size=12).hexdigest()
        label = record.get("label", (record.get("extra") or {}).get("label"))
        reward = record.get("reward", record.get("earned"))
        return cls(digest, prompt, response, label, record.get("iteration") or 0, reward)


def list_items(runs: Iterable[RunFiles]) -> dict[str, Item]:
    """Return the newest responses of runs by id, the newest first: sampled ones and evaluations'."""
    records = [record for run in runs for record in (*run.examples, *run.completions) if "response" in record]
    newest = sorted(records, key=lambda record: -(record.get("iteration") or 0))
    items = {item.id: item for item in map(Item.make, newest[: 4 * _MAX_ITEMS])}
    return dict(list(items.items())[:_MAX_ITEMS])


def list_pairs(items: Mapping[str, Item]) -> list[tuple[str, str]]:
    """Return pairs of responses to one prompt; which of the two is first says nothing about them."""
    groups: dict[str, list[str]] = {}
    for item in items.values():
        groups.setdefault(item.prompt, []).append(item.id)
    pairs = [pair for ids in groups.values() for pair in list(combinations(ids, 2))[:_MAX_PAIRS]]
    return [_sort_pair(pair) for pair in pairs]


def _sort_pair(pair: Sequence[str]) -> tuple[str, str]:
    first, second = sorted(pair)
    return first, second


@dataclass(frozen=True)
class Mark:
    """A mark as the journal has it.

    Attributes:
        key: id of a response, or both ids of a pair with a + between them.
        verdict: right, wrong, or the id of the better one; None takes the mark back, or calls a pair equal.
        version: number of marks of this key up to this one.
        items: what is marked.
        time_s: when.
    """

    key: str
    verdict: str | None
    version: int
    items: tuple[Item, ...]
    time_s: float = field(compare=False, default=0.0)

    def encode(self) -> str:
        """Return the line of the journal."""
        record = {**vars(self), "items": [vars(item) for item in self.items]}
        return json.dumps(record, ensure_ascii=True) + "\n"


def _read_mark(record: Mapping[str, Any]) -> Mark:
    """Return the mark of a line; raise ValueError where it is not one."""
    try:
        items = tuple(Item(**item) for item in record["items"])
        mark = Mark(record["key"], record["verdict"], record["version"], items, record["time_s"])
    except (KeyError, TypeError) as error:
        raise ValueError(f"it is not a mark: {error}") from None
    texts = [text for item in items for text in (item.id, item.prompt, item.response)]
    allowed = ("right", "wrong", None) if len(items) == 1 else (*(item.id for item in items), None)
    is_sound = all(isinstance(text, str) for text in texts) and type(mark.version) is int and mark.version > 0
    # a damaged text has another id
    is_sound = is_sound and all(Item.make(vars(item)).id == item.id for item in items)
    if (
        not is_sound
        or mark.key != "+".join(item.id for item in items)
        or mark.verdict not in allowed
        or len(items) not in (1, 2)
    ):
        raise ValueError("it is not a mark of a response or a pair")
    return mark


def _encode_row(row: Mapping[str, Any]) -> bytes:
    """Return a row as a line; half a character, which no UTF-8 has, is an escape."""
    try:
        return f"{json.dumps(row, ensure_ascii=False)}\n".encode()
    except UnicodeEncodeError:
        return f"{json.dumps(row)}\n".encode()


class LabelFolder:
    """The marks in a folder; its methods may be called by several threads. One process at a time holds a folder.

    Args:
        folder: is made where it does not exist.

    Raises:
        ValueError: the journal is damaged; names the line.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._lock = folder, threading.Lock()
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / JOURNAL
        self._marks: dict[str, Mark] = {}
        for mark in self._read():
            self._marks[mark.key] = mark
        self._write_rows()

    def _read(self) -> Iterator[Mark]:
        """Yield the marks of the journal; a line that a killed process left half-written is removed."""
        if not self._path.exists():
            return
        if self._path.stat().st_size:
            with self._path.open("rb+") as file:
                content = file.read()
                file.truncate(content.rfind(b"\n") + 1)
        for number, record in enumerate(read_lines(self._path), 1):
            try:
                mark = _read_mark(record)
                if mark.version <= self._version(mark.key):
                    raise ValueError(f"version {mark.version} of {mark.key} is there already")
            except ValueError as error:
                raise ValueError(f"{self._path}, line {number}: {error}; remove the line, or name another folder") from None
            yield mark

    def _version(self, key: str) -> int:
        return self._marks[key].version if key in self._marks else 0

    def describe(self, key: str) -> tuple[str | None, int]:
        """Return the verdict about a response or a pair, and its version; 0 where it has none."""
        with self._lock:
            mark = self._marks.get(key)
        return (None, 0) if mark is None else (mark.verdict, mark.version)

    def mark(self, items: Sequence[Item], verdict: str | None, version: int) -> int:
        """Write a mark to the disk, and return its version.

        Args:
            items: a response, or a pair.
            verdict: right or wrong; of a pair the id of the better response; None for neither.
            version: the one that the person has seen.

        Raises:
            ValueError: the verdict is none.
            ConflictError: another mark was made since.
            OSError: the disk does not take it; the mark is made where only the files of rows could not be written.
        """
        ordered = sorted(items, key=lambda item: item.id)
        mark = Mark("+".join(item.id for item in ordered), verdict, version + 1, tuple(ordered), time.time())
        line = mark.encode()
        _read_mark(json.loads(line))
        with self._lock:
            if self._version(mark.key) != version:
                raise ConflictError("somebody has marked it since this page was read")
            with self._path.open("ab") as file:
                size = file.seek(0, os.SEEK_END)
                try:
                    file.write(line.encode("ascii"))
                    file.flush()
                    os.fsync(file.fileno())
                except OSError:
                    file.truncate(size)
                    raise
            self._marks[mark.key] = mark
            self._write_rows()
        return mark.version

    def _write_rows(self) -> None:
        """Write the files of rows anew."""
        marked = [
            (mark.items[0], mark.verdict == "right") for mark in self._marks.values() if len(mark.items) == 1 and mark.verdict
        ]
        pairs = [mark for mark in self._marks.values() if len(mark.items) == 2 and mark.verdict]
        rows = {
            MARKED: [
                {"prompt": one.prompt, "response": one.response, "label": one.label, "human": right} for one, right in marked
            ],
            KTO: [{"prompt": one.prompt, "completion": one.response, "label": right} for one, right in marked],
            DPO: [
                {"prompt": mark.items[0].prompt}
                | {"chosen" if item.id == mark.verdict else "rejected": item.response for item in mark.items}
                for mark in pairs
            ],
        }
        for name, lines in rows.items():
            write_file(self._folder / name, b"".join(map(_encode_row, lines)))

    def count(self) -> dict[str, int]:
        """Return the number of responses and of pairs that are marked."""
        with self._lock:
            marks = [mark for mark in self._marks.values() if mark.verdict is not None]
        return {"responses": sum(len(mark.items) == 1 for mark in marks), "pairs": sum(len(mark.items) == 2 for mark in marks)}
