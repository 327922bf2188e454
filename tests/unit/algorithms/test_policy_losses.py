import math

import naive_algorithms as naive
import numpy as np
import pytest
import torch
from sample_objectives import objective

from mindspeed_rl.algorithms.interfaces import PolicyBatch
from mindspeed_rl.algorithms.masks import entropy_threshold
from mindspeed_rl.algorithms.policy_losses import policy_loss
from mindspeed_rl.catalogue import CORRECTIONS, POLICY_LOSSES
from mindspeed_rl.config import RLConfig
from mindspeed_rl.config.compat.aliases import apply_aliases
from mindspeed_rl.observability.metrics import merge
from mindspeed_rl.run.objective import build_objective

ROWS, LENGTH = 6, 5
COLUMNS = {"old": "old_log_probs", "ref": "ref_log_probs", "rollout": "rollout_log_probs"}

EVERYTHING = dict(
    kl_coef=0.3,
    entropy_coeff=0.2,
    rollout_correction="token_truncate",
    rollout_threshold=1.1,
    off_policy_sequence_mask_delta=0.05,
)
# One entry for each branch of the loss; each is checked for every loss type it applies to.
OPTIONS = {
    "plain": {},
    "clip_higher": dict(clip_ratio_low=0.1, clip_ratio_high=0.4),
    "k1": dict(kl_coef=0.3, kl_penalty="k1"),
    "abs": dict(kl_coef=0.3, kl_penalty="abs"),
    "k2": dict(kl_coef=0.3, kl_penalty="mse"),
    "k3": dict(kl_coef=0.3, kl_penalty="low_var_kl"),
    "k3_clamped": dict(kl_coef=0.3, kl_penalty="low_var_kl", kl_clamp=True),
    "k3_plus": dict(kl_coef=0.3, kl_penalty="k3+"),
    "bias_corrected_kl": dict(kl_coef=0.3, use_bias_correction_kl=True),
    "entropy": dict(entropy_coeff=0.2),
    "opsm": dict(off_policy_sequence_mask_delta=0.05),
    "sequence_ratio": dict(importance_sampling_level="sequence"),
    "sequence_token_ratio": dict(importance_sampling_level="sequence_token"),
    "everything": EVERYTHING,
}


def settings_for(loss_type, **options):
    if loss_type == "cispo_cap":
        options = options | {"clip_ratio_high": 1.05}
    if POLICY_LOSSES[loss_type].compares_group:
        options = options | {"group_size": 3}
    return {"loss_type": loss_type, "max_response_length": 9} | options


def random_arrays(seed=0, threshold=None, on_policy=False):
    rng = np.random.default_rng(seed)
    shape = (ROWS, LENGTH)
    response = np.arange(LENGTH) < rng.integers(1, LENGTH + 1, (ROWS, 1))
    response[0] = [True, False, True, True, False]  # a tool's reply in the middle
    response[4] = False  # a filler row
    loss = response.copy()
    loss[2] = False  # emptied by the overlong filter
    loss[0, 3] = False  # sampled, but does not train
    log_probs = -rng.random(shape) * 3
    return log_probs, {
        "advantages": rng.normal(size=shape),
        "response_mask": response,
        "loss_mask": loss,
        "old": None if on_policy else np.minimum(log_probs + 0.3 * rng.normal(size=shape), -1e-3),
        "ref": log_probs + rng.normal(size=shape),
        "rollout": log_probs + 0.3 * rng.normal(size=shape),
        "entropy": rng.random(shape),
        "entropy_threshold": threshold,
        "marked": rng.random(shape) < 0.4,
    }


def as_batch(log_probs, arrays, rows=slice(None), padding=0):
    """PolicyBatch of some rows; `padding` columns of NaN are added on the right, and NaN replaces all that is masked."""

    def widen(values, mask, fill):
        values = np.where(mask, values, fill) if padding else values
        return torch.tensor(np.pad(values, ((0, 0), (0, padding)), constant_values=fill))

    response, loss = arrays["response_mask"][rows], arrays["loss_mask"][rows]
    columns = {
        name: None if arrays[name] is None else widen(arrays[name][rows], loss, np.nan)
        for name in ("advantages", "old", "ref", "rollout", "entropy")
    }
    return PolicyBatch(
        widen(log_probs[rows], loss, np.nan).requires_grad_(),
        response_mask=widen(response, response, False),
        loss_mask=widen(loss, loss, False),
        marked=widen(arrays["marked"][rows], loss, False),
        entropy_threshold=arrays["entropy_threshold"],
        **{COLUMNS.get(name, name): column for name, column in columns.items()},
    )


def loss_and_gradient(log_probs, arrays, options):
    batch = as_batch(log_probs, arrays)
    output = policy_loss(batch, objective(**options))
    loss = output.loss_sum / output.count
    loss.backward()
    return loss.item(), batch.log_probs.grad.numpy()


def assert_equals_naive(log_probs, arrays, options):
    loss, gradient = loss_and_gradient(log_probs, arrays, options)
    assert loss == pytest.approx(naive.policy_loss(log_probs, log_probs, arrays, options), rel=1e-10, abs=1e-12)
    expected = naive.gradient(lambda moved: naive.policy_loss(moved, log_probs, arrays, options), log_probs)
    np.testing.assert_allclose(gradient, expected, rtol=1e-6, atol=1e-8)
    assert np.abs(gradient).max() > 0


def supports(loss_type, option):
    return OPTIONS[option].get("importance_sampling_level", "token") in POLICY_LOSSES[loss_type].levels


CASES = [(name, option) for name in sorted(POLICY_LOSSES) for option in OPTIONS if supports(name, option)]


@pytest.mark.parametrize(("loss_type", "option"), CASES)
def test_value_and_gradient_equal_the_naive_loops_and_finite_differences(loss_type, option):
    assert_equals_naive(*random_arrays(), settings_for(loss_type, **OPTIONS[option]))


PAPER_OPTIONS = [
    ("dppo_tv", dict(clip_ratio_c=1.1, clip_ratio_low=0.02, clip_ratio_high=0.03)),
    ("dppo_kl", dict(clip_ratio_c=1.1, clip_ratio_low=0.002, clip_ratio_high=0.004)),
    ("fipo", dict(delta=1.4, fipo_decay_rate=1.5)),
    ("fipo", dict(fipo_clip_range=1e9, fipo_clip_high_only=False, fipo_safety_threshold=1.1)),
    ("fipo", dict(fipo_clip_high_only=False, fipo_clip_range=0.1)),
    ("dro", dict(dro_beta=0.3)),
    ("gmpo", dict(clip_ratio_low=0.05, clip_ratio_high=0.1)),
    ("clip_cov", dict(clip_ratio_low=0.05, clip_ratio_high=0.1)),
    ("kl_cov", dict(ppo_kl_coef=0.2)),
    ("real", dict(real_tau=0.1)),
    ("online_dpo", dict(online_dpo_beta=0.7)),
    ("online_dpo", dict(online_dpo_beta=0.7, online_dpo_loss_type="ipo")),
]


@pytest.mark.parametrize(("loss_type", "options"), PAPER_OPTIONS)
def test_the_numbers_of_a_loss_act_as_its_formula_has_them(loss_type, options):
    log_probs, arrays = random_arrays(3)
    assert_equals_naive(log_probs, arrays, settings_for(loss_type, **options))
    changed, _ = loss_and_gradient(log_probs, arrays, settings_for(loss_type, **options))
    assert changed != pytest.approx(loss_and_gradient(log_probs, arrays, settings_for(loss_type))[0], rel=1e-6)


@pytest.mark.parametrize("bound", [dict(clip_ratio_c=1.3), dict(delta=1.3)])
@pytest.mark.parametrize("level", [None, "sequence", "sequence_token"])
def test_dual_clip_and_delta_equal_the_naive_loops(bound, level):
    log_probs, arrays = random_arrays()
    arrays["old"] -= 0.2
    assert_equals_naive(log_probs, arrays, settings_for("grpo", importance_sampling_level=level, **bound))


@pytest.mark.parametrize(
    ("mode", "low"), [(mode, None) for mode in CORRECTIONS] + [(mode, 0.95) for mode in CORRECTIONS if mode.endswith("mask")]
)
def test_every_rollout_correction_equals_the_naive_loops_and_leaves_the_kl_alone(mode, low):
    options = dict(rollout_correction=mode, rollout_threshold=1.2, rollout_threshold_min=low, kl_coef=0.3)
    assert_equals_naive(*random_arrays(), settings_for("dapo", **options))


@pytest.mark.parametrize("loss_type", sorted(POLICY_LOSSES))
def test_without_old_log_probs_the_ratio_is_one_and_still_has_a_gradient(loss_type):
    assert_equals_naive(*random_arrays(on_policy=True), settings_for(loss_type, kl_coef=0.1))


@pytest.mark.parametrize("threshold", [0.2, 0.5, 0.7])
@pytest.mark.parametrize("loss_type", sorted(POLICY_LOSSES))
def test_the_entropy_mask_drops_the_policy_term_and_keeps_the_denominator(loss_type, threshold):
    assert_equals_naive(*random_arrays(threshold=threshold), settings_for(loss_type, kl_coef=0.3))


@pytest.mark.parametrize(
    ("loss_type", "option"),
    [case for case in CASES if case[1] in ("plain", "everything", "sequence_ratio", "sequence_token_ratio")],
)
def test_loss_gradient_and_metrics_do_not_depend_on_micro_batches_order_or_padding(loss_type, option):
    log_probs, arrays = random_arrays(threshold=0.4)
    settings = objective(**settings_for(loss_type, **OPTIONS[option]))
    whole = policy_loss(as_batch(log_probs, arrays), settings)
    loss, gradient = loss_and_gradient(log_probs, arrays, settings_for(loss_type, **OPTIONS[option]))
    expected = merge([whole.metrics]).results()
    cuts = ([[0, 1, 2, 3, 4, 5]], [[0], [1], [2], [3], [4], [5]], [[5, 2], [0, 4, 3], [1]], [[4], [3, 2, 1, 0, 5]])
    if POLICY_LOSSES[loss_type].compares_group:
        cuts = ([[0, 1, 2], [3, 4, 5]], [[3, 4, 5, 0, 1, 2]], [[4, 3, 5], [2, 0, 1]])
    for cut in cuts:
        for padding in (0, 3):
            batches = [as_batch(log_probs, arrays, rows, padding) for rows in cut]
            outputs = [policy_loss(batch, settings) for batch in batches]
            total = sum(output.loss_sum for output in outputs) / sum(output.count for output in outputs)
            total.backward()
            assert total.item() == pytest.approx(loss, rel=1e-12)
            for rows, batch in zip(cut, batches):
                np.testing.assert_allclose(batch.log_probs.grad[:, :LENGTH].numpy(), gradient[rows], rtol=1e-10, atol=1e-14)
                assert batch.log_probs.grad[:, LENGTH:].abs().sum() == 0
            results = merge([output.metrics for output in outputs]).results()
            assert results == pytest.approx(expected, rel=1e-10, abs=1e-14)


@pytest.mark.parametrize("loss_type", sorted(POLICY_LOSSES))
def test_float32_agrees_with_float64(loss_type):
    log_probs, arrays = random_arrays()
    options = settings_for(loss_type, **EVERYTHING)
    single = {
        name: values.astype(np.float32) if values is not None and np.asarray(values).dtype == np.float64 else values
        for name, values in arrays.items()
    }
    loss, gradient = loss_and_gradient(log_probs, arrays, options)
    loss32, gradient32 = loss_and_gradient(log_probs.astype(np.float32), single, options)
    assert loss32 == pytest.approx(loss, rel=1e-5)
    np.testing.assert_allclose(gradient32, gradient, rtol=1e-4, atol=1e-6)


def single_row(ratios, advantages, **options):
    """Loss of one response with these ratios, log pi = -1 everywhere."""
    log_probs = torch.full((1, len(ratios)), -1.0, dtype=torch.float64, requires_grad=True)
    old = log_probs.detach() - torch.tensor([ratios], dtype=torch.float64).log()
    batch = PolicyBatch(
        log_probs,
        torch.tensor([advantages], dtype=torch.float64),
        torch.ones(1, len(ratios), dtype=torch.bool),
        old_log_probs=old,
    )
    output = policy_loss(batch, objective(**options))
    output.loss_sum.backward()
    return output, log_probs.grad[0].tolist()


def test_clip_by_hand():
    output, gradient = single_row([1.5, 1.5, 0.5, 0.5], [1.0, -1.0, 1.0, -1.0], loss_type="dapo")
    # -min(1.5, 1.2), -min(-1.5, -1.2), -min(0.5, 0.8), -min(-0.5, -0.8)
    assert output.loss_sum.item() == pytest.approx(-1.2 + 1.5 - 0.5 + 0.8)
    assert output.count.item() == 4
    assert gradient == pytest.approx([0.0, 1.5, -0.5, 0.0])
    assert output.metrics["actor/pg_clipfrac"].result() == 0.5
    assert output.metrics["actor/ppo_kl"].result() == pytest.approx(-(2 * math.log(1.5) + 2 * math.log(0.5)) / 4)


@pytest.mark.parametrize("loss_type", POLICY_LOSSES)
@pytest.mark.parametrize("log_ratio", [99.0, -99.0, 300.0])
def test_a_policy_that_has_run_away_gives_finite_losses_and_gradients_in_float32(loss_type, log_ratio):
    for advantage in (1.0, -1.0):
        log_probs = torch.full((3, 2), -1.0, requires_grad=True)
        mask = torch.ones(3, 2, dtype=torch.bool)
        advantages = torch.tensor([advantage, advantage, -advantage])[:, None].expand(3, 2)
        old = torch.tensor([[-1.0 - log_ratio, -1.0]]).expand(3, 2)
        batch = PolicyBatch(log_probs, advantages, mask, old_log_probs=old, ref_log_probs=old, marked=mask)
        output = policy_loss(batch, objective(**settings_for(loss_type)))
        output.loss_sum.backward()
        assert torch.isfinite(output.loss_sum) and torch.isfinite(log_probs.grad).all()
        assert output.metrics["actor/log_ratio_clamped"].result() == 0.5


def test_clip_higher_moves_only_the_upper_bound():
    output, _ = single_row([1.5, 0.5], [1.0, -1.0], loss_type="dapo", clip_ratio_low=0.2, clip_ratio_high=0.28)
    assert output.loss_sum.item() == pytest.approx(-1.28 + 0.8)


def test_dual_clip_by_hand():
    output, gradient = single_row([5.0, 2.0, 5.0], [-1.0, -1.0, 1.0], loss_type="dapo", clip_ratio_c=3.0)
    assert output.loss_sum.item() == pytest.approx(3.0 + 2.0 - 1.2)
    assert gradient == pytest.approx([0.0, 2.0, 0.0])


def test_delta_above_the_clip_is_dual_clip_with_the_same_bound():
    ratios, advantages = [0.1, 0.9, 1.1, 1.25, 2.0, 9.0] * 2, [1.0] * 6 + [-1.0] * 6
    two_sided, gradient = single_row(ratios, advantages, loss_type="dapo", delta=1.5)
    dual, dual_gradient = single_row(ratios, advantages, loss_type="dapo", clip_ratio_c=1.5)
    assert two_sided.loss_sum.item() == pytest.approx(dual.loss_sum.item())
    assert gradient == pytest.approx(dual_gradient)


def test_the_three_normalizers_by_hand():
    mask = torch.tensor([[True, False], [True, True], [False, False]])
    batch = PolicyBatch(torch.zeros(3, 2), torch.tensor([[1.0, 9.0], [2.0, 2.0], [9.0, 9.0]]), mask)
    got = {}
    for loss_type in ("grpo", "dapo", "dr_grpo"):
        output = policy_loss(batch, objective(loss_type, max_response_length=10))
        got[loss_type] = (output.loss_sum.item(), output.count.item())
    assert got == {"grpo": (-3.0, 2), "dapo": (-5.0, 3), "dr_grpo": (-5.0, 20)}


def test_gspo_by_hand_is_the_clipped_geometric_mean_ratio():
    output, _ = single_row([2.0, 0.5, 2.0], [1.0, 1.0, 1.0], loss_type="gspo", clip_ratio_high=4e-4, clip_ratio_low=3e-4)
    assert output.loss_sum.item() == pytest.approx(-1.0004)
    output, gradient = single_row([2.0, 0.5, 2.0], [1.0, 1.0, 1.0], loss_type="gspo", clip_ratio_high=1.0)
    s = 2.0 ** (1.0 / 3.0)
    assert output.loss_sum.item() == pytest.approx(-s)
    assert output.count.item() == 1
    assert gradient == pytest.approx([-s / 3] * 3)


def test_gspo_token_has_the_value_of_gspo_and_each_token_its_own_advantage():
    options = dict(loss_type="gspo", clip_ratio_high=1.0)
    gspo, _ = single_row([2.0, 0.5], [1.0, 1.0], **options)
    token, _ = single_row([2.0, 0.5], [1.0, 1.0], importance_sampling_level="sequence_token", **options)
    assert token.loss_sum.item() == pytest.approx(gspo.loss_sum.item())
    _, gradient = single_row([2.0, 0.5], [1.0, 3.0], importance_sampling_level="sequence_token", **options)
    assert gradient == pytest.approx([-0.5, -1.5])


def test_cispo_by_hand_keeps_the_gradient_of_clipped_tokens():
    output, gradient = single_row([1.5, 0.5], [1.0, 1.0], loss_type="cispo")
    assert output.loss_sum.item() == pytest.approx(1.2 + 0.8)  # log pi is -1
    assert gradient == pytest.approx([-1.2, -0.8])


def test_cispo_cap_by_hand_has_an_absolute_cap_and_no_lower_bound():
    output, gradient = single_row([6.0, 0.01], [1.0, 1.0], loss_type="cispo_cap", clip_ratio_high=5.0)
    assert output.loss_sum.item() == pytest.approx(5.01)
    assert gradient == pytest.approx([-5.0, -0.01])


def test_sapo_by_hand_has_slope_one_on_policy():
    output, gradient = single_row([1.0, 1.0], [1.0, -1.0], loss_type="sapo", tau_pos=1.0, tau_neg=2.0)
    # f(1) = (4 / tau) / 2, f'(1) = 1; grpo-style mean over the two tokens
    assert output.loss_sum.item() == pytest.approx((-2.0 + 1.0) / 2)
    assert gradient == pytest.approx([-0.5, 0.5])


def test_real_by_hand_is_a_classifier_of_each_group():
    # two prompts of three responses; in the second all are right, so that nothing can be told apart
    scores = [0.2, -0.1, 0.3, 0.1, 0.2, 0.3]
    log_probs = torch.full((6, 2), -1.0, dtype=torch.float64, requires_grad=True)
    old = log_probs.detach() - torch.tensor(scores, dtype=torch.float64)[:, None]
    advantages = torch.tensor([1.0, -0.5, -0.5, 1.0, 1.0, 1.0], dtype=torch.float64)[:, None].expand(6, 2)
    output = policy_loss(
        PolicyBatch(log_probs, advantages, torch.ones(6, 2, dtype=torch.bool), old_log_probs=old),
        objective("real", real_tau=0.5, group_size=3),
    )
    right, wrong = [math.exp(-0.2 / 0.5)], [math.exp(-0.1 / 0.5), math.exp(0.3 / 0.5)]
    loss = math.log(1 + sum(right)) + math.log(1 + sum(wrong))
    # the mean over prompts: one of two has a loss
    assert (output.loss_sum / output.count).item() == pytest.approx(loss / 2)
    (output.loss_sum / output.count).backward()
    slopes = [-right[0] / (1 + right[0]), *(weight / (1 + sum(wrong)) for weight in wrong), 0.0, 0.0, 0.0]
    expected = torch.tensor(slopes, dtype=torch.float64)[:, None].expand(6, 2) / 0.5 / 2 / 2
    torch.testing.assert_close(log_probs.grad, expected)


def test_real_refuses_a_part_of_a_group():
    batch = PolicyBatch(torch.zeros(2, 1), torch.zeros(2, 1), torch.ones(2, 1, dtype=torch.bool))
    with pytest.raises(ValueError, match="3 responses of a prompt; 2 rows are not whole groups"):
        policy_loss(batch, objective("real", group_size=3))


def test_online_dpo_by_hand_compares_the_best_and_the_worst_response_of_a_prompt():
    # of the second prompt all responses are equally good, and of the first the last one has no score
    ratios = [0.2, -0.4, 5.0, 1.0, 2.0, 3.0]
    log_probs = torch.full((6, 2), -1.0, dtype=torch.float64, requires_grad=True)
    reference = log_probs.detach() - torch.tensor(ratios, dtype=torch.float64)[:, None] / 2
    advantages = torch.tensor([-0.3, 0.9, 7.0, 1.0, 1.0, 1.0], dtype=torch.float64)[:, None].expand(6, 2)
    mask = torch.tensor([True, True, False, True, True, True])[:, None].expand(6, 2)
    batch = PolicyBatch(log_probs, advantages, mask, ref_log_probs=reference)
    output = policy_loss(batch, objective("online_dpo", online_dpo_beta=0.5, group_size=3))
    z = 0.5 * (-0.4 - 0.2)
    # rows that count are five, of which two share the loss of the first prompt
    loss = math.log(1 + math.exp(-z)) * 2 / 5
    assert (output.loss_sum / output.count).item() == pytest.approx(loss)
    (output.loss_sum / output.count).backward()
    slope = 0.5 / (1 + math.exp(z)) * 2 / 5
    expected = torch.tensor([slope, -slope, 0, 0, 0, 0], dtype=torch.float64)[:, None].expand(6, 2)
    torch.testing.assert_close(log_probs.grad, expected)


def random_marks(loss_type, **options):
    """Covariances by loops, and what the loss marks: of 200 tokens, some masked."""
    rng = np.random.default_rng(5)
    a, log_probs, mask = rng.normal(size=(10, 20)) * 3, -rng.random((10, 20)) * 4, rng.random((10, 20)) < 0.8
    tokens = list(zip(*np.nonzero(mask)))
    means = [sum(values[t] for t in tokens) / len(tokens) for values in (a, log_probs)]
    covariances = {(int(i), int(t)): (a[i, t] - means[0]) * (log_probs[i, t] - means[1]) for i, t in tokens}
    made = objective(loss_type, **options)
    tensors = [torch.tensor(values) for values in (a, log_probs, mask)]
    marks = made.loss.load_marks()
    marked = [marks(*tensors, made, torch.Generator().manual_seed(seed)) for seed in (0, 0, 1)]
    return covariances, [{tuple(place) for place in mask.nonzero().tolist()} for mask in marked]


def test_clip_cov_marks_a_fraction_of_the_tokens_between_its_bounds_by_the_seed():
    covariances, (first, again, other) = random_marks("clip_cov", clip_cov_ratio=0.05, clip_cov_lb=1.0, clip_cov_ub=5.0)
    near = {place for place, value in covariances.items() if 1.0 < value < 5.0}
    assert len(first) == int(0.05 * len(covariances)) < len(near)
    assert first <= near and other <= near and first == again != other


def test_clip_cov_marks_at_least_one_token_and_none_where_none_is_between():
    assert len(random_marks("clip_cov", clip_cov_ratio=1e-6)[1][0]) == 1
    assert random_marks("clip_cov", clip_cov_lb=1e5, clip_cov_ub=1e6)[1][0] == set()
    covariances, (marked, *_) = random_marks("clip_cov", clip_cov_ratio=1.0, clip_cov_lb=1.0, clip_cov_ub=5.0)
    assert marked == {place for place, value in covariances.items() if 1.0 < value < 5.0}


@pytest.mark.parametrize("ratio", [0.05, 1.0, 1e-6])
def test_kl_cov_marks_the_tokens_of_the_largest_covariance(ratio):
    covariances, (marked, *_) = random_marks("kl_cov", kl_cov_ratio=ratio)
    count = max(1, int(ratio * len(covariances)))
    assert marked == set(sorted(covariances, key=covariances.get, reverse=True)[:count])


@pytest.mark.parametrize("tau", [0.5, 1.0, 2.0])
def test_sapo_keeps_value_and_slope_in_float32_where_the_gate_is_nearly_open_or_shut(tau):
    """L = -(4 / tau) s(z), dL/dlog r = -4 s(z) s(-z) r with z = tau (r - 1)."""
    ratios = [1e-8, 1e-3, 0.5, 1.0, 4.0, 10.0, 14.0, 18.0, 25.0]
    log_probs = torch.tensor([[math.log(r) for r in ratios]], dtype=torch.float64).float().requires_grad_()
    batch = PolicyBatch(log_probs, torch.ones(1, 9), torch.ones(1, 9, dtype=torch.bool), old_log_probs=torch.zeros(1, 9))
    output = policy_loss(batch, objective("sapo", tau_pos=tau))
    (gradient,) = torch.autograd.grad(output.loss_sum, log_probs)
    at = [math.exp(x) for x in log_probs[0].double().tolist()]
    gates = [1 / (1 + math.exp(-tau * (r - 1))) for r in at]
    assert output.loss_sum.item() == pytest.approx(-4 / tau * sum(gates) / 9, rel=1e-6)
    expected = [-4 * gate / (1 + math.exp(tau * (r - 1))) * r / 9 for r, gate in zip(at, gates)]
    # e^-z of z = 24 has lost as many bits as z has before its point
    np.testing.assert_allclose(gradient[0], expected, rtol=1e-5)


def test_the_kl_metric_that_a_controller_follows_is_that_of_a_token_under_every_normalizer():
    generator = torch.Generator().manual_seed(3)
    log_probs = -torch.rand(3, 5, generator=generator)
    ref = log_probs - torch.rand(3, 5, generator=generator)
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0], [1, 0, 0, 0, 0]], dtype=torch.bool)
    x = (log_probs - ref)[mask].double().numpy()
    for loss_type in ("dapo", "grpo", "gspo", "dr_grpo"):
        batch = PolicyBatch(log_probs.clone().requires_grad_(), torch.zeros(3, 5), mask, ref_log_probs=ref)
        output = policy_loss(batch, objective(loss_type, kl_coef=0.1, kl_penalty="k2", max_response_length=64))
        assert output.metrics["actor/ref_kl"].result() == pytest.approx((x**2 / 2).mean(), rel=1e-5)


def test_opsm_drops_negative_sequences_that_drifted_and_keeps_them_in_the_count():
    log_probs = torch.full((3, 1), -2.0)
    batch = PolicyBatch(
        log_probs,
        torch.tensor([[-1.0], [1.0], [-1.0]]),
        torch.ones(3, 1, dtype=torch.bool),
        old_log_probs=torch.tensor([[-1.0], [-1.0], [-2.0]]),
    )
    output = policy_loss(batch, objective("dapo", off_policy_sequence_mask_delta=0.5))
    assert output.loss_sum.item() == pytest.approx(-math.exp(-1.0) + 1.0)
    assert output.count.item() == 3
    assert output.metrics["actor/off_policy_sequences_dropped"].result() == pytest.approx(1 / 3)


def test_opsm_measures_drift_from_the_rollout_engine_where_it_is_known():
    batch = PolicyBatch(
        torch.full((1, 1), -2.0),
        torch.full((1, 1), -1.0),
        torch.ones(1, 1, dtype=torch.bool),
        old_log_probs=torch.full((1, 1), -2.0),
        rollout_log_probs=torch.full((1, 1), -1.0),
    )
    assert policy_loss(batch, objective("dapo", off_policy_sequence_mask_delta=0.5)).loss_sum.item() == 0.0


def test_the_parts_that_are_logged_add_up_to_the_loss():
    log_probs, arrays = random_arrays()
    for loss_type in ("grpo", "dapo", "dr_grpo"):
        output = policy_loss(as_batch(log_probs, arrays), objective(loss_type, kl_coef=0.3, max_response_length=9))
        parts = output.metrics["actor/pg_loss"].result() + 0.3 * output.metrics["actor/kl_loss"].result()
        assert parts == pytest.approx((output.loss_sum / output.count).item())


def test_the_kl_to_the_reference_is_logged_even_when_it_is_not_in_the_loss():
    log_probs, arrays = random_arrays()
    with_kl = policy_loss(as_batch(log_probs, arrays), objective("dapo"))
    without = policy_loss(as_batch(log_probs, arrays | {"ref": None}), objective("dapo"))
    assert with_kl.metrics["actor/kl_loss"].result() > 0
    assert "actor/kl_loss" not in without.metrics
    assert with_kl.loss_sum.item() == without.loss_sum.item()


def test_the_distance_to_the_rollout_engine_is_logged_unless_switched_off():
    log_probs, arrays = random_arrays()
    for wanted in (True, False):
        output = policy_loss(as_batch(log_probs, arrays), objective("dapo", log_rollout_metrics=wanted))
        assert ("rollout/ess" in output.metrics) is wanted


def test_the_old_entropy_decides_which_tokens_train():
    mask = torch.ones(1, 2, dtype=torch.bool)
    batch = PolicyBatch(torch.zeros(1, 2), torch.tensor([[1.0, 2.0]]), mask, entropy_threshold=0.5)
    batch.entropy, batch.old_entropy = torch.tensor([[0.0, 1.0]]), torch.tensor([[1.0, 0.0]])
    assert policy_loss(batch, objective("dapo")).loss_sum.item() == -1.0


def test_an_entropy_threshold_of_the_global_batch_is_the_same_for_any_cut():
    log_probs, arrays = random_arrays(seed=3)
    shards = [
        (torch.tensor(arrays["entropy"][rows]), torch.tensor(arrays["loss_mask"][rows])) for rows in ([0, 1], [2, 3, 4, 5])
    ]
    whole = [(torch.tensor(arrays["entropy"]), torch.tensor(arrays["loss_mask"]))]
    kept = arrays["entropy"][arrays["loss_mask"]]
    assert entropy_threshold(shards, 0.2) == entropy_threshold(whole, 0.2) == pytest.approx(np.quantile(kept, 0.8))


def test_a_batch_in_which_nothing_trains_has_count_zero_loss_zero_and_no_nan():
    log_probs = torch.full((3, 3), float("nan"), requires_grad=True)
    nothing = torch.zeros(3, 3, dtype=torch.bool)
    batch = PolicyBatch(log_probs, torch.ones(3, 3), nothing, ref_log_probs=torch.zeros(3, 3), marked=nothing)
    for loss_type in POLICY_LOSSES:
        settings = objective(**settings_for(loss_type))
        output = policy_loss(batch, settings)
        assert (output.loss_sum.item(), output.count.item(), output.metrics) == (0.0, 0, {})
        output.loss_sum.backward()
    assert log_probs.grad.abs().sum() == 0.0


@pytest.mark.parametrize("shape", [(0, 3), (3, 0)])
@pytest.mark.parametrize("loss_type", sorted(POLICY_LOSSES))
def test_a_micro_batch_without_rows_or_tokens_adds_nothing(loss_type, shape):
    log_probs = torch.zeros(shape, requires_grad=True)
    zeros, mask = torch.zeros(shape), torch.zeros(shape, dtype=torch.bool)
    batch = PolicyBatch(log_probs, zeros, mask, None, zeros, zeros, zeros, zeros, marked=mask)
    output = policy_loss(batch, objective(**settings_for(loss_type, **EVERYTHING)))
    assert (output.loss_sum.item(), output.count.item(), output.metrics) == (0.0, 0, {})
    output.loss_sum.backward()
    assert log_probs.grad.shape == shape


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(loss_type="grp0"), "loss_type: unknown value 'grp0'; did you mean 'grpo'"),
        (dict(importance_sampling_level="word"), "importance_sampling_level"),
        (dict(loss_type="gspo", importance_sampling_level="token"), "contradicts loss_type gspo"),
        (dict(delta=1.1), "delta .* must be at least 1 \\+ the upper clip ratio .1.2."),
        (dict(clip_ratio_c=1.0), "clip_ratio_c .* must be greater than 1"),
        (dict(clip_ratio_c=3.0, delta=3.0), "set only one"),
        (dict(loss_type="cispo", delta=3.0), "no effect with loss_type cispo"),
        (dict(loss_type="cispo_cap", clip_ratio_high=0.28), "absolute cap"),
        (dict(loss_type="dr_grpo"), "max_response_length"),
        (dict(loss_type="clip_cov", clip_cov_lb=5.0), "clip_cov_lb .* must be below rl_config.clip_cov_ub"),
        (dict(loss_type="kl_cov", kl_cov_ratio=0.0), "kl_cov_ratio .* must be greater than 0"),
        (dict(loss_type="real", real_tau=0.0), "real_tau .* must be greater than 0"),
        (dict(tau_neg=0.0), "tau_neg .* must be greater than 0"),
        (dict(clip_ratio_low=-0.1), "clip_ratio_low .* must be at least 0"),
        (dict(rollout_correction="token"), "rollout_importance_sampling_mode"),
        (dict(rollout_threshold=0.0), "rollout_importance_sampling_threshold .* must be greater than 0"),
        (
            dict(rollout_correction="token_mask", rollout_threshold_min=3.0),
            "must be at most rollout_importance_sampling_threshold",
        ),
        (dict(rollout_correction="token_truncate", rollout_threshold_min=0.5), "no effect with token_truncate"),
    ],
)
def test_a_setting_that_cannot_be_meant_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        objective(**options)


@pytest.mark.parametrize(
    ("options", "threshold", "message"),
    [
        (dict(kl_coef=0.1), None, "ref_log_probs"),
        (dict(entropy_coeff=0.1), None, "entropy_coeff needs entropy"),
        (dict(rollout_correction="token_mask"), None, "rollout_log_probs"),
        ({}, 0.5, "top_entropy_quantile needs entropy"),
    ],
)
def test_a_term_without_its_tensor_is_an_error(options, threshold, message):
    batch = PolicyBatch(torch.zeros(1, 2), torch.ones(1, 2), torch.ones(1, 2, dtype=torch.bool), entropy_threshold=threshold)
    with pytest.raises(ValueError, match=message):
        policy_loss(batch, objective(**options))


def test_tensors_of_other_shapes_are_refused():
    mask = torch.ones(2, 3, dtype=torch.bool)
    with pytest.raises(ValueError, match=r"advantages is \[2\] but log_probs is \[2, 3\]"):
        PolicyBatch(torch.zeros(2, 3), torch.zeros(2), mask)
    with pytest.raises(ValueError, match="response_mask must be bool"):
        PolicyBatch(torch.zeros(2, 3), torch.zeros(2, 3), mask.long())


@pytest.mark.parametrize(
    ("stage", "changes", "expected"),
    [
        ("ray_grpo", {}, dict(loss_type="dapo", kl_coef=0.01, clip_ratio_low=0.2, clip_ratio_high=0.2)),
        ("ray_grpo", dict(token_level_loss=False), dict(loss_type="dapo")),
        ("ray_grpo", dict(use_kl_in_reward=True), dict(kl_coef=0.0)),
        ("ray_grpo", dict(loss_type="gspo", init_kl_coef=0.0), dict(loss_type="gspo", kl_coef=0.0)),
        ("ray_grpo", dict(num_generations=8, beta=0.04), dict(kl_coef=0.04)),
        ("ray_dapo", {}, dict(loss_type="dapo", kl_coef=0.0)),
        ("ray_dapo", dict(token_level_loss=False), dict(loss_type="grpo", kl_coef=0.0)),
        ("ray_dapo", dict(clip_higher_enable=True, clip_ratio_high=0.28), dict(clip_ratio_low=0.1, clip_ratio_high=0.28)),
        ("ray_ppo", {}, dict(loss_type="dapo", kl_coef=0.0)),
    ],
)
def test_settings_follow_the_run_file_and_its_stage(stage, changes, expected):
    rl, _, _ = apply_aliases(RLConfig(**changes), None, {"rl_config": frozenset(changes)})
    made = build_objective(rl, stage, max_response_length=77)
    values = made.numbers() | {"kl_coef": made.kl_in_loss}
    assert {name: values[name] for name in expected} == expected
    assert made.max_response_length == 77


@pytest.mark.parametrize("loss_type", sorted(POLICY_LOSSES))
def test_the_count_is_known_before_the_model_has_run(loss_type):
    log_probs, arrays = random_arrays(threshold=0.4)
    supported = [options for name, options in OPTIONS.items() if supports(loss_type, name)]
    for options in (*supported, *(dict(rollout_correction=mode, rollout_threshold=1.2) for mode in CORRECTIONS)):
        settings = objective(**settings_for(loss_type, **options))
        counts = [
            policy_loss(as_batch(outputs, arrays | {"entropy": entropy}), settings).count.item()
            for outputs, entropy in ((log_probs, arrays["entropy"]), (np.zeros_like(log_probs), np.zeros_like(log_probs)))
        ]
        assert counts[0] == counts[1] > 0


def test_recorded_log_probs_as_the_old_policy_by_hand():
    """Two tokens of a clipped loss, and of the plain policy gradient with weights (verl's bypass mode, both of its losses)."""
    log_probs = torch.tensor([[-1.0, -2.0]], dtype=torch.float64, requires_grad=True)
    recorded = torch.tensor([[-1.5, -1.9]], dtype=torch.float64)
    advantages, mask = torch.tensor([[2.0, -1.0]], dtype=torch.float64), torch.ones(1, 2, dtype=torch.bool)
    batch = PolicyBatch(log_probs, advantages, mask, rollout_log_probs=recorded)

    clipped = policy_loss(batch, objective("dapo", old_log_probs="rollout"))
    ratios = [math.exp(0.5), math.exp(-0.1)]
    # the first is above 1.2, the second within the clip range
    expected = -1.2 * 2.0 + ratios[1] * 1.0
    assert clipped.loss_sum.item() == pytest.approx(expected, rel=1e-12)
    metrics = merge([clipped.metrics]).results()
    assert metrics["rollout/log_probs_diff_mean"] == pytest.approx((0.5 + 0.1) / 2)

    chosen = objective("gpg", old_log_probs="rollout", rollout_correction="token_truncate", rollout_threshold=1.5)
    weighted = policy_loss(batch, chosen)
    (gradient,) = torch.autograd.grad(weighted.loss_sum, log_probs)
    # -w A log pi with w = min(pi / mu, 1.5), which has no gradient
    torch.testing.assert_close(gradient, torch.tensor([[-1.5 * 2.0, ratios[1] * 1.0]], dtype=torch.float64))


@pytest.mark.parametrize("loss_type", sorted(set(POLICY_LOSSES) - {"gpg", "online_dpo"}))
def test_every_ratio_may_be_to_recorded_log_probs(loss_type):
    log_probs, arrays = random_arrays(3)
    arrays["rollout"] = np.minimum(arrays["rollout"], -1e-3)
    recorded = {**arrays, "old": None}
    loss, gradient = loss_and_gradient(log_probs, recorded, settings_for(loss_type, old_log_probs="rollout"))
    # the naive loops read them as the old policy's
    computed, options = {**arrays, "old": arrays["rollout"]}, settings_for(loss_type)
    assert loss == pytest.approx(naive.policy_loss(log_probs, log_probs, computed, options), rel=1e-10, abs=1e-12)
    expected = naive.gradient(lambda moved: naive.policy_loss(moved, log_probs, computed, options), log_probs)
    np.testing.assert_allclose(gradient, expected, rtol=1e-6, atol=1e-8)
