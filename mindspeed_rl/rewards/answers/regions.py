r"""Parts of the real line, however they are written: -1 < x < 1, |x| < 1, (-1, 1), x \ne 2, \mathbb{R} \setminus \{2\}."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple

from mindspeed_rl.rewards.answers.formulas import value_of
from mindspeed_rl.rewards.answers.spelling import is_name, spelling, split_outside


@dataclass(frozen=True)
class Region:
    r"""A part of the real line.

    Attributes:
        name: the variable; None where none is named.
        text: the region as an interval or a union of some, as `(-\infty,2) \cup [3,5)`; "" for one that `holes` describe.
        holes: what all real numbers are without; empty for any other region.
    """

    name: str | None
    text: str
    holes: tuple[str, ...] = ()


_RELATION = re.compile(r"(≤|≥|<|>)")
_OPPOSITE = {"<": ">", ">": "<", "≤": "≥", "≥": "≤"}
_LEFT, _RIGHT = {"<": "(", "≤": "["}, {"<": ")", "≤": "]"}
_EITHER, _BOTH = (" or ", ",", "或", r"\lor ", r"\vee "), (" and ", "且", r"\land ", r"\wedge ")
_INFINITY = r"\infty"

#: \{x \in \mathbb{R} : x > 3\}
_BUILDER = re.compile(r"\\\{\s*([A-Za-z])\s*(?:(?:\\in(?![a-zA-Z])|∈)\s*\\mathbb\s*\{?R\}?\s*)?(?:\\mid|\||:)\s*(.*)\\\}")
_LINE = r"(?:\\mathbb\s*\{?R\}?|all real numbers)"
_REMOVED = re.compile(rf"{_LINE}\s*(?:\\setminus|\\backslash|-|except|without)\s*(?:\\?\{{(.*?)\\?\}}|([^{{}}]+))")
_ABSOLUTE = re.compile(r"\|\s*([A-Za-z])\s*(?:([+-])\s*([^|]+?))?\s*\|")


def read_region(text: str) -> Region | None:
    """Return the region that relations or a set difference describe; None for other text, plain intervals included."""
    built = _BUILDER.fullmatch(text)
    condition = built[2].strip() if built else text
    removed = _REMOVED.fullmatch(condition)
    if removed is not None:
        return Region(None, "", tuple(split_outside(removed[1] or removed[2], (",", " and "))))
    region = _without_values(condition) if "≠" in condition else _of_relations(condition)
    return None if region is None or (built and region.name != built[1]) else region


def holes_of(union: str) -> tuple[str, ...]:
    r"""Return the points that (-\infty,a) \cup (a,b) \cup (b,\infty) leaves out; none for other unions."""
    pieces = [re.fullmatch(r"\((.+),(.+)\)", piece) for piece in split_outside(union, (r"\cup", "∪"))]
    if len(pieces) < 2:
        return ()
    ends = [(piece[1].strip(), piece[2].strip()) for piece in pieces if piece is not None]
    if len(ends) != len(pieces) or ends[0][0] != f"-{_INFINITY}" or ends[-1][1].lstrip("+") != _INFINITY:
        return ()
    holes = [high for _, high in ends[:-1]]
    return tuple(holes) if all(spelling(hole) == spelling(low) for hole, (low, _) in zip(holes, ends[1:])) else ()


def speaks_of_region(text: str) -> bool:
    """Return True for text with a relation that only a region has."""
    return "≠" in text or _RELATION.search(text) is not None


def _without_values(text: str) -> Region | None:
    r"""x \ne 1, x \ne 2 and x \ne 1, 2 as what they leave out."""
    name, holes = None, []
    for piece in split_outside(text, (*_BOTH, ",")):
        sides = [side.strip() for side in piece.split("≠")]
        if len(sides) == 2:
            if not is_name(sides[0]) or name not in (None, sides[0]):
                return None
            name = sides[0]
        elif name is None or len(sides) > 2:
            return None
        holes.append(sides[-1])
    return Region(name, "", tuple(holes))


class _Interval(NamedTuple):
    """With the brackets that it is written with."""

    opening: str
    low: str
    high: str
    closing: str


def _above(low: str, opening: str) -> _Interval:
    return _Interval(opening, low, _INFINITY, ")")


def _below(high: str, closing: str) -> _Interval:
    return _Interval("(", f"-{_INFINITY}", high, closing)


def _of_relations(text: str) -> Region | None:
    names: set[str] = set()
    intervals: list[_Interval] = []
    pieces = split_outside(text, _EITHER)
    for piece in pieces:
        shared: list[_Interval] = []
        parts = split_outside(piece, _BOTH)
        for part in parts:
            found = _intervals(part)
            if found is None:
                return None
            names.add(found[0])
            shared += found[1]
        # several in one part are those of a distance, of which a point is in either
        intervals += shared if len(parts) == 1 else _intersection(shared)
    if len(names) != 1:
        return None
    if "," in text and len(pieces) == 2 == len(intervals):  # x > 2, x < 5: each says a part of one region, where they meet
        intervals = _intersection(intervals, surely=False)
    return Region(names.pop(), r" \cup ".join(f"{one.opening}{one.low},{one.high}{one.closing}" for one in intervals))


def _intersection(intervals: list[_Interval], surely: bool = True) -> list[_Interval]:
    """What two half-lines share; both, where they share nothing ("x < -2 and x > 2" is said of either).

    Args:
        surely: whether ends that cannot be compared are taken to share something.
    """
    if len(intervals) != 2:
        return intervals
    upper = next((one for one in intervals if one.low == f"-{_INFINITY}"), None)
    lower = next((one for one in intervals if one.high == _INFINITY), None)
    if upper is None or lower is None or upper is lower:
        return intervals
    low, high = value_of(lower.low), value_of(upper.high)
    meets = surely if low is None or high is None else low < high
    return [_Interval(lower.opening, lower.low, upper.high, upper.closing)] if meets else intervals


def _intervals(text: str) -> tuple[str, list[_Interval]] | None:
    """Return (variable, intervals) that one relation or a double one describes; None for other text."""
    parts = [part.strip() for part in _RELATION.split(text)]
    if len(parts) == 5:
        low, first, name, second, high = parts
        if first in (">", "≥") and second in (">", "≥"):
            low, first, second, high = high, _OPPOSITE[second], _OPPOSITE[first], low
        if first in _LEFT and second in _RIGHT and is_name(name):
            return name, [_Interval(_LEFT[first], low, high, _RIGHT[second])]
    if len(parts) != 3:
        return None
    left, relation, right = parts
    if not (is_name(left) or _ABSOLUTE.fullmatch(left)):
        left, relation, right = right, _OPPOSITE[relation], left
    absolute = _ABSOLUTE.fullmatch(left)
    if absolute is not None:
        return absolute[1], _of_distance(absolute, relation, right)
    if not is_name(left):
        return None
    return left, [_below(right, _RIGHT[relation]) if relation in _RIGHT else _above(right, _LEFT[_OPPOSITE[relation]])]


def _of_distance(absolute: re.Match[str], relation: str, distance: str) -> list[_Interval]:
    """What |x - a| < r and its like describe."""
    low, high = f"-{distance}" if distance.isalnum() else f"-({distance})", distance
    if absolute[2]:
        sign = "-" if absolute[2] == "+" else ""
        low, high = f"{sign}({absolute[3]})-({distance})", f"{sign}({absolute[3]})+({distance})"
    if relation in _RIGHT:
        return [_Interval(_LEFT[relation], low, high, _RIGHT[relation])]
    narrow = _OPPOSITE[relation]
    return [_below(low, _RIGHT[narrow]), _above(high, _LEFT[narrow])]
