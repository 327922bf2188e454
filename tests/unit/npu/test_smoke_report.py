"""What tools/npu_smoke.py accepts as proof in the metrics of its short run."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

SPEC = importlib.util.spec_from_file_location("npu_smoke", Path(__file__).parents[3] / "tools" / "npu_smoke.py")
npu_smoke = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(npu_smoke)


def metrics(path: Path, *changes: dict[str, float]) -> Path:
    """A metrics file with one line for each of the changes to a good iteration."""
    good = {
        "rollout/proven_parameters": 30.0,
        "rollout/log_probs_diff_max": 0.002,
        "actor/grad_norm": 1.5,
        "timing/all": 2.0,
    }
    lines = [{**good, "rollout/weight_version": float(version), **change} for version, change in enumerate(changes)]
    path.write_text("\n".join(map(json.dumps, lines)) + "\n")
    return path


def test_three_proven_iterations_pass_and_are_summed_up(tmp_path: Path) -> None:
    text = npu_smoke.check_iterations(metrics(tmp_path / "m.jsonl", {}, {"rollout/log_probs_diff_max": 0.03}, {}))
    assert "30 parameters" in text and "0.03" in text


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ([{}, {}], "2 of 3 iterations"),
        ([{}, {"rollout/proven_parameters": 0.0}, {}], "weight updates"),
        ([{}, {"rollout/weight_version": 0.0}, {}], "versions"),
        ([{}, {"actor/grad_norm": 0.0}, {}], "weights did not change"),
    ],
)
def test_a_run_that_proves_less_fails(tmp_path: Path, changes: list[dict[str, float]], reason: str) -> None:
    with pytest.raises(SystemExit, match=reason):
        npu_smoke.check_iterations(metrics(tmp_path / "m.jsonl", *changes))
