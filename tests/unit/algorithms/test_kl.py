import math

import naive_algorithms as naive
import numpy as np
import pytest
import torch
from sample_objectives import objective

from mindspeed_rl.algorithms import kl
from mindspeed_rl.algorithms.interfaces import PolicyBatch
from mindspeed_rl.algorithms.kl import _KlController, build_kl_controller
from mindspeed_rl.algorithms.policy_losses import policy_loss
from mindspeed_rl.catalogue import KL_ESTIMATORS
from mindspeed_rl.catalogue.records import KlEstimator, find

POINTS = [-3.0, -0.5, -1e-3, 0.2, 1.0, 4.0]


def kl_penalty(log_probs, ref_log_probs, kind, *, clamp=False):
    return kl.kl_penalty(log_probs, ref_log_probs, find(KL_ESTIMATORS, KlEstimator, kind), clamp=clamp)


def at(points, kind, clamp=False):
    """Values and derivatives by log pi, with log ref = -1."""
    log_probs = (torch.tensor(points, dtype=torch.float64) - 1.0).requires_grad_()
    values = kl_penalty(log_probs, torch.full_like(log_probs, -1.0), kind, clamp=clamp)
    (gradient,) = torch.autograd.grad(values.sum(), log_probs)
    return values.detach().numpy(), gradient.numpy()


@pytest.mark.parametrize("kind", sorted(KL_ESTIMATORS))
def test_every_estimator_has_the_value_and_derivative_of_its_formula(kind):
    values, gradient = at(POINTS, kind)
    np.testing.assert_allclose(values, [naive.kl(x, kind) for x in POINTS], rtol=1e-9, atol=1e-12)
    expected = naive.gradient(lambda x: sum(naive.kl(a, kind, x_fixed=b) for a, b in zip(x, POINTS)), np.array(POINTS))
    np.testing.assert_allclose(gradient, expected, rtol=1e-6, atol=1e-8)


def test_estimators_by_hand_at_x_log_two():
    x = math.log(2.0)
    expected = {"k1": x, "abs": x, "k2": x * x / 2, "k3": 0.5 + x - 1.0, "k3+": 0.5 + x - 1.0}
    slopes = {"k1": 1.0, "abs": 1.0, "k2": x, "k3": 0.5, "k3+": x}
    for kind, value in expected.items():
        values, gradient = at([x], kind)
        assert (values[0], gradient[0]) == pytest.approx((value, slopes[kind]))


def test_upstream_and_short_names_are_the_same_estimators():
    for upstream, short in (("kl", "k1"), ("mse", "k2"), ("low_var_kl", "k3"), ("low_var_kl+", "k3+")):
        assert KL_ESTIMATORS[upstream] == KL_ESTIMATORS[short]


def test_low_var_kl_is_clamped_to_ten_only_on_request():
    values, gradient = at([-4.0, -30.0, 1.0], "low_var_kl", clamp=True)
    np.testing.assert_allclose(values, [10.0, 10.0, math.exp(-1.0)], rtol=1e-12)
    assert gradient[0] == gradient[1] == 0.0
    values, gradient = at([-4.0], "low_var_kl")
    assert values[0] == pytest.approx(math.exp(4.0) - 5.0)
    assert gradient[0] == pytest.approx(1.0 - math.exp(4.0))


@pytest.mark.parametrize("x", [-4.0, -30.0, -99.0, 99.0])
def test_k3_plus_keeps_the_gradient_of_k2_beyond_the_clamp(x):
    """It exists to pull a policy back that has gone far; there a clamped k3 has no gradient at all."""
    for dtype in (torch.float32, torch.float64):
        log_probs = torch.tensor([x], dtype=dtype, requires_grad=True)
        value = kl_penalty(log_probs, torch.zeros(1, dtype=dtype), "k3+", clamp=True)
        value.sum().backward()
        assert value.item() == pytest.approx(10.0, rel=1e-4)
        assert log_probs.grad.item() == pytest.approx(x)


LIMITS = [
    s * x for x in (0.0, 1e-8, 1e-4, 0.02, 0.099, 0.11, 0.3, 1.0, 2.6, 2.7, 6.0, 12.5, 19.9, 20.1, 40.0, 60.0) for s in (1, -1)
]


def exact(kind, x, clamp):
    """Value and slope of an estimator in double precision, from its formula."""
    inside = min(max(x, -20.0), 20.0) if clamp else x
    # by its series, because the sum cancels in double precision too
    k3 = sum((-inside) ** n / math.factorial(n) for n in range(2, 9)) if abs(x) < 0.01 else math.expm1(-inside) + inside
    limited = clamp and (abs(x) > 20.0 or k3 > 10.0)
    k3 = min(k3, 10.0) if clamp else k3
    return {
        "k1": (x, 1.0),
        "abs": (abs(x), float(np.sign(x))),
        "k2": (x * x / 2, x),
        "k3": (k3, 0.0 if limited else -math.expm1(-x)),
        "k3+": (k3, x),
    }[kind]


@pytest.mark.parametrize("clamp", [False, True])
@pytest.mark.parametrize("kind", ["k1", "abs", "k2", "k3", "k3+"])
def test_value_and_slope_are_exact_in_float32_at_every_limit(kind, clamp):
    x = torch.tensor(LIMITS, requires_grad=True)
    values = kl_penalty(x, torch.zeros_like(x), kind, clamp=clamp)
    (slopes,) = torch.autograd.grad(values.sum(), x)
    at_float32 = x.detach().double().tolist()
    np.testing.assert_allclose(values.detach(), [exact(kind, a, clamp)[0] for a in at_float32], rtol=3e-6, atol=0)
    np.testing.assert_allclose(slopes, [exact(kind, a, clamp)[1] for a in at_float32], rtol=2e-6, atol=0)


@pytest.mark.parametrize("clamp", [False, True])
@pytest.mark.parametrize("kind", ["k1", "abs", "k2", "k3", "k3+"])
def test_under_the_ratio_k2_and_k3_have_the_gradient_of_the_kl_itself_at_every_limit(kind, clamp):
    """d(r k) = r (k' + k): for k3 r (1 - e^-x + e^-x + x - 1) = r x, which a limit on the value must not change."""
    for drift in (0.0, 0.7, -3.0):
        log_probs = torch.tensor(LIMITS, requires_grad=True)
        log_ratio = log_probs - (log_probs.detach() - drift)
        estimator = find(KL_ESTIMATORS, KlEstimator, kind)
        values = kl.kl_penalty(log_probs, torch.zeros(len(LIMITS)), estimator, clamp=clamp, log_ratio=log_ratio)
        (slopes,) = torch.autograd.grad(values.sum(), log_probs)
        expected = []
        for x, ratio in zip(log_probs.detach().double().tolist(), log_ratio.detach().double().exp().tolist()):
            value, slope = exact(kind, x, clamp)
            expected.append((ratio * value, ratio * (x if kind in ("k2", "k3", "k3+") else value + slope)))
        np.testing.assert_allclose(values.detach(), [value for value, _ in expected], rtol=3e-6, atol=0)
        np.testing.assert_allclose(slopes, [slope for _, slope in expected], rtol=3e-6, atol=0)


def test_the_clamp_leaves_the_other_estimators_alone():
    for kind in ("k1", "k2", "abs"):
        assert at([-40.0], kind, clamp=True)[0][0] == at([-40.0], kind)[0][0]


def test_k3_keeps_its_digits_near_zero():
    x = torch.tensor([1e-4])
    got = kl_penalty(x, torch.zeros(1), "k3").item()
    assert got == pytest.approx(5e-9, rel=0.01)


@pytest.mark.parametrize("distance", [0.0, 1e-6, 1e-4, 3e-3, 0.09, 0.11, 1.0, -1e-5, -0.05, -0.2, -2.0])
def test_the_kl_of_close_policies_keeps_its_digits_in_float32(distance):
    """k3 = e^-x + x - 1 with x = log pi - log ref, here by its series in Python's floats."""
    row = torch.full((1, 4), -1.0, dtype=torch.float32)
    reference = row - distance
    x = [float(new) - float(old) for new, old in zip(row[0].double(), reference[0].double())]
    mask = torch.ones(1, 4, dtype=torch.bool)
    batch = PolicyBatch(row.clone().requires_grad_(), torch.zeros(1, 4), mask, ref_log_probs=reference)
    output = policy_loss(batch, objective("dapo", kl_coef=1.0))
    exact = [sum((-value) ** k / math.factorial(k) for k in range(2, 30)) for value in x]
    assert output.loss_sum.item() == pytest.approx(sum(exact), rel=1e-5, abs=0.0)
    output.loss_sum.backward()
    np.testing.assert_allclose(batch.log_probs.grad[0].numpy(), [-math.expm1(-value) for value in x], rtol=1e-6)


def test_as_a_loss_k2_follows_the_gradient_of_the_true_kl_and_k3_that_of_its_reverse():
    # All tokens of a 4-word vocabulary, weighted by their probability: expectations without sampling.
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(4, generator=generator, dtype=torch.float64, requires_grad=True)
    ref = torch.randn(4, generator=generator, dtype=torch.float64).log_softmax(0)

    def gradient(loss):
        return torch.autograd.grad(loss, logits)[0]

    log_pi = logits.log_softmax(0)
    forward = gradient((log_pi.exp() * (log_pi - ref)).sum())
    log_pi = logits.log_softmax(0)
    reverse = gradient((ref.exp() * (ref - log_pi)).sum())

    def expected_gradient(kind):
        log_pi = logits.log_softmax(0)
        return gradient((log_pi.exp().detach() * kl_penalty(log_pi, ref, kind)).sum())

    torch.testing.assert_close(expected_gradient("k2"), forward)
    torch.testing.assert_close(expected_gradient("k3+"), forward)
    torch.testing.assert_close(expected_gradient("k3"), reverse)
    torch.testing.assert_close(expected_gradient("k1"), torch.zeros_like(forward), atol=1e-12, rtol=0)


def test_an_unknown_estimator_gets_a_suggestion():
    with pytest.raises(ValueError, match="kl_penalty: unknown value 'low_var'; did you mean 'low_var_kl'"):
        kl_penalty(torch.zeros(1), torch.zeros(1), "low_var")


def test_the_adaptive_controller_moves_towards_its_target_by_at_most_a_fifth():
    controller = _KlController(0.1, target=2.0, horizon=100)
    controller.update(current_kl=2.2, num_samples=50)
    assert controller.coef == pytest.approx(0.1 * (1 + 0.1 * 0.5))
    controller = _KlController(0.1, target=2.0, horizon=100)
    controller.update(current_kl=200.0, num_samples=50)
    assert controller.coef == pytest.approx(0.1 * 1.1)
    controller.update(current_kl=0.0, num_samples=100)
    assert controller.coef == pytest.approx(0.1 * 1.1 * 0.8)


def test_more_samples_than_a_horizon_move_the_coefficient_by_a_fifth_and_never_turn_its_sign():
    controller = _KlController(0.1, target=2.0, horizon=100)
    controller.update(current_kl=0.0, num_samples=100_000)
    assert controller.coef == pytest.approx(0.08)


def test_a_controller_continues_from_its_saved_state():
    first = _KlController(0.1, target=2.0, horizon=10)
    first.update(5.0, 4)
    second = _KlController(0.1, target=2.0, horizon=10)
    second.load_state_dict(first.state_dict())
    for controller in (first, second):
        controller.update(1.0, 4)
    assert first.coef == second.coef != 0.1


def test_the_fixed_controller_does_not_move():
    controller = _KlController(0.3)
    controller.update(100.0, 1000)
    assert controller.coef == 0.3


def test_the_run_file_chooses_the_controller():
    assert build_kl_controller(objective(kl_coef=0.2)) == _KlController(0.2)
    adaptive = build_kl_controller(objective(kl_ctrl_type="adaptive", kl_coef=0.2, kl_target=3.0, kl_horizon=7))
    assert (adaptive.coef, adaptive.target, adaptive.horizon) == (0.2, 3.0, 7)


@pytest.mark.parametrize(("target", "horizon", "message"), [(0.0, 10, "kl_target"), (1.0, 0, "kl_horizon")])
def test_a_controller_without_target_or_horizon_is_refused(target, horizon, message):
    with pytest.raises(ValueError, match=message):
        _KlController(0.1, target, horizon)
