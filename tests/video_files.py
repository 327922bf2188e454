"""Videos of noise for tests, and folders of the tiny models that read them."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import cv2
import numpy as np

sys.path.append(str(Path(__file__).parent / "unit" / "data"))
from vision_folder import make_folder

FAMILIES = ("qwen2_5_vl", "qwen3_vl", "qwen3_5")
#: tokens of the example's tokenizer
START, END, IMAGE, VIDEO = 3, 4, 5, 6


def make_video_folder(folder: Path, family: str, **processor: object) -> Path:
    """A folder as `make_folder`'s, of a family, with settings of the processor of videos."""
    make_folder(folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": family, "video_token_id": VIDEO}
    config["vision_config"] |= {"tokens_per_second": 2} if family == "qwen2_5_vl" else {}
    (folder / "config.json").write_text(json.dumps(config))
    path = folder / "video_preprocessor_config.json"
    settings = json.loads(path.read_text()) | {"size": {"shortest_edge": 28 * 28, "longest_edge": 84 * 84}}
    if family != "qwen2_5_vl":
        settings |= {"video_processor_type": "Qwen3VLVideoProcessor"}
        settings["size"] = {"shortest_edge": 2 * 28 * 28, "longest_edge": 8 * 84 * 84}
        image = folder / "preprocessor_config.json"
        image.write_text(json.dumps(json.loads(image.read_text()) | {"processor_class": "Qwen3VLProcessor"}))
    path.write_text(json.dumps(settings | processor))
    return folder


def write_video(path: Path, frames: int, height: int = 96, width: int = 64, *, fps: float = 8.0, seed: int = 0) -> Path:
    """Frames of large squares of random colours, so that a wrong frame shows."""
    code = cv2.VideoWriter_fourcc(*("mp4v" if path.suffix == ".mp4" else "MJPG"))
    writer = cv2.VideoWriter(str(path), code, fps, (width, height))
    draw = np.random.RandomState(seed)
    for _ in range(frames):
        squares = draw.randint(0, 256, (-(-height // 16), -(-width // 16), 3), dtype=np.uint8)
        writer.write(np.kron(squares, np.ones((16, 16, 1), np.uint8))[:height, :width])
    writer.release()
    return path
