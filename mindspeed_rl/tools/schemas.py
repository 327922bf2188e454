"""Function schemas in OpenAI's form: validate them, derive them from Python functions, check arguments against them."""

from __future__ import annotations

import re
from collections.abc import Mapping

from jsonschema import Draft202012Validator
from jsonschema.exceptions import SchemaError

from mindspeed_rl.tools.interface import JsonObject

#: OpenAI's rule
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


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
