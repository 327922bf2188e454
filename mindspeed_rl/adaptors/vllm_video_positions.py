"""Rotary positions after a video in Qwen2.5-VL (`Qwen2_5_VLForConditionalGeneration`; vLLM 0.32, transformers 5.19).

vLLM continues the text after the largest position of a video, which may be one in time; transformers, and so the trainer,
continues after its rows and columns. The two differ where a video has more positions in time than in space, and log-probs of
rollout and trainer would too. It also multiplies the time in float64, where transformers has float32.

It can go when both agree; `tests/unit/adaptors` fails then.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from mindspeed_rl.config.model_metadata import VISION_VARIABLE


def compute_positions(model: Any, input_tokens: Sequence[int], mm_features: Sequence[Any]) -> tuple[Any, int]:
    """Return the positions [3, tokens] of a prompt, and what is added to the index of a later token."""
    import torch

    positions, first, start = [], 0, 0
    for offset, frames, rows, columns, time_step in model.iter_mm_grid_thw(mm_features):
        text = offset - start
        positions.append(np.broadcast_to(np.arange(text), (3, text)) + first)
        first += text
        times = (np.arange(frames, dtype=np.float32) * np.float32(time_step)).astype(np.int64)
        axes = np.stack(np.meshgrid(times, np.arange(rows), np.arange(columns), indexing="ij"))
        positions.append(axes.reshape(3, -1) + first)
        first += max(rows, columns)
        start = offset + frames * rows * columns
    text = len(input_tokens) - start
    positions.append(np.broadcast_to(np.arange(text), (3, text)) + first)
    return torch.from_numpy(np.concatenate(positions, axis=1)), first + text - len(input_tokens)


def apply() -> None:
    """Replace the positions in processes of runs with images; idempotent, and nothing in others."""
    if os.environ.get(VISION_VARIABLE) != "1":
        return
    from vllm.model_executor.models.qwen2_5_vl import Qwen2_5_VLForConditionalGeneration

    owner: Any = Qwen2_5_VLForConditionalGeneration
    owner.get_mrope_input_positions = compute_positions
