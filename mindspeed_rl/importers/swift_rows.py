"""Columns of prompts as ms-swift reads them, from the first row of a file that is on this machine."""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import islice
from pathlib import Path

from mindspeed_rl.importers.recipe import ACTOR
from mindspeed_rl.importers.result import Import
from mindspeed_rl.importers.shell_text import Command
from mindspeed_rl.importers.source_files import find_file

#: columns of a question, the first that a row has, and the column of the reward functions
_QUESTIONS = ("query", "prompt", "input", "instruction", "question", "problem")
_ANSWER = "solution"
#: larger files of JSON, which are read as a whole, are not
_MAX_BYTES = 2**26
_REASON = "the column of the first row"


def map_columns(run: Import, option: str, name: str) -> None:
    """Set map_keys by the first row of a file of prompts; nothing where it is elsewhere, or has our columns."""
    row = _read_first_row(find_file(Command((), {}, 0, folder=run.settings.folder), name.partition("#")[0]))
    messages = row.get("messages")
    if isinstance(messages, list) and messages:
        run.add_default(f"{ACTOR}.map_keys.prompt", "messages", _REASON)
        if isinstance(messages[-1], Mapping) and messages[-1].get("role") == "assistant":
            form = "rows that end with an answer, which ms-swift takes away; write them without it"
            run.refuse(f"{option} {name}", form)
    elif "instruction" not in row and (column := next((item for item in _QUESTIONS if item in row), None)):
        run.add_default(f"{ACTOR}.map_keys.prompt", column, _REASON)
        run.add_default(f"{ACTOR}.map_keys.query", "", "a prompt is one column")
    if _ANSWER in row:
        run.add_default(f"{ACTOR}.map_keys.response", _ANSWER, "the column that ms-swift's reward functions read")


def _read_first_row(path: Path | None) -> Mapping[str, object]:
    """Return the first row of a file of JSON or JSON lines; empty for others."""
    if path is None or path.suffix not in (".json", ".jsonl") or (path.suffix == ".json" and path.stat().st_size > _MAX_BYTES):
        return {}
    try:
        if path.suffix == ".json":
            rows = json.loads(path.read_text(encoding="utf-8"))
            row = rows[0] if isinstance(rows, list) and rows else {}
        else:
            with path.open(encoding="utf-8") as file:
                row = next((json.loads(line) for line in islice(file, 10) if line.strip()), {})
    except ValueError:
        return {}
    return row if isinstance(row, Mapping) else {}
