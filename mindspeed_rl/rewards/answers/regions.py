r"""Parts of the real line, in all their notations: -1 < x < 1, |x| < 1, (-1, 1), x \ne 2, \mathbb{R} \setminus \{2\}."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple

from mindspeed_rl.rewards.answers.formulas import evaluate_constant
from mindspeed_rl.rewards.answers.notation import fold_notation, is_name, split_outside


@dataclass(frozen=True)
class Region:
    r"""A part of the real line.

    Attributes:
        name: the variable; None without one.
        text: an interval or a union of intervals, as `(-\infty,2) \cup [3,5)`; "" for a region with `holes`.
        holes: excluded points of the real line; empty for any other region.
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
    """Parse relations or a set difference; return None for other text, including plain intervals."""
    builder = _BUILDER.fullmatch(text)
    condition = builder[2].strip() if builder else text
    removed = _REMOVED.fullmatch(condition)
    if removed is not None:
        return Region(None, "", tuple(split_outside(removed[1] or removed[2], (",", " and "))))
    region = _read_exclusions(condition) if "≠" in condition else _read_relations(condition)
    return None if region is None or (builder and region.name != builder[1]) else region


def find_holes(union: str) -> tuple[str, ...]:
    r"""Return the points that (-\infty,a) \cup (a,b) \cup (b,\infty) excludes; none for other unions."""
    matches = [re.fullmatch(r"\((.+),(.+)\)", part) for part in split_outside(union, (r"\cup", "∪"))]
    if len(matches) < 2:
        return ()
    ends = [(match[1].strip(), match[2].strip()) for match in matches if match is not None]
    if len(ends) != len(matches) or ends[0][0] != f"-{_INFINITY}" or ends[-1][1].lstrip("+") != _INFINITY:
        return ()
    holes = [high for _, high in ends[:-1]]
    return tuple(holes) if all(fold_notation(hole) == fold_notation(low) for hole, (low, _) in zip(holes, ends[1:])) else ()


def has_relation(text: str) -> bool:
    """Return True for text with a relation, which only regions have."""
    return "≠" in text or _RELATION.search(text) is not None


def _read_exclusions(text: str) -> Region | None:
    r"""Return x \ne 1, x \ne 2 and x \ne 1, 2 as the points that they exclude."""
    name, holes = None, []
    for part in split_outside(text, (*_BOTH, ",")):
        sides = [side.strip() for side in part.split("≠")]
        if len(sides) == 2:
            if not is_name(sides[0]) or name not in (None, sides[0]):
                return None
            name = sides[0]
        elif name is None or len(sides) > 2:
            return None
        holes.append(sides[-1])
    return Region(name, "", tuple(holes))


class _Interval(NamedTuple):
    """An interval with its brackets."""

    opening: str
    low: str
    high: str
    closing: str


def _read_relations(text: str) -> Region | None:
    names: set[str] = set()
    intervals: list[_Interval] = []
    alternatives = split_outside(text, _EITHER)
    for alternative in alternatives:
        common: list[_Interval] = []
        parts = split_outside(alternative, _BOTH)
        for part in parts:
            relation = _read_relation(part)
            if relation is None:
                return None
            names.add(relation[0])
            common += relation[1]
        # several intervals of one part are those of a distance, a union
        intervals += common if len(parts) == 1 else _intersect(common)
    if len(names) != 1:
        return None
    if "," in text and len(alternatives) == 2 == len(intervals):  # x > 2, x < 5 is one region if the two intersect
        intervals = _intersect(intervals, default=False)
    return Region(names.pop(), r" \cup ".join(f"{one.opening}{one.low},{one.high}{one.closing}" for one in intervals))


def _intersect(intervals: list[_Interval], default: bool = True) -> list[_Interval]:
    """Return the intersection of two half-lines; both, if it is empty ("x < -2 and x > 2" may mean "or").

    Args:
        default: False to keep both if their ends cannot be compared.
    """
    if len(intervals) != 2:
        return intervals
    upper = next((one for one in intervals if one.low == f"-{_INFINITY}"), None)
    lower = next((one for one in intervals if one.high == _INFINITY), None)
    if upper is None or lower is None or upper is lower:
        return intervals
    low, high = evaluate_constant(lower.low), evaluate_constant(upper.high)
    intersects = default if low is None or high is None else low < high
    return [_Interval(lower.opening, lower.low, upper.high, upper.closing)] if intersects else intervals


def _read_relation(text: str) -> tuple[str, list[_Interval]] | None:
    """Return (variable, intervals) of one relation or a double one; None for other text."""
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
        return absolute[1], _read_distance(absolute, relation, right)
    if not is_name(left):
        return None
    if relation in _RIGHT:
        return left, [_Interval("(", f"-{_INFINITY}", right, _RIGHT[relation])]
    return left, [_Interval(_LEFT[_OPPOSITE[relation]], right, _INFINITY, ")")]


def _read_distance(absolute: re.Match[str], relation: str, distance: str) -> list[_Interval]:
    """Return the intervals of |x - a| < r and similar relations."""
    low, high = f"-{distance}" if distance.isalnum() else f"-({distance})", distance
    if absolute[2]:
        sign = "-" if absolute[2] == "+" else ""
        low, high = f"{sign}({absolute[3]})-({distance})", f"{sign}({absolute[3]})+({distance})"
    if relation in _RIGHT:
        return [_Interval(_LEFT[relation], low, high, _RIGHT[relation])]
    narrow = _OPPOSITE[relation]
    return [_Interval("(", f"-{_INFINITY}", low, _RIGHT[narrow]), _Interval(_LEFT[narrow], high, _INFINITY, ")")]
