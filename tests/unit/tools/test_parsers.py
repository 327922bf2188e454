"""Reading calls out of turns: what data/tools.py writes comes back equal, and no text is too strange."""

import random
import string
import time

import pytest

from mindspeed_rl.data.conversation import ToolCall as WrittenCall
from mindspeed_rl.data.tools import get_tool_style
from mindspeed_rl.tools.interface import BrokenCall, ParsedTurn, ToolCall
from mindspeed_rl.tools.parsers import ALIASES, PARSERS, check_parser_name, make_parser

#: styles of data/tools.py -> the format that reads them here
OWN = {"qwen": "hermes", "qwen3": "hermes", "llama3": "llama3_json", "glm4": "glm4", "default": "action"}
ONE_A_TURN = {"llama3", "glm4"}
MARKS = [
    *"<tool_call> </tool_call> <think> </think> [THINK] [/THINK] <|python_tag|> [TOOL_CALLS] <|channel|> <|message|>".split(),
    *"<|call|> <|start|> analysis commentary <function=f> <parameter=a> </function> <｜DSML｜tool_calls>".split(),
    *("Action:", "Action Input:", " to=functions.f", '<｜DSML｜invoke name="f">'),
    *('{"name":', '"arguments":', '"parameters":', "1e999", "NaN", "\\ud800", "é", "\ud800", *'{}[]":,;f\\\n'),
]
SCHEMA = {
    "type": "function",
    "function": {
        "name": "f",
        "description": "",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "s": {"type": "string"}}},
    },
}


def parse(name, text, **more):
    return make_parser(name, [SCHEMA], None, **more).parse(text, [])


def random_value(rng, depth=0):
    kind = rng.randrange(6 if depth < 2 else 4)
    if kind == 0:
        return rng.randrange(-(10**12), 10**12)
    if kind == 1:
        return rng.choice([True, False, None, 0.5, -1e-7])
    if kind in (2, 3):
        pieces = [
            rng.choice([*MARKS[:12], "x", " ", "\n", '"', "'", "\\", "ü", "中", "😀", "</", ";"])
            for _ in range(rng.randrange(6))
        ]
        return "".join(pieces)
    if kind == 4:
        return [random_value(rng, depth + 1) for _ in range(rng.randrange(4))]
    return {random_key(rng): random_value(rng, depth + 1) for _ in range(rng.randrange(4))}


def random_key(rng):
    return "".join(rng.choice(string.ascii_letters + "_é") for _ in range(rng.randrange(1, 8)))


@pytest.mark.parametrize("style", OWN)
def test_what_is_written_is_read_back_equal(style):
    rng = random.Random(style)
    for _ in range(200):
        written = [
            WrittenCall(f"tool_{rng.randrange(9)}.x-y", {random_key(rng): random_value(rng) for _ in range(rng.randrange(4))})
            for _ in range(1 if style in ONE_A_TURN else rng.randrange(1, 4))
        ]
        thought, content = rng.choice(["", "<think>\nI call\n</think>\n\n"]), rng.choice(["", "Let me look."])
        turn = parse(OWN[style], thought + (f"{content}\n" if content else "") + get_tool_style(style).calls(written))
        assert [(call.name, call.arguments) for call in turn.calls] == [(call.name, call.arguments) for call in written]
        assert turn.content == content
        assert turn.reasoning == ("I call" if thought else None)
        assert len({call.id for call in turn.calls}) == len(written)


@pytest.mark.parametrize("name", PARSERS)
def test_no_text_raises_and_none_takes_long(name):
    rng = random.Random(name)
    parser = make_parser(name, [SCHEMA], None)
    for _ in range(2000):
        turn = parser.parse("".join(rng.choice(MARKS) for _ in range(rng.randrange(25))), [])
        assert isinstance(turn, ParsedTurn)
        for call in turn.calls:
            assert isinstance(call, (ToolCall, BrokenCall))
            assert isinstance(call, BrokenCall) or (isinstance(call.arguments, dict) and isinstance(call.name, str))
    begun = time.monotonic()
    for text in (
        "<tool_call>" * 30_000,
        '{"name":' * 20_000,
        "[" * 200_000,
        "Action: f\nAction Input: {" * 10_000,
        "f\n{" * 50_000,
    ):
        parser.parse(text, [])
        parser.parse("<tool_call>" + text, [])
    assert time.monotonic() - begun < 5


@pytest.mark.parametrize(
    ("name", "text", "names"),
    [
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>', ["f"]),
        ("hermes", '<tool_call>\n{"name": "f", "arguments": "{\\"a\\": 1}"}', ["f"]),  # the end was not sampled
        (
            "hermes",
            '<tool_call>{"name": "f"}</tool_call> and <tool_call>{"name": "g", "parameters": {}}</tool_call>',
            ["f", "g"],
        ),
        ("qwen3", '<tool_call>{"type": "function", "function": {"name": "f", "arguments": {}}}</tool_call>', ["f"]),
        ("llama3_json", 'Sure. <|python_tag|>{"name": "f", "parameters": {"a": 1}}<|eom_id|>', ["f"]),
        ("llama3_json", '{"type": "function", "name": "f", "parameters": {}}; {"name": "g", "parameters": {}}', ["f", "g"]),
        ("llama3_json", 'As JSON: {"city": "Rome"}', []),
        ("glm4", 'f\n{"a": 1}', ["f"]),
        ("glm4", 'The answer is\n{"a": 1}', []),
        ("action", 'I look.\nAction: f\nAction Input: {"a": 1}\nObservation: made up', ["f"]),
        ("action", "Action: none needed", []),
        (
            "gpt-oss",
            "<|channel|>analysis<|message|>hm<|end|><|start|>assistant"
            '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}<|call|>',
            ["f"],
        ),
        ("openai", ' to=functions.f<|channel|>commentary json<|message|>{"a": 1}', ["f"]),
        ("harmony", "<|channel|>final<|message|>to=functions.f", []),
        ("hermes", "plain text", []),
        ("hermes", "", []),
    ],
)
def test_calls_are_read_as_models_write_them(name, text, names):
    assert [call.name for call in parse(name, text).calls] == names


@pytest.mark.parametrize(
    ("name", "text", "broken", "said"),
    [
        (
            "hermes",
            '<tool_call>{"name": "f", "arguments": {"a": 1</tool_call>',
            '{"name": "f", "arguments": {"a": 1',
            "not a JSON object",
        ),
        ("hermes", '<tool_call>{"name": "f", "arguments": [1]}</tool_call>', None, "must be a JSON object"),
        ("hermes", '<tool_call>{"arguments": {}}</tool_call>', None, "needs a name"),
        ("hermes", '<tool_call>["f"]</tool_call>', '["f"]', "needs a name"),
        ("hermes", "<tool_call>f(1)</tool_call>", "f(1)", "not a JSON object"),
        ("hermes", "<tool_call></tool_call>", "", "not a JSON object"),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>', None, "NaN is not a JSON number"),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1, "a": 2}}</tool_call>', None, "stands twice"),
        ("llama3_json", '{"name": "f", "parameters": {"a": ', '{"name": "f", "parameters": {"a":', "not a JSON object"),
        ("llama3_json", '{"name": "f", "parameters": 3}', None, "must be a JSON object"),
        ("glm4", 'f\n{"a": }', '{"a": }', "not a JSON object"),
        ("action", "Action: f\nAction Input: a=1", "a=1", "not a JSON object"),
        ("harmony", "<|channel|>commentary to=functions.f<|message|>{", "{", "not a JSON object"),
        ("harmony", "<|channel|>commentary to=functions.f<|message|>[1]<|call|>", "[1]", "must be a JSON object"),
    ],
)
def test_what_was_meant_as_a_call_is_a_broken_one_with_its_reason(name, text, broken, said):
    (call,) = parse(name, text).calls
    assert isinstance(call, BrokenCall) and said in call.problem
    assert broken is None or call.text == broken


def test_one_broken_call_does_not_take_the_others_with_it():
    text = 'a<tool_call>{"name": "f"}</tool_call>b<tool_call>{"name": </tool_call>c<tool_call>{"name": "g"}</tool_call>d'
    turn = parse("hermes", text)
    assert [type(call).__name__ for call in turn.calls] == ["ToolCall", "BrokenCall", "ToolCall"]
    assert turn.content == "abcd"


def test_calls_inside_a_thought_are_not_made():
    inner = '<tool_call>{"name": "f"}</tool_call>'
    assert parse("hermes", f"<think>maybe {inner}</think>no") == ParsedTurn("no", f"maybe {inner}")
    assert parse("hermes", f"<think>maybe {inner}") == ParsedTurn("", f"maybe {inner}")
    assert parse("hermes", f"maybe {inner}</think>no", thinks=True) == ParsedTurn("no", f"maybe {inner}")
    assert parse("hermes", f"maybe {inner}", thinks=True) == ParsedTurn("", f"maybe {inner}")
    assert [call.name for call in parse("hermes", f"hm</think>{inner}").calls] == ["f"]
    turn = parse("hermes", '<tool_call>{"name": "f", "arguments": {"s": "</think>"}}</tool_call>')
    assert turn.reasoning is None and turn.calls[0].arguments == {"s": "</think>"}
    turns = "<|channel|>analysis<|message|>so<|end|><|start|>assistant<|channel|>final<|message|>done<|return|>"
    assert parse("harmony", turns) == ParsedTurn("done", "so")
    assert parse("hermes", "[THINK]so[/THINK]done") == ParsedTurn("done", "so")


def test_a_parser_of_ones_own_is_named_by_its_class():
    class Shouting:
        def __init__(self, schemas, tokenizer):
            self.names = [schema["function"]["name"] for schema in schemas]

        def parse(self, text, token_ids):
            return ParsedTurn(text, None, tuple(ToolCall(name, {}, "1") for name in self.names if name.upper() in text))

    globals()["Shouting"] = Shouting
    turn = make_parser(f"{__name__}:Shouting", [SCHEMA], None).parse("F!", [])
    assert turn.calls[0].name == "f"


def test_wrong_names_are_told_without_vllm_and_synonyms_mean_a_parser():
    with pytest.raises(ValueError, match="tool_parser_format is 'hermess'; did you mean 'hermes'"):
        check_parser_name("hermess")
    for name in [*PARSERS, *ALIASES, "deepseek_v31", "a_parser_of_tomorrow", "module:Class"]:
        check_parser_name(name)
    with pytest.raises(ValueError, match="needs the model's tokenizer"):
        make_parser("a_parser_of_tomorrow", [], None)
