"""Scorers that compare text with text: exact match and multiple choice."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from mindspeed_rl.rewards.answers.extraction import closed_boxed, tagged_answer

_LETTERS = r"[(（]?([A-J](?:\s*[,、，和&]?\s*(?:and\s+)?[A-J])*)[)）]?(?![A-Za-z'’])"
_STATED = re.compile(
    r"(?i:answers?(?:\s+is|\s+are)?|choice(?:\s+is)?|option(?:\s+is)?|答案(?:是|为|选)?|故选|应选|选择?)"
    rf"\s*[:：]?\s*(?:\*\*|\\boxed\{{|\\text\{{|\$|【)*\s*(?i:option\s+|choice\s+)?{_LETTERS}"
)
_ALONE = re.compile(r"(?<![A-Za-z0-9'’])([B-HJ]|A(?! +[a-z])|I(?! +[a-z]))(?![A-Za-z0-9'’])")  # not the words "a" and "I"
_SET = re.compile(r"[A-J]")


def exact_match(response: str, label: Any) -> float:
    """Return 1.0 if the response is the label, blanks around both aside, else 0.0."""
    return 1.0 if response.strip() == str(label).strip() else 0.0


def multiple_choice(response: str, label: Any) -> float:
    """Return 1.0 if the chosen letters are the label's, in any order ("AC", "A, C"), else 0.0.

    The choice is looked for in the last box, in <answer>..</answer>, after the last "answer is" or its Chinese forms, and at
    last as a letter that stands alone.
    """
    chosen = chosen_letters(response)
    return 1.0 if chosen and chosen == frozenset(_SET.findall(str(label).upper())) else 0.0


def chosen_letters(response: str) -> frozenset[str]:
    """Return the letters that a response to a multiple-choice question settles on, none if it does not."""
    for stated in (closed_boxed(response), tagged_answer(response)):
        if stated is not None:
            letters = _only_letters(stated)
            if letters:
                return letters
    stated_last = _STATED.findall(response)
    if stated_last:
        return frozenset(_SET.findall(stated_last[-1].upper()))
    alone = _ALONE.findall(response)
    return frozenset(alone[-1:])


def _only_letters(stated: str) -> frozenset[str]:
    """Return the letters of a statement: "B", "(B)", "B. 42", "A, C", "AC"; none for other text."""
    stated = re.sub(r"\\(?:text|mathrm|textbf)\{([^{}]*)\}", r"\1", stated).strip()
    match = re.match(rf"{_LETTERS}(?:\s*[.．:：、)]|\s*$)", stated)
    if match:
        return frozenset(_SET.findall(match[1]))
    found = _STATED.findall(stated)
    return frozenset(_SET.findall(found[-1].upper())) if found else frozenset(_ALONE.findall(stated)[-1:])


# Formats

_ANSWER_OPENS = re.compile(r"</think>\s*<answer>")
_ANSWER_CLOSES = re.compile(r"</answer>$", re.MULTILINE)
_TAGS = ("<think>", "</think>", "<answer>", "</answer>")
_BOX = re.compile(r"\\boxed\{.*?\}")
_STEP = re.compile(r"Step \d+:|^\d+\.|\n-|\n\*|First,|Second,|Next,|Finally,")
_FENCE = re.compile(r"```(?:json)?[ \t]*\n(.*?)```", re.DOTALL)


def think_answer(response: str) -> float:
    """Return 1.0 if the response starts with <think>..</think> and then <answer>..</answer> up to the end of a line, else 0.0.

    The name is `format` in MindSpeed-RL and ms-swift (DeepSeek-R1, arXiv:2501.12948).
    """
    # in two steps: one expression over both would try every pair of repeated tags
    opening = _ANSWER_OPENS.search(response, len("<think>")) if response.startswith("<think>") else None
    return 1.0 if opening is not None and _ANSWER_CLOSES.search(response, opening.end()) else 0.0


def strict_format(response: str) -> float:
    r"""Return 1.0 if each of the four tags and one \boxed{} occur once, in order, the box in the answer, nothing around; else -0.5."""
    boxes = list(_BOX.finditer(response))
    if len(boxes) != 1 or any(response.count(tag) != 1 for tag in _TAGS):
        return -0.5
    think, unthink, answer, unanswer = (response.index(tag) for tag in _TAGS)
    in_order = think < unthink < answer < boxes[0].start() < unanswer
    return 1.0 if in_order and response.startswith("<think>") and response.endswith("</answer>") else -0.5


def step(response: str) -> float:
    """Return a third for each step marker, at most 1.0: "Step 1:", a number at the start, bullets, First, Second, Next, Finally."""
    return min(1.0, len(_STEP.findall(response)) / 3)


def regex_format(response: str, pattern: str) -> float:
    """Return 1.0 if the whole response matches the regular expression in the column `pattern` ("." matches newlines), else 0.0."""
    return 1.0 if re.fullmatch(pattern, response, re.DOTALL) else 0.0


def json_format(response: str, schema: Mapping[str, Any] | str | None = None) -> float:
    """Return 1.0 if the response is JSON that satisfies the column `schema` (JSON Schema, if there is one), else 0.0.

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
    """Return True if a JSON value satisfies a JSON Schema made of the keywords that `json_format` names.

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
