"""Sees when the text of an answer holds a stop string."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


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
