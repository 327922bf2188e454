"""Weights of models with a vision tower go to vLLM, are proven there, and images give the same log-probs on both sides."""

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

HERE = Path(__file__).resolve().parent


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen2.5", "qwen3"])
def test_the_engine_computes_with_the_trainers_tower(name: str, tmp_path: Path) -> None:
    example = load_script("examples/vision/make_task.py")
    folder = tmp_path / "model"
    if name == "qwen3":
        tiny_vision.save_for_the_example(example, folder)
    else:
        example.save_model(folder)
    (tmp_path / "picture.png").write_bytes(example.draw_picture(random.Random(3))[0])
    environment = {**os.environ, "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "OMP_NUM_THREADS": "1"}
    environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(find_free_port())}
    done = subprocess.run(
        [sys.executable, str(HERE / "vision_rollout_program.py"), str(folder), str(tmp_path / "picture.png")],
        env=environment,
        capture_output=True,
        text=True,
        timeout=patient(600),
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["proven"] > 40
    assert max(report["image"], report["text"]) < 1e-5, report
