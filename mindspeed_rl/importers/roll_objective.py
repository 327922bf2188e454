"""The objective of a rollout of ROLL by its formulas: ratio, estimator, masks, KL, critic and teachers."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from mindspeed_rl.config.errors import ConfigError
from mindspeed_rl.importers.options import SourceCommand
from mindspeed_rl.importers.recipe import ACTOR, RL, Objective, Rate, Recipe
from mindspeed_rl.importers.result import Import
from mindspeed_rl.importers.roll_options import CRITIC, CRITIC_NAMES, TRAIN
from mindspeed_rl.importers.source_plan import Schedule

#: average of the loss there -> the plan's, and the loss here
_AVERAGES = {
    "token-mean": ("token", "dapo"),
    "seq-mean-token-mean": ("sequence", "grpo"),
    "seq-mean-token-sum": ("summed", "luspo"),
}
_STYLES = {"constant": "constant", "constant_with_warmup": "constant", "linear": "linear", "cosine": "cosine"}
_WORKERS = ("roll.pipeline.rlvr.actor_worker.ActorWorker", "roll.pipeline.rlvr.actor_pg_worker.ActorPGWorker")
#: scores of a rule are between -1 and 1
_LARGEST_SCORE = 1.0
#: worker that the default of its variant makes a plain policy gradient
_VARIANTS = _WORKERS[1]


def read_rate(
    command: SourceCommand, role: str, total: int, *, decay: int | None = None, group: str = ACTOR
) -> tuple[Rate, Schedule]:
    """Return the learning rate of a role, which moves at each optimizer step.

    Args:
        total: optimizer steps of the run.
        decay: steps until the floor; None for the steps of the run.
    """
    prefix, length = f"{role}training_args.", total if decay is None else decay
    peak, name = command.number(f"{prefix}learning_rate", 5e-5), command.text(f"{prefix}lr_scheduler_type", "linear")
    if name not in _STYLES:
        raise ConfigError([f"{prefix}lr_scheduler_type={name}: not available here; {', '.join(_STYLES)} are"])
    warmup = int(command.number(f"{prefix}warmup_steps", 0))
    warmup = warmup or math.ceil(command.number(f"{prefix}warmup_ratio", 0.0) * length)
    # the plain constant of transformers has no warm-up; Megatron's scheduler in ROLL has one for every style
    if name == "constant" and command.text(f"{role}strategy_args.strategy_name", "fsdp2_train") != "megatron_train":
        warmup = 0
    rate = Rate(
        group=group,
        peak=peak,
        style=_STYLES[name],
        floor=0.0 if _STYLES[name] != "constant" else None,
        # half a step more, as the fraction is cut to whole steps
        warmup_share=(warmup + 0.5) / length if warmup else None,
        clip_grad=command.number("max_grad_norm", 1.0),
        weight_decay=command.number(f"{prefix}weight_decay", 0.0),
    )
    return rate, Schedule(peak, _STYLES[name], length, warmup, 0.0, 0.0)


@dataclass(frozen=True)
class _Estimate:
    """An estimator here, and what differs.

    Attributes:
        scale: divisor of the group.
        largest: absolute advantage that nothing exceeds.
        whitens: advantages are whitened over tokens.
        whiten: key of the estimator.
    """

    name: str
    largest: float
    scale: str | None = None
    whitens: bool = False
    whiten: bool | None = None


def _estimate(command: SourceCommand, group: int) -> _Estimate:
    """Return the estimator for a pair of norms of the rewards.

    Raises:
        ConfigError: there is none.
    """
    name, whitens = command.text("adv_estimator", "gae"), command.flag("whiten_advantages")
    norms = ("group", "group") if name == "grpo" else tuple(command.get(f"norm_{kind}_type") for kind in ("mean", "std"))
    if name in ("grpo", "reinforce") and norms == ("group", "group") and group > 1:
        return _Estimate("group_norm_whitened" if whitens else "group_norm",
                         math.inf if whitens else (group - 1) / math.sqrt(group), "group", whitens)  # fmt: skip
    # whitening leaves no trace of a mean and a divisor that all rewards of a batch share
    shares = norms == (None, None) or (whitens and not {*norms} - {None, "batch", "running"})
    if name == "reinforce" and shares:
        return _Estimate("reinforce_plus_plus", math.inf if whitens else _LARGEST_SCORE, None, whitens, whitens)
    if name == "gae" and norms == (None, None):
        return _Estimate("gae", math.inf, None, whitens, whitens)
    text = f"adv_estimator={name} with norm_mean_type={norms[0]}, norm_std_type={norms[1]} and whiten_advantages={whitens}"
    listed = "grpo (or reinforce with group norms) of groups, and reinforce or gae without norms (with them only whitened)"
    raise ConfigError([f"{text}: not available here; available are {listed}"])


def describe_objective(run: Import, command: SourceCommand, shared: Recipe, group: int, domains: int) -> Recipe:
    """Return the run with loss, estimator, masks and KL.

    Args:
        domains: domains of prompts; ROLL estimates advantages for each by itself.
    """
    average = command.text("loss_agg_mode", "seq-mean-token-mean")
    if average not in _AVERAGES:
        raise ConfigError([f"loss_agg_mode={average}: not available here; {', '.join(_AVERAGES)} are"])
    aggregation, loss = _AVERAGES[average]
    groups = _read_difficulty(run, command, group)
    masks = command.flag("max_len_mask") or groups is not None
    if masks and aggregation != "token":
        # here a response that is left out still counts in the number of responses
        aggregation = f"{aggregation}, over the responses that train"
    found = _estimate(command, group)
    of_domain = "of a domain" if domains > 1 else ""
    of_trained = "of responses that train" if masks else ""
    over = " ".join(text for text in (of_domain, of_trained) if text)
    coefficient, estimator, place = _read_kl(command, found)
    clip, dual = _read_clip(command)
    by_sequence = command.text("importance_sampling", "token") == "seq"
    gamma, discounts = command.number("gamma", 1.0), found.name in ("reinforce_plus_plus", "gae")
    if gamma != 1 and not discounts:
        run.refuse("gamma", "rewards that are discounted over tokens after their norm")
    run.note_given("whiten_advantages", f"see {found.name}", changes_nothing=False)
    _check_worker(run, command)
    recipe = replace(
        shared,
        stage="ray_ppo" if found.name == "gae" else shared.stage,
        level="sequence" if by_sequence else "token",
        clip_low=clip[0],
        clip_high=clip[1],
        clip_c=dual,
        aggregation=aggregation,
        kl_coef=coefficient,
        kl_estimator=estimator,
        kl_place=place,
        advantage=found.name,
        advantage_scale=found.scale,
        gamma=gamma if discounts else None,
        lam=command.number("lambd", 0.95) if found.name == "gae" else None,
        entropy_coef=command.number("entropy_loss_coef", 0.0),
        trained_groups=groups,
        whitened_over=f"the tokens {over}" if found.whitens and over else None,
        advantage_bound=_read_bounds(run, command, found, group),
        objective=Objective(
            loss_type=loss,
            level="sequence" if by_sequence else None,
            clip=clip,
            clip_c=dual,
            epsilon=1e-6 if found.scale else None,
            whiten=found.whiten,
        ),
    )
    return _describe_critic(run, command, _describe_teacher(run, command, recipe, found))


def _read_clip(command: SourceCommand) -> tuple[tuple[float, float], float | None]:
    """Return the bounds of the ratio, and the dual one."""
    ranged, clip = command.flag("use_pg_clip_range"), command.number("pg_clip", 0.2)
    low, high = (command.number(f"pg_clip_{side}", 0.2) if ranged else clip for side in ("low", "high"))
    return (low, high), 1 + 2 * clip if command.flag("dual_clip_loss") else None


def _check_worker(run: Import, command: SourceCommand) -> None:
    """Refuse another loss than the clipped one."""
    worker = command.text(f"{TRAIN}worker_cls", _WORKERS[0])
    if worker not in _WORKERS:
        run.refuse(f"{TRAIN}worker_cls", f"{worker}; the clipped loss of {' and '.join(_WORKERS)} is")
    elif worker == _VARIANTS and command.get(f"{TRAIN}pg_variant") != "ppo":
        run.refuse(f"{TRAIN}worker_cls", f"its variant without a name; {TRAIN}pg_variant: ppo is the clipped loss")
    run.note_given(f"{TRAIN}worker_cls", "the clipped loss", changes_nothing=False)


def _read_difficulty(run: Import, command: SourceCommand, group: int) -> str | None:
    """Return which groups train, where it is not all."""
    low, high = (command.number(f"difficulty_{side}_threshold", value) for side, value in (("low", 0.0), ("high", 1.0)))
    masks = command.flag("difficulty_mask") and group > 1
    note = "see trained_groups" if masks else "groups of all scores train"
    run.note_given("difficulty_mask difficulty_low_threshold difficulty_high_threshold", note, changes_nothing=not masks)
    return f"with a mean score between {low:g} and {high:g}" if masks else None


def _read_bounds(run: Import, command: SourceCommand, found: _Estimate, group: int) -> str | None:
    """Return the bound of advantages, where one is reached; note those that nothing reaches."""
    bound = command.maybe("reward_clip")
    largest = (group - 1) / math.sqrt(group) if found.scale else _LARGEST_SCORE
    if bound is not None and bound < largest:
        run.refuse("reward_clip", f"values that are clipped at {bound:g}")
    reached = f"nothing beyond {largest:.2f}" if found.scale else "no score of a rule"
    run.note_given("reward_clip", f"{reached} reaches it", changes_nothing=False)
    bound = command.maybe("advantage_clip")
    is_reached = bound is not None and bound < found.largest
    note = "see advantage_bound" if is_reached else f"nothing beyond {found.largest:.2f} reaches it"
    run.note_given("advantage_clip", note, changes_nothing=False)
    return f"{bound:g}" if is_reached else None


def _read_kl(command: SourceCommand, found: _Estimate) -> tuple[float, str | None, str | None]:
    """Return coefficient, estimator and place of the KL: k3 in the loss, or another one in the rewards.

    Raises:
        ConfigError: it has two places, or rewards are normalized before it.
    """
    in_loss, in_reward = command.flag("use_kl_loss"), command.flag("add_token_level_kl")
    if in_loss and in_reward:
        raise ConfigError(["use_kl_loss and add_token_level_kl are both true, but the KL has one place here"])
    if in_loss and (coefficient := command.number("kl_loss_coef", 0.0)):
        return coefficient, "low_var_kl", "loss"
    if in_reward and (coefficient := command.number("init_kl_coef", 0.2)):
        kind = command.text("kl_penalty", "kl")
        if kind not in ("kl", "abs", "mse"):
            raise ConfigError([f"kl_penalty={kind}: not available here; kl, abs and mse are"])
        if found.scale or any(command.get(f"norm_{part}_type") for part in ("mean", "std")):
            raise ConfigError(["add_token_level_kl: not available here: a KL in rewards that are normalized before it"])
        return coefficient, kind, "reward"
    return 0.0, None, None


def _describe_teacher(run: Import, command: SourceCommand, recipe: Recipe, found: _Estimate) -> Recipe:
    """Return the run with a teacher: coef * (its log-prob - the student's) is the advantage, or added to it."""
    only, added = command.flag("is_pure_opd"), command.flag("use_opd")
    teachers = [name for name in command.options if name.startswith("teacher.")]
    if not only and not added:
        run.note_given("is_pure_opd use_opd", "there is no teacher", changes_nothing=False)
        run.note_given(" ".join(teachers), "no pipeline of distillation reads it")
        return recipe
    model = command.text("teacher.model_args.model_name_or_path")
    if not model:
        raise ConfigError(["teacher: not available here: several teachers by the tag of a row; one teacher with a model is"])
    if command.list_texts("teacher.tag_included"):
        run.refuse("teacher.tag_included", "a teacher of the rows with some tags")
    if command.text("kl_penalty", "kl") != "kl":
        run.refuse("kl_penalty", f"the divergence {command.text('kl_penalty')} from a teacher; kl is")
    if found.whitens or recipe.advantage_bound:
        option = "whiten_advantages" if found.whitens else "advantage_clip"
        run.refuse(option, "advantages with a teacher that are whitened or cut")
    if recipe.kl_place == "reward":
        run.refuse("add_token_level_kl", "a KL in the rewards next to a teacher")
    values: dict[str, object] = {
        "enabled": True,
        "teacher_models": [model],
        "loss_mode": "k1",
        "use_policy_gradient": True,
        "use_task_rewards": not only,
        "distillation_loss_coef": command.number("teacher.opd_kl_coef", 1.0) if added else None,
    }
    scale = command.number("teacher.opd_kl_coef", 1.0)
    if only and scale != 1:
        run.refuse("teacher.opd_kl_coef", "another weight than 1 of a teacher that is the only objective")
    note = "distillation; the student's log-probs are the trainer's, in ROLL the engine's where a rollout is one step"
    run.note_given("is_pure_opd use_opd", note, changes_nothing=False)
    run.note_given(" ".join(teachers), "distillation.teacher_models, in the layout of the reference", changes_nothing=False)
    keys = {f"{RL}.distillation.{name}": value for name, value in values.items()}
    return replace(recipe, keys={**recipe.keys, **keys})


def _describe_critic(run: Import, command: SourceCommand, recipe: Recipe) -> Recipe:
    """Return the run with its critic, where it has one."""
    if recipe.advantage != "gae":
        return recipe
    names = [f"training_args.{name}" for name in ("per_device_train_batch_size", "gradient_accumulation_steps")]
    sizes = [[command.count(role + name, default) for name, default in zip(names, (8, 1))] for role in (CRITIC, TRAIN)]
    if sizes[0] != sizes[1] or command.count("ppo_epochs", 1) != 1:
        run.refuse(f"{CRITIC}{names[0]}", "other optimizer steps of the critic than of the actor")
    load = command.text(f"{CRITIC}model_args.model_name_or_path") or command.text("reward_pretrain")
    if not load:
        raise ConfigError(["the file names no critic: reward_pretrain is missing"])
    rate, _ = read_rate(command, CRITIC, recipe.total_steps, group="critic_config")
    clip = command.maybe("value_clip")
    if clip is None:
        run.refuse("value_clip", "values of a critic that are not clipped; write a number, such as 0.5")
    warmup = int(command.number("critic_warmup", 0))
    run.note_given(" ".join(CRITIC + name for name in CRITIC_NAMES), "critic_config", changes_nothing=False)
    return replace(
        recipe,
        value_clip=clip,
        value_average="sequence, of a micro-batch",
        critic_lr=rate.peak,
        rates=(*recipe.rates, rate),
        keys={
            **recipe.keys,
            "critic_config.load": load,
            f"{RL}.cliprange_value": clip,
            f"{RL}.critic_warmup": warmup or None,
        },
    )
