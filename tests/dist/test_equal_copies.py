"""After every step all copies of a parameter have the same bits, whatever the optimizer and the layout.

A run with `check_weight_copies_interval` compares them itself, and names the copy that was changed.
"""

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


_LORA = {"lora_target_modules": ["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"], "lora_r": 4}
_NORM, _DOWN = "model.layers.0.input_layernorm.weight", "model.layers.1.mlp.down_proj.weight"
_A, _B, _QUERY = "lora_A.default.weight", "lora_B.default.weight", "model.layers.0.self_attn.q_proj.weight"
_TP = {"tensor_model_parallel_size": 2}
#: model, keys, changed weight and matrix of its adapter -> what the error names
CHANGES: dict[str, tuple[str, dict[str, Any], str, str, str]] = {
    "DP2": ("untied", {}, _DOWN, "", _DOWN),
    "TP2": ("tied", _TP, _NORM, "", _NORM),
    "PP2 tied": ("tied", PP, "model.embed_tokens.weight", "", "model.embed_tokens.weight"),
    "VPP tied": ("tied", VPP, "model.embed_tokens.weight", "", "model.embed_tokens.weight"),
    "PP2 predicting": ("predicting mimo", PP | _PREDICTING, "model.embed_tokens.weight", "", "model.embed_tokens.weight"),
    "EP2": ("moe", EP, "model.layers.0.mlp.gate.weight", "", "model.layers.0.mlp.gate.weight"),
    "experts, DP2": ("moe", {}, "model.layers.1.mlp.experts.3.down_proj.weight", "", "experts.3.down_proj.weight"),
    "CP2": ("tied", RING, _DOWN, "", _DOWN),
    "adapters, TP2": ("tied", SP | _LORA, _QUERY, "A", f"{_QUERY} and 2 more in one, {_A}"),
    "adapters, DP2": ("tied", _LORA, _DOWN, "B", f"{_DOWN}, {_B}"),
    "adapters, frozen": ("tied", _LORA, _NORM, "", _NORM),
}


_QUICK_CHANGES = {"DP2", "TP2", "PP2 tied", "EP2", "adapters, TP2"}


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=() if case in _QUICK_CHANGES else pytest.mark.slow) for case in CHANGES]
)
def test_a_changed_copy_is_named_on_every_rank_at_the_next_comparison(
    ranks: Callable[[int], Ranks], folders: Callable[[str], Path], case: str
) -> None:
    name, keys, changed, adapter, named = CHANGES[case]
    setting = Setting(str(folders(name)), keys)
    errors = ranks(2).run(copy_jobs.change_copy, setting=setting, changed=changed, adapter=adapter, timeout_s=240)
    assert errors[0] == errors[1]
    first, second, third, fourth = errors[0]
    assert first is third is None  # every second step
    for step, error in ((2, second), (4, fourth)):
        assert error is not None
        assert error.startswith(f"after optimizer step {step} ranks have different copies of a weight")
        assert f"{named}: rank 0 against rank 1" in error


@pytest.mark.parametrize("case", ["TP2", "TP2 adapters"])
def test_shards_of_one_weight_are_no_copies(ranks: Callable[[int], Ranks], folders: Callable[[str], Path], case: str) -> None:
    keys, adapter = (_TP | _LORA, "A") if case == "TP2 adapters" else (_TP, "")
    setting = Setting(str(folders("tied")), keys)
    # of a layer that is split along its inputs
    assert ranks(2).run(copy_jobs.change_copy, setting=setting, changed=_DOWN, adapter=adapter, steps=2) == [[None, None]] * 2


def test_weights_that_another_step_gathers_are_compared_too(
    ranks: Callable[[int], Ranks], folders: Callable[[str], Path]
) -> None:
    late = {"use_distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True}
    setting = Setting(str(folders("tied")), late)
    # the gather gives every rank the owner's values
    assert ranks(2).run(copy_jobs.change_copy, setting=setting, changed=_DOWN) == [[None] * 4] * 2
