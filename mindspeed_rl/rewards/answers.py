r"""Finding the final answer in a response, and taking off its wrapping."""

from __future__ import annotations

import re

_LAST_NUMBER = re.compile(r"-?\d*\.?\d+")
_ANSWER_PHRASES = ("he answer is", "final answer is", "答案是", "答案为", "答案：", "答案:")
_ANSWER_TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


def last_boxed(text: str) -> str | None:
    r"""Returns the content of the last `\boxed{...}` (`\fbox{...}`, `\boxed x`) with nested braces, None if there is none.

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
    r"""Returns the content of the last `\boxed{...}`; None if there is none or its braces never close."""
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
    r"""Returns the final answer: the last box, else what follows "the answer is", else the last number; "" if none."""
    boxed = last_boxed(text)
    if boxed is not None:
        return boxed.strip()
    for phrase in _ANSWER_PHRASES:
        if phrase in text:
            return text.rsplit(phrase, 1)[1].strip().split("\n")[0].rstrip(".。").strip()
    return last_number(text) or ""


def last_number(text: str) -> str | None:
    """Returns the last number in the text, thousands commas removed."""
    numbers = _LAST_NUMBER.findall(text.replace(",", ""))
    return numbers[-1] if numbers else None


def tagged_answer(text: str) -> str | None:
    """Returns the content of the first <answer>..</answer>, None if there is none."""
    match = _ANSWER_TAG.search(text)
    return match[1].strip() if match else None


_UNIT_NAMES = (
    "degrees?|cm|mm|km|kg|mph|meters?|metres?|miles?|feet|foot|inch(?:es)?|yards?|seconds?|minutes?|hours?|days?|weeks?|months?"
    "|years?|dollars?|cents?|units?|points?|square|cubic|grams?|pounds?|liters?|litres?"
    "|元|米|厘米|千米|公里|平方米|平方厘米|立方米|度|个|只|本|天|小时|分钟|秒|岁|人|名|千克|克|升"
)
_UNIT = rf"(?:\\(?:text|mathrm|textrm|mbox)\{{[^{{}}]*\}}|{_UNIT_NAMES})"
_UNITS_AFTER_NUMBER = re.compile(rf"(?<=[\d}})])\s*{_UNIT}(?:\s*{_UNIT})*(?:\^\{{?\d\}}?)?$")
_REWRITES: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"\n\s*", ""),
        (r"^(?:\\\(|\\\[|\$+)|(?:\\\)|\\\]|\$+)$", ""),
        (r"\\[!;,:]|~", ""),
        (r"\\(?:left|right|displaystyle|mathbf)(?![a-zA-Z])", ""),
        (r"[dt]frac", "frac"),
        (r"\\\$|\$", ""),
        (r"\^\s*(?:\\circ|\{\s*\\circ\s*\})|°", ""),
        (r"\\(?:text|mathrm|textbf|textrm|mbox)\{([^{}]*)\}", r"\1"),
        (r"，", ","),
        (r"（", "("),
        (r"）", ")"),
        (r"％", "%"),
    )
)


def tidy(answer: str) -> str:
    """Returns the answer without maths delimiters, spacing commands, units after a number and a closing full stop."""
    answer = answer.strip().rstrip(".。").strip().lstrip(":：").strip()
    answer = _UNITS_AFTER_NUMBER.sub("", answer)
    for pattern, replacement in _REWRITES:
        answer = pattern.sub(replacement, answer)
    return _UNITS_AFTER_NUMBER.sub("", answer.strip()).strip()
