r"""Whether two final answers say the same: the verdict of `acc`, `accuracy` and `cosine`.

Answers are compared as what they are: choices, numbers with units (`quantities`), sets, tuples and intervals item by item,
equations by their values, inequalities as intervals, words as words. Only what is left, formulas, goes to math-verify.
Every verdict comes in bounded time, whatever the text: what cannot be read or worked out is not the same.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence

from mindspeed_rl.rewards.answers.formulas import LONGEST_ANSWER, TooCostly, cpu_limit, same_formula, same_solutions
from mindspeed_rl.rewards.answers.quantities import measured, read_quantity, same_based, same_quantity
from mindspeed_rl.rewards.answers.regions import Region, holes_of, read_region, speaks_of_region
from mindspeed_rl.rewards.answers.spelling import CLOSING, OPENING, cleaned, closes_at_end, is_name, spelling, split_outside

#: items of a set whose pairings are tried
_MOST_ITEMS = 32


def same_answer(given: str, wanted: str) -> bool:
    """Return True if two answers, as they stand in a box, say the same. Never raises; ends within seconds.

    Numbers are equal exactly, with these exceptions: 50%, 50 and 0.5 are one percentage; units of one dimension are
    converted, and a missing unit is no fault; a decimal may be another one's rounding from four digits on (3.1416 and
    3.14159), or a fraction's from six decimals on.
    """
    if max(len(given), len(wanted)) > LONGEST_ANSWER:
        return spelling(given) == spelling(wanted)
    try:
        with cpu_limit():
            return _same(cleaned(given), cleaned(wanted))
    except (TooCostly, RecursionError):
        return False


# ---------------------------------------------------------------------------------------------------------- comparing

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


def _same(given: str, wanted: str, depth: int = 0) -> bool:
    if not given or not wanted or depth > 6:
        return False
    spelled, target = spelling(given), spelling(wanted)
    if spelled == target:
        return True
    for names in (_EVERYTHING, _NOTHING, _UNDEFINED):
        if spelled in names or target in names:
            return spelled in names and target in names
    if (choice := _choice(wanted)) is not None:
        return _same_choice(_choice(given), given, choice, depth)
    if (chosen := _CHOSEN_TEXT.fullmatch(given)) is not None:
        given = chosen[1]
    return next(verdict for verdict in _verdicts(given, wanted, depth) if verdict is not None)


def _verdicts(given: str, wanted: str, depth: int) -> Iterator[bool | None]:
    """What each kind of answer says, most definite first; None for another kind. The last says one or the other."""
    yield _as_times(given, wanted)
    yield _as_quantities(given, wanted)
    yield same_based(given, wanted)
    yield _as_matrices(given, wanted, depth)
    yield _as_ratios(given, wanted)
    yield _as_regions(given, wanted, depth)
    yield _as_collections(given, wanted, depth)
    yield _as_equations(given, wanted, depth)
    yield _as_residues(given, wanted, depth)
    yield _as_measures(given, wanted, depth)
    yield _as_words(given, wanted)
    yield same_formula(given, wanted)


_CHOICE = re.compile(
    r"(?:(?:option|choice|answer)\s*:?\s*)?\(?\s*([A-J])\s*\)?(?:\s*[.:：、)]\s*(.*))?", re.IGNORECASE | re.DOTALL
)
_CHOSEN_TEXT = re.compile(r"\([A-J]\)\s*(\S.*)", re.DOTALL)


def _choice(text: str) -> tuple[str, str] | None:
    """Return (letter, what stands behind it) of an answer that chooses one of several; None for any other."""
    match = _CHOICE.fullmatch(text)
    if match is None or not match[1].isupper() or re.search(r"\b[A-J]\b", match[2] or ""):
        return None
    return match[1], (match[2] or "").strip()


def _same_choice(chosen: tuple[str, str] | None, given: str, wanted: tuple[str, str], depth: int) -> bool:
    """Return True for the same letter, without another text behind it, and for the text that stands behind the wanted letter."""
    letter, text = wanted
    if chosen is None:
        return bool(text) and _same(given, text, depth + 1)
    return chosen[0] == letter and not (text and chosen[1] and not _same(chosen[1], text, depth + 1))


def _as_quantities(given: str, wanted: str) -> bool | None:
    a, b = read_quantity(given), read_quantity(wanted)
    return None if a is None or b is None else same_quantity(a, b)


def _as_measures(given: str, wanted: str, depth: int) -> bool | None:
    """Compare formulas with units behind them, as 36\\pi cm^2; None where neither has one."""
    sides = [measured(text) for text in (given, wanted)]
    units = [unit for _, unit in sides if unit is not None]
    if all(text == rest for text, (rest, _) in zip((given, wanted), sides)):
        return None
    if len(units) == 2 and units[0] != units[1]:
        if units[0][0] != units[1][0]:
            return False
        factor = units[0][1] / units[1][1]
        return same_formula(rf"\frac{{{factor.numerator}}}{{{factor.denominator}}}({sides[0][0]})", sides[1][0])
    return _same(sides[0][0], sides[1][0], depth + 1)


_MODULUS = re.compile(r"\s*(?:\\pmod\s*\{?\s*\w+\s*\}?|\(\s*\\?mod\s*\w+\s*\))$")


def _as_residues(given: str, wanted: str, depth: int) -> bool | None:
    r"""Return 17 \pmod{20} against 17; None unless exactly one side names a modulus."""
    sides = [_MODULUS.sub("", text) for text in (given, wanted)]
    if (sides[0] == given) == (sides[1] == wanted):
        return None
    return _same(sides[0], sides[1], depth + 1) or None


_TIME = re.compile(r"(\d{1,2})(?::(\d\d))?(?: ?([ap]m))?", re.IGNORECASE)


def _as_times(given: str, wanted: str) -> bool | None:
    """Compare times of day; None unless one says which half of the day it means. The other may leave that out."""
    first, second = (_TIME.fullmatch(text) for text in (given, wanted))
    if first is None or second is None or not (first[3] or second[3]):
        return None
    halves = {half.lower() for half in (first[3], second[3]) if half}
    return len(halves) == 1 and int(first[1]) == int(second[1]) and int(first[2] or 0) == int(second[2] or 0)


def _as_ratios(given: str, wanted: str) -> bool | None:
    """Compare a : b : c by proportion; None unless both have as many parts, three or more, and all of them are numbers."""
    sides = [[read_quantity(part) for part in text.split(":")] for text in (given, wanted)]
    if len(sides[0]) != len(sides[1]) or len(sides[0]) < 3:
        return None
    first, second = ([part.value for part in side if part is not None] for side in sides)
    if max(map(len, sides)) > _MOST_ITEMS or not len(first) == len(second) == len(sides[0]):
        return None
    return any(first) == any(second) and all(
        first[i] * second[j] == first[j] * second[i] for i, j in itertools.combinations(range(len(first)), 2)
    )


# Matrices

_MATRIX = re.compile(r"\\begin\s*\{pmatrix\}(.*)\\end\s*\{pmatrix\}", re.DOTALL)
_NESTED = re.compile(r"\[\s*\[([^\[\]]*(?:\]\s*,\s*\[[^\[\]]*)*)\]\s*\]")


def _as_matrices(given: str, wanted: str, depth: int) -> bool | None:
    """Compare two matrices entry by entry, of which one may be a list of rows or a tuple; None unless one is a matrix."""
    texts, matrices = (given, wanted), [_matrix(given), _matrix(wanted)]
    if matrices == [None, None]:
        return None
    one, other = (_written_plainly(text) if matrix is None else matrix for matrix, text in zip(matrices, texts))
    if one is None or other is None:
        return None
    if None in matrices:  # a tuple is a column as well as a row
        one, other = _laid_down(one), _laid_down(other)
    if [len(row) for row in one] != [len(row) for row in other] or sum(map(len, one)) > _MOST_ITEMS:
        return False
    return all(_same(x, y, depth + 1) for row, wanted_row in zip(one, other) for x, y in zip(row, wanted_row))


def _laid_down(rows: list[list[str]]) -> list[list[str]]:
    """Return a column as a row; other matrices as they are."""
    return [[row[0] for row in rows]] if all(len(row) == 1 for row in rows) else rows


def _matrix(text: str) -> list[list[str]] | None:
    match = _MATRIX.fullmatch(text)
    if match is None or r"\begin" in match[1]:
        return None
    rows = [row.split("&") for row in re.split(r"\\\\|\\cr(?![a-zA-Z])", match[1]) if row.strip()]
    return [[entry.strip() for entry in row] for row in rows] or None


def _written_plainly(text: str) -> list[list[str]] | None:
    """Return the rows of [[1, 2], [3, 4]]; (1, 2) as one row; None for other text."""
    nested = _NESTED.fullmatch(text)
    if nested is not None:
        return [split_outside(row, (",",)) for row in re.split(r"\]\s*,\s*\[", nested[1])]
    kind, items = _collection(text) or ("", [])
    return [items] if kind == "()" else None


# Regions

_REAL = re.compile(r"^[A-Za-z]\s*(?:\\in(?![a-zA-Z])|∈)\s*\\mathbb\s*\{?R\}?\s*,\s*")


def _as_regions(given: str, wanted: str, depth: int) -> bool | None:
    """Compare inequalities and set differences with each other and with intervals; None where neither is one."""
    texts = [_without_membership(_REAL.sub("", text)) for text in (given, wanted)]
    regions = [read_region(text) for text in texts]
    unread = any(region is None and speaks_of_region(text) for region, text in zip(regions, texts))
    if unread or regions == [None, None]:
        return None
    one, other = (region or Region(None, text) for region, text in zip(regions, texts))
    if one.name and other.name and one.name != other.name:
        return False
    holes = [_both_signs(region.holes or holes_of(region.text)) for region in (one, other)]
    if any(holes):
        return len(holes[0]) == len(holes[1]) and _same_items(holes[0], holes[1], depth)
    return _same(one.text, other.text, depth + 1)


# Sets, tuples, lists


def _collection(text: str) -> tuple[str, list[str]] | None:
    r"""Return (kind, items): "set" and "list" have no order, "union" neither; else the brackets, in order. None for a single thing."""
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
        items = _both_signs([text])
    return ("list", items) if len(items) > 1 else None


_PLUS_OR_MINUS = re.compile(r"\\pm(?![a-zA-Z])|±")


def _both_signs(items: Sequence[str]) -> list[str]:
    r"""\pm 2 as 2 and -2; what has no sign of either kind, or several, stays."""
    found: list[str] = []
    for item in items:
        if len(_PLUS_OR_MINUS.findall(item)) == 1:
            found += [_PLUS_OR_MINUS.sub("+", item).removeprefix("+").strip(), _PLUS_OR_MINUS.sub("-", item).strip()]
        else:
            found.append(item.removeprefix("+").strip())
    return found


_UNORDERED = ("set", "list", "union")


def _as_collections(given: str, wanted: str, depth: int) -> bool | None:
    a, b = (_collection(_without_membership(text)) for text in (given, wanted))
    if a is None or b is None:
        single, several = (given, b) if a is None else (wanted, a)
        if several is None or "=" in single:
            return None
        kind, items = several
        # {5} is written for 5; a tuple is nothing but itself
        return kind in ("set", "list") and len(items) == 1 and _same(single, items[0], depth + 1)
    if len(a[1]) != len(b[1]) or len(a[1]) > _MOST_ITEMS:
        return False
    if a[0] in _UNORDERED and b[0] in _UNORDERED:
        return (a[0] == "union") == (b[0] == "union") and _same_items(a[1], b[1], depth)
    if "list" in (a[0], b[0]):
        # a point may be written without its parentheses, in order
        other = b[0] if a[0] == "list" else a[0]
        if other != "()":
            return False
    elif a[0] != b[0]:
        return False
    return all(_same(x, y, depth + 1) for x, y in zip(a[1], b[1]))


def _same_items(given: Sequence[str], wanted: Sequence[str], depth: int) -> bool:
    """Return True if the items pair up, in any order."""
    left = list(wanted)
    for item in given:
        match = next((other for other in left if _same(item, other, depth + 1)), None)
        if match is None:
            return False
        left.remove(match)
    return not left


_MEMBER = re.compile(r"\\in(?![a-zA-Z])|∈")


def _without_membership(text: str) -> str:
    r"""`x \in [1, 2]` says [1, 2]."""
    parts = _MEMBER.split(text, maxsplit=1)
    return parts[1].strip() if len(parts) == 2 and is_name(parts[0].strip()) else text


# Equations


def _as_equations(given: str, wanted: str, depth: int) -> bool | None:
    """Compare values of equations such as x = 5 and 2 + 3 = 5; None where both are equations between formulas."""
    sides = [split_outside(re.sub(r":=|==", "=", text), ("=",)) for text in (given, wanted)]
    counts = [len(parts) for parts in sides]
    if counts == [1, 1]:
        return None
    if min(counts) == 1:
        chain = sides[0] if counts[0] > 1 else sides[1]
        single = wanted if counts[0] > 1 else given
        if not all(chain):
            return False
        value = chain[0] if is_name(chain[-1]) and not is_name(chain[0]) else chain[-1]
        # what stands beside the value may name it (x, 2a + b) or be worked out to it (2 + 3), but not contradict it
        for other in chain:
            if (
                other is not value
                and not re.search(r"[A-Za-z\u4e00-\u9fff]", _COMMAND.sub("", other))
                and not _same(other, value, depth + 1)
            ):
                return False
        return _same(value, single, depth + 1)
    if counts == [2, 2] and is_name(sides[0][0]) and is_name(sides[1][0]):
        named_alike = spelling(sides[0][0]) == spelling(sides[1][0])
        if (named_alike or any(len(side[0]) > 1 for side in sides)) and _same(sides[0][1], sides[1][1], depth + 1):
            return True
        if named_alike:
            return False
        # x = 2y and y = x/2 are one line, and so are xy = 1 and y = 1/x; x = 3 and y = 3 are not
    return same_solutions(sides[0], sides[1]) if counts == [2, 2] else None


# Words

_COMMAND = re.compile(r"\\[A-Za-z]+")
_FUNCTIONS = frozenset("sin cos tan cot sec csc log ln exp sqrt frac pi arcsin arccos arctan infty gcd lcm max min mod".split())
_WORDY = re.compile(r"[^\W\d_]{3,}")


def _as_words(given: str, wanted: str) -> bool | None:
    """Compare texts by their spelling; None for formulas. Letters multiply in math-verify, where "listen" is "silent"."""
    if not (_is_text(given) or _is_text(wanted)):
        return None
    words = [re.sub(r"\b(?:the|an|a)\b|[^\w]", "", text.casefold()) for text in (given, wanted)]
    return bool(words[0]) and words[0] == words[1]


def _is_text(text: str) -> bool:
    plain = _COMMAND.sub(" ", text)
    return any(word.lower() not in _FUNCTIONS for word in _WORDY.findall(plain))
