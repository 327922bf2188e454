"""vLLM generates with the pushed and proven weights of each family, and has the log-probs of the trainer after each update."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import rollout_jobs as jobs
import tiny_families
from megatron_release import GROUPED_EXPERTS
from ranks import Ranks
from slow_layouts import EP, SP
from training_jobs import Setting

KIND = "rollout"
_QUICK = ("glm4_moe",)


_BF16 = "vLLM's CPU kernel of gated delta nets takes bfloat16 alone: tests/e2e/test_hybrid_run.py"
#: family, or layout and family -> why its rollout does not work here
_BROKEN = {"qwen3_5": _BF16, "qwen3_next": _BF16}


def _case(*values: str, quick: bool = False) -> Any:
    name = "-".join(values)
    reason = _BROKEN.get(name) or _BROKEN.get(values[-1])
    marks = [] if quick else [pytest.mark.slow]
    return pytest.param(*values, id=name, marks=marks + ([pytest.mark.xfail(reason=reason, strict=True)] if reason else []))


@pytest.mark.parametrize("name", [_case(name, quick=name in _QUICK) for name in tiny_families.FAMILIES])
def test_the_engine_has_the_trained_weights_and_the_trainer_s_log_probs(tmp_path: Path, name: str) -> None:
    setting = Setting(str(tiny_families.save(name, tmp_path)))
    alone = Ranks(1, "rollout")  # a process of its own: what vLLM set up for a model without experts does for none with them
    try:
        (report,) = alone.run(jobs.learn, setting=setting, infer_tp=1, timeout_s=400)
    finally:
        alone.close()
    assert len(report["proven"]) == 3 and min(report["proven"]) > 10
    assert max(report["differences"]) < 1e-4
    assert report["grad_norm"][0] > 0 and report["tokens"][0] != report["tokens"][2]


@pytest.mark.parametrize(
    ("layout", "name"),
    [
        _case(layout, name)
        for layout, names in (("TP2", tiny_families.FAMILIES), ("EP2", tiny_families.EXPERTS))
        for name in names
    ],
)
def test_engines_over_two_ranks_have_the_weights_and_the_trainer_s_log_probs(tmp_path: Path, layout: str, name: str) -> None:
    training = SP if layout == "TP2" else EP | {"moe_grouped_gemm": GROUPED_EXPERTS and name != "gpt_oss"}
    setting = Setting(str(tiny_families.save(name, tmp_path)), training | tiny_families.KEYS.get(name, {}))
    engine = {"infer_tp": 2} if layout == "TP2" else {"infer_tp": 1, "sharing": 2}
    group = Ranks(2, "rollout")
    try:
        for report in group.run(jobs.learn, setting=setting, timeout_s=400, **engine):
            assert len(report["proven"]) == 3 and min(report["proven"]) > 10
            assert max(report["differences"]) < 1e-4
            assert report["grad_norm"][0] > 0 and report["tokens"][0] != report["tokens"][2]
    finally:
        group.close()
