"""Folders of tiny models of images for tests: the example's, by family."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
from PIL import Image
from scripts import load_script


def make_folder(folder: Path) -> Path:
    """A folder with config, tokenizer and processor, and without weights."""
    example = load_script("examples/vision/make_task.py")
    tokenizer = example.make_tokenizer()
    tokenizer.save_pretrained(folder)
    ids = {token: tokenizer.convert_tokens_to_ids(token) for token in example.SPECIAL}
    config = {
        "model_type": "qwen2_5_vl",
        "vision_config": example.VISION_CONFIG,
        "image_token_id": ids["<|image_pad|>"],
        "vision_start_token_id": ids["<|vision_start|>"],
        "vision_end_token_id": ids["<|vision_end|>"],
    }
    (folder / "config.json").write_text(json.dumps(config))
    example.save_processor(folder)
    return folder


def encode(height: int, width: int, kind: str = "PNG", seed: int = 0) -> bytes:
    """A picture of noise as a file."""
    buffer = io.BytesIO()
    noise = np.random.RandomState(seed).randint(0, 256, (height, width, 3), dtype=np.uint8)
    Image.fromarray(noise).save(buffer, kind)
    return buffer.getvalue()
