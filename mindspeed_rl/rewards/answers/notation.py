r"""One notation for answers: delimiters, commands of LaTeX, ASCII formulas, Unicode; and splitting them at brackets.

Rewriting keeps the meaning: `sqrt(2)*pi`, `√2π` and `\sqrt{2}\pi` become one formula, `3½` becomes `3\frac{1}{2}`. Letters keep
their size, and signs, points, primes and accents stay.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence

from mindspeed_rl.rewards.answers.expressions import FUNCTIONS, is_word

_FUNCTIONS = "|".join(sorted(FUNCTIONS - {"min"}))  # 5 min are minutes
_GREEK = "pi|alpha|beta|gamma|theta|lambda|mu|sigma|phi|omega"
_DEGREE = r"(?:\^\s*(?:\\circ|\{\s*\\circ\s*\})|°|\\degree(?![a-zA-Z]))"
_UNIT_LETTERS = {
    "m": "metre", "s": "second", "h": "hour", "g": "gram", "[lL]": "litre", "N": "newton", "J": "joule", "W": "watt",
    "V": "volt", "A": "ampere", "K": "kelvin", "C": "coulomb",
}  # fmt: skip

#: an operand of \over and \choose, with two levels of braces
_OPERAND = r"([^{}\\]*(?:(?:\\(?!over|choose)[a-zA-Z]+|\{[^{}]*\})[^{}\\]*)*?)"

_REWRITES: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"\s*\n\s*", " "),
        (r"^(?:\\\(|\\\[|\$+)|(?:\\\)|\\\]|\$+)$", ""),
        *(
            (rf"\{{\s*{infix}\s*\}}|^{infix}$", rf"\\{new}{{\1\3}}{{\2\4}}")
            for command, new in (("over", "frac"), ("choose", "binom"))
            for infix in (rf"{_OPERAND}\s*\\{command}(?![a-zA-Z])\s*{_OPERAND}",)
        ),
        (r"\\(?:[lc]?dots[bcmio]?)(?![a-zA-Z])|…|(?<!\.)\.{3}(?!\.)", r"\\ldots "),
        (r"(?i)(?<![A-Za-z\\])(?:positive\s+)?infinity(?![A-Za-z])|^正?无穷大?$", r"\\infty "),
        (r"(?i)(?<![A-Za-z\\])(?:US\s?\\?\$|USD\s*\\?\$?(?=\s*-?\d))", "$"),
        (r"\\(?:boxed|fbox)\{(.*)\}", r"\1"),
        (r"^\*\*(.*)\*\*$", r"\1"),
        *((rf"\\textcircled\s*\{{?\s*{index}\s*\}}?", chr(ord("①") + index - 1)) for index in range(1, 10)),
        (r"(?i)^(?:the )?(?:final )?answer\s*(?:is|:)\s*", ""),
        (r"\\[lr]?vert(?![a-zA-Z])|\\mid(?![a-zA-Z])", "|"),
        (r"\\lbrace(?![a-zA-Z])", r"\\{"),
        (r"\\rbrace(?![a-zA-Z])", r"\\}"),
        (r"(?<=\d)(?:\\[,!:;]|\{,\}|,\\!)(?=\d{3})", ","),
        (r"\\left\s*\.|\\right\s*\.|\\(?:left|middle|right|[bB]igg?[lr]?)(?![a-zA-Z])", ""),
        (r"\\(?:displaystyle|textstyle|mathbf|mathit|bf|rm|limits)(?![a-zA-Z])", ""),
        (r"(?<!\\)\\[!;,:> ]|~|\\q?quad(?![a-zA-Z])|\\hspace\*?\{[^{}]*\}|\\phantom\{[^{}]*\}", " "),
        (r"\\[dtc]frac(?![a-zA-Z])|(?<![\\A-Za-z])[dtc]?frac(?=\s*[{\d])", r"\\frac"),
        (r"\\\$", "$"),
        (rf"{_DEGREE}\s*(?:\\(?:text|mathrm|textrm)\s*\{{\s*)?([CF])(?![A-Za-z])\s*\}}?\s*$", r" degree\1"),
        (r"degreeC", "celsius"),
        (r"degreeF", "fahrenheit"),
        (_DEGREE, r"^\\circ "),
        (r"\{\s*\^\s*\\circ\s*\}", r"^\\circ "),
        # a single letter after a number is a variable, unless it is typeset as a unit
        *(
            (
                rf"(?<=[\d}})])[\s~]*\\(?:text|mathrm|textrm)\s*\{{[\s~]*{letter}[\s~]*\}}"
                r"(?=\s*(?:\^\s*\{?\s*[23]\s*\}?)?\s*(?:$|/|\\cdot))",
                f" {unit}",
            )
            for letter, unit in _UNIT_LETTERS.items()
        ),
        (rf"\\operatorname\*?\s*\{{\s*({_FUNCTIONS})\s*\}}", r"\\\1 "),
        (r"\\operatorname\*?\s*\{\s*([A-Za-z]{2,})\s*\}|\\(Re|Im|det|deg|arg|dim|ker|tr|sgn)(?![A-Za-z])", r"\\function{\1\2}"),
        (r"\\(?:text|mathrm|textbf|textrm|textit|mbox|operatorname|mathsf|textsf|emph)\s*\{([^{}]*)\}", r" \1 "),
        (r"\\(?:overline|overrightarrow|overleftrightarrow|vec|widehat)\s*\{\s*([A-Z]{2,})\s*\}", r"\1"),
        (r"\\(?:overrightarrow|overleftrightarrow|vec)\s*(?:\{\s*([A-Za-z])\s*\}|(?<=vec) ([A-Za-z]))", r"\1\2"),
        (r"\\langle(?![a-zA-Z])|⟨", "("),
        (r"\\rangle(?![a-zA-Z])|⟩", ")"),
        (r"\\(?:leq?|leqslant|leqq)(?![a-zA-Z])|≤|⩽|≦|<=", "≤"),
        (r"\\(?:geq?|geqslant|geqq)(?![a-zA-Z])|≥|⩾|≧|>=", "≥"),
        (r"\\lt(?![a-zA-Z])", "<"),
        (r"\\gt(?![a-zA-Z])", ">"),
        (r"\\(?:neq?|not\s*=)(?![a-zA-Z])|!=", "≠"),
        (r"\\(?:approx|simeq|equiv)(?![a-zA-Z])|≈|≡|:=|==", "="),
        (r"^\s*=\s*", ""),
        (r"\\(?:emptyset|varnothing)(?![a-zA-Z])|∅|^\\?\{\s*\\?\}$", "∅"),
        (r"\\infty|∞|(?<![A-Za-z\\])oo(?![A-Za-z])", r"\\infty"),
        (r"π", r"\\pi "),
        (r"∈", r"\\in "),
        (r"∪", r"\\cup "),
        (r"∩", r"\\cap "),
        (r"[ℝ]", r"\\mathbb{R}"),
        (r"\\(?:mathbb|mathbf|Bbb)\s*\{?\s*([A-Z])\s*\}?|\\([RZN])(?![A-Za-z])", r"\\mathbb{\1\2}"),
        (r"±", r"\\pm "),
        (r"∓", r"\\mp "),
        (r"√\s*(\d+(?:\.\d+)?|[A-Za-z])", r"\\sqrt{\1}"),
        (r"(?:√|(?<![A-Za-z\\])sqrt)\s*\(([^()]*(?:\([^()]*\)[^()]*)*)\)", r"\\sqrt{\1}"),
        (rf"(?<![A-Za-z\\])({_FUNCTIONS}|{_GREEK}|(?<!\d)(?<!\d )(?<!/)(?<!per )min)(?![A-Za-z])", r"\\\1"),
        (r"\\lg(?![a-zA-Z])|(?<![A-Za-z\\])lg(?![A-Za-z])", r"\\log_{10}"),
        (r"\\(?:dbinom|tbinom)(?![a-zA-Z])|\\choose(?=\{)", r"\\binom"),
        (r"(?<![A-Za-z\\])C\s*\(\s*(\d+)\s*,\s*(\d+)\s*\)", r"\\binom{\1}{\2}"),
        (r"(?<![A-Za-z\\])C_\{?(\d+)\}?\^\{?(\d+)\}?", r"\\binom{\1}{\2}"),
        (r"(?:\{\s*\}|^|(?<=[=\s(+*/-]))_\{?(\d+)\}?\s*C_\{?(\d+)\}?", r"\\binom{\1}{\2}"),
        # before the rule for a single star, which would see two products
        (r"\*\*", "^"),
        (r"\^\s*\(([^()]*(?:\([^()]*\)[^()]*)*)\)", r"^{\1}"),
        (r"\\(?:times|cdot|ast)(?![a-zA-Z])|(?<=[\w)}\]])\s*[*·⋅×∙]\s*(?=[\w({\\])", r"\\cdot "),
        (r"÷|\\div(?![a-zA-Z])", "/"),
        (r"[−–—]", "-"),
        (r"(?<![A-Za-z\d.])(\d+(?:\.\d+)?)[eE]([+-]?\d{1,3})(?![\w.])", r"\1\\cdot 10^{\2}"),
        (r"(?<![\w.,/}])(\d+) (\d+)/(\d+)(?![\w/])", r"\1\\frac{\2}{\3}"),
        (r"^(\d+(?:\.\d+)?) to (\d+(?:\.\d+)?)$", r"\1:\2"),
        (r"(?i)(?<=\d)\s*([ap])\.?\s?m\b\.?", r" \1m"),
        (r"(?<=[0-9A-F])\)?\s*\(?(?:in )?base[ -]?(\d{1,2})\)?$", r"_{\1}"),
        (r"(?<![\d.,])(?<!\d )(\d{1,3}) (\d{3})(?: (\d{3}))?(?: (\d{3}))?(?![\d,.]| \d)", r"\1\2\3\4"),
        (r"\s+", " "),
    )
)
_SUPERSCRIPTS = {char: str(digit) for digit, char in enumerate("⁰¹²³⁴⁵⁶⁷⁸⁹")} | {"⁻": "-", "ⁿ": "n"}
_RAISED = re.compile(f"[{''.join(_SUPERSCRIPTS)}]+")
_VULGAR = re.compile("[¼-¾⅐-⅞]")
#: characters of full width, and others of one ASCII meaning; 、 and 。 stay, they separate
_PLAIN = {code: chr(code - 0xFEE0) for code in range(0xFF01, 0xFF5F)} | str.maketrans(
    {"\u3000": " ", "\xa0": " ", "\u2009": " ", "℃": "°C", "℉": "°F", "㎝": "cm", "㎜": "mm", "㎞": "km", "㎏": "kg",
     "㎡": "m^2", "㎥": "m^3", "′": "'", "’": "'", "∶": ":", "︰": ":", "【": "[", "】": "]", "〔": "[", "〕": "]", "％": "%"}
)  # fmt: skip


def normalize(answer: str) -> str:
    """Return the answer in one notation, without delimiters, spacing commands, text commands and a final full stop."""
    answer = _ELLIPSIS.sub(_replace_ellipsis, answer.translate(_PLAIN))
    answer = answer.strip().rstrip(".。").strip().lstrip(":").strip()
    if not answer.isascii():
        answer = _RAISED.sub(lambda match: f"^{{{''.join(_SUPERSCRIPTS[char] for char in match[0])}}}", answer)
        answer = _VULGAR.sub(_write_fraction, answer)
    if "$" in answer:
        answer = re.sub(r"(?<!\\)\$([^$]*)(?<!\\)\$", r" \1 ", answer).strip()
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


_TOKEN = re.compile(r"\\[A-Za-z]+|\\\\|\d+(?:\.\d+)?|[A-Za-z]+|\S")
_GROUPED = re.compile(r"\{\s*(\\[A-Za-z]+|\w)\s*\}")


def tokenize(answer: str) -> tuple[str, ...]:
    """Return the tokens of a normalized answer, to compare texts: without blanks, braces around single tokens, and an article.

    Words are the same in small letters, in capitals and with a capital; the letters of formulas are not.
    """
    tokens = _TOKEN.findall(_GROUPED.sub(r"\1", answer))
    shortest = 2 if all(token.isalpha() or token in ",.'" for token in tokens) else 4
    folded = [
        token.lower()
        if token.isalpha() and len(token) >= shortest and (token.istitle() or token.isupper()) and is_word(token)
        else token
        for token in tokens
    ]
    return tuple(folded[1:] if folded[0] in ("the", "The") and len(folded) > 1 else folded) if folded else ()


# Splitting

OPENING, CLOSING = "([{", ")]}"


def split_outside(text: str, separators: Sequence[str]) -> list[str]:
    """Split a text at separators outside of all brackets; a comma within a number of thousands is not a separator."""
    parts, depth, start, position = [], 0, 0, 0
    while position < len(text):
        char = text[position]
        depth += (char in OPENING) - (char in CLOSING)
        if char == "\\":
            depth += text.startswith("\\begin", position) - text.startswith("\\end", position)
        separator = next((s for s in separators if depth == 0 and text.startswith(s, position)), None)
        if separator is None or (separator == "," and _THOUSANDS.match(text, max(position - 1, 0))):
            position += 1
            continue
        parts.append(text[start:position].strip())
        position += len(separator)
        start = position
    return [*parts, text[start:].strip()]


_THOUSANDS = re.compile(r"(?<!\d{3})(?<!\.)(?<!\.\d)(?<!\.\d\d)\d,\d{3}(?!\d)")


def closes_at_end(text: str) -> bool:
    """Return True if the last character closes the first bracket; half-open intervals close with either bracket."""
    depth = 0
    for position, char in enumerate(text):
        depth += (char in OPENING) - (char in CLOSING)
        if depth == 0:
            return position == len(text) - 1
    return False
