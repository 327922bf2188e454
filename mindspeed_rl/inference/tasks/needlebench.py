"""Needles in long texts: a sentence lies somewhere in a text of some length, and a question asks for it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, ClassVar

from mindspeed_rl.inference.tasks.files import column, data_files, rows_of
from mindspeed_rl.inference.tasks.task import Question, Task

#: characters of a token, about: prompts are cut by characters, so that a length means the same text for every tokenizer
_CHARACTERS = {"en": 4.0, "zh": 1.5}
_INSTRUCTION = {
    "en": "Read the text and answer the question behind it in a few words, by what the text says.",
    "zh": "请阅读下面的文本，并根据文本内容用几个词回答其后的问题。",
}
_LENGTHS = (1000, 2000, 4000)
_DEPTHS = (0, 25, 50, 75, 100)


def found(response: str, label: str) -> float:
    """1.0 if the answer says the words that were hidden, whatever their case, else 0.0."""
    return float(" ".join(str(label).lower().split()) in " ".join(response.lower().split()))


class NeedleBench(Task):
    """arXiv:2407.11963, its single retrieval: needles x `--context-lengths` x `--depths`, a table row for each pair of them.

    A folder with `needles.jsonl` (needle, retrieval_question, keyword or arg2, optional language) and further files with a
    column `text`, the texts that hide them. Texts follow each other from a place that the length and the needle decide;
    needles stand between two sentences. With `--eval-language` only needles of this language are asked for.
    """

    name: ClassVar[str] = "needlebench"
    scorer = "mindspeed_rl.inference.tasks.needlebench:found"
    max_new_tokens = 64

    def questions(self) -> list[Question]:
        if self.num_shots:
            raise ValueError(f"needlebench: --num-shots {self.num_shots}; there are no examples to a text")
        files = data_files(self.path)
        needle_files = [file for file in files if file.name.startswith("needles")]
        text_files = [file for file in files if file not in needle_files]
        if not needle_files or not text_files:
            raise ValueError(f"needlebench: {self.path} must hold needles.jsonl and files with a column 'text'")
        texts = [str(column(row, ("text",), where)).strip() for file in text_files for where, row in rows_of(file)]
        needles = [self._needle(row, where) for file in needle_files for where, row in rows_of(file)]
        if self.options.language is not None:
            needles = [needle for needle in needles if needle[3] == self.options.language]
        if not needles:
            raise ValueError(f"needlebench: {needle_files[0]} has no needle in the language {self.options.language}")
        return [
            self._question(texts, needle, number, length, depth)
            for length in self.options.context_lengths or _LENGTHS
            for depth in self.options.depths or _DEPTHS
            for number, needle in enumerate(needles)
        ]

    def _needle(self, row: Any, where: str) -> tuple[str, str, str, str]:
        """(needle, question, keyword, language)."""
        needle = str(column(row, ("needle",), where)).strip()
        language = str(row.get("language") or "").lower()
        is_chinese = language.startswith(("zh", "chin")) or (
            not language and any("\u4e00" <= letter <= "\u9fff" for letter in needle)
        )
        question = str(column(row, ("retrieval_question", "question"), where)).strip()
        return needle, question, str(column(row, ("keyword", "arg2", "answer"), where)), "zh" if is_chinese else "en"

    def _question(
        self, texts: Sequence[str], needle: tuple[str, str, str, str], number: int, length: int, depth: int
    ) -> Question:
        sentence, question, keyword, language = needle
        # not by depth: at every depth the needle lies in the same text
        draw = random.Random(f"{length} {number}")
        wanted = max(1, int(length * _CHARACTERS[language]) - len(sentence))
        parts: list[str] = []
        place = draw.randrange(len(texts))
        while sum(map(len, parts)) < wanted:
            parts.append(texts[place % len(texts)] or " ")
            place += 1
        text = "\n".join(parts)[:wanted]
        cut = _sentence_end(text, round(len(text) * depth / 100))
        filled = f"{text[:cut].rstrip()}\n{sentence}\n{text[cut:].lstrip()}".strip()
        return Question(
            text=f"{filled}\n\n{question}",
            label=keyword,
            group=f"{length} tokens, {depth} %",
            instruction=_INSTRUCTION[language],
            cue="答案：" if language == "zh" else "Answer:",
        )


def _sentence_end(text: str, near: int) -> int:
    """The place behind the sentence that ends next before `near`; 0 where none does, the end where `near` is."""
    if near >= len(text):
        return len(text)
    return max(
        (text.rfind(mark, 0, near) + len(mark) for mark in (". ", "。", "! ", "? ", "\n") if text.rfind(mark, 0, near) >= 0),
        default=0,
    )
