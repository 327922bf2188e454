r"""Whether two final answers say the same: the verdict of `acc`, `accuracy` and `cosine`.

Answers are compared as what they are: choices, numbers with units (`quantities`), sets, tuples and intervals item by item,
equations by their values, inequalities as intervals, words as words. Only what is left, formulas, goes to math-verify.
Every verdict comes in bounded time, whatever the text: what cannot be read or worked out is not the same.
"""

from __future__ import annotations

import cmath
import itertools
import logging
import re
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import sympy
from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

from mindspeed_rl.rewards.quantities import LONGEST_LITERAL, read_quantity, same_based, same_quantity
from mindspeed_rl.rewards.spelling import cleaned, spelling

logging.getLogger("math_verify").setLevel(logging.CRITICAL)  # it warns of every switched-off limit and every odd answer

#: characters; what is longer is compared by its spelling alone
LONGEST_ANSWER = 1000
#: seconds of processor time for one verdict; seconds on the clock would depend on what else the machine does
_CPU_LIMIT_S = 2.0
#: numbers that contain decimals agree within this (relative): six significant digits
_DECIMAL_TOLERANCE = 2e-6
_EXACT_TOLERANCE = 1e-9
#: items of a set whose pairings are tried
_MOST_ITEMS = 32


class TooCostly(Exception):
    """A comparison ran out of its processor time."""


def same_answer(given: str, wanted: str) -> bool:
    """True if two answers, as they stand in a box, say the same. Never raises; ends within seconds.

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


@contextmanager
def cpu_limit(seconds: float = _CPU_LIMIT_S) -> Iterator[None]:
    """Raises TooCostly once the block has used so much processor time; without effect within another one, or in a thread.

    math-verify's own limits use SIGALRM and count whole seconds on the clock, in which a busy machine does little.
    """
    if threading.current_thread() is not threading.main_thread() or signal.getitimer(signal.ITIMER_VIRTUAL)[0]:
        yield
        return

    def stop(signum: int, frame: Any) -> None:
        raise TooCostly

    before = signal.signal(signal.SIGVTALRM, stop)
    # it repeats: sympy catches some exceptions on its way
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds, 0.2)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


# ---------------------------------------------------------------------------------------------------------- comparing

_EVERYTHING = frozenset(
    {r"\mathbb{r}", r"\r", "allrealnumbers", "allreals", r"(-\infty,\infty)", r"(-\infty,+\infty)", "全体实数"}
)
_NOTHING = frozenset(
    {"∅", "emptyset", "theemptyset", "nosolution", "nosolutions", "norealsolution", "norealsolutions", "无解", "空集"}
)


def _same(given: str, wanted: str, depth: int = 0) -> bool:
    if not given or not wanted or depth > 6:
        return False
    spelled, target = spelling(given), spelling(wanted)
    if spelled == target:
        return True
    for names in (_EVERYTHING, _NOTHING):
        if spelled in names or target in names:
            return spelled in names and target in names
    if re.fullmatch(r"[A-J]", wanted):
        return _chosen_letter(given) == wanted
    return next(verdict for verdict in _verdicts(given, wanted, depth) if verdict is not None)


def _verdicts(given: str, wanted: str, depth: int) -> Iterator[bool | None]:
    """What each kind of answer says, most definite first; None for another kind. The last says one or the other."""
    yield _as_quantities(given, wanted)
    yield same_based(given, wanted)
    yield _as_matrices(given, wanted, depth)
    yield _as_ratios(given, wanted)
    yield _as_inequalities(given, wanted, depth)
    yield _as_collections(given, wanted, depth)
    yield _as_equations(given, wanted, depth)
    yield _as_words(given, wanted)
    yield _as_formulas(given, wanted)


_CHOICE = re.compile(
    r"(?:(?:option|choice|answer)\s*:?\s*)?\(?\s*([A-J])\s*\)?(?:\s*[.:：、)]\s*(.*))?", re.IGNORECASE | re.DOTALL
)


def _chosen_letter(given: str) -> str | None:
    match = _CHOICE.fullmatch(given)
    if match is None or not match[1].isupper() or re.search(r"\b[A-J]\b", match[2] or ""):
        return None
    return match[1]


def _as_quantities(given: str, wanted: str) -> bool | None:
    a, b = read_quantity(given), read_quantity(wanted)
    return None if a is None or b is None else same_quantity(a, b)


def _as_ratios(given: str, wanted: str) -> bool | None:
    """Compares a : b : c by proportion; None unless both have as many parts, three or more, and all of them are numbers."""
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


def _as_matrices(given: str, wanted: str, depth: int) -> bool | None:
    """Compares two matrices entry by entry; None unless both are one."""
    sides = []
    for text in (given, wanted):
        match = _MATRIX.fullmatch(text)
        if match is None or r"\begin" in match[1]:
            return None
        rows = [row.split("&") for row in re.split(r"\\\\|\\cr(?![a-zA-Z])", match[1]) if row.strip()]
        sides.append([[entry.strip() for entry in row] for row in rows])
    if [len(row) for row in sides[0]] != [len(row) for row in sides[1]] or sum(map(len, sides[0])) > _MOST_ITEMS:
        return False
    return all(_same(x, y, depth + 1) for one, other in zip(*sides) for x, y in zip(one, other))


# Intervals

_RELATION = re.compile(r"(≤|≥|<|>)")
_BELOW = {"<": ("(", ")"), "≤": ("[", "]")}
_MIRRORED = {">": "<", "≥": "≤"}


def _as_interval(text: str) -> tuple[str, str] | None:
    """(variable, interval) that an inequality describes; None for other text."""
    parts = [part.strip() for part in _RELATION.split(text)]
    if len(parts) == 5:
        low, first, name, second, high = parts
        if first in _MIRRORED and second in _MIRRORED:
            low, first, second, high = high, _MIRRORED[second], _MIRRORED[first], low
        if first in _BELOW and second in _BELOW and _is_name(name):
            return name, f"{_BELOW[first][0]}{low},{high}{_BELOW[second][1]}"
    if len(parts) == 3:
        left, relation, right = parts
        if not _is_name(left):
            if not _is_name(right):
                return None
            flipped = {"<": ">", ">": "<", "≤": "≥", "≥": "≤"}
            left, relation, right = right, flipped[relation], left
        if relation in _BELOW:
            return left, f"(-\\infty,{right}{_BELOW[relation][1]}"
        return left, f"{_BELOW[_MIRRORED[relation]][0]}{right},\\infty)"
    return None


def _as_inequalities(given: str, wanted: str, depth: int) -> bool | None:
    if not (_RELATION.search(given) or _RELATION.search(wanted)):
        return None
    sides = []
    for text in (given, wanted):
        pieces = _split(text, (" or ", ",", " 或 "))
        intervals = [_as_interval(piece) for piece in pieces]
        if all(intervals):
            names = {interval[0] for interval in intervals if interval is not None}
            sides.append((names, r" \cup ".join(interval[1] for interval in intervals if interval is not None)))
        elif _RELATION.search(text):
            return None
        else:
            sides.append((set(), text))
    names = [side[0] for side in sides if side[0]]
    if len(names) == 2 and names[0] != names[1]:
        return False
    return _same(sides[0][1], sides[1][1], depth + 1)


# Sets, tuples, lists

_OPENING, _CLOSING = "([{", ")]}"


def _split(text: str, separators: Sequence[str]) -> list[str]:
    """The pieces between separators that stand outside all brackets."""
    pieces, depth, start, position = [], 0, 0, 0
    while position < len(text):
        char = text[position]
        depth += (char in _OPENING) - (char in _CLOSING)
        found = next((s for s in separators if depth == 0 and text.startswith(s, position)), None)
        if found is None:
            position += 1
            continue
        pieces.append(text[start:position].strip())
        position += len(found)
        start = position
    return [*pieces, text[start:].strip()]


def _closes_at_end(text: str) -> bool:
    """True if the bracket at the start is closed by the last character; half-open intervals close with either bracket."""
    depth = 0
    for position, char in enumerate(text):
        depth += (char in _OPENING) - (char in _CLOSING)
        if depth == 0:
            return position == len(text) - 1
    return False


def _collection(text: str) -> tuple[str, list[str]] | None:
    r"""(kind, items): "set" and "list" have no order, "union" neither; else the brackets, in order. None for a single thing."""
    if "\\begin" in text:
        return None
    unions = _split(text, (r"\cup", "∪"))
    if len(unions) > 1:
        return "union", unions
    body = text.replace(r"\{", "{").replace(r"\}", "}") if text.startswith(r"\{") else text
    if body[:1] in _OPENING and body[-1:] in _CLOSING and _closes_at_end(body):
        items = _split(body[1:-1], (",", ";", "、"))
        if body[0] == "{" and text.startswith(r"\{"):
            return "set", items
        return (body[0] + body[-1], items) if len(items) > 1 else None
    items = [item for item in _split(text, (", and ", ", or ", " and ", " or ", ",", ";", "、", "和", "或")) if item]
    if len(items) == 1 and text.count(r"\pm") == 1:
        items = [text.replace(r"\pm", "+"), text.replace(r"\pm", "-")]
        items = [item.removeprefix("+").strip() for item in items]
    return ("list", items) if len(items) > 1 else None


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
    """True if the items pair up, in any order."""
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
    return parts[1].strip() if len(parts) == 2 and _is_name(parts[0].strip()) else text


# Equations

_NAME = re.compile(r"\\?[A-Za-z]+(?:_(?:\w|\{\w+\}))?'?(?:\s*\([^()]*\))?|[A-Za-z]+(?: [A-Za-z]+)*|\\(?:angle|triangle) [A-Z]+")


def _is_name(text: str) -> bool:
    """True for what only names a quantity: x, a_1, f(x), P(A), Area, \\angle ABC."""
    return _NAME.fullmatch(text.strip()) is not None


def _as_equations(given: str, wanted: str, depth: int) -> bool | None:
    """Compares values of equations such as x = 5 and 2 + 3 = 5; None where both are equations between formulas."""
    sides = [_split(re.sub(r":=|==", "=", text), ("=",)) for text in (given, wanted)]
    counts = [len(parts) for parts in sides]
    if counts == [1, 1]:
        return None
    if min(counts) == 1:
        chain = sides[0] if counts[0] > 1 else sides[1]
        single = wanted if counts[0] > 1 else given
        if not all(chain):
            return False
        value = chain[0] if _is_name(chain[-1]) and not _is_name(chain[0]) else chain[-1]
        # what stands beside the value may name it (x, 2a + b) or be worked out to it (2 + 3), but not contradict it
        for other in chain:
            if (
                other is not value
                and not re.search(r"[A-Za-z\u4e00-\u9fff]", _COMMAND.sub("", other))
                and not _same(other, value, depth + 1)
            ):
                return False
        return _same(value, single, depth + 1)
    if counts == [2, 2] and _is_name(sides[0][0]) and _is_name(sides[1][0]):
        if spelling(sides[0][0]) == spelling(sides[1][0]) or any(len(side[0]) > 1 for side in sides):
            return _same(sides[0][1], sides[1][1], depth + 1)
        # x = 2y and y = x/2 are one line; x = 3 and y = 3 are not
    return _same_solutions(sides[0], sides[1]) if counts == [2, 2] else None


def _same_solutions(given: Sequence[str], wanted: Sequence[str]) -> bool | None:
    """True if two equations are multiples of each other, denominators cleared; None where they cannot be read."""
    numerators = []
    for side in (given, wanted):
        parsed = [parse_formula(formula) for formula in side]
        if not all(parsed) or not all(isinstance(formula[0], sympy.Expr) for formula in parsed):
            return None
        numerators.append(sympy.fraction(sympy.together(_with_imaginary(parsed[0][0] - parsed[1][0])))[0])
    if numerators[0].free_symbols != numerators[1].free_symbols or len(numerators[0].free_symbols) < 2:
        return False
    points = [_sample_values(numerators[0], numerators[1], start) for start in (_SAMPLE, 2.2360679775, 0.5772156649)]
    ratios = [values[0] / values[1] for values in points if values is not None and all(values)]
    return all(_close(ratio, ratios[0], _EXACT_TOLERANCE) for ratio in ratios) if len(ratios) == len(points) else None


# Words

_COMMAND = re.compile(r"\\[A-Za-z]+")
_FUNCTIONS = frozenset("sin cos tan cot sec csc log ln exp sqrt frac pi arcsin arccos arctan infty gcd lcm max min mod".split())
_WORDY = re.compile(r"[^\W\d_]{3,}")


def _as_words(given: str, wanted: str) -> bool | None:
    """Compares texts by their spelling; None for formulas. Letters multiply in math-verify, where "listen" is "silent"."""
    if not (_is_text(given) or _is_text(wanted)):
        return None
    words = [re.sub(r"\b(?:the|an|a)\b|[^\w]", "", text.casefold()) for text in (given, wanted)]
    return bool(words[0]) and words[0] == words[1]


def _is_text(text: str) -> bool:
    plain = _COMMAND.sub(" ", text)
    return any(word.lower() not in _FUNCTIONS for word in _WORDY.findall(plain))


# Formulas

_BOX = (LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig())
#: product of all exponents of an answer that is worked out; integer powers cannot be interrupted
_LARGEST_EXPONENT = 20_000
#: brackets in brackets; the parser takes seconds for hundreds
_DEEPEST = 30
_EXPONENTS = re.compile(r"(?:\^|\*\*)\s*\{?\s*[+-]?\s*(\d+)")


def _is_endless(text: str) -> bool:
    """True for towers of powers, factorials of factorials and literals that would be worked out digit by digit."""
    if re.search(rf"\d{{{LONGEST_LITERAL},}}", text) or re.search(
        r"!\s*\)*\s*\}?!|\d{4,}\s*\)*\}?\s*!|\)\s*!|\^\s*\{?[^{}^]{0,20}!", text
    ):
        return True
    if re.search(r"\^\s*\{?\s*[\d.]+\s*\}?\s*\^|\^\s*\{[^{}]*\^", text):
        return True
    product = 1
    for digits in _EXPONENTS.findall(text):
        product *= max(int(digits[:12]), 1)
    return product > _LARGEST_EXPONENT or re.search(r"binom\D{0,4}\d{4,}", text) is not None


def _nesting(text: str) -> int:
    """How deep brackets stand in each other."""
    return max(itertools.accumulate((char in _OPENING) - (char in _CLOSING) for char in text), default=0)


def read_text(text: str, *arguments: Any, **options: Any) -> list[Any]:
    """Returns math-verify's reading of a text, with the arguments of its `parse`; [] for none, and for what it cannot read."""
    try:
        return parse(text, *arguments, parsing_timeout=0, **options)  # 0: no limit of its own
    except TooCostly:
        raise
    except Exception:  # a parser of arbitrary text may fail in arbitrary ways; what it cannot read is no answer
        return []


def parse_formula(formula: str) -> list[Any]:
    """Returns math-verify's reading of a bare formula: a sympy expression if it is one, then the text itself; [] for none."""
    if len(formula) > LONGEST_ANSWER or _nesting(formula) > _DEEPEST or _is_endless(formula):
        return []
    return read_text(f"\\boxed{{{formula}}}", _BOX)


parse_label = lru_cache(maxsize=4096)(parse_formula)  # all responses of a group share their label


def _as_formulas(given: str, wanted: str) -> bool:
    if _one_formula(given, wanted):
        return True
    # "log" is the natural logarithm in half of the books
    natural = [re.sub(r"\\log(?![a-zA-Z_])", r"\\ln", text) for text in (given, wanted)]
    return natural != [given, wanted] and _one_formula(*natural)


def _one_formula(given: str, wanted: str) -> bool:
    parsed_wanted, parsed_given = parse_label(wanted), parse_formula(given)
    if not parsed_wanted or not parsed_given:
        return False
    try:
        parsed_wanted, parsed_given = ([_with_imaginary(side[0]), *side[1:]] for side in (parsed_wanted, parsed_given))
        values = _sample_values(parsed_given[0], parsed_wanted[0])
        if values is not None:
            exact = not re.search(r"\d?\.\d", given + wanted)
            if not _close(*values, _EXACT_TOLERANCE if exact else _DECIMAL_TOLERANCE):
                return False
            if parsed_given[0].is_number and parsed_wanted[0].is_number:
                return True
        return bool(verify(parsed_wanted, parsed_given, timeout_seconds=None))
    except TooCostly:
        raise
    except (
        Exception
    ):  # simplification of arbitrary expressions may fail in arbitrary ways; what it cannot decide is not the same
        return False


def _with_imaginary(formula: Any) -> Any:
    """The formula with i as the imaginary unit, which the parser takes for a variable."""
    if not isinstance(formula, sympy.Expr):
        return formula
    return formula.subs({symbol: sympy.I for symbol in formula.free_symbols if str(symbol) == "i"})


def _close(a: complex, b: complex, tolerance: float) -> bool:
    return abs(a - b) <= tolerance * max(abs(a), abs(b))


_SAMPLE = 1.6180339887


def _sample_values(a: Any, b: Any, start: float = _SAMPLE) -> tuple[complex, complex] | None:
    """The values of two expressions at one point; None where that says nothing.

    Expressions that differ there are different, which is found a hundred times faster than by simplifying their difference.
    """
    if any(not isinstance(side, sympy.Expr) or isinstance(side, sympy.Symbol) for side in (a, b)):
        return None
    symbols = sorted(a.free_symbols | b.free_symbols, key=str)
    point = {symbol: sympy.Float(start + 0.7320508 * number) for number, symbol in enumerate(symbols)}
    try:
        values = complex(a.evalf(15, subs=point)), complex(b.evalf(15, subs=point))
    except (TypeError, ValueError, OverflowError, ZeroDivisionError, AttributeError):
        return None  # functions and objects without a value
    return values if all(map(cmath.isfinite, values)) else None


def warm_up() -> None:
    """Parse a few answers of every form, so that the parser's tables are there before the workers are forked."""
    for answer in (
        r"\frac{\sqrt{2}}{3}+x^2-1",
        r"(-\infty,2)\cup[3,5)",
        r"\left\{1,\frac{1}{2}\right\}",
        r"\begin{pmatrix}1&2\\3&4\end{pmatrix}",
        r"\frac{4\pi}{3}",
        r"\text{a}",
        r"x\le 4",
        r"\ln 3",
        r"\binom{6}{2}",
        "(x-3)(x+5)",
        "(1,-2)",
        "6+9i",
        "2^{10}",
        "x=2",
        "1,2",
    ):
        parse_formula(answer)
