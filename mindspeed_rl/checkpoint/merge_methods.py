"""Formulas that merge a weight of several models into one, in float32; pure functions of tensors.

A method gets the weight of the base (None where it has none) and of each model; `density`, `t` and `scale` are its settings.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

#: cosine beyond which two directions are one: the sine that SLERP divides by is lost in rounding
_PARALLEL = 0.9995


@dataclass(frozen=True, kw_only=True)
class MergeSettings:
    """Numbers of a merge.

    Attributes:
        method: name in `METHODS`.
        weights: a number per model.
        t: position of SLERP between the first model (0) and the second (1).
        density: share of each task vector that TIES keeps, the largest by magnitude.
        scale: factor of the merged task vector.
    """

    method: str
    weights: tuple[float, ...]
    t: float = 0.5
    density: float = 0.2
    scale: float = 1.0


def merge_linear(base: Tensor | None, models: Iterable[Tensor], settings: MergeSettings) -> Tensor:
    """Return sum(w_i x_i) / sum(w_i). Model soups, arXiv:2203.05482."""
    total = sum(settings.weights)
    return _sum(models, [weight / total for weight in settings.weights])


def merge_slerp(base: Tensor | None, models: Iterable[Tensor], settings: MergeSettings) -> Tensor:
    """Interpolate two weights along the arc between their directions, each tensor as one vector.

    sin((1 - t) a) / sin(a) x + sin(t a) / sin(a) y, where a is the angle between x and y; linear where they are parallel,
    opposite or zero.
    """
    first, second = models
    norms = torch.linalg.vector_norm(first, dtype=torch.float64) * torch.linalg.vector_norm(second, dtype=torch.float64)
    cosine = (first * second).sum(dtype=torch.float64) / norms
    if not abs(float(cosine)) <= _PARALLEL:  # also NaN, of a weight that is zero
        return first.mul(1 - settings.t).add_(second, alpha=settings.t)
    angle = torch.arccos(cosine)
    shares = [float(torch.sin(part * angle) / torch.sin(angle)) for part in (1 - settings.t, settings.t)]
    return first.mul(shares[0]).add_(second, alpha=shares[1])


def merge_task_arithmetic(base: Tensor | None, models: Iterable[Tensor], settings: MergeSettings) -> Tensor:
    """Return base + scale * sum(w_i (x_i - base)). Task arithmetic, arXiv:2212.04089."""
    assert base is not None
    return _sum((model - base for model in models), settings.weights).mul_(settings.scale).add_(base)


def merge_ties(base: Tensor | None, models: Iterable[Tensor], settings: MergeSettings) -> Tensor:
    """Trim task vectors, elect a sign per element, and average what has it. TIES, arXiv:2306.01708.

    The largest `density` of each task vector x_i - base stays, by magnitude within the tensor; the sign of an element is
    sign(sum(w_i d_i)), its value is the mean of the d_i with this sign, weighted by w_i, times scale; it is added to the base.
    """
    assert base is not None
    deltas = [_trim(model - base, settings.density) for model in models]
    sign = torch.sign(_sum(deltas, settings.weights))
    value, total = torch.zeros_like(base), torch.zeros_like(base)
    for delta, weight in zip(deltas, settings.weights):
        agrees = (torch.sign(delta) == sign) & (sign != 0)
        value.add_(delta.mul_(agrees), alpha=weight)
        total.add_(agrees, alpha=weight)
    return value.div_(total.masked_fill_(total == 0, 1.0)).mul_(settings.scale).add_(base)


def _sum(tensors: Iterable[Tensor], factors: Sequence[float]) -> Tensor:
    """Return the weighted sum; one tensor is in memory at a time."""
    total: Tensor | None = None
    for tensor, factor in zip(tensors, factors, strict=True):
        total = tensor * factor if total is None else total.add_(tensor, alpha=factor)
    assert total is not None
    return total


def _trim(delta: Tensor, density: float) -> Tensor:
    """Return the tensor with all but the largest elements set to 0; at least one stays."""
    count = max(1, round(density * delta.numel()))
    if count >= delta.numel():
        return delta
    flat = delta.reshape(-1)
    kept = flat.abs().topk(count, sorted=False).indices
    return torch.zeros_like(flat).index_copy_(0, kept, flat[kept]).view_as(delta)


#: method -> its formula
METHODS: dict[str, Callable[[Tensor | None, Iterable[Tensor], MergeSettings], Tensor]] = {
    "linear": merge_linear,
    "slerp": merge_slerp,
    "task_arithmetic": merge_task_arithmetic,
    "ties": merge_ties,
}
