"""Images that the clients of OpenAI and Anthropic send: their tokens, the images of each context, and what is refused."""

from __future__ import annotations

import base64
import io
from typing import Any

import anthropic
import openai
import pytest
from PIL import Image
from test_agent_loops import CALL, IMAGE_TOKENS, SAMPLING, TOKENIZER
from test_requested_turns import SCHEMA, TOOL, Session, Writer, held

from mindspeed_rl.data.images import ImageReader, ImageRules, make_data_url
from mindspeed_rl.data.templates import load_template
from mindspeed_rl.data.turns import ChatTurns
from mindspeed_rl.rollout.protocol import Generated
from mindspeed_rl.rollout.requests import Sampling

#: squares of 28 pixels are a token; between one and nine of them
RULES = ImageRules("", 14, 2, 2, 28 * 28, 84 * 84, token_id=5, frame=(4, 6))
READER = ImageReader.build(RULES, TOKENIZER)
SEES: dict[str, Any] = {
    "turns": ChatTurns(load_template("qwen"), TOKENIZER, image_marker=READER.marker),
    "images": READER,
    "max_images": 3,
}


def picture(height: int, width: int, colour: str = "red") -> str:
    buffer = io.BytesIO()
    Image.new("RGB", (width, height), colour).save(buffer, "PNG")
    return base64.b64encode(buffer.getvalue()).decode()


RED, TALL = picture(28, 56), picture(84, 28, "blue")  # of 2 and 3 tokens
RED_URL, TALL_URL = (f"data:image/png;base64,{data}" for data in (RED, TALL))


class Viewer(Writer):
    """A writer that keeps the images of every turn."""

    def __init__(self, *texts: str) -> None:
        super().__init__(list(texts))
        self.seen: list[tuple[str, ...]] = []

    async def generate(
        self, prompt_ids: tuple[int, ...], sampling: Sampling, seed: int, partial: Generated | None = None
    ) -> Generated:
        self.seen.append(sampling.images)
        return await super().generate(prompt_ids, sampling, seed, partial)


def shown(count: int) -> str:
    start, token, end = IMAGE_TOKENS
    return f"{start}{token * count}{end}"


def test_each_form_gives_the_same_tokens_and_images() -> None:
    block = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": RED}}

    async def converse(session: Session) -> list[Any]:
        part = {"type": "image_url", "image_url": {"url": RED_URL, "detail": "low"}}
        chat = await session.chat([{"role": "user", "content": [{"type": "text", "text": "See "}, part]}])
        message = await session.claude([{"role": "user", "content": [{"type": "text", "text": "See "}, block]}])
        content: Any = [{"type": "input_text", "text": "See "}, {"type": "input_image", "image_url": RED_URL, "detail": "auto"}]
        items: Any = [{"role": "user", "content": content}]
        response = await session.openai.responses.create(model="policy", input=items)
        counted = await session.openai.responses.input_tokens.count(model="policy", input=items)
        # a completion of tokens continues the images in them
        more = await session.openai.completions.create(
            model="policy", prompt=[*chat.prompt_token_ids, *chat.choices[0].token_ids, 40]
        )
        return [chat, message, response, counted, more]

    engine = Viewer("red")
    (chat, message, response, counted, _), trajectory, _ = held(converse, engine=engine, **SEES)
    assert engine.seen == [(RED_URL,)] * 4
    first, *others = [context for context, _ in engine.made]
    assert others[:2] == [first, first] and others[2][: len(first)] == first
    assert f"See {shown(2)}<|im_end|>" in TOKENIZER.decode(list(first)) and first.count(5) == 2
    assert chat.usage.prompt_tokens == message.usage.input_tokens == response.usage.input_tokens == counted.input_tokens
    assert all(sequence.images == (RED_URL,) for sequence in trajectory.sequences) and len(trajectory.sequences) == 3


def test_results_of_tools_bring_images_and_branches_have_those_of_their_own_tokens() -> None:
    tool: Any = {"name": "calculator", "description": "Computes.", "input_schema": SCHEMA}
    block: Any = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": TALL}}

    async def converse(session: Session) -> None:
        question: Any = [{"role": "user", "content": [block, {"type": "text", "text": "See"}]}]
        first = await session.claude(question, tools=[tool])
        result = {"type": "tool_result", "tool_use_id": first.content[-1].id}
        asked = [*question, {"role": "assistant", "content": first.content}]
        red = {**block, "source": {**block["source"], "data": RED}}
        for content in ([red, {"type": "text", "text": "so"}], [block], "none"):
            await session.claude([*asked, {"role": "user", "content": [{**result, "content": content}]}], tools=[tool])
        # the same history with another image is another history
        other = [{"role": "user", "content": [red, {"type": "text", "text": "See"}]}, *asked[1:]]
        await session.claude([*other, {"role": "user", "content": [{**result, "content": "none"}]}], tools=[tool])

    engine = Viewer(CALL, "1", "2", "3", "4")
    _, trajectory, _ = held(converse, engine=engine, **SEES)
    assert engine.seen == [(TALL_URL,), (TALL_URL, RED_URL), (TALL_URL, TALL_URL), (TALL_URL,), (RED_URL,)]
    first, second, third, fourth, fifth = [context for context, _ in engine.made]
    start = first + engine.made[0][1]
    assert all(context[: len(start)] == start for context in (second, third, fourth)) and fifth[: len(start)] != start
    texts = [TOKENIZER.decode(list(context[len(start) :])) for context in (second, third)]
    assert f"{shown(2)}so" in texts[0] and shown(3) in texts[1]
    assert [part.images for part in trajectory.sequences] == [engine.seen[1], engine.seen[2], engine.seen[3], engine.seen[4]]
    # what trains has as many runs of image tokens as images
    for sequence in trajectory.sequences:
        ids = [*sequence.prompt_ids, *(token for segment in sequence.segments for token in segment.token_ids)]
        assert ids.count(4) == len(sequence.images)


def test_items_of_responses_bring_images_of_tools() -> None:
    tool: Any = {"type": "function", **TOOL["function"], "strict": False}

    async def converse(session: Session) -> None:
        first = await session.openai.responses.create(model="policy", input="See", tools=[tool])
        (call,) = first.output
        output: Any = [{"type": "input_image", "image_url": TALL_URL}]
        item: Any = {"type": "function_call_output", "call_id": call.call_id, "output": output}
        second = await session.openai.responses.create(
            model="policy", input=[item], previous_response_id=first.id, tools=[tool]
        )
        more: Any = [{"role": "user", "content": [{"type": "input_image", "image_url": RED_URL}]}]
        await session.openai.responses.create(model="policy", input=more, previous_response_id=second.id, tools=[tool])

    engine = Viewer(CALL, "tall", "red")
    _, trajectory, _ = held(converse, engine=engine, **SEES)
    assert engine.seen == [(), (TALL_URL,), (TALL_URL, RED_URL)]
    (sequence,) = trajectory.sequences
    assert sequence.images == (TALL_URL, RED_URL)


@pytest.mark.parametrize(
    ("role", "urls", "said"),
    [
        ("user", ["https://a.b/c.png"], "must be in the request, as base64 or a data: URL, not 'https://a.b/c.png'"),
        ("user", [RED_URL[:-40]], "is broken"),
        ("user", ["data:image/png;base64,?"], "is not base64"),
        ("user", [RED_URL] * 4, "the context has 4 images, and generate_config.limit_mm_image_per_prompt is 3"),
        ("system", [RED_URL], "an image or a video in a message of the role 'system'"),
    ],
)
def test_an_image_that_cannot_be_read_is_a_400_with_a_sentence(role: str, urls: list[str], said: str) -> None:
    async def converse(session: Session) -> None:
        parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
        await session.chat([{"role": role, "content": parts}])

    with pytest.raises(openai.BadRequestError) as raised:
        held(converse, "42", **SEES)
    assert said in str(raised.value)


def test_a_model_of_text_refuses_images_and_marks_in_texts_are_text() -> None:
    async def converse(session: Session) -> None:
        block: Any = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": RED}}
        await session.claude([{"role": "user", "content": [block]}])

    with pytest.raises(anthropic.BadRequestError, match="the model of this run reads no images"):
        held(converse, "42")
    engine = Viewer("42")
    held(lambda given: given.chat([{"role": "user", "content": f"a\ue000image\ue001b {READER.marker}"}]), engine=engine, **SEES)
    (context,) = [context for context, _ in engine.made]
    assert not {4, 5, 6} & set(context) and f"ab {READER.marker}" in TOKENIZER.decode(list(context))
    assert SAMPLING.images == () and engine.seen == [()]


def test_a_program_gets_the_images_of_its_row_as_urls(tmp_path: Any) -> None:
    path = tmp_path / "a.bin"
    path.write_bytes(b"xx" + base64.b64decode(TALL))
    assert make_data_url(f"{path}#2+{len(base64.b64decode(TALL))}") == TALL_URL
