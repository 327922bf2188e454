import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from naive_algorithms import log_sigmoid

from mindspeed_rl.algorithms.preference_losses import (
    DPOSettings,
    PreferenceBatch,
    SimPOSettings,
    UnpairedBatch,
    dpo_loss,
    kto_loss,
    pairwise_reward_loss,
    process_reward_loss,
    simpo_loss,
)
from mindspeed_rl.config import MegatronConfig
from mindspeed_rl.observability.metrics import merge

PAIRS = 5
LOG_PROBS = ("chosen_log_probs", "rejected_log_probs", "ref_chosen_log_probs", "ref_rejected_log_probs")


def pairs(seed=0):
    generator = torch.Generator().manual_seed(seed)
    columns = {name: -30 * torch.rand(PAIRS, generator=generator, dtype=torch.float64) for name in LOG_PROBS}
    lengths = torch.randint(3, 9, (2, PAIRS), generator=generator)
    return PreferenceBatch(chosen_lengths=lengths[0], rejected_lengths=lengths[1], **columns)


def rows(batch):
    for i in range(PAIRS):
        yield {name: getattr(batch, name)[i].item() for name in (*LOG_PROBS, "chosen_lengths", "rejected_lengths")}


def naive_dpo(row, loss_type, beta, smoothing, ftx):
    scale_c, scale_r = (row["chosen_lengths"], row["rejected_lengths"]) if loss_type == "ipo" else (1, 1)
    z = row["chosen_log_probs"] / scale_c - row["rejected_log_probs"] / scale_r
    z -= row["ref_chosen_log_probs"] / scale_c - row["ref_rejected_log_probs"] / scale_r
    loss = {
        "sigmoid": -(1 - smoothing) * log_sigmoid(beta * z) - smoothing * log_sigmoid(-beta * z),
        "hinge": max(0.0, 1 - beta * z),
        "ipo": (z - 1 / (2 * beta)) ** 2,
    }[loss_type]
    return loss - ftx * row["chosen_log_probs"] / row["chosen_lengths"]


def naive_simpo(row, loss_type, beta, ratio, smoothing, ftx):
    chosen = row["chosen_log_probs"] / row["chosen_lengths"]
    z = beta * (chosen - row["rejected_log_probs"] / row["rejected_lengths"] - ratio)
    loss = max(0.0, 1 - z) if loss_type == "hinge" else -(1 - smoothing) * log_sigmoid(z) - smoothing * log_sigmoid(-z)
    return loss - ftx * chosen


@pytest.mark.parametrize("ftx", [0.0, 0.3])
@pytest.mark.parametrize(("loss_type", "smoothing"), [("sigmoid", 0.0), ("sigmoid", 0.1), ("hinge", 0.0), ("ipo", 0.0)])
def test_dpo_equals_the_naive_loop_and_its_gradient_the_finite_differences(loss_type, smoothing, ftx):
    settings = DPOSettings(loss_type, 0.1, smoothing, ftx)
    batch = pairs()
    output = dpo_loss(batch, settings)
    assert output.loss_sum.item() == pytest.approx(sum(naive_dpo(row, loss_type, 0.1, smoothing, ftx) for row in rows(batch)))
    assert output.count.item() == PAIRS
    assert_gradient(lambda chosen, rejected: dpo_loss(with_log_probs(batch, chosen, rejected), settings), batch)


@pytest.mark.parametrize("ftx", [0.0, 0.3])
@pytest.mark.parametrize(("loss_type", "smoothing"), [("sigmoid", 0.0), ("sigmoid", 0.1), ("hinge", 0.0)])
def test_simpo_equals_the_naive_loop_and_its_gradient_the_finite_differences(loss_type, smoothing, ftx):
    settings = SimPOSettings(loss_type, 2.5, 1.4, smoothing, ftx)
    batch = pairs()
    output = simpo_loss(batch, settings)
    expected = sum(naive_simpo(row, loss_type, 2.5, 1.4, smoothing, ftx) for row in rows(batch))
    assert output.loss_sum.item() == pytest.approx(expected)
    assert_gradient(lambda chosen, rejected: simpo_loss(with_log_probs(batch, chosen, rejected), settings), batch)


def with_log_probs(batch, chosen, rejected):
    return replace(batch, chosen_log_probs=chosen, rejected_log_probs=rejected)


def assert_gradient(loss, batch):
    points = (batch.chosen_log_probs.requires_grad_(), batch.rejected_log_probs.requires_grad_())
    assert torch.autograd.gradcheck(lambda chosen, rejected: loss(chosen, rejected).loss_sum, points)


def single_pair(chosen, rejected, ref_chosen=0.0, ref_rejected=0.0, lengths=(1, 1)):
    numbers = [torch.tensor([x], dtype=torch.float64) for x in (chosen, rejected, ref_chosen, ref_rejected)]
    return PreferenceBatch(numbers[0], numbers[1], torch.tensor(lengths[:1]), torch.tensor(lengths[1:]), numbers[2], numbers[3])


def test_dpo_by_hand():
    batch = single_pair(-1.0, -2.0, -2.0, -1.0)  # z = 2
    beta = math.log(3.0) / 2
    assert dpo_loss(batch, DPOSettings(beta=beta)).loss_sum.item() == pytest.approx(math.log(4.0 / 3.0))
    assert dpo_loss(batch, DPOSettings("hinge", 0.25)).loss_sum.item() == pytest.approx(0.5)
    assert dpo_loss(batch, DPOSettings("ipo", 0.5)).loss_sum.item() == pytest.approx(1.0)
    long = single_pair(-4.0, -4.0, -2.0, -1.0, lengths=(2, 4))  # -1 and -0.75 a token
    assert dpo_loss(long, DPOSettings("ipo", 0.5)).loss_sum.item() == pytest.approx(1.25**2)
    assert dpo_loss(batch, DPOSettings("hinge", 1.0, pref_ftx=2.0)).loss_sum.item() == pytest.approx(2.0)


def test_dpo_at_the_reference_is_log_two_whatever_the_smoothing():
    batch = single_pair(-1.0, -2.0, -1.0, -2.0)
    for smoothing in (0.0, 0.2):
        assert dpo_loss(batch, DPOSettings(label_smoothing=smoothing)).loss_sum.item() == pytest.approx(math.log(2.0))


def test_simpo_by_hand():
    batch = single_pair(-2.0, -6.0, lengths=(2, 2))  # -1 and -3 a token
    output = simpo_loss(batch, SimPOSettings(beta=math.log(3.0), gamma_beta_ratio=1.0))
    assert output.loss_sum.item() == pytest.approx(math.log(4.0 / 3.0))
    assert output.metrics["rewards/margins"].result() == pytest.approx(2 * math.log(3.0))


def test_extreme_margins_stay_finite_in_float32():
    batch = PreferenceBatch(*(torch.tensor([x]) for x in (-1e4, 0.0, 10, 10, 0.0, -1e4)))
    for output in (dpo_loss(batch, DPOSettings(beta=1.0)), simpo_loss(batch, SimPOSettings())):
        assert torch.isfinite(output.loss_sum)


def test_dpo_logs_rewards_and_accuracy():
    batch = single_pair(-1.0, -2.0, -2.0, -1.0)
    results = {name: metric.result() for name, metric in dpo_loss(batch, DPOSettings(beta=0.1)).metrics.items()}
    assert results == pytest.approx(
        {"rewards/chosen": 0.1, "rewards/rejected": -0.1, "rewards/margins": 0.2, "rewards/accuracies": 1.0}
    )


def test_a_policy_that_still_is_its_reference_has_no_accuracy_from_rounding():
    sums = torch.tensor([-41.5, -73.25, -12.75], dtype=torch.float32)
    rounded = torch.nextafter(sums, torch.zeros(3))
    lengths = torch.tensor([20, 30, 10])
    batch = PreferenceBatch(sums, sums, lengths, lengths, rounded, sums)
    for loss_type in ("sigmoid", "ipo"):
        assert "rewards/accuracies" not in dpo_loss(batch, DPOSettings(loss_type)).metrics
    moved = replace(batch, chosen_log_probs=sums + torch.tensor([1e-3, -1e-3, 0.0]))  # one right, one wrong, one as before
    metric = dpo_loss(moved, DPOSettings()).metrics["rewards/accuracies"]
    assert (metric.result(), metric.count) == (0.5, 2)


def test_preference_sums_do_not_depend_on_the_cut():
    batch = pairs()
    columns = (*LOG_PROBS, "chosen_lengths", "rejected_lengths")
    whole = dpo_loss(batch, DPOSettings())
    parts = [
        dpo_loss(PreferenceBatch(**{name: getattr(batch, name)[cut] for name in columns}), DPOSettings())
        for cut in (slice(0, 2), slice(2, 5))
    ]
    assert sum(part.loss_sum for part in parts).item() == pytest.approx(whole.loss_sum.item())
    assert merge([part.metrics for part in parts]).results() == pytest.approx(merge([whole.metrics]).results())


@pytest.mark.parametrize(
    ("settings", "options", "message"),
    [
        (DPOSettings, dict(loss_type="sigmod"), "dpo_loss_type: unknown value 'sigmod'; did you mean 'sigmoid'"),
        (DPOSettings, dict(beta=0.0), "dpo_beta must be positive"),
        (DPOSettings, dict(label_smoothing=0.5), r"dpo_label_smoothing must be in \[0, 0.5\)"),
        (DPOSettings, dict(loss_type="hinge", label_smoothing=0.1), "needs dpo_loss_type sigmoid"),
        (DPOSettings, dict(pref_ftx=-1.0), "pref_ftx"),
        (SimPOSettings, dict(loss_type="ipo"), "simpo_loss_type"),
        (SimPOSettings, dict(gamma_beta_ratio=-1.0), "gamma_beta_ratio"),
    ],
)
def test_a_preference_setting_that_cannot_be_meant_is_refused(settings, options, message):
    with pytest.raises(ValueError, match=message):
        settings(**options)


def test_dpo_without_a_reference_and_an_empty_response_are_errors():
    batch = replace(pairs(), ref_chosen_log_probs=None)
    with pytest.raises(ValueError, match="reference"):
        dpo_loss(batch, DPOSettings())
    with pytest.raises(ValueError, match=r"pairs \[0\] have a response without tokens"):
        simpo_loss(single_pair(-1.0, -1.0, lengths=(0, 1)), SimPOSettings())


def test_settings_follow_the_run_file():
    config = MegatronConfig(dpo_loss_type="ipo", dpo_beta=0.2, pref_ftx=0.5, simpo_beta=3.0, gamma_beta_ratio=0.7)
    assert DPOSettings.from_config(config) == DPOSettings("ipo", 0.2, 0.0, 0.5)
    assert SimPOSettings.from_config(config) == SimPOSettings("sigmoid", 3.0, 0.7, 0.0, 0.5)


def test_the_pairwise_reward_loss_by_hand_and_its_gradient():
    chosen = torch.tensor([math.log(3.0), 0.0], dtype=torch.float64, requires_grad=True)
    rejected = torch.tensor([0.0, 1.0], dtype=torch.float64, requires_grad=True)
    output = pairwise_reward_loss(chosen, rejected)
    assert output.loss_sum.item() == pytest.approx(math.log(4.0 / 3.0) - log_sigmoid(-1.0))
    assert output.count.item() == 2
    assert output.metrics["rewards/accuracies"].result() == 0.5
    assert torch.autograd.gradcheck(lambda a, b: pairwise_reward_loss(a, b).loss_sum, (chosen, rejected))
    # sums of scores: log 3 and 1
    centred = pairwise_reward_loss(chosen, rejected, centre=0.5).loss_sum - output.loss_sum
    assert centred.item() == pytest.approx(0.5 * (math.log(3.0) ** 2 + 1.0))


def test_the_process_reward_loss_is_cross_entropy_at_the_placeholders():
    rng = np.random.default_rng(0)
    logits, labels = rng.normal(size=(2, 6, 3)), rng.integers(0, 3, (2, 6))
    mask = rng.random((2, 6)) < 0.5
    expected, right = 0.0, 0
    for i, t in zip(*np.nonzero(mask)):
        expected -= logits[i, t, labels[i, t]] - math.log(sum(math.exp(x) for x in logits[i, t]))
        right += logits[i, t].argmax() == labels[i, t]
    point = torch.tensor(logits, requires_grad=True)
    marked = torch.tensor(np.where(mask, labels, -100))
    output = process_reward_loss(point, marked, torch.tensor(mask))
    assert output.loss_sum.item() == pytest.approx(expected)
    assert output.count.item() == mask.sum()
    assert output.metrics["rewards/accuracies"].result() == pytest.approx(right / mask.sum())
    assert torch.autograd.gradcheck(lambda x: process_reward_loss(x, marked, torch.tensor(mask)).loss_sum, (point,))


@pytest.mark.parametrize("kl", [None, 0.0, 1.7])
def test_kto_equals_the_value_function_of_the_paper_and_its_gradient_the_derivative(kl):
    generator = torch.Generator().manual_seed(3)
    log_probs, reference = (-20 * torch.rand(6, generator=generator, dtype=torch.float64) for _ in range(2))
    desirable, beta, weights = torch.tensor([True, False, True, True, False, False]), 0.3, (1.5, 0.7)
    log_probs.requires_grad_()
    column = None if kl is None else torch.full((6,), kl, dtype=torch.float64)
    batch = UnpairedBatch(log_probs, reference, desirable, column)
    output = kto_loss(batch, beta=beta, desirable_weight=weights[0], undesirable_weight=weights[1])
    output.loss_sum.backward()
    losses, gradients = [], []
    for x, is_desirable in zip((log_probs - reference).tolist(), desirable.tolist()):
        # lambda_y - v(x, y), v = lambda_y sigmoid(beta (r - z0)) or lambda_y sigmoid(beta (z0 - r)): equations 7 and 8
        weight, sign = (weights[0], 1) if is_desirable else (weights[1], -1)
        value = 1 / (1 + math.exp(-sign * beta * (x - (kl or 0.0))))
        losses.append(weight - weight * value)
        gradients.append(-weight * sign * beta * value * (1 - value))
    assert output.loss_sum.item() == pytest.approx(sum(losses), rel=1e-12) and output.count == 6
    assert log_probs.grad.tolist() == pytest.approx(gradients, rel=1e-12)


def test_kto_of_extreme_log_ratios_is_finite():
    x = torch.tensor([1e4, -1e4], dtype=torch.float32, requires_grad=True)
    for desirable in (torch.tensor([True, True]), torch.tensor([False, False])):
        batch = UnpairedBatch(x, torch.zeros(2), desirable)
        output = kto_loss(batch, beta=1.0, desirable_weight=1.0, undesirable_weight=1.0)
        output.loss_sum.backward()
        assert output.loss_sum.item() == 1.0 and bool(torch.isfinite(x.grad).all())
