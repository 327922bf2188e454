r"""Parts of the real line, in all their notations: -1 < x < 1, |x| < 1, (-1, 1), x \ne 2, \mathbb{R} \setminus \{2\}."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from mindspeed_rl.rewards.answers.evaluation import evaluate_real, is_same_value, symbols_of
from mindspeed_rl.rewards.answers.expressions import Node, negate, parse_expression
from mindspeed_rl.rewards.answers.notation import CLOSING, OPENING, closes_at_end, split_outside


@dataclass(frozen=True)
class Interval:
    """A part of the line between two ends.

    Attributes:
        low, high: the ends; None for the infinite ones.
        closed: (low, high) belong to it.
    """

    low: Node | None
    high: Node | None
    closed: tuple[bool, bool] = (False, False)


@dataclass(frozen=True)
class Region:
    """Intervals, and the name of the variable, if there is one."""

    intervals: tuple[Interval, ...]
    name: str | None = None


_RELATION = re.compile(r"(≤|≥|<|>)")
_Item = TypeVar("_Item")
OPPOSITE = {"<": ">", ">": "<", "≤": "≥", "≥": "≤"}
_EITHER, _BOTH = (" or ", ",", "或", r"\lor ", r"\vee "), (" and ", "且", r"\land ", r"\wedge ")
#: \{x \in \mathbb{R} : x > 3\}
_BUILDER = re.compile(r"\\?\{\s*([A-Za-z])\s*(?:\\in\s*\\mathbb\{R\}\s*)?(?:\||:)\s*(.*?)\\?\}")
_REMOVED = re.compile(
    r"(?:(?:\\mathbb\{R\}|all real numbers)\s*(?:\\setminus|\\backslash|-|except|without)"
    r"|[A-Za-z]\s*(?:\\notin|\\not\s*\\in|∉))"
    r"\s*(?:\\?\{(.*?)\\?\}|([^{}]+))"
)
#: a comma before a word that joins relations
_COMMA = re.compile(r"\s*,\s*(?=(?:or|and)\s)")
_REAL = re.compile(r"^[A-Za-z]\s*\\in\s*\\mathbb\{R\}\s*,\s*")
_INFINITE = re.compile(r"([+-]?)\s*\\infty\s*")


def read_region(text: str) -> Region | None:
    """Read relations of one variable with constants, a set difference, or intervals; None for other text.

    Tuples such as (1, 2) may be intervals as well, see `as_interval`.
    """
    if text.endswith("}") and len(split_outside(text, (r"\cup",))) > 1:
        return _read_union(text)
    builder = _BUILDER.fullmatch(text)
    condition = _COMMA.sub(" ", _REAL.sub("", builder[2].strip() if builder else text))
    removed = _REMOVED.fullmatch(condition)
    if removed is not None:
        outside = _read_complement(removed[2] or "")
        if outside is not None:
            return outside
        return _exclude(split_outside(removed[1] or removed[2], (",", " and ")), None)
    if "≠" in condition:
        region = _read_exclusions(condition)
    elif _RELATION.search(condition):
        region = _read_relations(condition)
    else:
        return None if builder else _read_union(condition)
    return None if region is None or (builder and region.name != builder[1]) else region


def as_interval(opening: str, low: str, high: str, closing: str) -> Interval | None:
    """Return the interval with these ends; None if they are not formulas."""
    ends: list[Node | None] = []
    for end, sign in ((low, "-"), (high, "+")):
        infinite = _INFINITE.fullmatch(end.strip())
        node = None if infinite is not None and (infinite[1] or "+") == sign else parse_expression(end.strip())
        if node is None and infinite is None:
            return None
        ends.append(node)
    return Interval(ends[0], ends[1], (opening == "[", closing == "]"))


def _read_union(text: str) -> Region | None:
    r"""Read (-\infty, 2) \cup [3, 5) \cup \{7\} \cup \{x : x > 9\}.

    A single interval has an infinite end or different brackets, or it is a tuple.
    """
    intervals: list[Interval] = []
    parts = split_outside(text, (r"\cup",))
    for part in parts:
        described = read_region(part) if len(parts) > 1 and _BUILDER.fullmatch(part) else None
        if described is not None:
            intervals += described.intervals
            continue
        body = part.replace(r"\{", "{").replace(r"\}", "}")
        if len(body) < 3 or body[0] not in OPENING or body[-1] not in CLOSING or not closes_at_end(body):
            return None
        ends = split_outside(re.sub(r"(?<=\d),(?=\d)", " , ", body[1:-1]), (",",))
        if body[0] == "{":
            points = [as_interval("[", end, end, "]") for end in ends]
        elif len(ends) == 2:
            points = [as_interval(body[0], ends[0], ends[1], body[-1])]
        else:
            return None
        if None in points:
            return None
        intervals += [point for point in points if point is not None]
    is_tuple = text[0] + text[-1] in ("()", "[]") and None not in (intervals[0].low, intervals[0].high)
    if len(parts) == 1 and (is_tuple or text[0] in "{\\"):
        return None
    return Region(tuple(intervals))


def _read_complement(text: str) -> Region | None:
    """Return the line without the interval that a text is; None for other text."""
    body = text.strip()
    if body[:1] not in ("(", "[") or body[-1:] not in (")", "]") or not closes_at_end(body):
        return None
    ends = split_outside(re.sub(r"(?<=\d),(?=-?\d)", " , ", body[1:-1]), (",",))
    inner = as_interval(body[0], ends[0], ends[1], body[-1]) if len(ends) == 2 else None
    if inner is None:
        return None
    below = [] if inner.low is None else [Interval(None, inner.low, (False, not inner.closed[0]))]
    above = [] if inner.high is None else [Interval(inner.high, None, (not inner.closed[1], False))]
    return Region((*below, *above))


def _exclude(points: Sequence[str], name: str | None) -> Region | None:
    """Return the line without some points, in increasing order if they are constants."""
    nodes: list[Node] = []
    for point in points:
        for sign in ("+", "-") if r"\pm" in point else ("",):
            node = parse_expression(point.replace(r"\pm", sign).strip())
            if node is None:
                return None
            nodes.append(node)
    values = [value for node in nodes if (value := evaluate_real(node)) is not None]
    if len(values) == len(nodes):
        nodes = [nodes[index] for index in sorted(range(len(nodes)), key=values.__getitem__)]
    ends: list[Node | None] = [None, *nodes, None]
    return Region(tuple(Interval(low, high) for low, high in zip(ends, ends[1:])), name)


def _read_exclusions(text: str) -> Region | None:
    r"""Read x \ne 1, x \ne 2 and x \ne 1, 2."""
    name: str | None = None
    points = []
    for part in split_outside(text, (*_BOTH, ",")):
        sides = [side.strip() for side in part.split("≠")]
        if len(sides) == 2:
            if _read_name(sides[0]) is None or name not in (None, sides[0]):
                return None
            name = sides[0]
        elif name is None or len(sides) > 2:
            return None
        points.append(sides[-1])
    return _exclude(points, name)


def _read_name(text: str) -> str | None:
    node = parse_expression(text)
    return text.strip() if node is not None and node.op == "symbol" and node.name not in ("\\pi", "e", "i", "\\infty") else None


def _read_relations(text: str) -> Region | None:
    names: set[str] = set()
    intervals: list[Interval] = []
    alternatives = split_outside(text, _EITHER)
    for alternative in alternatives:
        common: list[Interval] = []
        parts = split_outside(alternative, _BOTH)
        for part in parts:
            relation = _read_relation(part)
            if relation is None:
                return None
            names.add(relation[0])
            common += relation[1]
        # several intervals of one part come from a distance, a union
        intervals += common if len(parts) == 1 else _intersect(common, is_empty_allowed=True)
    if len(names) != 1:
        return None
    if "," in text and len(alternatives) == 2 == len(intervals):  # x > 2, x < 5 is one region if the two intersect
        intervals = _intersect(intervals, default=False)
    return Region(tuple(intervals), names.pop())


def _intersect(intervals: list[Interval], default: bool = True, *, is_empty_allowed: bool = False) -> list[Interval]:
    """Return the intersection of two half-lines; both, if it is empty (a comma between "x < -2" and "x > 2" means "or").

    Args:
        default: False to keep both if their ends cannot be compared.
        is_empty_allowed: an "and" between the two, which is never "or".
    """
    if len(intervals) != 2:
        return intervals
    upper = next((one for one in intervals if one.low is None and one.high is not None), None)
    lower = next((one for one in intervals if one.high is None and one.low is not None), None)
    if upper is None or lower is None or upper.high is None or lower.low is None:
        return intervals
    low, high = evaluate_real(lower.low), evaluate_real(upper.high)
    intersects = default if low is None or high is None else low < high
    return (
        [Interval(lower.low, upper.high, (lower.closed[0], upper.closed[1]))]
        if intersects
        else []
        if is_empty_allowed
        else intervals
    )


def _read_relation(text: str) -> tuple[str, list[Interval]] | None:
    """Return (variable, intervals) of one relation or a double one; None for other text."""
    parts = [part.strip() for part in _RELATION.split(text)]
    if len(parts) == 5:
        low, first, name, second, high = parts
        if first in ">≥" and second in ">≥":
            low, first, second, high = high, OPPOSITE[second], OPPOSITE[first], low
        # a < b < c is an order of three numbers
        has_variable = name[:1] in _VARIABLES or not any(map(_has_symbols, (low, high)))
        if first in "<≤" and second in "<≤" and _read_name(name) is not None and has_variable:
            interval = as_interval("[" if first == "≤" else "(", low, high, "]" if second == "≤" else ")")
            return None if interval is None else (name, [interval])
    if len(parts) != 3:
        return None
    left, relation, right = parts
    nodes = [parse_expression(side) for side in (left, right)]
    if nodes[0] is None or nodes[1] is None:
        return None
    if not (_read_name(left) is not None or nodes[0].op == "abs") or (right[0] in "xyzt" and _read_name(right) is not None):
        left, relation, right, nodes = right, OPPOSITE[relation], left, nodes[::-1]
    closed = relation in "≤≥"
    if nodes[0] is not None and nodes[0].op == "abs":
        return _read_distance(nodes[0].args[0], relation, nodes[1])
    if _read_name(left) is None:
        return None
    if _INFINITE.fullmatch(right) or (_read_name(right) is not None and left[0] not in "xyzt"):  # x < \infty, a < b
        return None
    return left, [Interval(None, nodes[1], (False, closed)) if relation in "<≤" else Interval(nodes[1], None, (closed, False))]


#: first letters of the names that a region may have between ends with other names
_VARIABLES = ("x", "y", "z", "t", "\\")


def _has_symbols(text: str) -> bool:
    node = parse_expression(text)
    return node is not None and bool(symbols_of(node) - {"\\infty"})


def _read_distance(inner: Node, relation: str, distance: Node | None) -> tuple[str, list[Interval]] | None:
    """Return the variable and the intervals of |x - a| < r and similar relations."""
    variable, centre = inner, Node("number")
    if inner.op == "+" and len(inner.args) == 2:
        variable, centre = inner.args[0], negate(inner.args[1])
    if variable.op != "symbol" or distance is None:
        return None
    closed = relation in "≤≥"
    low, high = Node("+", (centre, negate(distance))), Node("+", (centre, distance))
    if relation in "<≤":
        return variable.name, [Interval(low, high, (closed, closed))]
    return variable.name, [Interval(None, low, (False, closed)), Interval(high, None, (closed, False))]


def is_same_region(given: Region, expected: Region) -> bool:
    """Return True for the same intervals of the same variable, in any order."""
    if given.name and expected.name and given.name != expected.name:
        return False
    return match_all(_join(given.intervals), _join(expected.intervals), _is_same_interval)


def match_all(given: Sequence[_Item], expected: Sequence[_Item], is_same: Callable[[_Item, _Item], bool]) -> bool:
    """Return True if the items match each other in any order."""
    remaining = list(expected)
    for item in given:
        match = next((index for index, other in enumerate(remaining) if is_same(item, other)), None)
        if match is None:
            return False
        del remaining[match]
    return not remaining


def _is_same_interval(given: Interval, expected: Interval) -> bool:
    if given.closed != expected.closed:
        return False
    ends = ((given.low, expected.low), (given.high, expected.high))
    return all((a is b) or (a is not None and b is not None and is_same_value(a, b)) for a, b in ends)


def _join(intervals: Sequence[Interval]) -> Sequence[Interval]:
    """Return the intervals with those joined that touch in a point of one of them; unchanged if an end is not a constant."""
    try:
        ordered = sorted(intervals, key=lambda one: float("-inf") if one.low is None else float(evaluate_real(one.low) or 0.0))
    except OverflowError:
        return intervals
    joined: list[Interval] = []
    for interval in ordered:
        low, high = interval.low, joined[-1].high if joined else None
        if low is None or high is None or not (joined[-1].closed[1] or interval.closed[0]) or not is_same_value(high, low):
            joined.append(interval)
            continue
        last = joined.pop()
        joined.append(Interval(last.low, interval.high, (last.closed[0], interval.closed[1])))
    return joined
