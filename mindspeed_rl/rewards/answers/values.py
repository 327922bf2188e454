r"""Typed values of answers, and how a text is read as one of them.

`read_value` decides on the type; `equality` compares values. The readers of a text are in one list, from the most specific
type to plain text, which every answer is in the end.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import lru_cache
from typing import Literal, TypeAlias

from mindspeed_rl.rewards.answers.evaluation import evaluate_real, is_same_value, symbols_of
from mindspeed_rl.rewards.answers.expressions import FUNCTIONS, Node, is_word, negate, parse_expression
from mindspeed_rl.rewards.answers.notation import CLOSING, OPENING, closes_at_end, split_outside, tokenize
from mindspeed_rl.rewards.answers.numerals import SCALES, read_words
from mindspeed_rl.rewards.answers.regions import OPPOSITE, Region, read_region
from mindspeed_rl.rewards.answers.units import Unit, read_currency, read_unit, split_unit


@dataclass(frozen=True)
class Quantity:
    """A number or a formula, with its percent sign and unit; `source` is its text, for the judge."""

    node: Node
    percent: bool = False
    unit: Unit | None = None
    source: str = field(default="", compare=False)


@dataclass(frozen=True)
class Choice:
    """Letters of a multiple choice, and the text after a single letter."""

    letters: frozenset[str]
    text: Value | None = None


@dataclass(frozen=True)
class Named:
    """Values with their names, in order.

    Attributes:
        pairs: (name, value).
        relation: the equation, where there is one pair that also is one: y = 2x + 1.
        is_derived: the name is an expression, as in p + q = 17.
        steps: sides between the name and the value, as in S = ab = 6.
    """

    pairs: tuple[tuple[str, Value], ...]
    relation: Relation | None = None
    is_derived: bool = False
    steps: tuple[Value, ...] = ()


@dataclass(frozen=True)
class Relation:
    """An equation (=), an inequality (< or ≤) or an exclusion (≠) between formulas."""

    operator: str
    left: Node
    right: Node


@dataclass(frozen=True)
class Collection:
    r"""Several values.

    Attributes:
        kind: its brackets: "()", "[]"; "set" for braces, "list" without brackets (neither has an order); "sequence" for values
            in order without brackets; "union".
        items: values.
    """

    kind: str
    items: tuple[Value, ...]


@dataclass(frozen=True)
class Matrix:
    """Rows of entries; a determinant is another kind than a matrix."""

    kind: str
    rows: tuple[tuple[Value, ...], ...]


@dataclass(frozen=True)
class Ratio:
    """Parts of 1 : 2 : 3; `time` where it could be a time of day as well."""

    parts: tuple[Node, ...]
    time: bool


_SymbolKind: TypeAlias = Literal["nothing", "reals", "undefined", "time", "date"]


@dataclass(frozen=True)
class Symbol:
    """A thing with several names or notations: the empty set, the reals, an undefined value, a date, a time with am or pm.

    Attributes:
        kind: kind of thing.
        key: tells it from others of the kind.
    """

    kind: _SymbolKind
    key: tuple[int | str, ...] = ()


@dataclass(frozen=True)
class Based:
    """A number with its base, and its digits."""

    value: int
    base: int
    digits: str


@dataclass(frozen=True)
class Residue:
    """A value modulo another."""

    value: Value
    modulus: str


@dataclass(frozen=True)
class Family:
    """Values with a parameter: k pi for all integers k.

    Attributes:
        value: with the parameter under one name for all families.
        domain: domain of the parameter: "Z", "N", or "N+".
        plain: the value with the parameter under its own name.
    """

    value: Value
    domain: str
    plain: Value


@dataclass(frozen=True)
class Text:
    """Everything else.

    Attributes:
        tokens: to compare it as text.
        parts: formulas and words in turn; empty for a text without words.
        source: the text itself, for the judge; "" where the judge must not see it.
    """

    tokens: tuple[str, ...]
    parts: tuple[Value | str, ...] = ()
    source: str = ""


Value: TypeAlias = (
    Quantity | Choice | Named | Relation | Collection | Matrix | Ratio | Region | Symbol | Based | Residue | Family | Text
)
_MAX_DEPTH = 6


@lru_cache(maxsize=8192)
def read_value(text: str, depth: int = 0) -> Value:
    """Return the value of a normalized answer."""
    text = text.strip()
    if depth <= _MAX_DEPTH:
        for reader in _READERS:
            value = reader(text, depth + 1)
            if value is not None:
                return value
    return Text(tokenize(text))


# Things with fixed names, times, dates, bases

_NOTATIONS: dict[_SymbolKind, tuple[str, ...]] = {
    "reals": (
        r"\mathbb{r}", "all real numbers", "all reals", "all real x", "all real values", "all real values of x",
        "the real numbers", r"(-\infty,\infty)", r"(-\infty,+\infty)", "全体实数", "实数集",
    ),
    "nothing": (
        "∅", "emptyset", "empty set", "the empty set", "no solution", "no solutions", "no real solution", "no real solutions",
        "no real roots", "无解", "空集",
    ),
    "undefined": ("dne", "does not exist", "the limit does not exist", "it does not exist", "不存在"),
}  # fmt: skip
_NAMES = {name: kind for kind, names in _NOTATIONS.items() for name in names}
_MEMBER_OF_REALS = re.compile(r"[A-Za-z]\s*\\in\s*")


def _read_symbol(text: str, depth: int) -> Value | None:
    folded = re.sub(r"\s*([,()])\s*", r"\1", " ".join(_MEMBER_OF_REALS.sub("", text, count=1).lower().split()))
    return Symbol(_NAMES[folded]) if folded in _NAMES else None


_TIME = re.compile(r"(\d{1,2})(?::(\d\d))?(?: ?([ap]m))?", re.IGNORECASE)
_DATE = re.compile(
    r"(\d{4})\s*([-/.])\s*(\d{1,2})(?:\s*\2\s*(\d{1,2}))?|(\d{1,2}[-/]\d{1,2}[-/]\d{4})|(\d{4})年(\d{1,2})月(?:(\d{1,2})日)?"
)
_MONTHS = "january february march april may june july august september october november december".split()
_MONTH = rf"(sept|{'|'.join(f'{month[:3]}(?:{month[3:]})?' if month[3:] else month for month in _MONTHS)})"
_DAY = r"(\d{1,2})(?:st|nd|rd|th)?"
_NAMED_DATE = re.compile(
    rf"(?i){_MONTH}\.?\s+{_DAY}\s*,?\s+(\d{{4}})|{_DAY}\s+(?:of\s+)?{_MONTH}\.?\s*,?\s+(\d{{4}})|{_MONTH}\.?\s*,?\s+(\d{{4}})"
)


def _read_named_date(text: str) -> Symbol | None:
    """Read May 1, 2024 and 1 May 2024."""
    match = _NAMED_DATE.fullmatch(text)
    if match is None:
        return None
    month = match[1] or match[5] or match[7]
    index = next(index for index, name in enumerate(_MONTHS, 1) if name.startswith(month[:3].lower()))
    return Symbol("date", (int(match[3] or match[6] or match[8]), index, int(match[2] or match[4] or 0)))


_RANGE = re.compile(r"(\d+)\s*[-~]\s*(\d+)")
_BASED = re.compile(r"\(?\s*([0-9A-F]*\d[0-9A-F]*|[A-F]+(?=\)?_\{?16))\s*\)?_\s*(?:\{\s*(\d{1,2})\s*\}|(\d))")
_RESIDUE = re.compile(r"(?:[A-Za-z]\s*=\s*)?(.*?\S)\s*(?:\\pmod\s*\{?\s*(\w+)\s*\}?|\(\s*\\?mod\s*(\w+)\s*\))")


def _read_date(text: str, depth: int) -> Value | None:
    """Read dates, ranges, times with am or pm, numbers with a base, and residues."""
    date = _DATE.fullmatch(text)
    if (named := _read_named_date(text)) is not None:
        return named
    if date is not None and not (date[2] == "." or (date[2] == "/" and not date[4])):
        year, month, day = (date[1], date[3], date[4]) if date[1] else (date[6], date[7], date[8])
        return Symbol("date", (date[5],) if date[5] else (int(year), int(month), int(day or 0)))
    span = _RANGE.fullmatch(text)
    if span is not None and (int(span[1]) < int(span[2]) or "~" in text):
        return Symbol("date", (span[1], span[2]))
    time = _TIME.fullmatch(text)
    if time is not None and time[3]:
        return Symbol("time", (int(time[1]), int(time[2] or 0), time[3].lower()))
    based = _BASED.fullmatch(text)
    if based is not None:
        base = int(based[2] or based[3])
        try:
            return Based(int(based[1], base), base, based[1].lstrip("0"))
        except ValueError:  # a digit that the base does not have
            return Text(tokenize(text))
    residue = _RESIDUE.fullmatch(text)
    if residue is None:
        return None
    return Residue(read_value(residue[1], depth), residue[2] or residue[3])


# Parameters

_DOMAIN = (
    r"\\in(?![a-zA-Z])\s*(?:\\mathbb\{([ZN])\}|([ZN]))\s*"
    r"((?:\^\s*\{?\s*(?:\+|\*|\\ast)\s*\}?|_\s*\{?\s*(?:\+|0|>\s*0|\\geq?\s*0|≥\s*0)\s*\}?)?)"
)
#: words of a domain -> its letter
_DOMAIN_WORDS = {
    "integer": "Z", "positive integer": "N+", "non-negative integer": "N", "nonnegative integer": "N", "natural number": "N",
    "整数": "Z", "正整数": "N+", "非负整数": "N", "自然数": "N",
}  # fmt: skip
_ENGLISH_DOMAIN = rf"({'|'.join(sorted((word for word in _DOMAIN_WORDS if word.isascii()), key=len, reverse=True))})s?"
_CHINESE_DOMAIN = rf"({'|'.join(word for word in _DOMAIN_WORDS if not word.isascii())})"
#: first values of a parameter, and its letter
_FIRST_VALUES = {r"1,2": "N+", r"1,2,3": "N+", r"0,1,2": "N", r"0,1,2,3": "N", r"0,\pm1": "Z", r"0,\pm1,\pm2": "Z"}
_PARAMETER = re.compile(
    rf"(.*?\S)(?:\s*[,;(]\s*(?:where |for |with |其中)?|\s+(?:where|for|with)\s)\s*(?:([a-z])\s*{_DOMAIN}"
    rf"|([a-z]) (?:is )?(?:an? |any |all )?{_ENGLISH_DOMAIN}"
    rf"|(?:any |all |every )?{_ENGLISH_DOMAIN} ([a-z])"
    rf"|([a-z])\s*(?:为|是)(?:任意)?{_CHINESE_DOMAIN}"
    r"|([a-z])\s*=\s*([01][\d,\s\\pm]*?)\s*,\s*\\ldots)\s*\)?",
    re.DOTALL,
)
#: \{ k\pi | k \in \mathbb{Z} \}, \{ x | x = k\pi, k \in \mathbb{Z} \}
_FAMILY_SET = re.compile(r"\\?\{\s*((?:[^{}|]|\{[^{}]*\})+?)\s*(?:\||:)\s*(.*?)\s*\\?\}", re.DOTALL)
#: a name that no answer has
_PARAMETER_NAME = r"\ell "


def _read_family(text: str, depth: int) -> Value | None:
    r"""Read k\pi, k \in \mathbb{Z}, with any name of the parameter; also as a set."""
    if (members := _FAMILY_SET.fullmatch(text)) is not None:
        is_named = members[2].replace(" ", "").startswith(f"{members[1]}=")
        text = members[2] if is_named else f"{members[1]}, {members[2]}"
    match = _PARAMETER.fullmatch(text)
    if match is None:
        return None
    body, first, blackboard, plain, sign, second, english, before, third, fourth, chinese, fifth, values = match.groups()
    name = next(name for name in (first, second, third, fourth, fifth) if name)
    if first is not None:
        domain = (blackboard or plain) if not sign else "N" if re.search(r"0", sign) and ">" not in sign else "N+"
    elif fifth is None:
        domain = _DOMAIN_WORDS[english or before or chinese]
    elif (domain := _FIRST_VALUES.get(re.sub(r"\s", "", values), "")) == "":
        return None

    def rename(run: re.Match[str]) -> str:
        letters = run[0]
        is_text = letters.startswith("\\") or (len(letters) > 1 and is_word(letters))
        return letters if is_text else letters.replace(name, _PARAMETER_NAME)

    return Family(read_value(re.sub(r"\\?[A-Za-z]+", rename, body), depth), domain, read_value(body, depth))


# Choices

_CHOICE = re.compile(
    r"(?:(?:option|choice|answer)\s*:?\s*)?\(?\s*([A-J])\s*\)?(?:\s*[.:、)]\s*(.*)|(?<=\))\s*(\S.*))?",
    re.IGNORECASE | re.DOTALL,
)
_LETTER = r"\(?\s*[A-J]\s*\)?"
_LETTERS = re.compile(rf"{_LETTER}(?:\s*(?:,|;|、|&|\\&|和|与|及|\band\b)\s*(?:and\s+)?{_LETTER})+")
_CIRCLED = re.compile(r"[①-⑳](?:\s*[、,;和与及]?\s*[①-⑳])*")


def _read_choice(text: str, depth: int) -> Value | None:
    if _CIRCLED.fullmatch(text):
        items = [_quantity(Fraction(ord(char) - ord("①") + 1)) for char in text if "①" <= char <= "⑳"]
        return items[0] if len(items) == 1 else Collection("list", tuple(items))
    if re.fullmatch("[A-Z]{2,}", text):  # a segment, a triangle or several choices
        return Text(tokenize(text))
    if _LETTERS.fullmatch(text):
        return Choice(frozenset(re.findall(r"\b[A-J]\b", text)))
    match = _CHOICE.fullmatch(text)
    if match is None or not match[1].isupper():
        return None
    rest = (match[2] or match[3] or "").strip()
    if re.search(r"\b[A-J]\b", rest) or (rest and rest[0] in "+-*/^=<>≤≥_!,;|"):
        return None
    return Choice(frozenset(match[1]), read_value(rest, depth) if rest else None)


# Matrices, systems, piecewise functions

_ENVIRONMENT = re.compile(
    r"(\\\{|[\[(|])?\s*\\begin\s*\{([A-Za-z]*)\*?\}\s*(?:\{[^{}]*\}|\[[^\]]*\])?(.*)\\end\s*\{\2\*?\}\s*([\])|])?", re.DOTALL
)
_CONDITION = re.compile(r"^(?:\s|,)*(?:if|when|for|where|当|若)?\s*|[\s,;]+$")
_MAX_ENTRIES = 64


def _read_matrix(text: str, depth: int) -> Value | None:
    match = _ENVIRONMENT.fullmatch(text)
    if match is None or r"\begin" in match[3]:
        return None
    rows = [row.split("&") for row in re.split(r"\\\\(?:\[[^\]]*\])?|\\cr(?![a-zA-Z])", match[3]) if row.strip()]
    if not rows or sum(map(len, rows)) > _MAX_ENTRIES:
        return None
    if match[2].endswith("matrix") or match[1] in ("[", "(", "|") or (match[2] == "array" and match[1] is None):
        kind = {"vmatrix": "determinant", "Vmatrix": "norm"}.get(match[2], "determinant" if match[1] == "|" else "matrix")
        return Matrix(kind, tuple(tuple(read_value(entry, depth) for entry in row) for row in rows))
    aligned = match[2] in ("aligned", "align", "split") or all(re.match(r"\s*[=<>≤≥≠]", row[1]) for row in rows if row[1:])
    lines = ["".join(row) if aligned else "&".join(row) for row in rows]
    if not any("&" in line for line in lines):
        return _merge([read_value(_CONDITION.sub("", line), depth) for line in lines], "list")
    cells = [[_CONDITION.sub("", cell) for cell in line.split("&")] for line in lines]
    return Collection("set", tuple(Collection("sequence", tuple(read_value(cell, depth) for cell in row)) for row in cells))


# Sets, tuples, lists

_SEPARATORS = (", and ", ", or ", " and ", " or ", ",", ";", "、", "和", "或", "且")
_ENUMERATION = re.compile(r"\\[lc]?dots(?![A-Za-z])|\.\.\.|…")
_PLUS_OR_MINUS = re.compile(r"\\pm(?![a-zA-Z])")
_POINT = re.compile(r"([A-Z](?:_\{?\w+\}?|')?)\s*(\((?:[^(),]+,)+[^(),]+\))")


def _read_brackets(text: str, depth: int) -> Value | None:
    r"""Read (1, 2), [1, 2], {1, 2}, \{1, 2\}, [[1, 2], [3, 4]]."""
    body = text[text.startswith(r"\{") :]
    body = body[:-2] + "}" if body.endswith(r"\}") else body
    if body[:1] not in tuple(OPENING) or body[-1:] not in tuple(CLOSING) or not closes_at_end(body):
        return None
    inner = body[1:-1]
    separated = split_outside(inner, (",", ";", "、"))
    if ", " not in inner:  # {100,200} has two members
        separated = split_outside(re.sub(r"(?<=\d),(?=\d)", " , ", inner), (",", ";", "、"))
    if body[0] == "{":
        if depth > 1 and text[0] == "{" and len(separated) == 1:  # braces of LaTeX around a member
            return read_value(inner, depth)
        return None if ":" in inner or "|" in inner else Collection("set", _read_all(separated, depth))
    if len(separated) < 2:
        return None
    kind = "sequence" if _ENUMERATION.search(inner) else body[0] + body[-1]
    return Collection(kind, _read_all(separated, depth)) if kind in ("()", "[]", "sequence") else None


def _read_all(texts: Sequence[str], depth: int) -> tuple[Value, ...]:
    values: list[Value] = []
    for text in texts:
        value = read_value(text, depth)
        if isinstance(value, Collection) and value.kind == "list" and _PLUS_OR_MINUS.search(text):
            values += value.items
        else:
            values.append(value)
    return tuple(values)


def _read_list(text: str, depth: int) -> Value | None:
    items = [item for item in split_outside(text, _SEPARATORS) if item]
    if len(items) == 1:
        return _read_plus_minus(text, depth)
    if not items or len(items) > _MAX_ENTRIES:
        return None
    return _merge(list(_read_all(items, depth)), "sequence" if _ENUMERATION.search(text) else "list")


def _read_plus_minus(text: str, depth: int) -> Value | None:
    r"""Read 1 \pm 2, and \pm 1 \mp 2 with its signs in parallel, as two values."""
    if len(_PLUS_OR_MINUS.findall(text)) != 1 or "=" in text:
        return None
    upper = _PLUS_OR_MINUS.sub("+", text).replace(r"\mp", "-").strip()
    lower = _PLUS_OR_MINUS.sub("-", text).replace(r"\mp", "+").strip()
    return Collection("list", (read_value(upper, depth), read_value(lower, depth)))


def _merge(values: list[Value], kind: str) -> Value:
    """Return one value of several in a row: names with their values, or a list; x = 1, 2 has two values of x."""
    if not isinstance(values[0], Named) or any(
        isinstance(value, Named) and (value.is_derived or value.steps) for value in values
    ):
        return Collection(kind, tuple(values))
    pairs: dict[str, list[Value]] = {}
    name = ""
    for value in values:
        if isinstance(value, Named) and len(value.pairs) == 1:
            name = value.pairs[0][0]
        elif not isinstance(value, Quantity | Text):
            return Collection(kind, tuple(values))
        pairs.setdefault(name, []).append(value.pairs[0][1] if isinstance(value, Named) else value)
    if len(pairs) > 1 and not all(isinstance(value, Named) for value in values):
        return Collection(kind, tuple(values))
    joined = {name: several[0] if len(several) == 1 else Collection("list", tuple(several)) for name, several in pairs.items()}
    return Named(tuple(joined.items()))


def _read_point(text: str, depth: int) -> Value | None:
    """Read A(1, 2), a point with its name."""
    match = _POINT.fullmatch(text)
    return None if match is None or match[1] == "C" else Named(((match[1], read_value(match[2], depth)),))


_MEMBER = re.compile(r"([A-Za-z](?:_\w)?)\s*\\in(?![a-zA-Z])\s*(.*)", re.DOTALL)


def _read_member(text: str, depth: int) -> Value | None:
    r"""Read x \in [1, 2] as the value that x has."""
    match = _MEMBER.fullmatch(text)
    return None if match is None or re.search(r"[=<>≤≥≠]", match[2]) else Named(((match[1], read_value(match[2], depth)),))


def _read_union(text: str, depth: int) -> Value | None:
    parts = split_outside(text, (r"\cup",))
    return Collection("union", tuple(read_value(part, depth) for part in parts)) if len(parts) > 1 else None


# Equations and inequalities

_FUNCTION_NAME = re.compile(r"\\?[A-Za-z]+(?:_\{?\w+\}?)?'*(?:\^\{-1\})?\s*\((?:[A-Za-z0-9,. \\|{}])+\)")
_NO_NAME = re.compile(rf"[xyz]\s*\(|\\(?:{'|'.join(FUNCTIONS - {'max', 'min'})}|frac|sqrt|binom)(?![A-Za-z])")
_INVERSE_NAME = re.compile(r"[A-Z]\s*\^\s*\{\s*(?:-1|T)\s*\}|\|\s*[A-Z]{2,}\s*\|")
_WORD_NAME = re.compile(r"\\?[A-Za-z]+'?(?:_\{?\w+\}?)?(?: [A-Za-z]+)*|m?\s*\\?(?:angle|triangle)\s*[A-Z]+'?|[\u4e00-\u9fff]+")
_DERIVED_NAME = re.compile(
    r"[A-Wa-w]{1,2}(?:\s*[+-]\s*[A-Wa-w]{1,2})+|[A-Za-z]{1,2}\s*/\s*[A-Za-z]{1,2}|\|[A-Za-z]+\|"
    r"|\\frac\s*\{[A-Za-z]{1,2}\}\s*\{[A-Za-z]{1,2}\}"
)


def _find_name(text: str) -> str | None:
    r"""Return the name that a text is: x, a_1, AB, f(x), P(A), Area, \angle ABC; None for other text."""
    if _FUNCTION_NAME.fullmatch(text) and not _NO_NAME.match(text):
        return re.sub(r"\s+", "", text)
    if _INVERSE_NAME.fullmatch(text):
        return re.sub(r"\s+", "", text)
    node = parse_expression(text)
    if node is not None and node.op == "symbol" and node.name not in ("e", "i", "\\pi", "\\infty"):
        return node.name
    if not _WORD_NAME.fullmatch(text) or (text[0] == "\\" and not text.startswith(("\\max", "\\min", "\\angle", "\\triangle"))):
        return None
    first = re.findall(r"[A-Za-z\u4e00-\u9fff]+", text)[0]
    is_name = (first.isupper() and len(first) > 1) or is_word(first) or first in ("max", "min", "angle", "triangle", "m")
    return " ".join(text.replace("\\", "").split()) if is_name or not first.isascii() else None


def _read_equation(text: str, depth: int) -> Value | None:
    sides = split_outside(text, ("=",))
    if len(sides) < 2:
        return None
    if not all(sides) or len(sides) > 8 or re.search("[<>≤≥≠]", _ENVIRONMENT.sub("", sides[-1]) + "".join(sides[:-1])):
        return Text(tokenize(text))
    nodes = [parse_expression(side) for side in sides]
    if all(node is not None and not symbols_of(node) for node in nodes):  # 2 + 3 = 5 is 5 if that is true
        holds = all(is_same_value(node, nodes[-1]) for node in nodes[:-1] if node is not None and nodes[-1] is not None)
        return read_value(sides[-1], depth) if holds else Text(tokenize(text))
    names = [_find_name(side) for side in sides]
    if names[-1] is not None and names[0] is None and len(sides) == 2:
        sides, nodes, names = sides[::-1], nodes[::-1], names[::-1]
    is_derived = names[0] is None and _DERIVED_NAME.fullmatch(sides[0]) is not None
    name = sides[0] if is_derived else names[0]
    relation = None
    if len(sides) == 2 and nodes[0] is not None and nodes[1] is not None:
        relation = Relation("=", nodes[0], nodes[1])
    if name is None or (names[-1] is not None and "(" not in name and len(sides) == 2):
        several = _read_tuple_equation(sides, depth) if len(sides) == 2 else None
        return several or relation or Text(tokenize(text))
    *steps, last = (read_value(side, depth) for side in sides[1:])
    if relation is not None and name.isupper() and len(name) > 1 and name.isalpha() and symbols_of(relation.right):
        return relation  # PV = nRT; AB = 5 is the length of a segment
    if any(not _leads_to(step, last) for step in steps):
        return Text(tokenize(text))
    return Named(((name, last),), relation, is_derived, tuple(steps))


def _leads_to(step: Value, last: Value) -> bool:
    """Return True unless a step of an equation is a constant other than its result, which may be rounded."""
    if not isinstance(step, Quantity) or not isinstance(last, Quantity):
        return isinstance(step, Quantity) and bool(symbols_of(step.node))
    if symbols_of(step.node) or is_same_value(step.node, last.node):
        return True
    value, decimals = evaluate_real(step.node), last.node.digits[1]
    return value is not None and decimals > 0 and abs(value - last.node.value) * 2 * 10**decimals <= 1


def _read_tuple_equation(sides: Sequence[str], depth: int) -> Value | None:
    """Read (x, y) = (1, 2)."""
    if not all(side.startswith("(") and side.endswith(")") for side in sides):
        return None
    names, values = (split_outside(side[1:-1], (",",)) for side in sides)
    found = [_find_name(name) for name in names]
    if None in found or len(names) != len(values) or len(names) < 2:
        return None
    return Named(tuple((name or "", read_value(value, depth)) for name, value in zip(found, values)))


def _read_inequality(text: str, depth: int) -> Value | None:
    region = read_region(text)
    if region is not None or r"\begin" in text:
        return region
    sides = [side.strip() for side in re.split("([<>≤≥≠])", text)]
    if len(sides) != 3:
        return None if len(sides) == 1 else _read_words(text, depth) or Text(tokenize(text))
    if sides[1] in ">≥":
        sides = [sides[2], OPPOSITE[sides[1]], sides[0]]
    left, right = parse_expression(sides[0]), parse_expression(sides[2])
    if left is None or right is None:
        return _read_words(text, depth) or Text(tokenize(text))
    return Relation(sides[1], left, right)


def _read_ratio(text: str, depth: int) -> Value | None:
    parts = text.split(":")
    if len(parts) < 2 or len(parts) > 8:
        return None
    nodes = [parse_expression(part.strip()) for part in parts]
    if None in nodes:
        return None
    clock = re.fullmatch(r"\d{1,2}:(\d\d)(?::\d\d)?", text)
    return Ratio(tuple(node for node in nodes if node is not None), clock is not None and int(clock[1]) < 60)


# Quantities

_HEAD = re.compile(r"(?i)((?:negative|minus)\s+|负)|([+-]?)\s*([$¥￥€£])\s*(-?)\s*")
_PERCENT = re.compile(r"(.*?\S)\s*(?:\\?%|per ?cent|pct\.?)", re.DOTALL)
_SCALED = re.compile(rf"(-?\d[\d,]*(?:\.\d+)?)\s*({'|'.join(SCALES)})(?![A-Za-z])(.*)", re.DOTALL)
_ORDINAL = re.compile(r"(\d*(?:1st|2nd|3rd|[04-9]th|1[1-3]th))")


def _quantity(value: Fraction, *, percent: bool = False, unit: Unit | None = None) -> Quantity:
    return Quantity(Node("number", value=value), percent, unit)


def _read_quantity(text: str, depth: int) -> Value | None:
    """Read a number in digits or words, or a formula, with sign, currency, percent sign and unit."""
    head = _HEAD.match(text)
    minus = head is not None and (head[1] is not None or "-" in (head[2], head[4]))
    unit = None if head is None or head[1] is not None else read_currency(head[3])
    rest = text if head is None else text[head.end() :]
    if _ORDINAL.fullmatch(rest):
        return _quantity(Fraction(int(rest[:-2])))
    percent = _PERCENT.fullmatch(rest)
    rest = rest if percent is None else percent[1]
    scaled = _SCALED.fullmatch(rest)
    worded = read_words(rest) if scaled is None else (Fraction(scaled[1].replace(",", "")) * SCALES[scaled[2]], scaled[3])
    if worded is not None:
        tail = worded[1].strip()
        found = read_unit(tail, allows_words=True) if tail else None
        if tail and found is None:
            return None
        return _quantity(-worded[0] if minus else worded[0], percent=percent is not None, unit=found or unit)
    formula, found = split_unit(rest)
    node = parse_expression(formula)
    if node is None or (found is not None and percent is not None):
        return None
    return Quantity(negate(node) if minus else node, percent is not None, found or unit, formula)


_TERM = re.compile(r"\s*(?:(?:,|and)\s+)?(\d+(?:\.\d+)?|\d+\s*/\s*\d+)\s*([A-Za-z]+|[\u4e00-\u9fff]+)\.?")
_MAX_TERMS = 4


def _read_sum(text: str, depth: int) -> Value | None:
    """Read two hundred and five, and the sum of 1 hour 30 minutes, 5 ft 6 in: units of one dimension in decreasing order."""
    worded = read_words(text)
    if worded is not None and not worded[1]:
        return _quantity(worded[0])
    terms: list[tuple[Fraction, Unit]] = []
    position = 0
    while (match := _TERM.match(text, position)) is not None and len(terms) < _MAX_TERMS:
        unit = read_unit(match[2], allows_words=True)
        if unit is None or (terms and (unit.dimensions != terms[-1][1].dimensions or unit.size >= terms[-1][1].size)):
            return None
        terms.append((Fraction(match[1].replace(" ", "")), unit))
        position = match.end()
    if len(terms) < 2 or text[position:].strip():
        return None
    smallest = terms[-1][1]
    return _quantity(sum((value * unit.size for value, unit in terms), Fraction(0)) / smallest.size, unit=smallest)


# Text

_WORDS = re.compile(r"((?<![\\A-Za-z_^{'])[A-Za-z]{3,}(?:[ -][A-Za-z]{2,})*(?![A-Za-z(^_])|[\u4e00-\u9fff]+)")
_JUDGED = re.compile(r"\\(?:sum|prod|int|iint|oint|lim|bmod|mod)(?![A-Za-z])")


def _read_words(text: str, depth: int) -> Value | None:
    """Read words with formulas between them; None for a text without words."""
    spans = [span.strip() for span in _WORDS.split(text)]
    if len(spans) < 3 or len(spans) > 2 * _MAX_DEPTH + 9:
        return None
    parts: list[Value | str] = []
    for index, span in enumerate(spans):
        parts.append(" ".join(tokenize(span)) if index % 2 or not any(map(str.isalnum, span)) else read_value(span, depth))
    return Text(tokenize(text), tuple(parts))


def _read_judged(text: str, depth: int) -> Value | None:
    """Read a formula with an integral, a limit or an infinite sum, which only math-verify can compare with a value."""
    if _JUDGED.search(text) is None:
        return None
    node = parse_expression(text)
    if node is not None:
        return Quantity(node)
    is_formula = _JUDGED.search(text) and not re.search(r"[=<>≤≥≠,;]|\\begin", re.sub(r"_\{[^{}]*\}", "", text))
    return Text(tokenize(text), source=text) if is_formula else None


_READERS: tuple[Callable[[str, int], Value | None], ...] = (
    _read_symbol,
    _read_family,
    _read_date,
    _read_choice,
    _read_sum,
    _read_matrix,
    _read_inequality,
    _read_member,
    _read_union,
    _read_point,
    _read_brackets,
    _read_judged,
    _read_list,
    _read_equation,
    _read_ratio,
    _read_quantity,
    _read_words,
)
