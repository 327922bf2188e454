"""Prompts with videos in older releases of vLLM: as the models' processors write them; the newer ones do so themselves."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest

from mindspeed_rl.adaptors.vllm_video_prompts import keep_marks, split_metadata


def test_the_marks_of_a_video_stay_around_its_frames() -> None:
    details = SimpleNamespace(full=[40, 3, 6, 6, 4, 41, 3, 6, 6, 4])
    keep_marks(details, 3, 4)
    assert details.full == [3, 40, 3, 6, 6, 4, 41, 3, 6, 6, 4, 4]


def test_frames_and_their_rate_are_two_arguments() -> None:
    @dataclass
    class Metadata:
        fps: float

    data = {"images": ["i"], "videos": [("frames", {"fps": 2.0, "do_sample_frames": False}), ("others", {"fps": 0.5})]}
    expected = {"images": ["i"], "videos": ["frames", "others"], "video_metadata": [Metadata(2.0), Metadata(0.5)]}
    assert split_metadata(data, Metadata) == expected
    assert split_metadata({"images": ["i"]}, Metadata) == {"images": ["i"]}


def test_newer_releases_are_left_as_they_are() -> None:
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        pytest.skip("vllm is not installed")
    models = Path(spec.origin).parent / "model_executor" / "models"
    if not (models / "qwen2_5_vl.py").is_file():
        pytest.skip("vllm is a part of it")
    # what the adaptor looks for: the release has its own form of all three
    assert "video_needs_metadata=True" in (models / "qwen2_5_vl.py").read_text()
    assert 'target="<|vision_start|><|video_pad|><|vision_end|>"' not in (models / "qwen3_vl.py").read_text()
