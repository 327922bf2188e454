r"""Comparison of two answers by the rules of the upstreams that verifiers are named after.

`grade` (the `mathruler` family): spelling after normalisation, then an exact symbolic difference; fractions must be reduced and
integers written as such. `normalize_minerva` (DAPO): spelling only. The project's own rules are in `equality`.
"""

from __future__ import annotations

import re
from fractions import Fraction

import sympy

from mindspeed_rl.rewards.answers.expressions import MAX_ANSWER_LENGTH
from mindspeed_rl.rewards.answers.judge import MAX_LITERAL_LENGTH, CpuLimitError, cpu_limit, parse_formula, parse_label

_DECIMAL = re.compile(r"([+-]?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d*)?)\s*(\\?%)?")
_FRACTION = re.compile(r"([+-]?)\\?frac(?:\{([+-]?\d+)\}|(\d))(?:\{([+-]?\d+)\}|(\d))|([+-]?\d+)/([+-]?\d+)")


def _read_decimal(answer: str) -> tuple[Fraction, bool] | None:
    """Return (value without percent sign, True with one) of a decimal with optional thousands commas, else None."""
    match = _DECIMAL.fullmatch(answer) if len(answer) <= MAX_LITERAL_LENGTH else None
    if match is None or not any(char.isdigit() for char in match[1]):
        return None
    return Fraction(match[1].replace(",", "").rstrip(".")), match[2] is not None


def _read_fraction(answer: str) -> Fraction | None:
    r"""Return the value of `a/b`, `\frac{a}{b}` or `\frac12` with integers, else None."""
    match = _FRACTION.fullmatch(answer.replace(" ", "")) if len(answer) <= MAX_LITERAL_LENGTH else None
    if match is None:
        return None
    sign, *parts = match.groups()
    top, bottom = (int(part) for part in parts if part is not None)
    if bottom == 0:
        return None
    return -Fraction(top, bottom) if sign == "-" else Fraction(top, bottom)


def _read_rational(answer: str) -> Fraction | None:
    decimal = _read_decimal(answer)
    if decimal is None:
        return _read_fraction(answer)
    return decimal[0] / 100 if decimal[1] else decimal[0]


# The mathruler family


def grade(given: str, expected: str) -> bool:
    """Return True if the answers are the same by mathruler's rules.

    The answers have the same normal form (MATH's, or one that also drops units, words for powers of ten and LaTeX), or are
    tuples with the same brackets and the same elements; the symbolic difference of two elements may also be exactly zero. But a
    fraction of integers must have the same terms, and an integer is only equal to an integer.
    """
    if len(given) > MAX_ANSWER_LENGTH:
        return given.strip() == expected.strip()
    try:
        with cpu_limit():
            return _grade(given, expected)
    except (CpuLimitError, RecursionError):
        return False


def _grade(given: str, expected: str) -> bool:
    if _normalize_hendrycks(given) == _normalize_hendrycks(expected):
        return True
    if not given.strip() or not expected.strip():
        return False
    if _normalize_plain(given) == _normalize_plain(expected):
        return True
    given, expected = _strip_units(given), _strip_units(expected)
    given_parts, expected_parts = _split_tuple(given), _split_tuple(expected)
    if len(expected_parts) != len(given_parts):
        return False
    if len(expected_parts) > 1 and (expected[0] != given[0] or expected[-1] != given[-1]):
        return False
    return all(_is_same_element(*pair) for pair in zip(given_parts, expected_parts))


_INTEGER_FRACTION = re.compile(r"-?\d+/\d*[1-9]\d*")


def _is_same_element(given: str, expected: str) -> bool:
    plain_given, plain_expected = _normalize_plain(given), _normalize_plain(expected)
    if plain_given == plain_expected:
        return True
    if _INTEGER_FRACTION.fullmatch(plain_given) and _INTEGER_FRACTION.fullmatch(plain_expected):
        return False
    if _is_integer(plain_given) != _is_integer(plain_expected):
        return False
    rationals = [_read_rational(plain) for plain in (plain_given, plain_expected)]
    if None not in rationals:
        return rationals[0] == rationals[1]
    if not (_is_cheap(plain_given) and _is_cheap(plain_expected)):
        return False
    parsed_given, parsed_expected = parse_formula(given), parse_label(expected)
    if not all(parsed and isinstance(parsed[0], sympy.Expr) for parsed in (parsed_given, parsed_expected)):
        return False
    try:
        return sympy.simplify(parsed_given[0] - parsed_expected[0]) == 0
    except CpuLimitError:
        raise
    except Exception:  # noqa: BLE001 (sympy may fail in any way on arbitrary expressions, which then are not the same)
        return False


def _is_cheap(plain: str) -> bool:
    """Return False where mathruler expects a hang: more than two letters, or powers beyond one digit."""
    letters = {char for char in plain.replace("sqrt", "").replace("frac", "") if char.isalpha()}
    return len(letters) <= 2 and not re.search(r"\^\(|\^\d+\^|\^\d\d|\d{5,}!", plain)


def _is_integer(plain: str) -> bool:
    number = _read_decimal(plain)
    return number is not None and number[0].denominator == 1


def _split_tuple(text: str) -> list[str]:
    inner = text[1:-1]
    if len(text) > 2 and text[0] in "([" and text[-1] in ")]" and not set(inner) & set("()[]"):
        return [element.strip() for element in inner.split(",")]
    return [text]


def _compile(*rewrites: tuple[str, str]) -> tuple[tuple[re.Pattern[str], str], ...]:
    return tuple((re.compile(pattern), replacement) for pattern, replacement in rewrites)


_HENDRYCKS = _compile(
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


def _normalize_hendrycks(answer: str) -> str:
    """Return the answer as the MATH data set's own grader spells it (arXiv:2103.03874)."""
    answer = answer.strip()
    for pattern, replacement in _HENDRYCKS:
        answer = pattern.sub(replacement, answer)
    return answer


_UNITS = "degree cm centimeter meter mile second minute hour day week month year foot feet inch yard".split()


_UNITS_OFF = _compile(
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
    (r"(\d) *(?=\\[dt]?frac)|(\d) +(?=\d)", r"\1\2+"),  # mixed numbers are sums
)
_LATEX_OFF = _compile(
    (r"\\(?:text|mathrm|textbf)\{([^{}]*)\}", r"\1"),
    (r"\\[dt]?frac *\{([^{}]*)\} *\{([^{}]*)\}", r"\1/\2"),
    (r"\\[dt]?frac *(\d) *(\d)", r"\1/\2"),
    (r"\\infty", "inf"),
    (r"\\cup", "U"),
    (r"\\(?:cdot|times)", "*"),
    (r"[\\{}\s]", ""),
)


def _strip_units(answer: str) -> str:
    answer = answer.strip()
    for pattern, replacement in _UNITS_OFF:
        answer = pattern.sub(replacement, answer)
    return answer.strip()


def _normalize_plain(answer: str) -> str:
    """Return the answer in lower case without units, LaTeX commands and thousands commas; whole numbers as integers."""
    answer = _strip_units(answer)
    for pattern, replacement in _LATEX_OFF:
        answer = pattern.sub(replacement, answer)
    number = _read_decimal(answer)
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
_MINERVA_REWRITES = _compile(
    (r".*?\$(.*?)\$.*", r"$\1$"),
    (r"\\(?:text|textbf|overline)\{(.*?)\}", r"\1"),
    (r"\\boxed\{(.*)\}", r"\1"),
    (r"frac([^{])(.)", r"frac{\1}{\2}"),
    (r"sqrt([^{])", r"sqrt{\1}"),
    (r"\$", ""),
)


def normalize_minerva(answer: str) -> str:
    """Return the answer as the Minerva grader spells it (arXiv:2206.14858, appendix D.1), right of the last "="."""
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
