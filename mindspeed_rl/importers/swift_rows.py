"""Columns of prompts as ms-swift reads them, from the first row of a file that is on this machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mindspeed_rl.importers.recipe import ACTOR
from mindspeed_rl.importers.result import Import
from mindspeed_rl.importers.shell import Command
from mindspeed_rl.importers.source_files import find_file, read_first_row

#: columns of a question, the first that a row has, and the column of the reward functions
_QUESTIONS = ("query", "prompt", "input", "instruction", "question", "problem")
_ANSWER = "solution"
#: columns of an answer, the first that a row has
_RESPONSES = tuple("response answer output targets target answer_key answers solution text completion content".split())
_REASON = "the column of the first row"


def map_columns(run: Import, name: str) -> None:
    """Set map_keys by the first row of a file of prompts; nothing where it is elsewhere, or has our columns."""
    row = _read_first(run, name)
    messages = row.get("messages")
    if isinstance(messages, list) and messages:
        ends = _ends_with_answer(messages)
        run.add_default(f"{ACTOR}.map_keys.{'messages' if ends else 'prompt'}", "messages", _REASON)
        if ends:  # ms-swift takes it away
            form = "the prompt is what is in front of the last answer"
            run.add_default(f"{ACTOR}.handler_name", "R1SharegptStyleInstructionHandler", form)
            run.add_default(f"{ACTOR}.map_keys.response", _ANSWER if _ANSWER in row else "messages", _REASON)
    elif "instruction" not in row and (column := next((item for item in _QUESTIONS if item in row), None)):
        run.add_default(f"{ACTOR}.map_keys.prompt", column, _REASON)
        run.add_default(f"{ACTOR}.map_keys.query", "", "a prompt is one column")
    if _ANSWER in row:
        run.add_default(f"{ACTOR}.map_keys.response", _ANSWER, "the column that ms-swift's reward functions read")


def find_response_column(run: Import, names: Sequence[str]) -> str:
    """Return the column with the responses of the data; labels where the first file is elsewhere, or has none that is known."""
    row = _read_first(run, names[0]) if len(names) == 1 else {}
    messages = row.get("messages")
    if isinstance(messages, list) and messages:
        if not _ends_with_answer(messages):
            run.refuse("--lmbda", "rows without responses next to a value below 1: their messages end with a question")
        return "messages"
    return next((column for column in _RESPONSES if column in row), "labels")


def _ends_with_answer(messages: Sequence[object]) -> bool:
    return isinstance(messages[-1], Mapping) and messages[-1].get("role") == "assistant"


def _read_first(run: Import, name: str) -> Mapping[str, object]:
    return read_first_row(find_file(Command((), {}, 0, folder=run.settings.folder), name.partition("#")[0]))
