r"""Comparison of two final answers, for `acc`, `accuracy` and `cosine`.

Answers are compared by their kind: choices, numbers with units (`quantities`), sets, tuples and intervals item by item,
equations by their values, inequalities as intervals, words as words. The rest, formulas, are compared by math-verify.
Every comparison takes bounded time; answers that cannot be parsed or evaluated are not the same.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence

from mindspeed_rl.rewards.answers.formulas import (
    MAX_ANSWER_LENGTH,
    CpuLimitError,
    cpu_limit,
    have_same_solutions,
    is_same_formula,
)
from mindspeed_rl.rewards.answers.notation import (
    CLOSING,
    OPENING,
    closes_at_end,
    fold_notation,
    is_name,
    normalize,
    split_outside,
)
from mindspeed_rl.rewards.answers.quantities import compare_based, is_same_quantity, read_quantity, split_unit
from mindspeed_rl.rewards.answers.regions import Region, find_holes, has_relation, read_region

#: items of a set that are compared in any order
_MAX_ITEMS = 32


def is_same_answer(given: str, expected: str) -> bool:
    """Return True if two answers, the contents of boxes, are the same. Never raises; ends within seconds.

    Numbers must be equal exactly, with these exceptions: 50%, 50 and 0.5 are the same percentage; units of one dimension are
    converted, and a missing unit is ignored; a decimal with four or more digits may be the rounding of another one (3.1416 and
    3.14159), and one with six or more decimals that of a fraction.
    """
    if max(len(given), len(expected)) > MAX_ANSWER_LENGTH:
        return fold_notation(given) == fold_notation(expected)
    try:
        with cpu_limit():
            return _is_same(normalize(given), normalize(expected))
    except (CpuLimitError, RecursionError):
        return False


# Comparing

_EVERYTHING = frozenset(
    {
        r"\mathbb{r}",
        r"\r",
        "allrealnumbers",
        "allreals",
        "allrealx",
        "allrealvalues",
        "allrealvaluesofx",
        r"(-\infty,\infty)",
        r"(-\infty,+\infty)",
        "全体实数",
    }
)
_NOTHING = frozenset(
    {"∅", "emptyset", "theemptyset", "nosolution", "nosolutions", "norealsolution", "norealsolutions", "无解", "空集"}
)
_UNDEFINED = frozenset({"dne", "doesnotexist", "thelimitdoesnotexist", "itdoesnotexist", "不存在"})


def _is_same(given: str, expected: str, depth: int = 0) -> bool:
    if not given or not expected or depth > 6:
        return False
    given_text, expected_text = fold_notation(given), fold_notation(expected)
    if given_text == expected_text:
        return True
    for names in (_EVERYTHING, _NOTHING, _UNDEFINED):
        if given_text in names or expected_text in names:
            return given_text in names and expected_text in names
    if (choice := _read_choice(expected)) is not None:
        return _is_same_choice(_read_choice(given), given, choice, depth)
    if (chosen := _CHOSEN_TEXT.fullmatch(given)) is not None:
        given = chosen[1]
    return next(verdict for verdict in _compare_all(given, expected, depth) if verdict is not None)


def _compare_all(given: str, expected: str, depth: int) -> Iterator[bool | None]:
    """Yield the result of each comparison, most specific first; None if it does not apply. The last one always applies."""
    yield _compare_times(given, expected)
    yield _compare_quantities(given, expected)
    yield compare_based(given, expected)
    yield _compare_matrices(given, expected, depth)
    yield _compare_ratios(given, expected)
    yield _compare_regions(given, expected, depth)
    yield _compare_collections(given, expected, depth)
    yield _compare_equations(given, expected, depth)
    yield _compare_residues(given, expected, depth)
    yield _compare_measures(given, expected, depth)
    yield _compare_words(given, expected)
    yield is_same_formula(given, expected)


_CHOICE = re.compile(
    r"(?:(?:option|choice|answer)\s*:?\s*)?\(?\s*([A-J])\s*\)?(?:\s*[.:：、)]\s*(.*))?", re.IGNORECASE | re.DOTALL
)
_CHOSEN_TEXT = re.compile(r"\([A-J]\)\s*(\S.*)", re.DOTALL)


def _read_choice(text: str) -> tuple[str, str] | None:
    """Return (letter, text after it) of an answer that chooses one of several; None for any other answer."""
    match = _CHOICE.fullmatch(text)
    if match is None or not match[1].isupper() or re.search(r"\b[A-J]\b", match[2] or ""):
        return None
    return match[1], (match[2] or "").strip()


def _is_same_choice(chosen: tuple[str, str] | None, given: str, expected: tuple[str, str], depth: int) -> bool:
    """Return True for the same letter without a different text after it, and for the text of the expected letter."""
    letter, text = expected
    if chosen is None:
        return bool(text) and _is_same(given, text, depth + 1)
    return chosen[0] == letter and not (text and chosen[1] and not _is_same(chosen[1], text, depth + 1))


def _compare_quantities(given: str, expected: str) -> bool | None:
    a, b = read_quantity(given), read_quantity(expected)
    return None if a is None or b is None else is_same_quantity(a, b)


def _compare_measures(given: str, expected: str, depth: int) -> bool | None:
    r"""Compare formulas followed by units, as 36\pi cm^2; None if neither has a unit."""
    sides = [split_unit(text) for text in (given, expected)]
    units = [unit for _, unit in sides if unit is not None]
    if all(text == formula for text, (formula, _) in zip((given, expected), sides)):
        return None
    if len(units) == 2 and units[0] != units[1]:
        if units[0][0] != units[1][0]:
            return False
        factor = units[0][1] / units[1][1]
        return is_same_formula(rf"\frac{{{factor.numerator}}}{{{factor.denominator}}}({sides[0][0]})", sides[1][0])
    return _is_same(sides[0][0], sides[1][0], depth + 1)


_MODULUS = re.compile(r"\s*(?:\\pmod\s*\{?\s*\w+\s*\}?|\(\s*\\?mod\s*\w+\s*\))$")


def _compare_residues(given: str, expected: str, depth: int) -> bool | None:
    r"""Compare 17 \pmod{20} with 17; None unless exactly one side has a modulus."""
    sides = [_MODULUS.sub("", text) for text in (given, expected)]
    if (sides[0] == given) == (sides[1] == expected):
        return None
    return _is_same(sides[0], sides[1], depth + 1) or None


_TIME = re.compile(r"(\d{1,2})(?::(\d\d))?(?: ?([ap]m))?", re.IGNORECASE)


def _compare_times(given: str, expected: str) -> bool | None:
    """Compare times of day; None unless one of them has am or pm, which the other may omit."""
    first, second = (_TIME.fullmatch(text) for text in (given, expected))
    if first is None or second is None or not (first[3] or second[3]):
        return None
    halves = {half.lower() for half in (first[3], second[3]) if half}
    return len(halves) == 1 and int(first[1]) == int(second[1]) and int(first[2] or 0) == int(second[2] or 0)


def _compare_ratios(given: str, expected: str) -> bool | None:
    """Compare a : b : c by proportion; None unless both have the same number of parts, at least three, all of them numbers."""
    sides = [[read_quantity(part) for part in text.split(":")] for text in (given, expected)]
    if len(sides[0]) != len(sides[1]) or len(sides[0]) < 3:
        return None
    first, second = ([part.value for part in side if part is not None] for side in sides)
    if max(map(len, sides)) > _MAX_ITEMS or not len(first) == len(second) == len(sides[0]):
        return None
    return any(first) == any(second) and all(
        first[i] * second[j] == first[j] * second[i] for i, j in itertools.combinations(range(len(first)), 2)
    )


# Matrices

_MATRIX = re.compile(r"\\begin\s*\{pmatrix\}(.*)\\end\s*\{pmatrix\}", re.DOTALL)
_NESTED = re.compile(r"\[\s*\[([^\[\]]*(?:\]\s*,\s*\[[^\[\]]*)*)\]\s*\]")


def _compare_matrices(given: str, expected: str, depth: int) -> bool | None:
    """Compare two matrices entry by entry, one of which may be a list of rows or a tuple; None unless one is a matrix."""
    texts, matrices = (given, expected), [_read_matrix(given), _read_matrix(expected)]
    if matrices == [None, None]:
        return None
    one, other = (_read_rows(text) if matrix is None else matrix for matrix, text in zip(matrices, texts))
    if one is None or other is None:
        return None
    if None in matrices:  # a tuple is a column as well as a row
        one, other = _flatten_column(one), _flatten_column(other)
    if [len(row) for row in one] != [len(row) for row in other] or sum(map(len, one)) > _MAX_ITEMS:
        return False
    return all(_is_same(x, y, depth + 1) for row, expected_row in zip(one, other) for x, y in zip(row, expected_row))


def _flatten_column(rows: list[list[str]]) -> list[list[str]]:
    """Return a column as a row, other matrices unchanged."""
    return [[row[0] for row in rows]] if all(len(row) == 1 for row in rows) else rows


def _read_matrix(text: str) -> list[list[str]] | None:
    match = _MATRIX.fullmatch(text)
    if match is None or r"\begin" in match[1]:
        return None
    rows = [row.split("&") for row in re.split(r"\\\\|\\cr(?![a-zA-Z])", match[1]) if row.strip()]
    return [[entry.strip() for entry in row] for row in rows] or None


def _read_rows(text: str) -> list[list[str]] | None:
    """Return the rows of [[1, 2], [3, 4]]; (1, 2) as one row; None for other text."""
    nested = _NESTED.fullmatch(text)
    if nested is not None:
        return [split_outside(row, (",",)) for row in re.split(r"\]\s*,\s*\[", nested[1])]
    kind, items = _read_collection(text) or ("", [])
    return [items] if kind == "()" else None


# Regions

_REAL = re.compile(r"^[A-Za-z]\s*(?:\\in(?![a-zA-Z])|∈)\s*\\mathbb\s*\{?R\}?\s*,\s*")


def _compare_regions(given: str, expected: str, depth: int) -> bool | None:
    """Compare inequalities and set differences with each other and with intervals; None if neither answer is one."""
    texts = [_strip_membership(_REAL.sub("", text)) for text in (given, expected)]
    regions = [read_region(text) for text in texts]
    unread = any(region is None and has_relation(text) for region, text in zip(regions, texts))
    if unread or regions == [None, None]:
        return None
    one, other = (region or Region(None, text) for region, text in zip(regions, texts))
    if one.name and other.name and one.name != other.name:
        return False
    holes = [_split_plus_minus(region.holes or find_holes(region.text)) for region in (one, other)]
    if any(holes):
        return len(holes[0]) == len(holes[1]) and _have_same_items(holes[0], holes[1], depth)
    return _is_same(one.text, other.text, depth + 1)


# Sets, tuples, lists


def _read_collection(text: str) -> tuple[str, list[str]] | None:
    r"""Return (kind, items) of several things, None for one thing; kinds "set", "list" and "union" have no order."""
    if "\\begin" in text:
        return None
    unions = split_outside(text, (r"\cup", "∪"))
    if len(unions) > 1:
        return "union", unions
    body = text.replace(r"\{", "{").replace(r"\}", "}") if text.startswith(r"\{") else text
    if body[:1] in OPENING and body[-1:] in CLOSING and closes_at_end(body):
        items = split_outside(body[1:-1], (",", ";", "、"))
        if body[0] == "{" and text.startswith(r"\{"):
            return "set", items
        return (body[0] + body[-1], items) if len(items) > 1 else None
    items = [item for item in split_outside(text, (", and ", ", or ", " and ", " or ", ",", ";", "、", "和", "或")) if item]
    if len(items) == 1:
        items = _split_plus_minus([text])
    return ("list", items) if len(items) > 1 else None


_PLUS_OR_MINUS = re.compile(r"\\pm(?![a-zA-Z])|±")


def _split_plus_minus(items: Sequence[str]) -> list[str]:
    r"""Return \pm 2 as 2 and -2; items with no such sign, or with several, stay."""
    signed: list[str] = []
    for item in items:
        if len(_PLUS_OR_MINUS.findall(item)) == 1:
            signed += [_PLUS_OR_MINUS.sub("+", item).removeprefix("+").strip(), _PLUS_OR_MINUS.sub("-", item).strip()]
        else:
            signed.append(item.removeprefix("+").strip())
    return signed


_UNORDERED = ("set", "list", "union")


def _compare_collections(given: str, expected: str, depth: int) -> bool | None:
    a, b = (_read_collection(_strip_membership(text)) for text in (given, expected))
    if a is None or b is None:
        single, several = (given, b) if a is None else (expected, a)
        if several is None or "=" in single:
            return None
        kind, items = several
        # {5} may mean 5; a tuple only equals a tuple
        return kind in ("set", "list") and len(items) == 1 and _is_same(single, items[0], depth + 1)
    if len(a[1]) != len(b[1]) or len(a[1]) > _MAX_ITEMS:
        return False
    if a[0] in _UNORDERED and b[0] in _UNORDERED:
        return (a[0] == "union") == (b[0] == "union") and _have_same_items(a[1], b[1], depth)
    if "list" in (a[0], b[0]):
        # a point may be written without parentheses, in order
        other = b[0] if a[0] == "list" else a[0]
        if other != "()":
            return False
    elif a[0] != b[0]:
        return False
    return all(_is_same(x, y, depth + 1) for x, y in zip(a[1], b[1]))


def _have_same_items(given: Sequence[str], expected: Sequence[str], depth: int) -> bool:
    """Return True if the items match each other in any order."""
    remaining = list(expected)
    for item in given:
        match = next((other for other in remaining if _is_same(item, other, depth + 1)), None)
        if match is None:
            return False
        remaining.remove(match)
    return not remaining


_MEMBER = re.compile(r"\\in(?![a-zA-Z])|∈")


def _strip_membership(text: str) -> str:
    r"""Return [1, 2] for `x \in [1, 2]`."""
    parts = _MEMBER.split(text, maxsplit=1)
    return parts[1].strip() if len(parts) == 2 and is_name(parts[0].strip()) else text


# Equations


def _compare_equations(given: str, expected: str, depth: int) -> bool | None:
    """Compare values of equations such as x = 5 and 2 + 3 = 5; None where both are equations between formulas."""
    sides = [split_outside(re.sub(r":=|==", "=", text), ("=",)) for text in (given, expected)]
    counts = [len(parts) for parts in sides]
    if counts == [1, 1]:
        return None
    if min(counts) == 1:
        chain = sides[0] if counts[0] > 1 else sides[1]
        single = expected if counts[0] > 1 else given
        if not all(chain):
            return False
        value = chain[0] if is_name(chain[-1]) and not is_name(chain[0]) else chain[-1]
        # the other sides may name the value (x, 2a + b) or evaluate to it (2 + 3), but not contradict it
        for other in chain:
            if (
                other is not value
                and not re.search(r"[A-Za-z\u4e00-\u9fff]", _COMMAND.sub("", other))
                and not _is_same(other, value, depth + 1)
            ):
                return False
        return _is_same(value, single, depth + 1)
    if counts == [2, 2] and is_name(sides[0][0]) and is_name(sides[1][0]):
        same_name = fold_notation(sides[0][0]) == fold_notation(sides[1][0])
        if (same_name or any(len(side[0]) > 1 for side in sides)) and _is_same(sides[0][1], sides[1][1], depth + 1):
            return True
        if same_name:
            return False
        # x = 2y and y = x/2 are one line, and so are xy = 1 and y = 1/x; x = 3 and y = 3 are not
    return have_same_solutions(sides[0], sides[1]) if counts == [2, 2] else None


# Words

_COMMAND = re.compile(r"\\[A-Za-z]+")
_FUNCTIONS = frozenset("sin cos tan cot sec csc log ln exp sqrt frac pi arcsin arccos arctan infty gcd lcm max min mod".split())
_WORDY = re.compile(r"[^\W\d_]{3,}")


def _compare_words(given: str, expected: str) -> bool | None:
    """Compare texts by their fold_notation; None for formulas. In math-verify letters multiply: "listen" is "silent"."""
    if not (_is_text(given) or _is_text(expected)):
        return None
    words = [re.sub(r"\b(?:the|an|a)\b|[^\w]", "", text.casefold()) for text in (given, expected)]
    return bool(words[0]) and words[0] == words[1]


def _is_text(text: str) -> bool:
    plain = _COMMAND.sub(" ", text)
    return any(word.lower() not in _FUNCTIONS for word in _WORDY.findall(plain))
