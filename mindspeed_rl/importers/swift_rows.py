"""Columns of prompts as ms-swift reads them, from the first row of a file that is on this machine."""

from __future__ import annotations

from collections.abc import Mapping

from mindspeed_rl.importers.recipe import ACTOR
from mindspeed_rl.importers.result import Import
from mindspeed_rl.importers.shell import Command
from mindspeed_rl.importers.source_files import find_file, read_first_row

#: columns of a question, the first that a row has, and the column of the reward functions
_QUESTIONS = ("query", "prompt", "input", "instruction", "question", "problem")
_ANSWER = "solution"
_REASON = "the column of the first row"


def map_columns(run: Import, option: str, name: str) -> None:
    """Set map_keys by the first row of a file of prompts; nothing where it is elsewhere, or has our columns."""
    row = read_first_row(find_file(Command((), {}, 0, folder=run.settings.folder), name.partition("#")[0]))
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
