"""The agent example: what its supervised conversations teach is, token by token, what its agent loop makes of them."""

from __future__ import annotations

import asyncio
import json
import random
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

from mindspeed_rl.data.handlers.base import HandlerSettings
from mindspeed_rl.data.handlers.instruction import OpenAIInstructionHandler
from mindspeed_rl.data.handlers.prompt import R1AlpacaStyleInstructionHandler
from mindspeed_rl.data.prompts import _PLAIN_COLUMNS
from mindspeed_rl.data.templates import load_template
from mindspeed_rl.data.turns import ChatTurns
from mindspeed_rl.rollout.agents.conversation import TrajectoryLimits
from mindspeed_rl.rollout.agents.loop import AgentRunner, LoopSettings, Task
from mindspeed_rl.rollout.agents.tool_agent import ToolAgent
from mindspeed_rl.rollout.protocol import Generated
from mindspeed_rl.rollout.requests import Sampling
from mindspeed_rl.tools.parsers import make_parser
from mindspeed_rl.tools.tool_file import build_tools, read_tools
from mindspeed_rl.tools.toolbox import CallLimits, Toolbox

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def example() -> dict[str, Any]:
    """The names of the script that makes the example's task."""
    path = list(sys.path)
    try:
        return runpy.run_path(str(ROOT / "examples" / "agent" / "make_multiplications.py"))
    finally:
        sys.path[:] = path


class Taught:
    """An engine that says what the supervised rows have their model say."""

    def __init__(self, turns: list[list[int]]) -> None:
        self._turns = iter(turns)

    async def generate(self, prompt_ids: Any, sampling: Sampling, seed: int, partial: Any = None) -> Generated:
        tokens = tuple(next(self._turns))
        return Generated(tokens, (-1.0,) * len(tokens), (0,) * len(tokens), "stop")


def answers(ids: list[int], labels: list[int]) -> list[list[int]]:
    """The runs of tokens with a label."""
    results: list[list[int]] = []
    for place, label in enumerate(labels):
        if label >= 0:
            if place == 0 or labels[place - 1] < 0:
                results.append([])
            results[-1].append(ids[place])
    return results


def test_a_supervised_conversation_is_the_loops_own_token_by_token(example: dict[str, Any]) -> None:
    tokenizer = example["make_agent_tokenizer"]()
    template = load_template("hf", tokenizer)
    tools = build_tools(read_tools(str(ROOT / "configs" / "tools" / "calculator.yaml")))
    (calculator,) = tools
    row = example["conversation"](347, 862, calculator.schemas, calls=True)
    supervised = OpenAIInstructionHandler(HandlerSettings(tokenizer, template)).encode([(0, json.loads(json.dumps(row)))])
    ids, labels = (list(map(int, supervised.rows[0].columns[name])) for name in ("input_ids", "labels"))
    reader = R1AlpacaStyleInstructionHandler(
        HandlerSettings(tokenizer, template, map_keys=_PLAIN_COLUMNS, tools=calculator.schemas)
    )
    asked = reader.encode([(0, {"prompt": "347*862=", "labels": "299114"})])
    prompt = list(map(int, asked.rows[0].columns["input_ids"]))

    box = Toolbox(tools, lambda schemas: make_parser("hermes", schemas, tokenizer), CallLimits(2, 1, 16), len)
    turns = ChatTurns(template, tokenizer, has_tools=True)
    settings = LoopSettings(tokenizer, turns, TrajectoryLimits(64, 32, 96, 3), box)
    engine: Any = Taught(answers(ids, labels))

    async def play() -> Any:
        agents = AgentRunner(ToolAgent(settings), box)
        await agents.start()
        try:
            return await agents.sample(engine, Task(tuple(prompt), Sampling(1.0, 24, (tokenizer.eos_token_id,)), 1, "299114"))
        finally:
            await agents.close()

    result = asyncio.run(play())
    assert prompt + result.token_ids == ids
    assert [False] * len(prompt) + result.sampled == [label >= 0 for label in labels]
    assert result.metrics["tool_call_num"] == 1 and result.finish == "stop"
    assert (
        tokenizer.decode(result.token_ids[result.reward_columns()["last_turn_start"] :], skip_special_tokens=True) == "299114"
    )


def test_without_tools_the_example_asks_and_answers_in_plain_text(example: dict[str, Any]) -> None:
    tokenizer = example["make_agent_tokenizer"]()
    handler = OpenAIInstructionHandler(HandlerSettings(tokenizer, load_template("hf", tokenizer)))
    batch = handler.encode([(0, example["conversation"](12, 34, [], calls=False))])
    assert tokenizer.decode(batch.rows[0].columns["input_ids"]) == "12*34=408<eos>"


@pytest.mark.parametrize(("chosen", "reward"), [("*", 1.0), ("+", 0.0)])
def test_a_recorded_repair_is_replayed_token_by_token_in_its_sandbox(chosen: str, reward: float) -> None:
    path = list(sys.path)
    try:
        example = runpy.run_path(str(ROOT / "examples" / "swe_tiny" / "make_bugs.py"))
    finally:
        sys.path[:] = path
    tokenizer = example["make_swe_tokenizer"]()
    template = load_template("hf", tokenizer)
    tools = build_tools(read_tools(str(ROOT / "configs" / "tools" / "sandbox_tiny.yaml")))
    (sandbox,) = tools
    recorded = example["repair"]("*", "-", (3, 5), chosen, sandbox.schemas)
    supervised = OpenAIInstructionHandler(HandlerSettings(tokenizer, template)).encode([(0, json.loads(json.dumps(recorded)))])
    ids, labels = (list(map(int, supervised.rows[0].columns[name])) for name in ("input_ids", "labels"))
    prompt = ids[: next(place for place, label in enumerate(labels) if label >= 0)]

    def count(text: str) -> int:
        return len(tokenizer.encode(text, add_special_tokens=False))

    box = Toolbox(tools, lambda schemas: make_parser("hermes", schemas, tokenizer), CallLimits(5, 1, 32), count)
    settings = LoopSettings(tokenizer, ChatTurns(template, tokenizer, has_tools=True), TrajectoryLimits(112, 16, 128, 6), box)
    engine: Any = Taught(answers(ids, labels))
    row = example["row"]("*", "-", (3, 5), random.Random(1))

    async def play() -> Any:
        agents = AgentRunner(ToolAgent(settings), box)
        await agents.start()
        try:
            sampling = Sampling(1.0, 24, (tokenizer.eos_token_id,))
            return await agents.sample(engine, Task(tuple(prompt), sampling, 1, "*", {"tools_kwargs": row["tools_kwargs"]}))
        finally:
            await agents.close()

    result = asyncio.run(play())
    assert tokenizer.decode(prompt + result.token_ids) == tokenizer.decode(ids)
    assert prompt + result.token_ids == ids
    assert [False] * len(prompt) + result.sampled == [label >= 0 for label in labels]
    assert result.final_reward == reward and [event.name for event in result.events if event.name != "model"] == [
        *("read", "run_tests", "edit", "run_tests")
    ]
