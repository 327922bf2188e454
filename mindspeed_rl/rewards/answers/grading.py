r"""Deciding whether two answers are the same by the rules of the upstreams that verifiers are named after.

`grade` (the `mathruler` family): spelling after normalisation, then an exact symbolic difference; fractions must be reduced and
integers written as such. `minerva_normal_form` (DAPO): spelling only. `equality` holds the project's own rules.
"""

from __future__ import annotations

import re
from fractions import Fraction

import sympy

from mindspeed_rl.rewards.answers.formulas import LONGEST_ANSWER, TooCostly, cpu_limit, parse_formula, parse_label
from mindspeed_rl.rewards.answers.quantities import LONGEST_LITERAL

_DECIMAL = re.compile(r"([+-]?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d*)?)\s*(\\?%)?")
_FRACTION = re.compile(r"([+-]?)\\?frac(?:\{([+-]?\d+)\}|(\d))(?:\{([+-]?\d+)\}|(\d))|([+-]?\d+)/([+-]?\d+)")


def decimal_value(answer: str) -> tuple[Fraction, bool] | None:
    """Return (value without percent sign, whether it had one) of a decimal with optional thousands commas, else None."""
    match = _DECIMAL.fullmatch(answer) if len(answer) <= LONGEST_LITERAL else None
    if match is None or not any(char.isdigit() for char in match[1]):
        return None
    return Fraction(match[1].replace(",", "").rstrip(".")), match[2] is not None


def fraction_value(answer: str) -> Fraction | None:
    r"""Return the value of `a/b`, `\frac{a}{b}` or `\frac12` with integers, else None."""
    match = _FRACTION.fullmatch(answer.replace(" ", "")) if len(answer) <= LONGEST_LITERAL else None
    if match is None:
        return None
    sign, *pieces = match.groups()
    top, bottom = (int(piece) for piece in pieces if piece is not None)
    if bottom == 0:
        return None
    return -Fraction(top, bottom) if sign == "-" else Fraction(top, bottom)


def _rational(answer: str, number: tuple[Fraction, bool] | None) -> Fraction | None:
    if number is None:
        return fraction_value(answer)
    return number[0] / 100 if number[1] else number[0]


# The mathruler family


def grade(given: str, wanted: str) -> bool:
    """Return True by mathruler's rules.

    The answers are alike after normalisation (MATH's, or one that also drops units, words for powers of ten and LaTeX), or
    tuples of the same brackets whose elements are; an element may also differ symbolically by exactly zero. But a fraction of
    integers must be the same fraction in the same terms, and an integer is only equal to an integer.
    """
    if len(given) > LONGEST_ANSWER:
        return given.strip() == wanted.strip()
    try:
        with cpu_limit():
            return _grade(given, wanted)
    except (TooCostly, RecursionError):
        return False


def _grade(given: str, wanted: str) -> bool:
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
    parsed_given, parsed_wanted = parse_formula(given), parse_label(wanted)
    if not all(parsed and isinstance(parsed[0], sympy.Expr) for parsed in (parsed_given, parsed_wanted)):
        return False
    try:
        return sympy.simplify(parsed_given[0] - parsed_wanted[0]) == 0
    except TooCostly:
        raise
    except Exception:  # sympy may fail in arbitrary ways on arbitrary expressions; what it cannot decide is not the same
        return False


def _worth_evaluating(plain: str) -> bool:
    """Return False where mathruler fears a hang: more than two letters, or powers beyond one digit."""
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
    """Return the answer as the MATH data set's own grader spells it (arXiv:2103.03874)."""
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
    (r"(\d) *(?=\\[dt]?frac)|(\d) +(?=\d)", r"\1\2+"),  # mixed numbers are sums
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
    """Return the answer in lower case without units, LaTeX commands and thousands commas; whole numbers as integers."""
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
