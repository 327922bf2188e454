"""Function schemas in OpenAI's form: validate them, derive them from Python functions, check arguments against them."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping

from jsonschema import Draft202012Validator
from jsonschema.exceptions import SchemaError, best_match
from referencing.exceptions import Unresolvable

from mindspeed_rl.tools.interface import JsonObject
from mindspeed_rl.tools.tool import ToolResult

#: OpenAI's rule
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
#: of the parameters and the description of a function, as JSON; they are in every prompt
_MAX_SCHEMA_BYTES, _MAX_SCHEMA_DEPTH = 256 << 10, 64
_MAX_VALUE_LENGTH = 120
#: keywords with which a check takes longer than linear time: regular expressions, references, comparisons of all pairs
_COSTLY = frozenset(
    "$ref $dynamicRef $recursiveRef pattern patternProperties propertyNames uniqueItems contains unevaluatedProperties "
    "unevaluatedItems dependentSchemas".split()
)
#: values of the arguments times nodes of the schema that are checked in the event loop
_MAX_INLINE_WORK = 10_000


def validate_schema(value: object, where: str) -> JsonObject:
    """Return a schema as {"type": "function", "function": {"name", "description", "parameters"}}.

    Args:
        value: such a schema, or only its inner part.
        where: prefix of errors.

    Raises:
        ValueError: its name is invalid, it is too large, its parameters are not a JSON schema of an object, or one that refers
            to another document.
    """
    if not isinstance(value, Mapping):
        raise ValueError(f"{where}: a function schema is a mapping, not {type(value).__name__}")
    function = value.get("function") if "function" in value else value
    if not isinstance(function, Mapping):
        raise ValueError(f"{where}.function: a function schema is a mapping, not {type(function).__name__}")
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ValueError(f"{where}: the name {name!r} must be up to 64 letters, digits, dots, dashes and underscores")
    parameters = function.get("parameters") or {"type": "object", "properties": {}}
    if not isinstance(parameters, Mapping) or parameters.get("type") != "object":
        raise ValueError(f"{where}: the parameters of {name!r} must be a schema with type: object")
    plain = {**function, "description": str(function.get("description") or ""), "parameters": dict(parameters)}
    _check_size(plain, f"{where}: the description and the parameters of {name!r}")
    try:
        Draft202012Validator.check_schema(parameters)
    except (SchemaError, RecursionError, OverflowError) as error:
        text = error.message if isinstance(error, SchemaError) else str(error)
        reason = "nested too deeply" if isinstance(error, RecursionError) else text[:300]
        raise ValueError(f"{where}: the parameters of {name!r} are not a JSON schema: {reason}") from None
    for node in _walk(parameters):
        if isinstance(node, Mapping) and isinstance(target := node.get("$ref"), str) and not target.startswith("#"):
            raise ValueError(f"{where}: the parameters of {name!r} refer to {target[:120]!r}, but must not leave the schema")
    return {"type": "function", "function": plain}


def _check_size(value: Mapping[str, object], what: str) -> None:
    try:
        size = len(json.dumps(value, default=str))
    except (RecursionError, ValueError):
        raise ValueError(f"{what} are nested too deeply") from None
    if size > _MAX_SCHEMA_BYTES:
        raise ValueError(f"{what} have {size:,} characters as JSON, but at most {_MAX_SCHEMA_BYTES:,} fit")
    if any(True for _ in _walk(value, _MAX_SCHEMA_DEPTH, only_beyond=True)):
        raise ValueError(f"{what} are nested more than {_MAX_SCHEMA_DEPTH} deep")


def _walk(value: object, depth: int = 0, *, only_beyond: bool = False) -> Iterator[object]:
    """Yield a JSON value and all values in it; or only those that are nested deeper than `depth`."""
    left: list[tuple[object, int]] = [(value, 0)]
    while left:
        node, level = left.pop()
        if not only_beyond or level > depth:
            yield node
        inner = node.values() if isinstance(node, Mapping) else node if isinstance(node, (list, tuple)) else ()
        left += [(item, level + 1) for item in inner]


class ArgumentSchema:
    """The parameters of a function, and the size of arguments that are checked quickly.

    Args:
        schema: from `validate_schema`.

    Attributes:
        parameters: JSON schema.
        is_costly: no arguments are checked quickly.
    """

    def __init__(self, schema: JsonObject) -> None:
        self.parameters: JsonObject = schema["function"]["parameters"]
        nodes = list(_walk(self.parameters))
        self.is_costly = any(isinstance(node, Mapping) and not _COSTLY.isdisjoint(node) for node in nodes)
        self._max_values = 0 if self.is_costly else max(1, _MAX_INLINE_WORK // len(nodes))

    def is_quick(self, arguments: Mapping[str, object]) -> bool:
        """Return True if the check takes milliseconds, so that the event loop may wait for it."""
        return all(index < self._max_values for index, _ in enumerate(_walk(arguments)))


def find_problem(parameters: JsonObject, arguments: Mapping[str, object]) -> str | None:
    """Return a sentence for the model about arguments that do not match a schema; None if they match."""
    if any(isinstance(value, float) and not math.isfinite(value) for value in _walk(arguments)):
        return "the arguments have a number that JSON does not have: NaN or an infinite one"
    try:
        error = best_match(Draft202012Validator(parameters).iter_errors(dict(arguments)))
    except RecursionError:
        return "the arguments are nested too deeply"
    except Unresolvable as unknown:
        return f"the schema of the tool refers to {str(unknown)[:_MAX_VALUE_LENGTH]}, which does not exist"
    except ArithmeticError as wrong:  # a number that no float can have
        return f"the arguments cannot be checked against the schema of the tool: {wrong}"
    except re.error as wrong:
        return f"the schema of the tool has a pattern that is not a regular expression: {str(wrong)[:_MAX_VALUE_LENGTH]}"
    if error is None:
        return None
    path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in error.absolute_path).lstrip(".")
    # the message repeats the value, which may be the whole text of the model
    message = error.message if len(error.message) <= 300 else f"{error.message[:_MAX_VALUE_LENGTH]}... {error.message[-80:]}"
    return f"argument {path[:_MAX_VALUE_LENGTH]}: {message}" if path else message


def check_arguments(parameters: JsonObject, arguments: Mapping[str, object]) -> ToolResult:
    """Return the text of `find_problem`, "" for none; called in a process, which ends at the deadline."""
    return ToolResult(find_problem(parameters, arguments) or "")
