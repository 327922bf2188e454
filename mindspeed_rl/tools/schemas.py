"""Function schemas in OpenAI's form: checked, derived from Python functions, and held against what a model wrote."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from jsonschema import Draft202012Validator
from jsonschema.exceptions import SchemaError, best_match

#: what OpenAI's interface allows
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_MOST_OF_A_VALUE = 120


def validate_schema(value: Any, where: str) -> dict[str, Any]:
    """Return a schema as {"type": "function", "function": {"name", "description", "parameters"}}.

    Args:
        value: that, or its inner part alone.
        where: what the errors begin with.

    Raises:
        ValueError: it has no fitting name, or its parameters are no JSON schema of an object.
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
    try:
        Draft202012Validator.check_schema(parameters)
    except SchemaError as error:
        raise ValueError(f"{where}: the parameters of {name!r} are no JSON schema: {error.message}") from None
    plain = {**function, "description": str(function.get("description") or ""), "parameters": dict(parameters)}
    return {"type": "function", "function": plain}


def derive_schema(function: Callable[..., Any], where: str) -> dict[str, Any]:
    """Return the schema of a Python function, from its type hints and its Google-style docstring.

    Raises:
        ValueError: a parameter has no type or no description.
    """
    from transformers.utils import get_json_schema
    from transformers.utils.chat_template_utils import DocstringParsingException, TypeHintParsingException

    try:
        made = get_json_schema(function)
    except (DocstringParsingException, TypeHintParsingException) as error:
        raise ValueError(f"{where}: no schema can be made from the function ({error}); give it as tool_schema") from None
    made["function"].pop("return", None)  # no chat template shows it
    return validate_schema(made, where)


class ArgumentCheck:
    """Says what is wrong with the arguments of a call."""

    def __init__(self, schema: Mapping[str, Any]) -> None:
        self._validator = Draft202012Validator(schema["function"]["parameters"])

    def problem(self, arguments: Mapping[str, Any]) -> str | None:
        """One sentence for the model, or None if the arguments fit."""
        try:
            error = best_match(self._validator.iter_errors(dict(arguments)))
        except RecursionError:
            return "the arguments are nested too deeply"
        if error is None:
            return None
        place = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in error.absolute_path).lstrip(".")
        # the message repeats the value, which may be all that the model wrote
        message = error.message if len(error.message) <= 300 else f"{error.message[:_MOST_OF_A_VALUE]}... {error.message[-80:]}"
        return f"argument {place}: {message}" if place else message
