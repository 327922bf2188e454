"""A bfloat16 engine computes logits in float32 where it is asked to; fails on the day vLLM's own product does."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from patience import patient


def _sample(folder: Path, head: str, tied: str) -> dict[str, float]:
    program = Path(__file__).with_name("float32_head.py")
    done = subprocess.run(
        [sys.executable, str(program), str(folder), head, tied], capture_output=True, text=True, timeout=patient(300)
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("tied", ["tied", "untied"])
def test_log_probs_of_the_engine_are_those_of_unrounded_logits(tmp_path: Path, tied: str) -> None:
    found = _sample(tmp_path, "float32", tied)
    assert found["largest"] > 10
    assert found["logits"] < 1e-4 and found["exact"] < 1e-4 and found["trainer"] < 1e-4


def test_without_it_logits_are_rounded_to_bfloat16(tmp_path: Path) -> None:
    found = _sample(tmp_path, "bfloat16", "untied")
    assert found["logits"] > 0.01
