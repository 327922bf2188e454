"""vLLM's parsers with our interface, on the output of published chat templates and on other text."""

import random
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from mindspeed_rl.data.conversation import ToolCall as WrittenCall
from mindspeed_rl.data.tools import get_tool_style
from mindspeed_rl.tools.interface import BrokenCall, ParsedTurn, ToolCall
from mindspeed_rl.tools.parsers import _VLLM_FORMATS, make_parser

pytestmark = pytest.mark.slow  # loads vLLM

TEMPLATES = Path(__file__).parents[2] / "data" / "chat_templates"
SPECIAL = [
    *("<s>", "</s>", "<|im_end|>", "<|python_tag|>", "[TOOL_CALLS]", "<tool_call>", "</tool_call>", "<think>", "</think>"),
    *("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"),
    *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>", "<|tool_call_end|>"),
    *("<|tool_call_argument_begin|>", "<seed:tool_call>", "</seed:tool_call>", "<seed:think>", "</seed:think>"),
]
SCHEMAS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Tells the weather.",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "description": "Where."},
                    "days": {"type": "integer", "description": "How many."},
                    "units": {"type": "object", "description": "Which."},
                },
                "required": ["city"],
            },
        },
    }
]


@pytest.fixture(scope="module")
def tokenizer():
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={token: number for number, token in enumerate([*SPECIAL, *alphabet])}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(SPECIAL)
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", pad_token="</s>")


def answer(tokenizer, template, calls):
    """What the template writes as the answer of the assistant that makes these calls."""
    tokenizer.chat_template = (TEMPLATES / f"{template}.jinja").read_text(encoding="utf-8")
    question = [{"role": "user", "content": "How is it?"}]
    made = [
        {"id": f"functions.{name}:{place}" if template == "kimi_k2" else f"id000000{place}", "type": "function"}
        | {"function": {"name": name, "arguments": arguments}}
        for place, (name, arguments) in enumerate(calls)
    ]
    reply = {"role": "assistant", "content": "", "tool_calls": made}
    prompt = tokenizer.apply_chat_template(question, tools=SCHEMAS, tokenize=False, add_generation_prompt=True)
    whole = tokenizer.apply_chat_template([*question, reply], tools=SCHEMAS, tokenize=False)
    shared = next((i for i, (a, b) in enumerate(zip(prompt, whole)) if a != b), len(prompt))
    return whole[shared:]


CALLS = [("get_weather", {"city": 'São Paulo, "the" 5', "days": 3}), ("get_weather", {"city": "7", "units": {"t": ["C", 1]}})]


@pytest.mark.parametrize(
    ("template", "name", "count"),
    [
        ("qwen25", "hermes", 2),
        ("hermes3", "hermes", 2),
        ("llama31", "llama3_json", 1),
        ("glm45", "glm45", 2),
        ("glm45", "glm4_moe", 2),
        ("qwen3_coder", "qwen3_coder", 1),
        ("mistral_v3", "mistral", 2),
        ("kimi_k2", "kimi_k2", 2),
    ],
)
def test_what_the_template_of_a_model_writes_is_read_back_equal(tokenizer, template, name, count):
    calls = CALLS[:count]
    text = answer(tokenizer, template, calls)
    turn = make_parser(name, SCHEMAS, tokenizer).parse(text, tokenizer.encode(text, add_special_tokens=False))
    assert [(call.name, call.arguments) for call in turn.calls] == calls, text


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (
            "deepseek_v3",
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n"
            '{"city": "7", "units": {"t": ["C", 1]}}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
        ),
        (
            "deepseek_v31",
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>"
            '{"city": "7", "units": {"t": ["C", 1]}}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
        ),
        (
            "seed_oss",
            "<seed:tool_call>\n<function=get_weather>\n<parameter=city>7</parameter>\n"
            '<parameter=units>{"t": ["C", 1]}</parameter>\n</function>\n</seed:tool_call>',
        ),
        (
            "qwen3_coder",
            "<tool_call>\n<function=get_weather>\n<parameter=city>\n7\n</parameter>\n<parameter=units>\n"
            '{"t": ["C", 1]}\n</parameter>\n</function>\n</tool_call>',
        ),
        ("pythonic", '[get_weather(city="7", units={"t": ["C", 1]})]'),
    ],
)
def test_formats_are_read_as_their_models_document_them(tokenizer, name, text):
    (call,) = make_parser(name, SCHEMAS, tokenizer).parse(text, tokenizer.encode(text, add_special_tokens=False)).calls
    assert (call.name, call.arguments) == CALLS[1]


@pytest.mark.parametrize(("style", "name"), [("glm4_moe", "glm4_moe"), ("deepseek4", "deepseek4")])
def test_the_other_styles_that_are_written_here_are_read_back_equal(tokenizer, style, name):
    rng = random.Random(0)
    parser = make_parser(name, SCHEMAS, tokenizer)
    for _ in range(50):
        written = [
            WrittenCall(
                "get_weather",
                {
                    "city": "".join(
                        rng.choice(["a", "ü", "中", "5", " x", '"', "\\", "{", "x\ny"]) for _ in range(rng.randrange(1, 6))
                    ),
                    "days": rng.randrange(100),
                    "units": {"k": [rng.random(), None, True]},
                },
            )
            for _ in range(rng.randrange(1, 4))
        ]
        turn = parser.parse("Let me look." + get_tool_style(style).calls(written), [])
        assert [(call.name, call.arguments) for call in turn.calls] == [(call.name, call.arguments) for call in written]
        assert turn.content == "Let me look."


def test_no_text_raises_in_any_parser_of_vllm(tokenizer):
    rng = random.Random(1)
    pieces = [
        *SPECIAL,
        "<function=get_weather>",
        "<parameter=city>",
        "</function>",
        "get_weather",
        "\n",
        '{"name": "get_weather"',
        "}",
    ]
    pieces += [
        "<｜DSML｜tool_calls>",
        '<｜DSML｜invoke name="get_weather">',
        "[get_weather(city=1)]",
        "<arg_key>",
        "</arg_key>",
        "x",
        "[",
    ]
    tried = 0
    for name in _VLLM_FORMATS:
        try:
            parser = make_parser(name, SCHEMAS, tokenizer)
        except ValueError as error:
            assert "does not work with this tokenizer" in str(error)
            continue
        tried += 1
        for _ in range(60):
            text = "".join(rng.choice(pieces) for _ in range(rng.randrange(12)))
            turn = parser.parse(text, tokenizer.encode(text, add_special_tokens=False))
            assert isinstance(turn, ParsedTurn) and isinstance(turn.content, str)
            assert all(isinstance(call, BrokenCall) or isinstance(call.arguments, dict) for call in turn.calls)
    assert tried >= 15


def test_a_broken_call_of_another_format_is_told(tokenizer):
    turn = make_parser("deepseek_v3", SCHEMAS, tokenizer).parse("hm <｜tool▁calls▁begin｜>get_weather", [])
    (call,) = turn.calls
    assert isinstance(call, BrokenCall) and "deepseek_v3" in call.problem and turn.content == "hm"


def test_names_of_vllm_are_those_of_the_installed_one(tokenizer):
    from vllm.tool_parsers import ToolParserManager

    assert set(_VLLM_FORMATS) <= set(ToolParserManager.list_registered())
    with pytest.raises(
        ValueError, match="tool_parser_format: vLLM has no tool parser 'qwen4_coder'; did you mean 'qwen3_coder'"
    ):
        make_parser("qwen4_coder", SCHEMAS, tokenizer)


def test_ids_are_the_same_at_every_replay(tokenizer):
    text = answer(tokenizer, "glm45", CALLS)
    parser = make_parser("glm45", SCHEMAS, tokenizer)
    first, second = (parser.parse(text, []).calls for _ in range(2))
    assert first == second and all(isinstance(call, ToolCall) and len(call.id) == 9 for call in first)
