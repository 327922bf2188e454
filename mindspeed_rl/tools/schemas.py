"""Function schemas in OpenAI's form: validate them, derive them from Python functions, check arguments against them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from jsonschema import Draft202012Validator
from jsonschema.exceptions import SchemaError, best_match

from mindspeed_rl.tools.interface import JsonObject

#: OpenAI's rule
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_MAX_VALUE_LENGTH = 120


def validate_schema(value: object, where: str) -> JsonObject:
    """Return a schema as {"type": "function", "function": {"name", "description", "parameters"}}.

    Args:
        value: such a schema, or only its inner part.
        where: prefix of errors.

    Raises:
        ValueError: its name is invalid, or its parameters are no JSON schema of an object.
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


def derive_schema(function: Callable[..., object], where: str) -> JsonObject:
    """Return the schema of a Python function, from its type hints and its Google-style docstring.

    Raises:
        ValueError: a parameter has no type or no description.
    """
    from transformers.utils import get_json_schema
    from transformers.utils.chat_template_utils import DocstringParsingException, TypeHintParsingException

    try:
        schema = get_json_schema(function)
    except (DocstringParsingException, TypeHintParsingException) as error:
        raise ValueError(f"{where}: no schema can be derived from the function ({error}); give it as tool_schema") from None
    schema["function"].pop("return", None)  # no chat template uses it
    return validate_schema(schema, where)


def find_problem(schema: JsonObject, arguments: Mapping[str, object]) -> str | None:
    """Return a sentence for the model about arguments that do not match a function's schema; None if they match."""
    try:
        error = best_match(Draft202012Validator(schema["function"]["parameters"]).iter_errors(dict(arguments)))
    except RecursionError:
        return "the arguments are nested too deeply"
    if error is None:
        return None
    path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in error.absolute_path).lstrip(".")
    # the message repeats the value, which may be the whole text of the model
    message = error.message if len(error.message) <= 300 else f"{error.message[:_MAX_VALUE_LENGTH]}... {error.message[-80:]}"
    return f"argument {path}: {message}" if path else message
