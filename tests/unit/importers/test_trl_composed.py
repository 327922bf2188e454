"""Numbers of imports against what TRL's own parser makes of the same commands, where TRL is installed (envs/cpu/extras.sh)."""

from __future__ import annotations

from pathlib import Path

import importing
import pytest
import yaml

pytest.importorskip("trl", reason="TRL is in the environment of envs/cpu/extras.sh")

CASES = yaml.safe_load((Path(__file__).parents[2] / "data" / "import_cases" / "trl.yaml").read_text(encoding="utf-8"))["cases"]


@pytest.mark.slow
def test_numbers_are_those_of_its_parser(tmp_path: Path) -> None:
    compared = 0
    for case in CASES:
        outcome, run, variables = importing.judge("trl", tmp_path / "case.sh", 8, case["command"])
        if run is None or run.plans is None:
            continue
        processes = importing.count_trl_processes(case["command"], tmp_path, 8)
        composed = importing.compose_trl(case["command"], variables, tmp_path, processes)
        if composed is not None:
            compared += 1
            assert list(importing.find_different(composed, run.plans[1], outcome.accepted)) == [], case["file"]
    assert compared >= 20
