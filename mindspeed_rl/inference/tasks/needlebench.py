"""Needles in long texts: a sentence is hidden in a text of some length, and a question is about it."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from mindspeed_rl.inference.tasks.files import column, find_data_files, read_data_rows
from mindspeed_rl.inference.tasks.task import Question, Task

#: characters of a token, about: prompts have a length in characters, so that it is the same text for every tokenizer
_CHARACTERS = {"en": 4.0, "zh": 1.5}
_INSTRUCTION = {
    "en": "Read the text and answer the question behind it in a few words, by what the text says.",
    "zh": "请阅读下面的文本，并根据文本内容用几个词回答其后的问题。",
}
_LENGTHS = (1000, 2000, 4000)
_DEPTHS = (0, 25, 50, 75, 100)


def score(response: str, label: str) -> float:
    """Return 1.0 if the answer contains the hidden words, in any case, else 0.0."""
    return float(" ".join(str(label).lower().split()) in " ".join(response.lower().split()))


class NeedleBench(Task):
    """arXiv:2407.11963, its single retrieval: needles x `--context-lengths` x `--depths`, a table row for each pair of them.

    A folder with `needles.jsonl` (needle, retrieval_question, keyword or arg2, optional language) and further files with a
    column `text`, the texts around them. Texts follow each other from an index that depends on length and needle; needles are
    between two sentences. With `--eval-language` only needles of this language are used.
    """

    name: ClassVar[str] = "needlebench"
    scorer = "mindspeed_rl.inference.tasks.needlebench:score"
    max_new_tokens = 64

    def questions(self) -> list[Question]:
        if self.num_shots:
            raise ValueError(f"needlebench: --num-shots {self.num_shots}; there are no examples to a text")
        files = find_data_files(self.path)
        needle_files = [file for file in files if file.name.startswith("needles")]
        text_files = [file for file in files if file not in needle_files]
        if not needle_files or not text_files:
            raise ValueError(f"needlebench: {self.path} must hold needles.jsonl and files with a column 'text'")
        texts = [str(column(row, ("text",), where)).strip() for file in text_files for where, row in read_data_rows(file)]
        needles = [self._read_needle(row, where) for file in needle_files for where, row in read_data_rows(file)]
        if self.options.language is not None:
            needles = [needle for needle in needles if needle[3] == self.options.language]
        if not needles:
            raise ValueError(f"needlebench: {needle_files[0]} has no needle in the language {self.options.language}")
        return [
            self._question(texts, needle, index, length, depth)
            for length in self.options.context_lengths or _LENGTHS
            for depth in self.options.depths or _DEPTHS
            for index, needle in enumerate(needles)
        ]

    def _read_needle(self, row: Mapping[str, Any], where: str) -> tuple[str, str, str, str]:
        """Read (needle, question, keyword, language) of a row."""
        needle = str(column(row, ("needle",), where)).strip()
        language = str(row.get("language") or "").lower()
        is_chinese = language.startswith(("zh", "chin")) or (
            not language and any("\u4e00" <= letter <= "\u9fff" for letter in needle)
        )
        question = str(column(row, ("retrieval_question", "question"), where)).strip()
        return needle, question, str(column(row, ("keyword", "arg2", "answer"), where)), "zh" if is_chinese else "en"

    def _question(
        self, texts: Sequence[str], needle: tuple[str, str, str, str], index: int, length: int, depth: int
    ) -> Question:
        sentence, question, keyword, language = needle
        # not by depth: at every depth the needle is in the same text
        generator = random.Random(f"{length} {index}")
        size = max(1, int(length * _CHARACTERS[language]) - len(sentence))
        parts: list[str] = []
        next_text = generator.randrange(len(texts))
        while sum(map(len, parts)) < size:
            parts.append(texts[next_text % len(texts)] or " ")
            next_text += 1
        text = "\n".join(parts)[:size]
        cut = _find_sentence_end(text, round(len(text) * depth / 100))
        filled = f"{text[:cut].rstrip()}\n{sentence}\n{text[cut:].lstrip()}".strip()
        return Question(
            text=f"{filled}\n\n{question}",
            label=keyword,
            group=f"{length} tokens, {depth} %",
            instruction=_INSTRUCTION[language],
            cue="答案：" if language == "zh" else "Answer:",
        )


def _find_sentence_end(text: str, near: int) -> int:
    """Return the end of the last sentence before `near`; 0 where there is none, the end of the text after it."""
    if near >= len(text):
        return len(text)
    return max(
        (text.rfind(mark, 0, near) + len(mark) for mark in (". ", "。", "! ", "? ", "\n") if text.rfind(mark, 0, near) >= 0),
        default=0,
    )
