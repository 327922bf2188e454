"""Scorers of text: exact match, multiple choice, and formats."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from mindspeed_rl.rewards.answers.extraction import extract_tagged_answer
from mindspeed_rl.rewards.choices import extract_chosen_letters, extract_label_letters
from mindspeed_rl.thoughts import find_marks, remove_thought


def exact_match(response: str, label: object, prompt: str = "") -> float:
    """Return 1.0 if the text after the thought is the label, apart from blanks around both, else 0.0.

    A label that has a thought itself is compared with the whole response.
    """
    expected = str(label).strip()
    given = response if find_marks(expected) else remove_thought(response, prompt)
    return 1.0 if given.strip() == expected else 0.0


def multiple_choice(response: str, label: object, prompt: str = "") -> float:
    """Return 1.0 if the letters that the response settles on are the label's, in any order ("AC", "A, C"), else 0.0.

    The choice is searched after the thought: in the last box, in <answer>..</answer>, and in the text, as `choices` says.
    """
    chosen = extract_chosen_letters(remove_thought(response, prompt))
    return 1.0 if chosen and chosen == extract_label_letters(label) else 0.0


# Formats

_ANSWER_OPENS = re.compile(r"</think>\s*<answer>")
_ANSWER_CLOSES = re.compile(r"</answer>$", re.MULTILINE)
_OPENED_THOUGHT = re.compile(r"<think>\s*(?:</think>\s*)?\Z")
_TAGS = ("<think>", "</think>", "<answer>", "</answer>")
_BOX = re.compile(r"\\boxed\{.*?\}")
_STEP = re.compile(r"Step \d+:|^\d+\.|\n-|\n\*|First,|Second,|Next,|Finally,")
#: a fence may be indented and may start an item of a list; the language is the first word after it
_FENCE = re.compile(r"([ \t]*(?:(?:[-*+]|\d+[.)])[ \t]+)?)(`{3,}|~{3,})[ \t]*([^`\n]*)")


def list_code_blocks(text: str) -> list[tuple[str, str]]:
    """Return (language, content) of the fenced blocks that are closed; the language is in lower case, "" where none is given.

    Contents lose the indent of their fence.
    """
    blocks: list[tuple[str, str]] = []
    opening: re.Match[str] | None = None
    lines: list[str] = []
    for line in text.split("\n"):
        line = line.removesuffix("\r")
        fence = _FENCE.fullmatch(line)
        if opening is None:
            opening, lines = fence, []
            continue
        bare = line.rstrip()
        closes = fence is not None and fence[2].startswith(opening[2]) and not fence[3].strip()
        ends = not closes and bare.endswith(opening[2])  # without a new line before the fence
        if not closes:
            indent = len(opening[1]) if not line[: len(opening[1])].strip() else 0
            lines.append((bare.removesuffix(opening[2]) if ends else line)[indent:])
        if closes or ends:
            words = opening[3].strip("{}. ").lower().replace(",", " ").split()
            blocks.append((words[0] if words else "", "".join(f"{line}\n" for line in lines)))
            opening = None
    return blocks


def add_opened_thought(prompt: str, response: str) -> str:
    """Return the response after the thought that the chat template's prompt ends with (opened, or empty), if it does."""
    opened = _OPENED_THOUGHT.search(prompt[-64:])
    return response if opened is None else opened[0] + response


def think_answer(response: str, prompt: str = "", truncated: bool = False) -> float:
    """Return 1.0 for one <think>..</think> and then one <answer>..</answer> up to the end of a line, else 0.0.

    The name is `format` in MindSpeed-RL and ms-swift (DeepSeek-R1, arXiv:2501.12948). The prompt may have opened the thought. A
    truncated response has no end, so no format.
    """
    text = add_opened_thought(prompt, response)
    if truncated or not text.startswith("<think>") or text.count("<think>") != 1 or text.count("</think>") != 1:
        return 0.0
    # in two steps: one regular expression for both would try every pair of repeated tags
    opening = _ANSWER_OPENS.search(text)
    if opening is None or text.count("<answer>", opening.end()) or text.count("</answer>", opening.end()) != 1:
        return 0.0
    return 1.0 if _ANSWER_CLOSES.search(text, opening.end()) else 0.0


def think_answer_alone(response: str, prompt: str = "") -> float:
    """Return 1.0 if the response is <think>..</think>, blanks, <answer>..</answer> and nothing else: `format` of ms-swift.

    The prompt may have opened the thought.
    """
    response = add_opened_thought(prompt, response)
    if not response.startswith("<think>") or not response.endswith("</answer>"):
        return 0.0
    # the answer may open after any end of a thought that only blanks separate from it
    return 1.0 if re.search(r"</think>\s*<answer>", response[len("<think>") :]) else 0.0


def think_alone(response: str, prompt: str = "") -> float:
    """Return 1.0 if the response begins with its only <think>, and </think> follows: `think_format_reward` of TRL; else 0.0.

    The prompt may have opened the thought.
    """
    response = add_opened_thought(prompt, response)
    opens, text = response.startswith("<think>"), response[len("<think>") :]
    return 1.0 if opens and "<think>" not in text and "</think>" in text else 0.0


def strict_format(response: str, prompt: str = "", truncated: bool = False) -> float:
    r"""Return 1.0 if the four tags and one \boxed{} occur once each, in order, with nothing around them; else -0.5.

    The prompt may have opened the thought.
    """
    text = add_opened_thought(prompt, response)
    boxes = list(_BOX.finditer(text))
    if truncated or len(boxes) != 1 or any(text.count(tag) != 1 for tag in _TAGS):
        return -0.5
    think, unthink, answer, unanswer = (text.index(tag) for tag in _TAGS)
    in_order = think < unthink < answer < boxes[0].start() < unanswer
    return 1.0 if in_order and text.startswith("<think>") and text.endswith("</answer>") else -0.5


def step(response: str) -> float:
    """Return 1/3 for each step marker, at most 1.0: "Step 1:", a number at the start, bullets, First, Second, Next, Finally."""
    return min(1.0, len(_STEP.findall(response)) / 3)


def regex_format(response: str, pattern: str, prompt: str = "") -> float:
    """Return 1.0 if the whole response matches the column `pattern` ("." also matches newlines), else 0.0.

    It may match with the thought that the prompt opened, or without.
    """
    texts = {response, add_opened_thought(prompt, response)}
    return 1.0 if any(re.fullmatch(pattern, text, re.DOTALL) for text in texts) else 0.0


def json_format(response: str, schema: _Schema | str | None = None, prompt: str = "") -> float:
    """Return 1.0 if the response is JSON that satisfies the column `schema` (a JSON Schema, if there is one), else 0.0.

    The JSON is the content of <answer>..</answer>, else of the last block marked as JSON, else of the last unmarked block, else
    the whole response. A thought before it does not count. NaN and Infinity are not JSON (RFC 8259), and true is not 1.

    Raises:
        ValueError: the schema uses a keyword other than type, enum, const, required, properties, additionalProperties, items,
            minItems, maxItems, minLength, maxLength, pattern, minimum, maximum.
    """
    response = remove_thought(response, prompt)
    text = extract_tagged_answer(response)
    if text is None:
        blocks = list_code_blocks(response)
        marked = [block for language, block in blocks if language.startswith("json")]
        text = (marked or [block for language, block in blocks if not language] or [response])[-1]
    try:
        value = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        return 0.0
    if isinstance(schema, str):
        schema = json.loads(schema) if schema.strip() else None
    return 1.0 if schema is None or satisfies(value, schema) else 0.0


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


_Schema = Mapping[str, Any]
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


def satisfies(value: object, schema: _Schema) -> bool:
    """Return True if a JSON value satisfies a JSON Schema made of the keywords that `json_format` names.

    Raises:
        ValueError: another keyword, which would be ignored otherwise.
    """
    for keyword in schema:
        if keyword not in _KEYWORDS:
            raise ValueError(f"the JSON schema keyword '{keyword}' is not supported; supported: {', '.join(_KEYWORDS)}")
    checks = [
        "type" not in schema or _has_type(value, schema["type"]),
        "enum" not in schema or any(_is_same_json(value, item) for item in schema["enum"]),
        "const" not in schema or _is_same_json(value, schema["const"]),
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


def _is_same_json(value: object, other: object) -> bool:
    """Return True for equal JSON values: numbers by value, true and 1 are different (JSON Schema 2020-12, 4.2.2)."""
    if isinstance(value, list) and isinstance(other, list):
        return len(value) == len(other) and all(map(_is_same_json, value, other))
    if isinstance(value, dict) and isinstance(other, dict):
        return value.keys() == other.keys() and all(_is_same_json(value[key], other[key]) for key in value)
    return isinstance(value, bool) == isinstance(other, bool) and value == other


def _has_type(value: object, expected: str | list[str]) -> bool:
    names = [expected] if isinstance(expected, str) else expected
    if isinstance(value, bool):
        # before the numbers: True is an int in Python, but no number in JSON
        return "boolean" in names
    # JSON Schema counts 1.0 among the integers
    if isinstance(value, float) and value.is_integer() and "integer" in names:
        return True
    return any(isinstance(value, _TYPES[name]) for name in names)
