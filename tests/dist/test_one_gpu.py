"""One process on a GPU computes what it computes on the CPU, through the same code."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import one_device
import pytest
import torch

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here that torch can use"),
]
_PROGRAM = Path(one_device.__file__)


def assert_same_figures(cpu: dict[str, Any], gpu: dict[str, Any]) -> None:
    """Compare what `one_device` wrote on either kind: to 1e-4 in float32, loosely where a job trains in bfloat16."""
    wrong = []
    for title, expected in cpu.items():
        got, tolerance = gpu[title], 0.02 if title.endswith("bf16") else 1e-4
        try:
            assert got["grad_norm"] == pytest.approx(expected["grad_norm"], rel=tolerance)
            for step, other in zip(got["metrics"], expected["metrics"], strict=True):
                assert step == pytest.approx(other, rel=tolerance, abs=tolerance)
            for name, (norm, product) in expected["weights"].items():
                assert got["weights"][name] == pytest.approx([norm, product], abs=tolerance * norm), name
        except (AssertionError, TypeError) as error:  # a text stands where a job raised
            wrong.append(f"{title}: {got if isinstance(got, str) else error}")
    assert not wrong, "\n".join(wrong)


def test_losses_gradients_and_weights_are_those_of_the_cpu(tmp_path: Path) -> None:
    one_device.save_models(tmp_path)
    files = [tmp_path / "cpu.json", tmp_path / "gpu.json"]
    for kind, file in zip(("cpu", "cuda"), files):
        subprocess.run([sys.executable, _PROGRAM, kind, tmp_path, file], check=True, timeout=600)
    assert_same_figures(*(json.loads(file.read_text()) for file in files))
