"""Prompts of generate and chat with videos: read before the model is known, decoded for it, in the order of their marks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from scripted_engine import ScriptedEngine
from test_chat import chat
from video_files import make_video_folder, write_video
from vision_folder import encode, make_folder

from mindspeed_rl.data.conversation import MalformedRowError
from mindspeed_rl.data.images import ImageReader, ImageRules, count_videos, open_frames
from mindspeed_rl.data.tokenizer import load_tokenizer
from mindspeed_rl.inference.batch_generation import read_jsonl
from mindspeed_rl.inference.console_chat import History
from mindspeed_rl.inference.prompt_format import PromptFormat


def build_format(folder: Path) -> PromptFormat:
    rules, tokenizer = ImageRules.read(folder), load_tokenizer(str(folder))
    assert rules is not None
    return PromptFormat(tokenizer, "hf", image_reader=ImageReader.build(rules, tokenizer))


@pytest.fixture
def files(tmp_path: Path) -> Path:
    write_video(tmp_path / "one.mp4", 16)
    (tmp_path / "image.png").write_bytes(encode(56, 84))
    return tmp_path


def test_rows_with_videos_are_prompts_with_all_their_tokens(files: Path) -> None:
    prompt_format = build_format(make_video_folder(files, "qwen3_vl"))
    parts = [{"type": "video", "video": "one.mp4"}, {"type": "image", "image": "image.png"}, {"type": "text", "text": "what?"}]
    rows = [
        {"messages": [{"role": "user", "content": parts}]},
        {"prompt": "<video><image>what?", "images": ["image.png"], "videos": ["one.mp4"]},
        {"prompt": "a <video> of text"},
    ]
    read = read_jsonl([json.dumps(row) for row in rows], "f", None, str(files))
    conversations = [prompt_format.decode_videos(conversation) for conversation, _ in read]
    first, second, text = prompt_format.encode(conversations)
    assert first == second and [count_videos(one.images) for one in conversations] == [1, 1, 0]
    decode = prompt_format.tokenizer.decode
    marks = "<|vision_start|><|vision_end|>"
    shown = decode(first).replace("<|video_pad|>", "").replace("<|image_pad|>", "")
    # 16 frames at 8 per second, 4 of them: 0, 5, 10 and 15
    assert shown == f"<|vision_start|><0.3 seconds>{marks}<1.6 seconds>{marks}<|vision_end|>{marks}what?"
    assert decode(text) == "a <video> of text" and len(open_frames(conversations[0].images[0])) == 4


def test_a_model_without_videos_refuses_them_in_a_sentence(files: Path) -> None:
    prompt_format = build_format(make_folder(files))
    ((conversation, _),) = read_jsonl([json.dumps({"prompt": "what?", "videos": ["one.mp4"]})], "f", None, str(files))
    with pytest.raises(MalformedRowError, match="has a video, and the model in .* reads none"):
        prompt_format.decode_videos(conversation)


def test_a_video_of_the_chat_belongs_to_its_question(files: Path) -> None:
    prompt_format = build_format(make_video_folder(files, "qwen2_5_vl"))
    engine, history = ScriptedEngine(prompt_format.tokenizer), History(prompt_format, None, 1, 400)
    engine.script = ["a", "b"]
    lines = [f"/image {files}/image.png", f"/video {files}/one.mp4", "what?", "/history", f"/video {files}/none.mp4", "and?"]
    shown = chat(engine, history, lines)
    assert "You >> <image><video>what?" in shown and "none.mp4 cannot be read" in shown
    assert [count_videos(request.images) for request in engine.requests] == [1, 1]
    text = prompt_format.tokenizer.decode(engine.requests[0].prompt_ids)
    # 6 tokens of the image; 4 frames of 3 x 2 tokens, two of which are one in time
    image, video = "<|image_pad|>" * 6, "<|video_pad|>" * 12
    assert text == f"<|vision_start|>{image}<|vision_end|><|vision_start|>{video}<|vision_end|>what?"
