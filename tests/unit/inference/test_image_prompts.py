"""Images in the prompts of generate and chat."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from scripted_engine import ScriptedEngine
from test_chat import chat

sys.path.append(str(Path(__file__).parents[1] / "data"))
from vision_folder import encode, make_folder

from mindspeed_rl.data.images import ImageReader, ImageRules
from mindspeed_rl.data.tokenizer import load_tokenizer
from mindspeed_rl.inference.batch_generation import GenerationSettings, generate, read_jsonl
from mindspeed_rl.inference.console_chat import MAX_IMAGES, History
from mindspeed_rl.inference.prompt_format import PromptFormat
from mindspeed_rl.rollout.requests import Sampling

#: ids of start, end and image in the tiny model
START, END, PAD = 3, 4, 5


@pytest.fixture(scope="module")
def prompt_format(tmp_path_factory: pytest.TempPathFactory) -> PromptFormat:
    folder = make_folder(tmp_path_factory.mktemp("vision_model"))
    rules, tokenizer = ImageRules.read(folder), load_tokenizer(folder)
    assert rules is not None
    return PromptFormat(tokenizer, "hf", image_reader=ImageReader.build(rules, tokenizer))


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    """A picture of 2 x 3 tokens and one of a single token."""
    (tmp_path / "wide.png").write_bytes(encode(56, 84))
    (tmp_path / "small.png").write_bytes(encode(28, 28))
    return tmp_path


def ids_of(prompt_format: PromptFormat, *parts: str | int) -> list[int]:
    """Ids of texts, and of images with so many tokens."""
    results: list[int] = []
    for part in parts:
        text = prompt_format.tokenizer.encode(part, add_special_tokens=False) if isinstance(part, str) else []
        results += text if isinstance(part, str) else [START, *[PAD] * part, END]
    return results


def test_rows_of_every_form_are_prompts_with_all_tokens_of_their_images(prompt_format: PromptFormat, pictures: Path) -> None:
    wide, small = str(pictures / "wide.png"), str(pictures / "small.png")
    parts = [{"type": "image_url", "image_url": {"url": small}}, {"type": "text", "text": "what?"}]
    rows = [
        {"prompt": "what?", "images": ["wide.png"]},
        {"instruction": "<image>and<image>?", "images": ["small.png", wide]},
        {"messages": [{"role": "user", "content": parts}]},
        {"prompt": "a tag <image> of text"},
    ]
    read = read_jsonl([json.dumps(row) for row in rows], "f", None, str(pictures))
    assert [row for _, row in read] == rows
    conversations = [conversation for conversation, _ in read]
    assert [conversation.images for conversation in conversations] == [(wide,), (small, wide), (small,), ()]
    expected = [(6, "what?"), (1, "and", 6, "?"), (1, "what?"), ("a tag <image> of text",)]
    assert prompt_format.encode(conversations) == [ids_of(prompt_format, *row) for row in expected]
    with pytest.raises(ValueError, match=r"the prompts have images, and the model reads only text"):
        PromptFormat(prompt_format.tokenizer, "hf").encode(conversations)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "what?", "images": ["gone.png"]}, r"f, line 1: image .*gone.png cannot be read"),
        ({"prompt": "<image><image>?", "images": ["wide.png"]}, "f, line 1: has 1 images, and 2 times <image> in its text"),
        ({"prompt": "what?", "images": ["http://a/b.png"]}, "f, line 1: image http://a/b.png is on the network"),
    ],
)
def test_a_wrong_image_is_named_with_its_line(row: dict[str, object], message: str, pictures: Path) -> None:
    with pytest.raises(ValueError, match=message):
        read_jsonl([json.dumps(row)], "f", None, str(pictures))


def test_an_image_of_the_chat_belongs_to_its_question_until_that_is_forgotten(
    prompt_format: PromptFormat, pictures: Path
) -> None:
    engine, history = ScriptedEngine(prompt_format.tokenizer), History(prompt_format, None, 1, 200)
    engine.script = ["a", "b", "c", "d"]
    wide, small = str(pictures / "wide.png"), str(pictures / "small.png")
    shown = chat(engine, history, [f"/image {wide}", "what?", f"/image {small}", "and?", "/history", "then?", "/new", "so?"])
    assert f"{wide} belongs to the next question.\n" in shown and "You >> <image>and?" in shown
    end = prompt_format.tokenizer.eos_token
    expected = [
        ((6, "what?"), (wide,)),
        ((6, "what?", f"a{end}", 1, "and?"), (wide, small)),
        ((1, "and?", f"b{end}", "then?"), (small,)),  # one earlier turn is remembered
        (("so?",), ()),
    ]
    assert [request.images for request in engine.requests] == [images for _, images in expected]
    assert [request.prompt_ids for request in engine.requests] == [ids_of(prompt_format, *parts) for parts, _ in expected]


def test_an_image_that_the_chat_cannot_show_is_refused_in_a_sentence(prompt_format: PromptFormat, pictures: Path) -> None:
    engine, small = ScriptedEngine(prompt_format.tokenizer), str(pictures / "small.png")
    history = History(prompt_format, None, 3, 200)
    shown = chat(engine, history, [f"/image {pictures}/gone.png", *[f"/image {small}"] * (MAX_IMAGES + 1), "/image"])
    assert "gone.png cannot be read" in shown and f"a question may have at most {MAX_IMAGES} images\n" in shown
    assert "/image is not a command; there are /new, /history, /image FILE, /exit.\n" in shown
    text = History(PromptFormat(prompt_format.tokenizer, "hf"), None, 3, 200)
    assert "this model reads only text" in chat(engine, text, [f"/image {small}"])
    assert not engine.requests


def test_beams_read_no_images(prompt_format: PromptFormat) -> None:
    settings = GenerationSettings("beam_search", Sampling(0.0, 4, ()), 64)
    with pytest.raises(ValueError, match="--task beam_search reads only text, and a prompt has images; use greedy"):
        generate(ScriptedEngine(prompt_format.tokenizer), prompt_format, [[1]], settings, [("a.png",)])
