"""Word problems and competition mathematics: the model reasons in text, the final answer is compared."""

from __future__ import annotations

import json
from pathlib import Path
from typing import ClassVar

from mindspeed_rl.inference.tasks.files import column, find_split_files, read_data_rows
from mindspeed_rl.inference.tasks.task import Question, Shot, Task
from mindspeed_rl.rewards.answers.extraction import extract_closed_boxed

_SHOTS = Path(__file__).with_name("shots.json")


def _load_shots(name: str) -> list[Shot]:
    """Load the examples of this project."""
    return [Shot(**entry) for entry in json.loads(_SHOTS.read_text(encoding="utf-8"))[name]]


class Gsm8k(Task):
    """Grade-school word problems, arXiv:2110.14168: rows of question and answer ("... #### 18")."""

    name: ClassVar[str] = "gsm8k"
    scorer = "gsm8k_flexible"
    max_new_tokens = 512
    default_shots = 4
    stop_strings = ("\nQuestion:",)

    def questions(self) -> list[Question]:
        shots = self.take_shots(_load_shots("gsm8k"), "the project")
        files = find_split_files(self.path, ("test",))
        if not files:
            raise ValueError(f"gsm8k: {self.path} has no test.jsonl or other file of the test split")
        return [
            Question(
                text=f"Question: {column(row, ('question',), where)}",
                label=str(column(row, ("answer",), where)),
                instruction="Solve each problem step by step and end with a line of #### and the number.",
                shots=shots,
                cue="Answer:",
            )
            for file in files
            for where, row in read_data_rows(file)
        ]


class Math(Task):
    r"""Competition mathematics, arXiv:2103.03874: rows of problem, solution (with \boxed{}), subject or type."""

    name: ClassVar[str] = "math"
    scorer = "acc"
    max_new_tokens = 1024
    default_shots = 4
    stop_strings = ("\nProblem:",)

    def questions(self) -> list[Question]:
        shots = self.take_shots(_load_shots("math"), "the project")
        files = find_split_files(self.path, ("test",))
        if not files and self.path.is_dir():  # the original: test/<subject>/<number>.json
            base = self.path / "test" if (self.path / "test").is_dir() else self.path
            files = sorted(base.glob("*/*.json"))
        if not files:
            raise ValueError(f"math: {self.path} has no file of the test split")
        questions = []
        for file in files:
            for where, row in read_data_rows(file):
                label = row.get("answer") or extract_closed_boxed(str(column(row, ("solution",), where)))
                if not label:
                    raise ValueError(f"{where}: has no answer, and its solution no \\boxed{{}}")
                questions.append(
                    Question(
                        text=f"Problem: {column(row, ('problem', 'question'), where)}",
                        label=str(label),
                        group=str(row.get("subject") or row.get("type") or ""),
                        instruction="Solve each problem step by step and put the final answer in \\boxed{}.",
                        shots=shots,
                        cue="Solution:",
                    )
                )
        return questions
