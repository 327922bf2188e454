"""BIG-Bench Hard: tasks that call for reasoning; the final answer is compared with the target."""

from __future__ import annotations

import re
from pathlib import Path
from typing import ClassVar

from mindspeed_rl.inference.tasks.files import column, read_data_rows
from mindspeed_rl.inference.tasks.task import Question, Task
from mindspeed_rl.rewards.answers.extraction import extract_closed_boxed

_STATED = re.compile(r"(?i)\banswer is:?\s*")
_PROMPT_BAR = "-----"


def bbh_match(response: str, label: str) -> float:
    """Return 1.0 if the last stated answer ("the answer is ...", a box, or the last line) is the label, else 0.0.

    Case, quotes, a closing full stop and the brackets around a single letter do not count.
    """
    stated = _STATED.split(response)
    lines = [line for line in (stated[-1] if len(stated) > 1 else response).splitlines() if line.strip()]
    answer = extract_closed_boxed(response) or (lines[0 if len(stated) > 1 else -1] if lines else "")
    return float(_normalize(answer) == _normalize(label))


def _normalize(text: str) -> str:
    text = text.strip().strip("*\"'`").strip()
    text = text[:-1].strip() if text.endswith(".") else text
    text = text.strip("*\"'`").strip().lower()
    letter = re.fullmatch(r"\(?([a-z])\)?", text)
    return letter[1] if letter else " ".join(text.split())


class Bbh(Task):
    """arXiv:2210.09261: `bbh/<task>.json` with `cot-prompts/<task>.txt` next to it.

    The prompts of the benchmark have three worked examples each; `--num-shots 0` leaves them out.
    """

    name: ClassVar[str] = "bbh"
    scorer = "mindspeed_rl.inference.tasks.bbh:bbh_match"
    max_new_tokens = 1024
    default_shots = 3
    stop_strings = ("\n\nQ:", "\nQ:")

    def questions(self) -> list[Question]:
        if self.num_shots not in (0, 3):
            raise ValueError(f"bbh: --num-shots {self.num_shots}; the benchmark's prompts have 3 examples, 0 leaves them out")
        folder = self.path / "bbh" if (self.path / "bbh").is_dir() else self.path
        files = [folder] if folder.is_file() else sorted(folder.glob("*.json"))
        if not files:
            raise ValueError(f"bbh: {self.path} has no <task>.json files")
        questions = []
        for file in files:
            instruction = self._read_prompt(file) if self.num_shots else "Answer the question. End with: the answer is ..."
            for where, row in read_data_rows(file):
                for index, example in enumerate(column(row, ("examples",), where), start=1):
                    source = f"{file}, example {index}"
                    questions.append(
                        Question(
                            text=f"Q: {column(example, ('input',), source)}",
                            label=str(column(example, ("target",), source)),
                            group=file.stem,
                            instruction=instruction,
                            cue="A: Let's think step by step.",
                        )
                    )
        return questions

    def _read_prompt(self, file: Path) -> str:
        """Read instruction and examples of a task, as the benchmark's authors wrote them."""
        paths = [folder / "cot-prompts" / f"{file.stem}.txt" for folder in (file.parent, file.parent.parent)]
        for path in paths:
            if path.is_file():
                text = path.read_text(encoding="utf-8")
                return text.partition(_PROMPT_BAR)[2].strip() if _PROMPT_BAR in text else text.strip()
        raise ValueError(f"bbh: {paths[-1]} is missing; add the benchmark's cot-prompts folder, or pass --num-shots 0")
