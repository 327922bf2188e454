"""math-verify as the judge of formulas that `expressions` does not parse, such as sums and integrals; processor time limits."""

from __future__ import annotations

import cmath
import itertools
import logging
import re
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from types import FrameType
from typing import Any

import sympy
from math_verify import ExprExtractionConfig, LatexExtractionConfig, LatexNormalizationConfig, parse, verify

from mindspeed_rl.rewards.answers.expressions import MAX_ANSWER_LENGTH
from mindspeed_rl.rewards.answers.notation import CLOSING, OPENING

logging.getLogger("math_verify").setLevel(logging.CRITICAL)  # it warns at every disabled limit and every unusual answer

ExtractionConfigs = tuple[LatexExtractionConfig | ExprExtractionConfig, ...]
_Parsed = list[Any]
"""A sympy object, if there is one, then the text; empty for text that math-verify cannot read."""

#: longer literals are never answers, and CPython does not parse integers above 4,300 digits
MAX_LITERAL_LENGTH = 400
#: seconds of processor time for one comparison; wall-clock time would depend on the load of the machine
_CPU_LIMIT_S = 2.0
_TOLERANCE = 1e-9


class CpuLimitError(Exception):
    """A comparison exceeded its processor time."""


@contextmanager
def cpu_limit(seconds: float = _CPU_LIMIT_S) -> Iterator[None]:
    """Raise CpuLimitError after the block has used so much processor time; without effect inside another one, or in a thread.

    math-verify's own limits use SIGALRM and whole seconds of wall-clock time, in which a busy machine does little.
    """
    if threading.current_thread() is not threading.main_thread() or signal.getitimer(signal.ITIMER_VIRTUAL)[0]:
        yield
        return

    def stop(signum: int, frame: FrameType | None) -> None:
        raise CpuLimitError

    previous = signal.signal(signal.SIGVTALRM, stop)
    # repeated, because sympy catches some exceptions
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds, 0.2)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, previous)


# Reading

# Without the parser's own units, in which the h of 2\\pi h is hours.
_SPELLING = LatexNormalizationConfig(basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="all")
_BOXED: ExtractionConfigs = (
    LatexExtractionConfig(boxed_match_priority=0, normalization_config=_SPELLING),
    ExprExtractionConfig(),
)
#: product of all exponents of an answer; powers of integers cannot be interrupted
_MAX_EXPONENT = 20_000
#: nested brackets; the parser takes seconds for hundreds of them
_MAX_NESTING = 30
_EXPONENTS = re.compile(r"(?:\^|\*\*)\s*\{?\s*[+-]?\s*(\d+)")


def _is_too_costly(text: str) -> bool:
    """Return True for towers of powers, nested factorials and long literals, which would be evaluated digit by digit."""
    if re.search(rf"\d{{{MAX_LITERAL_LENGTH},}}", text) or re.search(
        r"!\s*\)*\s*\}?!|\d{4,}\s*\)*\}?\s*!|\)\s*!|\^\s*\{?[^{}^]{0,20}!", text
    ):
        return True
    if re.search(r"\^\s*\{?\s*[\d.]+\s*\}?\s*\^|\^\s*\{[^{}]*\^", text):
        return True
    product = 1
    for digits in _EXPONENTS.findall(text):
        product *= max(int(digits[:12]), 1)
    return product > _MAX_EXPONENT or re.search(r"binom\D{0,4}\d{4,}", text) is not None


def read_text(text: str, *configs: Any, **options: Any) -> _Parsed:
    """Parse a text with math-verify, with the options of its `parse`; return [] for text without an answer that it can read."""
    try:
        return parse(text, *configs, parsing_timeout=0, **options)  # 0: no limit of its own
    except CpuLimitError:
        raise
    except Exception:  # noqa: BLE001 (simplification may fail in any way on arbitrary expressions, which then are not the same)
        return []


def parse_formula(formula: str) -> _Parsed:
    """Parse a bare formula with math-verify; return [] for text that it cannot read, or that would take too long."""
    nesting = max(itertools.accumulate((char in OPENING) - (char in CLOSING) for char in formula), default=0)
    if len(formula) > MAX_ANSWER_LENGTH or nesting > _MAX_NESTING or _is_too_costly(formula):
        return []
    return read_text(f"\\boxed{{{formula}}}", _BOXED)


parse_label = lru_cache(maxsize=4096)(parse_formula)  # all responses of a group share their label


def judge_formulas(given: str, expected: str) -> bool:
    """Return True if two formulas are equal by math-verify, have the same variables, and agree in value at one point.

    Only expressions are judged: math-verify accepts wrong sets, relations and matrices.
    """
    sides = []
    for parsed in (parse_formula(given), parse_label(expected)):
        if not parsed or not isinstance(parsed[0], sympy.Expr):
            return False
        sides.append(parsed[0].subs({symbol: sympy.I for symbol in parsed[0].free_symbols if str(symbol) == "i"}))
    try:
        sides = [side.doit() if side.has(sympy.Limit, sympy.Mod) else side for side in sides]
        if sides[0].free_symbols != sides[1].free_symbols:
            return False
        values = _evaluate_pair(sides[0], sides[1])
        if values is None or abs(values[0] - values[1]) > _TOLERANCE * max(map(abs, values)):
            return False
        return bool(verify([sides[1]], [sides[0]], timeout_seconds=None))
    except CpuLimitError:
        raise
    except Exception:  # noqa: BLE001 (simplification may fail in any way on arbitrary expressions, which then are not the same)
        return False


def _evaluate_pair(a: Any, b: Any) -> tuple[complex, complex] | None:
    """Return the values of two expressions at one point; None if that is impossible."""
    symbols = sorted(a.free_symbols | b.free_symbols, key=str)
    point = {symbol: sympy.Float(1.6180339887 + 0.7320508 * index) for index, symbol in enumerate(symbols)}
    values = complex(a.evalf(15, subs=point)), complex(b.evalf(15, subs=point))
    return values if all(map(cmath.isfinite, values)) else None


def warm_up() -> None:
    """Parse answers of every form, so that the parser's tables exist before the workers are forked."""
    for answer in (
        r"\frac{\sqrt{2}}{3}+x^2-1",
        r"\sum_{k=1}^{3}\frac{1}{k}",
        r"\int_0^1 x\,dx",
        r"\lim_{x\to 0}\frac{\sin x}{x}",
        "2^{10}",
    ):
        parse_formula(answer)
