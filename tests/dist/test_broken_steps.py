"""A step whose loss or gradient is not finite is refused by every rank, by name, before a weight changes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import checkpoint_jobs as jobs
import pytest
import training_jobs
from comparison import losses
from ranks import Ranks
from training_jobs import Setting

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one process": (1, {}),
    "TP2": (2, {"tensor_model_parallel_size": 2}),
    "PP2": (2, {"pipeline_model_parallel_size": 2}),
    "DP2": (2, {}),
    "DP2 distributed optimizer overlap": (
        2,
        {"use_distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True},
    ),
}


@pytest.mark.parametrize("kind", ["loss", "gradient"])
@pytest.mark.parametrize(
    ("size", "keys"),
    [
        pytest.param(*case, id=name, marks=() if name in ("PP2", "DP2 distributed optimizer overlap") else pytest.mark.slow)
        for name, case in LAYOUTS.items()
    ],
)
def test_the_culprit_is_named_weights_stay_and_training_can_go_on(
    ranks: Callable[[int], Ranks], models: dict[str, Path], size: int, keys: dict[str, Any], kind: str
) -> None:
    setting = Setting(str(models["tied"]), keys, micro_batch_size=1)
    reports = ranks(size).run(jobs.survive_a_broken_step, setting=setting, kind=kind)
    said = {report["said"] for report in reports}
    assert len(said) == 1
    text = said.pop()
    assert text.startswith("loss or gradient is not finite, no weight was changed; ")
    last = size - 1
    if kind == "loss":
        assert f"rank {last}: micro-batch 3 with rows [3]: loss nan" in text
    else:
        assert f"rank {last}: a gradient is not finite" in text
    assert all(report["untouched"] for report in reports)
    expected = ranks(size).run(training_jobs.train, setting=setting)
    assert losses(reports) == losses(expected)
    assert [report["grad_norm"] for report in reports] == [report["grad_norm"] for report in expected]
