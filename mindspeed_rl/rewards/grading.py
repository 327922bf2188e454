r"""Deciding whether two answers are the same, in the three ways that verifiers use.

`math_equal` (the verifier `acc`): spelling, then numbers, then math-verify's symbolic comparison. `grade` (the `mathruler`
family): spelling after normalisation, then an exact symbolic difference; fractions must be reduced and integers written as
such. `minerva_normal_form` (DAPO): spelling only. Plain numbers and fractions, most of what there is, never reach sympy.

math-verify's own time limits are switched off: they use SIGALRM and count whole seconds. The pool keeps the clock.
"""

from __future__ import annotations

import cmath
import logging
import re
from fractions import Fraction
from functools import lru_cache
from typing import Any

import sympy
from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

from mindspeed_rl.rewards.answers import tidy

logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns of every switched-off limit

_RELATIVE_TOLERANCE = 1e-4
_DECIMAL = re.compile(r"([+-]?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d*)?)\s*(\\?%)?")
_FRACTION = re.compile(r"([+-]?)\\?frac(?:\{([+-]?\d+)\}|(\d))(?:\{([+-]?\d+)\}|(\d))|([+-]?\d+)/([+-]?\d+)")


def decimal_value(answer: str) -> tuple[Fraction, bool] | None:
    """Returns (value without percent sign, whether it had one) of a decimal with optional thousands commas, else None."""
    match = _DECIMAL.fullmatch(answer)
    if match is None or not any(char.isdigit() for char in match[1]):
        return None
    return Fraction(match[1].replace(",", "").rstrip(".")), match[2] is not None


def fraction_value(answer: str) -> Fraction | None:
    r"""Returns the value of `a/b`, `\frac{a}{b}` or `\frac12` with integers, else None."""
    match = _FRACTION.fullmatch(answer.replace(" ", ""))
    if match is None:
        return None
    sign, *pieces = match.groups()
    top, bottom = (int(piece) for piece in pieces if piece is not None)
    if bottom == 0:
        return None
    return -Fraction(top, bottom) if sign == "-" else Fraction(top, bottom)


def math_equal(prediction: str, label: str) -> bool:
    """True if two answers are spelled alike, equal as numbers or symbolically equal.

    Numbers are equal within 1e-4 (relative); between decimals x, x / 100 and 100 x are one percentage.
    """
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
    given_fraction, wanted_fraction = _rational(given, given_number), _rational(wanted, wanted_number)
    if given_fraction is not None and wanted_fraction is not None:
        return _close(given_fraction, wanted_fraction)
    return symbolically_equal(given, wanted)


def _rational(answer: str, number: tuple[Fraction, bool] | None) -> Fraction | None:
    if number is None:
        return fraction_value(answer)
    return number[0] / 100 if number[1] else number[0]


def _close(a: Fraction | complex, b: Fraction | complex) -> bool:
    return abs(a - b) <= _RELATIVE_TOLERANCE * max(abs(a), abs(b))


# Towers of powers, long exponents and factorials of long numbers: sympy would compute them digit by digit.
_ENDLESS = re.compile(r"\^\s*\{?\s*[\d.]+\s*\^|\^\s*\{?\s*\d{5,}|\d{5,}\s*\}?\s*!|!\s*!")
_BOX = (LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig())


def parse_answer(answer: str) -> list[Any]:
    """Returns math-verify's reading of a bare answer: a sympy expression if it is one, then the text itself."""
    return parse(f"\\boxed{{{answer}}}", _BOX, parsing_timeout=None)


parse_label = lru_cache(maxsize=4096)(parse_answer)  # all responses of a group share their label


def symbolically_equal(given: str, wanted: str) -> bool:
    """True if math-verify takes the answers for the same, or both are real numbers within 1e-4 (relative).

    False for numbers too large to be worked out.
    """
    if _ENDLESS.search(given) or _ENDLESS.search(wanted):
        return False
    parsed_wanted, parsed_given = parse_label(wanted), parse_answer(given)
    values = _sample_values(parsed_given, parsed_wanted)
    if values is not None and not _close(*values):
        return False
    if verify(parsed_wanted, parsed_given, timeout_seconds=None):
        return True
    return values is not None and parsed_given[0].is_number and parsed_wanted[0].is_number


def _sample_values(parsed_a: list[Any], parsed_b: list[Any]) -> tuple[complex, complex] | None:
    """Returns the values of two expressions at one point; None where that says nothing.

    Expressions that differ there are different, which is found a hundred times faster than by simplifying their difference.
    """
    a, b = (parsed[0] if parsed else None for parsed in (parsed_a, parsed_b))
    if (
        not isinstance(a, sympy.Expr)
        or not isinstance(b, sympy.Expr)
        or isinstance(a, sympy.Symbol)
        or isinstance(b, sympy.Symbol)
    ):
        return None
    symbols = sorted(a.free_symbols | b.free_symbols, key=str)
    point = {symbol: sympy.Float(1.6180339887 + 0.7320508 * number) for number, symbol in enumerate(symbols)}
    try:
        values = complex(a.evalf(15, subs=point)), complex(b.evalf(15, subs=point))
    except (TypeError, ValueError, OverflowError, ZeroDivisionError, AttributeError):
        return None  # functions and objects without a value
    return values if all(map(cmath.isfinite, values)) else None


def warm_up() -> None:
    """Parses a few answers of every form, so that the parser's tables are there before the workers are forked."""
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
        parse_answer(answer)


# The mathruler family


def grade(given: str, wanted: str) -> bool:
    """True by mathruler's rules.

    The answers are alike after normalisation (MATH's, or one that also drops units, words for powers of ten and LaTeX), or
    tuples of the same brackets whose elements are; an element may also differ symbolically by exactly zero. But a fraction of
    integers must be the same fraction in the same terms, and an integer is only equal to an integer.
    """
    if hendrycks_normal_form(given) == hendrycks_normal_form(wanted):
        return True
    if not given.strip() or not wanted.strip():
        return False
    if plain_normal_form(given) == plain_normal_form(wanted):
        return True
    given, wanted = _without_units(given), _without_units(wanted)
    given_parts, wanted_parts = _tuple_elements(given), _tuple_elements(wanted)
    if len(wanted_parts) != len(given_parts):
        return False
    if len(wanted_parts) > 1 and (wanted[0] != given[0] or wanted[-1] != given[-1]):
        return False
    return all(_same_element(g, w) for g, w in zip(given_parts, wanted_parts))


_INTEGER_FRACTION = re.compile(r"-?\d+/\d*[1-9]\d*")


def _same_element(given: str, wanted: str) -> bool:
    plain_given, plain_wanted = plain_normal_form(given), plain_normal_form(wanted)
    if plain_given == plain_wanted:
        return True
    if _INTEGER_FRACTION.fullmatch(plain_given) and _INTEGER_FRACTION.fullmatch(plain_wanted):
        return False
    if _is_integer(plain_given) != _is_integer(plain_wanted):
        return False
    rationals = [_rational(plain, decimal_value(plain)) for plain in (plain_given, plain_wanted)]
    if None not in rationals:
        return rationals[0] == rationals[1]
    if not (_worth_evaluating(plain_given) and _worth_evaluating(plain_wanted)):
        return False
    parsed_given, parsed_wanted = parse_answer(given), parse_label(wanted)
    if not all(parsed and isinstance(parsed[0], sympy.Expr) for parsed in (parsed_given, parsed_wanted)):
        return False
    return sympy.simplify(parsed_given[0] - parsed_wanted[0]) == 0


def _worth_evaluating(plain: str) -> bool:
    """False where mathruler fears a hang: more than two letters, or powers beyond one digit."""
    letters = {char for char in plain.replace("sqrt", "").replace("frac", "") if char.isalpha()}
    return len(letters) <= 2 and not re.search(r"\^\(|\^\d+\^|\^\d\d|\d{5,}!", plain)


def _is_integer(plain: str) -> bool:
    number = decimal_value(plain)
    return number is not None and number[0].denominator == 1


def _tuple_elements(text: str) -> list[str]:
    inner = text[1:-1]
    if len(text) > 2 and text[0] in "([" and text[-1] in ")]" and not set(inner) & set("()[]"):
        return [element.strip() for element in inner.split(",")]
    return [text]


def _compiled(*rewrites: tuple[str, str]) -> tuple[tuple[re.Pattern[str], str], ...]:
    return tuple((re.compile(pattern), replacement) for pattern, replacement in rewrites)


_HENDRYCKS = _compiled(
    (r"^\\text\{(.+?)\}$", r"\1"),
    (r"\n|\\!|\\left|\\right|\^\{\\circ\}|\^\\circ|\\\$|\\?%", ""),
    (r"\\\\", r"\\"),
    (r"[td]frac", "frac"),
    (r"\\text\{ .*", ""),
    (r"(?<=[ {])\.", "0."),
    (r"^\.", "0."),
    (r"^[^=]{1,2}=([^=]*)$", r"\1"),
    (r"\\sqrt([^{])", r"\\sqrt{\1}"),
    (r"\s", ""),
    (r"\\frac([^{])([^{])", r"\\frac{\1}{\2}"),
    (r"\\frac([^{])\{", r"\\frac{\1}{"),
    (r"^0\.5$", r"\\frac{1}{2}"),
    (r"^(-?\d+)/(-?\d+)$", r"\\frac{\1}{\2}"),
)


def hendrycks_normal_form(answer: str) -> str:
    """Returns the answer as the MATH data set's own grader spells it (arXiv:2103.03874)."""
    answer = answer.strip()
    for pattern, replacement in _HENDRYCKS:
        answer = pattern.sub(replacement, answer)
    return answer


_UNITS = "degree cm centimeter meter mile second minute hour day week month year foot feet inch yard".split()


_UNITS_OFF = _compiled(
    (r"^\\text\{(.+?)\}$", r"\1"),
    (r"\\?[%$]", ""),
    (r" (?:or|and) ", " , "),
    (r"million", "*10^6"),
    (r"billion", "*10^9"),
    (r"trillion", "*10^12"),
    (rf"(?:{'|'.join(_UNITS)})(?:es)?s? *(?:\^[0-9]+)?", ""),
    (r"\^ *(?:\\circ|\{\\circ\})", ""),
    (r"^\{(.*)\}$", r"\1"),
    (r",\\! *", ""),
    (r"\\(?:left|right|displaystyle)(?![a-zA-Z])|\\[,;!]", ""),
    (r"(?<=\d),(?=\d{3}(?!\d))", ""),
    (r"- +", "-"),
    (r"(\d) +(?=\d|\\[dt]?frac)", r"\1+"),
)
_LATEX_OFF = _compiled(
    (r"\\(?:text|mathrm|textbf)\{([^{}]*)\}", r"\1"),
    (r"\\[dt]?frac *\{([^{}]*)\} *\{([^{}]*)\}", r"\1/\2"),
    (r"\\[dt]?frac *(\d) *(\d)", r"\1/\2"),
    (r"\\infty", "inf"),
    (r"\\cup", "U"),
    (r"\\(?:cdot|times)", "*"),
    (r"[\\{}\s]", ""),
)


def _without_units(answer: str) -> str:
    answer = answer.strip()
    for pattern, replacement in _UNITS_OFF:
        answer = pattern.sub(replacement, answer)
    return answer.strip()


def plain_normal_form(answer: str) -> str:
    """Returns the answer in lower case without units, LaTeX commands and thousands commas; whole numbers as integers."""
    answer = _without_units(answer)
    for pattern, replacement in _LATEX_OFF:
        answer = pattern.sub(replacement, answer)
    number = decimal_value(answer)
    return str(int(number[0])) if number and number[0].denominator == 1 else answer.lower()


# DAPO

_MINERVA_REPLACED = (
    ("an ", ""), ("a ", ""), (".$", "$"), ("\\$", ""), ("\\ ", ""), (" ", ""), ("mbox", "text"),
    (",\\text{and}", ","), ("\\text{and}", ","), ("\\text{m}", "\\text{}"),
)  # fmt: skip
_MINERVA_REMOVED = (
    "square", "ways", "integers", "dollars", "mph", "inches", "hours", "km", "units", "\\ldots", "sue", "points", "feet",
    "minutes", "digits", "cents", "degrees", "cm", "gm", "pounds", "meters", "meals", "edges", "students", "childrentickets",
    "multiples", "\\text{s}", "\\text{.}", "\\text{\ns}", "\\text{}^2", "\\text{}^3", "\\text{\n}", "\\text{}", "\\mathrm{th}",
    "^\\circ", "^{\\circ}", "\\;", ",\\!", "{,}", '"', "\\dots",
)  # fmt: skip
_MINERVA_REWRITES = _compiled(
    (r".*?\$(.*?)\$.*", r"$\1$"),
    (r"\\(?:text|textbf|overline)\{(.*?)\}", r"\1"),
    (r"\\boxed\{(.*)\}", r"\1"),
    (r"frac([^{])(.)", r"frac{\1}{\2}"),
    (r"sqrt([^{])", r"sqrt{\1}"),
    (r"\$", ""),
)


def minerva_normal_form(answer: str) -> str:
    """Returns the answer as the Minerva grader spells it (arXiv:2206.14858, appendix D.1), right of the last "="."""
    answer = answer.split("=")[-1]
    for before, after in _MINERVA_REPLACED:
        answer = answer.replace(before, after)
    for expression in _MINERVA_REMOVED:
        answer = answer.replace(expression, "")
    for pattern, replacement in _MINERVA_REWRITES:
        answer = pattern.sub(replacement, answer)
    if answer.replace(",", "").isdigit():
        answer = answer.replace(",", "")
    return answer.strip()
