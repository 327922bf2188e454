"""Losses of a training service: closed forms of the published definitions, written here in float64 and token by token."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import pytest
import torch
from torch import Tensor

from mindspeed_rl.algorithms.call_losses import SAMPLED_LOSSES, compute_call_loss
from mindspeed_rl.algorithms.interfaces import LossInputs
from mindspeed_rl.service.backend import LOSSES, LossCall

#: (p, q, A, low, high) of a token -> (term, its derivative by p)
_Form = Callable[[float, float, float, float, float], tuple[float, float]]


def _ratio(p: float, q: float, a: float, low: float, high: float) -> tuple[float, float]:
    r = math.exp(p - q)
    return -r * a, -r * a


def _ppo(p: float, q: float, a: float, low: float, high: float) -> tuple[float, float]:
    r = math.exp(p - q)
    bounded = min(max(r, low), high)
    return (-r * a, -r * a) if r * a <= bounded * a else (-bounded * a, 0.0)


def _cispo(p: float, q: float, a: float, low: float, high: float) -> tuple[float, float]:
    weight = min(max(math.exp(p - q), low), high)
    return -weight * a * p, -weight * a


def _dro(p: float, q: float, a: float, low: float, high: float) -> tuple[float, float]:
    beta = 0.3
    return -(p * a - beta / 2 * (p - q) ** 2), -(a - beta * (p - q))


FORMS: dict[str, _Form] = {"importance_sampling": _ratio, "ppo": _ppo, "cispo": _cispo, "dro": _dro}
CONFIGS: dict[str, dict[str, float]] = {
    "ppo": {"clip_low_threshold": 0.7, "clip_high_threshold": 1.3},
    "cispo": {"clip_low_threshold": 0.2, "clip_high_threshold": 2.0},
    "dro": {"beta": 0.3},
}
LENGTHS = (6, 4)


def _draw() -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    shape = (len(LENGTHS), max(LENGTHS))
    mask = torch.arange(shape[1]) < torch.tensor(LENGTHS)[:, None]
    log_probs = -3 * torch.rand(shape, generator=generator, dtype=torch.float64)
    columns = {
        "logprobs": -3 * torch.rand(shape, generator=generator, dtype=torch.float64),
        "advantages": torch.randn(shape, generator=generator, dtype=torch.float64),
    }
    return torch.where(mask, log_probs, 0.0), mask, {name: torch.where(mask, values, 0.0) for name, values in columns.items()}


def _run(
    name: str, config: Mapping[str, float], log_probs: Tensor, mask: Tensor, columns: Mapping[str, Tensor]
) -> tuple[Tensor, Tensor]:
    leaf = log_probs.clone().requires_grad_(True)
    terms = compute_call_loss(name, LossCall(name, config).config, LossInputs((leaf,), mask, columns))
    torch.where(mask, terms, 0.0).sum().backward()
    assert leaf.grad is not None
    return terms.detach(), leaf.grad


@pytest.mark.parametrize("name", FORMS)
def test_terms_and_gradients_are_the_closed_forms(name: str) -> None:
    log_probs, mask, columns = _draw()
    config = CONFIGS.get(name, {})
    terms, gradient = _run(name, config, log_probs, mask, columns)
    low, high = config.get("clip_low_threshold", 0.0), config.get("clip_high_threshold", math.inf)
    for row, length in enumerate(LENGTHS):
        for token in range(length):
            numbers = [float(values[row, token]) for values in (log_probs, columns["logprobs"], columns["advantages"])]
            expected = FORMS[name](*numbers, low, high)
            assert [float(terms[row, token]), float(gradient[row, token])] == pytest.approx(expected, rel=1e-6)
    assert gradient[~mask].abs().max() == 0.0


@pytest.mark.parametrize("marked", [None, [[0, 0, 1, 1, 1, 1], [0, 1, 1, 1, 0, 0]]])
def test_gspo_has_the_ratio_of_the_sequence_and_the_gradient_of_each_token(marked: list[list[int]] | None) -> None:
    log_probs, mask, columns = _draw()
    columns["advantages"][0, :2] = 0.0
    if marked is not None:
        columns["sequence_ratio_mask"] = torch.tensor(marked, dtype=torch.float64)
    terms, gradient = _run("gspo", {}, log_probs, mask, columns)
    for row, length in enumerate(LENGTHS):
        a = columns["advantages"][row].tolist()
        inside = [t for t in range(length) if (marked[row][t] if marked is not None else a[t] != 0.0)]
        drift = [float(log_probs[row, t] - columns["logprobs"][row, t]) for t in inside]
        s = math.exp(sum(drift) / len(drift))
        for token in range(length):
            expected = _ppo(math.log(s), 0.0, a[token], 0.8, 1.2)
            assert [float(terms[row, token]), float(gradient[row, token])] == pytest.approx(expected, rel=1e-6, abs=1e-12)


def test_thresholds_of_a_token_replace_those_of_the_call() -> None:
    log_probs, mask, columns = _draw()
    columns["clip_high_threshold"] = torch.where(mask, 1.0 + torch.arange(6) / 10, 0.0)
    terms, _ = _run("ppo", {}, log_probs, mask, columns)
    for token in range(6):
        numbers = [float(values[0, token]) for values in (log_probs, columns["logprobs"], columns["advantages"])]
        assert float(terms[0, token]) == pytest.approx(_ppo(*numbers, 0.8, 1.0 + token / 10)[0], rel=1e-6)


def test_cross_entropy_weighs_every_target_by_any_number() -> None:
    log_probs, mask, _ = _draw()
    weights = torch.tensor([[1.0, 0.0, -2.0, 0.5, 3.0, 1.0], [1.0, 1.0, -1.0, 0.25, 0.0, 0.0]], dtype=torch.float64)
    terms, gradient = _run("cross_entropy", {}, log_probs, mask, {"weights": weights})
    assert torch.equal(terms, -log_probs * weights)
    assert torch.equal(gradient, torch.where(mask, -weights, 0.0))
    # K targets: their weighted log-probs are added
    both = compute_call_loss(
        "cross_entropy", {}, LossInputs((log_probs, 2 * log_probs), mask, {"weights": torch.stack([weights, weights**2], -1)})
    )
    assert torch.allclose(both, -log_probs * weights - 2 * log_probs * weights**2)


def test_every_loss_of_the_records_has_its_terms() -> None:
    assert {"cross_entropy", *SAMPLED_LOSSES} == set(LOSSES)
