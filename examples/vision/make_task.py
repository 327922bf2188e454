"""Makes the vision example's task: a picture with two shapes at random places, of which the larger one's colour is rewarded.

The answers of the warm start name the colour of either shape, by chance. So a model that has learnt all of it is right in half
of the pictures, and that the larger shape is meant can be learnt only from the reward.

Everything is made here, nothing is downloaded. Writes below the given folder:
  model/                a Hugging Face folder (config, processor, tokenizer, random weights) of a tiny Qwen2.5-VL
  raw/sft.jsonl         messages with OpenAI's parts, images as base64
  raw/train.jsonl, raw/heldout.jsonl   instruction, images, output: for reinforcement learning and for evaluation
  raw/pictures/         the images of the latter two, as PNG files
"""

from __future__ import annotations

import base64
import io
import json
import os
import random
import sys
from pathlib import Path

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")

import torch
from PIL import Image, ImageDraw
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast, Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

SEED = 7
NUM_HELD_OUT, NUM_SFT, NUM_TRAIN = 200, 4000, 4000
#: pixels of a side: with patches of 14 pixels, four of which are a token, 3 x 3 tokens
SIDE = 84
#: by their first letters, which are the answers: a response is one choice and the end token
COLOURS = {"r": (220, 40, 40), "g": (40, 180, 60), "b": (50, 80, 230), "y": (240, 220, 40)}
SHAPES = ("circle", "square", "triangle")
QUESTION = "colour?"
SPECIAL = ["<pad>", "<|im_end|>", "<unk>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
#: the question, then the answer and the end token
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
)
VISION_CONFIG = {
    "depth": 2,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_heads": 4,
    "out_hidden_size": 128,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "window_size": 56,
    "fullatt_block_indexes": [1],
}


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token per printable ASCII character, and the tokens of images."""
    characters = [chr(code) for code in range(32, 127)]
    vocabulary = {token: index for index, token in enumerate(SPECIAL + characters)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(SPECIAL)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<pad>", unk_token="<unk>")
    fast.chat_template = CHAT_TEMPLATE
    return fast


def save_model(folder: Path) -> None:
    """Writes a tiny model with random weights, its tokenizer and its processor."""
    torch.manual_seed(SEED)
    tokenizer = make_tokenizer()
    ids = {token: tokenizer.convert_tokens_to_ids(token) for token in SPECIAL}
    config = Qwen2_5_VLConfig(
        text_config={
            "vocab_size": 128,
            "hidden_size": 128,
            "intermediate_size": 384,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 512,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]},
            "initializer_range": 0.05,
            "tie_word_embeddings": True,
            "bos_token_id": None,
            "eos_token_id": ids["<|im_end|>"],
            "pad_token_id": ids["<pad>"],
        },
        vision_config={**VISION_CONFIG, "initializer_range": 0.05},
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        tie_word_embeddings=True,
    )
    Qwen2_5_VLForConditionalGeneration(config).float().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    save_processor(folder)


def save_processor(folder: Path) -> None:
    """Writes the processor's files next to the tokenizer's."""
    path = folder / "tokenizer_config.json"
    # what the processor and vLLM look for
    extra = {"tokenizer_class": "PreTrainedTokenizerFast", "image_token": "<|image_pad|>", "video_token": "<|video_pad|>"}
    path.write_text(json.dumps(json.loads(path.read_text()) | extra))
    size = {"shortest_edge": 28 * 28, "longest_edge": SIDE**2}
    sizes = {"patch_size": 14, "merge_size": 2, "temporal_patch_size": 2, "size": size}
    sizes |= {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}  # pixels between -1 and 1
    image = {"image_processor_type": "Qwen2VLImageProcessor", "processor_class": "Qwen2_5_VLProcessor", **sizes}
    (folder / "preprocessor_config.json").write_text(json.dumps(image))
    video = {"video_processor_type": "Qwen2VLVideoProcessor", **sizes}
    (folder / "video_preprocessor_config.json").write_text(json.dumps(video))


def draw_picture(draw: random.Random) -> tuple[bytes, list[str]]:
    """Returns a PNG with two shapes of different colours and sizes, and the colours, the larger one's first."""
    image = Image.new("RGB", (SIDE, SIDE), (0, 0, 0))
    pen = ImageDraw.Draw(image)
    colours, sizes = draw.sample(list(COLOURS), 2), (draw.randint(34, 38), draw.randint(20, 26))
    # one in the upper half, one in the lower, in either order
    for half, (colour, size) in enumerate(draw.sample(list(zip(colours, sizes)), 2)):
        shape = draw.choice(SHAPES)
        x, y = draw.randint(2, SIDE - size - 2), half * SIDE // 2 + draw.randint(2, SIDE // 2 - size - 2)
        box, fill = (x, y, x + size, y + size), COLOURS[colour]
        if shape == "circle":
            pen.ellipse(box, fill)
        elif shape == "square":
            pen.rectangle(box, fill)
        else:
            pen.polygon([(x, y + size), (x + size, y + size), (x + size // 2, y)], fill)
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue(), colours


def main(folder: Path) -> None:
    """Writes the task; the same bytes every time."""
    draw = random.Random(SEED)
    pictures = folder / "raw" / "pictures"
    pictures.mkdir(parents=True, exist_ok=True)
    rows = []
    for _ in range(NUM_SFT):
        data, colours = draw_picture(draw)
        url = f"data:image/png;base64,{base64.b64encode(data).decode()}"
        parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": QUESTION}]
        answer = {"role": "assistant", "content": draw.choice(colours)}
        rows.append({"messages": [{"role": "user", "content": parts}, answer]})
    write_rows(folder / "raw" / "sft.jsonl", rows)
    for name, count in (("heldout", NUM_HELD_OUT), ("train", NUM_TRAIN)):
        rows = []
        for index in range(count):
            data, colours = draw_picture(draw)
            path = pictures / f"{name}_{index}.png"
            path.write_bytes(data)
            rows.append({"instruction": f"<image>{QUESTION}", "images": [path.name], "output": colours[0]})
        write_rows(folder / "raw" / f"{name}.jsonl", rows)
    save_model(folder / "model")
    print(f"task: {NUM_SFT} pictures for SFT, {NUM_TRAIN} for GRPO, {NUM_HELD_OUT} held out")


def write_rows(path: Path, rows: list[dict]) -> None:
    """One JSON object a line."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
