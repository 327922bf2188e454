"""Tests written as statements, split in two: the call goes into the sandbox, the expected value stays outside."""

from __future__ import annotations

import ast
from collections.abc import Callable
from fractions import Fraction
from typing import Any

_Comparison = tuple[str, object]
"""(expression, its expected value)"""

# Values travel as JSON with their types; a value that equals a literal without being one (a Counter, a Decimal) as the literal.
EVALUATION = """
import json as _json, sys as _sys

def _plain(value):
    if value is None or isinstance(value, (bool, str)):
        return value if value is None or isinstance(value, bool) else str(value)
    for kind, number in ((int, int), (float, float)):
        if isinstance(value, kind):
            return number(value)
    if isinstance(value, complex):
        return ["complex", [value.real, value.imag]]
    if isinstance(value, (bytes, bytearray)):
        return ["bytes", list(value)]
    if isinstance(value, dict):
        return ["dict", [[_plain(key), _plain(item)] for key, item in value.items()]]
    for kind in (list, tuple, set, frozenset):
        if isinstance(value, kind):
            return [kind.__name__, [_plain(item) for item in value]]
    return ["fraction", list(value.as_integer_ratio())]

_values = []
for _text in _json.loads({expressions}):
    try:
        _values.append([_plain(eval(_text, globals()))])
    except BaseException:
        _values.append(None)
_sys.stdout.write({mark} + _json.dumps(_values) + "\\n")
"""


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


def _decode(data: Any) -> object:
    """Return the value that the sandbox wrote.

    Raises:
        Exception: it wrote something else.
    """
    if not isinstance(data, list):
        return data
    kind, content = data
    if kind == "dict":
        return {_decode(key): _decode(item) for key, item in content}
    if kind in _COLLECTIONS:
        return _COLLECTIONS[kind]([_decode(item) for item in content])
    if kind == "bytes":
        return bytes(content)
    return {"complex": complex, "fraction": Fraction}[kind](*content)


_COLLECTIONS: dict[str, Callable[[list[object]], object]] = {
    "list": list,
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
}


def are_equal(output: object, expected: object) -> bool:
    """Return True if the sandbox's output for an expression is the expected value.

    Args:
        output: the value in a list; None where the expression raised.
    """
    try:
        return isinstance(output, list) and bool(_decode(output[0]) == expected)
    except Exception:  # noqa: BLE001 (the program controls the output, which may fail to decode in any way)
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
