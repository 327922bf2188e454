"""Rules between keys of a run file about rewards, losses and keys with the same meaning."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from mindspeed_rl.catalogue import CRITIC_ESTIMATOR, KL_WITH_GRADIENT, KL_WITHOUT_GRADIENT, POLICY_LOSSES, SETTINGS
from mindspeed_rl.catalogue.objective import ROLE_TEACHERS, Objective
from mindspeed_rl.catalogue.records import Bounds
from mindspeed_rl.config.keys.rl import RLConfig
from mindspeed_rl.run.record import Run
from mindspeed_rl.run.rules.violation import Violation, violate_range


def _rewards(run: Run) -> Iterator[Violation]:
    cfg = run.config
    rl = cfg.rl_config
    if rl is None or cfg.is_supervised:
        return
    # reward_funcs and its weights were copied to verifier_*; sentences name the key that the file has
    functions, weights = (
        ("reward_funcs", "reward_weights") if rl.reward_funcs is not None else ("verifier_function", "verifier_weight")
    )
    if rl.rule_reward and len(rl.verifier_function) != len(rl.verifier_weight):
        count = len(rl.verifier_function)
        yield Violation(
            "one_weight_each",
            {f"rl_config.{functions}": rl.verifier_function, f"rl_config.{weights}": rl.verifier_weight},
            f"rl_config.{functions} ({count} entries: {', '.join(rl.verifier_function)}) and rl_config.{weights} "
            f"({len(rl.verifier_weight)} entries) must have the same length",
            ({f"rl_config.{weights}": (rl.verifier_weight + [1.0] * count)[:count]},),
        )
    scored_by_turns = rl.trajectory_reward != "none" and rl.agent_loop_name not in ("single_turn", "scheduler")
    scored_by_rules = rl.rule_reward and rl.verifier_function or scored_by_turns
    needs_no_score = rl.distillation.enabled and not rl.distillation.use_task_rewards
    scored_by_models = cfg.reward_config is not None or rl.reward_model or rl.judge_url or rl.served_judge
    if not (needs_no_score or scored_by_rules or scored_by_models):
        yield Violation(
            "some_reward",
            {"rl_config.rule_reward": rl.rule_reward, "rl_config.reward_model": None, "reward_config": None},
            "nothing scores the responses: rl_config.rule_reward is false and there is no reward_config, "
            "reward_model, judge_url or judge_model",
            ({"rl_config.rule_reward": True},),
        )
    if rl.overlong_buffer_enable and cfg.generate_config is not None:
        limit, key = cfg.response_limit, cfg.response_limit_key
        if rl.rollout_max_tokens != limit:
            yield Violation(
                "overlong_limit",
                {"rl_config.rollout_max_tokens": rl.rollout_max_tokens, key: limit},
                f"rl_config.rollout_max_tokens ({rl.rollout_max_tokens}) must equal {key} ({limit}) "
                f"while overlong_buffer_enable is true",
                ({"rl_config.rollout_max_tokens": limit},),
            )
        if not 0 < rl.overlong_buffer < limit:
            yield Violation(
                "overlong_buffer",
                {"rl_config.overlong_buffer": rl.overlong_buffer, key: limit},
                f"rl_config.overlong_buffer ({rl.overlong_buffer}) must be between 1 and {key} - 1 ({limit - 1})",
                ({"rl_config.overlong_buffer": min(max(rl.overlong_buffer, 1), limit - 1)},),
            )
    if rl.filter_groups_enable and rl.filter_groups_metric not in rl.verifier_function:
        yield Violation(
            "filter_metric",
            {"rl_config.filter_groups_metric": rl.filter_groups_metric, "rl_config.verifier_function": rl.verifier_function},
            f"rl_config.filter_groups_metric ({rl.filter_groups_metric}) must be one of rl_config.{functions} "
            f"({', '.join(rl.verifier_function)})",
            (*({"rl_config.filter_groups_metric": name} for name in rl.verifier_function[:1]),),
        )
    yield from _prompt_sampling(run, rl)
    if rl.filter_groups_enable:
        yield from _fillable_groups(run, rl)
    if rl.filter_groups_enable and rl.dynamic_sample:
        yield Violation(
            "one_filter",
            {"rl_config.filter_groups_enable": True, "rl_config.dynamic_sample": True},
            "rl_config.filter_groups_enable and rl_config.dynamic_sample replace groups in two ways; set only one of them",
            ({"rl_config.dynamic_sample": False}, {"rl_config.filter_groups_enable": False}),
        )
    if "soft_overlong" in rl.verifier_function and rl.soft_cache_length is None:
        yield Violation(
            "soft_cache_length",
            {"rl_config.verifier_function": rl.verifier_function, "rl_config.soft_cache_length": None},
            "rl_config.soft_cache_length is not set, but the reward function soft_overlong needs it",
        )


def _prompt_sampling(run: Run, rl: RLConfig) -> Iterator[Violation]:
    """Check the keys of the order of prompts."""
    counts = len(rl.prompt_sources), len(rl.prompt_source_weights)
    if counts[0] != counts[1] or len(set(rl.prompt_sources)) != counts[0]:
        yield Violation(
            "prompt_sources",
            {"rl_config.prompt_sources": rl.prompt_sources, "rl_config.prompt_source_weights": rl.prompt_source_weights},
            f"rl_config.prompt_source_weights has {counts[1]} weights for {counts[0]} sources; each of "
            "rl_config.prompt_sources is named once and has one",
            ({"rl_config.prompt_source_weights": [1.0] * counts[0]},),
        )
    low, high = rl.prompt_skip_below, rl.prompt_skip_above
    if low is not None and high is not None and low >= high:
        yield Violation(
            "prompt_skips",
            {"rl_config.prompt_skip_below": low, "rl_config.prompt_skip_above": high},
            f"rl_config.prompt_skip_below ({low:g}) must be less than rl_config.prompt_skip_above ({high:g}): no prompt "
            "would train",
            ({"rl_config.prompt_skip_below": None},),
        )
    names = ("prompt_replay_fraction", "prompt_skip_above", "prompt_skip_below")
    reads = [name for name in names if getattr(rl, name) is not None]
    term = None if run.objective is None else run.objective.distillation
    if reads and term is not None and not term.use_task_rewards:
        yield Violation(
            "prompt_rewards",
            {f"rl_config.{reads[0]}": getattr(rl, reads[0]), f"{_DISTILLATION}.use_task_rewards": False},
            f"rl_config.{reads[0]} reads rewards, which do not train: {_DISTILLATION}.use_task_rewards is false",
            ({f"rl_config.{reads[0]}": None},),
        )


def _fillable_groups(run: Run, rl: RLConfig) -> Iterator[Violation]:
    """Check that a filter of groups can accept as many as an iteration trains on."""
    size, batches, sizes = rl.filter_groups_train_batch_size, rl.filter_groups_max_batches, run.sizes
    if rl.n_samples_per_prompt == 1:
        yield Violation(
            "filter_group_of_one",
            {"rl_config.filter_groups_enable": True, "rl_config.n_samples_per_prompt": 1},
            "rl_config.filter_groups_enable accepts groups whose metric varies, and with rl_config.n_samples_per_prompt (1) "
            "none does",
            ({"rl_config.n_samples_per_prompt": 2}, {"rl_config.filter_groups_enable": False}),
        )
    if not rl.rule_reward:
        yield Violation(
            "filter_without_functions",
            {"rl_config.filter_groups_enable": True, "rl_config.rule_reward": False},
            f"rl_config.filter_groups_enable reads the reward function {rl.filter_groups_metric}, which does not run: "
            "rl_config.rule_reward is false",
            ({"rl_config.rule_reward": True}, {"rl_config.filter_groups_enable": False}),
        )
    if sizes is None or not sizes.can_divide or batches < 1 or size <= (most := sizes.rollout_prompts * batches):
        return
    needed = math.ceil(size / sizes.rollout_prompts)
    yield Violation(
        "filter_fills",
        {"rl_config.filter_groups_train_batch_size": size, "rl_config.filter_groups_max_batches": batches},
        f"rl_config.filter_groups_train_batch_size ({size}) is more than the {most} prompts of filter_groups_max_batches "
        f"({batches}) rollouts: the batch never fills",
        ({"rl_config.filter_groups_max_batches": needed}, {"rl_config.filter_groups_train_batch_size": int(most)}),
    )


def _algorithms(run: Run) -> Iterator[Violation]:
    cfg = run.config
    rl, objective = cfg.rl_config, run.objective
    if rl is None or objective is None:
        return
    yield from algorithm_violations(rl, objective)
    if cfg.stage == "ray_ppo" and not objective.has_critic:
        yield Violation(
            "ppo_critic",
            {"megatron_training.stage": cfg.stage, "rl_config.adv_estimator": rl.adv_estimator},
            f"megatron_training.stage ray_ppo trains a critic, and rl_config.adv_estimator {rl.adv_estimator} has none",
            ({"rl_config.adv_estimator": CRITIC_ESTIMATOR}, {"megatron_training.stage": "ray_grpo"}),
        )
    if objective.loss.compares_group:
        yield from _whole_groups(run, rl, objective)
    n, least = rl.n_samples_per_prompt, objective.min_group_size
    # with num_generations the batch rules report it, below 1 the range of the key
    if rl.num_generations is None and 0 < n < least:
        yield Violation(
            "group_of_two",
            {"rl_config.n_samples_per_prompt": n, "rl_config.adv_estimator": rl.adv_estimator},
            f"rl_config.n_samples_per_prompt ({n}) must be at least {least} for adv_estimator {objective.adv_estimator}: "
            "it compares the responses of a prompt",
            ({"rl_config.n_samples_per_prompt": least},),
        )


def _whole_groups(run: Run, rl: RLConfig, objective: Objective) -> Iterator[Violation]:
    """Check that the responses of a prompt can share a micro-batch."""
    n, sizes, loss = objective.group_size, run.sizes, f"rl_config.loss_type {objective.loss_type}"
    if n < 2:
        yield Violation(
            "loss_of_groups",
            {"rl_config.loss_type": objective.loss_type, "rl_config.n_samples_per_prompt": n},
            f"{loss} compares the responses of a prompt: rl_config.n_samples_per_prompt ({n}) must be at least 2",
            ({"rl_config.n_samples_per_prompt": 2},),
        )
        return
    if rl.use_prefix_grouper and rl.use_dynamic_bsz:
        yield Violation(
            "groups_or_prefixes",
            {f"rl_config.{name}": getattr(rl, name) for name in ("loss_type", "use_prefix_grouper", "use_dynamic_bsz")},
            f"{loss} needs all responses of a prompt in one micro-batch, and rl_config.use_prefix_grouper with use_dynamic_bsz "
            "divides them by tokens",
            ({"rl_config.use_prefix_grouper": False},),
        )
    if sizes is None or not sizes.can_divide:
        return
    micro = sizes.micro_batch_size
    if micro % n and not rl.use_dynamic_bsz:
        yield Violation(
            "groups_in_micro_batches",
            {"actor_config.micro_batch_size": micro, "rl_config.n_samples_per_prompt": n},
            f"{loss} needs all {n} responses of a prompt in one micro-batch: actor_config.micro_batch_size ({micro}) must be a "
            f"multiple of {n}",
            ({"actor_config.micro_batch_size": math.ceil(micro / n) * n},),
        )
    rows = sizes.step_samples / sizes.actor.dp_size
    if rows % n:
        yield Violation(
            "groups_on_replicas",
            {"rl_config.mini_batch_size": rl.mini_batch_size, "rl_config.n_samples_per_prompt": n},
            f"{loss} needs all {n} responses of a prompt on one replica: an optimizer step has {sizes.step_samples} responses "
            f"on {sizes.actor.dp_size} replicas",
        )


def algorithm_violations(rl: RLConfig, objective: Objective) -> Iterator[Violation]:
    """Yield the broken rules between the keys of losses, estimators and corrections, whatever the size of a group."""
    for name, bounds in SETTINGS.items():
        value = getattr(rl, name)
        if value is not None and not bounds.contain(value):
            yield violate_range(f"rl_config.{name}", value, bounds)
    yield from _loss_violations(rl, objective)
    if objective.loss.may_read("clip_cov_lb") and objective.loss.reads is not None and rl.clip_cov_lb >= rl.clip_cov_ub:
        yield Violation(
            "covariance_bounds",
            {"rl_config.clip_cov_lb": rl.clip_cov_lb, "rl_config.clip_cov_ub": rl.clip_cov_ub},
            f"rl_config.clip_cov_lb ({rl.clip_cov_lb:g}) must be below rl_config.clip_cov_ub ({rl.clip_cov_ub:g}): no token is "
            "between them",
            ({"rl_config.clip_cov_ub": rl.clip_cov_lb + 4},),
        )
    if rl.use_kl_in_reward and not objective.advantage.kl_in_reward:
        yield Violation(
            "gdpo_kl",
            {"rl_config.use_kl_in_reward": True, "rl_config.adv_estimator": rl.adv_estimator},
            f"rl_config.use_kl_in_reward has no place with {objective.adv_estimator}, which does not read the total reward",
            ({"rl_config.use_kl_in_reward": False},),
        )
    low, high = rl.rollout_importance_sampling_threshold_min, rl.rollout_importance_sampling_threshold
    if low is not None and low > high:
        yield Violation(
            "correction_bounds",
            {
                "rl_config.rollout_importance_sampling_threshold_min": low,
                "rl_config.rollout_importance_sampling_threshold": high,
            },
            f"rl_config.rollout_importance_sampling_threshold_min ({low:g}) must be at most "
            "rollout_importance_sampling_threshold "
            f"({high:g})",
            ({"rl_config.rollout_importance_sampling_threshold_min": high},),
        )
    correction, mode = objective.correction, objective.rollout_importance_sampling_mode
    if low is not None and correction and not correction.may_read("rollout_importance_sampling_threshold_min"):
        yield Violation(
            "correction_lower_bound",
            {"rl_config.rollout_importance_sampling_threshold_min": low, "rl_config.rollout_importance_sampling_mode": mode},
            f"rl_config.rollout_importance_sampling_threshold_min ({low:g}) bounds the masking modes only; "
            f"it has no effect with {mode}",
            ({"rl_config.rollout_importance_sampling_threshold_min": None},),
        )


def _loss_violations(rl: RLConfig, objective: Objective) -> Iterator[Violation]:
    loss, loss_type = objective.loss, objective.loss_type
    if objective.normalizer == "constant" and objective.max_response_length is None:
        yield Violation(
            "constant_length",
            {"rl_config.loss_type": loss_type, "generate_config.sampling_config.max_tokens": None},
            f"rl_config.loss_type {loss_type} divides by max_response_length (generate_config.sampling_config.max_tokens), "
            "which is not set",
        )
    # for losses that read both: for one that takes clip_ratio_high as a cap the order means nothing
    if rl.clip_higher_enable and rl.clip_ratio_low > rl.clip_ratio_high and loss.may_read("clip_ratio_low"):
        yield Violation(
            "clip_order",
            {"rl_config.clip_ratio_low": rl.clip_ratio_low, "rl_config.clip_ratio_high": rl.clip_ratio_high},
            f"rl_config.clip_ratio_low ({rl.clip_ratio_low:g}) must be at most rl_config.clip_ratio_high "
            f"({rl.clip_ratio_high:g})",
            ({"rl_config.clip_ratio_low": rl.clip_ratio_high}, {"rl_config.clip_ratio_high": rl.clip_ratio_low}),
        )
    for name, bounds in loss.bounds.items():
        if not bounds.contain(getattr(objective, name)):
            yield _out_of_loss_bounds(rl, loss_type, name, bounds)
    if rl.clip_ratio_c is not None and rl.delta is not None:
        yield Violation(
            "one_negative_bound",
            {"rl_config.clip_ratio_c": rl.clip_ratio_c, "rl_config.delta": rl.delta},
            f"rl_config.clip_ratio_c ({rl.clip_ratio_c:g}) and rl_config.delta ({rl.delta:g}) bound the same "
            "branch; set only one",
            ({"rl_config.clip_ratio_c": None}, {"rl_config.delta": None}),
        )
    upper = 1 + objective.clip_ratio_high
    if rl.delta is not None and loss.may_read("delta") and rl.delta < upper:
        yield Violation(
            "two_sided_clip",
            {"rl_config.delta": rl.delta},
            f"rl_config.delta ({rl.delta:g}) must be at least 1 + the upper clip ratio ({upper:g}): "
            "below it the bound cuts ratios that the clip leaves alone",
            ({"rl_config.delta": math.ceil(upper * 1e6) / 1e6},),  # rounded down it would still be below
        )
    for name in ("clip_ratio_c", "delta"):
        value = getattr(rl, name)
        if value is not None and not loss.may_read(name):
            yield Violation(
                "bound_without_clip",
                {f"rl_config.{name}": value, "rl_config.loss_type": loss_type},
                f"rl_config.{name} ({value:g}) has no effect with loss_type {loss_type}, which does not clip this way",
                ({f"rl_config.{name}": None},),
            )
    if objective.level not in loss.levels:
        yield Violation(
            "gspo_level",
            {"rl_config.loss_type": loss_type, "rl_config.importance_sampling_level": objective.level},
            f"rl_config.importance_sampling_level {objective.level} contradicts loss_type {loss_type}, "
            f"whose ratio is that of the {loss.level}",
            (
                {"rl_config.importance_sampling_level": loss.level},
                # the loss that takes another level and is otherwise the same
                *(
                    {"rl_config.loss_type": name}
                    for name, other in POLICY_LOSSES.items()
                    if loss.levels != other.levels and replace(loss, level=other.level, levels=other.levels) == other
                ),
            ),
        )


def _out_of_loss_bounds(rl: RLConfig, loss_type: str, name: str, bounds: Bounds) -> Violation:
    """Return the violation of a bound that one loss sets; clip_ratio_high is read only with clip_higher_enable."""
    value = getattr(rl, name)
    keys = {"rl_config.loss_type": loss_type, f"rl_config.{name}": value}
    suggested: dict[str, object] = {f"rl_config.{name}": value if bounds.contain(value) else bounds.default}
    condition = ""
    if name in ("clip_ratio_low", "clip_ratio_high"):
        keys["rl_config.clip_higher_enable"] = rl.clip_higher_enable
        suggested["rl_config.clip_higher_enable"] = True
        condition = f"needs clip_higher_enable (is {str(rl.clip_higher_enable).lower()}) and "
    return Violation(
        bounds.rule,
        keys,
        f"rl_config.loss_type {loss_type} {condition}takes {name} ({value:g}) as {bounds.meaning}, which must be {bounds}",
        # bounds without a default propose none
        (
            *([] if None in suggested.values() else [suggested]),
            *([{f"rl_config.{key}": other for key, other in bounds.otherwise.items()}] if bounds.otherwise else []),
        ),
    )


def _second_names(run: Run) -> Iterator[Violation]:
    """Check that two keys with the same meaning have the same value."""
    cfg = run.config
    rl = cfg.rl_config
    if rl is None or cfg.is_supervised:
        return
    set_rl = cfg.set_keys.get("rl_config", frozenset())
    # the values as written: second spellings have overwritten the first by now
    original = cfg.aliased

    def differ(first: str, second: str, a: object, b: object) -> Violation:
        return Violation(
            "same_meaning",
            {first: a, second: b},
            f"{first} ({a}) and {second} ({b}) say the same thing and must have the same value",
            ({second: a}, {first: b}),
        )

    pairs = [
        ("rl_config.num_generations", "rl_config.n_samples_per_prompt"),
        ("rl_config.num_iterations", "rl_config.epochs"),
        ("rl_config.max_completion_length", "generate_config.sampling_config.max_tokens"),
        ("rl_config.reward_funcs", "rl_config.verifier_function"),
        ("rl_config.reward_weights", "rl_config.verifier_weight"),
    ]
    if rl.num_generations is not None:
        # without num_generations it is upstream's beta, which nothing reads
        pairs.append(("rl_config.beta", "rl_config.init_kl_coef"))
    for first, second in pairs:
        if first in original and second in original and original[first] != original[second]:
            yield differ(first, second, original[first], original[second])
    if rl.num_generations is None:
        for name in ("steps_per_generation", "generation_batch_size"):
            if name in set_rl and getattr(rl, name) is not None:
                yield Violation(
                    "completion_counting",
                    {f"rl_config.{name}": getattr(rl, name), "rl_config.num_generations": None},
                    f"rl_config.{name} ({getattr(rl, name)}) belongs to completion-level counting, which needs "
                    "rl_config.num_generations; "
                    f"with n_samples_per_prompt the keys are global_batch_size and mini_batch_size, both in prompts",
                    ({f"rl_config.{name}": None},),
                )
    elif "mini_batch_size" in set_rl and cfg.actor_config.global_batch_size is not None and rl.n_samples_per_prompt > 0:
        step = cfg.actor_config.global_batch_size
        if rl.mini_batch_size * rl.n_samples_per_prompt != step:
            yield Violation(
                "same_meaning",
                {"rl_config.mini_batch_size": rl.mini_batch_size, "megatron_training.global_batch_size": step},
                f"rl_config.mini_batch_size ({rl.mini_batch_size} prompts x num_generations {rl.n_samples_per_prompt}) and "
                f"megatron_training.global_batch_size ({step} completions) both say the size of an optimizer step "
                "and must agree",
                (
                    *(
                        {"rl_config.mini_batch_size": size}
                        for size in [step // rl.n_samples_per_prompt]
                        if step % rl.n_samples_per_prompt == 0
                    ),
                ),
            )
    if rl.reward_weights is not None and rl.reward_funcs is None:
        yield Violation(
            "weights_without_functions",
            {"rl_config.reward_weights": rl.reward_weights, "rl_config.reward_funcs": None},
            "rl_config.reward_weights is set without rl_config.reward_funcs; beside verifier_function the key is "
            "verifier_weight",
        )
    if cfg.actor_config.lr_warmup_fraction and cfg.actor_config.lr_warmup_iters:
        fraction, iters = cfg.actor_config.lr_warmup_fraction, cfg.actor_config.lr_warmup_iters
        yield Violation(
            "one_warmup",
            {"actor_config.lr_warmup_fraction": fraction, "actor_config.lr_warmup_iters": iters},
            f"actor_config.lr_warmup_fraction ({fraction:g}) and actor_config.lr_warmup_iters ({iters}) exclude each other",
            ({"actor_config.lr_warmup_iters": 0}, {"actor_config.lr_warmup_fraction": None}),
        )


_DISTILLATION = "rl_config.distillation"


def _distillation(run: Run) -> Iterator[Violation]:
    """Check `rl_config.distillation`."""
    cfg = run.config
    rl = cfg.rl_config
    if rl is None or cfg.is_supervised:
        return
    keys, teachers = rl.distillation, rl.distillation.teacher_models
    if not keys.enabled:
        if rl.teacher_resource is not None or "teacher_config" in cfg.set_keys:
            names = {"rl_config.teacher_resource": rl.teacher_resource, "teacher_config": cfg.teacher_config}
            name = next(name for name, value in names.items() if value is not None)
            yield Violation(
                "teacher_without_distillation",
                {name: "present", f"{_DISTILLATION}.enabled": False},
                f"{name} is set but {_DISTILLATION}.enabled is false",
            )
        return

    def violate(rule: str, name: str, text: str, **suggested: object) -> Violation:
        value = getattr(keys, name)
        changes = tuple({f"{_DISTILLATION}.{key}": other} for key, other in suggested.items())
        return Violation(rule, {f"{_DISTILLATION}.{name}": value}, f"{_DISTILLATION}.{name} ({value}) {text}", changes)

    if not teachers:
        yield violate("some_teacher", "teacher_models", "must name a teacher: a folder of weights, actor, ref or http://...")
    for name in ("teacher_keys", "teacher_weights"):
        values = getattr(keys, name)
        if values and len(values) != len(teachers):
            yield violate("one_for_each_teacher", name, f"must have one entry for each of the {len(teachers)} teacher_models")
    if len(set(keys.teacher_keys)) != len(keys.teacher_keys):
        yield violate("one_teacher_each", "teacher_keys", "must differ: a row has one teacher")
    if keys.teacher_keys and keys.teacher_weights:
        yield violate(
            "keys_or_weights",
            "teacher_weights",
            "has no place next to teacher_keys, which choose one teacher",
            teacher_weights=[],
        )
    if keys.teacher_weights and not any(keys.teacher_weights):
        yield violate("some_weight", "teacher_weights", "must not all be 0")
    if keys.loss_mode in KL_WITHOUT_GRADIENT and not keys.use_policy_gradient:
        yield violate(
            "estimator_as_loss",
            "loss_mode",
            "as a loss has a gradient of 0 on average, whatever the teacher is; it is for use_policy_gradient",
            loss_mode=KL_WITH_GRADIENT,
            use_policy_gradient=True,
        )
    is_server = [teacher.startswith(("http://", "https://")) for teacher in teachers]
    if any(is_server) and not all(is_server):
        yield violate("servers_alone", "teacher_models", "must be all servers, or none")
    temperature = None if cfg.generate_config is None else cfg.generate_config.sampling_config.temperature or 1.0
    if any(is_server):
        if (keys.teacher_temperature or temperature or 1.0) != 1.0:
            yield violate(
                "server_temperature",
                "teacher_temperature",
                "must be 1.0 for servers, which return log-probs without temperature; unset it is that of sampling "
                f"({temperature})",
                teacher_temperature=1.0,
            )
        if rl.teacher_resource is not None or "teacher_config" in cfg.set_keys:
            yield violate("server_devices", "teacher_models", "are servers: leave out teacher_resource and teacher_config")
    kept = cfg.actor_config.dataset_additional_keys
    for name in ("teacher_prompt", *(("teacher_key",) if keys.teacher_keys else ())):
        if (column := getattr(keys, name)) is not None and column not in kept:
            yield Violation(
                "teacher_columns",
                {f"{_DISTILLATION}.{name}": column, "megatron_training.dataset_additional_keys": kept},
                f"{_DISTILLATION}.{name} ({column}) must be among megatron_training.dataset_additional_keys "
                f"({', '.join(kept) or 'none'}), the columns that rows keep",
                ({"megatron_training.dataset_additional_keys": [*kept, column]},),
            )
    if keys.teacher_prompt is not None and rl.multi_turn_enable:
        yield violate(
            "teacher_prompt_turns", "teacher_prompt", "replaces the prompt of a single turn: it excludes multi_turn_enable"
        )
    roles = [teacher for teacher in teachers if teacher in ROLE_TEACHERS]
    if "actor" in roles and keys.teacher_prompt is None:
        yield violate(
            "own_teacher",
            "teacher_models",
            "has the actor, which differs from itself only by teacher_prompt: name the column of its prompt",
        )
    if roles and rl.teacher_resource is not None:
        yield violate(
            "role_devices", "teacher_models", "has roles of the run, which are not on the devices of teacher_resource"
        )
    if "ref" in roles and (rl.share_backbone or run.placement.dedicated.get("ref")):
        yield violate("reference_teacher", "teacher_models", "has ref, which must be a model on the actor's devices")
    if not keys.use_task_rewards and (rl.dynamic_sample or rl.filter_groups_enable):
        name = "dynamic_sample" if rl.dynamic_sample else "filter_groups_enable"
        yield Violation(
            "filter_without_rewards",
            {f"rl_config.{name}": True, f"{_DISTILLATION}.use_task_rewards": False},
            f"rl_config.{name} replaces groups by their rewards, which do not train: {_DISTILLATION}.use_task_rewards is false",
            ({f"rl_config.{name}": False},),
        )
    if not keys.use_task_rewards and run.objective is not None and run.objective.has_critic:
        yield violate(
            "critic_without_rewards", "use_task_rewards", "leaves the critic nothing to learn: take another adv_estimator"
        )


OBJECTIVE_RULES = (_rewards, _algorithms, _second_names, _distillation)
