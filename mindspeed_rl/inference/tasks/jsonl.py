"""Any questions with labels, scored by a reward function."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from mindspeed_rl.data.content_marks import IMAGE_MARK
from mindspeed_rl.data.conversation import MalformedRowError
from mindspeed_rl.data.images import ImageReader
from mindspeed_rl.inference.batch_generation import read_conversation
from mindspeed_rl.inference.tasks.files import column, find_data_files, read_data_rows
from mindspeed_rl.inference.tasks.task import Question, Task, TaskOptions

_LABELS = ("label", "labels", "answer", "solution")


class Jsonl(Task):
    """Rows of prompt (question, instruction, messages; `--input-key`) and label (labels, answer, solution; `--label-key`).

    All other columns reach the scorer, which `--scorer` names.
    """

    name: ClassVar[str] = "jsonl"

    def __init__(self, path: Path, options: TaskOptions) -> None:
        if options.scorer is None:
            raise ValueError("jsonl: --scorer must name a reward function, such as exact_match, gsm8k_flexible or acc")
        super().__init__(path, options)
        if self.num_shots:
            raise ValueError(f"jsonl: --num-shots {self.num_shots}; write examples into the prompts")

    def questions(self) -> list[Question]:
        files = [self.path] if self.path.is_file() else find_data_files(self.path)
        if not files:
            raise ValueError(f"jsonl: {self.path} has no data files")
        labels = _LABELS if self.options.label_key is None else (self.options.label_key,)
        questions = []
        for file in files:
            for where, row in read_data_rows(file):
                try:
                    if ImageReader(None, IMAGE_MARK).take(row, ())[1]:
                        raise MalformedRowError("has images, which evaluate does not read; generate does")
                    conversation = read_conversation(row, self.options.prompt_key)
                except MalformedRowError as error:
                    raise ValueError(f"{where}: {error}") from error
                questions.append(
                    Question(
                        text=conversation.messages[-1].content,
                        label=column(row, labels, where),
                        columns=dict(row),
                        conversation=conversation,
                    )
                )
        return questions
