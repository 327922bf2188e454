"""vLLM generates with the pushed and proven weights of the engine of transformers' modules, and has its log-probs."""

from __future__ import annotations

from pathlib import Path

import pytest
import rollout_jobs as jobs
import tiny_families
from ranks import Ranks
from training_jobs import Setting

pytestmark = pytest.mark.slow


_DENSE = [("qwen3", 1, 1), ("qwen3", 2, 2), ("qwen2", 2, 1), ("phi3", 2, 1)]
_EXPERTS = [("qwen3_moe", 2, 1), ("deepseek_v3", 2, 2), ("glm4_moe", 1, 1), ("gpt_oss", 2, 1)]


@pytest.mark.parametrize(("name", "size", "infer_tp"), [*_DENSE, *_EXPERTS])
def test_weights_arrive_and_log_probs_agree_after_each_update(tmp_path: Path, name: str, size: int, infer_tp: int) -> None:
    setting = Setting(str(tiny_families.save(name, tmp_path / name)), {"engine": "fsdp", "moe_aux_loss_coeff": 0.0})
    group = Ranks(size, "rollout")  # of its own: vLLM's groups have one size in a process
    reports = group.run(jobs.learn, setting=setting, infer_tp=infer_tp, timeout_s=240)
    group.close()
    for report in reports:
        assert len(report["proven"]) == 3 and min(report["proven"]) > 10
        assert max(report["differences"]) < 1e-4
        assert report["grad_norm"][0] > 0 and report["tokens"][0] != report["tokens"][2]


@pytest.mark.parametrize("keys", [{"fsdp_size": 1}, {"context_parallel_size": 2}])
def test_weights_of_other_layouts_arrive(tmp_path: Path, keys: dict[str, int]) -> None:
    setting = Setting(str(tiny_families.save("qwen3", tmp_path)), {"engine": "fsdp", **keys})
    group = Ranks(2, "rollout")
    reports = group.run(jobs.learn, setting=setting, infer_tp=1, timeout_s=240)
    group.close()
    assert all(max(report["differences"]) < 1e-4 and min(report["proven"]) > 10 for report in reports)


def test_experts_of_which_a_rank_has_none_arrive_too(tmp_path: Path) -> None:
    setting = Setting(str(tiny_families.save("qwen3_moe", tmp_path)), {"engine": "fsdp", "moe_aux_loss_coeff": 0.0})
    group = Ranks(3, "rollout")  # four experts: two, two and none
    reports = group.run(jobs.learn, setting=setting, infer_tp=1, timeout_s=240)
    group.close()
    assert all(max(report["differences"]) < 1e-4 and min(report["proven"]) > 10 for report in reports)
