"""Models that see images compute and train as transformers' do, and alike under every layout, packing and prefix sharing."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import checkpoint_jobs
import numpy as np
import peft
import pytest
import tiny_vision
import torch
import vision_jobs as jobs
from comparison import assert_same_training, losses
from ranks import Ranks
from slow_layouts import EP, PP, RECOMPUTE, RING, SP, ULYSSES, marked
from training_jobs import KEYS, TEMPERATURE, Setting

TRAINED = {"freeze_vit": False, "freeze_aligner": False}
ZERO = {"use_distributed_optimizer": True, "overlap_grad_reduce": True}
LAYOUTS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "padded": ("qwen3", 1, {"packed": False}),
    "padded, recomputed": ("qwen3", 1, {"packed": False, "keys": RECOMPUTE}),
    "token budget, recomputed": ("qwen3", 1, {"token_budget": 60, "keys": RECOMPUTE}),
    "shared prefixes": ("qwen3", 1, {"token_budget": 90, "shares_prefixes": True}),
    "DP2, micro-batches without image": ("qwen2.5", 2, {"micro_batch_size": 1, "keys": ZERO}),
    "TP2": ("qwen3", 2, {"keys": {"tensor_model_parallel_size": 2}}),
    "TP2 SP recomputed": ("qwen3", 2, {"keys": SP | RECOMPUTE}),
    "TP2 SP padded": ("qwen3", 2, {"keys": SP, "packed": False}),
    "PP2": ("qwen3", 2, {"keys": PP}),
    "CP2 Ulysses": ("qwen3", 2, {"keys": ULYSSES}),
    "CP2 Ulysses padded": ("qwen2.5", 2, {"keys": ULYSSES, "packed": False}),
    "CP2 ring": ("qwen2.5", 2, {"keys": RING}),
    "EP2": ("qwen3_moe", 2, {"keys": EP}),
    "TP2 SP ETP1": ("qwen3_moe", 2, {"keys": SP | {"expert_tensor_parallel_size": 1}}),
    "PP2 CP2": ("qwen3", 4, {"keys": PP | RING}),
}
_QUICK = ("padded, recomputed", "DP2, micro-batches without image", "TP2 SP recomputed", "PP2", "CP2 ring", "EP2")
_Report = Callable[[str], list[dict[str, Any]]]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Hugging Face folders of the tiny models by name."""
    return {name: str(tiny_vision.save(name, tmp_path_factory.mktemp(name))) for name in tiny_vision.CONFIGS}


@pytest.fixture(scope="module")
def single_process(ranks: Callable[[int], Ranks], folders: dict[str, str]) -> _Report:
    """(model name) -> what one process reports that trains all parts with packed micro-batches of two rows."""
    known: dict[str, list[dict[str, Any]]] = {}

    def report(name: str) -> list[dict[str, Any]]:
        if name not in known:
            known[name] = ranks(1).run(jobs.train, setting=Setting(folders[name], TRAINED))
        return known[name]

    return report


def _log_softmax(
    model: torch.nn.Module, ids: torch.Tensor, prompt: int, images: tuple[tiny_vision.NoiseImage, ...]
) -> torch.Tensor:
    """Log-probs of the vocabulary before each response token, by transformers."""
    # what a model samples is text, also where it is the token of images
    types = (ids == tiny_vision.IMAGE).int()
    types[prompt:] = 0
    model.model.get_placeholder_mask = lambda *args, inputs_embeds, **named: (
        types.bool()[None, :, None].expand_as(inputs_embeds),
        torch.zeros_like(inputs_embeds, dtype=torch.bool),
    )
    inputs: dict[str, torch.Tensor] = {"mm_token_type_ids": types[None], "attention_mask": torch.ones_like(ids)[None]}
    if images:
        inputs["pixel_values"] = torch.cat([image.read() for image in images])
        inputs["image_grid_thw"] = torch.tensor([image.grid for image in images])
    return (model(input_ids=ids[None], **inputs).logits[0] / TEMPERATURE).log_softmax(-1)[prompt - 1 : -1]


def read_log_probs(model: torch.nn.Module) -> list[np.ndarray]:
    rows = jobs.all_rows()
    assert rows.images is not None
    results = []
    for ids, prompt, images in zip(rows.input_ids, rows.prompt_lengths, rows.images):
        with torch.no_grad():
            results.append(_log_softmax(model, ids, prompt, images).gather(1, ids[prompt:, None])[:, 0].numpy())
    return results


@pytest.mark.parametrize("name", tiny_vision.CONFIGS)
def test_log_probs_are_those_of_transformers(ranks: Callable[[int], Ranks], folders: dict[str, str], name: str) -> None:
    (ours,) = ranks(1).run(jobs.forward, setting=Setting(folders[name], shares_prefixes=True, token_budget=90))
    for actual, expected in zip(ours, read_log_probs(tiny_vision.build(name)), strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5)


def test_images_that_are_swapped_between_rows_change_these_rows_alone(
    ranks: Callable[[int], Ranks], folders: dict[str, str]
) -> None:
    setting = Setting(folders["qwen3"], shares_prefixes=True, token_budget=90)
    (before,) = ranks(1).run(jobs.forward, setting=setting)
    (after,) = ranks(1).run(jobs.forward, setting=setting, swapped=True)
    changes = [float(np.abs(first - other).max()) for first, other in zip(before, after)]
    assert min(changes[1], changes[3]) > 0.01
    assert max(change for row, change in enumerate(changes) if row not in (1, 3)) < 1e-5


@pytest.mark.parametrize("name", ["qwen2.5", "qwen3", "qwen3_moe"])
def test_tower_projector_and_language_model_train_as_in_transformers(single_process: _Report, name: str) -> None:
    model, rows, ours = tiny_vision.build(name), jobs.all_rows(), single_process(name)
    assert rows.images is not None
    decayed = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    others = [parameter for parameter in model.parameters() if parameter.dim() == 1]
    groups = [{"params": decayed, "weight_decay": KEYS["weight_decay"]}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=KEYS["lr_warmup_init"], betas=(0.9, 0.999), eps=KEYS["adam_eps"])
    results, norms = [], []
    for step in range(3):
        total = torch.zeros(())
        for ids, prompt, images, weights in zip(rows.input_ids, rows.prompt_lengths, rows.images, rows.columns["weights"]):
            log_softmax = _log_softmax(model, ids, prompt, images)
            entropy = -(log_softmax.exp() * log_softmax).sum(-1)
            total = total - (weights * log_softmax.gather(1, ids[prompt:, None])[:, 0] + 0.1 * entropy).sum()
        loss = total / sum(rows.response_lengths)
        optimizer.zero_grad()
        loss.backward()
        results.append(loss.item())
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), KEYS["clip_grad"]).item())
        start = KEYS["lr_warmup_init"]  # 2 steps to lr, then a cosine over the other 18
        rate = (
            start + (KEYS["lr"] - start) * step / 2 if step < 2 else KEYS["lr"] * (1 + math.cos(math.pi * (step - 2) / 18)) / 2
        )
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
    assert losses(ours) == pytest.approx(results, rel=1e-4)
    assert ours[0]["grad_norm"] == pytest.approx(norms, rel=1e-4)
    weights = {tiny_vision.get_saved_name(name, key): value.detach() for key, value in model.named_parameters()}
    for key in [key for key in weights if ".experts." in key]:
        # all experts of a layer in one tensor, with gate above up
        prefix, _, last = key.rpartition(".")
        parts = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}[last]
        for index, expert in enumerate(weights.pop(key)):
            named = zip(parts, expert.chunk(len(parts)), strict=True)
            weights |= {f"{prefix}.{index}.{part}.weight": weight for part, weight in named}
    for key, weight in ours[0]["weights"].items():
        if key in weights or key != "lm_head.weight":  # the head of a tied model is the embedding
            torch.testing.assert_close(torch.tensor(weight), weights[key], rtol=1e-4, atol=4e-6, msg=key)


def test_each_part_trains_alone_and_with_its_own_learning_rate(ranks: Callable[[int], Ranks], folders: dict[str, str]) -> None:
    before = {
        tiny_vision.get_saved_name("qwen3", key): value.detach() for key, value in tiny_vision.build("qwen3").named_parameters()
    }

    def measure(keys: dict[str, Any]) -> dict[str, float]:
        """The largest change of a weight of each part after a step."""
        (report,) = ranks(1).run(jobs.train, setting=Setting(folders["qwen3"], keys | {"lr_warmup_init": 0.0}), steps=2)
        changes = {"tower": 0.0, "projector": 0.0, "text": 0.0}
        for key, weight in report["weights"].items():
            part = "projector" if "merger" in key else "tower" if "visual" in key else "text"
            if key in before:
                changes[part] = max(changes[part], float((torch.tensor(weight) - before[key]).abs().max()))
        return changes

    frozen = measure({})
    assert frozen["tower"] == frozen["projector"] == 0.0 < frozen["text"]
    projector = measure({"freeze_aligner": False, "aligner_lr": 1e-5})
    assert projector["tower"] == 0.0 < projector["projector"] < 0.02 * projector["text"]
    tower = measure({"freeze_vit": False, "vit_lr": 1e-5})
    assert tower["projector"] == 0.0 < tower["tower"] < 0.02 * tower["text"]


@pytest.mark.parametrize(("name", "size", "changes"), marked(LAYOUTS, LAYOUTS.keys() - _QUICK))
def test_every_layout_trains_as_one_process_does(
    ranks: Callable[[int], Ranks],
    single_process: _Report,
    folders: dict[str, str],
    name: str,
    size: int,
    changes: dict[str, Any],
) -> None:
    changes = {**changes, "keys": TRAINED | changes.get("keys", {})}
    reports = ranks(size).run(jobs.train, setting=Setting(folders[name], **changes), timeout_s=240)
    assert_same_training(reports, single_process(name), tolerance=2e-5)


@pytest.mark.parametrize(
    ("size", "keys"),
    [(2, SP | TRAINED), pytest.param(2, PP | TRAINED | {"ckpt_format": "torch"}, marks=pytest.mark.slow), (1, {"bf16": True})],
    ids=["TP2 SP", "PP2, a file a rank", "frozen, bf16"],
)
def test_a_run_with_images_resumes_to_the_bit(
    ranks: Callable[[int], Ranks], folders: dict[str, str], tmp_path: Path, size: int, keys: dict[str, Any]
) -> None:
    arguments = {"setting": Setting(folders["qwen3"], keys), "folder": str(tmp_path), "source": "vision_jobs"}
    expected = ranks(size).run(checkpoint_jobs.save_then_train, after=2, **arguments)
    resumed = ranks(size).run(checkpoint_jobs.load_then_train, steps=2, **arguments)
    assert losses(resumed) == losses(expected)
    assert [report["grad_norm"] for report in resumed] == [report["grad_norm"] for report in expected]
    for key, weight in expected[0]["weights"].items():
        assert np.array_equal(resumed[0]["weights"][key], weight), key


LORA = {"lora_target_modules": ["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"], "lora_r": 4}


@pytest.mark.parametrize("name", ["qwen2.5", pytest.param("qwen3", marks=pytest.mark.slow)])
def test_adapters_of_all_parts_train_alike_in_every_layout(
    ranks: Callable[[int], Ranks], folders: dict[str, str], name: str
) -> None:
    reports = ranks(1).run(jobs.train, setting=Setting(folders[name], LORA | TRAINED))
    two = ranks(2).run(jobs.train, setting=Setting(folders[name], LORA | TRAINED | SP | RECOMPUTE))
    assert_same_training(two, reports, tolerance=2e-5)
    weights = tiny_vision.build(name).named_parameters()
    before = {tiny_vision.get_saved_name(name, key): weight.detach().numpy() for key, weight in weights}
    changed = {key for key, weight in reports[0]["weights"].items() if not np.array_equal(weight, before.get(key, weight))}
    adapted = r"(_proj|attn\.qkv|attn\.proj|linear_fc[12]|merger\.mlp\.[02])\.weight$"
    assert changed == {key for key in before if re.search(adapted, key) and "patch_embed" not in key}


def test_adapters_of_the_language_model_leave_the_tower_as_it_is(
    ranks: Callable[[int], Ranks], folders: dict[str, str]
) -> None:
    (report,) = ranks(1).run(jobs.train, setting=Setting(folders["qwen3"], LORA), steps=2)
    before = dict(tiny_vision.build("qwen3").named_parameters())
    changed = {key for key, weight in report["weights"].items() if not np.array_equal(weight, before[key].detach().numpy())}
    assert changed and all(".layers." in key and key.endswith("_proj.weight") for key in changed)


@pytest.mark.parametrize("name", ["qwen2.5", "qwen3"])
def test_peft_reads_adapters_of_all_parts_and_they_train_on(
    ranks: Callable[[int], Ranks], folders: dict[str, str], tmp_path: Path, name: str
) -> None:
    setting = Setting(folders[name], LORA | TRAINED)
    results = [
        ranks(1).run(jobs.use_adapters, setting=setting, folder=str(tmp_path / "adapter"), is_read=is_read)[0]
        for is_read in (False, True)
    ]
    model = tiny_vision.build(name)
    peft.PeftModel.from_pretrained(model, tmp_path / "adapter")  # it adapts the model in place
    expected = read_log_probs(model)
    others = read_log_probs(tiny_vision.build(name))
    assert max(float(np.abs(first - other).max()) for first, other in zip(expected, others)) > 0.1
    for ours in results:
        for actual, other in zip(ours, expected, strict=True):
            np.testing.assert_allclose(actual, other, rtol=1e-5, atol=1e-5)
