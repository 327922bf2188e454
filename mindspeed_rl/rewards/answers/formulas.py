"""Formulas, by math-verify and sympy in bounded time: parse them, compare their values and their solutions."""

from __future__ import annotations

import cmath
import itertools
import logging
import re
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from types import FrameType
from typing import Any

import sympy
from math_verify import ExprExtractionConfig, LatexExtractionConfig, LatexNormalizationConfig, parse, verify

from mindspeed_rl.rewards.answers.notation import CLOSING, OPENING, is_name
from mindspeed_rl.rewards.answers.quantities import MAX_LITERAL_LENGTH

logging.getLogger("math_verify").setLevel(logging.CRITICAL)  # it warns at every disabled limit and every unusual answer

ExtractionConfigs = tuple[LatexExtractionConfig | ExprExtractionConfig, ...]
_Parsed = list[Any]
"""A sympy object, if there is one, then the text; empty for text that math-verify cannot read."""

#: characters; longer answers are not evaluated
MAX_ANSWER_LENGTH = 1000
#: seconds of processor time for one comparison; wall-clock time would depend on the load of the machine
_CPU_LIMIT_S = 2.0
#: relative tolerance if one of the formulas has a decimal of at least six decimals or seven digits
_DECIMAL_TOLERANCE = 2e-6
_EXACT_TOLERANCE = 1e-9


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


# Comparing


def is_same_formula(given: str, expected: str) -> bool:
    """Return True if two formulas have the same value for all values of their variables."""
    if _is_same_value(given, expected):
        return True
    # "log" is the natural logarithm in half of the books
    natural = [re.sub(r"\\log(?![a-zA-Z_])", r"\\ln", text) for text in (given, expected)]
    return natural != [given, expected] and _is_same_value(*natural)


#: 3.14159 is not \\pi, 3.141593 is
_LONG_DECIMAL = re.compile(r"\d*\.\d{6,}|(?=[\d.]{8})\d+\.\d+")


def _is_same_value(given: str, expected: str) -> bool:
    parsed_expected, parsed_given = parse_label(expected), parse_formula(given)
    if not parsed_expected or not parsed_given:
        return False
    try:
        parsed_expected, parsed_given = (
            [_replace_imaginary_unit(side[0]), *side[1:]] for side in (parsed_expected, parsed_given)
        )
        values = _evaluate_pair(parsed_given[0], parsed_expected[0])
        if values is not None:
            rounded = _LONG_DECIMAL.search(given) or _LONG_DECIMAL.search(expected)
            if not _is_close(*values, _DECIMAL_TOLERANCE if rounded else _EXACT_TOLERANCE):
                return False
            if parsed_given[0].is_number and parsed_expected[0].is_number:
                return True
        return bool(verify(parsed_expected, parsed_given, timeout_seconds=None))
    except CpuLimitError:
        raise
    except Exception:  # noqa: BLE001 (simplification may fail in any way on arbitrary expressions, which then are not the same)
        return False


def have_same_solutions(given: Sequence[str], expected: Sequence[str]) -> bool | None:
    """Return True if two equations are multiples of each other, denominators cleared; None if they cannot be parsed."""
    numerators = []
    for side in (given, expected):
        parsed = [parse_formula(formula) for formula in side]
        if not all(parsed) or not all(isinstance(formula[0], sympy.Expr) for formula in parsed):
            return None
        numerators.append(sympy.fraction(sympy.together(_replace_imaginary_unit(parsed[0][0] - parsed[1][0])))[0])
    # x = 2 is a solution; it differs from an equation that has this solution
    min_symbols = 2 if is_name(expected[0]) or is_name(expected[1]) else 1
    if numerators[0].free_symbols != numerators[1].free_symbols or len(numerators[0].free_symbols) < min_symbols:
        return False
    points = [_evaluate_pair(numerators[0], numerators[1], start) for start in (_SAMPLE, 2.2360679775, 0.5772156649)]
    ratios = [values[0] / values[1] for values in points if values is not None and all(values)]
    return all(_is_close(ratio, ratios[0], _EXACT_TOLERANCE) for ratio in ratios) if len(ratios) == len(points) else None


def _replace_imaginary_unit(formula: sympy.Basic) -> sympy.Basic:
    """Return the formula with i as the imaginary unit; the parser reads it as a variable."""
    if not isinstance(formula, sympy.Expr):
        return formula
    return formula.subs({symbol: sympy.I for symbol in formula.free_symbols if str(symbol) == "i"})


def _is_close(a: complex, b: complex, tolerance: float) -> bool:
    return abs(a - b) <= tolerance * max(abs(a), abs(b))


_SAMPLE = 1.6180339887


def _evaluate_pair(a: Any, b: Any, start: float = _SAMPLE) -> tuple[complex, complex] | None:
    """Return the values of two expressions at one point; None if that is impossible.

    Expressions that differ there are different; this is a hundred times faster than simplifying their difference.
    """
    if any(not isinstance(side, sympy.Expr) or isinstance(side, sympy.Symbol) for side in (a, b)):
        return None
    symbols = sorted(a.free_symbols | b.free_symbols, key=str)
    point = {symbol: sympy.Float(start + 0.7320508 * index) for index, symbol in enumerate(symbols)}
    try:
        values = complex(a.evalf(15, subs=point)), complex(b.evalf(15, subs=point))
    except (TypeError, ValueError, OverflowError, ZeroDivisionError, AttributeError):
        return None  # functions and objects without a value
    return values if all(map(cmath.isfinite, values)) else None


def evaluate_constant(formula: str) -> float | None:
    """Return the value of a real constant formula; None for any other text."""
    parsed = parse_formula(formula)
    if not parsed or not isinstance(parsed[0], sympy.Expr) or not parsed[0].is_number:
        return None
    values = _evaluate_pair(parsed[0], parsed[0])
    return None if values is None or values[0].imag else values[0].real


def warm_up() -> None:
    """Parse answers of every form, so that the parser's tables exist before the workers are forked."""
    for answer in (
        r"\frac{\sqrt{2}}{3}+x^2-1",
        r"(-\infty,2)\cup[3,5)",
        r"\left\{1,\frac{1}{2}\right\}",
        r"\begin{pmatrix}1&2\\3&4\end{pmatrix}",
        r"\frac{4\pi}{3}",
        r"\text{a}",
        r"x\le 4",
        r"\ln 3",
        r"\binom{6}{2}",
        "(x-3)(x+5)",
        "(1,-2)",
        "6+9i",
        "2^{10}",
        "x=2",
        "1,2",
    ):
        parse_formula(answer)
