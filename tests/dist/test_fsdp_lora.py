"""Adapters under FSDP2 train as Megatron's do, on one rank and on several, and are PEFT's."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import fsdp_jobs
import numpy as np
import peft
import pytest
import tiny_families
import torch
import transformers
from ranks import Ranks
from safetensors.torch import load_file
from test_fsdp import FAMILIES
from training_jobs import TEMPERATURE, Setting, all_rows

#: family -> targets; experts have no adapters here, and latent attention no linear_qkv
_FAMILIES = {
    "qwen3": ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"),
    "qwen2": ("linear_fc1",),
    "phi3": ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"),
    "glm4": ("linear_qkv", "linear_fc1", "linear_fc2"),
    "gemma3": ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"),
    "qwen3_moe": ("linear_qkv", "linear_proj"),
    "deepseek_v3": ("linear_proj",),
    "qwen3_next": ("linear_qkv", "linear_proj"),
}
_QUICK = ("qwen3",)
_LATENT = ("deepseek_v2", "deepseek_v32", "glm5")
#: the other families, on two ranks
_OTHERS = tuple(name for name in FAMILIES if name not in _FAMILIES)
_UNBALANCED = {"moe_aux_loss_coeff": 0.0, "moe_router_bias_update_rate": 0.0}


def _choose_targets(name: str) -> tuple[str, ...]:
    attention = ("linear_proj",) if name in _LATENT else ("linear_qkv", "linear_proj")
    layers = () if name in tiny_families.EXPERTS else ("linear_fc1", "linear_fc2")
    return _FAMILIES.get(name, (*attention, *layers))


def _relative(actual: Any, expected: Any) -> float:
    return float(np.abs(actual - expected).max() / max(np.abs(expected).max(), 1e-30))


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Setting]:
    """Name of a family -> its tiny model with adapters."""

    def build(name: str) -> Setting:
        folder = tiny_families.save(name, tmp_path_factory.mktemp(name))
        keys = _UNBALANCED | fsdp_jobs.ADAPTED | {"lora_target_modules": list(_choose_targets(name))}
        return Setting(str(folder), keys)

    return cache(build)


@pytest.fixture(scope="module")
def by_megatron(
    ranks: Callable[[int], Ranks], settings: Callable[[str], Setting], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], tuple[Any, str]]:
    """Name of a family -> the report of Megatron's engine, and the PEFT folder of the adapters that it started from."""

    def run(name: str) -> tuple[Any, str]:
        folder = str(tmp_path_factory.mktemp("adapter") / name)
        (report,) = ranks(1).run(fsdp_jobs.megatron_adapters, setting=settings(name), folder=folder)
        return report, folder

    return cache(run)


_RUNS = [
    pytest.param(name, size, marks=() if name in _QUICK and size == 1 else pytest.mark.slow)
    for name in _FAMILIES
    for size in (1, 2, 4)
] + [pytest.param(name, 2, marks=[pytest.mark.slow, pytest.mark.extra]) for name in _OTHERS]


@pytest.mark.parametrize(("name", "size"), _RUNS)
def test_adapters_compute_and_train_as_megatrons(
    ranks: Callable[[int], Ranks],
    settings: Callable[[str], Setting],
    by_megatron: Callable[[str], tuple[Any, str]],
    tmp_path: Path,
    name: str,
    size: int,
) -> None:
    expected, folder = by_megatron(name)
    saved = str(tmp_path / "saved")
    reports = ranks(size).run(fsdp_jobs.fsdp_adapters, setting=settings(name), folder=folder, saved=saved)
    for kind in ("log_probs", "base"):
        found = {row: values for report in reports for row, values in report[kind].items()}
        for row, values in expected[kind].items():
            np.testing.assert_allclose(found[row], values, atol=1e-5)
    assert max(np.abs(expected["log_probs"][row] - expected["base"][row]).max() for row in range(8)) > 1e-2
    first = reports[0]
    assert first["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-5)
    assert first["gradients"].keys() == expected["gradients"].keys()
    for matrix, gradient in expected["gradients"].items():
        # decays of a delta net sum over all pairs of tokens, and theirs is the smallest part of one joined projection
        bound = 1e-3 if "linear_attn.in_proj_a." in matrix else 1e-5
        assert _relative(first["gradients"][matrix], gradient) < bound, matrix
    start = load_file(Path(settings(name).folder) / "model.safetensors")
    for tensor, weight in expected["weights"].items():
        assert _relative(first["weights"][tensor], weight) < 2e-5, tensor
        is_adapted = f"{tensor}.A" in expected["gradients"]
        assert is_adapted or tensor not in start or np.array_equal(first["weights"][tensor], start[tensor].float().numpy())
    # the folder of the end has what was merged
    stored = load_file(Path(saved) / "adapter_model.safetensors")
    for key in [key for key in stored if key.endswith(".lora_A.weight") and key.startswith("base_model.model.model.layers")]:
        tensor = key.removeprefix("base_model.model.").replace(".lora_A", "")
        if tensor in start:
            delta = stored[key.replace(".lora_A", ".lora_B")] @ stored[key] * (7 / 3)
            np.testing.assert_allclose(first["weights"][tensor], (start[tensor] + delta).numpy(), atol=1e-6)


def test_adapters_are_pefts(
    ranks: Callable[[int], Ranks],
    settings: Callable[[str], Setting],
    by_megatron: Callable[[str], tuple[Any, str]],
    tmp_path: Path,
) -> None:
    _, folder = by_megatron("qwen3")
    saved = str(tmp_path / "saved")
    (report,) = ranks(1).run(fsdp_jobs.fsdp_adapters, setting=settings("qwen3"), folder=folder, saved=saved, steps=0)
    model = peft.PeftModel.from_pretrained(
        transformers.AutoModelForCausalLM.from_pretrained(settings("qwen3").folder, dtype=torch.float32), saved
    )
    rows = all_rows()
    for row, (tokens, length) in enumerate(zip(rows.input_ids, rows.prompt_lengths)):
        with torch.no_grad():
            log_probs = (model(tokens[None]).logits[0, :-1] / TEMPERATURE).log_softmax(-1)
        expected = log_probs.gather(1, tokens[1:, None])[length - 1 :, 0]
        np.testing.assert_allclose(report["log_probs"][row], expected.numpy(), atol=1e-5)


@pytest.mark.slow
def test_fresh_adapters_start_as_megatrons_on_any_number_of_ranks(
    ranks: Callable[[int], Ranks], settings: Callable[[str], Setting]
) -> None:
    reports = [ranks(size).run(fsdp_jobs.fresh_adapters, setting=settings("qwen3"))[0] for size in (1, 4)]
    (expected,) = ranks(1).run(fsdp_jobs.megatron_fresh_adapters, setting=settings("qwen3"))
    for report in reports:
        assert all(".lora_" in name for name in report["trained"])
        assert report["matrices"].keys() == expected.keys()
        for tensor, matrix in expected.items():
            np.testing.assert_array_equal(report["matrices"][tensor], matrix)


_RUNS = [({}, 2), ({"lora_ckpt_filter": True}, 2), ({"recompute_granularity": "full", "swap_optimizer": True}, 2)]


@pytest.mark.slow
@pytest.mark.parametrize(("keys", "size"), _RUNS)
def test_adapters_resume_exactly_also_on_other_ranks(
    ranks: Callable[[int], Ranks], settings: Callable[[str], Setting], tmp_path: Path, keys: dict[str, Any], size: int
) -> None:
    base = settings("qwen3")
    setting = Setting(base.folder, base.keys | keys)
    folder = str(tmp_path / "saved")
    expected, *_ = ranks(size).run(fsdp_jobs.save, setting=setting, folder=folder, steps=2, more=2)
    same, *_ = ranks(size).run(fsdp_jobs.resume, setting=setting, folder=folder, more=2)
    assert same["grad_norm"] == expected["grad_norm"] and same["lr"] == expected["lr"]
    for name, weight in expected["weights"].items():
        np.testing.assert_array_equal(same["weights"][name], weight)
    for others in (1, 4):
        other, *_ = ranks(others).run(fsdp_jobs.resume, setting=setting, folder=folder, more=2)
        for name, weight in expected["weights"].items():
            assert _relative(other["weights"][name], weight) < 2e-6, name
    stored = sum(file.stat().st_size for file in Path(folder).rglob("*.distcp"))
    whole = sum(file.stat().st_size for file in Path(setting.folder).glob("*.safetensors"))
    assert (stored < whole) == bool(keys.get("lora_ckpt_filter"))
