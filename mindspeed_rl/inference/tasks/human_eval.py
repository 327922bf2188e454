"""HumanEval: functions written from their docstrings, run against unit tests in the sandbox."""

from __future__ import annotations

from typing import ClassVar

from mindspeed_rl.inference.tasks.files import column, find_data_files, read_data_rows
from mindspeed_rl.inference.tasks.task import Question, Task
from mindspeed_rl.rewards.code import extract_program


class HumanEval(Task):
    """arXiv:2107.03374: rows of prompt, test and entry_point, as JSON lines, packed (.gz) or not. Right: all tests pass."""

    name: ClassVar[str] = "human_eval"
    scorer = "code"
    max_new_tokens = 512
    default_shots = 0
    # text at the left margin after the function's body is not part of it
    stop_strings = ("\ndef ", "\nclass ", "\nif ", "\nprint(", "\nassert ", "\n#", "\n@", "\n```")

    def vote(self, text: str) -> str | None:
        return None  # two programs may be equivalent

    def questions(self) -> list[Question]:
        if self.num_shots:
            raise ValueError(f"human_eval: --num-shots {self.num_shots}; the benchmark has no examples")
        files = [self.path] if self.path.is_file() else find_data_files(self.path)
        if not files:
            raise ValueError(f"human_eval: {self.path} has no HumanEval.jsonl")
        questions = []
        for file in files:
            for where, row in read_data_rows(file):
                prompt, test = str(column(row, ("prompt",), where)), str(column(row, ("test",), where))
                entry_point = str(column(row, ("entry_point",), where))
                questions.append(Question(text=prompt, label=entry_point, columns={"tests": test, "entry_point": entry_point}))
        return questions

    def response(self, question: Question, text: str) -> str:
        """Return a program: the generated text, with the prompt before it where it continues the prompt."""
        block = extract_program(text) if "```" in text else text
        program = block if block is not None else text
        if f"def {question.label}" in program:
            head = question.text.partition(f"def {question.label}")[0]  # imports and helpers
            program = f"{head}\n{program}"
        else:
            program = question.text + program
        return f"```python\n{program}\n```"
