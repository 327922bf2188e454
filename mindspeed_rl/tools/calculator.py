"""The tool `calculator`: arithmetic, in bounded time and memory whatever is asked."""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Mapping
from typing import Any

from mindspeed_rl.tools.interface import ToolCall
from mindspeed_rl.tools.option_reader import OptionReader
from mindspeed_rl.tools.schemas import validate_schema
from mindspeed_rl.tools.tool import CallSettings, Session, StatelessSession, StatelessTool, ToolError, ToolResult

_MAX_CHARACTERS, _MAX_DEPTH, _MAX_BITS = 1000, 50, 4096
_SCHEMA = {
    "name": "calculator",
    "description": "Computes an arithmetic expression, such as (3 + 4) * 2 ** 0.5.",
    "parameters": {
        "type": "object",
        "properties": {
            "expression": {
                "type": "string",
                "description": "Numbers, + - * / // % **, parentheses, pi, e, and functions such as sqrt, log, sin, round.",
            }
        },
        "required": ["expression"],
    },
}
Number = int | float
_BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_UNARY: dict[type[ast.unaryop], Callable[[Any], Any]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    **{name: getattr(math, name) for name in "sqrt exp log log2 log10 sin cos tan asin acos atan floor ceil".split()},
    **{"abs": abs, "round": round, "min": min, "max": max, "gcd": math.gcd, "lcm": math.lcm},
}
_NAMES: dict[str, float] = {"pi": math.pi, "e": math.e}


class Calculator(StatelessTool):
    """See the module; it takes no configuration but the schema, whose first parameter is the expression."""

    def __init__(self, config: Mapping[str, Any], schema: Any, settings: CallSettings, where: str) -> None:
        OptionReader(config, where).end()
        self.settings = settings
        self._schema = validate_schema(_SCHEMA if schema is None else schema, where)
        properties = self._schema["function"]["parameters"].get("properties", {})
        if not properties:
            raise ValueError(f"{where}: the schema of a calculator has a parameter for the expression")
        self._parameter = next(iter(properties))

    @property
    def schemas(self) -> list[dict[str, Any]]:
        """See `Tool`."""
        return [self._schema]

    def open(self, options: Mapping[str, Mapping[str, Any]]) -> Session:
        """See `Tool`."""
        return _CalculatorSession(self._parameter)


class _CalculatorSession(StatelessSession):
    def __init__(self, parameter: str) -> None:
        self._parameter = parameter

    async def call(self, call: ToolCall, timeout_s: float) -> ToolResult:
        """See `Session`."""
        return ToolResult(compute(str(call.arguments.get(self._parameter, ""))))


def compute(expression: str) -> str:
    """Return the value of an expression as text: whole numbers exactly, others with twelve digits.

    Raises:
        ToolError: it is no arithmetic, has no value, or is larger than allowed.
    """
    # models write powers and products as people do
    text = expression.strip().replace("^", "**").replace("×", "*").replace("÷", "/").replace("−", "-")
    if len(text) > _MAX_CHARACTERS:
        raise ToolError(f"the expression is longer than {_MAX_CHARACTERS} characters", "bad_arguments")
    try:
        value = _value(ast.parse(text, mode="eval").body, 0)
    except (SyntaxError, ValueError, MemoryError, RecursionError, TypeError) as error:
        reason = error.msg if isinstance(error, SyntaxError) else str(error)
        raise ToolError(f"{expression!r} cannot be computed: {reason}", "bad_arguments") from None
    except ZeroDivisionError:
        raise ToolError(f"{expression!r} divides by zero", "bad_arguments") from None
    except OverflowError:
        raise ToolError(f"{expression!r} is too large", "bad_arguments") from None
    if isinstance(value, int):
        return str(value)
    # below 2**53, to where a float holds every whole number
    return str(int(value)) if value.is_integer() and abs(value) < 1e15 else f"{value:.12g}"


def _value(node: ast.expr, depth: int) -> Number:
    if depth > _MAX_DEPTH:
        raise ValueError(f"it is nested more than {_MAX_DEPTH} deep")
    # the type itself: True is an instance of int
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return _bounded(node.value)
    if isinstance(node, ast.Name) and node.id in _NAMES:
        return _NAMES[node.id]
    if isinstance(node, ast.UnaryOp) and type(node.op) in _UNARY:
        return _UNARY[type(node.op)](_value(node.operand, depth + 1))
    if isinstance(node, ast.BinOp):
        left, right = _value(node.left, depth + 1), _value(node.right, depth + 1)
        if isinstance(node.op, ast.Pow):
            return _power(left, right)
        if type(node.op) in _BINARY:
            return _bounded(_BINARY[type(node.op)](left, right))
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _FUNCTIONS and not node.keywords:
        return _call(node.func.id, [_value(argument, depth + 1) for argument in node.args])
    raise ValueError(f"{ast.unparse(node)[:80]!r} is no arithmetic; functions are {', '.join(_FUNCTIONS)}")


def _call(name: str, values: list[Number]) -> Number:
    if name == "round" and len(values) == 2:
        values[1] = int(values[1])
    return _bounded(_FUNCTIONS[name](*values))


def _power(base: Number, exponent: Number) -> Number:
    """Return the power, refused before it is computed if it would not fit."""
    if isinstance(base, int) and isinstance(exponent, int) and exponent > 0 and base.bit_length() * exponent > _MAX_BITS:
        raise OverflowError
    return _bounded(base**exponent)


def _bounded(value: Any) -> Number:
    if isinstance(value, complex):
        raise ValueError("the result is no real number")
    if isinstance(value, int) and value.bit_length() > _MAX_BITS:
        raise OverflowError
    if isinstance(value, float) and not math.isfinite(value):
        raise OverflowError
    return value
