"""The objective of an AReaL run by its formulas: learning rate, norms of rewards and advantages, ratio, correction, critic."""

from __future__ import annotations

from dataclasses import dataclass, replace

from mindspeed_rl.config.errors import ConfigError
from mindspeed_rl.importers.options import SourceCommand
from mindspeed_rl.importers.recipe import ACTOR, RL, Correction, Objective, Overlong, Rate, Recipe, Rewards
from mindspeed_rl.importers.result import Import
from mindspeed_rl.importers.source_plan import RECORDED_POLICY, Schedule

_STYLES = ("constant", "linear", "cosine")
_CORRECTION = "actor.rejection_sampling."
#: level, action and aggregation of a ratio -> mode here; a sequence's weight is the geometric mean
_CORRECTIONS = {
    ("token", "mask"): "token_mask",
    ("token", "clamp"): "token_truncate",
    ("sequence", "mask"): "geometric_mask",
    ("sequence", "clamp"): "geometric_truncate",
}
#: what the proximal policy's log-probs are, by the method
_PROXIMAL = {"recompute": "actor", "metrics": "actor", "loglinear": "between engine and actor, by their versions"}
#: scores of a rule are between -1 and 1
_LARGEST_SCORE = 1.0


def read_rate(
    command: SourceCommand, prefix: str, iterations: int, steps: int, *, limited: bool, group: str = ACTOR
) -> tuple[Rate, Schedule]:
    """Return the learning rate of a role, which AReaL moves once a batch.

    Args:
        iterations: batches of all epochs, over which the rate decays.
        limited: the run ends before them.
    """
    names = f"{prefix}optimizer."
    if command.get(f"{prefix}optimizer", {}) is None or not any(name.startswith(names) for name in command.options):
        raise ConfigError([f"{prefix}optimizer is missing"])
    peak, style = command.number(f"{names}lr", 1e-3), command.text(f"{names}lr_scheduler_type", "constant")
    if style not in _STYLES:
        raise ConfigError([f"{names}lr_scheduler_type={style}: not available here; {', '.join(_STYLES)} are"])
    share, ratio = command.number(f"{names}warmup_steps_proportion", 0.001), command.number(f"{names}min_lr_ratio", 0.0)
    uses_megatron = command.text("actor.backend").startswith("megatron")
    # the linear schedule of transformers ends at 0, and only the cosine warms up from the least rate
    floor = peak * ratio if style == "cosine" or (style == "linear" and uses_megatron) else 0.0
    start = floor if style == "cosine" and not uses_megatron else 0.0
    warmup = int(share * iterations)
    rate = Rate(
        group=group,
        peak=peak,
        style=style,
        floor=floor if style != "constant" else None,
        decay=iterations if limited else None,
        warmup_share=share or None,
        start=start or None,
        clip_grad=command.number(f"{names}gradient_clipping", 1.0),
        weight_decay=command.number(f"{names}weight_decay", 0.01),
    )
    return rate, Schedule(peak, style, iterations * steps, warmup * steps, start, floor)


@dataclass(frozen=True)
class _Norm:
    """What rewards or advantages are centred on and divided by."""

    mean: str | None
    leaves_out: bool
    std: str | None
    eps: float

    @classmethod
    def from_command(cls, run: Import, command: SourceCommand, name: str, group: int) -> _Norm | None:
        """Read one; None where it is off."""
        prefix = f"actor.{name}."
        if not any(option.startswith(prefix) for option in command.options):
            return None

        def read(level: str) -> str | None:
            value = command.options.get(f"{prefix}{level}", "batch")
            if value not in ("batch", "group", None):
                raise ConfigError([f"{prefix}{level} is {value!r}, but must be batch, group or null"])
            return None if value is None else str(value)

        norm = cls(
            read("mean_level"), command.flag(f"{prefix}mean_leave1out"), read("std_level"), command.number(f"{prefix}eps", 1e-5)
        )
        if norm.std and not command.flag(f"{prefix}std_unbiased", default=True):
            run.refuse(f"{prefix}std_unbiased", "a spread divided by n")
        if "group" in (norm.mean, norm.std) and command.count(f"{prefix}group_size", 1) != group:
            run.refuse(f"{prefix}group_size", f"groups of {command.count(f'{prefix}group_size', 1)} next to {group} responses")
        return norm

    def __str__(self) -> str:
        kind = f"mean of the {self.mean}" if self.mean else "no mean"
        return f"{kind}{' without the own' if self.leaves_out else ''}, std of the {self.std or 'none'}"


@dataclass(frozen=True)
class _Estimate:
    """An estimator here, and what differs.

    Attributes:
        scale: divisor as AReaL has it, and here.
        centres: the mean of the group leaves all that is added to every score out.
    """

    name: str
    scale: tuple[str | None, str | None] = (None, None)
    epsilon: float | None = None
    whiten: bool | None = None
    centres: bool = False


def _estimate(rewards: _Norm | None, advantages: _Norm | None, group: int, *, has_critic: bool) -> _Estimate:
    """Return the estimator for a pair of norms.

    Raises:
        ConfigError: there is none.
    """
    whitens = advantages is not None
    outer = None if advantages is None else (advantages.mean, advantages.leaves_out, advantages.std)
    pair = f"reward_norm ({rewards or 'off'}) and adv_norm ({advantages or 'off'})"
    if outer not in (None, ("batch", False, "batch")):
        raise ConfigError([f"actor.adv_norm: not available here: {pair}; mean and std of the batch are, or none"])
    if rewards is None:
        # ours adds 1e-8 to the variance
        spread = None if advantages is None else f"std of the batch + {advantages.eps:g}"
        return _Estimate("gae" if has_critic else "reinforce_plus_plus", (spread, None), whiten=whitens)
    if has_critic or rewards.mean != "group":
        critic = " with a critic" if has_critic else ""
        raise ConfigError([f"actor.reward_norm: not available here: {pair}{critic}; rewards that are centred on their group "
                           "are, without a critic"])  # fmt: skip
    if rewards.leaves_out and rewards.std is not None:
        raise ConfigError([f"actor.reward_norm: not available here: {pair}; without the own reward std_level is null"])
    # centred without the own reward, rewards are G / (G - 1) times as large
    own = (group - 1) / group if rewards.leaves_out else 1.0
    if advantages is None:
        if rewards.leaves_out:
            return _Estimate("rloo", centres=True)
        if rewards.std == "batch":
            return _Estimate("group_norm", ("batch, of centred rewards", "batch"), rewards.eps, centres=True)
        return _Estimate("group_norm", (rewards.std or "none",) * 2, rewards.eps, centres=True)
    if rewards.std == "group" and rewards.eps != advantages.eps:
        here, there = "group", f"group, with {rewards.eps:g}, then {advantages.eps:g}"
        return _Estimate("group_norm_whitened", (there, here), rewards.eps, centres=True)
    # one number divides all there before the batch's spread does, and cancels
    scale = ("batch, of centred rewards, then of tokens", "none") if rewards.std == "batch" else (rewards.std or "none",) * 2
    return _Estimate("group_norm_whitened", scale, float(f"{advantages.eps * own:.12g}"), centres=True)


def describe_objective(run: Import, command: SourceCommand, shared: Recipe, group: int, *, shares: bool) -> Recipe:
    """Return the run with loss, estimator, KL, correction and the penalty of long responses.

    Args:
        shares: the rollout has the devices that train.
    """
    has_critic = any(name.startswith("critic.") for name in command.options)
    norms = [_Norm.from_command(run, command, name, group) for name in ("reward_norm", "adv_norm")]
    found = _estimate(norms[0], norms[1], group, has_critic=has_critic)
    coefficient = command.number("actor.kl_ctl", 0.1)
    kind, place = command.text("actor.kl_estimator", "k1"), "reward"
    if kind not in ("k1", "k2", "k3"):
        raise ConfigError([f"actor.kl_estimator={kind}: not available here; k1, k2 and k3 are"])
    if coefficient and not any(name.startswith("ref.") for name in command.options):
        run.refuse("actor.kl_ctl", "a KL without a reference, which is the actor's log-probs there")
    decoupled, recomputes = command.flag("actor.use_decoupled_loss"), command.flag("actor.recompute_logprob")
    policy = _read_policy(command, decoupled=decoupled, recomputes=recomputes)
    if coefficient:
        parts = ["after the norm of the group"] if found.centres else []
        parts += ["of the engine's log-probs"] if decoupled else []
        place = ", ".join(["reward", *parts])
    low = command.number("actor.eps_clip", 0.2)
    high = command.number("actor.eps_clip_higher", low)
    level, smooth = command.text("actor.importance_sampling_level", "token"), command.flag("actor.use_sapo_loss")
    if level not in ("token", "sequence"):
        raise ConfigError([f"actor.importance_sampling_level={level}: not available here; token and sequence are"])
    if smooth and decoupled:
        run.refuse("actor.use_sapo_loss", "SAPO with use_decoupled_loss, which AReaL refuses too")
    varies = coefficient or has_critic or command.number("actor.discount", 1.0) * command.number("actor.gae_lambda", 1.0) != 1
    if level == "sequence" and varies:
        run.refuse("actor.importance_sampling_level", "ratios of sequences with advantages that differ between tokens")
    correction = _read_correction(run, command) if decoupled else None
    run.note_given(
        " ".join(f"{_CORRECTION}{name}" for name in ("level", "action", "metric", "agg", "upper", "lower")),
        "see importance_sampling of the plan" if decoupled else "read with use_decoupled_loss",
        changes_nothing=not decoupled,
    )
    # a mask comes before the mean of a sequence's ratios there
    masked = level == "sequence" and correction is not None and correction.mode == "token_mask"
    aggregation = "token, with ratios over the tokens that the mask keeps" if masked else "token"
    discount, trace = command.number("actor.discount", 1.0), command.number("actor.gae_lambda", 1.0)
    reads_gamma = found.name in ("gae", "reinforce_plus_plus")
    if found.centres and discount * trace != 1:
        run.refuse("actor.discount", "rewards of a group that are discounted over tokens")
    # without values a trace is a discount
    gamma = (discount if has_critic else discount * trace) if reads_gamma else None
    dual = command.maybe("actor.c_clip")
    return replace(
        shared,
        loss="sapo" if smooth else "grpo",
        level=level,  # type: ignore[arg-type]
        clip_low=None if smooth else low,
        clip_high=None if smooth else high,
        clip_c=None if smooth else dual,
        aggregation=aggregation,
        kl_coef=coefficient,
        kl_estimator=kind,
        kl_place=place,
        advantage=found.name,
        advantage_scale=found.scale[0],
        gamma=gamma,
        lam=trace if has_critic else None,
        old_policy=policy,
        reward_scale=_read_scale(run, command, found, gamma),
        objective=Objective(
            loss_type="sapo" if smooth else "dapo",
            level="sequence" if level == "sequence" else None,
            clip=None if smooth else (low, high),
            clip_c=None if smooth else dual,
            epsilon=found.epsilon,
            whiten=found.whiten,
            kl_clamp=True if coefficient else None,
            correction=correction,
        ),
        rewarding=Rewards(overlong=_read_overlong(command)),
        keys={
            **shared.keys,
            f"{RL}.scale_rewards": found.scale[1],
            f"{RL}.tau_pos": command.number("actor.sapo_tau_pos", 1.0) if smooth else None,
            f"{RL}.tau_neg": command.number("actor.sapo_tau_neg", 1.05) if smooth else None,
            **_read_ref(run, command, shared, coefficient, shares=shares),
        },
        notes={**shared.notes, "adv_estimator": f"reward_norm: {norms[0] or 'off'}; adv_norm: {norms[1] or 'off'}"},
    )


def _read_ref(
    run: Import, command: SourceCommand, shared: Recipe, coefficient: float, *, shares: bool
) -> dict[str, object]:
    """Return the key of a reference that is not the model at the start."""
    path, key = command.text("ref.path"), f"{RL}.integrated_mode_config.ref_model_load_path" if shares else "ref_config.load"
    is_other = bool(coefficient) and path not in ("", shared.model)
    run.note_given("ref.path", key if is_other else "the weights at the start", changes_nothing=False)
    return {key: path} if is_other else {}


def _read_policy(command: SourceCommand, *, decoupled: bool, recomputes: bool) -> str:
    """Return what the old log-probs are of."""
    method = command.text("actor.prox_logp_method", "recompute")
    if method not in _PROXIMAL:
        raise ConfigError([f"actor.prox_logp_method={method}: not available here; {', '.join(_PROXIMAL)} are"])
    return _PROXIMAL[method] if decoupled else "actor" if recomputes else RECORDED_POLICY


def _read_correction(run: Import, command: SourceCommand) -> Correction | None:
    """Return the correction of the engine's log-probs; what a mask leaves out counts in the mean, here too."""
    if not any(name.startswith(_CORRECTION) for name in command.options):
        return None
    level, action, metric, agg = (
        command.text(f"{_CORRECTION}{name}", default)
        for name, default in (("level", "token"), ("action", "mask"), ("metric", "ratio"), ("agg", "mean"))
    )
    if (level, action) not in _CORRECTIONS or metric != "ratio" or (level == "sequence" and agg != "mean"):
        run.refuse(f"{_CORRECTION}metric", f"{action} by {agg} of {metric} of a {level}; ratios of tokens, or their mean of a "
                                           "sequence, are available")  # fmt: skip
        return None
    high, low = command.number(f"{_CORRECTION}upper", 5.0), command.maybe(f"{_CORRECTION}lower")
    mode = _CORRECTIONS[level, action]
    return Correction(mode, high, floor=low or 0.0) if action == "clamp" else Correction(mode, high, low)


def _read_overlong(command: SourceCommand) -> Overlong | None:
    if not command.flag("actor.overlong_reward_penalty"):
        return None
    buffer = command.count("actor.overlong_tokens", 1)
    factor = command.number("actor.overlong_penalty_factor", 1.0) * command.number("actor.reward_scaling", 1.0)
    return Overlong(buffer, factor, command.count("gconfig.max_new_tokens", 16384))


def _read_scale(run: Import, command: SourceCommand, found: _Estimate, gamma: float | None) -> str | None:
    """Return what is done to scores besides their weight; a number that is added cancels where their mean is subtracted."""
    bias, scaling = command.number("actor.reward_bias", 0.0), command.number("actor.reward_scaling", 1.0)
    penalty = command.number("actor.overlong_penalty_factor", 1.0) if command.flag("actor.overlong_reward_penalty") else 0.0
    largest, limit = (_LARGEST_SCORE + penalty + abs(bias)) * abs(scaling), command.number("actor.reward_clip", 20.0)
    cancels = found.centres or (found.name == "reinforce_plus_plus" and bool(found.whiten) and gamma == 1)
    run.note_given("actor.reward_bias", "it cancels, as the mean is subtracted" if cancels else "see reward_scale of the plan",
                   changes_nothing=False)  # fmt: skip
    run.note_given("actor.reward_clip", f"nothing beyond {largest:g} for scores between -1 and 1", changes_nothing=False)
    parts = [f"scores that are clipped at {limit:g} after their scale"] if largest > limit else []
    parts += [f"scores with {bias:g} added"] if bias and not cancels else []
    parts += ["the value of its last token is added to the longest response of a batch"] if found.name == "gae" else []
    return "; ".join(parts) or None


def describe_critic(run: Import, command: SourceCommand, recipe: Recipe) -> Recipe:
    """Return the run with its critic, where it has one."""
    if recipe.advantage != "gae":
        return recipe
    steps = recipe.steps_per_rollout
    if command.count("critic.ppo_n_minibatches", 4) != steps:
        run.refuse("critic.ppo_n_minibatches", f"other minibatches than the {steps} of the actor")
    run.note_given("critic.ppo_n_minibatches", "as many as the actor's", changes_nothing=False)
    batch = command.count("train_dataset.batch_size", 1)
    iterations = run.settings.rows // batch * command.count("total_train_epochs", 1)
    limited = command.maybe("total_train_steps") is not None
    rate, _ = read_rate(command, "critic.", iterations, steps, limited=limited, group="critic_config")
    load = command.text("critic.path")
    if not load:
        raise ConfigError(["critic.path is missing"])
    clip = command.number("critic.eps_clip", 0.5)
    return replace(
        recipe,
        stage="ray_ppo",
        value_clip=clip,
        critic_lr=rate.peak,
        rates=(*recipe.rates, rate),
        keys={
            **recipe.keys,
            "critic_config.load": load,
            "critic_config.micro_batch_size": 1,
            f"{RL}.cliprange_value": clip,
        },
    )
