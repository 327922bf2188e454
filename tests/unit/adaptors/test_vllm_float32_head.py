"""A bfloat16 engine computes logits in float32 where it is asked to; fails on the day vLLM's own product does."""

from __future__ import annotations

from pathlib import Path

import pytest
from vllm_program import run_program


def _sample(folder: Path, head: str, tied: str) -> dict[str, float]:
    return run_program(Path(__file__).with_name("float32_head.py"), folder, head, tied)


@pytest.mark.parametrize("tied", ["tied", "untied"])
def test_log_probs_of_the_engine_are_those_of_unrounded_logits(tmp_path: Path, tied: str) -> None:
    result = _sample(tmp_path, "float32", tied)
    assert result["largest"] > 10
    assert result["logits"] < 1e-4 and result["exact"] < 1e-4 and result["trainer"] < 1e-4


def test_without_it_logits_are_rounded_to_bfloat16(tmp_path: Path) -> None:
    result = _sample(tmp_path, "bfloat16", "untied")
    assert result["logits"] > 0.01
