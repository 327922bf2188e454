"""Each family trains as transformers does, alike under every layout, and with adapters."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import checkpoint_jobs
import numpy as np
import pytest
import replay_jobs
import tiny_families
import torch
import training_jobs as jobs
from comparison import assert_same_training, losses
from ranks import Ranks
from slow_layouts import EP, PP, RING, SP
from training_jobs import TEMPERATURE, Setting

_FAMILIES = tiny_families.FAMILIES
_QUICK = {("TP2 SP", name) for name in ("minimax_m2", "olmo3", "hunyuan")} | {("PP2", "gemma3"), ("EP2", "glm4_moe")}
LAYOUTS: dict[str, dict[str, Any]] = {"TP2 SP": SP, "PP2": PP, "CP2": RING, "EP2": EP}
_LORA = {"lora_r": 4, "lora_alpha": 8, "lora_target_modules": ["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"]}
_CASES = [
    pytest.param(layout, name, marks=() if (layout, name) in _QUICK else pytest.mark.slow)
    for layout in LAYOUTS
    for name in _FAMILIES
    if not (layout == "CP2" and name in tiny_families.WINDOWS) and (layout != "EP2" or name in tiny_families.EXPERTS)
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: tiny_families.save(name, tmp_path_factory.mktemp(name)) for name in _FAMILIES}


@pytest.fixture(scope="module")
def single_process(ranks: Callable[[int], Ranks], folders: dict[str, Path]) -> Callable[..., list[dict[str, Any]]]:
    """(family, further keys) -> what one process reports with packed micro-batches of two rows."""
    known: dict[tuple[str, bool], list[dict[str, Any]]] = {}

    def report(name: str, keys: dict[str, Any] | None = None) -> list[dict[str, Any]]:
        which = (name, keys is not None)
        if which not in known:
            known[which] = ranks(1).run(jobs.train, setting=Setting(str(folders[name]), keys or {}))
        return known[which]

    return report


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in tiny_families.NEW else pytest.mark.slow) for name in _FAMILIES]
)
def test_loss_and_gradient_of_the_first_step_are_those_of_transformers(
    single_process: Callable[..., list[dict[str, Any]]], name: str
) -> None:
    (report,) = single_process(name)
    model, rows, total, count = tiny_families.build(name).eval(), jobs.all_rows(), torch.zeros(()), 0
    for ids, prompt, weights in zip(rows.input_ids, rows.prompt_lengths, rows.columns["weights"]):
        log_softmax = (model(ids[None]).logits[0] / TEMPERATURE).log_softmax(-1)[prompt - 1 : -1]
        entropy = -(log_softmax.exp() * log_softmax).sum(-1)
        total = total - (log_softmax.gather(1, ids[prompt:, None])[:, 0] * weights + 0.1 * entropy).sum()
        count += len(weights)
    loss = total / count
    loss.backward()
    norm = torch.stack([value.grad.norm() for value in model.parameters() if value.grad is not None]).norm()
    assert losses([report])[0] == pytest.approx(loss.item(), rel=1e-4)
    assert report["grad_norm"][0] == pytest.approx(norm.item(), rel=1e-4)
    assert losses([report])[-1] < losses([report])[0]


@pytest.mark.parametrize(("layout", "name"), _CASES)
def test_every_layout_trains_as_one_process_does(
    ranks: Callable[[int], Ranks],
    single_process: Callable[..., list[dict[str, Any]]],
    folders: dict[str, Path],
    layout: str,
    name: str,
) -> None:
    keys = LAYOUTS[layout] | tiny_families.KEYS.get(name, {})
    reports = ranks(2).run(jobs.train, setting=Setting(str(folders[name]), keys), timeout_s=240)
    assert_same_training(reports, single_process(name), tolerance=2e-5)


_SAVED = {"one process": (1, {}), "TP2 SP bf16": (2, SP | {"bf16": True, "use_distributed_optimizer": True})}


@pytest.mark.parametrize("layout", _SAVED)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "gpt_oss" else pytest.mark.slow) for name in _FAMILIES]
)
def test_a_checkpoint_resumes_to_the_bit(
    ranks: Callable[[int], Ranks], folders: dict[str, Path], tmp_path: Path, name: str, layout: str
) -> None:
    size, keys = _SAVED[layout]
    setting, group = Setting(str(folders[name]), keys | (tiny_families.KEYS.get(name, {}) if size > 1 else {})), ranks(size)
    saved = group.run(checkpoint_jobs.save_then_train, setting=setting, folder=str(tmp_path), timeout_s=240)
    resumed = group.run(checkpoint_jobs.load_then_train, setting=setting, folder=str(tmp_path), timeout_s=240)
    assert losses(resumed) == losses(saved)
    for ours, expected in zip(resumed, saved):
        assert ours["grad_norm"] == expected["grad_norm"]
    for tensor, weight in saved[0]["weights"].items():
        assert np.array_equal(resumed[0]["weights"][tensor], weight), tensor


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "minimax_m2" else pytest.mark.slow) for name in _FAMILIES]
)
def test_adapters_train_alike_on_one_rank_and_on_two(
    ranks: Callable[[int], Ranks],
    single_process: Callable[..., list[dict[str, Any]]],
    folders: dict[str, Path],
    name: str,
) -> None:
    adapters = _LORA | {"lora_target_modules": tiny_families.ADAPTED.get(name, _LORA["lora_target_modules"])}
    alone = single_process(name, adapters)
    assert losses(alone)[-1] < losses(alone)[0]
    keys = SP | adapters | tiny_families.KEYS.get(name, {})
    reports = ranks(2).run(jobs.train, setting=Setting(str(folders[name]), keys), timeout_s=240)
    assert_same_training(reports, alone, tolerance=2e-5)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "minimax_m2" else pytest.mark.slow) for name in tiny_families.EXPERTS]
)
def test_given_routing_trains_as_one_process_does(
    ranks: Callable[[int], Ranks], folders: dict[str, Path], single_process: Callable[..., list[dict[str, Any]]], name: str
) -> None:
    alone = ranks(1).run(replay_jobs.train_random_routing, setting=Setting(str(folders[name])))
    assert losses(alone)[0] != losses(single_process(name))[0]  # tokens go elsewhere than the router says
    reports = ranks(2).run(
        replay_jobs.train_random_routing, setting=Setting(str(folders[name]), EP | tiny_families.KEYS.get(name, {}))
    )
    assert_same_training(reports, alone, tolerance=2e-5)
    agreed, compared = (sum(report["agreement"][part] for report in reports) for part in (0, 1))
    assert 0 < agreed < compared
