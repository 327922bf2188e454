"""Formulas by math-verify and sympy, in bounded time: reading them, whether two are the same or have the same solutions."""

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
from typing import Any

import sympy
from math_verify import ExprExtractionConfig, LatexExtractionConfig, LatexNormalizationConfig, parse, verify

from mindspeed_rl.rewards.answers.quantities import LONGEST_LITERAL
from mindspeed_rl.rewards.answers.spelling import CLOSING, OPENING, is_name

logging.getLogger("math_verify").setLevel(logging.CRITICAL)  # it warns of every switched-off limit and every odd answer

#: characters; what is longer is not worked out
LONGEST_ANSWER = 1000
#: seconds of processor time for one verdict; seconds on the clock would depend on what else the machine does
_CPU_LIMIT_S = 2.0
#: formulas of which one has a decimal of at least six decimals or seven digits agree within this (relative)
_DECIMAL_TOLERANCE = 2e-6
_EXACT_TOLERANCE = 1e-9


class TooCostly(Exception):
    """A comparison ran out of its processor time."""


@contextmanager
def cpu_limit(seconds: float = _CPU_LIMIT_S) -> Iterator[None]:
    """Raise TooCostly once the block has used so much processor time; without effect within another one, or in a thread.

    math-verify's own limits use SIGALRM and count whole seconds on the clock, in which a busy machine does little.
    """
    if threading.current_thread() is not threading.main_thread() or signal.getitimer(signal.ITIMER_VIRTUAL)[0]:
        yield
        return

    def stop(signum: int, frame: Any) -> None:
        raise TooCostly

    before = signal.signal(signal.SIGVTALRM, stop)
    # it repeats: sympy catches some exceptions on its way
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds, 0.2)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


# Reading

# Without the parser's own units: to it, h is hours in 2\\pi h.
_SPELLING = LatexNormalizationConfig(basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="all")
_BOX = (LatexExtractionConfig(boxed_match_priority=0, normalization_config=_SPELLING), ExprExtractionConfig())
#: product of all exponents of an answer that is worked out; integer powers cannot be interrupted
_LARGEST_EXPONENT = 20_000
#: brackets in brackets; the parser takes seconds for hundreds
_DEEPEST = 30
_EXPONENTS = re.compile(r"(?:\^|\*\*)\s*\{?\s*[+-]?\s*(\d+)")


def _is_endless(text: str) -> bool:
    """Return True for towers of powers, factorials of factorials and literals that would be worked out digit by digit."""
    if re.search(rf"\d{{{LONGEST_LITERAL},}}", text) or re.search(
        r"!\s*\)*\s*\}?!|\d{4,}\s*\)*\}?\s*!|\)\s*!|\^\s*\{?[^{}^]{0,20}!", text
    ):
        return True
    if re.search(r"\^\s*\{?\s*[\d.]+\s*\}?\s*\^|\^\s*\{[^{}]*\^", text):
        return True
    product = 1
    for digits in _EXPONENTS.findall(text):
        product *= max(int(digits[:12]), 1)
    return product > _LARGEST_EXPONENT or re.search(r"binom\D{0,4}\d{4,}", text) is not None


def _nesting(text: str) -> int:
    """How deep brackets stand in each other."""
    return max(itertools.accumulate((char in OPENING) - (char in CLOSING) for char in text), default=0)


def read_text(text: str, *arguments: Any, **options: Any) -> list[Any]:
    """Return math-verify's reading of a text, with the arguments of its `parse`; [] for none, and for what it cannot read."""
    try:
        return parse(text, *arguments, parsing_timeout=0, **options)  # 0: no limit of its own
    except TooCostly:
        raise
    except Exception:  # a parser of arbitrary text may fail in arbitrary ways; what it cannot read is no answer
        return []


def parse_formula(formula: str) -> list[Any]:
    """Return math-verify's reading of a bare formula: a sympy expression if it is one, then the text itself; [] for none."""
    if len(formula) > LONGEST_ANSWER or _nesting(formula) > _DEEPEST or _is_endless(formula):
        return []
    return read_text(f"\\boxed{{{formula}}}", _BOX)


parse_label = lru_cache(maxsize=4096)(parse_formula)  # all responses of a group share their label


# Comparing


def same_formula(given: str, wanted: str) -> bool:
    """Return True if two formulas have one value, whatever their variables are."""
    if _one_formula(given, wanted):
        return True
    # "log" is the natural logarithm in half of the books
    natural = [re.sub(r"\\log(?![a-zA-Z_])", r"\\ln", text) for text in (given, wanted)]
    return natural != [given, wanted] and _one_formula(*natural)


#: 3.14159 is not \\pi, 3.141593 is
_LONG_DECIMAL = re.compile(r"\d*\.\d{6,}|(?=[\d.]{8})\d+\.\d+")


def _one_formula(given: str, wanted: str) -> bool:
    parsed_wanted, parsed_given = parse_label(wanted), parse_formula(given)
    if not parsed_wanted or not parsed_given:
        return False
    try:
        parsed_wanted, parsed_given = ([_with_imaginary(side[0]), *side[1:]] for side in (parsed_wanted, parsed_given))
        values = _sample_values(parsed_given[0], parsed_wanted[0])
        if values is not None:
            rounded = _LONG_DECIMAL.search(given) or _LONG_DECIMAL.search(wanted)
            if not _close(*values, _DECIMAL_TOLERANCE if rounded else _EXACT_TOLERANCE):
                return False
            if parsed_given[0].is_number and parsed_wanted[0].is_number:
                return True
        return bool(verify(parsed_wanted, parsed_given, timeout_seconds=None))
    except TooCostly:
        raise
    except (
        Exception
    ):  # simplification of arbitrary expressions may fail in arbitrary ways; what it cannot decide is not the same
        return False


def same_solutions(given: Sequence[str], wanted: Sequence[str]) -> bool | None:
    """Return True if two equations are multiples of each other, denominators cleared; None where they cannot be read."""
    numerators = []
    for side in (given, wanted):
        parsed = [parse_formula(formula) for formula in side]
        if not all(parsed) or not all(isinstance(formula[0], sympy.Expr) for formula in parsed):
            return None
        numerators.append(sympy.fraction(sympy.together(_with_imaginary(parsed[0][0] - parsed[1][0])))[0])
    # x = 2 is a solution, which an equation that has it is not
    fewest = 2 if is_name(wanted[0]) or is_name(wanted[1]) else 1
    if numerators[0].free_symbols != numerators[1].free_symbols or len(numerators[0].free_symbols) < fewest:
        return False
    points = [_sample_values(numerators[0], numerators[1], start) for start in (_SAMPLE, 2.2360679775, 0.5772156649)]
    ratios = [values[0] / values[1] for values in points if values is not None and all(values)]
    return all(_close(ratio, ratios[0], _EXACT_TOLERANCE) for ratio in ratios) if len(ratios) == len(points) else None


def _with_imaginary(formula: Any) -> Any:
    """Return the formula with i as the imaginary unit, which the parser takes for a variable."""
    if not isinstance(formula, sympy.Expr):
        return formula
    return formula.subs({symbol: sympy.I for symbol in formula.free_symbols if str(symbol) == "i"})


def _close(a: complex, b: complex, tolerance: float) -> bool:
    return abs(a - b) <= tolerance * max(abs(a), abs(b))


_SAMPLE = 1.6180339887


def _sample_values(a: Any, b: Any, start: float = _SAMPLE) -> tuple[complex, complex] | None:
    """Return the values of two expressions at one point; None where that says nothing.

    Expressions that differ there are different, which is found a hundred times faster than by simplifying their difference.
    """
    if any(not isinstance(side, sympy.Expr) or isinstance(side, sympy.Symbol) for side in (a, b)):
        return None
    symbols = sorted(a.free_symbols | b.free_symbols, key=str)
    point = {symbol: sympy.Float(start + 0.7320508 * number) for number, symbol in enumerate(symbols)}
    try:
        values = complex(a.evalf(15, subs=point)), complex(b.evalf(15, subs=point))
    except (TypeError, ValueError, OverflowError, ZeroDivisionError, AttributeError):
        return None  # functions and objects without a value
    return values if all(map(cmath.isfinite, values)) else None


def value_of(formula: str) -> float | None:
    """Return the value of a constant formula; None for any other text."""
    parsed = parse_formula(formula)
    if not parsed or not isinstance(parsed[0], sympy.Expr) or not parsed[0].is_number:
        return None
    values = _sample_values(parsed[0], parsed[0])
    return None if values is None or values[0].imag else values[0].real


def warm_up() -> None:
    """Parse a few answers of every form, so that the parser's tables are there before the workers are forked."""
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
