"""PPO's clipped loss of tokens with its KL, entropy and metrics, in few kernels: one buffer, one reduction, one backward.

`policy_losses.compute_plain_loss` is the formula; this computes the same numbers where most runs are: the ratio of tokens, two
bounds and the k3 kinds of the KL. Terms are small next to logits, so what they cost a device is the start of their kernels.
Every value of every token has a row of one buffer [rows, B, R]; operators write there, neighbouring rows at a time, and all
rows are summed at once.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mindspeed_rl.algorithms.interfaces import LossOutput, PendingMetrics, PolicyBatch, Terms

if TYPE_CHECKING:
    from mindspeed_rl.catalogue.objective import Objective

_CLIP, _K3, _K2 = (f"mindspeed_rl.algorithms.{name}" for name in ("policy_losses:clip", "kl:k3", "kl:k2"))
# rows of the buffer; the first six are inputs, and each difference is one of neighbours
_REF, _LOG_PROB, _OLD, _ROLLOUT, _ADVANTAGE, _ENTROPY, _MASK = range(7)
#: log ref - log pi, log pi - log pi_old, log pi_old - log mu
_TO_REF, _DRIFT, _MISMATCH = 7, 8, 9
#: r A, the limited log-ratio, clip(r) A and the smaller product: two rows apart, so that pairs are compared at once
_UNCLIPPED, _LIMITED, _CLIPPED, _GAIN = 10, 11, 12, 13
#: 1.0 where the log-ratio was limited, and where the ratio was clipped
_IS_LIMITED, _IS_CLIPPED = 14, 15
#: of the differences to the reference and to the rollout engine: the root of k3 near 0, e^y - 1, the squares of both, k3
_ROOTS, _EXCESS, _SQUARES, _KL = slice(16, 18), slice(18, 20), slice(20, 24), slice(24, 26)
_SQUARED_EXCESS, _KL_TO_REF, _KL_OF_ROLLOUT, _DISTANCE, _NUM_ROWS = 23, 24, 25, 26, 27
#: k3 below which 18 (y / (6 - y))^2 is closer to it than e^y - 1 - y, by type
_NEAR_0 = {torch.float32: 0.005, torch.float64: 5e-7}


def fuses(batch: PolicyBatch, objective: Objective) -> bool:
    """Return True where `fused_policy_loss` computes what this objective asks for."""
    kl = objective.kl
    has_kl = bool(objective.kl_in_loss) or batch.ref_log_probs is not None
    return (
        (objective.loss.target, objective.level) == (_CLIP, "token")
        and objective.delta is None
        and objective.clip_ratio_c is None
        and objective.distillation is None
        and objective.correction is None
        and objective.off_policy_sequence_mask_delta is None
        and batch.entropy_threshold is None
        and (not has_kl or (kl.target == _K3 and kl.gradient in (None, _K2) and not objective.use_bias_correction_kl))
        # what is missing is refused by the formula, with its name
        and not (has_kl and batch.ref_log_probs is None)
        and not (objective.entropy_coeff and batch.entropy is None)
        and batch.log_probs.dtype in _NEAR_0
        and batch.log_probs.numel() > 0
    )


class _Clip(torch.autograd.Function):
    """Function (log-probs, entropy) -> loss sum, sums of all rows, and the largest distance from the rollout engine.

    Backward of the policy term: L = -min(r A, clip(r) A) has the gradient L where nothing was clipped or limited, else 0.
    """

    @staticmethod
    def forward(  # pyrefly: ignore[bad-override]  (torch: the arguments of `apply`)
        ctx: Any,
        log_probs: Tensor,
        entropy: Tensor | None,
        batch: PolicyBatch,
        objective: Objective,
        limit: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        clamp = objective.kl.clamp if objective.kl_clamp else None
        # ones: after the fill the row of the mask is the mask
        terms = log_probs.new_ones((_NUM_ROWS, *log_probs.shape))
        # missing inputs are replaced by ones whose difference is 0; their rows are not read
        old = log_probs if batch.old_log_probs is None else batch.old_log_probs
        ref = log_probs if batch.ref_log_probs is None else batch.ref_log_probs
        rollout = old if batch.rollout_log_probs is None else batch.rollout_log_probs
        inputs = [ref, log_probs, old, rollout, batch.advantages, log_probs if entropy is None else entropy]
        torch.stack(inputs, out=terms[:_MASK])
        # not a product: outside the mask an input may be NaN
        terms[: _MASK + 1].masked_fill_(~batch.mask, 0.0)
        torch.sub(terms[:_ROLLOUT], terms[1 : _ROLLOUT + 1], out=terms[_TO_REF : _MISMATCH + 1])
        # the ratio, and its product with the advantage
        torch.clamp(terms[_DRIFT], -limit, limit, out=terms[_LIMITED])
        torch.exp(terms[_LIMITED], out=terms[_UNCLIPPED])
        low, high = 1.0 - objective.clip_ratio_low, 1.0 + objective.clip_ratio_high
        torch.clamp(terms[_UNCLIPPED], low, high, out=terms[_CLIPPED])
        terms[_UNCLIPPED : _CLIPPED + 1 : 2].mul_(terms[_ADVANTAGE])
        torch.minimum(terms[_UNCLIPPED], terms[_CLIPPED], out=terms[_GAIN])
        torch.ne(terms[_DRIFT : _UNCLIPPED + 1 : 2], terms[_LIMITED : _GAIN + 1 : 2], out=terms[_IS_LIMITED : _IS_CLIPPED + 1])
        # k3 = e^y - 1 - y. Near 0, where these cancel, it is y^2 / 2 / (1 - y / 6)^2 up to y^3 / 540 of it
        y = terms[_TO_REF : _MISMATCH + 1 : 2]
        torch.expm1(y, out=terms[_EXCESS])
        torch.div(y, torch.rsub(y, 6.0 / math.sqrt(18.0), alpha=1.0 / math.sqrt(18.0)), out=terms[_ROOTS])
        torch.square(terms[_ROOTS.start : _EXCESS.stop], out=terms[_SQUARES])
        far = terms[_EXCESS] - y
        torch.where(far < _NEAR_0[far.dtype], terms[_SQUARES][:2], far, out=terms[_KL])
        if clamp is not None:
            # k3 is beyond its limit wherever x is beyond its own
            terms[_KL_TO_REF].clamp_(max=clamp[1])
        torch.abs(terms[_MISMATCH], out=terms[_DISTANCE])
        lengths: Tensor | None = None
        if objective.normalizer == "sequence":
            by_row = terms.new_empty((2, *terms.shape[:2]))
            torch.sum(terms, -1, out=by_row[0])
            # a row that a filter emptied gives 0 / 1
            lengths = by_row[0, _MASK].clamp(min=1.0)
            torch.div(by_row[0], lengths, out=by_row[1])
            sums = by_row.sum(-1)
        else:
            sums = terms.sum((1, 2)).expand(2, -1)
        loss = sums[1, _KL_TO_REF] * objective.kl_in_loss - sums[1, _GAIN] if objective.kl_in_loss else -sums[1, _GAIN]
        if objective.entropy_coeff:
            loss = loss - objective.entropy_coeff * sums[1, _ENTROPY]
        peak = terms[_DISTANCE].amax()
        ctx.save_for_backward(terms, lengths)
        ctx.settings = objective, clamp
        ctx.mark_non_differentiable(sums, peak)
        ctx.set_materialize_grads(False)
        return loss, sums, peak

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        (terms, lengths), (objective, clamp), (grad, *_) = ctx.saved_tensors, ctx.settings, grads
        if grad is None:
            return (None,) * 5
        scale = -grad if lengths is None else -grad / lengths[:, None]
        gain = terms[_GAIN]
        stopped = torch.maximum(terms[_IS_LIMITED], terms[_IS_CLIPPED])
        slope = torch.addcmul(gain, gain, stopped, value=-1.0)
        if objective.kl_in_loss:
            # of k3 in x = -y, and of k2 in its place
            of_kl = terms[_TO_REF] if objective.kl.gradient is not None else terms[_EXCESS][0]
            if clamp is not None and objective.kl.gradient is None:
                of_kl = of_kl * (terms[_KL_TO_REF] < clamp[1])
            slope = torch.add(slope, of_kl, alpha=objective.kl_in_loss)
        of_entropy = None
        if objective.entropy_coeff and ctx.needs_input_grad[1]:
            of_entropy = terms[_MASK] * (scale * objective.entropy_coeff)
        return slope.mul_(scale), of_entropy, None, None, None


def fused_policy_loss(batch: PolicyBatch, objective: Objective, limit: float) -> LossOutput:
    """Return what `policy_losses.compute_plain_loss` returns, where `fuses` is True.

    Args:
        limit: of the log-ratio.
    """
    loss, sums, peak = _Clip.apply(batch.log_probs, batch.entropy, batch, objective, limit)
    plain, weighted = sums.unbind(0)
    tokens = plain[_MASK]
    # Megatron adds the counts up in int32
    if objective.normalizer == "token":
        count = tokens.to(torch.int32)
    else:
        count = batch.response_mask.any(dim=1).sum(dtype=torch.int32)
        if objective.normalizer == "constant":
            if objective.max_response_length is None or objective.max_response_length < 1:
                raise ValueError(
                    f"max_response_length must be a positive number of tokens, not {objective.max_response_length}"
                )
            count = count * objective.max_response_length
    metrics: dict[str, Terms] = {
        "actor/pg_clipfrac": ("mean", (plain[_IS_CLIPPED], tokens)),
        "actor/ppo_kl": ("negated mean", (plain[_DRIFT], tokens)),
        "actor/log_ratio_clamped": ("mean", (plain[_IS_LIMITED], tokens)),
        "actor/pg_loss": ("negated mean", (weighted[_GAIN], count)),
    }
    if batch.ref_log_probs is not None:
        metrics["actor/kl_loss"] = ("mean", (weighted[_KL_TO_REF], count))
        # of a token, whatever the normalizer: an adaptive coefficient follows it
        metrics["actor/ref_kl"] = ("mean", (plain[_KL_TO_REF], tokens))
    if batch.entropy is not None:
        metrics["actor/entropy"] = ("mean", (plain[_ENTROPY], tokens))
    if batch.rollout_log_probs is not None and objective.log_rollout_offpolicy_metrics:
        metrics |= {
            "rollout/log_probs_diff_mean": ("mean", (plain[_DISTANCE], tokens)),
            "rollout/log_probs_diff_max": ("max", (peak, tokens)),
            "rollout/kl": ("mean", (plain[_KL_OF_ROLLOUT], tokens)),
            "rollout/ess": ("ess", (plain[_EXCESS][1], tokens, plain[_SQUARED_EXCESS])),
        }
    return LossOutput(loss, count, PendingMetrics(metrics))
