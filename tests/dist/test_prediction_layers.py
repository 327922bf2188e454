"""Multi-token-prediction layers train as a plain computation of them does, alike under every layout."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import checkpoint_jobs
import numpy as np
import prediction_jobs as jobs
import pytest
import tiny_prediction
import torch
from comparison import assert_same_training
from ranks import Ranks
from safetensors.torch import load_file
from slow_layouts import EP, PP, RECOMPUTE, RING, SP, ULYSSES
from training_jobs import TEMPERATURE, Setting

LAMBDA = 0.3
_FAMILIES = tiny_prediction.FAMILIES
_SLOW = pytest.mark.slow


def _keys(family: str, **more: Any) -> dict[str, Any]:
    layers = 2 if family == "deepseek_v3" else 1
    return {"mtp_num_layers": layers, "mtp_loss_scaling_factor": LAMBDA, **more}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    names = (*_FAMILIES, "qwen3_5_tied")
    return {name: tiny_prediction.Predicting.build(name).save(tmp_path_factory.mktemp(name)) for name in names}


@pytest.mark.parametrize("detaches", [False, True], ids=["whole", "detached"])
@pytest.mark.parametrize(
    "family",
    [pytest.param(family, marks=() if family in ("deepseek_v3", "mimo") else _SLOW) for family in (*_FAMILIES, "qwen3_5_tied")],
)
def test_logits_losses_and_gradients_are_those_of_the_plain_computation(
    ranks: Callable[[int], Ranks], folders: dict[str, Path], family: str, detaches: bool
) -> None:
    setting = Setting(str(folders[family]), _keys(family, mtp_detach_heads=detaches), micro_batch_size=8)
    (report,) = ranks(1).run(jobs.first_step, setting=setting)
    plain, rows = tiny_prediction.Predicting.build(family), jobs.masked_rows()
    own, main, count, trained, targets = [], torch.zeros(()), 0, 0, 0
    logits: list[list[torch.Tensor]] = [[] for _ in plain.parts]
    for ids, prompt, weights, mask in zip(rows.input_ids, rows.prompt_lengths, *rows.columns.values()):
        first, predicted = plain.logits(ids)
        log_softmax = (first / TEMPERATURE).log_softmax(-1)[prompt - 1 : -1]
        entropy = -(log_softmax.exp() * log_softmax).sum(-1)
        main = main - (log_softmax.gather(1, ids[prompt:, None])[:, 0] * weights + 0.1 * entropy).sum()
        count, trained = count + len(weights), trained + int(mask.sum())
        for layer, output in enumerate(predicted):
            for token in range(max(prompt, layer + 2), len(ids)):
                logits[layer].append(output[token - layer - 2].detach())
                if mask[token - prompt]:
                    own.append(-output[token - layer - 2].log_softmax(-1)[ids[token]])
                    targets += 1
    added = torch.stack(own).sum()
    assert report["metrics"]["mtp_loss"].result() == pytest.approx(added.item() / targets, rel=1e-5)
    for mine, theirs in zip(report["logits"], logits, strict=True):
        np.testing.assert_allclose(mine, torch.stack(theirs).numpy(), rtol=1e-4, atol=1e-4)
    parameters = plain.named_parameters()
    scale = LAMBDA / len(plain.parts) / trained
    of_main = torch.autograd.grad(main / count, [*parameters.values()], retain_graph=True, allow_unused=True)
    of_added = torch.autograd.grad(scale * added, [*parameters.values()], allow_unused=True)
    for name, first_part, second_part in zip(parameters, of_main, of_added, strict=True):
        if ".indexer." in name:  # its choice has no gradient, and it does not train
            assert first_part is None and second_part is None and name not in report["gradients"]
            continue
        index = re.search(r"\.layers\.(\d+)\.", name)
        is_own = "mtp" in name or index is not None and int(index[1]) >= plain.num_layers
        parts = [part for part in (first_part, second_part if is_own or not detaches else None) if part is not None]
        expected = sum(parts, torch.zeros_like(parameters[name])).numpy()
        if family == "mimo" and name.endswith("input_proj.weight"):
            expected = np.roll(expected, expected.shape[1] // 2, 1)
        np.testing.assert_allclose(report["gradients"][name], expected, rtol=1e-3, atol=2e-6, err_msg=name)


_LAYOUTS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "padded": ("mimo", 1, {"packed": False}),
    "token budget, recomputed": ("qwen3_next", 1, {"token_budget": 40, "keys": RECOMPUTE}),
    "TP2": ("mimo", 2, {"keys": {"tensor_model_parallel_size": 2}}),
    "TP2 SP": ("deepseek_v3", 2, {"keys": SP | {"use_distributed_optimizer": True}}),
    "TP2 SP padded": ("qwen3_5", 2, {"keys": SP, "packed": False}),
    "PP2": ("deepseek_v3", 2, {"keys": PP}),
    "PP2 uneven": ("qwen3_5", 2, {"keys": PP | {"num_layer_list": "2,1"}}),
    "PP2 tied": ("qwen3_5_tied", 2, {"keys": PP | {"num_layer_list": "2,1"}}),
    "PP2 tied detached": ("qwen3_5_tied", 2, {"keys": PP | {"num_layer_list": "1,2", "mtp_detach_heads": True}}),
    "CP2 ring": ("mimo", 2, {"keys": RING}),
    "CP2 ring padded": ("mimo", 2, {"keys": RING, "packed": False}),
    "CP2 Ulysses": ("qwen3_5", 2, {"keys": ULYSSES}),
    "EP2": ("glm4_moe", 2, {"keys": EP}),
    "DP2": ("qwen3_next", 2, {"micro_batch_size": 1}),
}
_QUICK = ("TP2 SP", "PP2", "CP2 ring")


@pytest.mark.parametrize("layout", [pytest.param(name, marks=() if name in _QUICK else _SLOW) for name in _LAYOUTS])
def test_every_layout_trains_as_one_process_does(ranks: Callable[[int], Ranks], folders: dict[str, Path], layout: str) -> None:
    family, size, changes = _LAYOUTS[layout]
    keys = _keys(family, **changes.get("keys", {}))
    loss = {name: value for name, value in keys.items() if name.startswith("mtp_")}
    alone = ranks(1).run(jobs.train, setting=Setting(str(folders[family]), loss))
    changes = changes | {"keys": keys}
    reports = ranks(size).run(jobs.train, setting=Setting(str(folders[family]), **changes), timeout_s=240)
    assert_same_training(reports, alone, tolerance=2e-5)


_ADAPTERS = {"lora_r": 4, "lora_alpha": 8, "lora_target_modules": ["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"]}


@_SLOW
@pytest.mark.parametrize("layout", ["TP2", "PP2"])
def test_adapters_of_the_layers_train_alike_and_nothing_else_does(
    ranks: Callable[[int], Ranks], folders: dict[str, Path], layout: str
) -> None:
    family, sizes = "qwen3_5_tied", {"TP2": SP, "PP2": PP | {"num_layer_list": "2,1"}}[layout]
    folder, keys = str(folders[family]), _keys(family, **_ADAPTERS)
    alone = ranks(1).run(jobs.train, setting=Setting(folder, keys))
    reports = ranks(2).run(jobs.train, setting=Setting(folder, keys | sizes), timeout_s=240)
    assert_same_training(reports, alone, tolerance=2e-5)
    published = load_file(f"{folder}/model.safetensors")
    changed = {name for name, value in published.items() if not np.array_equal(value.numpy(), alone[0]["weights"][name])}
    adapted = r"(q|k|v|o|gate|up|down)_proj|in_proj_\w+|out_proj"
    assert all(re.search(rf"\.({adapted})\.weight$", name) for name in changed)
    assert {f"mtp.layers.0.{name}.weight" for name in ("self_attn.o_proj", "mlp.down_proj")} <= changed


@pytest.mark.parametrize("keys", [pytest.param({}, marks=_SLOW), PP], ids=["one process", "PP2"])
def test_a_run_resumes_exactly_and_its_checkpoint_becomes_the_published_form(
    ranks: Callable[[int], Ranks], folders: dict[str, Path], tmp_path: Path, keys: dict[str, Any]
) -> None:
    size, setting = 2 if keys else 1, Setting(str(folders["deepseek_v3"]), _keys("deepseek_v3", **keys))
    saved = str(tmp_path / "saved")
    expected = ranks(size).run(checkpoint_jobs.save_then_train, setting=setting, folder=saved, before=2, after=2)
    resumed = ranks(size).run(checkpoint_jobs.load_then_train, setting=setting, folder=saved, steps=2)
    for name, value in expected[0]["weights"].items():
        np.testing.assert_array_equal(resumed[0]["weights"][name], value, err_msg=name)
    other = Setting(str(folders["deepseek_v3"]), _keys("deepseek_v3", tensor_model_parallel_size=2))
    moved = ranks(2).run(checkpoint_jobs.load_then_train, setting=other, folder=saved, steps=0)
    (back,) = ranks(1).run(
        checkpoint_jobs.load_then_train,
        setting=Setting(str(folders["deepseek_v3"]), _keys("deepseek_v3")),
        folder=saved,
        steps=0,
    )
    published = load_file(folders["deepseek_v3"] / "model.safetensors")
    assert published.keys() <= back["weights"].keys()
    for name in published:
        np.testing.assert_array_equal(moved[0]["weights"][name], back["weights"][name], err_msg=name)
    changed = [name for name, value in published.items() if not np.array_equal(value.numpy(), back["weights"][name])]
    assert {f"model.layers.{layer}.eh_proj.weight" for layer in (2, 3)} <= set(changed)
