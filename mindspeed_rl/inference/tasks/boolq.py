"""BoolQ: yes-no questions about a passage."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from mindspeed_rl.inference.tasks.files import column, find_sibling_files, find_split_files, read_data_rows
from mindspeed_rl.inference.tasks.task import Question, Shot, Task


class BoolQ(Task):
    """arXiv:1905.10044: rows of passage, question and answer (true or false); examples come from the train split."""

    name: ClassVar[str] = "boolq"
    default_shots = 0

    def questions(self) -> list[Question]:
        files = find_split_files(self.path, ("dev", "validation", "val", "test"))
        if not files:
            raise ValueError(f"boolq: {self.path} has no dev.jsonl or other file of the validation split")
        shots: list[Shot] = []
        if self.num_shots:
            for file in find_sibling_files(self.path, "train"):
                for where, row in read_data_rows(file):
                    shots.append(Shot(_render_question(row, where), _read_answer(row, where)))
                    if len(shots) == self.num_shots:
                        break
        examples = self.take_shots(shots, f"the train split of {self.path}")
        return [
            Question(
                text=_render_question(row, where),
                label=_read_answer(row, where),
                instruction="Answer each question about the passage before it with yes or no.",
                shots=examples,
                cue="Answer:",
                choices=("yes", "no"),
            )
            for file in files
            for where, row in read_data_rows(file)
        ]


def _render_question(row: Mapping[str, Any], where: str) -> str:
    question = str(column(row, ("question",), where)).strip().rstrip("?")
    return f"Passage: {column(row, ('passage',), where)}\nQuestion: {question}?"


def _read_answer(row: Mapping[str, Any], where: str) -> str:
    value = column(row, ("answer", "label"), where)
    if value in (True, 1) or str(value).lower() in ("true", "yes"):
        return "yes"
    if value in (False, 0) or str(value).lower() in ("false", "no"):
        return "no"
    raise ValueError(f"{where}: the answer {value!r} is neither true nor false")
