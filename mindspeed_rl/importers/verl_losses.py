"""Losses of verl's actor: its policy losses with their averages and bounds, and the KL."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mindspeed_rl.catalogue import KL_ESTIMATORS
from mindspeed_rl.config.errors import ConfigError
from mindspeed_rl.importers.options import SourceCommand

_ACTOR, _CORRECTION = "actor_rollout_ref.actor.", "algorithm.rollout_correction."
#: losses that mark tokens by a covariance -> their numbers under policy_loss, with verl's defaults
OF_COVARIANCE = {
    "clip_cov": {"clip_cov_ratio": 0.0002, "clip_cov_lb": 1.0, "clip_cov_ub": 5.0},
    "kl_cov": {"kl_cov_ratio": 0.0002, "ppo_kl_coef": 0.1},
}
#: aggregation of verl -> ours, and the clipped loss that has it
AGGREGATIONS = {
    "token-mean": ("token", "dapo"),
    "seq-mean-token-mean": ("sequence", "grpo"),
    "seq-mean-token-sum-norm": ("constant", "dr_grpo"),
    "seq-mean-token-sum": ("summed", "luspo"),
}


def is_reinforce(command: SourceCommand) -> bool:
    """Return True for the plain policy gradient with weights, which verl has only in bypass_mode."""
    return command.flag(f"{_CORRECTION}bypass_mode") and command.text(f"{_CORRECTION}loss_type", "ppo_clip") == "reinforce"


@dataclass(frozen=True)
class LossMode:
    """What a `loss_mode` of verl is, as its function in core_algos.py computes it.

    Attributes:
        loss: policy loss here; empty for the clipped one that has the aggregation.
        name: name of its formula.
        level: what the ratio is computed over.
        aggregation: that its function has whatever loss_agg_mode says; None where it follows loss_agg_mode.
        clips: it reads clip_ratio_low and clip_ratio_high.
        has_dual: it reads clip_ratio_c.
        takes: aggregations that the loss has here.
    """

    loss: str
    name: str
    level: Literal["token", "sequence_token"] = "token"
    aggregation: str | None = None
    clips: bool = True
    has_dual: bool = False
    takes: tuple[str, ...] = ("token",)


LOSS_MODES = {
    "vanilla": LossMode("", "grpo", has_dual=True, takes=("token", "sequence", "constant", "summed")),
    "gspo": LossMode("gspo", "grpo", "sequence_token", "sequence"),
    "sapo": LossMode("sapo", "sapo", aggregation="sequence", clips=False),
    "geo_mean": LossMode("gmpo", "gmpo", aggregation="sequence"),
    "cispo": LossMode("cispo", "cispo"),
    "dppo_tv": LossMode("dppo_tv", "dppo_tv", has_dual=True),
    "dppo_kl": LossMode("dppo_kl", "dppo_kl", has_dual=True),
    "gpg": LossMode("gpg", "gpg", clips=False),
    "dro": LossMode("dro", "dro", clips=False),
    "clip_cov": LossMode("clip_cov", "clip_cov"),
    "kl_cov": LossMode("kl_cov", "kl_cov", clips=False),
}


#: variable of the user: the verl whose GSPO is meant
RELEASE = "VERL_RELEASE"


def _is_release(command: SourceCommand) -> bool:
    """Return True where the user says that release 0.9.1 runs the command, and not verl's main branch.

    Raises:
        ConfigError: another release.
    """
    name = command.environment.get(RELEASE, "main")
    if name not in ("main", "0.9.1"):
        raise ConfigError([f"--set {RELEASE}={name}: must be 0.9.1 or main"])
    return name != "main"


@dataclass(frozen=True)
class Loss:
    """The loss of verl's actor: names of the catalogue, and bounds of the ratio.

    Attributes:
        fixes: the aggregation is the function's own, which loss_agg_mode does not change.
    """

    loss_type: str
    name: str
    level: Literal["token", "sequence_token"]
    aggregation: str
    low: float | None
    high: float | None
    dual: float | None
    fixes: bool

    @classmethod
    def from_command(cls, command: SourceCommand) -> Loss:
        """Read the loss; GSPO of release 0.9.1 averages as loss_agg_mode has it, verl's main branch does not.

        Raises:
            ConfigError: it, or its aggregation, is not available.
        """
        name, aggregation = (
            "gpg" if is_reinforce(command) else command.text(f"{_ACTOR}policy_loss.loss_mode", "vanilla"),
            command.text(f"{_ACTOR}loss_agg_mode", "token-mean"),
        )
        if name not in LOSS_MODES:
            raise ConfigError([f"{_ACTOR}policy_loss.loss_mode={name}: not available here: this policy loss"])
        if aggregation not in AGGREGATIONS:
            raise ConfigError([f"{_ACTOR}loss_agg_mode={aggregation}: not available here: this sum over tokens"])
        mode, (normalizer, clipped) = LOSS_MODES[name], AGGREGATIONS[aggregation]
        if name == "gspo" and _is_release(command):
            mode = LossMode(clipped, "grpo", "sequence_token", takes=LOSS_MODES["vanilla"].takes)
        if mode.aggregation is None and normalizer not in mode.takes:
            raise ConfigError([f"{_ACTOR}policy_loss.loss_mode={name}: not available here: with {aggregation}"])
        scale, length = command.get(f"{_ACTOR}loss_scale_factor"), command.count("data.max_response_length", 512)
        if scale is not None and normalizer == "constant" and scale != length:
            raise ConfigError(
                [f"{_ACTOR}loss_scale_factor={scale}: not available here: another divisor than max_response_length"]
            )
        # the defaults of the two sides are numbers, so that clip_ratio by itself decides nothing
        either = command.number(f"{_ACTOR}clip_ratio", 0.2)
        low, high = (
            either if command.has(side) and command.options[side] is None else command.number(side, 0.2)
            for side in (f"{_ACTOR}clip_ratio_low", f"{_ACTOR}clip_ratio_high")
        )
        return cls(
            mode.loss or clipped,
            mode.name,
            mode.level,
            mode.aggregation or normalizer,
            low if mode.clips else None,
            high if mode.clips else None,
            command.number(f"{_ACTOR}clip_ratio_c", 3.0) if mode.has_dual else None,
            mode.aggregation is not None,
        )


@dataclass(frozen=True)
class Kl:
    coefficient: float = 0.0
    estimator: str | None = None
    place: str | None = None

    @classmethod
    def from_command(cls, command: SourceCommand) -> Kl:
        """Read the KL.

        Raises:
            ConfigError: it has two places, or an estimator that is not available.
        """
        in_reward, in_loss = command.flag("algorithm.use_kl_in_reward"), command.flag(f"{_ACTOR}use_kl_loss")
        if in_reward and in_loss:
            raise ConfigError(["algorithm.use_kl_in_reward and actor.use_kl_loss are both true, but the KL has one place here"])
        coefficient = command.number("algorithm.kl_ctrl.kl_coef" if in_reward else f"{_ACTOR}kl_loss_coef", 0.001)
        if not (in_reward or in_loss) or not coefficient:
            return cls()
        option = "algorithm.kl_penalty" if in_reward else f"{_ACTOR}kl_loss_type"
        estimator = command.text(option, "kl" if in_reward else "low_var_kl")
        if estimator not in KL_ESTIMATORS:
            raise ConfigError([f"{option}={estimator}: not available here; available are {', '.join(KL_ESTIMATORS)}"])
        return cls(coefficient, estimator, "reward" if in_reward else "loss")
