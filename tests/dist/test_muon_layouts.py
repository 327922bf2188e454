"""Muon makes the same update under every layout: a matrix is put together before it is orthogonalized."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import training_jobs as jobs
from comparison import assert_same_training, losses
from ranks import Ranks
from slow_layouts import EP, PP, SP, marked
from training_jobs import Setting

MUON = {"optimizer": "muon", "muon_extra_scale_factor": 0.2}
LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "TP2 SP": ("tied", SP),
    "DP2": ("tied", {}),
    "PP2": ("untied", PP),
    "TP2 experts": ("moe", SP),
    "EP2": ("moe", EP),
}


@pytest.mark.parametrize(("name", "keys"), marked(LAYOUTS, LAYOUTS.keys() - {"TP2 SP"}))
def test_two_processes_train_as_one_does(
    ranks: Callable[[int], Ranks], models: dict[str, Path], name: str, keys: dict[str, Any]
) -> None:
    reports = ranks(1).run(jobs.train, setting=Setting(str(models[name]), MUON))
    assert_same_training(ranks(2).run(jobs.train, setting=Setting(str(models[name]), MUON | keys)), reports)
    assert losses(reports)[-1] < losses(reports)[0]


@pytest.mark.slow
def test_blockwise_is_another_update(ranks: Callable[[int], Ranks], models: dict[str, Path]) -> None:
    reports = ranks(1).run(jobs.train, setting=Setting(str(models["tied"]), MUON))
    blocks = ranks(2).run(jobs.train, setting=Setting(str(models["tied"]), MUON | SP | {"muon_tp_mode": "blockwise"}))
    with pytest.raises(AssertionError):
        assert_same_training(blocks, reports)
