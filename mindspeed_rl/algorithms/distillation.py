"""Divergences between a student and its teachers, token by token, over a part of the vocabulary or over sampled tokens.

With p the teacher and q the student at one position, both over the K tokens that the teacher reports there:

    forward_kl = sum_k p_k (log p_k - log q_k)
    reverse_kl = sum_k q_k (log q_k - log p_k)
    jsd        = beta KL(p || m) + (1 - beta) KL(q || m), m = beta p + (1 - beta) q     (GKD, arXiv:2306.13649)

The probability outside of the K tokens is dropped, as verl does, where the sum may fall below 0 and counts as 0; or it is
lumped: all other tokens together are one more token, so that the sum is a divergence and a lower bound of the full one; or both
are renormalized over the K tokens, as ms-swift does, so that the probability of the student outside of them does not matter.
With K of the full vocabulary all three are the divergence itself.

Over sampled tokens a divergence is an estimate of KL(student || teacher) (`kl.estimate_divergence`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mindspeed_rl.algorithms.kl import LOG_ZERO

if TYPE_CHECKING:
    from mindspeed_rl.catalogue.objective import Distillation

#: probability that all tokens outside of the K have at least: sums of float32 are exact to about this
_MIN_REST = 1.0e-7


def compute_divergence(
    student: Tensor, teacher: Tensor, *, kind: str, beta: float = 0.5, rest: str = "drop", min_log_prob: float | None = None
) -> Tensor:
    """Compute the divergence of each position over the tokens that the teacher reports; the formulas are in the module.

    Args:
        student: [..., K] log q, with gradient; -inf for an entry without token, where the teacher has -inf too.
        teacher: [..., K] log p.
        kind: "forward_kl", "reverse_kl" or "jsd".
        beta: weight of the teacher in jsd; 0 is forward_kl and 1 is reverse_kl, as in TRL.
        rest: "drop", "lump" or "renormalize".
        min_log_prob: log-probs of both count as at least this, without a gradient below.

    Returns:
        [...] float32.
    """
    if rest == "lump":
        student, teacher = (torch.cat([values, _compute_rest(values)], -1) for values in (student, teacher))
    elif rest == "renormalize":
        # without a token in any entry both are uniform
        student, teacher = (values.clamp(min=LOG_ZERO).log_softmax(-1) for values in (student, teacher))
    floor = LOG_ZERO if min_log_prob is None else min_log_prob
    q, p = student.clamp(min=floor), teacher.clamp(min=floor)
    if kind == "jsd" and 0.0 < beta < 1.0:
        weights = torch.tensor([beta, 1.0 - beta], device=q.device).log()
        mixture = torch.logaddexp(p + weights[0], q + weights[1])
        total = beta * (p.exp() * (p - mixture)).sum(-1) + (1.0 - beta) * (q.exp() * (q - mixture)).sum(-1)
    elif kind == "reverse_kl" or (kind == "jsd" and beta == 1.0):
        total = (q.exp() * (q - p)).sum(-1)
    else:
        assert kind in ("forward_kl", "jsd"), kind
        total = (p.exp() * (p - q)).sum(-1)
    return total.clamp(min=0.0) if rest == "drop" else total


def _compute_rest(log_probs: Tensor) -> Tensor:
    """Return [..., 1] log(1 - sum_k p_k); entries of -inf have no gradient."""
    probs = torch.where(log_probs > LOG_ZERO, log_probs, LOG_ZERO).exp()
    return (1.0 - probs.sum(-1, keepdim=True)).clamp(min=_MIN_REST).log()


def compute_weighted_divergence(student: Tensor, teacher: Tensor, settings: Distillation) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the divergence to all teachers of a row, with the probability that student and teacher have on the K tokens.

    Args:
        student: [n, teachers * K] log-probs at the tokens of each teacher, one teacher after the other; with gradient.
        teacher: [n, teachers * K] of the teachers.

    Returns:
        [n] divergence with gradient; [n] student's and [n] teachers' probability, without.
    """
    student, teacher = (values.unflatten(-1, (len(settings.weights), -1)) for values in (student, teacher))
    each = compute_divergence(
        student,
        teacher,
        kind=settings.kind,
        beta=settings.beta,
        rest=settings.topk_rest,
        min_log_prob=settings.log_prob_min_clamp,
    )
    masses = [_average(values.detach().exp().sum(-1), settings.weights) for values in (student, teacher)]
    return _average(each, settings.weights), masses[0], masses[1]


def _average(values: Tensor, weights: Sequence[float]) -> Tensor:
    """Return the weighted sum over the last dimension, the teachers."""
    return values[..., 0] if len(weights) == 1 else values @ torch.tensor(weights, dtype=values.dtype, device=values.device)
