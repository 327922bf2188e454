"""A reference whose layers come from host memory has, on the simulated NPU, every number of one that stays on the device."""

from __future__ import annotations

import os
from typing import Any

import pytest
from ranks import run_ranks

SOURCE = os.environ.get("MINDSPEED_SRC")
RESIDENT = {"stream_ref_weights": False}
STREAMED = {"stream_ref_weights": True}


def passes(size: int, layout: dict[str, Any], model: str = "qwen2") -> list[Any]:
    """Reports of the reference's passes on each rank."""
    settings = {"mode": "mindspeed" if SOURCE else "npu", "bf16": True, "model": model, "steps": 0, "reference": True}
    return run_ranks("engine", size, settings | {"layout": layout}, timeout_s=600)


def check(size: int, layout: dict[str, Any], model: str = "qwen2") -> None:
    resident, streamed = (passes(size, layout | keys, model) for keys in (RESIDENT, STREAMED))
    assert "log_probs" in resident[-1]  # of a pipeline the last stage has them
    for ours, theirs in zip(streamed, resident, strict=True):
        assert ours.get("log_probs") == theirs.get("log_probs")
        assert ours["reference"]["passes"] == theirs["reference"]["passes"]
        weights = theirs["reference"]["resident"]["weights"]
        assert ours["reference"]["resident"]["weights"] == 0 < weights
        (before, peak, after), (before_resident, peak_resident, _) = (each["reference"]["memory"] for each in (ours, theirs))
        # blocks of the allocator are of 512 bytes
        assert abs(after - before) < 0.1 * weights and before_resident - before >= 0.9 * weights
        # some of the layers are never there at the same time
        assert peak < peak_resident or layout.get("pipeline_model_parallel_size", 1) > 1


def test_the_numbers_are_those_of_a_resident_reference() -> None:
    check(1, {})


@pytest.mark.slow
@pytest.mark.skipif(not SOURCE, reason="MINDSPEED_SRC does not point to a checkout of MindSpeed core_r0.16.0")
@pytest.mark.parametrize(
    ("layout", "model"),
    [
        ({"tensor_model_parallel_size": 2, "sequence_parallel": True}, "qwen2"),
        ({"pipeline_model_parallel_size": 2, "num_layers_per_virtual_pipeline_stage": 1}, "qwen2"),
        ({"expert_model_parallel_size": 2}, "qwen3_moe"),
        ({"tensor_model_parallel_size": 2}, "deepseek3"),
    ],
    ids=str,
)
def test_so_they_are_over_two_ranks(layout: dict[str, Any], model: str) -> None:
    check(2, layout, model)
