"""Multiple choice: the letter with the highest probability, or the letter at the end of the reasoning."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from mindspeed_rl.inference.tasks.files import column, find_sibling_files, find_split_files, parse_subject, read_data_rows
from mindspeed_rl.inference.tasks.task import Question, Shot, Task
from mindspeed_rl.rewards.choices import extract_chosen_letters

_LETTERS = "ABCDEFGHIJ"


class MultipleChoice(Task):
    """Rows of question, options (A, B, C, D or a list `choices`) and answer (a letter, or an index from 0).

    Examples come from the `dev` split of the same data and subject.
    """

    name: ClassVar[str] = "multiple_choice"
    scorer = "multiple_choice"
    max_new_tokens = 1024
    default_shots = 0
    splits: ClassVar[tuple[str, ...]] = ("test", "val")
    cue: ClassVar[str] = "Answer:"
    instruction: ClassVar[str] = "Each question{about} has one right answer. Give its letter."
    reasoning: ClassVar[str] = (
        "Each question{about} has one right answer. Reason step by step and end with: The answer is (letter)."
    )
    about: ClassVar[str] = " about {subject}"

    def vote(self, text: str) -> str | None:
        return "".join(sorted(extract_chosen_letters(text)))

    def questions(self) -> list[Question]:
        files = find_split_files(self.path, self.splits)
        if not files:
            raise ValueError(f"{self.name}: {self.path} has no {' or '.join(self.splits)} files (csv, jsonl, json, parquet)")
        if self.options.chain_of_thought and self.num_shots and self.options.num_shots is not None:
            raise ValueError(f"{self.name}: the dev split has no reasoning; --chain-of-thought needs --num-shots 0")
        with_shots = self.num_shots > 0 and not self.options.chain_of_thought
        shots = self._read_shots() if with_shots else {}
        questions = []
        for file in files:
            for where, row in read_data_rows(file):
                subject = str(row.get("subject") or parse_subject(file))
                text, label, letters = _read_choice(row, where)
                if with_shots and subject not in shots:
                    raise ValueError(
                        f"{self.name}: {self.num_shots} examples are requested, but there is no dev split with {subject} in or "
                        f"next to {self.path}; add it, or pass --num-shots 0"
                    )
                about = self._text("about").format(subject=subject.replace("_", " ")) if subject else ""
                kind = "reasoning" if self.options.chain_of_thought else "instruction"
                questions.append(
                    Question(
                        text=text,
                        label=label,
                        group=subject,
                        instruction=self._text(kind).format(about=about),
                        shots=self.take_shots(shots[subject], f"the dev split of {subject}") if with_shots else (),
                        cue=self._text("cue"),
                        choices=() if self.options.chain_of_thought or self.options.alternative_prompt else tuple(letters),
                    )
                )
        return questions

    def _text(self, name: str) -> str:
        """Return a text of the prompt in the configured language."""
        if self.options.language is None:
            return getattr(self, name)
        kind = CEval if self.options.language == "zh" else MultipleChoice
        return getattr(kind, name)

    def _read_shots(self) -> dict[str, list[Shot]]:
        shots: dict[str, list[Shot]] = {}
        for file in find_sibling_files(self.path, "dev"):
            for where, row in read_data_rows(file):
                text, label, _ = _read_choice(row, where)
                shots.setdefault(str(row.get("subject") or parse_subject(file)), []).append(Shot(text, label))
        return shots


class Mmlu(MultipleChoice):
    """MMLU, arXiv:2009.03300: `test/<subject>_test.csv` with `dev/` next to it, or parquet files of the same."""

    name: ClassVar[str] = "mmlu"
    default_shots = 5


class CEval(MultipleChoice):
    """C-Eval, arXiv:2305.08322: `val/<subject>_val.csv` with `dev/` next to it."""

    name: ClassVar[str] = "ceval"
    default_shots = 5
    splits = ("val", "test")
    cue = "答案："
    instruction = "下面每道{about}单项选择题只有一个正确选项，请给出它的字母。"
    reasoning = "下面每道{about}单项选择题只有一个正确选项。请先逐步推理，最后写出：答案是（字母）。"
    about = "关于{subject}的"


class Cmmlu(CEval):
    """CMMLU, arXiv:2306.09212: `test/<subject>.csv` with `dev/` next to it."""

    name: ClassVar[str] = "cmmlu"
    splits = ("test", "val")


def _read_choice(row: Mapping[str, Any], where: str) -> tuple[str, str, str]:
    """Read (question with its options, right letter, all letters) of a row.

    Raises:
        ValueError: options or answer are missing, or the answer is none of the options.
    """
    listed = row.get("choices", row.get("options"))
    if isinstance(listed, Mapping):  # {"text": [...], "label": [...]}
        listed = listed.get("text")
    if listed is None:
        options = [str(row[letter]) for letter in itertools.takewhile(lambda letter: row.get(letter) is not None, _LETTERS)]
    else:
        is_list = isinstance(listed, Sequence) and not isinstance(listed, str)
        options = [str(option) for option in listed] if is_list else []
    if not 2 <= len(options) <= len(_LETTERS):
        raise ValueError(f"{where}: has {len(options)} options; a question has 2 to {len(_LETTERS)}")
    letters = _LETTERS[: len(options)]
    answer = column(row, ("answer", "answerKey", "label"), where)
    if isinstance(answer, int) and not isinstance(answer, bool) and 0 <= answer < len(options):
        label = letters[answer]
    else:
        label = str(answer).strip().strip("()").upper()
    if label not in letters or not label:
        raise ValueError(f"{where}: the answer {answer!r} is none of {', '.join(letters)}")
    lines = [str(column(row, ("question",), where)).strip()]
    lines += [f"{letter}. {option.strip()}" for letter, option in zip(letters, options)]
    return "\n".join(lines), label, letters
