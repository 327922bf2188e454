"""Tables for the scorers that look at the shape of a response."""

import re

import pytest

from mindspeed_rl.rewards.text_scores import (
    json_format,
    regex_format,
    satisfies,
    step,
    strict_format,
    think_alone,
    think_answer,
)


@pytest.mark.parametrize(
    ("response", "score"),
    [
        ("<think>a</think><answer>b</answer>", 1.0),
        ("<think>a\nb</think>\n\n<answer>c\nd</answer>", 1.0),
        ("<think></think><answer></answer>", 1.0),
        ("<think>想</think> <answer>三</answer>", 1.0),
        ("<think>a</think><answer>b</answer>\nand more", 1.0),  # the pattern ends at the end of a line
        ("<think>a</think><answer>b</answer> and more", 0.0),
        (" <think>a</think><answer>b</answer>", 0.0),
        ("<think>a</think>so<answer>b</answer>", 0.0),
        ("<answer>b</answer><think>a</think>", 0.0),
        ("<think>a</think><answer>b", 0.0),
        ("<think>a</think><think>b</think><answer>c</answer>", 0.0),
        ("<think>a <think>b</think></think><answer>c</answer>", 0.0),
        ("<think>a</think><answer>b</answer><answer>c</answer>", 0.0),
        ("<think>so I write <answer>b</answer></think><answer>b</answer>", 1.0),  # a thought may speak of the tags
        ("<thinking>a</thinking><answer>b</answer>", 0.0),
        ("<THINK>a</THINK><answer>b</answer>", 0.0),
        ("[THINK]a[/THINK]<answer>b</answer>", 0.0),
        ("<think>a</think>b", 0.0),
        ("<think>a", 0.0),
        ("", 0.0),
    ],
)
def test_format_is_a_thought_and_then_an_answer(response: str, score: float) -> None:
    assert think_answer(response) == score


@pytest.mark.parametrize(
    ("response", "score"),
    [
        (r"<think>a</think><answer>\boxed{1}</answer>", 1.0),
        (r"<think>a</think> so <answer>it is \boxed{1}!</answer>", 1.0),
        (r"<think>a</think><answer>\boxed{1}</answer>.", -0.5),
        (r" <think>a</think><answer>\boxed{1}</answer>", -0.5),
        (r"<think>\boxed{1}</think><answer>1</answer>", -0.5),
        (r"<think>a</think><answer>1</answer>", -0.5),
        (r"<think>\boxed{2}</think><answer>\boxed{1}</answer>", -0.5),
        (r"<think>a</think><think>b</think><answer>\boxed{1}</answer>", -0.5),
        (r"<answer>\boxed{1}</answer><think>a</think>", -0.5),
        (r"<think>a</think><answer>\boxed{1}</answer><answer>\boxed{1}</answer>", -0.5),
        (r"<thinking>a</thinking><answer>\boxed{1}</answer>", -0.5),
        ("", -0.5),
    ],
)
def test_strict_format_wants_each_tag_and_one_box_once_and_in_order(response: str, score: float) -> None:
    assert strict_format(response) == score


OPENED = "<|im_start|>assistant\n<think>\n"
EMPTY = "<|im_start|>assistant\n<think>\n\n</think>\n\n"
ASKED = "Write your thoughts between <think> and </think>.<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("prompt", "response", "score"),
    [
        (OPENED, r"a</think><answer>\boxed{1}</answer>", 1.0),
        (OPENED, r"<think>a</think><answer>\boxed{1}</answer>", 0.0),  # a second opening
        (OPENED, r"a<answer>\boxed{1}</answer>", 0.0),
        (OPENED, "a</think>b", 0.0),
        (EMPTY, r"<answer>\boxed{1}</answer>", 1.0),
        (EMPTY, r"<think>a</think><answer>\boxed{1}</answer>", 0.0),  # a second thought
        (ASKED, r"<think>a</think><answer>\boxed{1}</answer>", 1.0),
        (ASKED, r"a</think><answer>\boxed{1}</answer>", 0.0),
        ("", r"<think>a</think><answer>\boxed{1}</answer>", 1.0),
    ],
)
def test_formats_judge_the_thought_that_the_prompt_opened_with_the_response(prompt: str, response: str, score: float) -> None:
    assert think_answer(response, prompt) == score
    assert strict_format(response, prompt) == (score or -0.5)
    pattern = r"<think>((?!<think>).)*</think>\s*<answer>.*</answer>"
    assert regex_format(response, pattern, prompt) == (1.0 if score or response.startswith("<think>") else 0.0)


def test_a_response_that_was_cut_at_its_limit_has_no_format() -> None:
    whole = r"<think>a</think><answer>\boxed{1}</answer>"
    assert think_answer(whole, truncated=True) == 0.0 and strict_format(whole, truncated=True) == -0.5


@pytest.mark.parametrize(
    ("response", "score"),
    [
        ("", 0.0),
        ("Step 1: a Step 2: b", 2 / 3),
        ("1. a\n2. b", 1 / 3),  # a numbered line counts at the start of the text only
        ("a\n- b\n- c\n* d", 1.0),
        ("First, a. Second, b. Next, c. Finally, d.", 1.0),
        ("first, a", 0.0),
    ],
)
def test_step_counts_markers_up_to_three(response: str, score: float) -> None:
    assert step(response) == pytest.approx(score)


@pytest.mark.parametrize(
    ("response", "pattern", "score"),
    [
        ("ab12", r"[a-z]+\d+", 1.0),
        ("ab12 ", r"[a-z]+\d+", 0.0),
        ("a\nb", "a.b", 1.0),
        ("答案：三", "答案：.", 1.0),
        ("", ".+", 0.0),
    ],
)
def test_regex_format_matches_the_whole_response(response: str, pattern: str, score: float) -> None:
    assert regex_format(response, pattern) == score


PERSON = {
    "type": "object",
    "required": ["name", "age"],
    "properties": {
        "name": {"type": "string", "minLength": 1},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2},
    },
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("response", "schema", "score"),
    [
        ('{"a": 1}', None, 1.0),
        ("[1, 2", None, 0.0),
        ("", None, 0.0),
        ('Here:\n```json\n{"a": 1}\n```\n', None, 1.0),
        ('```json\r\n{"a": 1}\r\n```\r\n', None, 1.0),
        ('```python\nx = 1\n```\n```json title="a"\n{"a": 1}\n```\n```bash\nls\n```', None, 1.0),
        ('```\n{"a": 1}\n```\n```text\nwords\n```', None, 1.0),
        ('```json\n{"a": 1}\n```\n```json\n{"a":\n```', None, 0.0),
        ('so {"a"}</think>\n{"a": 1}', None, 1.0),
        ('<think>{"a": 1}</think>no', None, 0.0),
        ('<think>x</think><answer>{"a": 1}</answer>', None, 1.0),
        ('<answer>no</answer>{"a": 1}', None, 0.0),
        ("[" * 100_000, None, 0.0),
        ('{"name": "王", "age": 7, "tags": ["a"]}', PERSON, 1.0),
        ('{"name": "王", "age": 7.0}', PERSON, 1.0),
        ('{"name": "", "age": 7}', PERSON, 0.0),
        ('{"name": "x"}', PERSON, 0.0),
        ('{"name": "x", "age": true}', PERSON, 0.0),
        ('{"name": "x", "age": 200}', PERSON, 0.0),
        ('{"name": "x", "age": 7, "tags": ["c"]}', PERSON, 0.0),
        ('{"name": "x", "age": 7, "tags": ["a", "a", "a"]}', PERSON, 0.0),
        ('{"name": "x", "age": 7, "more": 1}', PERSON, 0.0),
        ("null", '{"type": ["string", "null"]}', 1.0),
        ("3", '{"const": 3}', 1.0),
        ('"ab1"', '{"pattern": "^[a-z]+[0-9]$"}', 1.0),
    ],
)
def test_json_format_parses_and_checks_the_schema(response: str, schema: object, score: float) -> None:
    assert json_format(response, schema) == score


def test_a_schema_keyword_that_is_not_checked_is_an_error_and_not_a_reward() -> None:
    with pytest.raises(ValueError, match="'oneOf' is not supported"):
        satisfies(1, {"oneOf": [{"type": "integer"}]})


@pytest.mark.parametrize(
    "response",
    [
        "<think>a</think>b",
        "<think>\na\n</think>\nb\nc",
        "a<think>b</think>",
        "<think>a",
        "<think>a<think>b</think>c",
        "<think>a</think>b<think>c</think>",
        "<think></think>",
        "",
    ],
)
def test_a_thought_at_the_start_is_found_as_by_the_pattern_of_trl(response: str) -> None:
    pattern = re.compile(r"^<think>(?!.*<think>)(.*?)</think>.*$", re.DOTALL | re.MULTILINE)
    assert think_alone(response) == float(pattern.match(response) is not None)


@pytest.mark.parametrize(
    ("text", "schema", "score"),
    [
        ('{"a": NaN}', None, 0.0),
        ("[Infinity]", None, 0.0),
        ("-Infinity", None, 0.0),
        ('"NaN"', None, 1.0),
        ("1", {"const": True}, 0.0),
        ("true", {"const": 1}, 0.0),
        ("0", {"enum": [False, "0"]}, 0.0),
        ("false", {"enum": [0, False]}, 1.0),
        ("1.0", {"const": 1}, 1.0),
        ('{"a": [true]}', {"const": {"a": [1]}}, 0.0),
        ('{"a": [1.0]}', {"const": {"a": [1]}}, 1.0),
        ("[1, 2]", {"const": [1]}, 0.0),
    ],
)
def test_json_is_what_the_standard_says_it_is(text: str, schema: dict | None, score: float) -> None:
    """RFC 8259, 6: no NaN and no Infinity; JSON Schema 2020-12, 4.2.2: true and 1 are different, 1.0 and 1 are not."""
    assert json_format(text, schema) == score
