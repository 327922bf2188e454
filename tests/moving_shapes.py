"""A tiny task of videos: the direction in which a square moves; opposite ones have the same frames in reverse order."""

from __future__ import annotations

import json
import random
from pathlib import Path

import cv2
import numpy as np
import tiny_vision
from scripts import load_script

SIDE, SQUARE, STEP, FRAMES = 56, 16, 12, 4
DIRECTIONS = {"l": (-1, 0), "r": (1, 0), "u": (0, -1), "d": (0, 1)}
OPPOSITES = {"l": "r", "r": "l", "u": "d", "d": "u"}


def write_video(path: Path, draw: random.Random) -> str:
    """Write a video of a square that moves by 12 pixels per frame, and return the letter of its direction."""
    letter = draw.choice(list(DIRECTIONS))
    step, room = DIRECTIONS[letter], SIDE - SQUARE - STEP * (FRAMES - 1)
    start = [draw.randint(0, room if axis else SIDE - SQUARE) + (STEP * (FRAMES - 1) if axis < 0 else 0) for axis in step]
    colour = [draw.randint(140, 255) for _ in range(3)]
    writer = cv2.VideoWriter(str(path), cv2.VideoWriter_fourcc(*"MJPG"), 2.0, (SIDE, SIDE))
    for index in range(FRAMES):
        frame = np.zeros((SIDE, SIDE, 3), np.uint8)
        x, y = (begin + STEP * index * axis for begin, axis in zip(start, step))
        frame[y : y + SQUARE, x : x + SQUARE] = colour
        writer.write(frame)
    writer.release()
    return letter


def save_model(folder: Path, family: str = "qwen3") -> None:
    """Write a tiny Qwen3-VL, or Qwen2.5-VL, with random weights, that sees these videos as they are."""
    example = load_script("examples/vision/make_task.py")
    if family == "qwen3":
        tiny_vision.save_for_the_example(example, folder)
    else:
        example.save_model(folder)
    path = folder / "video_preprocessor_config.json"
    most = SIDE**2 * (FRAMES if family == "qwen3" else 1)
    settings = {"size": {"shortest_edge": 784, "longest_edge": most}, "fps": 2, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))


def write_rows(folder: Path, name: str, count: int, seed: int, *, right: float = 1.0) -> Path:
    """Write prompts with videos, whose answers name the direction, or in a share of them the opposite one."""
    (folder / name).mkdir(parents=True)
    draw, rows = random.Random(seed), []
    for index in range(count):
        path = folder / name / f"{index}.avi"
        letter = write_video(path, draw)
        answer = letter if draw.random() < right else OPPOSITES[letter]
        rows.append({"instruction": "<video>to?", "videos": [str(path)], "output": answer})
    data = folder / f"{name}.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return data
