"""From tokens that arrive one by one to text that can be shown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
Kind = Literal["thought", "answer", "aside"]


class TextDecoder:
    """Tokens to text without special tokens, but with those that are named: some tokenizers count thought marks among them."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, keep: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.added_tokens_decoder
        self._kept = {number: token.content for number, token in added.items() if token.special and token.content in keep}

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text."""
        parts: list[str] = []
        start = 0
        for place, token in enumerate(token_ids):
            if token in self._kept:
                parts += [self._plain(token_ids[start:place]), self._kept[token]]
                start = place + 1
        return "".join([*parts, self._plain(token_ids[start:])])

    def _plain(self, token_ids: Sequence[int]) -> str:
        text = self._tokenizer.decode(list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)  # a list for a batch
        return text


class IncrementalText:
    """The text of a growing token sequence, in pieces that add up to the decoded whole; half characters wait for their rest."""

    def __init__(self, decoder: TextDecoder) -> None:
        self._decoder = decoder
        self._ids: list[int] = []
        self._start = 0  # decoding begins here: far enough back that blanks between tokens come out right
        self._shown = 0  # tokens whose text was handed out

    def feed(self, token_ids: Sequence[int]) -> str:
        """Takes new tokens and returns the text that is complete with them."""
        self._ids += token_ids
        before, now = self._texts()
        if now.endswith(_INCOMPLETE) or len(now) <= len(before):
            return ""
        self._start, self._shown = self._shown, len(self._ids)
        return now[len(before) :]

    def finish(self) -> str:
        """The rest, without a character that was never completed."""
        before, now = self._texts()
        self._start = self._shown = len(self._ids)
        return now[len(before) :].rstrip(_INCOMPLETE)

    def _texts(self) -> tuple[str, str]:
        ids = self._ids[self._start :]
        return self._decoder.decode(ids[: self._shown - self._start]), self._decoder.decode(ids)


class ThoughtSplitter:
    """Tells thoughts from answers in a stream of text. The marks themselves and blanks right behind them are left out.

    Args:
        marks: what opens and closes a thought, such as <think> and </think>.
        thinking: True when the prompt has opened a thought already.
    """

    def __init__(self, marks: tuple[str, str], *, thinking: bool = False) -> None:
        self._marks = marks
        self._thinking = thinking
        self._held = ""
        self._skip_blanks = thinking

    def feed(self, text: str) -> list[tuple[Kind, str]]:
        """The parts that are certain now; text that may be the beginning of a mark waits."""
        self._held += text
        parts: list[tuple[Kind, str]] = []
        while True:
            mark = self._marks[1] if self._thinking else self._marks[0]
            before, found, after = self._held.partition(mark)
            if not found:
                break
            self._hand_out(before, parts)
            self._held, self._thinking, self._skip_blanks = after, not self._thinking, True
        kept = _overlap(self._held, mark)
        self._hand_out(self._held[: len(self._held) - kept], parts)
        self._held = self._held[len(self._held) - kept :]
        return parts

    def finish(self) -> list[tuple[Kind, str]]:
        """What was waiting."""
        parts: list[tuple[Kind, str]] = []
        self._hand_out(self._held, parts)
        self._held = ""
        return parts

    def _hand_out(self, text: str, parts: list[tuple[Kind, str]]) -> None:
        if self._skip_blanks:
            text = text.lstrip()
            self._skip_blanks = not text
        if text:
            parts.append(("thought" if self._thinking else "answer", text))


def _overlap(text: str, mark: str) -> int:
    """Length of the longest end of the text that the mark begins with."""
    return next((size for size in range(min(len(text), len(mark) - 1), 0, -1) if text.endswith(mark[:size])), 0)


def split_thought(text: str, marks: tuple[str, str], *, thinking: bool = False) -> tuple[str, str]:
    """(thought, answer) of a whole text."""
    splitter = ThoughtSplitter(marks, thinking=thinking)
    parts = splitter.feed(text) + splitter.finish()
    thought = "".join(piece for kind, piece in parts if kind == "thought")
    return thought, "".join(piece for kind, piece in parts if kind == "answer")


def cut_at(text: str, stop_strings: Sequence[str]) -> str:
    """The text before the first stop string."""
    ends = [place for stop in stop_strings if (place := text.find(stop)) >= 0]
    return text[: min(ends)] if ends else text


class StopWatch:
    """Of one answer."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, strings: Sequence[str]) -> None:
        self._tokenizer, self._strings = tokenizer, strings
        # a token has at least one byte, so a stop string lies in as many tokens as it has bytes
        self._window = max((len(text.encode()) for text in strings), default=0) + 1
        self._tail: list[int] = []

    def ends(self, token_ids: Sequence[int]) -> bool:
        """True when the answer holds a stop string with these tokens added."""
        if not self._strings:
            return False
        self._tail += token_ids
        text = self._tokenizer.decode(self._tail, skip_special_tokens=True)
        self._tail = self._tail[-self._window :]
        return any(stop in text for stop in self._strings)
