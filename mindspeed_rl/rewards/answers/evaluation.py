"""Values of formulas, and their equality: exact with rational numbers, to 150 digits with all others.

Formulas with variables are compared at several points, rational ones among them, so that rational functions are compared
exactly. Two formulas that agree to 150 digits at all points where both have a value are equal.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import TypeAlias

import mpmath

from mindspeed_rl.rewards.answers.expressions import Node

Number: TypeAlias = Fraction | mpmath.mpf | mpmath.mpc

#: bits of an exact number; a power or a factorial beyond has no value here
_MAX_BITS = 1 << 17
_MAX_FACTORIAL = 10_000
#: index of a root that may be rational
_MAX_ROOT = 1000
#: terms of a sum
_MAX_TERMS = 300
#: binary exponent of a number that is not exact: 1 more or less must change its first 150 digits
_MAX_FLOAT = 400
#: binary exponent of an argument of a function; beyond, reducing it takes as many bits
_MAX_MAGNITUDE = 4096
#: digits of the first and of the second, deciding computation
_DIGITS, _MORE_DIGITS = 50, 150


class UndefinedError(ArithmeticError):
    """A formula has no value at a point, or none that is computed in bounded time."""


class _Evaluator:
    """Computes a tree at one point.

    Attributes:
        point: value of each symbol.
        is_complex: roots and logarithms of negative numbers have a value.
        natural: "log" without a base is the natural logarithm, else the decimal one.
    """

    def __init__(self, point: Mapping[str, Number], *, is_complex: bool, natural: bool) -> None:
        self.point, self.is_complex, self.natural = point, is_complex, natural

    def evaluate(self, node: Node) -> Number:
        """Return the value of a tree.

        Raises:
            UndefinedError: there is none.
        """
        if node.op == "number":
            return node.value
        if node.op == "symbol":
            return self.point[node.name] if node.name in self.point else _CONSTANTS[node.name]()
        if node.op == "degree":
            return mpmath.pi / 180
        if node.op in ("sum", "prod"):
            return self.sum(node)
        values = [self.evaluate(arg) for arg in node.args]
        if node.op == "+":
            return _check_size(sum(values[1:], values[0]))
        if node.op == "unknown":
            return _mix(node.name, values)
        if node.op in _RATIONAL:
            return _check_size(_RATIONAL[node.op](*values))
        if node.op == "^":
            return self.power(*values, has_root=not self.is_complex and not symbols_of(node.args[1]))
        if node.op == "root":
            return self.root(*values)
        return self.function(node.op, values)

    def sum(self, node: Node) -> Number:
        """Return the value of a sum or a product with whole limits."""
        start, end = _integers([self.evaluate(limit) for limit in node.args[1:]])
        if end - start > _MAX_TERMS:
            raise UndefinedError
        total: Number = Fraction(node.op == "prod")
        outer = self.point
        for index in range(start, end + 1):
            self.point = {**outer, node.name: Fraction(index)}
            term = self.evaluate(node.args[0])
            total = _check_size(total + term if node.op == "sum" else _multiply(total, term))
        self.point = outer
        return total

    def power(self, base: Number, exponent: Number, has_root: bool = False) -> Number:
        """Return a power; with `has_root`, (-8)^(1/3) is the real root."""
        if isinstance(exponent, Fraction) and exponent.denominator == 1:
            if abs(exponent) > _MAX_BITS:
                raise UndefinedError
            power = int(exponent)
            if isinstance(base, Fraction):
                bits = max(base.numerator.bit_length(), base.denominator.bit_length())
                if (bits - 1) * abs(power) > _MAX_BITS or (not base and power <= 0):
                    raise UndefinedError
                return base**power
            if not base and power <= 0:
                raise UndefinedError
            return _check_size(base**power)
        if isinstance(exponent, Fraction) and 1 < exponent.denominator < _MAX_ROOT and isinstance(base, Fraction):
            if base >= 0 or (has_root and exponent.denominator % 2):
                return self.power(self.root(base, Fraction(exponent.denominator)), Fraction(exponent.numerator))
        base, exponent = _to_float(base), _to_float(exponent)
        if not base:
            if exponent.real > 0:
                return Fraction(0)
            raise UndefinedError
        if not self.is_complex and base.real < 0:
            raise UndefinedError
        return _check_size(mpmath.exp(_check_argument(exponent * mpmath.log(base))))

    def root(self, radicand: Number, index: Number) -> Number:
        """Return the real root where there is one."""
        if not isinstance(index, Fraction) or index.denominator != 1 or not 1 < index < _MAX_ROOT:
            return self.power(radicand, self.evaluate(Node("/", (Node("number", value=Fraction(1)), _literal(index)))))
        order = int(index)
        if isinstance(radicand, Fraction):
            sign = -1 if radicand < 0 and order % 2 else 1
            tops = [_exact_root(part, order) for part in (sign * radicand.numerator, radicand.denominator)]
            if tops[0] is not None and tops[1] is not None:
                return Fraction(sign * tops[0], tops[1])
        elif isinstance(radicand, mpmath.mpc):
            return radicand ** (mpmath.mpf(1) / order)
        value = _to_float(radicand)
        if value < 0 and order % 2:
            return -mpmath.root(-value, order)
        if value < 0 and not self.is_complex:
            raise UndefinedError
        return mpmath.root(value, order)

    def function(self, name: str, values: Sequence[Number]) -> Number:
        """Return the value of a function that is not rational."""
        if name == "log" and len(values) == 1:
            values = (values[0], mpmath.e if self.natural else Fraction(10))
        if name in ("log", "ln"):
            floats = [_to_float(value) for value in values]
            if not all(floats) or not (self.is_complex or all(value > 0 for value in floats)):
                raise UndefinedError
            below = mpmath.log(floats[1]) if len(floats) > 1 else 1
            if not below:
                raise UndefinedError
            quotient = mpmath.log(floats[0]) / below
            power = int(mpmath.nint(quotient.real)) if abs(quotient) < 1000 else 0
            # an exact logarithm, so that log_2 8 is 3 and not almost 3
            exact = power and len(values) > 1 and isinstance(values[0], Fraction) and isinstance(values[1], Fraction)
            return Fraction(power) if exact and self.power(values[1], Fraction(power)) == values[0] else quotient
        argument = _check_argument(_to_float(values[0]))
        result = _MPMATH[name](argument)
        if isinstance(result, mpmath.mpc) and not self.is_complex:
            raise UndefinedError
        return result


def _literal(value: Number) -> Node:
    if not isinstance(value, Fraction):
        raise UndefinedError
    return Node("number", value=value)


def _exact_root(number: int, order: int) -> int | None:
    """Return the exact root of an integer; None if it is not whole."""
    if number < 0:
        return None
    if order == 2:
        root = math.isqrt(number)
    else:
        root = int(mpmath.nint(mpmath.root(number, order))) if number.bit_length() < 1000 else 0
    return root if root**order == number else None


def _to_float(value: Number) -> mpmath.mpf | mpmath.mpc:
    return mpmath.mpf(value.numerator) / value.denominator if isinstance(value, Fraction) else value


def _check_argument(value: mpmath.mpf | mpmath.mpc) -> mpmath.mpf | mpmath.mpc:
    if value and mpmath.mag(value) > _MAX_MAGNITUDE:
        raise UndefinedError
    return value


def _check_size(value: Number) -> Number:
    if isinstance(value, Fraction):
        if max(value.numerator.bit_length(), value.denominator.bit_length()) > _MAX_BITS:
            raise UndefinedError
    elif not mpmath.isfinite(value) or (value and abs(mpmath.mag(value)) > _MAX_FLOAT):
        raise UndefinedError
    return value


def _multiply(a: Number, b: Number) -> Number:
    if isinstance(a, Fraction) != isinstance(b, Fraction):
        a, b = _to_float(a), _to_float(b)
    return a * b


def _divide(a: Number, b: Number) -> Number:
    if not b:
        raise UndefinedError
    return a / b if isinstance(a, Fraction) and isinstance(b, Fraction) else _to_float(a) / _to_float(b)


def _factorial(value: Number) -> Number:
    if isinstance(value, Fraction) and value.denominator == 1:
        if not 0 <= value <= _MAX_FACTORIAL:
            raise UndefinedError
        return Fraction(math.factorial(int(value)))
    if abs(value) > _MAX_FACTORIAL:
        raise UndefinedError
    return mpmath.gamma(_to_float(value) + 1)


def _binomial(top: Number, bottom: Number) -> Number:
    if isinstance(bottom, Fraction) and bottom.denominator == 1 and isinstance(top, Fraction):
        if not 0 <= bottom <= _MAX_FACTORIAL or abs(top) > _MAX_FACTORIAL:
            raise UndefinedError
        if top.denominator == 1 and top >= 0:
            return Fraction(math.comb(int(top), int(bottom)))
        if bottom > 200:
            raise UndefinedError
        product = Fraction(1)
        for factor in range(int(bottom)):
            product *= (top - factor) / (factor + 1)
        return product
    return _divide(_factorial(top), _multiply(_factorial(bottom), _factorial(top - bottom)))


def _integers(values: Sequence[Number]) -> list[int]:
    integers = [int(value) for value in values if isinstance(value, Fraction) and value.denominator == 1]
    if len(integers) < len(values):
        raise UndefinedError
    return integers


def _round(value: Number, towards: Callable[[Fraction], int]) -> Number:
    if isinstance(value, mpmath.mpc):
        raise UndefinedError
    if not isinstance(value, Fraction):
        _check_argument(value)
        value = Fraction(*mpmath.libmp.to_rational(value._mpf_))
    return Fraction(towards(value))


def _mix(name: str, values: Sequence[Number]) -> Number:
    """Return a value of a function without a definition: it depends on its name and on each of its arguments."""
    seed = zlib.crc32(name.encode()) % 1009 + 3
    total = sum(((index + seed) * _check_argument(_to_float(value)) for index, value in enumerate(values)), mpmath.mpf(0))
    return mpmath.cos(total / 7) + seed


_RATIONAL: dict[str, Callable[..., Number]] = {
    "*": _multiply,
    "/": _divide,
    "!": _factorial,
    "binom": _binomial,
    "abs": abs,
    "floor": lambda value: _round(value, math.floor),
    "ceil": lambda value: _round(value, math.ceil),
    "gcd": lambda *values: Fraction(math.gcd(*_integers(values))),
    "lcm": lambda *values: Fraction(math.lcm(*_integers(values))),
    "max": lambda *values: max(values, key=_to_float),
    "min": lambda *values: min(values, key=_to_float),
}
_MPMATH: dict[str, Callable[[Number], Number]] = {
    "sin": mpmath.sin, "cos": mpmath.cos, "tan": mpmath.tan, "cot": mpmath.cot, "sec": mpmath.sec, "csc": mpmath.csc,
    "arcsin": mpmath.asin, "arccos": mpmath.acos, "arctan": mpmath.atan, "arccot": mpmath.acot, "exp": mpmath.exp,
    "sinh": mpmath.sinh, "cosh": mpmath.cosh, "tanh": mpmath.tanh, "coth": mpmath.coth,
    "arsinh": mpmath.asinh, "arcosh": mpmath.acosh, "artanh": mpmath.atanh,
    "arcsinh": mpmath.asinh, "arccosh": mpmath.acosh, "arctanh": mpmath.atanh,
}  # fmt: skip


# Comparing

#: symbols with a value of their own
_CONSTANTS: dict[str, Callable[[], Number]] = {
    "\\pi": lambda: +mpmath.pi,
    "e": lambda: +mpmath.e,
    "i": lambda: mpmath.mpc(0, 1),
}
#: value of the symbol with an index, at each point: positive, below one, of both signs, negative, and whole
_POINTS: tuple[Callable[[int], Fraction], ...] = (
    lambda index: Fraction(17 + 13 * index + 6 * index * index, 11),
    lambda index: Fraction(5 + 7 * index + 3 * index * index, 23 + 41 * index + 5 * index * index),
    lambda index: Fraction((19 + 11 * index + 2 * index * index) * (-1) ** index, 13),
    lambda index: Fraction(-(23 + 8 * index + 3 * index * index), 17),
    lambda index: Fraction(5 + 2 * index + index * index),
    lambda index: Fraction(8 + 3 * index + index * index),
)


def symbols_of(node: Node) -> frozenset[str]:
    """Return the names of the variables and of the unknown functions of a tree."""
    if node.op == "symbol":
        return frozenset() if node.name in _CONSTANTS else frozenset((node.name,))
    if node.op in ("sum", "prod"):
        return (symbols_of(node.args[0]) - {node.name}).union(*(symbols_of(limit) for limit in node.args[1:]))
    names = frozenset((node.name,)) if node.op == "unknown" else frozenset()
    return names.union(*(symbols_of(arg) for arg in node.args))


def _contains(node: Node, op: str, name: str = "") -> bool:
    return any(part.op == op and part.name == name for part in node.walk())


def _evaluate_all(nodes: Sequence[Node], index: int, names: Sequence[str], **options: bool) -> list[Number | None]:
    """Return the values at one point; None for each tree without one."""
    point: dict[str, Number] = {name: _POINTS[index](position) for position, name in enumerate(names)}
    evaluator = _Evaluator(point, **options)
    values: list[Number | None] = []
    for node in nodes:
        try:
            values.append(evaluator.evaluate(node))
        except (ArithmeticError, ValueError, TypeError, NotImplementedError, mpmath.libmp.NoConvergence):
            values.append(None)
    return values


def _agree(low: Sequence[Number], high: Sequence[Number]) -> bool:
    """Return True if two values, each computed with few and with many digits, are equal.

    The difference of equal values shrinks with the error of the computation; others stay.
    """
    if all(isinstance(value, Fraction) for value in high):
        return high[0] == high[1]
    differences = [abs(_to_float(values[0]) - _to_float(values[1])) for values in (low, high)]
    size = max(abs(_to_float(value)) for value in high)
    return differences[1] <= max(differences[0] * mpmath.mpf(10) ** -40, size * mpmath.mpf(10) ** -120)


def _is_equal_at(nodes: tuple[Node, Node], index: int, names: Sequence[str], **options: bool) -> bool | None:
    """Return True if two trees have the same value at one point; None if one of them has none."""
    with mpmath.workdps(_DIGITS):
        low = [value for value in _evaluate_all(nodes, index, names, **options) if value is not None]
        if len(low) < 2:
            return None
        if all(isinstance(value, Fraction) for value in low):
            return low[0] == low[1]
        a, b = (_to_float(value) for value in low)
        if abs(a - b) > max(abs(a), abs(b)) * mpmath.mpf(10) ** -20 and max(abs(a), abs(b)) > mpmath.mpf(10) ** -20:
            return False
    with mpmath.workdps(_MORE_DIGITS):
        high = [value for value in _evaluate_all(nodes, index, names, **options) if value is not None]
        return len(high) == 2 and _agree(low, high)


def is_same_value(given: Node, expected: Node) -> bool:
    """Return True if two formulas have the same value for all values of their variables.

    "log" without a base is the decimal or the natural logarithm, in both formulas. Points where one formula has no real value
    do not count, unless the other one has an absolute value that it lacks: sqrt(xy) is sqrt(x) sqrt(y), but ln|x| is not ln x.
    """
    if given == expected:
        return True
    names = sorted(symbols_of(given) | symbols_of(expected))
    has_log = any(part.op == "log" and len(part.args) == 1 for node in (given, expected) for part in node.walk())
    return any(_is_same_everywhere((given, expected), names, natural) for natural in ((True, False) if has_log else (True,)))


def _is_same_everywhere(nodes: tuple[Node, Node], names: Sequence[str], natural: bool) -> bool:
    has_i = any(_contains(node, "symbol", "i") for node in nodes)
    same_domain = _contains(nodes[0], "abs") != _contains(nodes[1], "abs")
    for is_complex in (True,) if has_i else (False, True):
        options = {"is_complex": is_complex, "natural": natural}
        count = 0
        for index in range(len(_POINTS) if names else 1):
            equal = _is_equal_at(nodes, index, names, **options)
            if equal is False:
                return False
            count += equal is True
            if equal is None and same_domain and not is_complex:
                with mpmath.workdps(_DIGITS):
                    if any(value is not None for value in _evaluate_all(nodes, index, names, **options)):
                        return False
        if count >= min(2, len(names) + 1):
            return True
    return False


def evaluate_real(node: Node) -> Fraction | mpmath.mpf | None:
    """Return the value of a real constant; None for any other formula. Values that are not rational have 50 digits."""
    if symbols_of(node):
        return None
    with mpmath.workdps(_DIGITS):
        (value,) = _evaluate_all((node,), 0, (), is_complex=_contains(node, "symbol", "i"), natural=True)
        if isinstance(value, mpmath.mpc):
            value = value.real if not value.imag else None
    return value


def find_ratio(given: Node, expected: Node, *, clears_denominators: bool) -> int | None:
    """Return the sign of the constant c for which given = c * expected, as functions; None if there is none.

    With `clears_denominators`, y - 3/x and xy - 3 are multiples of each other.
    """
    names = sorted(symbols_of(given) | symbols_of(expected))
    if not names or symbols_of(given) != symbols_of(expected):
        return None
    pairs = [(given, expected)]
    if clears_denominators:
        pairs.append((_split_quotient(given)[0], _split_quotient(expected)[0]))
    for nodes in pairs:
        ratio = None
        with mpmath.workdps(_MORE_DIGITS):
            for index in range(len(_POINTS)):
                values = _evaluate_all(nodes, index, names, is_complex=False, natural=True)
                if values[0] is None or values[1] is None:
                    continue
                if not values[0] or not values[1]:
                    if bool(values[0]) != bool(values[1]):
                        ratio = None
                        break
                    continue
                quotient = _divide(values[0], values[1])
                if ratio is not None and not _is_near(ratio, quotient):
                    ratio = None
                    break
                ratio = quotient
        if ratio is not None:
            return 1 if ratio > 0 else -1
    return None


def _is_near(a: Number, b: Number) -> bool:
    if isinstance(a, Fraction) and isinstance(b, Fraction):
        return a == b
    return abs(_to_float(a) - _to_float(b)) <= abs(_to_float(a)) * mpmath.mpf(10) ** -100


def _split_quotient(node: Node) -> tuple[Node, Node]:
    """Return (numerator, denominator) with divisions by formulas carried out on neither."""
    one = Node("number", value=Fraction(1))
    if node.op == "/":
        top, bottom = (_split_quotient(arg) for arg in node.args)
        return Node("*", (top[0], bottom[1])), Node("*", (top[1], bottom[0]))
    if node.op == "*":
        first, second = (_split_quotient(arg) for arg in node.args)
        return Node("*", (first[0], second[0])), Node("*", (first[1], second[1]))
    if node.op == "+":
        parts = [_split_quotient(arg) for arg in node.args]
        bottoms = list(dict.fromkeys(part[1] for part in parts if part[1].op != "number"))
        numerators = []
        for top, bottom in parts:
            factors = [other for other in bottoms if other != bottom]
            scaled = top if bottom.op != "number" else Node("/", (top, bottom))
            for factor in factors:
                scaled = Node("*", (scaled, factor))
            numerators.append(scaled)
        denominator = one
        for factor in bottoms:
            denominator = Node("*", (denominator, factor))
        return Node("+", tuple(numerators)), denominator
    if node.op == "^" and node.args[0].op in "/*+":
        top, bottom = _split_quotient(node.args[0])
        return Node("^", (top, node.args[1])), Node("^", (bottom, node.args[1]))
    return node, one
