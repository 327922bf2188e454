"""vLLM generates with the pushed and proven weights of each family, and has the log-probs of the trainer after each update."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import rollout_jobs as jobs
import tiny_families
from ranks import Ranks
from training_jobs import Setting

KIND = "rollout"
_QUICK = ("glm4_moe",)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in _QUICK else pytest.mark.slow) for name in tiny_families.FAMILIES]
)
def test_the_engine_has_the_trained_weights_and_the_trainer_s_log_probs(
    ranks: Callable[[int], Ranks], tmp_path: Path, name: str
) -> None:
    setting = Setting(str(tiny_families.save(name, tmp_path)))
    (report,) = ranks(1).run(jobs.learn, setting=setting, infer_tp=1, timeout_s=400)
    assert len(report["proven"]) == 3 and min(report["proven"]) > 10
    assert max(report["differences"]) < 1e-4
    assert report["grad_norm"][0] > 0 and report["tokens"][0] != report["tokens"][2]
