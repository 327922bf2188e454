"""Supervised stages by their own run files: the simulated NPU with MindSpeed against the CPU, in float32."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from ranks import run_ranks

SOURCE = os.environ.get("MINDSPEED_SRC")
pytestmark = pytest.mark.skipif(not SOURCE, reason="MINDSPEED_SRC does not point to a checkout of MindSpeed core_r0.16.0")

#: (run file, its stage or another on the same data)
STAGES: list[tuple[str, dict[str, str]]] = [
    ("pretrain_tiny_cpu", {"stage": "pretrain"}),
    ("sft_tiny_cpu", {"stage": "sft"}),
    ("dpo_tiny_cpu", {"stage": "dpo"}),
    ("simpo_tiny_cpu", {"stage": "simpo"}),
    ("simpo_tiny_cpu", {"stage": "cpo"}),
    ("simpo_tiny_cpu", {"stage": "orpo"}),
    ("dpo_tiny_cpu", {"stage": "kto"}),
    ("orm_tiny_cpu", {"stage": "orm"}),
    ("prm_tiny_cpu", {"stage": "prm"}),
]


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stages")
    run_ranks("stages", 1, {"mode": "cpu", "folder": str(folder)})
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(("file", "keys"), STAGES, ids=[keys["stage"] for _, keys in STAGES])
def test_a_stage_trains_as_on_the_cpu(file: str, keys: dict[str, str], work: Path) -> None:
    settings = {"folder": str(work), "file": file, "steps": 3, **keys}
    (on_cpu,), (on_npu,) = (run_ranks("stages", 1, {"mode": mode, **settings}) for mode in ("cpu", "mindspeed"))
    assert len(on_npu) == 3
    for got, want in zip(on_npu, on_cpu, strict=True):
        assert got == pytest.approx(want, rel=1e-4)
