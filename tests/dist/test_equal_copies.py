"""After every step all copies of a parameter have the same bits, whatever the optimizer and the layout."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import copy_jobs
import pytest
import tiny_prediction
from ranks import Ranks
from slow_layouts import EP, MOE_RECOMPUTE, PP, RING, SP, ULYSSES, VPP
from training_jobs import Setting

OPTIMIZERS = {
    "adam": {},
    "distributed adam": {"use_distributed_optimizer": True},
    "muon": {"optimizer": "muon", "muon_extra_scale_factor": 0.2, "lr": 1e-2},
    "muon by blocks": {"optimizer": "muon", "muon_extra_scale_factor": 0.2, "lr": 1e-2, "muon_tp_mode": "blockwise"},
}
_PREDICTING = {"mtp_num_layers": 1, "mtp_loss_scaling_factor": 0.3}
_DETACHED = _PREDICTING | {"mtp_detach_heads": True}
#: model, whose name says where it has prediction layers, and keys
LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "PP2 tied": ("tied", PP),
    "VPP tied": ("tied", VPP),
    "PP2 predicting": ("predicting mimo", PP | _PREDICTING),
    "PP2 predicting detached": ("predicting mimo", PP | _DETACHED),
    "PP2 predicting tied": ("predicting qwen3_5_tied", PP | _PREDICTING | {"num_layer_list": "2,1"}),
    "PP2 predicting tied detached": ("predicting qwen3_5_tied", PP | _DETACHED | {"num_layer_list": "1,2"}),
    "PP2 predicting experts": ("predicting glm4_moe", PP | _PREDICTING),
    "TP2 SP predicting": ("predicting qwen3_5", SP | _PREDICTING),
    "EP2 predicting": ("predicting glm4_moe", EP | _PREDICTING),
    "TP2": ("tied", {"tensor_model_parallel_size": 2}),
    "TP2 SP": ("tied", SP),
    "TP2 SP hybrid": ("hybrid", SP),
    "TP2 SP latent": ("deepseek", SP),
    "TP2 SP experts": ("moe", SP | MOE_RECOMPUTE),
    "EP2": ("moe", EP),
    "EP2 PP2": ("moe_mixed", EP | PP),
    "DP2": ("untied", {}),
    "CP2 ring": ("tied", RING),
    "CP2 Ulysses": ("hybrid", ULYSSES),
}
_QUICK = {
    ("muon", "PP2 predicting"),
    ("muon", "PP2 predicting tied"),
    ("adam", "PP2 tied"),
    ("muon by blocks", "TP2 SP experts"),
}


@pytest.fixture(scope="module")
def folders(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """(name of a model) -> its folder, with prediction layers where the name says so."""
    known = dict(models)

    def find(name: str) -> Path:
        if name not in known:
            family = name.removeprefix("predicting ")
            known[name] = tiny_prediction.Predicting.build(family).save(tmp_path_factory.mktemp(family))
        return known[name]

    return find


@pytest.mark.parametrize(
    ("optimizer", "layout"),
    [
        pytest.param(optimizer, layout, marks=() if (optimizer, layout) in _QUICK else pytest.mark.slow)
        for optimizer in OPTIMIZERS
        for layout in LAYOUTS
    ],
)
def test_copies_of_a_parameter_are_equal_after_every_step(
    ranks: Callable[[int], Ranks], folders: Callable[[str], Path], optimizer: str, layout: str
) -> None:
    name, keys = LAYOUTS[layout]
    size = 4 if layout == "EP2 PP2" else 2
    reports = ranks(size).run(copy_jobs.train, setting=Setting(str(folders(name)), OPTIMIZERS[optimizer] | keys), timeout_s=240)
    for step in range(3):
        copies: dict[Any, list[str]] = {}
        for report in reports:
            for weight, digests in report[step].items():
                copies.setdefault(weight, []).extend(digests)
        assert max(map(len, copies.values())) > 1, "no parameter has a copy: the test shows nothing"
        apart = [weight for weight, digests in copies.items() if len(set(digests)) > 1]
        assert not apart, f"step {step + 1}: {apart}"
