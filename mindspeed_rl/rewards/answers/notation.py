r"""One spelling for answers: delimiters, commands of LaTeX, ASCII formulas, Unicode, degrees; and splitting them.

Rewriting keeps the meaning. `sqrt(2)*pi`, `√2π` and `\sqrt{2}\pi` become one formula, `3½` becomes `3\frac{1}{2}`, and
`\sin 30^\circ` the sine of thirty degrees; the degree sign of a single number is removed, as units are.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence

_FUNCTIONS = "sin|cos|tan|cot|sec|csc|arcsin|arccos|arctan|ln|log|exp|gcd|lcm|max"
_GREEK = "pi|alpha|beta|gamma|theta|lambda|mu|sigma|phi|omega"
_DEGREE = r"(?:\^\s*(?:\\circ|\{\s*\\circ\s*\})|°|\\degree(?![a-zA-Z]))"

_REWRITES: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"\\\\?\s*\n\s*|\n\s*", " "),
        (r"^(?:\\\(|\\\[|\$+)|(?:\\\)|\\\]|\$+)$", ""),
        (r"\\(?:boxed|fbox)\{(.*)\}", r"\1"),
        (r"^\*\*(.*)\*\*$", r"\1"),
        (r"(?i)^(?:the )?(?:final )?answer\s*(?:is|:)\s*", ""),
        (r"(?<=\d)(?:\\[,!:;]|\{,\}|,\\!)(?=\d{3})", ","),
        (r"(?<!\\)\\[!;,: ]|~|\\q?quad(?![a-zA-Z])", " "),
        (r"\\(?:left|right|displaystyle|mathbf|mathit|bf|limits)(?![a-zA-Z])", ""),
        (r"[dtc]frac", "frac"),
        (r"\\\$", "$"),
        (
            rf"\\?(sin|cos|tan|cot|sec|csc)\s*(\^\s*\{{?\d\}}?)?\s*[({{]?\s*(\d+(?:\.\d+)?)\s*{_DEGREE}\s*[)}}]?",
            r"\\\1\2(\\frac{\3}{180}\\pi)",
        ),
        (
            rf"(?:(?<=^)|(?<=[,;=(\[])|(?<=and )|(?<=or ))(\s*-?\s*\d+(?:\.\d+)?)\s*{_DEGREE}"
            r"(?=\s*(?:$|[,;)\]]|and\b|or\b|\\text))",
            r"\1 degree",
        ),
        # after the rules above, which converted the degrees of a sine to radians and named those of a number
        (_DEGREE, ""),
        # a single letter after a number is a variable, unless it is typeset as a unit
        *(
            (
                rf"(?<=[\d}})])[\s~]*\\(?:text|mathrm)\s*\{{[\s~]*{letter}[\s~]*\}}(?=\s*(?:\^\s*\{{?\s*[23]\s*\}}?)?\s*$)",
                f" {unit}",
            )
            for letter, unit in (("m", "metre"), ("s", "second"), ("h", "hour"), ("g", "gram"), ("[lL]", "litre"))
        ),
        (r"\\(?:text|mathrm|textbf|textrm|textit|mbox|operatorname)\s*\{([^{}]*)\}", r" \1 "),
        (r"\\(?:overline|overrightarrow|overleftrightarrow|vec|widehat)\s*\{\s*([A-Za-z]+)\s*\}", r"\1"),
        (r"\\begin\{[bB]matrix\}", r"\\begin{pmatrix}"),
        (r"\\end\{[bB]matrix\}", r"\\end{pmatrix}"),
        (r"\\langle(?![a-zA-Z])|⟨", "("),
        (r"\\rangle(?![a-zA-Z])|⟩", ")"),
        (r"\\(?:leq?|leqslant)(?![a-zA-Z])|≤|⩽|<=", "≤"),
        (r"\\(?:geq?|geqslant)(?![a-zA-Z])|≥|⩾|>=", "≥"),
        (r"\\lt(?![a-zA-Z])", "<"),
        (r"\\gt(?![a-zA-Z])", ">"),
        (r"\\(?:approx|simeq|equiv)(?![a-zA-Z])|≈|≡", "="),
        (r"^\s*=\s*", ""),
        (r"\\(?:emptyset|varnothing)(?![a-zA-Z])|∅|\\\{\s*\\\}|\{\s*\}$", "∅"),
        (r"\\infty|∞|(?<![A-Za-z\\])oo(?![A-Za-z])", r"\\infty"),
        (r"π", r"\\pi "),
        (r"√\s*(\d+(?:\.\d+)?|[A-Za-z])", r"\\sqrt{\1}"),
        (r"(?:√|(?<![A-Za-z\\])sqrt)\s*\(([^()]*)\)", r"\\sqrt{\1}"),
        (rf"(?<![A-Za-z\\])({_FUNCTIONS}|{_GREEK}|(?<!\d)(?<!\d )min)(?![A-Za-z])", r"\\\1"),
        (r"\\lg(?![a-zA-Z])|(?<![A-Za-z\\])lg(?![A-Za-z])", r"\\log_{10}"),
        (r"(?<![A-Za-z\\])C\s*\(\s*(\d+)\s*,\s*(\d+)\s*\)", r"\\binom{\1}{\2}"),
        (r"(?<![A-Za-z\\])C_\{?(\d+)\}?\^\{?(\d+)\}?", r"\\binom{\1}{\2}"),
        # before the rule for a single star, which would see two products
        (r"\*\*", "^"),
        (r"\^\s*\(([^()]*)\)", r"^{\1}"),
        (r"(?<=[\w)}\]])\s*[*·⋅]\s*(?=[\w({\\])", r"\\cdot "),
        (r"÷", "/"),
        (r"，", ","),
        (r"（", "("),
        (r"）", ")"),
        (r"％", "%"),
        (r"[−–—]", "-"),
        (r"\\(?:neq?|not\s*=)(?![a-zA-Z])", "≠"),
        (r"\\[lr]?vert(?![a-zA-Z])", "|"),
        (r"^(\d+(?:\.\d+)?) to (\d+(?:\.\d+)?)$", r"\1:\2"),
        (r"(?i)(?<=\d)\s*([ap])\.?\s?m\b\.?", r" \1m"),
        (r"(?<=[0-9A-F])\)?\s*\(?(?:in )?base[ -]?(\d{1,2})\)?$", r"_{\1}"),
        (r"(?<=\S)\s*[,(]\s*(?:where |for )?[a-z]\s*(?:\\in(?![a-zA-Z])|∈)\s*\\mathbb\s*\{?[ZN]\}?\s*\)?$", ""),
        (r"^(?!C)[A-Z]\s*(?=\([^(),]*,[^()]*\)$)", ""),
        (r"\s+", " "),
    )
)
_FULL_WIDTH = {ord("０") + digit: str(digit) for digit in range(10)}
_SUPERSCRIPTS = {char: str(digit) for digit, char in enumerate("⁰¹²³⁴⁵⁶⁷⁸⁹")} | {"⁻": "-", "ⁿ": "n"}
_RAISED = re.compile(f"[{''.join(_SUPERSCRIPTS)}]+")
_VULGAR = re.compile("[¼-¾⅐-⅞]")


def normalize(answer: str) -> str:
    """Return the answer in one spelling of symbols, without delimiters, spacing, text commands and a final full stop."""
    answer = _ELLIPSIS.sub(_replace_ellipsis, answer.translate(_FULL_WIDTH))
    answer = answer.strip().rstrip(".。").strip().lstrip(":：").strip()
    if not answer.isascii():
        answer = _RAISED.sub(lambda match: f"^{{{''.join(_SUPERSCRIPTS[char] for char in match[0])}}}", answer)
        answer = _VULGAR.sub(_write_fraction, answer)
    for pattern, replacement in _REWRITES:
        answer = pattern.sub(replacement, answer)
    return answer.strip().rstrip(".。").strip()


_ELLIPSIS = re.compile(r"(?<![\d.])(\d{0,20}\.\d{1,40})\s*(?:\.{3,}|…|\\[lc]?dots(?![a-zA-Z]))")
_PERIOD = re.compile(r"(\d*\.\d*?)(?:(\d)\2{2,}|(\d{2,8})\3+)")


def _replace_ellipsis(match: re.Match[str]) -> str:
    r"""Return 0.1666... as 0.1\overline{6}; only the digits where none of them repeat."""
    period = _PERIOD.fullmatch(match[1])
    return match[1] if period is None else rf"{period[1]}\overline{{{period[2] or period[3]}}}"


def _write_fraction(match: re.Match[str]) -> str:
    r"""Return ½ as \frac{1}{2}."""
    top, _, bottom = unicodedata.normalize("NFKC", match[0]).partition("\u2044")
    return rf"\frac{{{top}}}{{{bottom}}}"


def fold_notation(answer: str) -> str:
    """Return the answer in lower case, without blanks except those between digits."""
    return re.sub(r"(?<!\d) | (?!\d)", "", re.sub(r"\s+", " ", answer)).casefold()


# Splitting

OPENING, CLOSING = "([{", ")]}"

_NAME = re.compile(r"\\?[A-Za-z]+(?:_(?:\w|\{\w+\}))?'?(?:\s*\([^()]*\))?|[A-Za-z]+(?: [A-Za-z]+)*|\\(?:angle|triangle) [A-Z]+")


def is_name(text: str) -> bool:
    r"""Return True for text that only names a quantity: x, a_1, f(x), P(A), Area, \angle ABC."""
    return _NAME.fullmatch(text.strip()) is not None


def split_outside(text: str, separators: Sequence[str]) -> list[str]:
    """Split a text at separators outside of all brackets."""
    parts, depth, start, position = [], 0, 0, 0
    while position < len(text):
        char = text[position]
        depth += (char in OPENING) - (char in CLOSING)
        separator = next((s for s in separators if depth == 0 and text.startswith(s, position)), None)
        if separator is None:
            position += 1
            continue
        parts.append(text[start:position].strip())
        position += len(separator)
        start = position
    return [*parts, text[start:].strip()]


def closes_at_end(text: str) -> bool:
    """Return True if the last character closes the first bracket; half-open intervals close with either bracket."""
    depth = 0
    for position, char in enumerate(text):
        depth += (char in OPENING) - (char in CLOSING)
        if depth == 0:
            return position == len(text) - 1
    return False
