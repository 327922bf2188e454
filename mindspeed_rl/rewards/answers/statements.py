"""Tests written as statements, taken apart: what is called goes into the sandbox, what must come of it stays outside."""

from __future__ import annotations

import ast
from collections.abc import Callable
from fractions import Fraction
from typing import Any

#: (expression, the value that it must have)
Comparison = tuple[str, Any]

# Values travel as JSON with their kinds; one that equals a literal without being one (a Counter, a Decimal) as what it equals.
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


def comparisons(test: str, entry_point: str | None = None) -> list[Comparison] | None:
    """What a test compares, where all that it does is to compare results with literals; None for any other test.

    Args:
        entry_point: what a function `check(candidate)` in the test is called with; None where the test is run as it is.
    """
    try:
        body = ast.parse(test).body
        if entry_point is not None:
            body = _body_of_check(body, entry_point)
        found = [_comparison(statement) for statement in body if not _says_nothing(statement)]
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    return found or None


def value_of(data: Any) -> Any:
    """Return the value that the sandbox wrote.

    Raises:
        Exception: it wrote something else.
    """
    if not isinstance(data, list):
        return data
    kind, content = data
    if kind == "dict":
        return {value_of(key): value_of(item) for key, item in content}
    if kind in _COLLECTIONS:
        return _COLLECTIONS[kind]([value_of(item) for item in content])
    if kind == "bytes":
        return bytes(content)
    return {"complex": complex, "fraction": Fraction}[kind](*content)


_COLLECTIONS: dict[str, Callable[[list[Any]], Any]] = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}


def are_equal(written: Any, wanted: Any) -> bool:
    """Whether what the sandbox wrote of an expression is this value.

    Args:
        written: the value in a list; None where the expression raised.
    """
    try:
        return isinstance(written, list) and bool(value_of(written[0]) == wanted)
    except Exception:  # the program can write what it likes
        return False


def _body_of_check(body: list[ast.stmt], entry_point: str) -> list[ast.stmt]:
    """Return the statements of the one function `check(candidate)`, about this function.

    Raises:
        ValueError: there is more beside it, or it is another one.
    """
    rest = [statement for statement in body if not _says_nothing(statement)]
    if len(rest) != 1 or not isinstance(check := rest[0], ast.FunctionDef) or check.name != "check":
        raise ValueError
    (parameter,) = check.args.args
    for node in ast.walk(check):
        if isinstance(node, ast.Name) and node.id == parameter.arg:
            node.id = entry_point
    return check.body


def _says_nothing(statement: ast.stmt) -> bool:
    """Return True for doc strings, `pass`, `assert True` and names of literals (HumanEval's METADATA)."""
    if isinstance(statement, ast.Pass):
        return True
    if isinstance(statement, ast.Assign):
        ast.literal_eval(statement.value)
        return all(isinstance(target, ast.Name) and target.id.isupper() for target in statement.targets)
    if isinstance(statement, ast.Expr):
        return isinstance(statement.value, ast.Constant)
    return isinstance(statement, ast.Assert) and isinstance(statement.test, ast.Constant) and bool(statement.test.value)


def _comparison(statement: ast.stmt) -> Comparison:
    """What `assert expression == literal` compares, in either order.

    Raises:
        ValueError: it is something else.
    """
    test = statement.test if isinstance(statement, ast.Assert) else None
    if not isinstance(test, ast.Compare) or len(test.ops) != 1 or not isinstance(test.ops[0], ast.Eq):
        raise ValueError
    left, right = test.left, test.comparators[0]
    try:
        return ast.unparse(left), ast.literal_eval(right)
    except ValueError:
        return ast.unparse(right), ast.literal_eval(left)
