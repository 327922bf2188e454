"""Text of tokens that arrive one by one: decoding, thoughts, stop strings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from mindspeed_rl.data.encoding import TextDecoder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
#: "limit" is not text: the answer ended at the max tokens
Kind = Literal["thought", "answer", "tools", "limit"]


class IncrementalText:
    """Text of a growing token sequence, in parts that join to the decoded text; incomplete characters wait for their tokens."""

    def __init__(self, decoder: TextDecoder) -> None:
        self._decoder = decoder
        self._ids: list[int] = []
        self._start = 0  # decoding starts here: early enough for correct blanks between tokens
        self._shown = 0  # tokens whose text was returned

    def add(self, token_ids: Sequence[int]) -> str:
        """Add tokens and return the text that is complete with them."""
        self._ids += token_ids
        before, now = self._decode_tail()
        if now.endswith(_INCOMPLETE) or len(now) <= len(before):
            return ""
        self._start, self._shown = self._shown, len(self._ids)
        return now[len(before) :]

    def finish(self) -> str:
        """Return the remaining text, without an incomplete character."""
        before, now = self._decode_tail()
        self._start = self._shown = len(self._ids)
        return now[len(before) :].rstrip(_INCOMPLETE)

    def _decode_tail(self) -> tuple[str, str]:
        ids = self._ids[self._start :]
        return self._decoder.decode(ids[: self._shown - self._start]), self._decoder.decode(ids)


class ThoughtSplitter:
    """Splits a stream of text into thoughts and answers, without the marks and the blanks after them.

    Args:
        marks: the text that opens a thought and the one that closes it, such as <think> and </think>.
        thinking: True when the prompt has already opened a thought.
    """

    def __init__(self, marks: tuple[str, str], *, thinking: bool = False) -> None:
        self._marks = marks
        self._thinking = thinking
        self._waiting = ""
        self._skip_blanks = thinking

    def add(self, text: str) -> list[tuple[Kind, str]]:
        """Add text and return the parts that are certain now; text that may start a mark waits."""
        self._waiting += text
        parts: list[tuple[Kind, str]] = []
        while True:
            mark = self._marks[1] if self._thinking else self._marks[0]
            before, separator, after = self._waiting.partition(mark)
            if not separator:
                break
            self._append(before, parts)
            self._waiting, self._thinking, self._skip_blanks = after, not self._thinking, True
        # the longest end of the text with which the mark starts
        sizes = range(min(len(self._waiting), len(mark) - 1), 0, -1)
        overlap = next((size for size in sizes if self._waiting.endswith(mark[:size])), 0)
        self._append(self._waiting[: len(self._waiting) - overlap], parts)
        self._waiting = self._waiting[len(self._waiting) - overlap :]
        return parts

    def finish(self) -> list[tuple[Kind, str]]:
        """Return the text that was waiting."""
        parts: list[tuple[Kind, str]] = []
        self._append(self._waiting, parts)
        self._waiting = ""
        return parts

    def _append(self, text: str, parts: list[tuple[Kind, str]]) -> None:
        if self._skip_blanks:
            text = text.lstrip()
            self._skip_blanks = not text
        if text:
            parts.append(("thought" if self._thinking else "answer", text))


def split_thought(text: str, marks: tuple[str, str], *, thinking: bool = False) -> tuple[str, str]:
    """Split a complete text into (thought, answer)."""
    splitter = ThoughtSplitter(marks, thinking=thinking)
    parts = splitter.add(text) + splitter.finish()
    thought = "".join(part for kind, part in parts if kind == "thought")
    return thought, "".join(part for kind, part in parts if kind == "answer")


def cut_at_stop(text: str, stop_strings: Sequence[str]) -> str:
    """Return the text before the first stop string."""
    ends = [end for stop in stop_strings if (end := text.find(stop)) >= 0]
    return text[: min(ends)] if ends else text


class StopStringFinder:
    """Finds a stop string in the text of one answer."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, strings: Sequence[str]) -> None:
        self._tokenizer, self._strings = tokenizer, strings
        # a token has at least one byte, so a stop string has at most as many tokens as bytes
        self._window = max((len(text.encode()) for text in strings), default=0) + 1
        self._tail: list[int] = []

    def ends(self, token_ids: Sequence[int]) -> bool:
        """Return True when the answer has a stop string with these tokens added."""
        if not self._strings:
            return False
        self._tail += token_ids
        text = self._tokenizer.decode(self._tail, skip_special_tokens=True)
        self._tail = self._tail[-self._window :]
        return any(stop in text for stop in self._strings)
