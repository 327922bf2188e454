"""Arithmetic of whole numbers, as the shell has it."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable


def _divide(first: int, second: int) -> int:
    """Return the quotient, towards zero."""
    quotient = abs(first) // abs(second)
    return quotient if (first < 0) == (second < 0) else -quotient


_OPERATORS: dict[type[ast.operator] | type[ast.cmpop], Callable[[int, int], int]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul,
    ast.Mod: lambda first, second: first - second * _divide(first, second), ast.FloorDiv: _divide,
    ast.LShift: operator.lshift, ast.RShift: operator.rshift, ast.BitAnd: operator.and_, ast.BitOr: operator.or_,
    ast.BitXor: operator.xor,
    ast.Pow: lambda base, exponent: int(base**exponent),
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}  # fmt: skip
_SIGNS: dict[type[ast.unaryop], Callable[[int], int]] = {
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
    ast.Not: lambda value: int(not value),
    ast.Invert: operator.invert,
}
#: largest shift and exponent
_LIMIT = 64
#: numbers of the shell; a larger one begins at the other end
_RANGE = range(-(2**63), 2**63)


#: a number with its base, such as 10#08
_BASED = re.compile(r"\b(\d{1,2})#([0-9A-Za-z]+)\b")


#: bits next to comparisons, and the power of a negative number: Python takes their parts in another order
_OTHER_ORDER = re.compile(r"(?<![&|])[&|](?![&|]).*[=<>]|[=<>].*(?<![&|])[&|](?![&|])|\^.*[=<>]|[=<>].*\^|-\s*[\d(]+\s*\*\*")


def _read_based(match: re.Match[str]) -> str:
    try:
        return str(int(match[2], int(match[1])))
    except ValueError:
        return match[0]


def evaluate(text: str) -> str | None:
    """Return the value of an expression without variables; None where it has no value that can be known."""
    if choice := re.fullmatch(r"([^?]*)\?([^:]*):(.*)", text, re.DOTALL):
        text = "({1}) if ({0}) else ({2})".format(*choice.groups())
    text = _BASED.sub(_read_based, text)
    if "#" in text or _OTHER_ORDER.search(text):  # which begins a comment in Python
        return None
    python = text.replace("&&", " and ").replace("||", " or ").replace("/", "//").strip()
    try:
        return str(int(_Expression().visit(ast.parse(python or "0", mode="eval").body)))
    except (SyntaxError, KeyError, ValueError, ZeroDivisionError, RecursionError):  # KeyError: another operator
        return None


class _Expression(ast.NodeVisitor):
    """Value of an expression; ValueError where it has another kind of part, or a number of absurd size."""

    def visit_Constant(self, node: ast.Constant) -> int:
        if not isinstance(node.value, int):
            raise ValueError("no whole number")
        return node.value

    def visit_UnaryOp(self, node: ast.UnaryOp) -> int:
        return _SIGNS[type(node.op)](self.visit(node.operand))

    def visit_BinOp(self, node: ast.BinOp) -> int:
        compute = _OPERATORS[type(node.op)]
        first, second = self.visit(node.left), self.visit(node.right)
        if isinstance(node.op, (ast.Pow, ast.LShift, ast.RShift)) and not 0 <= second < _LIMIT:
            raise ValueError("too large")
        if (value := compute(first, second)) not in _RANGE:
            raise ValueError("too large")
        return value

    def visit_Compare(self, node: ast.Compare) -> int:
        if len(node.ops) != 1:
            raise ValueError("several comparisons")
        return int(_OPERATORS[type(node.ops[0])](self.visit(node.left), self.visit(node.comparators[0])))

    def visit_BoolOp(self, node: ast.BoolOp) -> int:
        values = [bool(self.visit(item)) for item in node.values]
        return int(all(values) if isinstance(node.op, ast.And) else any(values))

    def visit_IfExp(self, node: ast.IfExp) -> int:
        return self.visit(node.body if self.visit(node.test) else node.orelse)

    def generic_visit(self, node: ast.AST) -> int:
        raise ValueError("no whole number")
