"""Tests written as statements, split in two: the call goes into the sandbox, the expected value stays outside."""

from __future__ import annotations

import ast
import json
import math
from fractions import Fraction
from typing import Any

from mindspeed_rl.isolation.harness import encode

_Comparison = tuple[str, object]
"""(expression, its expected value)"""


def read_comparisons(test: str, entry_point: str | None = None) -> list[_Comparison] | None:
    """Return the comparisons of a test that only compares results with literals; None for any other test.

    Args:
        entry_point: the argument of a function `check(candidate)` in the test; None where the test has no such function.
    """
    try:
        body = ast.parse(test).body
        if entry_point is not None:
            body = _inline_check(body, entry_point)
        comparisons = [_read_comparison(statement) for statement in body if not _has_no_effect(statement)]
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    return comparisons or None


def _canonical(data: Any) -> str:
    """Return one text for all encoded values that are equal in Python. None is built: the program may have written them.

    Raises:
        ValueError: it wrote something else, or a value that equals nothing.
    """
    if data is None or isinstance(data, str):
        return json.dumps(data)
    if isinstance(data, int):
        return f"{int(data)}/1"
    if isinstance(data, float):
        if math.isnan(data):
            raise ValueError
        return "{}/{}".format(*data.as_integer_ratio()) if not math.isinf(data) else str(data)
    if not isinstance(data, list):
        raise ValueError
    kind, content = data
    if kind == "fraction" and all(isinstance(number, int) for number in content):
        return "{}/{}".format(*Fraction(*content).as_integer_ratio())
    if kind == "complex":
        real, imaginary = map(_canonical, content)
        return real if imaginary == "0/1" else f"{real}+{imaginary}j"
    if kind == "bytes":
        return f"bytes({','.join(map(str, map(int, content)))})"
    if kind == "dict":
        return f"dict({','.join(sorted(f'{_canonical(key)}:{_canonical(item)}' for key, item in content))})"
    if kind in ("set", "frozenset"):
        return f"set({','.join(sorted(map(_canonical, content)))})"
    if kind in ("list", "tuple"):
        return f"{kind}({','.join(map(_canonical, content))})"
    raise ValueError


def are_equal(output: object, expected: object) -> bool:
    """Return True if the sandbox's output for an expression is the expected value.

    Args:
        output: the encoded value in a list; None where the expression raised.
    """
    try:
        return isinstance(output, list) and _canonical(output[0]) == _canonical(encode(expected))
    except (ValueError, TypeError, IndexError, ArithmeticError, RecursionError, MemoryError):
        return False


def _inline_check(body: list[ast.stmt], entry_point: str) -> list[ast.stmt]:
    """Return the statements of the only function, `check(candidate)`, with the entry point as its argument.

    Raises:
        ValueError: there are other statements, or it is another function.
    """
    statements = [statement for statement in body if not _has_no_effect(statement)]
    if len(statements) != 1 or not isinstance(check := statements[0], ast.FunctionDef) or check.name != "check":
        raise ValueError
    (parameter,) = check.args.args
    for node in ast.walk(check):
        if isinstance(node, ast.Name) and node.id == parameter.arg:
            node.id = entry_point
    return check.body


def _has_no_effect(statement: ast.stmt) -> bool:
    """Return True for docstrings, `pass`, `assert True` and names of literals (HumanEval's METADATA)."""
    if isinstance(statement, ast.Pass):
        return True
    if isinstance(statement, ast.Assign):
        ast.literal_eval(statement.value)
        return all(isinstance(target, ast.Name) and target.id.isupper() for target in statement.targets)
    if isinstance(statement, ast.Expr):
        return isinstance(statement.value, ast.Constant)
    return isinstance(statement, ast.Assert) and isinstance(statement.test, ast.Constant) and bool(statement.test.value)


def _read_comparison(statement: ast.stmt) -> _Comparison:
    """Return the two sides of `assert expression == literal`, in either order.

    Raises:
        ValueError: another statement.
    """
    test = statement.test if isinstance(statement, ast.Assert) else None
    if not isinstance(test, ast.Compare) or len(test.ops) != 1 or not isinstance(test.ops[0], ast.Eq):
        raise ValueError
    left, right = test.left, test.comparators[0]
    try:
        return ast.unparse(left), ast.literal_eval(right)
    except ValueError:
        return ast.unparse(right), ast.literal_eval(left)
