"""Schemas and arguments with fields changed: a schema is used or refused in one sentence, and so are arguments."""

from __future__ import annotations

import asyncio
import copy
import json
import random
from typing import Any

import pytest
from patience import patient
from spoilt_values import change_field, list_fields

from mindspeed_rl.tools.argument_checks import ArgumentChecks
from mindspeed_rl.tools.schemas import ArgumentSchema, find_problem, validate_schema

FUNCTION = {
    "name": "f",
    "description": "d",
    "parameters": {
        "type": "object",
        "properties": {
            "a": {"type": "string", "enum": ["x", "y"], "minLength": 1, "description": "d"},
            "b": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 9}, "maxItems": 3},
            "c": {"anyOf": [{"type": "null"}, {"type": "object", "additionalProperties": {"type": "number"}}]},
            "d": {"type": "boolean", "default": True},
        },
        "required": ["a"],
        "additionalProperties": False,
        "$defs": {"e": {"type": "string"}},
    },
}
ARGUMENTS = {"a": "x", "b": [1, 2], "c": {"k": 1.5}, "d": False}
#: keywords and values that are put into a schema anywhere
KEYWORDS: dict[str, tuple[Any, ...]] = {
    "pattern": ("^(a+)+$", "(", "a{99999999999}", "\\p{L}", "(?P<n>a)(?P=n)", "\ud800", "[" * 50, "(?:" * 200 + ")" * 200),
    "$ref": ("#", "#/$defs/e", "#/$defs/none", "http://127.0.0.1:9/x", "file:///etc/passwd", "#/properties/b/items", "%zz"),
    "multipleOf": (0, 0.1, 1e-300, -1, "x"),
    "format": ("date", "nothing", 5),
    "type": ("nothing", ["string", "null"], [], 7, "object"),
    "patternProperties": ({"(": {}}, {"^a": {"type": "string"}}, []),
    "propertyNames": ({"pattern": "^(b+)+$"}, {"maxLength": 0}),
    "uniqueItems": (True, "x"),
    "contains": ({"const": 5}, {}),
    "if": ({"type": "string"}, {"$ref": "#"}),
    "not": ({}, {"$ref": "#"}),
    "allOf": ([{"$ref": "#"}], []),
    "$id": ("http://x/y", "", "urn:a"),
    "$schema": ("http://json-schema.org/draft-04/schema#", "nothing"),
    "$dynamicRef": ("#a", "#"),
    "unevaluatedProperties": (False,),
}
NUMBERS = (float("nan"), float("inf"), 10**400, -0.0, 1e308)


def make_schema(at: random.Random) -> Any:
    value: Any = json.loads(json.dumps(FUNCTION))
    for _ in range(at.randrange(3)):
        places = [keys for keys in list_fields(value) if isinstance(find(value, keys), dict)]
        keyword = at.choice(list(KEYWORDS))
        if places:
            find(value, at.choice(places))[keyword] = copy.deepcopy(at.choice(KEYWORDS[keyword]))
    for _ in range(at.randrange(2)):
        value = change_field(value, at)
    return value


def find(value: Any, keys: tuple[Any, ...]) -> Any:
    for key in keys:
        value = value[key]
    return value


def make_arguments(at: random.Random) -> dict[str, Any]:
    value: Any = ARGUMENTS
    for _ in range(at.randrange(3)):
        changed = change_field(value, at)
        value = changed if isinstance(changed, dict) else value
    if at.random() < 0.2:
        value = {**value, at.choice(("a", "b", "more", "", "\ud800")): at.choice((*NUMBERS, "a" * 30 + "!", "b" * 20_000))}
    if at.random() < 0.02:
        value = {**value, "c": json.loads("[" * 300 + "]" * 300)}
    return value


def try_schemas(seed: int, count: int) -> tuple[int, int, int]:
    """Numbers of schemas that were refused, of arguments that matched, and of others."""
    at = random.Random(seed)

    async def run() -> tuple[int, int, int]:
        refused = matched = 0
        checks = ArgumentChecks()
        await checks.start()
        try:
            for _ in range(count):
                try:
                    schema = ArgumentSchema(validate_schema(make_schema(at), "here"))
                except ValueError as error:
                    refused += 1
                    assert str(error).startswith("here") and len(str(error)) < 1000 and "Traceback" not in str(error), error
                    continue
                problem = await checks.find_problem(schema, make_arguments(at), patient(1))
                matched += problem is None
                assert problem is None or (0 < len(problem) < 1500 and "Traceback" not in problem), problem
        finally:
            await checks.close()
        return refused, matched, count - refused - matched

    return asyncio.run(asyncio.wait_for(run(), patient(60 + count)))


def test_changed_schemas_and_arguments_are_used_or_refused() -> None:
    assert min(try_schemas(1, 300)) > 20


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("form", [{"type": "number", "multipleOf": 0.5}, {"type": "number"}, {}])
def test_numbers_that_json_does_not_have_match_no_schema(number: float, form: dict[str, Any]) -> None:
    parameters = {"type": "object", "properties": {"a": form, "b": {"type": "array", "items": form}}}
    for arguments in ({"a": number}, {"b": [1.0, number]}):
        assert "NaN or an infinite one" in str(find_problem(parameters, arguments))
    assert find_problem(parameters, {"a": 1.5, "b": [1.0]}) is None


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2, 6))
def test_other_changed_schemas_and_arguments_are_used_or_refused(seed: int) -> None:
    assert min(try_schemas(seed, 1000)) > 60
