"""The fused loss against the formula, and the number of its operators."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from sample_objectives import objective
from torch.utils._python_dispatch import TorchDispatchMode

from mindspeed_rl.algorithms.fused_loss import fuses
from mindspeed_rl.algorithms.interfaces import PolicyBatch
from mindspeed_rl.algorithms.policy_losses import compute_plain_loss, policy_loss

ROWS, WIDTH = 5, 7
#: operators of the loss with every metric and the KL; of its backward pass
MOST_FORWARD, MOST_BACKWARD = {"dapo": 25, "dr_grpo": 27, "grpo": 29}, 12
_FREE = {"detach", "alias", "slice", "select", "unbind", "expand", "view", "unsqueeze", "empty", "new_empty", "as_strided"}

OBJECTIVES = {
    "no KL": dict(kl_coef=0.0),
    "k3": dict(kl_coef=0.3),
    "limited k3": dict(kl_coef=0.3, kl_clamp=True),
    "k3 with the gradient of k2": dict(kl_coef=0.3, kl_penalty="k3+", kl_clamp=True),
    "entropy": dict(entropy_coeff=0.2, clip_ratio_high=0.4),
}


def batch_of(seed: int = 0, dtype: torch.dtype = torch.float64, spread: float = 0.4, missing: str = "") -> PolicyBatch:
    """Rows with NaN in all that is masked: a reply of a tool, a row that a filter emptied, a filler."""
    random = np.random.default_rng(seed)
    response = np.arange(WIDTH) < random.integers(1, WIDTH + 1, (ROWS, 1))
    response[0], response[3] = [True, True, False, False, True, True, False], False
    trains = response.copy()
    trains[2] = False
    log_probs = -3 * random.random((ROWS, WIDTH))
    columns = {
        "advantages": random.normal(size=(ROWS, WIDTH)),
        "entropy": random.random((ROWS, WIDTH)),
        **{
            name: log_probs + spread * random.normal(size=(ROWS, WIDTH))
            for name in ("old_log_probs", "ref_log_probs", "rollout_log_probs")
            if name != missing
        },
    }
    masked = {name: torch.tensor(np.where(trains, value, np.nan), dtype=dtype) for name, value in columns.items()}
    masked["entropy"].requires_grad_()
    return PolicyBatch(
        torch.tensor(np.where(trains, log_probs, np.nan), dtype=dtype).requires_grad_(),
        response_mask=torch.tensor(response),
        loss_mask=torch.tensor(trains),
        **masked,
    )


def results(loss: Any, batch: PolicyBatch, settings: Any) -> tuple[float, int, list[Any], dict[str, float]]:
    output = loss(batch, settings)
    output.loss_sum.backward()
    assert batch.entropy is not None
    gradients = [None if one.grad is None else one.grad.numpy() for one in (batch.log_probs, batch.entropy)]
    return output.loss_sum.item(), int(output.count), gradients, {name: one.result() for name, one in output.metrics.items()}


@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "dr_grpo"])
@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("missing", ["", "old_log_probs", "rollout_log_probs"])
@pytest.mark.parametrize("spread", [0.4, 30.0], ids=["near", "far"])
def test_loss_gradient_and_metrics_equal_the_formula_in_float64(loss_type: str, name: str, missing: str, spread: float) -> None:
    settings = objective(loss_type, max_response_length=9, **OBJECTIVES[name])
    assert fuses(batch_of(), settings)
    limits = {"rtol": 1e-8, "atol": 1e-10}
    found = results(policy_loss, batch_of(spread=spread, missing=missing), settings)
    expected = results(compute_plain_loss, batch_of(spread=spread, missing=missing), settings)
    np.testing.assert_allclose(found[0], expected[0], **limits)
    assert found[1] == expected[1] > 0
    for mine, theirs in zip(found[2], expected[2]):
        assert (mine is None) == (theirs is None)
        if theirs is not None:
            np.testing.assert_allclose(mine, theirs, **limits)
    assert set(found[3]) == set(expected[3])
    for metric, value in expected[3].items():
        np.testing.assert_allclose(found[3][metric], value, rtol=1e-6, atol=1e-9, err_msg=metric)


@pytest.mark.parametrize("distance", [0.0, 1e-6, 1e-4, 3e-3, 0.09, 0.11, 1.0, -1e-5, -0.05, -0.2, -2.0])
def test_the_kl_of_close_policies_keeps_its_digits_in_float32(distance: float) -> None:
    """k3 = e^-x + x - 1 with x = log pi - log ref, here by its series in Python's floats."""
    row = torch.full((1, 4), -1.0, dtype=torch.float32)
    reference = row - distance
    x = [float(new) - float(old) for new, old in zip(row[0].double(), reference[0].double())]
    mask = torch.ones(1, 4, dtype=torch.bool)
    batch = PolicyBatch(row.clone().requires_grad_(), torch.zeros(1, 4), mask, ref_log_probs=reference)
    settings = objective("dapo", kl_coef=1.0)
    assert fuses(batch, settings)
    output = policy_loss(batch, settings)
    exact = [sum((-one) ** k / math.factorial(k) for k in range(2, 30)) for one in x]
    assert output.loss_sum.item() == pytest.approx(sum(exact), rel=1e-5, abs=0.0)
    output.loss_sum.backward()
    assert batch.log_probs.grad is not None
    np.testing.assert_allclose(batch.log_probs.grad[0].numpy(), [-math.expm1(-one) for one in x], rtol=1e-6)


@pytest.mark.parametrize(
    "options",
    [
        dict(importance_sampling_level="sequence"),
        dict(clip_ratio_c=3.0),
        dict(delta=2.0),
        dict(rollout_correction="token_truncate", rollout_threshold=1.1),
        dict(off_policy_sequence_mask_delta=0.05),
        dict(kl_coef=0.3, kl_penalty="k1"),
        dict(kl_coef=0.3, use_bias_correction_kl=True),
    ],
    ids=str,
)
def test_everything_else_is_computed_by_the_formula(options: dict[str, Any]) -> None:
    assert not fuses(batch_of(), objective("grpo", **options))


class _Operators(TorchDispatchMode):
    """Count the calls that a device would get."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.partition("::")[2]
        if name not in _FREE:
            self.calls[name] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "dr_grpo"])
def test_a_micro_batch_has_few_operators(loss_type: str) -> None:
    settings = objective(loss_type, max_response_length=9, kl_coef=0.3, kl_clamp=True, log_rollout_metrics=True)
    batch = batch_of(dtype=torch.float32)
    with _Operators() as forward:
        output = policy_loss(batch, settings)
    with _Operators() as backward:
        output.loss_sum.backward()
    assert sum(forward.calls.values()) <= MOST_FORWARD[loss_type], forward.calls
    assert sum(backward.calls.values()) <= MOST_BACKWARD, backward.calls
