import math

import naive_algorithms as naive
import numpy as np
import pytest
import torch
from sample_objectives import objective

from mindspeed_rl.algorithms.aggregation import Aggregation, reduce_tokens
from mindspeed_rl.algorithms.corrections import compute_rollout_weights, measure_mismatch
from mindspeed_rl.algorithms.interfaces import PendingMetrics
from mindspeed_rl.catalogue import CORRECTIONS
from mindspeed_rl.observability.metrics import merge

TWO = math.log(2.0)


def correction(mode, high, low=None):
    return objective(rollout_correction=mode, rollout_threshold=high, rollout_threshold_min=low)


def weights(differences, mode, high=1.5, low=None):
    difference = torch.tensor([differences], dtype=torch.float64)
    mask = torch.ones_like(difference, dtype=torch.bool)
    return compute_rollout_weights(difference, mask, correction(mode, high, low))[0].tolist()


def mismatch(old, rollout, mask):
    return PendingMetrics(reduce_tokens(measure_mismatch(old - rollout), Aggregation(mask, mask, "token")))


@pytest.mark.parametrize(
    ("mode", "low", "expected"),
    [  # w = 2, 2, 0.25: product 1, geometric mean 1
        ("token_truncate", None, [1.5, 1.5, 0.25]),
        ("token_mask", None, [0.0, 0.0, 0.25]),
        ("token_mask", 0.5, [0.0, 0.0, 0.0]),
        ("sequence_truncate", None, [1.0, 1.0, 1.0]),
        ("geometric_mask", 0.5, [1.0, 1.0, 1.0]),
        ("token_geometric_mask", 0.5, [2.0, 2.0, 0.25]),
    ],
)
def test_corrections_by_hand(mode, low, expected):
    assert weights([TWO, TWO, -2 * TWO], mode, low=low) == pytest.approx(expected)


def test_product_and_geometric_mean_differ_by_the_length():
    differences = [0.1] * 20
    assert weights(differences, "sequence_truncate", high=100.0) == pytest.approx([math.exp(2.0)] * 20)
    assert weights(differences, "geometric_truncate", high=100.0) == pytest.approx([math.exp(0.1)] * 20)
    assert weights(differences, "sequence_mask", high=2.0) == [0.0] * 20
    assert weights(differences, "geometric_mask", high=2.0) == pytest.approx([math.exp(0.1)] * 20)
    assert weights(differences, "token_geometric_mask", high=1.05) == [0.0] * 20


@pytest.mark.parametrize("mode", CORRECTIONS)
def test_every_mode_equals_the_naive_loops_on_ragged_rows(mode):
    rng = np.random.default_rng(0)
    old, rollout = rng.normal(size=(5, 8)), rng.normal(size=(5, 8))
    mask = rng.random((5, 8)) < 0.6
    mask[3] = False
    low = 0.3 if mode.endswith("mask") else None
    difference = torch.tensor(np.where(mask, old - rollout, 0.0))
    got = compute_rollout_weights(difference, torch.tensor(mask), correction(mode, 1.4, low)).numpy()
    assert (got[~mask] == 1.0).all()
    for i in (0, 1, 2, 4):
        expected = naive.rollout_weight(list((old - rollout)[i][mask[i]]), mode, 1.4, low)
        np.testing.assert_allclose(got[i][mask[i]], expected, rtol=1e-12)


@pytest.mark.parametrize(
    ("mode", "statistic"),
    [
        ("token_rejection_mask", lambda k1: k1),
        ("sequence_rejection_mask", lambda k1: np.full_like(k1, k1.sum())),
        ("geometric_rejection_mask", lambda k1: np.full_like(k1, k1.mean())),
    ],
)
def test_a_rejection_mask_keeps_what_verl_keeps(mode, statistic):
    # verl's compute_rollout_rejection_mask: k1 = log(mu / pi), kept where log(lower) <= k1 (its sum, its mean) <= log(upper)
    lower, upper = 0.8, 1.3
    rng = np.random.default_rng(3)
    kept = []
    for _ in range(200):
        difference = rng.normal(scale=0.2, size=rng.integers(1, 6))
        number = statistic(-difference)
        expected = (number >= math.log(lower)) & (number <= math.log(upper))
        assert weights(list(difference), mode, high=1 / lower, low=1 / upper) == expected.astype(float).tolist()
        kept.append(expected.any())
    assert 0 < sum(kept) < len(kept)


def test_weights_carry_no_gradient():
    old = torch.zeros(1, 2, requires_grad=True)
    mask = torch.ones(1, 2, dtype=torch.bool)
    assert not compute_rollout_weights(old - old.detach(), mask, correction("token_mask", 2.0)).requires_grad


def test_mismatch_by_hand():
    mask = torch.tensor([[True, True, False]])
    old, rollout = torch.tensor([[TWO, 0.0, 9.0]]), torch.tensor([[0.0, TWO, 0.0]])
    results = {name: metric.result() for name, metric in mismatch(old, rollout, mask).items()}
    # w = 2 and 0.5
    assert results == pytest.approx(
        {
            "rollout/log_probs_diff_mean": TWO,
            "rollout/log_probs_diff_max": TWO,
            "rollout/kl": ((2 - 1 - TWO) + (0.5 - 1 + TWO)) / 2,
            "rollout/ess": 2.5**2 / (2 * 4.25),
        }
    )


def test_two_equal_policies_have_no_kl_and_a_full_effective_sample_size():
    old = -torch.rand(3, 4)
    metrics = mismatch(old, old, torch.ones(3, 4, dtype=torch.bool))
    assert metrics["rollout/kl"].result() == 0.0
    assert metrics["rollout/ess"].result() == 1.0


def test_the_effective_sample_size_of_parts_merges_to_that_of_all():
    generator = torch.Generator().manual_seed(0)
    old, rollout = torch.randn(2, 6, 5, generator=generator, dtype=torch.float64)
    mask = torch.rand(6, 5, generator=generator) < 0.7
    whole = merge([mismatch(old, rollout, mask)]).results()
    parts = [mismatch(old[rows], rollout[rows], mask[rows]) for rows in ([0], [1, 2, 3], [4, 5])]
    assert merge(parts).results() == pytest.approx(whole)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("outlier", [-300.0, -44.0, -3.0, 3.0, 19.0, 21.0, 43.0, 44.0, 45.0, 60.0, 90.0, 200.0])
@pytest.mark.parametrize("everywhere", [False, True], ids=["one token", "all tokens"])
def test_the_effective_sample_size_of_far_policies_is_that_of_float64(
    dtype: torch.dtype, outlier: float, everywhere: bool
) -> None:
    generator = torch.Generator().manual_seed(0)
    difference = 0.5 * torch.randn(6, 5, generator=generator, dtype=torch.float64).to(dtype).double()
    mask = torch.rand(6, 5, generator=generator) < 0.8
    mask[2, 1] = True
    if everywhere:
        difference += outlier
    else:
        difference[2, 1] = outlier
    weights = np.exp(difference.to(dtype).double().numpy()[mask.numpy()])
    expected = weights.sum() ** 2 / (len(weights) * (weights**2).sum())
    zeros = torch.zeros(6, 5, dtype=dtype)
    whole = mismatch(difference.to(dtype), zeros, mask)
    assert whole["rollout/ess"].result() == pytest.approx(expected, rel=1e-5)
    # micro-batches with other largest weights, and one without tokens
    parts = [mismatch(difference[rows].to(dtype), zeros[rows], mask[rows]) for rows in ([0], [1, 2, 3], [4, 5])]
    parts.append(mismatch(zeros[:1], zeros[:1], torch.zeros_like(mask[:1])))
    assert merge(parts).results()["rollout/ess"] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("outlier", [-300.0, -44.0, -1e-3, 19.0, 21.0, 44.0, 60.0, 88.0, 89.0, 300.0, float("inf")])
@pytest.mark.parametrize("everywhere", [False, True], ids=["one token", "all tokens"])
def test_the_rollout_kl_of_far_policies_is_that_of_float64_and_finite(
    dtype: torch.dtype, outlier: float, everywhere: bool
) -> None:
    difference = 0.5 * torch.randn(400, 50, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    if everywhere:
        difference[:] = outlier
    else:
        difference[2, 1] = outlier
    limited = np.minimum(difference.to(dtype).double().numpy(), 60.0)
    expected = (np.expm1(limited) - limited).mean()
    found = mismatch(difference.to(dtype), torch.zeros_like(difference, dtype=dtype), torch.ones(400, 50, dtype=torch.bool))
    assert np.isfinite(expected) and found["rollout/kl"].result() == pytest.approx(expected, rel=1e-5)
    assert found["rollout/log_probs_diff_max"].result() >= abs(outlier) - 1e-3


def test_the_expected_rollout_kl_is_the_true_kl_of_the_engine_to_the_trainer():
    mu = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    pi = torch.tensor([0.2, 0.2, 0.6], dtype=torch.float64)
    true = (mu * (mu / pi).log()).sum()
    difference = (pi / mu).log()
    estimate = (mu * (torch.expm1(difference) - difference)).sum()
    torch.testing.assert_close(estimate, true)
    # the same tokens in those proportions, through the metric
    counts = [5, 3, 2]
    old = torch.cat([pi[k].log().expand(count) for k, count in enumerate(counts)]).unsqueeze(0)
    rollout = torch.cat([mu[k].log().expand(count) for k, count in enumerate(counts)]).unsqueeze(0)
    metrics = mismatch(old, rollout, torch.ones_like(old, dtype=torch.bool))
    assert metrics["rollout/kl"].result() == pytest.approx(true.item())


def test_tensors_that_are_read_with_metrics_keep_their_order_and_their_values() -> None:
    metrics = PendingMetrics(
        {"loss": ("mean", (torch.tensor(6.0), torch.tensor(3))), "nothing": ("sum", (torch.zeros(()),) * 2)}
    )
    others = [torch.tensor(2), torch.tensor(0.25), torch.tensor(float("inf"))]
    assert PendingMetrics.read([metrics, {}], others) == [2.0, 0.25, float("inf")]
    assert {name: (metric.value, metric.count) for name, metric in metrics.items()} == {"loss": (6.0, 3.0)}
    assert PendingMetrics.read([], others[:1]) == [2.0] and PendingMetrics.read([]) == []
