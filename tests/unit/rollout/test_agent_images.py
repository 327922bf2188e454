"""Images that tools and environments return in the middle of a trajectory: their tokens, and the images of each sequence."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from PIL import Image
from test_agent_loops import CALL, PROMPT, SAMPLING, TOKENIZER, Speaker, settings, task, told
from test_requested_images import READER, RED_URL, SEES, TALL_URL, Viewer, shown

from mindspeed_rl.data.images import open_image
from mindspeed_rl.data.templates import load_template
from mindspeed_rl.data.turns import ChatMessage, ChatTurns
from mindspeed_rl.rollout.agents import load_agent_loop
from mindspeed_rl.rollout.agents.conversation import AgentConversation, TrajectoryLimits
from mindspeed_rl.rollout.agents.loop import AgentRunner
from mindspeed_rl.rollout.trajectory import Trajectory
from mindspeed_rl.tools.interface import ToolCall
from mindspeed_rl.tools.parsers import make_parser
from mindspeed_rl.tools.tool import CallSettings, RowOptions, Session, Tool, ToolResult, to_tool_result
from mindspeed_rl.tools.toolbox import CallLimits, Toolbox

PICTURE = Image.new("RGB", (56, 28), "green")  # of 2 tokens
SCHEMA = {"type": "function", "function": {"name": "calculator", "parameters": {"type": "object", "properties": {}}}}


class Camera(Tool):
    """Returns values in turn, as a tool of the user does."""

    def __init__(self, *values: object) -> None:
        super().__init__(CallSettings(), [SCHEMA])
        self._values = list(values)

    def open(self, options: RowOptions) -> Session:
        async def call(call: ToolCall, timeout_s: float) -> ToolResult:
            return to_tool_result(self._values.pop(0))

        return Session(call)


def photographed(engine: Speaker, *values: object, **changes: Any) -> Trajectory:
    async def run() -> Trajectory:
        box = Toolbox([Camera(*values)], lambda schemas: make_parser("hermes", schemas, TOKENIZER), CallLimits(), len)
        await box.start()
        try:
            loop = load_agent_loop("tool_agent")(settings(**{**SEES, "toolbox": box, **changes}))
            return await AgentRunner(loop, box).sample(engine, task())
        finally:
            await box.close()

    return asyncio.run(run())


@pytest.mark.parametrize(
    "value",
    [
        PICTURE,
        {"text": "see", "image": PICTURE},
        (SimpleNamespace(text="see", image=[PICTURE]), 0.5, {}),  # verl's ToolResponse, reward and metrics
        ToolResult("see", images=(RED_URL,)),
    ],
    ids=["picture", "mapping", "verl", "result"],
)
def test_the_model_sees_the_image_that_a_tool_returns(value: object) -> None:
    engine = Viewer(CALL, "A picture.")
    result = photographed(engine, value)
    assert len(engine.seen[1]) == 1 and engine.seen[0] == () and result.images == engine.seen[1]
    assert open_image(result.images[0]).size == (56, 28)
    assert told(result).count(shown(2)) == 1 and ("see" in told(result)) == (value is not PICTURE)


def test_images_of_several_calls_are_in_the_order_of_their_tokens() -> None:
    engine = Viewer(f"{CALL}{CALL}", CALL, "Done.")
    result = photographed(engine, {"image": RED_URL}, {"image": [TALL_URL]}, {"image": RED_URL})
    assert engine.seen == [(), (RED_URL, TALL_URL), (RED_URL, TALL_URL, RED_URL)]
    assert result.images == engine.seen[2] and result.metrics["tool_call_num"] == 3


def test_a_model_of_text_reads_the_text_alone_and_too_many_images_fail_the_sample() -> None:
    result = photographed(Viewer(CALL, "Yes."), {"text": "see", "image": RED_URL}, images=None, turns=settings().turns)
    assert "see" in told(result) and result.images == () and not result.failure
    result = photographed(Viewer(CALL, "Yes."), {"image": [RED_URL] * 4})
    assert "the context has 4 images, and generate_config.limit_mm_image_per_prompt is 3" in result.failure


class Show:
    """An environment that opens with an image, and shows another."""

    async def reset(self, task: object) -> list[dict[str, Any]]:
        return [{"role": "user", "content": [{"type": "text", "text": "What?"}, {"type": "image", "image": TALL_URL}]}]

    async def step(self, messages: Sequence[ChatMessage]) -> tuple[list[dict[str, Any]], float, bool]:
        assert messages[0]["content"][1]["image"] == TALL_URL  # it reads what it wrote
        part = {"type": "image_url", "image_url": {"url": RED_URL}}
        return [{"role": "user", "content": [part, {"type": "text", "text": " and this?"}]}], 1.0, len(messages) > 3

    async def close(self) -> None:
        """Nothing is open."""


def test_an_environment_shows_images_from_the_first_message_on() -> None:
    engine = Viewer("Blue.", "Red.")
    environment = f"{__name__}:Show"
    loop = load_agent_loop("environment")(settings(**SEES, environment=environment))
    result = asyncio.run(AgentRunner(loop).sample(engine, task()))
    assert not result.failure and engine.seen == [(TALL_URL,), (TALL_URL, RED_URL)]
    first, second = engine.made[0][0], engine.made[1][0]
    assert TOKENIZER.decode(list(first)).count(f"What?{shown(3)}") == 1
    assert TOKENIZER.decode(list(second)).count(f"{shown(2)} and this?") == 1
    assert result.sequences[0].images == (TALL_URL, RED_URL)


def test_a_sequence_that_starts_anew_has_the_images_of_its_own_messages() -> None:
    turns = ChatTurns(load_template("qwen"), TOKENIZER, image_marker=READER.marker)
    prompt = turns.render([{"role": "user", "content": "6 times 7?"}])
    engine = Viewer("42", "Yes.", "No.")

    async def converse() -> AgentConversation:
        made = AgentConversation(prompt, SAMPLING, 1, engine, turns, TOKENIZER, TrajectoryLimits(4000, 1000, 4000), READER, 3)
        await made.reply()
        assert made.add_messages([{"role": "user", "content": [{"type": "image", "image": RED_URL}]}])
        await made.reply()
        other = {"role": "user", "content": [{"type": "image", "image": TALL_URL}, "now"]}
        assert made.replace([*made.messages[:1], other])
        await made.reply()
        # without an answer: the message goes, and its image with it
        assert made.add_messages([{"role": "user", "content": [{"type": "image", "image": RED_URL}]}])
        return made

    result = asyncio.run(converse()).end()
    assert engine.seen == [(), (RED_URL,), (TALL_URL,)]
    assert [sequence.images for sequence in result.sequences] == [(RED_URL,), (TALL_URL,)] and result.images == (
        RED_URL,
        TALL_URL,
    )
    assert prompt != PROMPT or shown(3) in TOKENIZER.decode(list(engine.made[2][0]))
