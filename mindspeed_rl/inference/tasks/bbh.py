"""BIG-Bench Hard: tasks that call for reasoning; the final answer is compared with the target."""

from __future__ import annotations

import re
from pathlib import Path
from typing import ClassVar

from mindspeed_rl.inference.tasks.files import column, rows_of
from mindspeed_rl.inference.tasks.task import Question, Task
from mindspeed_rl.rewards.answers.extraction import extract_closed_box

_STATED = re.compile(r"(?i)\banswer is:?\s*")
_PROMPT_BAR = "-----"


def bbh_match(response: str, label: str) -> float:
    """1.0 if the answer that the response states last ("the answer is ...", a box, or its last line) is the label, else 0.0.

    Case, quotes, a closing full stop and the brackets around a single letter do not count.
    """
    stated = _STATED.split(response)
    lines = [line for line in (stated[-1] if len(stated) > 1 else response).splitlines() if line.strip()]
    answer = extract_closed_box(response) or (lines[0 if len(stated) > 1 else -1] if lines else "")
    return float(_plain(answer) == _plain(label))


def _plain(text: str) -> str:
    text = text.strip().strip("*\"'`").strip()
    text = text[:-1].strip() if text.endswith(".") else text
    text = text.strip("*\"'`").strip().lower()
    letter = re.fullmatch(r"\(?([a-z])\)?", text)
    return letter[1] if letter else " ".join(text.split())


class Bbh(Task):
    """arXiv:2210.09261: `bbh/<task>.json` with `cot-prompts/<task>.txt` beside it.

    The prompts of the benchmark hold three worked examples each; `--num-shots 0` does without them.
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
            instruction = self._prompt(file) if self.num_shots else "Answer the question. End with: the answer is ..."
            for where, row in rows_of(file):
                for number, example in enumerate(column(row, ("examples",), where), start=1):
                    place = f"{file}, example {number}"
                    questions.append(
                        Question(
                            text=f"Q: {column(example, ('input',), place)}",
                            label=str(column(example, ("target",), place)),
                            group=file.stem,
                            instruction=instruction,
                            cue="A: Let's think step by step.",
                        )
                    )
        return questions

    def _prompt(self, file: Path) -> str:
        """Instruction and examples of a task, as the benchmark's authors wrote them."""
        places = [place / "cot-prompts" / f"{file.stem}.txt" for place in (file.parent, file.parent.parent)]
        for place in places:
            if place.is_file():
                text = place.read_text(encoding="utf-8")
                return text.partition(_PROMPT_BAR)[2].strip() if _PROMPT_BAR in text else text.strip()
        raise ValueError(f"bbh: {places[-1]} is missing; add the benchmark's cot-prompts folder, or pass --num-shots 0")
