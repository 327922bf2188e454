"""Rules between keys of a run file about rewards, losses and keys with the same meaning."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from mindspeed_rl.catalogue import CRITIC_ESTIMATOR, KL_WITH_GRADIENT, KL_WITHOUT_GRADIENT, POLICY_LOSSES, SETTINGS
from mindspeed_rl.catalogue.objective import ROLE_TEACHERS, TOP_K_KINDS, Objective
from mindspeed_rl.catalogue.records import Bounds
from mindspeed_rl.config.keys.rl import RLConfig
from mindspeed_rl.run.record import Run
from mindspeed_rl.run.rules.violation import Broken, Violation, find_key, needs, violate, violate_range


@needs("rl_config")
def _rewards(run: Run) -> Iterator[Broken]:
    """Check that responses are scored, and that the score is one that the run can use."""
    cfg, rl = run.config, run.rl
    given, weights = rl.verifier_function, rl.verifier_weight
    # reward_funcs and its weights were copied to verifier_*; sentences name the key that the file has
    functions_key, weights_key = "verifier_function", "verifier_weight"
    if rl.reward_funcs is not None:
        functions_key, weights_key = "reward_funcs", "reward_weights"
    if rl.rule_reward and len(given) != len(weights):
        yield violate(
            "one_weight_each",
            f"[{functions_key}:name] ({len(given)} entries: {', '.join(given)}) and [{weights_key}:name] "
            f"({len(weights)} entries) must have the same length",
            {weights_key: (weights + [1.0] * len(given))[: len(given)]},
            keys={functions_key: given, weights_key: weights},
        )
    scored_by_turns = rl.trajectory_reward != "none" and rl.agent_loop_name not in ("single_turn", "scheduler")
    scored_by_rules = rl.rule_reward and given or scored_by_turns
    needs_no_score = rl.distillation.enabled and not rl.distillation.use_task_rewards
    scored_by_models = cfg.reward_config is not None or rl.reward_model or rl.judge_url or rl.served_judge
    if not (needs_no_score or scored_by_rules or scored_by_models):
        yield violate(
            "some_reward",
            "nothing scores the responses: [rule_reward:name] is false and there is no reward_config, reward_model, "
            "judge_url or judge_model",
            {"rule_reward": True},
            keys={"reward_model": None, "reward_config": None},
        )
    if rl.overlong_buffer_enable and cfg.generate_config is not None:
        yield from _overlong_responses(run, cfg.response_limit, cfg.response_limit_key)
    if rl.filter_groups_enable:
        yield from _group_filter(run, functions_key)
    yield from _prompt_sampling(run)
    overlong = next((name for name in ("soft_overlong", "swift_soft_overlong") if name in given), None)
    if overlong is not None and rl.soft_cache_length is None:
        text = f"[soft_cache_length:name] is not set, but the reward function {overlong} needs it"
        yield violate("soft_cache_length", text, keys={"verifier_function": given})


def _overlong_responses(run: Run, limit: int, limit_key: str) -> Iterator[Broken]:
    """Check the keys of the penalty of long responses against the maximum tokens of a response."""
    rl, given = run.rl, {limit_key: limit}
    if rl.rollout_max_tokens != limit:
        text = f"[rollout_max_tokens] must equal [{limit_key}] while overlong_buffer_enable is true"
        yield violate("overlong_limit", text, {"rollout_max_tokens": limit}, keys=given)
    if not 0 < rl.overlong_buffer < limit:
        text = f"[overlong_buffer] must be between 1 and {limit_key} - 1 ({limit - 1})"
        yield violate("overlong_buffer", text, {"overlong_buffer": min(max(rl.overlong_buffer, 1), limit - 1)}, keys=given)


def _group_filter(run: Run, functions_key: str) -> Iterator[Broken]:
    """Check the filter of groups: what it reads, and that it is the only one."""
    rl, given = run.rl, run.rl.verifier_function
    if rl.filter_groups_metric not in given:
        yield violate(
            "filter_metric",
            f"[filter_groups_metric] must be one of rl_config.{functions_key} ({', '.join(given)})",
            {"filter_groups_metric": given[0]} if given else None,
            keys={"verifier_function": given},
        )
    yield from _fillable_groups(run)
    if rl.dynamic_sample:
        text = "[filter_groups_enable:name] and [dynamic_sample:name] replace groups in two ways; set only one of them"
        yield violate("one_filter", text, {"dynamic_sample": False, "filter_groups_enable": False})


def _prompt_sampling(run: Run) -> Iterator[Broken]:
    """Check the keys of the order of prompts."""
    rl = run.rl
    num_sources, num_weights = len(rl.prompt_sources), len(rl.prompt_source_weights)
    if num_sources != num_weights or len(set(rl.prompt_sources)) != num_sources:
        yield violate(
            "prompt_sources",
            f"[prompt_source_weights:name] has {num_weights} weights for {num_sources} sources; each of "
            "[prompt_sources:name] is named once and has one",
            {"prompt_source_weights": [1.0] * num_sources},
        )
    low, high = rl.prompt_skip_below, rl.prompt_skip_above
    if low is not None and high is not None and low >= high:
        text = "[prompt_skip_below] must be less than [prompt_skip_above]: no prompt would train"
        yield violate("prompt_skips", text, {"prompt_skip_below": None})
    names = ("prompt_replay_fraction", "prompt_skip_above", "prompt_skip_below", "prompt_level_key")
    reads = [name for name in names if getattr(rl, name) is not None]
    term = None if run.objective is None else run.objective.distillation
    if reads and term is not None and not term.use_task_rewards:
        yield violate(
            "prompt_rewards",
            f"[{reads[0]}:name] reads rewards, which do not train: [rl_config.distillation.use_task_rewards:name] is false",
            {reads[0]: None},
        )


def _fillable_groups(run: Run) -> Iterator[Broken]:
    """Check that a filter of groups can accept as many as an iteration trains on."""
    rl, sizes, off = run.rl, run.sizes, {"filter_groups_enable": False}
    if rl.n_samples_per_prompt == 1:
        text = "[filter_groups_enable:name] accepts groups whose metric varies, and with [n_samples_per_prompt] none does"
        yield violate("filter_group_of_one", text, {"n_samples_per_prompt": 2}, off)
    if not rl.rule_reward:
        yield violate(
            "filter_without_functions",
            f"[filter_groups_enable:name] reads the reward function {rl.filter_groups_metric}, which does not run: "
            "[rule_reward:name] is false",
            {"rule_reward": True},
            off,
        )
    size, batches = rl.filter_groups_train_batch_size, rl.filter_groups_max_batches
    if sizes is None or not sizes.can_divide or batches < 1 or size <= (max_prompts := sizes.rollout_prompts * batches):
        return
    yield violate(
        "filter_fills",
        f"[filter_groups_train_batch_size] is more than the {max_prompts} prompts of [filter_groups_max_batches:short] "
        "rollouts: the batch never fills",
        {
            "filter_groups_max_batches": math.ceil(size / sizes.rollout_prompts),
            "filter_groups_train_batch_size": int(max_prompts),
        },
    )


@needs("rl_config")
def _algorithms(run: Run) -> Iterator[Broken]:
    """Check the algorithm against the stage and the responses of a prompt."""
    rl, objective = run.rl, run.objective
    assert objective is not None
    yield from _algorithm_keys(rl, objective)
    if run.config.stage == "ray_ppo" and not objective.has_critic:
        text = "[megatron_training.stage:is] trains a critic, and [adv_estimator:is] has none"
        yield violate("ppo_critic", text, {"adv_estimator": CRITIC_ESTIMATOR, "megatron_training.stage": "ray_grpo"})
    if objective.loss.compares_group:
        yield from _whole_groups(run, objective)
    least = objective.min_group_size
    # with num_generations the batch rules report it, below 1 the range of the key
    if rl.num_generations is None and 0 < rl.n_samples_per_prompt < least:
        yield violate(
            "group_of_two",
            f"[n_samples_per_prompt] must be at least {least} for adv_estimator {objective.adv_estimator}: it compares "
            "the responses of a prompt",
            {"n_samples_per_prompt": least},
            keys={"adv_estimator": rl.adv_estimator},
        )


def _whole_groups(run: Run, objective: Objective) -> Iterator[Broken]:
    """Check that the responses of a prompt can share a micro-batch."""
    rl, n, sizes, given = run.rl, objective.group_size, run.sizes, {"loss_type": objective.loss_type}
    if n < 2:
        text = "[loss_type:is] compares the responses of a prompt: [n_samples_per_prompt] must be at least 2"
        yield violate("loss_of_groups", text, {"n_samples_per_prompt": 2}, keys=given)
        return
    if rl.use_prefix_grouper and rl.use_dynamic_bsz:
        yield violate(
            "groups_or_prefixes",
            "[loss_type:is] needs all responses of a prompt in one micro-batch, and [use_prefix_grouper:name] with "
            "use_dynamic_bsz divides them by tokens",
            {"use_prefix_grouper": False},
            keys={**given, "use_dynamic_bsz": True},
        )
    if sizes is None or not sizes.can_divide:
        return
    micro = sizes.micro_batch_size
    if micro % n and not rl.use_dynamic_bsz:
        yield violate(
            "groups_in_micro_batches",
            f"rl_config.loss_type {objective.loss_type} needs all {n} responses of a prompt in one micro-batch: "
            f"[actor_config.micro_batch_size] must be a multiple of {n}",
            {"actor_config.micro_batch_size": math.ceil(micro / n) * n},
            keys={"actor_config.micro_batch_size": micro, "n_samples_per_prompt": n},
        )
    if sizes.step_samples / sizes.actor.dp_size % n:
        yield violate(
            "groups_on_replicas",
            f"rl_config.loss_type {objective.loss_type} needs all {n} responses of a prompt on one replica: an "
            f"optimizer step has {sizes.step_samples} responses on {sizes.actor.dp_size} replicas",
            keys={"mini_batch_size": rl.mini_batch_size, "n_samples_per_prompt": n},
        )


def algorithm_violations(rl: RLConfig, objective: Objective) -> Iterator[Violation]:
    """Yield the broken rules between the keys of losses, estimators and corrections, whatever the size of a group."""
    for item in _algorithm_keys(rl, objective):
        yield item.fill(partial(getattr, rl), find_key)


def _algorithm_keys(rl: RLConfig, objective: Objective) -> Iterator[Broken]:
    """Check the keys of losses, estimators and corrections."""
    for name, bounds in SETTINGS.items():
        value = getattr(rl, name)
        if value is not None and not bounds.contain(value):
            yield violate_range(f"rl_config.{name}", value, bounds)
    yield from _losses(rl, objective)
    yield from _recorded_old_policy(rl, objective)
    reads_covariance = objective.loss.reads is not None and objective.loss.may_read("clip_cov_lb")
    if reads_covariance and rl.clip_cov_lb >= rl.clip_cov_ub:
        text = "[clip_cov_lb] must be below [clip_cov_ub]: no token is between them"
        yield violate("covariance_bounds", text, {"clip_cov_ub": rl.clip_cov_lb + 4})
    if rl.use_kl_in_reward and not objective.advantage.kl_in_reward:
        text = f"[use_kl_in_reward:name] has no place with {objective.adv_estimator}, which does not read the total reward"
        yield violate("gdpo_kl", text, {"use_kl_in_reward": False}, keys={"adv_estimator": rl.adv_estimator})
    low, high = rl.rollout_importance_sampling_threshold_min, rl.rollout_importance_sampling_threshold
    high_key = "rollout_importance_sampling_threshold"
    low_key = f"{high_key}_min"
    if low is not None and low > high:
        yield violate("correction_bounds", f"[{low_key}] must be at most [{high_key}:short]", {low_key: high})
    correction, mode = objective.correction, objective.rollout_importance_sampling_mode
    if low is not None and correction and not correction.may_read("rollout_importance_sampling_threshold_min"):
        text = f"[{low_key}] bounds the masking modes only; it has no effect with {mode}"
        yield violate("correction_lower_bound", text, {low_key: None}, keys={"rollout_importance_sampling_mode": mode})


def _recorded_old_policy(rl: RLConfig, objective: Objective) -> Iterator[Broken]:
    """Check the keys of a run whose old policy is what the rollout engine recorded."""
    if not objective.reads_rollout_policy:
        return
    recorded = {"old_log_probs": "rollout"}
    correction = objective.correction
    if correction is not None and correction.weight != "one" and objective.loss.has_ratio:
        yield violate(
            "recorded_policy_correction",
            f"[rollout_importance_sampling_mode] has no place with [old_log_probs] and loss_type {objective.loss_type}: its "
            "ratio is to the rollout engine already, and a weight would count the difference twice; a loss without a ratio "
            "(gpg) takes the weight, and a rejection mask has none",
            {"rollout_importance_sampling_mode": None, "old_log_probs": "trainer"},
            keys={"loss_type": objective.loss_type},
        )
    if needed := sorted(objective.needs & {"entropies", "squared_probs"}):
        yield violate(
            "recorded_policy_pass",
            f"[old_log_probs:is] saves no pass here: this run needs {' and '.join(needed)} of the trainer's pass over all rows",
            {"old_log_probs": "trainer"},
        )
    if rl.old_log_probs_fallback != "stop" and (not rl.old_log_probs_check_fraction or rl.log_probs_diff_limit is None):
        yield violate(
            "recorded_policy_fallback",
            "[old_log_probs_fallback] needs rows that are compared, [old_log_probs_check_fraction], and a bound, "
            "[log_probs_diff_limit]",
            {"old_log_probs_fallback": "stop"},
            keys=recorded,
        )


def _losses(rl: RLConfig, objective: Objective) -> Iterator[Broken]:
    """Check the keys that bound the ratio of new to old policy, as the loss in use reads them."""
    loss, loss_type, given = objective.loss, objective.loss_type, {"loss_type": objective.loss_type}
    if objective.normalizer == "constant" and objective.max_response_length is None:
        text = "[loss_type:is] divides by max_response_length ([max_tokens:name]), which is not set"
        yield violate("constant_length", text, keys={**given, "max_tokens": None})
    # for losses that read both: for one that takes clip_ratio_high as a cap the order means nothing
    if rl.clip_higher_enable and rl.clip_ratio_low > rl.clip_ratio_high and loss.may_read("clip_ratio_low"):
        text = "[clip_ratio_low] must be at most [clip_ratio_high]"
        yield violate("clip_order", text, {"clip_ratio_low": rl.clip_ratio_high, "clip_ratio_high": rl.clip_ratio_low})
    for name, bounds in loss.bounds.items():
        if not bounds.contain(getattr(objective, name)):
            yield _violate_loss_bounds(rl, loss_type, name, bounds)
    if rl.clip_ratio_c is not None and rl.delta is not None:
        text = "[clip_ratio_c] and [delta] bound the same branch; set only one"
        yield violate("one_negative_bound", text, {"clip_ratio_c": None, "delta": None})
    upper = 1 + objective.clip_ratio_high
    if rl.delta is not None and loss.may_read("delta") and rl.delta < upper:
        yield violate(
            "two_sided_clip",
            f"[delta] must be at least 1 + the upper clip ratio ({upper:g}): below it the bound cuts ratios that the "
            "clip does not change",
            {"delta": math.ceil(upper * 1e6) / 1e6},  # rounded down it would still be below
        )
    for name in ("clip_ratio_c", "delta"):
        if getattr(rl, name) is not None and not loss.may_read(name):
            text = f"[{name}] has no effect with loss_type {loss_type}, which does not clip this way"
            yield violate("bound_without_clip", text, {name: None}, keys=given)
    if objective.level not in loss.levels:
        # losses that take another level and are otherwise the same
        others = [
            name
            for name, other in POLICY_LOSSES.items()
            if loss.levels != other.levels and replace(loss, level=other.level, levels=other.levels) == other
        ]
        yield violate(
            "gspo_level",
            f"[importance_sampling_level:is] contradicts loss_type {loss_type}, whose ratio is per {loss.level}",
            {"importance_sampling_level": loss.level},
            *({"loss_type": name} for name in others),
            keys={**given, "importance_sampling_level": objective.level},
        )


def _violate_loss_bounds(rl: RLConfig, loss_type: str, name: str, bounds: Bounds) -> Broken:
    """Report a number outside the bounds of one loss; the clip ratios are read only with clip_higher_enable."""
    value = getattr(rl, name)
    suggested: dict[str, object] = {name: value if bounds.contain(value) else bounds.default}
    keys, condition = {"loss_type": loss_type, name: value}, ""
    if name in ("clip_ratio_low", "clip_ratio_high"):
        keys["clip_higher_enable"] = rl.clip_higher_enable
        suggested["clip_higher_enable"] = True
        condition = f"needs clip_higher_enable (is {str(rl.clip_higher_enable).lower()}) and "
    # bounds without a default propose none
    options = [{} if None in suggested.values() else suggested, bounds.otherwise]
    return violate(
        bounds.rule,
        f"[loss_type:is] {condition}takes {name} ({value:g}) as {bounds.meaning}, which must be {bounds}",
        None,
        *filter(None, options),
        keys=keys,
    )


#: keys with the same meaning
_ALIASES = {
    "num_generations": "n_samples_per_prompt",
    "num_iterations": "epochs",
    "max_completion_length": "max_tokens",
    "reward_funcs": "verifier_function",
    "reward_weights": "verifier_weight",
}


@needs("rl_config")
def _second_names(run: Run) -> Iterator[Broken]:
    """Check that two keys with the same meaning have the same value."""
    cfg, rl = run.config, run.rl
    set_rl = cfg.set_keys.get("rl_config", frozenset())
    # the values as written: second spellings have overwritten the first by now
    written = cfg.aliased
    # without num_generations it is upstream's beta, which nothing reads
    aliases = _ALIASES if rl.num_generations is None else {**_ALIASES, "beta": "init_kl_coef"}
    for first, second in ((find_key(first), find_key(second)) for first, second in aliases.items()):
        if first in written and second in written and written[first] != written[second]:
            yield violate(
                "same_meaning",
                f"{first} ({written[first]}) and {second} ({written[second]}) say the same thing and must have the same value",
                {second: written[first], first: written[second]},
                keys={first: written[first], second: written[second]},
            )
    if rl.num_generations is None:
        for name in ("steps_per_generation", "generation_batch_size"):
            if name in set_rl and getattr(rl, name) is not None:
                yield violate(
                    "completion_counting",
                    f"[{name}] belongs to completion-level counting, which needs [num_generations:name]; with "
                    "n_samples_per_prompt the keys are global_batch_size and mini_batch_size, both in prompts",
                    {name: None},
                )
    elif "mini_batch_size" in set_rl and cfg.actor_config.global_batch_size is not None and rl.n_samples_per_prompt > 0:
        step, n = cfg.actor_config.global_batch_size, rl.n_samples_per_prompt
        if rl.mini_batch_size * n != step:
            yield violate(
                "same_meaning",
                f"[mini_batch_size:name] ({rl.mini_batch_size} prompts x num_generations {n}) and "
                f"[global_batch_size:name] ({step} completions) both say the size of an optimizer step and must agree",
                {"mini_batch_size": step // n} if step % n == 0 else None,
            )
    if rl.reward_weights is not None and rl.reward_funcs is None:
        yield violate(
            "weights_without_functions",
            "[reward_weights:name] is set without [reward_funcs:name]; beside verifier_function the key is verifier_weight",
        )
    if cfg.actor_config.lr_warmup_fraction and cfg.actor_config.lr_warmup_iters:
        text = "[actor_config.lr_warmup_fraction] and [actor_config.lr_warmup_iters] exclude each other"
        yield violate("one_warmup", text, {"actor_config.lr_warmup_iters": 0, "actor_config.lr_warmup_fraction": None})


_TERM = "rl_config.distillation"


@needs("rl_config")
def _distillation(run: Run) -> Iterator[Broken]:
    """Check `rl_config.distillation`."""
    cfg, rl, keys = run.config, run.rl, run.rl.distillation
    # another group, and other devices, than the actor's
    has_devices = rl.teacher_resource is not None or "teacher_config" in cfg.set_keys
    if keys.enabled:
        yield from _teachers(run, has_devices)
        yield from _teacher_columns(run)
        yield from _teacher_rewards(run)
        if keys.on_policy_fraction < 1.0:
            yield from _data_responses(run)
    elif has_devices:
        name = "teacher_config" if rl.teacher_resource is None else "teacher_resource"
        text = f"[{name}:name] is set but [{_TERM}.enabled:name] is false"
        yield violate("teacher_without_distillation", text, keys={name: "present"})


def _reject(rule: str, name: str, text: str, **suggested: object) -> Broken:
    """Report a key of the term, with values of other keys of it that are each a suggestion."""
    return violate(rule, f"[{_TERM}.{name}] {text}", {f"{_TERM}.{key}": value for key, value in suggested.items()})


def _teachers(run: Run, has_devices: bool) -> Iterator[Broken]:
    """Check the teachers, and what each of them judges."""
    keys, teachers = run.rl.distillation, run.rl.distillation.teacher_models
    if not teachers:
        yield _reject("some_teacher", "teacher_models", "must name a teacher: a folder of weights, actor, ref or http://...")
    for name in ("teacher_keys", "teacher_weights"):
        values = getattr(keys, name)
        if values and len(values) != len(teachers):
            yield _reject("one_for_each_teacher", name, f"must have one entry for each of the {len(teachers)} teacher_models")
    if len(set(keys.teacher_keys)) != len(keys.teacher_keys):
        yield _reject("one_teacher_each", "teacher_keys", "must differ: a row has one teacher")
    if keys.teacher_keys and keys.teacher_weights:
        text = "has no place next to teacher_keys, which choose one teacher"
        yield _reject("keys_or_weights", "teacher_weights", text, teacher_weights=[])
    if keys.teacher_weights and not any(keys.teacher_weights):
        yield _reject("some_weight", "teacher_weights", "must not all be 0")
    if keys.loss_mode in KL_WITHOUT_GRADIENT and not keys.use_policy_gradient:
        text = "as a loss has a gradient of 0 on average, whatever the teacher is; it is for use_policy_gradient"
        yield _reject("estimator_as_loss", "loss_mode", text, loss_mode=KL_WITH_GRADIENT, use_policy_gradient=True)
    is_server = [teacher.startswith(("http://", "https://")) for teacher in teachers]
    if any(is_server) and not all(is_server):
        yield _reject("servers_alone", "teacher_models", "must be all servers, or none")
    if any(is_server):
        yield from _teacher_servers(run, has_devices)


def _teacher_servers(run: Run, has_devices: bool) -> Iterator[Broken]:
    """Check what servers of teachers cannot do."""
    generate, keys = run.config.generate_config, run.rl.distillation
    temperature = None if generate is None else generate.sampling_config.temperature or 1.0
    if (keys.teacher_temperature or temperature or 1.0) != 1.0:
        text = "must be 1.0 for servers, which return log-probs without temperature; unset it is the sampling temperature"
        text = f"[{_TERM}.teacher_temperature:name] ({keys.teacher_temperature}) {text} ({temperature})"
        yield violate("server_temperature", text, {f"{_TERM}.teacher_temperature": 1.0})
    if has_devices:
        yield _reject("server_devices", "teacher_models", "are servers: leave out teacher_resource and teacher_config")


def _teacher_columns(run: Run) -> Iterator[Broken]:
    """Check the columns of a row that its teacher reads."""
    rl, keys, kept = run.rl, run.rl.distillation, run.config.actor_config.dataset_additional_keys
    names = ["teacher_prompt", "teacher_key"] if keys.teacher_keys else ["teacher_prompt"]
    for name in names:
        if (column := getattr(keys, name)) is not None and column not in kept:
            yield violate(
                "teacher_columns",
                f"[{_TERM}.{name}] must be among [dataset_additional_keys:name] ({', '.join(kept) or 'none'}), the "
                "columns that rows keep",
                {"dataset_additional_keys": [*kept, column]},
            )
    if keys.teacher_prompt is not None and rl.multi_turn_enable:
        text = "replaces the prompt of a single turn: it excludes multi_turn_enable"
        yield _reject("teacher_prompt_turns", "teacher_prompt", text)


def _teacher_rewards(run: Run) -> Iterator[Broken]:
    """Check teachers that are roles of the run, and what reads rewards that do not train."""
    rl, keys = run.rl, run.rl.distillation
    roles = [teacher for teacher in keys.teacher_models if teacher in ROLE_TEACHERS]
    if "actor" in roles and keys.teacher_prompt is None:
        text = "has the actor, which differs from itself only by teacher_prompt: name the column of its prompt"
        yield _reject("own_teacher", "teacher_models", text)
    if roles and rl.teacher_resource is not None:
        text = "has roles of the run, which are not on the devices of teacher_resource"
        yield _reject("role_devices", "teacher_models", text)
    if "ref" in roles and (rl.share_backbone or run.placement.dedicated.get("ref")):
        yield _reject("reference_teacher", "teacher_models", "has ref, which must be a model on the actor's devices")
    if not keys.use_task_rewards and (rl.dynamic_sample or rl.filter_groups_enable):
        name = "dynamic_sample" if rl.dynamic_sample else "filter_groups_enable"
        yield violate(
            "filter_without_rewards",
            f"[{name}:name] replaces groups by their rewards, which do not train: [{_TERM}.use_task_rewards:name] is false",
            {name: False},
        )
    if not keys.use_task_rewards and run.objective is not None and run.objective.has_critic:
        text = "leaves the critic nothing to learn: take another adv_estimator"
        yield violate("critic_without_rewards", f"[{_TERM}.use_task_rewards:name] (False) {text}")


def _data_responses(run: Run) -> Iterator[Broken]:
    """Check iterations whose responses are those of the data."""
    rl, keys, kept = run.rl, run.rl.distillation, run.config.actor_config.dataset_additional_keys
    name, subject = "on_policy_fraction", "trains on responses of the data too"
    if keys.use_task_rewards or keys.use_policy_gradient:
        text = f"{subject}, for which there is no policy gradient: set [{_TERM}.use_task_rewards:name] and "
        text += f"[{_TERM}.use_policy_gradient:name] to false"
        yield _reject("data_without_policy_loss", name, text, use_task_rewards=False, use_policy_gradient=False)
    if keys.loss_mode not in TOP_K_KINDS:
        text = f"{subject}, whose tokens the student did not sample: [{_TERM}.loss_mode] estimates at sampled ones"
        yield _reject("data_without_samples", name, text, loss_mode="jsd_topk")
    has_correction = run.objective is not None and run.objective.correction is not None
    # key -> whether it needs tokens that an engine sampled in this iteration, a value that does not
    excluded = {
        "trainer_mode": (rl.trainer_mode != "sync", "sync"),
        "partial_rollout_max_split": (rl.partial_rollout_max_split > 1, 1),
        "multi_turn_enable": (rl.multi_turn_enable, False),
        "router_replay.mode": (rl.router_replay.mode == "R3", "R2"),
        "old_log_probs": (rl.old_log_probs == "rollout", "trainer"),
        "rollout_importance_sampling_mode": (has_correction, None),
    }
    for key, (is_met, suggestion) in excluded.items():
        if is_met:
            text = f"[{_TERM}.{name}] {subject}, which no engine sampled: it excludes [rl_config.{key}]"
            yield violate("data_responses", text, {f"rl_config.{key}": suggestion})
    if run.config.reads_images:
        yield _reject("data_responses_images", name, f"{subject}, which are texts: it excludes images")
    if keys.response_column not in kept:
        text = f"[{_TERM}.response_column] must be among [dataset_additional_keys:name] ({', '.join(kept) or 'none'})"
        yield violate("response_column", text, {"dataset_additional_keys": [*kept, keys.response_column]})


OBJECTIVE_RULES = (_rewards, _algorithms, _second_names, _distillation)
