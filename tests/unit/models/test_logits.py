"""HF and Megatron compute the same logits from the same checkpoint, under every kind of split; two real processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import tiny_models
from patience import patient
from ports import find_free_port

HERE = Path(__file__).parent
QUICK = ("qwen2-tied", "qwen3-moe", "glm4")


def largest_differences(folder: Path, models: tuple[str, ...]) -> dict[str, float]:
    """Run both processes to the end and read what they found."""
    port = str(find_free_port())
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "TRANSFORMERS_VERBOSITY": "error"}
    logs = [(folder / f"log{rank}").open("w+") for rank in range(2)]
    processes = [
        subprocess.Popen(
            [sys.executable, str(HERE / "compare_logits.py"), str(rank), str(folder), port, *models],
            env=environment,
            stdout=logs[rank],
            stderr=subprocess.STDOUT,
        )
        for rank in range(2)
    ]
    try:
        codes = [process.wait(timeout=patient(400)) for process in processes]
    finally:
        for process in processes:
            process.kill()
    if codes != [0, 0]:
        logs[0].seek(0)
        pytest.fail(f"exit codes {codes}; rank 0 said:\n{logs[0].read()[-4000:]}")
    return json.loads((folder / "differences.json").read_text())


def assert_equal(differences: dict[str, float], models: tuple[str, ...]) -> None:
    for name in models:
        assert f"{name}/tp1" in differences and f"{name}/tp2" in differences
    assert {case: value for case, value in differences.items() if not value <= 1e-4} == {}


def test_a_tied_an_expert_and_a_sandwich_model_equal_hf_under_every_split(tmp_path: Path) -> None:
    assert_equal(largest_differences(tmp_path, QUICK), QUICK)


@pytest.mark.slow
def test_every_architecture_equals_hf_under_every_split(tmp_path: Path) -> None:
    models = tuple(name for name in tiny_models.CONFIGS if name not in QUICK)
    assert_equal(largest_differences(tmp_path, models), models)
