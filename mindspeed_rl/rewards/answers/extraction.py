r"""Finding the final answer in a response, and the answers that a label accepts."""

from __future__ import annotations

import json
import re
from typing import Any

_LAST_NUMBER = re.compile(r"-?\d*\.?\d+")
_ANSWER_PHRASES = ("he answer is", "final answer is", "答案是", "答案为", "答案：", "答案:")


def last_boxed(text: str) -> str | None:
    r"""Return the content of the last `\boxed{...}` (`\fbox{...}`, `\boxed x`) with nested braces, None if there is none.

    A box that the end of the response cut off counts with what it holds.
    """
    start = max(text.rfind("\\boxed"), text.rfind("\\fbox"))
    if start < 0:
        return None
    rest = text[text.index("box", start) :].removeprefix("boxed").removeprefix("box")
    if not rest.startswith("{"):
        return rest.split("$")[0].strip()
    closing = _closing_brace(rest)
    return rest[1:] if closing is None else rest[1:closing]


def closed_boxed(text: str) -> str | None:
    r"""Return the content of the last `\boxed{...}`; None if there is none or its braces never close."""
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    rest = text[start + len("\\boxed") :]
    closing = _closing_brace(rest)
    return None if closing is None else rest[1:closing]


def _closing_brace(text: str) -> int | None:
    depth = 0
    for position, char in enumerate(text):
        depth += (char == "{") - (char == "}")
        if depth == 0:
            return position
    return None


def final_answer(text: str) -> str:
    r"""Return the final answer: the last box, else what follows "the answer is", else the last number; "" if none."""
    boxed = last_boxed(text)
    if boxed is not None:
        return boxed.strip()
    for phrase in _ANSWER_PHRASES:
        if phrase in text:
            return text.rsplit(phrase, 1)[1].strip().split("\n")[0].rstrip(".。").strip()
    return last_number(text) or ""


def last_number(text: str) -> str | None:
    """Return the last number in the text, thousands commas removed."""
    numbers = _LAST_NUMBER.findall(text.replace(",", ""))
    return numbers[-1] if numbers else None


def tagged_answer(text: str) -> str | None:
    """Return the content of the first <answer>..</answer>, None if there is none."""
    start = text.find("<answer>") + len("<answer>")
    end = text.find("</answer>", start)
    return text[start:end].strip() if start >= len("<answer>") and end >= 0 else None


def accepted_answers(label: Any) -> list[str]:
    """Return the answers that a label accepts: the items of a list, or of a JSON list of strings; else the label alone.

    [1, 2] without quotes is an interval, and one answer.
    """
    if isinstance(label, str) and label.lstrip().startswith('["'):
        try:
            items = json.loads(label)
        except (ValueError, RecursionError):
            return [label]
        return items if isinstance(items, list) and items and all(isinstance(item, str) for item in items) else [label]
    return [str(item) for item in label] if isinstance(label, (list, tuple)) else [str(label)]
