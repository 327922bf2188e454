"""tools/npu_smoke.sh, the command for the first person with hardware, on the simulated NPU as far as that goes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from ranks import run_ranks
from test_engine import losses

ROOT = Path(__file__).parents[2]


def smoke(report: Path, steps: str) -> tuple[int, str]:
    command = ["bash", str(ROOT / "tools" / "npu_smoke.sh"), "--only", steps, "--report", str(report)]
    ended = subprocess.run(command, env={**os.environ, "PYTHON": sys.executable}, capture_output=True, text=True)
    return ended.returncode, report.read_text()


def test_the_smoke_script_passes_and_reports_device_and_collectives(tmp_path: Path) -> None:
    code, report = smoke(tmp_path / "report.md", "device,hccl")
    assert code == 0, report
    assert report.count("| passed |") == 2 and "2 ranks agree" in report and "**simulated**" in report


@pytest.mark.slow
@pytest.mark.skipif("MINDSPEED_SRC" not in os.environ, reason="MINDSPEED_SRC does not point to a checkout of MindSpeed")
def test_the_smoke_script_compares_training_steps_with_the_cpu(tmp_path: Path) -> None:
    code, report = smoke(tmp_path / "report.md", "engine")
    assert code == 0, report
    assert report.count("| passed |") == 3


@pytest.mark.slow
@pytest.mark.skipif("MINDSPEED_SRC" not in os.environ, reason="MINDSPEED_SRC does not point to a checkout of MindSpeed")
def test_the_smoke_script_compares_rollout_and_trainer_with_experts_over_dies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NPU_SIM_MEMORY_GIB", "4")
    code, report = smoke(tmp_path / "report.md", "experts")
    assert code == 0, report
    assert report.count("| passed |") == 2


@pytest.mark.slow
def test_a_failing_step_is_reported_and_does_not_stop_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NPU_SIM_DEVICES", "1")  # the second rank has no device
    code, report = smoke(tmp_path / "report.md", "hccl,device")
    assert code == 1 and "**FAILED**" in report and "| passed |" in report


def test_the_numbers_that_the_smoke_script_compares_with_are_the_cpus() -> None:
    pinned = json.loads((ROOT / "tests" / "data" / "npu" / "engine_steps.json").read_text())
    got = losses(run_ranks("engine", 1, {"mode": "cpu", "steps": 3}))
    assert got == [pytest.approx(step, rel=1e-4) for step in pinned]
