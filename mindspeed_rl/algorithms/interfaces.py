"""Inputs and outputs of the losses and estimators."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from mindspeed_rl.observability.metrics import Metric


@dataclass(frozen=True)
class _EffectiveSampleFraction(Metric):
    """Effective fraction of samples under importance weights w: (sum w)^2 / (count * sum w^2), in (0, 1].

    value is sum w / e^shift, squares is sum (w / e^shift)^2; two of them merge exactly, which a mean of fractions would not.
    """

    squares: float = 0.0
    shift: float = 0.0

    def merge(self, other: Metric) -> _EffectiveSampleFraction:
        """Return the fraction over both."""
        if not isinstance(other, _EffectiveSampleFraction):
            raise ValueError("an effective sample fraction merges only with another one")
        shift = max(self.shift, other.shift)
        mine, theirs = math.exp(self.shift - shift), math.exp(other.shift - shift)
        value, squares = mine * self.value + theirs * other.value, mine**2 * self.squares + theirs**2 * other.squares
        return _EffectiveSampleFraction("sum", value, self.count + other.count, squares, shift)

    def result(self) -> float:
        """Return the fraction; NaN when nothing was measured or every weight is 0."""
        return self.value**2 / (self.count * self.squares) if self.squares else math.nan


Terms = tuple[str, tuple[Tensor, ...]]
"""A metric still on the device: (reduction, (value, count)). For "ess" (sum of v - 1, count, sum of (v - 1)^2, s) with
v = w / e^s: sums of v - 1 keep their digits where all weights are close to 1, and s keeps squares of v below infinity."""


def masked_mean(values: Tensor, mask: Tensor) -> Terms:
    """Return the mean of the values where the mask is True."""
    return "mean", (torch.where(mask, values.detach(), 0).sum(), mask.sum())


def masked_extreme(values: Tensor, mask: Tensor, reduction: Literal["max", "min"]) -> Terms:
    """Return the largest or smallest value where the mask is True."""
    nothing = float("-inf") if reduction == "max" else float("inf")
    masked = torch.where(mask, values.detach(), nothing)
    if not masked.numel():
        # amax refuses an empty tensor
        return reduction, (masked.new_tensor(nothing), mask.sum())
    return reduction, (masked.amax() if reduction == "max" else masked.amin(), mask.sum())


def _read_together(tensors: Sequence[Tensor]) -> list[float]:
    """Return the values of 0-d tensors, which reach the host in one transfer."""
    # float32 represents counts exactly up to 2**24, more tokens than a micro-batch has
    wide = torch.float64 if any(tensor.dtype == torch.float64 for tensor in tensors) else torch.float32
    # one cast for all tensors of a type, not one for each
    by_dtype: dict[torch.dtype, list[int]] = {}
    for index, tensor in enumerate(tensors):
        by_dtype.setdefault(tensor.dtype, []).append(index)
    stacked = [torch.stack([tensors[index] for index in some]).to(wide) for some in by_dtype.values()]
    values = torch.cat(stacked).tolist() if stacked else []
    indexes = itertools.chain.from_iterable(by_dtype.values())
    return [value for _, value in sorted(zip(indexes, values))]


class PendingMetrics(Mapping[str, Metric]):
    """Metrics that stay on the device until they are read, in one transfer; those over nothing are left out then.

    `PendingMetrics.read` reads the metrics of several losses in one transfer.
    """

    def __init__(self, terms: Mapping[str, Terms]) -> None:
        self._terms = terms
        self._read: dict[str, Metric] | None = None

    @staticmethod
    def read(pending: Iterable[Mapping[str, Metric]], others: Iterable[Tensor] = ()) -> list[float]:
        """Read the metrics that are still on the device, in one transfer; they are plain floats afterwards.

        Args:
            others: 0-d tensors that are read with them.

        Returns:
            The values of `others`.
        """
        waiting = {id(metrics): metrics for metrics in pending if isinstance(metrics, PendingMetrics)}
        unread = [metrics for metrics in waiting.values() if metrics._read is None]
        tensors = [tensor for metrics in unread for _, terms in metrics._terms.values() for tensor in terms]
        tensors += others
        ordered = iter(_read_together(tensors))
        for metrics in unread:
            metrics._read = {}
            for name, (reduction, terms) in metrics._terms.items():
                value, count, *squares = [next(ordered) for _ in terms]
                if count:
                    if squares:
                        square, shift = squares
                        square += count + 2.0 * value
                        metrics._read[name] = _EffectiveSampleFraction("sum", count + value, count, square, shift)
                    else:
                        metrics._read[name] = Metric(reduction, value, count)
        return [*ordered]

    def _read_all(self) -> dict[str, Metric]:
        if self._read is None:
            self.read([self])
        assert self._read is not None
        return self._read

    def __getitem__(self, name: str) -> Metric:
        return self._read_all()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._read_all())

    def __len__(self) -> int:
        return len(self._read_all())


@dataclass(frozen=True)
class LossOutput:
    """A loss as a sum and the count that divides it.

    The engine divides once: loss = (sum of loss_sum over all micro-batches and data-parallel ranks) / (sum of count over the
    same). Neither depends on the split of rows into micro-batches, so neither does the update.

    Attributes:
        loss_sum: 0-d, carries the gradient.
        count: 0-d integer: tokens, sequences, pairs, or rows * L_max, by the loss's normalizer; from masks and columns only,
            since the losses of routers need it before the forward pass.
        metrics: by the name in the log; with `PendingMetrics` the host does not wait in every micro-batch.
    """

    loss_sum: Tensor
    count: Tensor
    metrics: Mapping[str, Metric] = field(default_factory=dict)


#: results of a divergence over a teacher's tokens: the divergence, the student's and the teachers' probability there
NUM_DIVERGENCES = 3


@dataclass(frozen=True)
class LossInputs:
    """One micro-batch as the input of a loss. A response has as many tokens as its row predicts.

    Attributes:
        outputs: outputs of the model's head, each [B, R] float32 with gradient: log-probs and entropies of the predicted
            tokens of a language model, and NUM_DIVERGENCES more where it is compared with a teacher's tokens; one logit a
            choice where it is restricted to choices; the values of a value head.
        mask: [B, R] bool; True on predicted tokens.
        columns: columns of the rows: name -> [B, R], 0 where the mask is False, or [B] for one value a row.
    """

    outputs: tuple[Tensor, ...]
    mask: Tensor
    columns: Mapping[str, Tensor]


@dataclass
class PolicyBatch:
    """Rows of one micro-batch for `policy_loss`. All tensors are [B, R], aligned to the response and padded on the right.

    A row is a full response: under context parallelism the engine gathers the log-probs of a sequence first. Values at
    positions where the masks are False are never read.

    Attributes:
        log_probs: log pi_theta of the sampled tokens; carries the gradient.
        advantages: one value a token.
        response_mask: bool; tokens the actor sampled. A row without any is a filler and is not counted.
        loss_mask: bool; tokens that train, a subset of response_mask; None means all of response_mask.
        old_log_probs: log-probs of the policy at the start of the update; None means
            rollout_log_probs where the objective reads them, else exactly on-policy (log_probs without gradient).
        ref_log_probs: log-probs of the reference policy; required when the KL is in the loss.
        rollout_log_probs: log-probs of the inference engine.
        entropy: per-token entropy; required for entropy_coeff (with gradient).
        old_entropy: entropy of the policy at the start of the update; compared with entropy_threshold, else `entropy` is.
        entropy_threshold: tokens below it lose their policy term; from `masks.entropy_threshold` over the global batch.
        divergence: to the teachers over their most probable tokens, with gradient, and the student's and the teachers'
            probability there; None without.
        teacher_log_probs: [B, R, teachers] log-probs of the sampled tokens; None without.
        marked: bool; tokens of the whole batch that the loss treats in another way (`PolicyLoss.marks`); None without.
        mask: loss_mask, or response_mask without one.
    """

    log_probs: Tensor
    advantages: Tensor
    response_mask: Tensor
    loss_mask: Tensor | None = None
    old_log_probs: Tensor | None = None
    ref_log_probs: Tensor | None = None
    rollout_log_probs: Tensor | None = None
    entropy: Tensor | None = None
    old_entropy: Tensor | None = None
    entropy_threshold: float | None = None
    divergence: tuple[Tensor, ...] | None = None
    teacher_log_probs: Tensor | None = None
    marked: Tensor | None = None
    mask: Tensor = field(init=False)

    @classmethod
    def from_inputs(cls, inputs: LossInputs, *, entropy_threshold: float | None = None) -> PolicyBatch:
        """Build the rows of a language model from its outputs and columns.

        The columns are advantages, scored_mask, loss_mask and, optionally, rollout_log_probs, old_log_probs, ref_log_probs,
        entropies (those at the start of the update), teacher_log_probs and marked_tokens.
        """
        log_probs, entropy, *divergence = inputs.outputs
        columns = inputs.columns
        return cls(
            log_probs=log_probs,
            advantages=columns["advantages"],
            # False where inputs.mask is, as all columns
            response_mask=columns["scored_mask"],
            loss_mask=columns["loss_mask"],
            old_log_probs=columns.get("old_log_probs"),
            ref_log_probs=columns.get("ref_log_probs"),
            rollout_log_probs=columns.get("rollout_log_probs"),
            entropy=entropy,
            old_entropy=columns.get("entropies"),
            entropy_threshold=entropy_threshold,
            divergence=tuple(divergence) or None,
            teacher_log_probs=None if divergence else columns.get("teacher_log_probs"),
            marked=columns.get("marked_tokens"),
        )

    def __post_init__(self) -> None:
        self.mask = self.response_mask if self.loss_mask is None else self.loss_mask
        shape = self.log_probs.shape
        if self.log_probs.dim() != 2:
            raise ValueError(f"log_probs must be [B, R], not {list(shape)}")
        others = "advantages response_mask loss_mask old_log_probs ref_log_probs rollout_log_probs entropy old_entropy marked"
        for name in others.split():
            value = getattr(self, name)
            if value is not None and value.shape != shape:
                raise ValueError(f"{name} is {list(value.shape)} but log_probs is {list(shape)}")
        for name, mask in (("response_mask", self.response_mask), ("loss_mask", self.mask)):
            if mask.dtype != torch.bool:
                raise ValueError(f"{name} must be bool, not {mask.dtype}")


@dataclass(frozen=True, kw_only=True)
class PolicyInputs:
    """One micro-batch of a policy loss; all tensors are [B, R]. Losses where `mask` is False are not read.

    Attributes:
        ratio: new / old policy at the objective's level; carries the gradient.
        log_probs: log pi_theta of the sampled tokens; carries the gradient.
        mask: bool; tokens that train.
        drift: log_probs - old_log_probs; carries the gradient.
        log_ratio: the drift within `policy_losses.LOG_RATIO_LIMIT`; carries the gradient.
        old_log_probs: log-probs of the policy at the start of the update; log_probs without gradient where there is one step
            per rollout; rollout_log_probs where the objective reads them.
        ref_log_probs: log-probs of the reference; set for a loss that needs "reference".
        rollout_log_probs: log-probs of the inference engine; None where the caller has none.
        entropy: with gradient; None where the caller has none.
        old_entropy: entropy of the policy at the start of the update; set for a loss that needs "entropies".
        marked: bool; set for a loss that marks tokens of the batch.
    """

    ratio: Tensor
    log_probs: Tensor
    advantages: Tensor
    mask: Tensor
    old_log_probs: Tensor
    drift: Tensor
    log_ratio: Tensor
    ref_log_probs: Tensor | None = None
    rollout_log_probs: Tensor | None = None
    entropy: Tensor | None = None
    old_entropy: Tensor | None = None
    marked: Tensor | None = None


@dataclass
class AdvantageInputs:
    """The full global batch, for an advantage estimator. B rows, the group_size samples of a prompt being adjacent.

    Attributes:
        rewards: [B], one score a response.
        response_mask: [B, R] bool; tokens the actor sampled.
        group_size: samples of one prompt.
        scored: [B] bool; False where scoring failed: the advantage is 0 and no mean or std includes the row. None: all are.
        kl: [B, R] per-token KL to the reference, for KL in the reward; None without.
        kl_coef: its coefficient: token t loses kl_coef * kl_t of its reward.
        values: [B, R] critic's values (gae); values[:, t] is the state before token t.
        old_log_probs, squared_probs: [B, R] at the start of the update (optimal_token_baseline).
        greedy_rewards: [B] score of the greedy response to the row's prompt (remax); a row whose is NaN takes no part.
        reward_components: [B, K] raw score of each reward function (gdpo); NaN where it has no opinion.
        reward_weights: K weights of the components (gdpo); None means all 1.
        valid: [B] bool; rows with a score.
        mask: [B, R] bool; tokens that get an advantage.
    """

    rewards: Tensor
    response_mask: Tensor
    group_size: int = 1
    scored: Tensor | None = None
    kl: Tensor | None = None
    kl_coef: float = 0.0
    values: Tensor | None = None
    greedy_rewards: Tensor | None = None
    reward_components: Tensor | None = None
    reward_weights: tuple[float, ...] | None = None
    old_log_probs: Tensor | None = None
    squared_probs: Tensor | None = None
    valid: Tensor = field(init=False)
    mask: Tensor = field(init=False)

    def __post_init__(self) -> None:
        if self.response_mask.dim() != 2 or self.response_mask.dtype != torch.bool:
            raise ValueError(
                f"response_mask must be a [B, R] bool tensor, not {list(self.response_mask.shape)} {self.response_mask.dtype}"
            )
        rows = self.response_mask.shape[0]
        if self.rewards.shape != (rows,):
            raise ValueError(f"rewards is {list(self.rewards.shape)} but response_mask has {rows} rows")
        if self.scored is not None and (self.scored.shape != (rows,) or self.scored.dtype != torch.bool):
            raise ValueError(f"scored must be a [{rows}] bool tensor, not {list(self.scored.shape)} {self.scored.dtype}")
        self.valid = torch.ones_like(self.rewards, dtype=torch.bool) if self.scored is None else self.scored
        # one NaN would reach all advantages of its group, and by whitening all of the batch
        bad = ~torch.isfinite(self.rewards) & self.valid
        if bad.any():
            raise ValueError(f"rewards of rows {bad.nonzero().flatten().tolist()[:8]} are not finite")
        if self.group_size < 1 or rows % self.group_size:
            raise ValueError(f"{rows} rows do not divide into groups of {self.group_size} samples")
        if self.greedy_rewards is not None and self.greedy_rewards.shape != (rows,):
            raise ValueError(f"greedy_rewards is {list(self.greedy_rewards.shape)} but response_mask has {rows} rows")
        if self.greedy_rewards is not None:
            self.valid = self.valid & ~self.greedy_rewards.isnan()
        self.mask = self.response_mask & self.valid.unsqueeze(1)
        components = self.reward_components
        if components is not None and (components.dim() != 2 or components.shape[0] != rows):
            raise ValueError(f"reward_components is {list(components.shape)} but must be [{rows}, K]")
        for name in ("kl", "values", "old_log_probs", "squared_probs"):
            value = getattr(self, name)
            if value is not None and value.shape != self.response_mask.shape:
                raise ValueError(f"{name} is {list(value.shape)} but response_mask is {list(self.response_mask.shape)}")

    def list_missing(self, needs: Collection[str]) -> list[str]:
        """Return descriptions of the inputs that an estimator with these needs lacks."""
        # need -> (attribute, its description)
        inputs = {
            "values": ("values", "the critic's values [B, R]"),
            "greedy_baseline": ("greedy_rewards", "[B]: the score of each row's prompt answered greedily"),
            "reward_parts": ("reward_components", "[B, K]: the raw score of each reward function"),
            "old_log_probs": ("old_log_probs", "[B, R]: of the policy at the start of the update"),
            "squared_probs": ("squared_probs", "[B, R]: sums of squared probabilities over the vocabulary"),
        }
        needed = [inputs[need] for need in sorted(needs)]
        return [f"{name}, {description}" for name, description in needed if getattr(self, name) is None]
