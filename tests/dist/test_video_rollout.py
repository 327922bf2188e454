"""vLLM reads the same frames, tokens and positions of videos as the trainer, alone and with images in the same prompt."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import tiny_vision
from patience import patient
from ports import find_free_port
from scripts import load_script
from video_files import write_video

HERE = Path(__file__).resolve().parent


def answer(name: str, tmp_path: Path, *words: str) -> dict[str, float]:
    """What the program prints for a family: proven parameters, those in int8, and differences of log-probs by prompt."""
    example = load_script("examples/vision/make_task.py")
    folder = tmp_path / "model"
    if name != "qwen2.5":
        tiny_vision.save_for_the_example(example, folder, experts=name == "qwen3_moe")
    else:
        example.save_model(folder)
    path = folder / "video_preprocessor_config.json"
    size = {"shortest_edge": 784, "longest_edge": 56 * 56 if name == "qwen2.5" else 6 * 56 * 56}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"size": size}))
    videos = [
        write_video(tmp_path / "first.mp4", 41, fps=10.0),
        write_video(tmp_path / "second.avi", 99, 48, 80, fps=11.0, seed=1),
    ]
    (tmp_path / "picture.png").write_bytes(example.draw_picture(random.Random(3))[0])
    environment = {**os.environ, "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "OMP_NUM_THREADS": "1"}
    environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(find_free_port())}
    command = [sys.executable, HERE / "video_rollout_program.py", folder, *videos, tmp_path / "picture.png", *words]
    done = subprocess.run(list(map(str, command)), env=environment, capture_output=True, text=True, timeout=patient(600))
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    report = json.loads(done.stdout.splitlines()[-1])
    assert report.pop("proven") > 40
    return report


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen2.5", "qwen3"])
def test_the_engine_answers_about_the_trainers_frames(name: str, tmp_path: Path) -> None:
    report = answer(name, tmp_path)
    assert report.pop("int8") == 0
    assert report.keys() == {"v", "viv", "iv", ""} and max(report.values()) < 1e-5, report


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "quantization"),
    [
        *(("qwen2.5", "int8"), ("qwen3", "int8"), ("qwen3_moe", "int8"), ("qwen2.5", "mxfp8"), ("qwen3", "w4a8")),
        *(pytest.param(*words, marks=pytest.mark.extra) for words in (("qwen3", "mxfp8"), ("qwen3_moe", "mxfp8"))),
        *(pytest.param(*words, marks=pytest.mark.extra) for words in (("qwen2.5", "w4a8"), ("qwen3_moe", "w4a8"))),
    ],
)
def test_the_quantized_language_model_answers_about_frames_of_the_tower_in_float32(
    name: str, quantization: str, tmp_path: Path
) -> None:
    report = answer(name, tmp_path, quantization)
    assert report.pop("int8") == 3 * 4  # of each layer: query, key and value; output; gate and up; down, of an MLP or experts
    # some token of a model with experts chooses another one
    most = (0.3 if name == "qwen3_moe" else 0.1) * {"int8": 1, "mxfp8": 4, "w4a8": 8}[quantization]
    assert report.keys() == {"v", "viv", "iv", ""} and 1e-5 < min(report.values()) and max(report.values()) < most, report
