"""Divergences between distributions on tiny vocabularies, against sums over torch.distributions and by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from sample_objectives import objective
from teachers import TERM
from torch import Tensor
from torch.distributions import Categorical, kl_divergence
from torch.nn import functional

from mindspeed_rl.algorithms.distillation import compute_divergence, compute_weighted_divergence
from mindspeed_rl.algorithms.interfaces import PolicyBatch
from mindspeed_rl.algorithms.kl import estimate_divergence
from mindspeed_rl.algorithms.policy_losses import policy_loss
from mindspeed_rl.catalogue import KL_ESTIMATORS
from mindspeed_rl.catalogue.objective import Objective
from mindspeed_rl.config.keys.rl import DistillationKeys


def sample(seed: int, vocab: int = 7, tokens: int = 5) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(tokens, vocab, generator=generator).double(), torch.randn(tokens, vocab, generator=generator).double()


def expected(kind: str, student: Tensor, teacher: Tensor, beta: float = 0.5) -> Tensor:
    q, p = Categorical(logits=student), Categorical(logits=teacher)
    if kind == "forward_kl":
        return kl_divergence(p, q)
    if kind == "reverse_kl":
        return kl_divergence(q, p)
    m = Categorical(probs=beta * p.probs + (1 - beta) * q.probs)
    return beta * kl_divergence(p, m) + (1 - beta) * kl_divergence(q, m)


@pytest.mark.parametrize("rest", ["drop", "lump", "renormalize"])
@pytest.mark.parametrize("kind,beta", [("forward_kl", 0.5), ("reverse_kl", 0.5), ("jsd", 0.1), ("jsd", 0.5), ("jsd", 0.9)])
def test_over_the_full_vocabulary_all_forms_are_the_divergence_with_its_gradient(kind: str, beta: float, rest: str) -> None:
    logits, teacher = sample(1)
    mine, true = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    got = compute_divergence(mine.log_softmax(-1), teacher.log_softmax(-1), kind=kind, beta=beta, rest=rest)
    want = expected(kind, true, teacher, beta)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
    got.sum().backward()
    want.sum().backward()
    torch.testing.assert_close(mine.grad, true.grad, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("beta,kind", [(0.0, "forward_kl"), (1.0, "reverse_kl")])
def test_the_ends_of_the_jensen_shannon_divergence_are_the_two_kl_divergences(beta: float, kind: str) -> None:
    student, teacher = (values.log_softmax(-1) for values in sample(2))
    ends = compute_divergence(student, teacher, kind="jsd", beta=beta)
    torch.testing.assert_close(ends, compute_divergence(student, teacher, kind=kind))


@pytest.mark.parametrize("kind", ["forward_kl", "reverse_kl", "jsd"])
def test_the_lumped_rest_is_one_more_token_and_a_lower_bound(kind: str) -> None:
    student, teacher = (values.log_softmax(-1) for values in sample(3))
    top, ids = teacher.topk(3, -1)
    at_ids = student.gather(-1, ids)
    lumped = [torch.cat([values.exp(), 1 - values.exp().sum(-1, keepdim=True)], -1).log() for values in (at_ids, top)]
    got = compute_divergence(at_ids, top, kind=kind, rest="lump")
    torch.testing.assert_close(got, expected(kind, *lumped), rtol=1e-5, atol=1e-6)
    assert (got <= expected(kind, student, teacher) + 1e-9).all()
    assert (got >= 0).all()


@pytest.mark.parametrize(("kind", "beta"), [("forward_kl", 0.5), ("reverse_kl", 0.5), ("jsd", 0.3)])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_renormalized_models_are_those_of_the_logits_at_the_tokens(kind: str, beta: float, temperature: float) -> None:
    # ms-swift: softmax of the logits / T only at the teacher's K tokens
    student, teacher = sample(5)
    top, ids = teacher.topk(3, -1)
    want = expected(kind, student.gather(-1, ids) / temperature, top / temperature, beta)
    ours, theirs = ((values / temperature).log_softmax(-1).gather(-1, ids) for values in (student, teacher))
    got = compute_divergence(ours, theirs, kind=kind, beta=beta, rest="renormalize")
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


def test_the_dropped_rest_leaves_a_sum_over_the_tokens_that_counts_as_zero_below_it() -> None:
    teacher, student = torch.tensor([[0.5, 0.3]]).log(), torch.tensor([[0.2, 0.6], [0.6, 0.35]]).log()
    by_hand = 0.5 * math.log(0.5 / 0.2) + 0.3 * math.log(0.3 / 0.6)
    got = compute_divergence(student, teacher.expand(2, 2), kind="forward_kl")
    torch.testing.assert_close(got, torch.tensor([by_hand, 0.0]))


@pytest.mark.parametrize("kind", ["forward_kl", "reverse_kl", "jsd"])
@pytest.mark.parametrize("rest", ["drop", "lump", "renormalize"])
def test_tokens_that_neither_has_change_neither_value_nor_gradient(kind: str, rest: str) -> None:
    logits, teacher = (values.float() for values in sample(4))
    alone, padded = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    nothing = torch.full((len(logits), 2), float("-inf"))
    want = compute_divergence(alone.log_softmax(-1), teacher.log_softmax(-1), kind=kind, rest=rest)
    ours, theirs = (torch.cat([values.log_softmax(-1), nothing], -1) for values in (padded, teacher))
    got = compute_divergence(ours, theirs, kind=kind, rest=rest)
    torch.testing.assert_close(got, want)
    got.sum().backward()
    want.sum().backward()
    torch.testing.assert_close(padded.grad, alone.grad)


@pytest.mark.parametrize("kind", ["forward_kl", "reverse_kl", "jsd"])
def test_a_token_that_only_one_of_them_has_gives_a_finite_loss_and_gradient(kind: str) -> None:
    first, second = torch.tensor([[0.0, 1.0, float("-inf")]]), torch.tensor([[0.0, float("-inf"), 1.0]])
    logits = first.clone().requires_grad_()
    loss = compute_divergence(logits.log_softmax(-1), second.log_softmax(-1), kind=kind)
    loss.sum().backward()
    assert torch.isfinite(loss).all() and loss > 0.3
    assert logits.grad is not None and torch.isfinite(logits.grad).all()


def test_a_floor_bounds_what_a_single_token_can_add() -> None:
    teacher, student = torch.tensor([[0.9, 0.1]]).log(), torch.tensor([[1e-30, 1.0]]).log()
    got = compute_divergence(student, teacher, kind="forward_kl", min_log_prob=-10.0)
    torch.testing.assert_close(got, torch.tensor([0.9 * (math.log(0.9) + 10.0) + 0.1 * math.log(0.1)]))


def test_several_teachers_are_weighted_each_over_tokens_of_its_own() -> None:
    settings = replace(TERM, weights=(0.25, 0.75))
    logits, first = sample(5)
    second = sample(6)[1]
    student, tops, ats = logits.log_softmax(-1), [], []
    for teacher in (first.log_softmax(-1), second.log_softmax(-1)):
        top, ids = teacher.topk(3, -1)
        tops.append(top)
        ats.append(student.gather(-1, ids))
    got, student_mass, teacher_mass = compute_weighted_divergence(torch.cat(ats, -1), torch.cat(tops, -1), settings)
    each = [(top.exp() * (top - at)).sum(-1).clamp(min=0) for at, top in zip(ats, tops)]
    torch.testing.assert_close(got, 0.25 * each[0] + 0.75 * each[1])
    torch.testing.assert_close(student_mass, 0.25 * ats[0].exp().sum(-1) + 0.75 * ats[1].exp().sum(-1))
    torch.testing.assert_close(teacher_mass, 0.25 * tops[0].exp().sum(-1) + 0.75 * tops[1].exp().sum(-1))


def test_estimates_over_all_tokens_average_to_the_reverse_kl() -> None:
    student, teacher = (values.log_softmax(-1) for values in sample(7))
    for name in ("k1", "k3"):
        settings = replace(TERM, loss_mode=name, estimator=KL_ESTIMATORS[name])
        each = estimate_divergence(student, teacher[..., None], settings)
        torch.testing.assert_close((student.exp() * each).sum(-1), expected("reverse_kl", student, teacher))


def test_the_gradient_of_k2_averages_to_that_of_the_reverse_kl() -> None:
    logits, teacher = sample(8)
    mine, true = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    student = mine.log_softmax(-1)
    settings = replace(TERM, loss_mode="k2", estimator=KL_ESTIMATORS["k2"])
    each = estimate_divergence(student, teacher.log_softmax(-1)[..., None], settings)
    (student.detach().exp() * each).sum().backward()
    expected("reverse_kl", true, teacher).sum().backward()
    torch.testing.assert_close(mine.grad, true.grad)


def test_an_infinite_difference_on_both_sides_is_no_difference() -> None:
    settings = replace(TERM, loss_mode="k1", estimator=KL_ESTIMATORS["k1"])
    nothing = torch.tensor([[float("-inf")]])
    assert estimate_divergence(nothing, nothing[..., None], settings).item() == 0.0


def term_of(**keys: object) -> Objective:
    return objective(distillation=DistillationKeys(enabled=True, teacher_models=["teacher"], **keys))


def batch_of(teacher: Tensor | None = None, divergence: Tensor | None = None, **others: Tensor) -> tuple[PolicyBatch, Tensor]:
    generator = torch.Generator().manual_seed(9)
    log_probs = -torch.rand(2, 4, generator=generator)
    log_probs.requires_grad_()
    mask = torch.tensor([[True, True, True, False], [True, True, False, False]])
    added = None if divergence is None else (divergence, divergence.detach() * 0 + 0.5, divergence.detach() * 0 + 0.75)
    advantages = torch.randn(2, 4, generator=generator)
    batch = PolicyBatch(log_probs, advantages, mask, teacher_log_probs=teacher, divergence=added, **others)
    return batch, log_probs


def test_the_term_is_added_to_the_policy_loss_with_its_coefficient() -> None:
    divergence = torch.rand(2, 4, generator=torch.Generator().manual_seed(1)).requires_grad_()
    batch, log_probs = batch_of(divergence=divergence)
    plain = policy_loss(batch_of()[0], objective("dapo"))
    loss = policy_loss(
        batch, replace(term_of(loss_mode="forward_kl_topk", distillation_loss_coef=0.25), loss=objective("dapo").loss)
    )
    mask = batch.mask
    torch.testing.assert_close(loss.loss_sum, plain.loss_sum + 0.25 * divergence[mask].sum())
    loss.loss_sum.backward()
    torch.testing.assert_close(divergence.grad, torch.where(mask, 0.25, 0.0))
    assert loss.metrics["distillation/teacher_mass"].result() == 0.75


def test_without_task_rewards_the_divergence_is_the_only_loss() -> None:
    divergence = torch.rand(2, 4, generator=torch.Generator().manual_seed(1)).requires_grad_()
    batch, log_probs = batch_of(divergence=divergence)
    made = term_of(loss_mode="jsd_topk", distillation_loss_coef=0.25, use_task_rewards=False, loss_max_clamp=0.5)
    loss = policy_loss(batch, replace(made, loss=objective("dapo").loss))
    torch.testing.assert_close(loss.loss_sum, divergence.clamp(max=0.5)[batch.mask].sum())
    loss.loss_sum.backward()
    assert log_probs.grad is None or not log_probs.grad.any()


def test_as_a_reward_the_old_policy_s_divergence_enters_the_advantage_of_its_token() -> None:
    teacher = -torch.rand(2, 4, 1, generator=torch.Generator().manual_seed(2))
    old = -torch.rand(2, 4, generator=torch.Generator().manual_seed(3))
    batch, log_probs = batch_of(teacher, old_log_probs=old)
    loss = policy_loss(batch, term_of(loss_mode="k1", use_policy_gradient=True, distillation_loss_coef=0.5))
    by_hand, theirs = batch_of(old_log_probs=old)
    by_hand.advantages = by_hand.advantages - 0.5 * (old - teacher[..., 0])
    expected = policy_loss(by_hand, objective())
    torch.testing.assert_close(loss.loss_sum, expected.loss_sum)
    loss.loss_sum.backward()
    expected.loss_sum.backward()
    torch.testing.assert_close(log_probs.grad, theirs.grad)


@pytest.mark.parametrize("beta", [0.0, 0.3, 0.5, 1.0])
def test_on_responses_of_the_data_the_loss_is_that_of_gkd_with_the_supervised_term(beta: float) -> None:
    """Divergence over the vocabulary as TRL and ms-swift write it, F.kl_div against the mixture, plus alpha * cross entropy."""
    generator = torch.Generator().manual_seed(4)
    labels, mask = torch.randint(7, (2, 4), generator=generator), torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0]]).bool()
    student, teacher = (torch.randn(2, 4, 7, generator=generator) for _ in range(2))
    student.requires_grad_()
    log_q, log_p = student.log_softmax(-1), teacher.log_softmax(-1)
    settings = replace(TERM, loss_mode="jsd_topk", topk=7, beta=beta, supervised_coef=0.25, on_policy_fraction=0.5)
    divergence = compute_divergence(log_q, log_p, kind="jsd", beta=beta)
    chosen = log_q.gather(-1, labels[..., None]).squeeze(-1)
    batch = PolicyBatch(chosen, torch.zeros(2, 4), mask, divergence=(divergence, divergence * 0, divergence * 0))
    loss = policy_loss(batch, replace(objective("bnpo"), distillation=settings))
    rows, true = student.detach().clone().requires_grad_(), teacher[mask].log_softmax(-1)
    ours = rows[mask].log_softmax(-1)
    if beta in (0.0, 1.0):
        pair = (ours, true) if beta == 0.0 else (true, ours)
        jsd = functional.kl_div(*pair, reduction="none", log_target=True)
    else:
        mixture = torch.logsumexp(torch.stack([ours + math.log(1 - beta), true + math.log(beta)]), dim=0)
        sides = [functional.kl_div(mixture, side, reduction="none", log_target=True) for side in (true, ours)]
        jsd = beta * sides[0] + (1 - beta) * sides[1]
    expected = jsd.sum() / mask.sum() + 0.25 * functional.cross_entropy(rows[mask], labels[mask])
    torch.testing.assert_close(loss.loss_sum / loss.count, expected)
    (loss.loss_sum / loss.count).backward()
    expected.backward()
    torch.testing.assert_close(student.grad, rows.grad)
