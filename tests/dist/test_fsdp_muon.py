"""Muon under FSDP2 moves the matrices of a model as Megatron's does, whatever ranks have of them."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import fsdp_jobs
import numpy as np
import pytest
import tiny_families
import torch
import training_jobs
from ranks import Ranks
from safetensors.torch import load_file
from training_jobs import Setting

_KEYS = {
    **{"optimizer": "muon", "muon_extra_scale_factor": 0.2},
    **{"moe_aux_loss_coeff": 0.0, "moe_router_bias_update_rate": 0.0},
}
#: family, ranks, keys: fused projections, latent attention, experts, transposed ones, gates and delta nets
_RUNS: list[tuple[str, int, dict[str, Any]]] = [
    ("qwen3", 1, {}),
    ("qwen3", 2, {"muon_use_nesterov": True, "muon_scale_mode": "unit_rms_norm"}),
    ("phi3", 3, {}),
    ("gemma2", 2, {"muon_split_qkv": False, "context_parallel_size": 2}),
    ("deepseek_v3", 2, {"swap_optimizer": True}),
    ("qwen3_moe", 4, {"fsdp_size": 2}),
    ("qwen3_next", 1, {}),
    ("gpt_oss", 2, {}),
]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """Name of a family -> the folder of its tiny model."""
    return cache(lambda name: str(tiny_families.save(name, tmp_path_factory.mktemp(name))))


def _divide_stacks(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors with those of each expert in place of gpt-oss' stacks, [experts, in, out], gate and up in turns."""
    result: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        layer, stacked, kind = name.rpartition(".experts.")
        if not stacked or ".weight" in kind:
            result[name] = tensor
            continue
        end = "bias" if kind.endswith("_bias") else "weight"
        for expert, part in enumerate(tensor):
            prefix, rows = f"{layer}.experts.{expert}", part.t() if end == "weight" else part
            parts = {"gate": rows[::2], "up": rows[1::2]} if kind.startswith("gate_up") else {"down": rows}
            result |= {f"{prefix}.{which}_proj.{end}": value for which, value in parts.items()}
    return result


@pytest.mark.parametrize(("name", "size", "keys"), _RUNS)
def test_matrices_move_as_on_megatron(
    ranks: Callable[[int], Ranks], folders: Callable[[str], str], name: str, size: int, keys: dict[str, Any]
) -> None:
    layout = ("context_parallel_size", "fsdp_size", "swap_optimizer")
    alone = {key: value for key, value in keys.items() if key not in layout}
    (expected,) = ranks(1).run(training_jobs.train, setting=Setting(folders(name), _KEYS | alone), steps=3)
    report, *_ = ranks(size).run(fsdp_jobs.train, setting=Setting(folders(name), _KEYS | keys), steps=3)
    assert report["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-4)
    start = _divide_stacks(load_file(Path(folders(name), "model.safetensors")))
    moved = 0
    for tensor, weight in expected["weights"].items():
        change = np.linalg.norm(weight - start[tensor].numpy())
        # small singular values of a momentum are raised to 1, and with them what is rounding
        assert np.linalg.norm(report["weights"][tensor] - weight) <= 2e-3 * change + 1e-7, tensor
        moved += change > 0
    assert moved > len(expected["weights"]) // 2


def test_a_run_resumes_exactly_also_on_other_ranks(
    ranks: Callable[[int], Ranks], folders: Callable[[str], str], tmp_path: Path
) -> None:
    setting, folder = Setting(folders("qwen3_moe"), _KEYS), str(tmp_path / "saved")
    expected, *_ = ranks(2).run(fsdp_jobs.save, setting=setting, folder=folder, steps=2, more=2)
    same, *_ = ranks(2).run(fsdp_jobs.resume, setting=setting, folder=folder, more=2)
    assert same["grad_norm"] == expected["grad_norm"]
    other, *_ = ranks(1).run(fsdp_jobs.resume, setting=setting, folder=folder, more=2)
    for name, weight in expected["weights"].items():
        np.testing.assert_array_equal(same["weights"][name], weight)
        assert np.linalg.norm(other["weights"][name] - weight) <= 1e-4 * np.linalg.norm(weight), name
