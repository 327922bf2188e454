"""Reading prompts, checking settings, gathering answers."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from scripted_engine import ScriptedEngine
from transformers import PreTrainedTokenizerFast

from mindspeed_rl.cli import generate as command
from mindspeed_rl.inference.batch_generation import GenerationSettings, generate, read_jsonl
from mindspeed_rl.inference.model_files import EngineSettings, ModelSettings
from mindspeed_rl.inference.prompt_format import PromptFormat
from mindspeed_rl.inference.session import Session
from mindspeed_rl.rollout.requests import Sampling, sample_seed

GREEDY = Sampling(0.0, 16, ())


@pytest.mark.parametrize(
    ("row", "system", "texts"),
    [
        ({"prompt": "a"}, None, ["a"]),
        ({"question": "a", "system": "s"}, "s", ["a"]),
        ({"instruction": "a", "input": "b", "output": "c"}, None, ["a\nb"]),
        ({"instruction": "a", "input": ""}, None, ["a"]),
        ({"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "a"}]}, "s", ["a"]),
        (
            {
                "prompt": [
                    {"role": "user", "content": "a"},
                    {"role": "assistant", "content": "b"},
                    {"role": "user", "content": "c"},
                ]
            },
            None,
            ["a", "b", "c"],
        ),
    ],
)
def test_a_row_asks_with_any_of_the_usual_columns(row: dict, system: str | None, texts: list[str]) -> None:
    ((conversation, kept),) = read_jsonl([json.dumps(row), "\n"], "f", None)
    assert kept == row
    assert conversation.system == system
    assert [message.content for message in conversation.messages] == texts


def test_messages_are_read_as_in_training() -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": '{"a": "Rome"}'}}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "U1"}]},
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning": "hm"},
        {"role": "tool", "content": "21"},
    ]
    tools = [{"name": "f", "parameters": {}}]
    rows = [{"messages": messages, "tools": tools}, {"prompt": json.dumps(messages), "tools": json.dumps(tools)}]
    for conversation, _ in read_jsonl(map(json.dumps, rows), "f", None):
        question, answer, result = conversation.messages
        assert (question.content, answer.calls[0].arguments, answer.reasoning) == ("U1", {"a": "Rome"}, "hm")
        assert (result.role, result.content) == ("observation", "21")
        assert conversation.tools[0]["function"]["name"] == "f"
    for row, error in (
        ({"messages": [{"role": "user", "content": "U", "mood": 1}], "history": [["a", "b"]]}, "a column 'history'"),
        ({"messages": [{"role": "system", "content": "S"}, *messages], "system": "T"}, "two system prompts: 'T'"),
        ({"prompt": "[{'role': 'user', 'content': 'U'}]"}, "column 'prompt' is the text of a list of messages, but not JSON"),
    ):
        with pytest.raises(ValueError, match=error):
            read_jsonl([json.dumps(row)], "f", None)


@pytest.mark.parametrize(
    ("line", "error"),
    [
        ("{", "f, line 2: .*"),
        ("[1]", "f, line 2: a row is a JSON object, not list"),
        ('{"text": "a"}', "f, line 2: the row has no text prompt or question or instruction and no messages; it has text"),
        ('{"messages": [{"role": "assistant", "content": "a"}]}', "f, line 2: .*'assistant'.*"),
        (
            '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}',
            "f, line 2: the last message is from the assistant: there is nothing to answer",
        ),
        (
            '{"messages": [{"role": "tool", "content": "a"}]}',
            "f, line 2: the first message is a tool's result, without a question before it",
        ),
    ],
)
def test_a_malformed_row_is_an_error_that_names_its_line(line: str, error: str) -> None:
    with pytest.raises(ValueError, match=f"^{error}$"):
        read_jsonl(['{"prompt": "fine"}', line], "f", None)


def test_a_chosen_column_replaces_the_usual_ones() -> None:
    ((conversation, _),) = read_jsonl(['{"prompt": "no", "mine": "yes"}'], "f", "mine")
    assert conversation.messages[0].content == "yes"
    with pytest.raises(ValueError, match="has no rows"):
        read_jsonl([" \n"], "f", None)


@pytest.mark.parametrize(
    ("method", "changes", "error"),
    [
        ("greedy", {"num_return": 2}, "--num-return 2: greedy gives 1 answers"),
        ("do_sample", {"num_return": 0}, "do_sample gives at least 1"),
        ("beam_search", {"num_return": 4, "num_beams": 3}, "between 1 and --num-beams 3"),
        ("beam_search", {"num_beams": 1}, "needs at least 2 beams"),
        ("beam_search", {"stop_strings": ("x",)}, "use --add-eos-token"),
        ("beam_search_with_sampling", {}, "--top-k -1"),
        ("beam_search", {"sampling": replace(GREEDY, min_tokens=2)}, "--min-tokens: beam_search ranks sequences"),
        ("beam_search_with_sampling", {"sampling": Sampling(0.0, 16, (), top_k=5)}, "needs a --temperature above 0"),
    ],
)
def test_what_a_method_cannot_do_is_an_error(method: str, changes: dict, error: str) -> None:
    with pytest.raises(ValueError, match=re.escape(error)):
        GenerationSettings(**{"method": method, "sampling": GREEDY, "max_model_len": 64, **changes})


def test_every_answer_has_its_own_seed_and_no_more_tokens_than_fit(
    tokenizer: PreTrainedTokenizerFast, engine: ScriptedEngine
) -> None:
    engine.script = ["a", "bb", "c\nX d", "dddd"]
    prompt_format = PromptFormat(tokenizer, None)
    settings = GenerationSettings(
        "do_sample", Sampling(1.0, 16, prompt_format.stop_token_ids), 20, num_return=2, stop_strings=("\nX",), seed=7
    )
    answers = generate(engine, prompt_format, [[40] * 3, [41] * 12], settings)
    assert [(answer.prompt, answer.sample, answer.text) for answer in answers] == [
        (0, 0, "a"),
        (0, 1, "bb"),
        (1, 0, "c"),
        (1, 1, "dddd"),
    ]
    assert [answer.num_tokens for answer in answers] == [2, 3, 6, 5]  # with the end token
    assert [answer.log_prob for answer in answers] == [-2.0, -3.0, -6.0, -5.0]
    assert [request.seed for request in engine.requests] == [sample_seed(7, 0, prompt, k) for prompt in (0, 1) for k in (0, 1)]
    assert [request.max_tokens for request in engine.requests] == [16, 16, 8, 8]


@pytest.mark.parametrize(
    ("max_model_len", "note"),
    [
        (64, "note: the answer was cut by --max-new-tokens 16\n"),
        (12, "note: the answer was cut by the 12 tokens of --max-length, of which the prompt has 4\n"),
    ],
)
def test_a_streamed_answer_says_what_has_cut_it(
    max_model_len: int,
    note: str,
    tokenizer: PreTrainedTokenizerFast,
    engine: ScriptedEngine,
    capsys: pytest.CaptureFixture[str],
) -> None:
    engine.script, engine.ends = ["half an", "complete"], False
    prompt_format = PromptFormat(tokenizer, None)
    settings = EngineSettings(ModelSettings(load=Path("x")), "", max_model_len)
    no_files: Any = None  # the engine is scripted
    session = Session(no_files, tokenizer, prompt_format, settings, "cpu")
    greedy = GenerationSettings("greedy", replace(GREEDY, stop_token_ids=prompt_format.stop_token_ids), max_model_len)
    command._stream(session, engine, [40] * 4, greedy, ())
    assert capsys.readouterr() == ("half an\n", note)
    engine.ends = True
    command._stream(session, engine, [40] * 4, greedy, ())
    assert capsys.readouterr() == ("complete\n", "")
