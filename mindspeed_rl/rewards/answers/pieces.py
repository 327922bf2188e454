"""Answers taken apart: at separators outside of brackets, at their brackets, by what only names a quantity."""

from __future__ import annotations

import re
from collections.abc import Sequence

OPENING, CLOSING = "([{", ")]}"

_NAME = re.compile(r"\\?[A-Za-z]+(?:_(?:\w|\{\w+\}))?'?(?:\s*\([^()]*\))?|[A-Za-z]+(?: [A-Za-z]+)*|\\(?:angle|triangle) [A-Z]+")


def is_name(text: str) -> bool:
    """True for what only names a quantity: x, a_1, f(x), P(A), Area, \\angle ABC."""
    return _NAME.fullmatch(text.strip()) is not None


def split_outside(text: str, separators: Sequence[str]) -> list[str]:
    """The pieces between separators that stand outside all brackets."""
    pieces, depth, start, position = [], 0, 0, 0
    while position < len(text):
        char = text[position]
        depth += (char in OPENING) - (char in CLOSING)
        found = next((s for s in separators if depth == 0 and text.startswith(s, position)), None)
        if found is None:
            position += 1
            continue
        pieces.append(text[start:position].strip())
        position += len(found)
        start = position
    return [*pieces, text[start:].strip()]


def closes_at_end(text: str) -> bool:
    """True if the bracket at the start is closed by the last character; half-open intervals close with either bracket."""
    depth = 0
    for position, char in enumerate(text):
        depth += (char in OPENING) - (char in CLOSING)
        if depth == 0:
            return position == len(text) - 1
    return False
