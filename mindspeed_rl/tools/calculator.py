"""The tool `calculator`: arithmetic in bounded time and memory."""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable

from mindspeed_rl.tools.interface import ToolCall
from mindspeed_rl.tools.option_reader import OptionReader
from mindspeed_rl.tools.schemas import validate_schema
from mindspeed_rl.tools.tool import CallSettings, Config, RowOptions, Session, Tool, ToolError, ToolResult

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
_Number = int | float
_BINARY: dict[type[ast.operator], Callable[[_Number, _Number], object]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_UNARY: dict[type[ast.unaryop], Callable[[_Number], _Number]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}
_FUNCTIONS: dict[str, Callable[..., object]] = {
    **{name: getattr(math, name) for name in "sqrt exp log log2 log10 sin cos tan asin acos atan floor ceil".split()},
    **{"abs": abs, "round": round, "min": min, "max": max, "gcd": math.gcd, "lcm": math.lcm},
}
_NAMES: dict[str, float] = {"pi": math.pi, "e": math.e}


class Calculator(Tool):
    """Computes the first parameter of its schema; it has no configuration."""

    def __init__(self, config: Config, schema: object, settings: CallSettings, where: str) -> None:
        OptionReader(config, where).reject_unknown()
        super().__init__(settings, [validate_schema(_SCHEMA if schema is None else schema, where)])
        properties = self.schemas[0]["function"]["parameters"].get("properties", {})
        if not properties:
            raise ValueError(f"{where}: the schema of a calculator has a parameter for the expression")
        self._parameter = next(iter(properties))

    def open(self, options: RowOptions) -> Session:
        """See `Tool`."""

        async def run(call: ToolCall, timeout_s: float) -> ToolResult:
            return ToolResult(compute(str(call.arguments.get(self._parameter, ""))))

        return Session(run)


def compute(expression: str) -> str:
    """Return the value of an expression as text: integers exactly, others with twelve digits.

    Raises:
        ToolError: it is not arithmetic, has no value, or is too large.
    """
    # models write powers and products as people do
    text = expression.strip().replace("^", "**").replace("×", "*").replace("÷", "/").replace("−", "-")
    if len(text) > _MAX_CHARACTERS:
        raise ToolError(f"the expression is longer than {_MAX_CHARACTERS} characters", "bad_arguments")
    try:
        value = _evaluate(ast.parse(text, mode="eval").body, 0)
    except (SyntaxError, ValueError, MemoryError, RecursionError, TypeError) as error:
        reason = error.msg if isinstance(error, SyntaxError) else str(error)
        raise ToolError(f"{expression!r} cannot be computed: {reason}", "bad_arguments") from None
    except ZeroDivisionError:
        raise ToolError(f"{expression!r} divides by zero", "bad_arguments") from None
    except OverflowError:
        raise ToolError(f"{expression!r} is too large", "bad_arguments") from None
    if isinstance(value, int):
        return str(value)
    # below 2**53, up to which a float represents all integers
    return str(int(value)) if value.is_integer() and abs(value) < 1e15 else f"{value:.12g}"


def _evaluate(node: ast.expr, depth: int) -> _Number:
    if depth > _MAX_DEPTH:
        raise ValueError(f"it is nested more than {_MAX_DEPTH} deep")
    # not isinstance: True is an instance of int
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return _check_size(node.value)
    if isinstance(node, ast.Name) and node.id in _NAMES:
        return _NAMES[node.id]
    if isinstance(node, ast.UnaryOp) and type(node.op) in _UNARY:
        return _UNARY[type(node.op)](_evaluate(node.operand, depth + 1))
    if isinstance(node, ast.BinOp):
        left, right = _evaluate(node.left, depth + 1), _evaluate(node.right, depth + 1)
        if isinstance(node.op, ast.Pow):
            # rejected before the power is computed
            if isinstance(left, int) and isinstance(right, int) and right > 0 and left.bit_length() * right > _MAX_BITS:
                raise OverflowError
            return _check_size(left**right)
        if type(node.op) in _BINARY:
            return _check_size(_BINARY[type(node.op)](left, right))
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _FUNCTIONS and not node.keywords:
        values = [_evaluate(argument, depth + 1) for argument in node.args]
        if node.func.id == "round" and len(values) == 2:
            values[1] = int(values[1])
        return _check_size(_FUNCTIONS[node.func.id](*values))
    raise ValueError(f"{ast.unparse(node)[:80]!r} is not arithmetic; functions are {', '.join(_FUNCTIONS)}")


def _check_size(value: object) -> _Number:
    if isinstance(value, complex):
        raise ValueError("the result is not a real number")
    if isinstance(value, int) and value.bit_length() > _MAX_BITS:
        raise OverflowError
    if isinstance(value, float) and not math.isfinite(value):
        raise OverflowError
    assert isinstance(value, (int, float))  # all functions of the tables return numbers
    return value
