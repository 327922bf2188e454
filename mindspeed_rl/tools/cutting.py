"""Cutting a tool's reply to a number of tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

Side = Literal["left", "right", "middle"]
_MARK = "(truncated)"
#: no tokenizer makes fewer tokens of a text worth reading; what is longer is cut before anything is counted
_CHARACTERS_A_TOKEN = 32


def cut(text: str, limit: int, side: Side, count: Callable[[str], int]) -> str:
    """The text, or its part that fits with a mark where something was taken.

    The sides are named as MindSpeed-RL and verl name them: "left" keeps the beginning, "right" the end, "middle" both.

    Args:
        limit: tokens of the result, the mark's among them; 0 for no limit.
        count: tokens of a text.
    """
    if limit <= 0 or (len(text) <= limit * _CHARACTERS_A_TOKEN and count(text) <= limit):
        return text
    mark = _MARK if count(_part(text, 0, side, _MARK)) <= limit else ""
    fitting, beyond = 0, min(len(text), limit * _CHARACTERS_A_TOKEN)
    while fitting < beyond:  # the most characters that fit
        tried = (fitting + beyond + 1) // 2
        if count(_part(text, tried, side, mark)) <= limit:
            fitting = tried
        else:
            beyond = tried - 1
    return _part(text, fitting, side, mark)


def _part(text: str, kept: int, side: Side, mark: str) -> str:
    """That many characters of the text, with the mark."""
    if side == "left":
        return text[:kept] + (mark and f"...{mark}")
    if side == "right":
        return (mark and f"{mark}...") + text[len(text) - kept :]
    head = (kept + 1) // 2
    return text[:head] + (mark and f"...{mark}...") + text[len(text) - (kept - head) :]
