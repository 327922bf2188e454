"""Scorers for the shape of a response, whatever it says."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from mindspeed_rl.rewards.answers.extraction import tagged_answer

_ANSWER_OPENS = re.compile(r"</think>\s*<answer>")
_ANSWER_CLOSES = re.compile(r"</answer>$", re.MULTILINE)
_TAGS = ("<think>", "</think>", "<answer>", "</answer>")
_BOX = re.compile(r"\\boxed\{.*?\}")
_STEP = re.compile(r"Step \d+:|^\d+\.|\n-|\n\*|First,|Second,|Next,|Finally,")
_FENCE = re.compile(r"```(?:json)?[ \t]*\n(.*?)```", re.DOTALL)


def think_answer(response: str) -> float:
    """1.0 if the response starts with <think>..</think> and then <answer>..</answer> up to the end of a line, else 0.0.

    The name is `format` in MindSpeed-RL and ms-swift (DeepSeek-R1, arXiv:2501.12948).
    """
    # in two steps: one expression over both would try every pair of repeated tags
    opening = _ANSWER_OPENS.search(response, len("<think>")) if response.startswith("<think>") else None
    return 1.0 if opening is not None and _ANSWER_CLOSES.search(response, opening.end()) else 0.0


def strict_format(response: str) -> float:
    r"""1.0 if each of the four tags and one \boxed{} occur once, in order, the box in the answer, nothing around; else -0.5."""
    boxes = list(_BOX.finditer(response))
    if len(boxes) != 1 or any(response.count(tag) != 1 for tag in _TAGS):
        return -0.5
    think, unthink, answer, unanswer = (response.index(tag) for tag in _TAGS)
    in_order = think < unthink < answer < boxes[0].start() < unanswer
    return 1.0 if in_order and response.startswith("<think>") and response.endswith("</answer>") else -0.5


def step(response: str) -> float:
    """A third for each step marker, at most 1.0: "Step 1:", a number at the start, bullets, First, Second, Next, Finally."""
    return min(1.0, len(_STEP.findall(response)) / 3)


def regex_format(response: str, pattern: str) -> float:
    """1.0 if the whole response matches the regular expression in the column `pattern` ("." matches newlines), else 0.0."""
    return 1.0 if re.fullmatch(pattern, response, re.DOTALL) else 0.0


def json_format(response: str, schema: Mapping[str, Any] | str | None = None) -> float:
    """1.0 if the response is JSON that satisfies the column `schema` (JSON Schema, if there is one), else 0.0.

    The JSON is the content of <answer>..</answer>, else of the last fenced block, else the whole response.

    Raises:
        ValueError: the schema uses a keyword other than type, enum, const, required, properties, additionalProperties, items,
            minItems, maxItems, minLength, maxLength, pattern, minimum, maximum.
    """
    text = tagged_answer(response)
    if text is None:
        fenced = _FENCE.findall(response)
        text = fenced[-1] if fenced else response
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return 0.0
    if isinstance(schema, str):
        schema = json.loads(schema) if schema.strip() else None
    return 1.0 if schema is None or satisfies(value, schema) else 0.0


_TYPES: dict[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "number": (int, float),
    "integer": (int,),
    "boolean": (bool,),
    "null": (type(None),),
}
_KEYWORDS = (
    "type enum const required properties additionalProperties items minItems maxItems minLength maxLength pattern minimum"
    " maximum title description $schema default examples"
).split()


def satisfies(value: Any, schema: Mapping[str, Any]) -> bool:
    """True if a JSON value satisfies a JSON Schema made of the keywords that `json_format` names.

    Raises:
        ValueError: another keyword; better than a reward for what was never checked.
    """
    for keyword in schema:
        if keyword not in _KEYWORDS:
            raise ValueError(f"the JSON schema keyword '{keyword}' is not supported; supported: {', '.join(_KEYWORDS)}")
    checks = [
        "type" not in schema or _has_type(value, schema["type"]),
        "enum" not in schema or value in schema["enum"],
        "const" not in schema or value == schema["const"],
    ]
    if isinstance(value, dict):
        properties = schema.get("properties", {})
        others = schema.get("additionalProperties", True)
        checks += [name in value for name in schema.get("required", ())]
        checks += [satisfies(value[name], properties[name]) for name in properties if name in value]
        extra = [name for name in value if name not in properties]
        checks += [others if isinstance(others, bool) else satisfies(value[name], others) for name in extra]
    elif isinstance(value, list):
        checks += [schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", len(value))]
        checks += [satisfies(item, schema["items"]) for item in value if "items" in schema]
    elif isinstance(value, str):
        checks += [schema.get("minLength", 0) <= len(value) <= schema.get("maxLength", len(value))]
        checks += ["pattern" not in schema or re.search(schema["pattern"], value) is not None]
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        checks += [schema.get("minimum", value) <= value <= schema.get("maximum", value)]
    return all(checks)


def _has_type(value: Any, wanted: str | list[str]) -> bool:
    names = [wanted] if isinstance(wanted, str) else wanted
    if isinstance(value, bool):
        # asked first: True is an int in Python, and no number in JSON
        return "boolean" in names
    # JSON Schema counts 1.0 among the integers
    if isinstance(value, float) and value.is_integer() and "integer" in names:
        return True
    return any(isinstance(value, _TYPES[name]) for name in names)
