r"""Finding the final answer in a response and deciding whether two answers are the same.

`math_equal` is what `acc` uses: spelling, then numbers, then math-verify's symbolic comparison. Plain numbers and fractions, most of
what there is, never reach sympy. math-verify's own time limits are switched off (they use SIGALRM and count whole seconds); the pool
keeps the clock.
"""

from __future__ import annotations

import logging
import math
import re
from fractions import Fraction
from functools import lru_cache
from typing import Any

from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns of every switched-off limit

_RELATIVE_TOLERANCE = 1e-4
_NUMBER = r"-?(?:\d+(?:,\d{3})*(?:\.\d*)?|\.\d+)"
_DECIMAL = re.compile(rf"({_NUMBER})\s*(\\?%)?")
_FRACTION = re.compile(r"(-?)\\?frac\{?(-?\d+)\}?\{?(-?\d+)\}?|(-?\d+)\s*/\s*(-?\d+)")
_LAST_NUMBER = re.compile(r"-?\d*\.?\d+")
_ANSWER_PHRASES = ("he answer is", "final answer is", "答案是", "答案为", "答案：", "答案:")


def last_boxed(text: str) -> str | None:
    r"""Return the content of the last `\boxed{...}` (or `\fbox{...}`, or `\boxed x`) with nested braces, None if there is none.

    A box that the response's end cut off counts with what it holds.
    """
    start = max(text.rfind("\\boxed"), text.rfind("\\fbox"))
    if start < 0:
        return None
    rest = text[start:].split("boxed" if text.startswith("\\boxed", start) else "fbox", 1)[1]
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
    r"""Return the final answer of a response: the last box, else what follows "the answer is", else the last number; "" if none."""
    boxed = last_boxed(text)
    if boxed is not None:
        return boxed.strip()
    for phrase in _ANSWER_PHRASES:
        if phrase in text:
            return text.rsplit(phrase, 1)[1].strip().split("\n")[0].rstrip(".。").strip()
    numbers = _LAST_NUMBER.findall(text.replace(",", ""))
    return numbers[-1] if numbers else ""


_UNITS = (
    "degrees?|cm|mm|km|kg|mph|meters?|metres?|miles?|feet|foot|inch(?:es)?|yards?|seconds?|minutes?|hours?|days?|weeks?|months?|years?"
    "|dollars?|cents?|units?|points?|square|cubic|grams?|pounds?|liters?|litres?|元|米|厘米|千米|公里|度|个|天|小时|分钟|秒|岁|人|千克|克|升"
)
_UNIT_AFTER_NUMBER = re.compile(
    rf"(?<=[\d}})])\s*(?:\\(?:text|mathrm|textrm|mbox)\{{[^{{}}]*\}}|(?:{_UNITS}))(?:\s*(?:{_UNITS}))*(?:\^\{{?\d\}}?)?\.?$"
)
_REWRITES: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern), by)
    for pattern, by in (
        (r"\n\s*", ""),
        (r"^(?:\\\(|\\\[|\$+)|(?:\\\)|\\\]|\$+)$", ""),
        (r"\\[!;,:]|~", ""),
        (r"\\(?:left|right|displaystyle|mathbf)(?![a-zA-Z])", ""),
        (r"[dt]frac", "frac"),
        (r"\\\$|\$", ""),
        (r"\^\{?\\circ\}?|°", ""),
        (r"\\(?:text|mathrm|textbf|mbox)\{([^{}]*)\}", r"\1"),
        (r"，", ","),
        (r"（", "("),
        (r"）", ")"),
        (r"[％]", "%"),
    )
)


def tidy(answer: str) -> str:
    """Return the answer without its wrapping: maths delimiters, spacing commands, units after a number, a closing full stop."""
    answer = answer.strip().rstrip(".。").strip().lstrip(":：").strip()
    answer = _UNIT_AFTER_NUMBER.sub("", answer)
    for pattern, by in _REWRITES:
        answer = pattern.sub(by, answer)
    answer = _UNIT_AFTER_NUMBER.sub("", answer.strip())
    return answer.strip()


def decimal_value(answer: str) -> tuple[Fraction, bool] | None:
    """Return (value without its percent sign, whether it had one) of a decimal number with optional thousands commas, else None."""
    match = _DECIMAL.fullmatch(answer)
    if match is None:
        return None
    return Fraction(match[1].replace(",", "").rstrip(".") or "0"), match[2] is not None


def fraction_value(answer: str) -> Fraction | None:
    r"""Return the value of `a/b`, `\frac{a}{b}` or `\fracab` with integers, else None."""
    match = _FRACTION.fullmatch(answer.replace(" ", ""))
    if match is None:
        return None
    sign, top, bottom, plain_top, plain_bottom = match.groups()
    denominator = int(bottom or plain_bottom)
    if denominator == 0:
        return None
    value = Fraction(int(top or plain_top), denominator)
    return -value if sign else value


def _close(a: Fraction | float, b: Fraction | float) -> bool:
    return math.isclose(a, b, rel_tol=_RELATIVE_TOLERANCE)


def math_equal(prediction: str, label: str) -> bool:
    """True if two answers are the same: spelled alike, equal as numbers (1e-4 relative; x, x/100 and 100x are one percentage), or
    symbolically equal."""
    given, wanted = tidy(prediction), tidy(label)
    if not given or not wanted:
        return False
    if given.casefold().replace(" ", "") == wanted.casefold().replace(" ", ""):
        return True
    if wanted in ("A", "B", "C", "D", "E"):
        letters = re.findall(r"\b([A-E])\b", given.upper())
        return bool(letters) and letters[-1] == wanted
    given_number, wanted_number = decimal_value(given), decimal_value(wanted)
    if given_number and wanted_number:
        return any(_close(given_number[0], wanted_number[0] * scale) for scale in (Fraction(1, 100), 1, 100))
    given_fraction = given_number[0] / (100 if given_number[1] else 1) if given_number else fraction_value(given)
    wanted_fraction = wanted_number[0] / (100 if wanted_number[1] else 1) if wanted_number else fraction_value(wanted)
    if given_fraction is not None and wanted_fraction is not None:
        return _close(given_fraction, wanted_fraction)
    return _symbolically_equal(given, wanted)


_BOX = (LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig())


def parse_answer(answer: str) -> list[Any]:
    """Return math-verify's reading of a bare answer: sympy expressions, then the text itself."""
    return parse(f"\\boxed{{{answer}}}", _BOX, parsing_timeout=None)


parse_label = lru_cache(maxsize=4096)(parse_answer)


def _symbolically_equal(given: str, wanted: str) -> bool:
    parsed_wanted, parsed_given = parse_label(wanted), parse_answer(given)
    if verify(parsed_wanted, parsed_given, timeout_seconds=None):
        return True
    values = [_real_value(parsed) for parsed in (parsed_given, parsed_wanted)]
    return None not in values and _close(*values)


def _real_value(parsed: list[Any]) -> float | None:
    """The number an expression without free symbols stands for."""
    expression = parsed[0] if parsed else None
    if not getattr(expression, "is_number", False) or not expression.is_real:
        return None
    return float(expression.evalf(15))
