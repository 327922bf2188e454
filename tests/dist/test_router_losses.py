"""Losses of routers: their gradient is coefficient times Megatron's mean, whatever divides the loss and lays out the rows.

The reference is transformers: its router logits, and its load-balancing loss of one layer and one set of tokens, which counts
every one of a token's k choices as a whole, so it is k times Megatron's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import router_jobs as jobs
import tiny_hf
import torch
from ranks import Ranks
from slow_layouts import EP, MOE_RECOMPUTE, PP, RECOMPUTE, RING, SP, ULYSSES, VPP
from training_jobs import Setting
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

_MODEL, _NUM_EXPERTS, _TOPK = "moe_mixed", 4, 2
_COEFF, _Z_COEFF = 0.3, 0.02
_AUX = {"moe_aux_loss_coeff": _COEFF}
_SEQUENCE = _AUX | {"moe_router_load_balancing_type": "seq_aux_loss"}
_Z = {"moe_aux_loss_coeff": 0.0, "moe_z_loss_coeff": _Z_COEFF}
_BOTH = _SEQUENCE | {"moe_z_loss_coeff": _Z_COEFF}


def _split(rows: int, size: int, replicas: int = 1) -> list[list[int]]:
    """Micro-batches of so many rows on every replica, that has every n-th row."""
    mine = [list(range(first, rows, replicas)) for first in range(replicas)]
    return [rows[start : start + size] for rows in mine for start in range(0, len(rows), size)]


def _expected(rows: str, groups: Sequence[Sequence[int]], *, sequence: bool, coeff: float, z: float) -> dict[str, Any]:
    """Gradients by autograd through transformers, one sequence after the other and none of them padded or shared."""
    model = tiny_hf.build(_MODEL).eval()
    sequences = jobs.ROWS[rows]().input_ids
    total = sum(len(sequences[row]) for group in groups for row in group)
    logits = {row: model(sequences[row][None], output_router_logits=True).router_logits for group in groups for row in group}
    loss = torch.zeros(())
    for layer in range(len(logits[0])):
        for group in groups:
            every = [logits[row][layer] for row in group]
            balanced = [(chunk, 1 / len(logits)) for chunk in every]
            if not sequence:
                tokens = torch.cat(every)
                balanced = [(tokens, len(tokens) / total)]
            for tokens, weight in balanced:
                loss = loss + coeff * weight * load_balancing_loss_func((tokens,), _NUM_EXPERTS, _TOPK) / _TOPK
            loss = loss + z * torch.cat(every).logsumexp(-1).square().sum() / total
    loss.backward()
    return {name: weight.grad.numpy() for name, weight in model.named_parameters() if weight.grad is not None}


def _check(result: dict[str, Any], expected: dict[str, Any]) -> None:
    assert sum(name.endswith("mlp.gate.weight") for name in expected) == 3
    # transformers stacks experts; whether their gradient is right shows in the weights before them
    for name, value in ((name, value) for name, value in result.items() if ".experts." not in name):
        right = expected.get(name, np.zeros_like(value))
        assert np.linalg.norm(value - right) <= 2e-4 * np.linalg.norm(right) + 1e-7, name


@pytest.fixture(scope="module")
def folder(models: dict[str, Path]) -> str:
    return str(models[_MODEL])


#: (keys, the losses in them) -> what `_expected` takes
_KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "aux": (_AUX, {"sequence": False, "coeff": _COEFF, "z": 0.0}),
    "sequence": (_SEQUENCE, {"sequence": True, "coeff": _COEFF, "z": 0.0}),
    "z": (_Z, {"sequence": False, "coeff": 0.0, "z": _Z_COEFF}),
    "both": (_BOTH, {"sequence": True, "coeff": _COEFF, "z": _Z_COEFF}),
}


@pytest.mark.parametrize("loss", ["tokens", "pairs", "dapo", "grpo", "dr_grpo", "gspo"])
def test_the_gradient_does_not_depend_on_what_divides_the_loss(ranks: Callable[[int], Ranks], folder: str, loss: str) -> None:
    size = 1 if loss == "pairs" else 2
    report = ranks(1).run(jobs.gradient, setting=Setting(folder, _AUX, micro_batch_size=size), loss=loss)[0]
    _check(report, _expected("different", _split(8, 2), **_KINDS["aux"][1]))


@pytest.mark.parametrize("kind", _KINDS)
@pytest.mark.parametrize(
    "layout",
    [
        {"micro_batch_size": 3, "packed": False},
        {"micro_batch_size": 8, "keys": RECOMPUTE},
        {"micro_batch_size": 1, "keys": MOE_RECOMPUTE, "packed": False},
    ],
    ids=["padded", "one micro-batch, recomputed", "padded rows, experts recomputed"],
)
def test_padding_packing_and_recomputation_leave_the_gradient(
    ranks: Callable[[int], Ranks], folder: str, layout: dict[str, Any], kind: str
) -> None:
    keys, losses = _KINDS[kind]
    setting = Setting(folder, **layout | {"keys": layout.get("keys", {}) | keys})
    report = ranks(1).run(jobs.gradient, setting=setting)[0]
    _check(report, _expected("different", _split(8, layout["micro_batch_size"]), **losses))


@pytest.mark.parametrize("kind", _KINDS)
def test_a_shared_prompt_counts_in_each_of_its_sequences(ranks: Callable[[int], Ranks], folder: str, kind: str) -> None:
    keys, losses = _KINDS[kind]
    setting = Setting(folder, keys, micro_batch_size=4, shares_prefixes=True)
    report = ranks(1).run(jobs.gradient, setting=setting, rows="grouped")[0]
    _check(report, _expected("grouped", _split(10, 4), **losses))


_LAYOUTS: dict[str, tuple[int, str, dict[str, Any]]] = {
    "TP2 SP": (2, "aux", {"keys": SP}),
    "TP2 SP sequences, recomputed": (2, "both", {"keys": SP | RECOMPUTE}),
    "TP2 SP padded": (2, "sequence", {"keys": SP, "packed": False}),
    "TP2 SP shared prompts": (2, "both", {"keys": SP, "shares_prefixes": True}),
    "CP2 ring": (2, "both", {"keys": RING}),
    "CP2 Ulysses shared prompts": (2, "both", {"keys": ULYSSES, "shares_prefixes": True}),
    "CP2 Ulysses padded": (2, "aux", {"keys": ULYSSES, "packed": False}),
    "DP2": (2, "aux", {}),
    "DP2 token budget": (2, "both", {"token_budget": 40}),
    "EP2": (2, "both", {"keys": EP}),
    "PP2 recomputed": (2, "aux", {"keys": PP | RECOMPUTE}),
    "VPP2": (2, "both", {"keys": VPP}),
    "TP2 SP CP2": (4, "both", {"keys": SP | RING}),
}


@pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=pytest.mark.slow if size > 2 else ()) for name, (size, _, _) in _LAYOUTS.items()]
)
def test_every_layout_gives_the_gradient_of_one_process(ranks: Callable[[int], Ranks], folder: str, layout: str) -> None:
    size, kind, changes = _LAYOUTS[layout]
    keys, losses = _KINDS[kind]
    setting = Setting(folder, **changes | {"keys": changes.get("keys", {}) | keys})
    rows = "grouped" if setting.shares_prefixes else "different"
    report = ranks(size).run(jobs.gradient, setting=setting, rows=rows, loss="tokens" if setting.shares_prefixes else "grpo")[0]
    replicas = 2 if layout.startswith(("DP", "EP")) else 1
    _check(report, _expected(rows, _split(10 if rows == "grouped" else 8, 2, replicas), **losses))


def test_the_coefficient_of_config_json_is_used_where_no_key_is_set(
    ranks: Callable[[int], Ranks], tmp_path: Path, folder: str
) -> None:
    model = tiny_hf.build(_MODEL)
    model.config.router_aux_loss_coef = _COEFF
    model.save_pretrained(tmp_path)
    report = ranks(1).run(jobs.gradient, setting=Setting(str(tmp_path)))[0]
    _check(report, _expected("different", _split(8, 2), **_KINDS["aux"][1]))


def test_a_router_bias_counts_every_token_of_every_sequence_once(
    ranks: Callable[[int], Ranks], models: dict[str, Path]
) -> None:
    plain, *others = (
        ranks(1).run(jobs.counted_tokens, setting=Setting(str(models["deepseek"]), micro_batch_size=size, **changes))[0]
        for size, changes in ((10, {}), (4, {"shares_prefixes": True}), (3, {"packed": False}))
    )
    tokens = sum(jobs.ROWS["grouped"]().lengths)
    assert [sum(layer) for layer in plain] == [_TOPK * tokens]
    assert others == [plain, plain]
