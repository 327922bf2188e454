"""Videos in requests of programs and in messages of environments: decoded once, by the processor's rules, in several turns."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import openai
import pytest
from test_agent_loops import TOKENIZER, settings, task
from test_requested_images import RED_URL, TALL_URL, Viewer, picture, shown
from test_requested_turns import Session, held
from video_files import write_video

from mindspeed_rl.data.images import ImageReader, ImageRules, is_video, make_data_url, open_frames
from mindspeed_rl.data.templates import load_template
from mindspeed_rl.data.turns import ChatMessage, ChatTurns
from mindspeed_rl.data.videos import VideoRules
from mindspeed_rl.rollout.agents import load_agent_loop
from mindspeed_rl.rollout.agents.loop import AgentRunner

#: frames become 28 x 56 pixels, of 2 tokens; two frames a second
VIDEOS = VideoRules(
    folder="", sums_frames=False, has_timestamps=True, patch_size=14, temporal_patch_size=2, merge_size=2, min_pixels=28 * 28,
    max_pixels=28 * 56, frame_pixels=None, min_frames=2, max_frames=8, fps=2.0, num_frames=None, normalizes_as_images=True,
    token_id=7, frame=(4, 6), tokens_per_second=1.0,
)  # fmt: skip
RULES = ImageRules("", 14, 2, 2, 28 * 28, 84 * 84, token_id=5, frame=(4, 6), video=VIDEOS)
READER = ImageReader.build(RULES, TOKENIZER)
MARKERS = {"image_marker": READER.marker, "video_marker": READER.video_marker}
SEES: dict[str, Any] = {
    "turns": ChatTurns(load_template("qwen"), TOKENIZER, **MARKERS),
    "images": READER,
    "max_images": 1,
    "max_videos": 2,
}


def frames(*times: str) -> str:
    """The text of a video with two frames before each time."""
    tokens = "<|video_pad|>" * 2
    parts = "".join(f"<{time} seconds><|vision_start|>{tokens}<|vision_end|>" for time in times)
    return f"<|vision_start|>{parts}<|vision_end|>"


def video_part(path: Path, **more: object) -> Any:
    url = f"data:video/mp4;base64,{base64.b64encode(path.read_bytes()).decode()}"
    return {"type": "video_url", "video_url": {"url": url}, **more}


def test_requests_show_videos_and_later_turns_continue_their_tokens(tmp_path: Path) -> None:
    short = write_video(tmp_path / "a.mp4", 16, 28, 56, fps=8.0)  # of two seconds: four frames
    url = make_data_url(READER.read_video(str(short)))
    pictures = [f"data:image/png;base64,{picture(28, 56, colour)}" for colour in ("red", "blue")]

    async def converse(session: Session) -> None:
        question = {"role": "user", "content": [{"type": "text", "text": "See "}, video_part(short)]}
        first = await session.chat([question])
        said = [question, {"role": "assistant", "content": first.choices[0].message.content}]
        image = {"type": "image_url", "image_url": {"url": RED_URL}}
        images = {"type": "video", "video": pictures, "fps": 4}
        await session.chat([*said, {"role": "user", "content": [image, images, {"type": "text", "text": "?"}]}])
        # what a program gets of its row's video, and another rate
        await session.chat([{"role": "user", "content": [{"type": "video_url", "video_url": {"url": url}}]}])
        await session.chat([{"role": "user", "content": [video_part(short, fps=1.0)]}])

    engine = Viewer("1", "2", "3", "4")
    _, trajectory, _ = held(converse, engine=engine, **SEES)
    first, second, third, fourth = [TOKENIZER.decode(list(context)) for context, _ in engine.made]
    whole = frames("0.2", "1.2")  # frames 0, 4, 8 and 12 of 8 a second
    assert f"See {whole}<|im_end|>" in first and second.startswith(first)
    # two images at 4 a second
    assert f"{shown(2)}{frames('0.1')}?" in second and second.count(whole) == 1
    assert whole in third and frames("0.5") in fourth
    kinds = [[is_video(one) for one in media] for media in engine.seen]
    assert kinds == [[True], [True, False, True], [True], [True]]
    assert engine.seen[0][0] == engine.seen[1][0] == engine.seen[2][0] and engine.seen[1][1] == RED_URL
    assert len(open_frames(engine.seen[0][0])) == 4 and len(open_frames(engine.seen[3][0])) == 2
    assert [sequence.images for sequence in trajectory.sequences] == [engine.seen[1], engine.seen[2], engine.seen[3]]


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ([{"type": "video_url", "video_url": {"url": "https://a.b/c.mp4"}}], "a video must be in the request, as a data: URL"),
        ([{"type": "video", "video": "/etc/passwd"}], "a video must be in the request, as a data: URL"),
        ([{"type": "video", "video": [TALL_URL, "/a.png"]}], "an image must be in the request, as base64 or a data: URL"),
        ([{"type": "video_url", "video_url": {"url": "data:video/mp4;base64,?"}}], "is not base64"),
        ([{"type": "video_url", "video_url": {"url": "data:video/mp4;base64,AAAA"}}], "is broken, or of no format"),
        ([{"type": "video_url", "video_url": {"url": TALL_URL}}], "has 1 images, and 0 image tokens"),
        ([{"type": "video", "video": [TALL_URL, TALL_URL], "fps": -1}], "fps=-1; it is a number above 0"),
        ([{"type": "video", "video": [TALL_URL] * 2}] * 3, "has 3 videos, and generate_config.limit_mm_video_per_prompt is 2"),
    ],
)
def test_a_video_that_cannot_be_read_is_a_400_with_a_sentence(parts: list[Any], said: str) -> None:
    async def converse(session: Session) -> None:
        await session.chat([{"role": "user", "content": parts}])

    with pytest.raises(openai.BadRequestError) as raised:
        held(converse, "42", **SEES)
    assert said in str(raised.value)


def test_marks_of_videos_in_texts_are_text() -> None:
    engine = Viewer("42")
    forged = "a\ue000video\ue001b\ue000vid\ue000image\ue001eo\ue001c"
    held(lambda given: given.chat([{"role": "user", "content": forged}]), engine=engine, **SEES)
    ((context, _),) = engine.made
    assert not {4, 5, 6, 7} & set(context) and engine.seen == [()]


class Show:
    """An environment that opens with a video of images, and shows another."""

    async def reset(self, task: object) -> list[dict[str, Any]]:
        part = {"type": "video", "video": [RED_URL, RED_URL]}
        return [{"role": "user", "content": [{"type": "text", "text": "What?"}, part]}]

    async def step(self, messages: Sequence[ChatMessage]) -> tuple[list[dict[str, Any]], float, bool]:
        part = {"type": "video", "video": [RED_URL] * 4, "fps": 1.0}
        return [{"role": "user", "content": [part, {"type": "text", "text": " and this?"}]}], 1.0, len(messages) > 3

    async def close(self) -> None:
        """Nothing is open."""


def test_an_environment_shows_videos() -> None:
    engine = Viewer("Red.", "Red.")
    loop = load_agent_loop("environment")(settings(**SEES, environment=f"{__name__}:Show"))
    result = asyncio.run(AgentRunner(loop).sample(engine, task()))
    assert not result.failure, result.failure
    first, second = [TOKENIZER.decode(list(context)) for context, _ in engine.made]
    assert f"What?{frames('0.2')}" in first and f"{frames('0.5', '2.5')} and this?" in second
    assert [len(open_frames(one)) for one in result.sequences[0].images] == [2, 4]
