"""A service that trains full weights: numbers of transformers and AdamW, samplers in turn, exact resume, refusals."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from patience import patient
from test_lora_rl import save_model

PROGRAM = Path(__file__).with_name("service_full_program.py")

pytestmark = pytest.mark.slow


def test_full_weights_train_as_transformers_does_and_are_sampled_in_turn(tmp_path: Path) -> None:
    save_model(tmp_path / "model")
    (tmp_path / "work").mkdir()
    done = subprocess.run(
        [sys.executable, str(PROGRAM), str(tmp_path / "model"), str(tmp_path / "work")],
        env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True,
        text=True,
        timeout=patient(300),
        check=False,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    seen = json.loads(done.stdout.splitlines()[-1])
    # float32 against float64: AdamW divides small gradients by their own size, so that a step's rounding is of its size
    assert max(seen["steps"]) < 1e-3 < 0.05 < seen["moved"]
    assert seen["resumes"] and seen["of_folder"] and seen["unmoved"] and seen["differ"] and all(seen["in_turn"])
    assert seen["sampled"] == 0.0, "exact log-probs"
    assert seen["exported"] < 1e-4
    assert "full weights, no adapters" in seen["errors"][0]
    assert "all 1 models" in seen["errors"][1]
    assert "memory: " in seen["refused"] and "Not even one fits" in seen["refused"]
