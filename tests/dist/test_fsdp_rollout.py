"""vLLM generates with the pushed and proven weights of the engine of transformers' modules, and has its log-probs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import rollout_jobs as jobs
import tiny_families
from ranks import Ranks
from training_jobs import Setting

KIND = "rollout"

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(("name", "size", "infer_tp"), [("qwen3", 1, 1), ("qwen3", 2, 2), ("qwen2", 2, 1), ("phi3", 2, 1)])
def test_weights_arrive_and_log_probs_agree_after_each_update(
    ranks: Callable[[int], Ranks], tmp_path: Path, name: str, size: int, infer_tp: int
) -> None:
    setting = Setting(str(tiny_families.save(name, tmp_path / name)), {"engine": "fsdp"})
    for report in ranks(size).run(jobs.learn, setting=setting, infer_tp=infer_tp, timeout_s=240):
        assert len(report["proven"]) == 3 and min(report["proven"]) > 10
        assert max(report["differences"]) < 1e-4
        assert report["grad_norm"][0] > 0 and report["tokens"][0] != report["tokens"][2]
