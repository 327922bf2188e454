r"""Comparison of two final answers, for `acc`, `accuracy` and `cosine`, in four steps.

1. Both answers are written in one notation (`notation`) and read as typed values (`values`).
2. Values of one type are compared exactly; the label decides which other types are the same thing: x = 5 is 5, {5} is 5, but
   25 is not x^2 + y^2 = 25.
3. Formulas that are not parsed (sums, integrals, limits) are left to math-verify (`judge`).
4. Everything else is not the same.
"""

from __future__ import annotations

import re
from fractions import Fraction
from functools import lru_cache

from mindspeed_rl.rewards.answers.evaluation import evaluate_real, find_ratio, is_same_value, symbols_of
from mindspeed_rl.rewards.answers.expressions import MAX_ANSWER_LENGTH, Node, negate
from mindspeed_rl.rewards.answers.judge import cpu_limit, judge_formulas
from mindspeed_rl.rewards.answers.notation import normalize, tokenize
from mindspeed_rl.rewards.answers.regions import Interval, Region, is_same_region, match_all
from mindspeed_rl.rewards.answers.values import (
    Based,
    Choice,
    Collection,
    Family,
    Matrix,
    Named,
    Quantity,
    Ratio,
    Relation,
    Residue,
    Symbol,
    Text,
    Value,
    read_value,
)

#: items of a set or list that are compared in any order
_MAX_ITEMS = 64


def is_same_answer(given: str, expected: str) -> bool:
    """Return True if two answers, the contents of boxes, are the same. Never raises; ends within seconds.

    Args:
        given: answer of the model.
        expected: the label.
    """
    if max(len(given), len(expected)) > MAX_ANSWER_LENGTH:
        return given.split() == expected.split()
    try:
        with cpu_limit():
            given, expected = _normalize(given), _normalize(expected)
            given = _write_constant(given, expected)
            if not given or not expected:
                return False
            return tokenize(given) == tokenize(expected) or _is_same(read_value(given), read_value(expected))
    except Exception:  # noqa: BLE001 (a response must not turn its 0 into a failed sample; what cannot be compared is not the same)
        return False


def is_same_plain_number(given: str, expected: str) -> bool:
    """Return True if two texts are the same number, without a unit, a formula or rounding. Never raises."""
    if max(len(given), len(expected)) > MAX_ANSWER_LENGTH:
        return False
    try:
        with cpu_limit():
            values = [read_value(_normalize(text)) for text in (given, expected)]
    except Exception:  # noqa: BLE001 (as above)
        return False
    numbers = [value.node.value for value in values if isinstance(value, Quantity) and value.node.op == "number"]
    return len(numbers) == 2 and numbers[0] == numbers[1]


_CONSTANT = re.compile(r"\+\s*([A-Za-z])(?:_\{?\d\}?)?$")
_LETTERS = re.compile(r"(?<![A-Za-z\\])[A-Za-z](?![A-Za-z])")
#: variables of an integral
_VARIABLES = frozenset("xyztuse")


def _write_constant(given: str, expected: str) -> str:
    """Return the answer with the label's constant of integration: x^2 + c for the label x^2 + C."""
    constants = [_CONSTANT.search(text) for text in (given, expected)]
    if constants[0] is None or constants[1] is None or constants[1][1] != "C":
        return given
    others = [set(_LETTERS.findall(text[: match.start()])) for text, match in zip((given, expected), constants) if match]
    is_integral = re.search(r"[\\^/\d]", expected[: constants[1].start()]) is not None  # x + C is a sum
    if not is_integral or not others[1] or not others[1] <= _VARIABLES or constants[0][1] in others[0] | others[1]:
        return given
    return f"{given[: constants[0].start()]}+C"


_normalize = lru_cache(maxsize=8192)(normalize)


def _is_same(given: Value, expected: Value) -> bool:
    """Return True if a value is the expected one, whose type decides on the comparison."""
    if given == expected:
        return True
    if isinstance(given, Family) or isinstance(expected, Family):
        return _is_same_family(given, expected)
    if isinstance(given, Named) and not isinstance(expected, Named | Relation):
        return _is_same_unnamed(given, expected)
    if isinstance(given, Choice) and given.text is not None and not isinstance(expected, Choice):
        return _is_same(given.text, expected)
    match expected:
        case Quantity():
            return _is_same_as_quantity(given, expected)
        case Choice():
            return _is_same_choice(given, expected)
        case Named():
            return _is_same_named(given, expected)
        case Relation():
            if isinstance(given, Named) and given.relation is not None and symbols_of(given.relation.right):
                given = given.relation  # an equation is not its solution
            return isinstance(given, Relation) and _is_same_relation(given, expected)
        case Collection():
            return _is_same_collection(given, expected)
        case Matrix():
            return _is_same_matrix(given, expected)
        case Ratio():
            return _is_same_ratio(given, expected)
        case Region():
            region = _as_region(given)
            return region is not None and is_same_region(region, expected)
        case Symbol():
            return isinstance(given, Ratio) and expected.kind == "time" and _read_clock(given) == expected.key[:2]
        case Based():
            same = isinstance(given, Based) and given.value == expected.value
            return same or (isinstance(given, Quantity) and str(given.node.value) == expected.digits)
        case Residue():
            if isinstance(given, Residue):
                return given.modulus == expected.modulus and _is_same(given.value, expected.value)
            return _is_same(given, expected.value)
        case Text():
            return _is_same_text(given, expected)


def _is_same_family(given: Value, expected: Value) -> bool:
    """Compare families with the same domain; an answer may name the integers where the label names no domain."""
    if isinstance(given, Family) and isinstance(expected, Family):
        return given.domain == expected.domain and _is_same(given.value, expected.value)
    return isinstance(given, Family) and given.domain == "Z" and _is_same(given.plain, expected)


# Quantities

#: a decimal with at least so many digits, and decimals, may be the rounded value of the answer
_ROUNDED_DIGITS, _ROUNDED_DECIMALS = 5, 3
#: a label with at least so many decimals is rounded: one more digit than it has is not a coincidence
_MANY_DECIMALS = 5
#: an answer with at least so many decimals or digits may be the rounded value of the label
_LONG_DECIMALS, _LONG_DIGITS = 6, 7


def _is_same_as_quantity(given: Value, expected: Quantity) -> bool:
    match given:
        case Quantity():
            return _is_same_quantity(given, expected)
        case Collection(kind="set", items=(item,)):
            return _is_same_item(item, expected)
        case Ratio(parts=(first, second), time=False):
            return is_same_value(Node("/", (first, second)), expected.node) and expected.unit is None
        case Residue(value=value):
            return _is_same(value, expected)
        case Based(value=value):  # 42_8 is 34
            return is_same_value(Node("number", value=Fraction(value)), expected.node)
        case Text(source=source) if source:
            return _judge(given, expected)
    return False


def _is_same_quantity(given: Quantity, expected: Quantity) -> bool:
    """Compare value, percent sign and unit; 50% is 50 or 0.5.

    A unit that one of them lacks makes no difference, but 12 florps are not 12: a word that only the answer has must be known.
    """
    node = given.node
    if expected.unit is None and given.unit is not None and not given.unit.is_plain:
        return False
    if given.unit is not None and expected.unit is not None:
        if given.unit.dimensions != expected.unit.dimensions:
            return False
        node = _scale(node, given.unit.size / expected.unit.size)
    if _is_same_number(node, expected.node):
        return True
    if given.percent == expected.percent:
        return False
    return is_same_value(_scale(node, Fraction(1, 100) if given.percent else Fraction(100)), expected.node)


def _scale(node: Node, factor: Fraction) -> Node:
    if factor == 1:
        return node
    if node.op == "number":
        return Node("number", value=node.value * factor)
    return Node("*", (Node("number", value=factor), node))


def _is_same_number(given: Node, expected: Node) -> bool:
    """Return True for equal values; a long decimal may be the rounded value of the other side.

    A label with at least five digits, three of them decimals, is met by a formula, or a decimal with two more decimals (one
    more where the label has five), that rounds to its last digit; an exact label by a decimal with at least six decimals or
    seven digits, rounded at its last digit.
    """
    if is_same_value(given, expected):
        return True
    digits, decimals = expected.digits
    if digits:
        is_rounded = digits >= _ROUNDED_DIGITS and decimals >= _ROUNDED_DECIMALS
        is_precise = not given.digits[0] or given.digits[1] >= decimals + (1 if decimals >= _MANY_DECIMALS else 2)
        return is_rounded and is_precise and not _is_integer(given) and _rounds_to(given, expected.value, decimals)
    digits, decimals = given.digits
    is_long = decimals >= _LONG_DECIMALS or digits >= _LONG_DIGITS
    return is_long and not _is_integer(expected) and _rounds_to(expected, given.value, decimals)


def _is_integer(node: Node) -> bool:
    value = evaluate_real(node)
    return isinstance(value, Fraction) and value.denominator == 1


def _rounds_to(exact: Node, rounded: Fraction, decimals: int) -> bool:
    value = evaluate_real(exact)
    if value is None:
        return False
    if not isinstance(value, Fraction):
        scaled = value * 10**decimals
        return abs(scaled - rounded.numerator * 10**decimals // rounded.denominator) <= 0.5
    return abs(value - rounded) <= Fraction(1, 2 * 10**decimals)


# Choices, names, relations


def _is_same_choice(given: Value, expected: Choice) -> bool:
    """Return True for the same letters without a different text after them, and for the text of the expected letter."""
    if isinstance(given, Text) and len(given.tokens) == 1 and len(expected.letters) > 1:  # AC for A, C
        given = Choice(frozenset(given.tokens[0].upper()))
    if not isinstance(given, Choice):
        return expected.text is not None and _is_same(given, expected.text)
    if given.letters != expected.letters:
        return False
    return expected.text is None or given.text is None or _is_same(given.text, expected.text)


def _is_same_unnamed(given: Named, expected: Value) -> bool:
    """Compare values with names that the label does not have: in the order of the names, if that matters."""
    if len(given.pairs) == 1:
        return _is_same(given.pairs[0][1], expected)
    kind = "list" if isinstance(expected, Collection) and expected.kind in ("list", "set") else "()"
    return _is_same(Collection(kind, tuple(value for _, value in sorted(given.pairs, key=lambda pair: pair[0]))), expected)


def _is_same_named(given: Value, expected: Named) -> bool:
    """Compare values by name; a single value, or values in the order of the label, may lack their names."""
    if isinstance(given, Named):
        if given.steps and expected.steps:
            if len(given.steps) != len(expected.steps) or not all(map(_is_same, given.steps, expected.steps)):
                return False
        values = dict(given.pairs)
        names = {name for name, _ in expected.pairs}
        if len(names) == 1 and len(given.pairs) > 1:  # x_1 = 1, x_2 = 2 are the values of x
            ((name, several),) = expected.pairs
            is_numbered = all(re.fullmatch(rf"{re.escape(name)}_\{{?\d\}}?", other) for other in values)
            return (
                is_numbered
                and isinstance(several, Collection)
                and _is_same(Collection("list", tuple(values.values())), several)
            )
        if len(given.pairs) == 1 == len(expected.pairs) and values.keys() != names:
            return _is_same_curve(given, expected)
        return values.keys() == names and all(_is_same(values[name], value) for name, value in expected.pairs)
    if len(expected.pairs) == 1:
        if isinstance(given, Relation) and expected.relation is not None and len(symbols_of(expected.relation.right)) > 0:
            return _is_same_relation(given, expected.relation)
        name, value = expected.pairs[0]
        items = given.items if isinstance(given, Collection) else ()
        if (
            expected.is_derived
            or isinstance(given, Relation)
            or any(isinstance(x, Named) and x.pairs[0][0] != name for x in items)
        ):
            return False
        return _is_same(given, value)
    items = given.items if isinstance(given, Collection) and given.kind in ("list", "()", "sequence") else ()
    return len(items) == len(expected.pairs) and all(_is_same(item, value) for item, (_, value) in zip(items, expected.pairs))


_PLAIN_NAME = re.compile(r"[a-z]\([a-z]\)|y")


def _is_same_curve(given: Named, expected: Named) -> bool:
    """Compare y = 2x + 1 with f(x) = 2x + 1 and with x = (y - 1)/2."""
    names = {given.pairs[0][0], expected.pairs[0][0]}
    if "y" in names and all(_PLAIN_NAME.fullmatch(name) for name in names):
        return _is_same(given.pairs[0][1], expected.pairs[0][1])
    relations = [named.relation for named in (given, expected)]
    if relations[0] is None or relations[1] is None or not symbols_of(relations[0].right) or not symbols_of(relations[1].right):
        return False
    return _is_same_relation(relations[0], relations[1])


def _is_same_relation(given: Relation, expected: Relation) -> bool:
    """Return True if the difference of the sides of one is a multiple of the other's, positive for an inequality."""
    if given.operator != expected.operator:
        return False
    differences = [Node("+", (relation.left, negate(relation.right))) for relation in (given, expected)]
    is_inequality = expected.operator in "<≤"
    sign = find_ratio(differences[0], differences[1], clears_denominators=not is_inequality)
    return sign == 1 or (sign == -1 and not is_inequality)


# Collections


def _is_same_collection(given: Value, expected: Collection) -> bool:
    if isinstance(given, Matrix):
        return _is_same_matrix(_as_matrix(expected), given)
    if isinstance(given, Region):
        region = _as_region(expected)
        return region is not None and is_same_region(given, region)
    unordered = ("set", "list")
    if not isinstance(given, Collection):
        return expected.kind in unordered and len(expected.items) == 1 and _is_same_item(given, expected.items[0])
    if len(given.items) != len(expected.items) or len(expected.items) > _MAX_ITEMS:
        return False
    kinds = {given.kind, expected.kind}
    if kinds <= {"set", "list"} or kinds == {"union"}:
        return match_all(given.items, expected.items, _is_same_item)
    # a point may be written without parentheses, in order
    if len(kinds) > 1 and kinds not in ({"list", "()"}, {"list", "sequence"}):
        return False
    return all(_is_same_item(x, y) for x, y in zip(given.items, expected.items))


def _is_same_item(given: Value, expected: Value) -> bool:
    """Compare members of collections, where the set {2} is not 2: {1, {2}} is not {1, 2}."""
    sets = [isinstance(value, Collection) and value.kind == "set" for value in (given, expected)]
    return sets[0] == sets[1] and _is_same(given, expected)


def _as_region(value: Value) -> Region | None:
    """Return the interval that (1, 2) or [1, 2] is; None for other values."""
    match value:
        case Region():
            return value
        case Named(pairs=((name, inner),)):
            region = _as_region(inner)
            return None if region is None else Region(region.intervals, name)
        case Collection(kind="()" | "[]" as kind, items=(Quantity(node=low), Quantity(node=high))):
            return Region((Interval(low, high, (kind == "[]", kind == "[]")),))
    return None


def _as_matrix(value: Value) -> Value:
    """Return [[1, 2], [3, 4]] as a matrix and (1, 2) as a row; other values unchanged."""
    match value:
        case Collection(kind="[]", items=items) if all(isinstance(item, Collection) and item.kind == "[]" for item in items):
            return Matrix("matrix", tuple(item.items for item in items if isinstance(item, Collection)))
        case Collection(kind="()", items=items):
            return Matrix("tuple", (items,))
    return value


def _is_same_matrix(given: Value, expected: Matrix) -> bool:
    """Compare entry by entry; a tuple is a column as well as a row."""
    given = _as_matrix(given)
    if not isinstance(given, Matrix):
        return False
    rows, expected_rows = given.rows, expected.rows
    if "tuple" in (given.kind, expected.kind):
        rows, expected_rows = (
            (tuple(row[0] for row in side),) if all(len(row) == 1 for row in side) else side for side in (rows, expected_rows)
        )
    elif given.kind != expected.kind:
        return False
    if [len(row) for row in rows] != [len(row) for row in expected_rows]:
        return False
    return all(_is_same(x, y) for row, expected_row in zip(rows, expected_rows) for x, y in zip(row, expected_row))


# Ratios, symbols, text


def _is_same_ratio(given: Value, expected: Ratio) -> bool:
    """Compare by proportion; 12:30 is a time and nothing else."""
    if isinstance(given, Symbol) and given.kind == "time":
        return _read_clock(expected) == given.key[:2]
    if isinstance(given, Quantity) and len(expected.parts) == 2 and not expected.time:
        return is_same_value(given.node, Node("/", expected.parts))
    if not isinstance(given, Ratio) or len(given.parts) != len(expected.parts):
        return False
    if expected.time and (given.time or expected != given):
        return given == expected
    first, second = given.parts, expected.parts
    if all(evaluate_real(part) == 0 for part in first) or all(evaluate_real(part) == 0 for part in second):
        return False
    return all(
        is_same_value(Node("*", (first[i], second[j])), Node("*", (first[j], second[i])))
        for i in range(len(first))
        for j in range(i)
    )


def _read_clock(ratio: Ratio) -> tuple[object, ...]:
    return tuple(int(part.value) for part in ratio.parts) if ratio.time else ()


def _is_same_text(given: Value, expected: Text) -> bool:
    if not isinstance(given, Text):
        if isinstance(given, Choice) and len(given.letters) > 1 and len(expected.tokens) == 1:  # A, C for AC
            return expected.tokens[0].upper() == "".join(sorted(given.letters))
        return bool(expected.source) and _judge(given, expected)
    if given.tokens == expected.tokens:
        return True
    if not expected.parts or len(given.parts) != len(expected.parts):
        return False
    return all(
        x == y if isinstance(x, str) or isinstance(y, str) else _is_same(x, y) for x, y in zip(given.parts, expected.parts)
    )


def _judge(given: Value, expected: Value) -> bool:
    """Leave two formulas to math-verify, at least one of which is not parsed here."""
    sources = [value.source for value in (given, expected) if isinstance(value, Quantity | Text)]
    return len(sources) == 2 and all(sources) and judge_formulas(*sources)
