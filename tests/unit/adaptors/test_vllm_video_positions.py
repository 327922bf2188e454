"""Positions after a video: those of transformers in vLLM, whose own still differ."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import SimpleNamespace

import pytest

from mindspeed_rl.adaptors.vllm_video_positions import compute_positions


def test_text_goes_on_after_rows_and_columns_of_a_video_and_its_time_counts_in_steps() -> None:
    # text 0 1; a video of 3 times 1 x 2 at 2, in steps of 2.8; text from 4 on; an image of 2 x 1; text from 7 on
    media = [(2, 3, 1, 2, 2.8), (9, 1, 2, 1, 1.0)]
    model = SimpleNamespace(iter_mm_grid_thw=lambda features: iter(features))
    positions, delta = compute_positions(model, range(13), media)
    assert positions.tolist() == [
        [0, 1, 2, 2, 4, 4, 7, 7, 4, 5, 5, 7, 8],
        [0, 1, 2, 2, 2, 2, 2, 2, 4, 5, 6, 7, 8],
        [0, 1, 2, 3, 2, 3, 2, 3, 4, 5, 5, 7, 8],
    ]
    assert delta == 9 - 13  # the next token has the position 9


def test_vllm_and_transformers_still_differ() -> None:
    for package, file, text in (
        ("vllm", "model_executor/models/qwen2_5_vl.py", "st_idx = llm_pos_ids_list[-1].max() + 1"),
        ("transformers", "models/qwen2_5_vl/modeling_qwen2_5_vl.py", "current_pos += max(grid_thw[1], grid_thw[2])"),
    ):
        spec = importlib.util.find_spec(package)
        if spec is None or spec.origin is None:
            pytest.skip(f"{package} is not installed")
        assert text in (Path(spec.origin).parent / file).read_text(), "adaptors/vllm_video_positions.py can go"
