"""Per-token KL estimators and the controllers of their coefficient.

With x = log pi(a) - log ref(a) for tokens a sampled from pi (http://joschu.net/blog/kl-approx.html):

    k1 = x            unbiased, noisy, may be negative; as a loss its gradient is zero on average
    k2 = x^2 / 2      biased value; as a loss it has the gradient of KL(pi || ref), the intended one
    k3 = e^-x + x - 1 unbiased value, never negative; as a loss it has the gradient of KL(ref || pi)

"k3+" has the value of k3 and has the gradient of k2.

Under the importance ratio r = pi / pi_old all but "abs" have the gradient of KL(pi || ref), r x: k1 by r (1 + x), whose first
part is zero on average, and k3 by d(r k3) = r (1 - e^-x + k3) = r x. For k3 it is computed as r x: in float32 the difference of
the two large terms loses it below x = -12, and a limit on k3 would turn its sign from x = -2.6 on. So it is for k2 and "k3+",
whose ratio has no gradient of its own: r k2 would have r (x + x^2 / 2), of the wrong sign below x = -2.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mindspeed_rl.algorithms.limits import limit

if TYPE_CHECKING:
    from mindspeed_rl.catalogue.objective import Distillation, Objective
    from mindspeed_rl.catalogue.records import KlEstimator


#: log-probs count as at least this, so that a difference of two infinities is 0 and not NaN; e^LOG_ZERO is exactly 0
LOG_ZERO = -1.0e4


def k1(x: Tensor) -> Tensor:
    """Return x."""
    return x


def absolute(x: Tensor) -> Tensor:
    """Return |x|."""
    return x.abs()


def k2(x: Tensor) -> Tensor:
    """Return x^2 / 2."""
    return 0.5 * x.square()


def compute_k3(y: Tensor) -> tuple[Tensor, Tensor]:
    """Return e^y - y - 1 and e^y - 1."""
    excess = torch.expm1(y)
    value = excess - y
    # near 0 the two terms cancel: their sum has a relative error of 2 eps / |y|, this form one of |y|^3 / 540
    near_0 = 18.0 * (y / (y - 6.0)).square()
    # the two errors are equal at y^4 = 1080 eps, where the value is y^2 / 2
    return torch.where(value < math.sqrt(270.0 * torch.finfo(y.dtype).eps), near_0, value), excess


class _K3(torch.autograd.Function):
    """Function e^-x + x - 1, without the cancellations of value and gradient near x = 0."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # pyrefly: ignore[bad-override]  (torch: the arguments of `apply`)
        value, excess = compute_k3(-x)
        ctx.save_for_backward(excess)
        return value

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # pyrefly: ignore[bad-override]  (as above)
        return -ctx.saved_tensors[0] * grad


def k3(x: Tensor) -> Tensor:
    """Return e^-x + x - 1."""
    return _K3.apply(x)


def kl_penalty(
    log_probs: Tensor,
    ref_log_probs: Tensor,
    estimator: KlEstimator,
    *,
    clamp: bool = False,
    log_ratio: Tensor | None = None,
) -> Tensor:
    """Return the per-token KL estimate.

    Args:
        log_probs: [B, R], of the policy that sampled; the gradient goes through it.
        ref_log_probs: [B, R].
        clamp: limit x and the value as in the estimator's record: to +-20 and +-10 for the k3 kinds, as MindSpeed-RL and
            verl do for low_var_kl, and not at all for the others. Beyond it the gradient is zero, except where the record
            names another function for the gradient, which is never limited (k3+).
        log_ratio: [B, R] log pi - log pi_old, with gradient, where the estimate is to be one under pi: the tokens were sampled
            by pi_old, so it is multiplied by the ratio, value and gradient alike.

    Returns:
        [B, R]; meaningless where the caller's mask is False.
    """
    function, x = estimator.load(), log_probs - ref_log_probs
    if clamp and estimator.clamp is not None:
        ratio_limit, value_limit = estimator.clamp
        value = limit(function(limit(x, -ratio_limit, ratio_limit)), -value_limit, value_limit)
    else:
        value = function(x)
    gradient = estimator.load_gradient(weighted=log_ratio is not None)
    slope = None if gradient is None else gradient(x)
    if log_ratio is not None:
        ratio = log_ratio.exp()
        value, slope = ratio * value, None if slope is None else ratio.detach() * slope
    # the value of one function with the gradient of the other
    return value if slope is None else value.detach() + (slope - slope.detach())


def estimate_divergence(log_probs: Tensor, teacher: Tensor, settings: Distillation) -> Tensor:
    """Return the estimate of KL(student || teachers) at sampled tokens, [B, R] with the gradient of `log_probs`.

    Args:
        log_probs: [B, R] of the student.
        teacher: [B, R, teachers].
    """
    floor = LOG_ZERO if settings.log_prob_min_clamp is None else settings.log_prob_min_clamp
    student, teacher = log_probs.clamp(min=floor), teacher.clamp(min=floor)
    estimator = settings.estimator
    assert estimator is not None  # of a mode over sampled tokens
    each = [kl_penalty(student, teacher[..., index], estimator, clamp=False) for index in range(len(settings.weights))]
    return sum((weight * estimate for weight, estimate in zip(settings.weights[1:], each[1:])), settings.weights[0] * each[0])


@dataclass
class _KlController:
    """Controller of the KL coefficient: constant, or moved towards a target KL (arXiv:1909.08593).

    update: coef <- coef * (1 + clip(kl / target - 1, +-0.2) * min(num_samples / horizon, 1)).

    Attributes:
        coef: the coefficient.
        target: KL of a token that it is moved to; None leaves it constant.
        horizon: samples over which it is moved.
    """

    coef: float
    target: float | None = None
    horizon: int = 1

    def __post_init__(self) -> None:
        if self.target is not None and self.target <= 0:
            raise ValueError(f"kl_target must be positive, not {self.target}")
        if self.horizon <= 0:
            raise ValueError(f"kl_horizon must be positive, not {self.horizon}")

    def update(self, current_kl: float, num_samples: int) -> None:
        """Move the coefficient after an iteration of `num_samples` responses whose mean KL of a token was `current_kl`."""
        if self.target is not None:
            error = min(max(current_kl / self.target - 1.0, -0.2), 0.2)
            # without the limit, five horizons of samples in an iteration would turn its sign
            self.coef *= 1.0 + error * min(num_samples / self.horizon, 1.0)

    def state_dict(self) -> dict[str, float]:
        return {"coef": self.coef}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.coef = state["coef"]


def build_kl_controller(objective: Objective) -> _KlController:
    """Return the controller that kl_ctrl_type names; the driver owns it and saves its state_dict with the checkpoint."""
    if objective.kl_ctrl_type == "fixed":
        return _KlController(objective.kl_coef)
    return _KlController(objective.kl_coef, target=objective.kl_target, horizon=objective.kl_horizon)
