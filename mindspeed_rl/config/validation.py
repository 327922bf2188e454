"""Every rule between the keys of a run file, all checked at once, each with the nearest values that mend it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from mindspeed_rl.config.batch_rules import Breach, breaches
from mindspeed_rl.config.layout_rules import layout_violations
from mindspeed_rl.config.objective import resolve_objective
from mindspeed_rl.config.repair import nearest_single, nearest_together
from mindspeed_rl.config.rl import GROUP_ESTIMATORS
from mindspeed_rl.config.run import RunConfig
from mindspeed_rl.config.sizes import Sizes, read_sizes, size_keys, world_size
from mindspeed_rl.config.violation import Violation

Rule = Callable[[RunConfig], Iterator[Violation]]


def validate(cfg: RunConfig, num_nodes: int = 1) -> list[Violation]:
    """Return every broken rule of a run file; empty for a sound one.

    Args:
        num_nodes: machines of the run; reward rules and dynamic sampling work on each of them.
    """
    if num_nodes < 1:
        raise ValueError(f"the number of nodes is {num_nodes}, but must be at least 1")
    return [*_batch(cfg, num_nodes), *_with_nearest(cfg, layout_violations), *(v for rule in _RULES for v in rule(cfg))]


def _violation(rule: str, keys: dict[str, Any], message: str, *nearest: dict[str, Any]) -> Violation:
    return Violation(rule, keys, message, tuple(nearest))


# --- batch sizes -----------------------------------------------------------------------------------------------------------


def _batch(cfg: RunConfig, num_nodes: int) -> Iterator[Violation]:
    missing = False
    if cfg.actor_config.global_batch_size is None:
        missing = True
        yield _violation(
            "is_set", {"megatron_training.global_batch_size": None}, "megatron_training.global_batch_size is not set"
        )
    if world_size(cfg) is None:
        missing = True
        name = "rl_config.actor_resource.num_npus"
        unit = cfg.actor_config.model_parallel_size
        yield _violation("is_set", {name: None}, f"{name} is not set; it is a multiple of {unit} here")
    if missing:
        return
    sizes, keys = read_sizes(cfg, num_nodes), size_keys(cfg)
    broken = list(breaches(sizes))
    together: dict[str, int] | None = None
    for breach in broken:
        singles = [{keys[name]: value} for name in breach.names for value in nearest_single(sizes, name)[:2]]
        if not singles and breach.names:
            if together is None:
                together = nearest_together(sizes, (name for other in broken for name in other.names))
            singles = [{keys[name]: value for name, value in together.items()}] if together else []
        yield Violation(breach.rule, _named(breach, sizes, keys), breach.text(keys), tuple(singles))


def _named(breach: Breach, sizes: Sizes, keys: dict[str, str]) -> dict[str, Any]:
    names = breach.names or ("generation_batch_size", "steps_per_generation")
    return {keys[name]: sizes.value(name) for name in names}


# --- layouts: the nearest values are found by trying the rules again ----------------------------------------------------------


def _with_nearest(cfg: RunConfig, rules: Callable[[RunConfig], Iterable[Violation]]) -> Iterator[Violation]:
    broken = list(rules(cfg))
    names = {violation.rule for violation in broken}
    for violation in broken:
        options = []
        for key, value in violation.keys.items():
            if key.rpartition(".")[2].endswith("parallel_size") and isinstance(value, int):
                options += [{key: other} for other in _nearest_layout(cfg, rules, violation.rule, names, key, value)]
        yield Violation(violation.rule, violation.keys, violation.message, violation.nearest or tuple(options))


def _nearest_layout(
    cfg: RunConfig, rules: Callable[[RunConfig], Iterable[Violation]], rule: str, known: set[str], key: str, current: int
) -> list[int]:
    """Return the nearest sizes below and above that mend `rule`, break no other layout rule and still divide the devices."""
    found: list[int] = []
    group, _, name = key.partition(".")
    for candidates in (range(current - 1, 0, -1), range(current + 1, 4 * current + 1)):
        for value in candidates:
            trial = copy.copy(cfg)
            for role in ("megatron_training", "actor_config", "ref_config") if group == "megatron_training" else (group,):
                changed = copy.copy(getattr(cfg, role))
                setattr(changed, name, value)
                setattr(trial, role, changed)
            broken = {violation.rule for violation in rules(trial)}
            if rule not in broken and broken <= known and _devices_fit(trial):
                found.append(value)
                break
    return found


def _devices_fit(cfg: RunConfig) -> bool:
    world = world_size(cfg)
    if world is None:
        return True
    rollout = cfg.generate_config.infer_tensor_parallel_size if cfg.generate_config is not None else 1
    return world % cfg.actor_config.model_parallel_size == 0 and world % rollout == 0


# --- everything else --------------------------------------------------------------------------------------------------------


def _stage(cfg: RunConfig) -> Iterator[Violation]:
    if cfg.stage is None:
        yield _violation("is_set", {"megatron_training.stage": None}, "megatron_training.stage is not set")
    elif not cfg.is_supervised:
        for group in ("rl_config", "generate_config"):
            if getattr(cfg, group) is None:
                yield _violation(
                    "group_needed", {"megatron_training.stage": cfg.stage}, f"stage {cfg.stage} needs the group {group}"
                )


def _number_format(cfg: RunConfig) -> Iterator[Violation]:
    if cfg.generate_config is None:
        return
    dtype, bf16 = cfg.generate_config.dtype, cfg.actor_config.bf16
    if bf16 != (dtype == "bfloat16"):
        yield _violation(
            "same_number_format",
            {"megatron_training.bf16": bf16, "generate_config.dtype": dtype},
            f"megatron_training.bf16 ({str(bf16).lower()}) and generate_config.dtype ({dtype}) must agree: "
            "trainer and rollout engine "
            f"compute in the same format",
            {"generate_config.dtype": "bfloat16" if bf16 else "float32"},
            {"megatron_training.bf16": not bf16},
        )


def _lengths(cfg: RunConfig) -> Iterator[Violation]:
    rl, generate, seq = cfg.rl_config, cfg.generate_config, cfg.actor_config.seq_length
    if rl is None or generate is None or cfg.is_supervised:
        return
    longest, response = generate.max_model_len, generate.sampling_config.max_tokens
    if seq is not None and longest < seq:
        yield _violation(
            "seq_length_fits_engine",
            {"generate_config.max_model_len": longest, "megatron_training.seq_length": seq},
            f"generate_config.max_model_len ({longest}) must be at least megatron_training.seq_length ({seq})",
            {"generate_config.max_model_len": max(seq, rl.max_prompt_length + response)},
            {"megatron_training.seq_length": longest},
        )
    if rl.max_prompt_length + response > longest:
        fixes = [{"generate_config.max_model_len": max(rl.max_prompt_length + response, seq or 0)}]
        if longest > response:
            fixes.append({"rl_config.max_prompt_length": longest - response})
        if longest > rl.max_prompt_length:
            fixes.append({"generate_config.sampling_config.max_tokens": longest - rl.max_prompt_length})
        yield _violation(
            "prompt_and_response_fit",
            {
                "rl_config.max_prompt_length": rl.max_prompt_length,
                "generate_config.sampling_config.max_tokens": response,
                "generate_config.max_model_len": longest,
            },
            f"rl_config.max_prompt_length + generate_config.sampling_config.max_tokens ({rl.max_prompt_length} + {response} = "
            f"{rl.max_prompt_length + response}) must be at most generate_config.max_model_len ({longest})",
            *fixes,
        )


def _packing(cfg: RunConfig) -> Iterator[Violation]:
    actor, rl = cfg.actor_config, cfg.rl_config
    if actor.neat_pack and not (actor.pack and actor.reset_attention_mask):
        yield _violation(
            "neat_pack",
            {
                "megatron_training.neat_pack": True,
                "megatron_training.pack": actor.pack,
                "megatron_training.reset_attention_mask": actor.reset_attention_mask,
            },
            "megatron_training.neat_pack needs pack and reset_attention_mask",
            {"megatron_training.pack": True, "megatron_training.reset_attention_mask": True},
        )
    if rl is None or not rl.use_remove_padding:
        return
    if not actor.reset_attention_mask:
        yield _violation(
            "remove_padding_masks",
            {"rl_config.use_remove_padding": True, "megatron_training.reset_attention_mask": False},
            "rl_config.use_remove_padding (true) needs megatron_training.reset_attention_mask (false) to be "
            "true: samples of a pack must "
            "not see each other",
            {"megatron_training.reset_attention_mask": True},
            {"rl_config.use_remove_padding": False},
        )
    if actor.pipeline_model_parallel_size > 1 and not actor.no_pad_to_seq_lengths:
        yield _violation(
            "remove_padding_pipeline",
            {
                "rl_config.use_remove_padding": True,
                "actor_config.pipeline_model_parallel_size": actor.pipeline_model_parallel_size,
                "megatron_training.no_pad_to_seq_lengths": False,
            },
            f"rl_config.use_remove_padding (true) with pipeline_model_parallel_size {actor.pipeline_model_parallel_size} needs "
            f"megatron_training.no_pad_to_seq_lengths (false) to be true",
            {"megatron_training.no_pad_to_seq_lengths": True},
            {"rl_config.use_remove_padding": False},
        )
    if rl.is_multimodal:
        yield _violation(
            "remove_padding_text_only",
            {"rl_config.use_remove_padding": True, "rl_config.is_multimodal": True},
            "rl_config.use_remove_padding and rl_config.is_multimodal exclude each other",
            {"rl_config.use_remove_padding": False},
        )


def _roles(cfg: RunConfig) -> Iterator[Violation]:
    rl = cfg.rl_config
    if rl is None or cfg.is_supervised:
        return
    if rl.use_integrated_worker:
        if rl.reference_resource is not None:
            yield _violation(
                "integrated_reference",
                {"rl_config.use_integrated_worker": True, "rl_config.reference_resource": rl.reference_resource.num_npus},
                "rl_config.reference_resource must be left out while use_integrated_worker is true: the "
                "reference shares the actor's "
                "devices",
                {"rl_config.reference_resource": None},
            )
        if "ref_config" in cfg.set_keys:
            yield _violation(
                "integrated_reference",
                {"rl_config.use_integrated_worker": True, "ref_config": "present"},
                "the group ref_config must be left out while rl_config.use_integrated_worker is true: the "
                "reference uses the actor's "
                "settings (its weights: rl_config.integrated_mode_config.ref_model_load_path)",
                {"ref_config": None},
            )
        if rl.reward_resource is not None and cfg.reward_config is None:
            yield _violation(
                "reward_group",
                {"rl_config.reward_resource": rl.reward_resource.num_npus, "reward_config": None},
                "rl_config.reward_resource is set but there is no group reward_config for the reward model",
                {"rl_config.reward_resource": None},
            )
    else:
        if rl.integrated_mode_config is not None:
            yield _violation(
                "integrated_mode",
                {"rl_config.use_integrated_worker": False, "rl_config.integrated_mode_config": "present"},
                "rl_config.integrated_mode_config must be left out while use_integrated_worker is false",
                {"rl_config.integrated_mode_config": None},
            )
        for group, needed in (("ref_config", True), ("reward_config", not rl.rule_reward)):
            if needed and group not in cfg.set_keys:
                yield _violation(
                    "own_role_group",
                    {"rl_config.use_integrated_worker": False, group: None},
                    f"the group {group} is needed while rl_config.use_integrated_worker is false",
                )
    if rl.share_backbone and not cfg.actor_config.lora_target_modules:
        yield _violation(
            "share_backbone_lora",
            {"rl_config.share_backbone": True, "megatron_training.lora_target_modules": cfg.actor_config.lora_target_modules},
            "rl_config.share_backbone needs megatron_training.lora_target_modules: the reference is the actor "
            "with its adapters off",
            {"rl_config.share_backbone": False},
        )
    if rl.share_backbone and cfg.stage == "ray_dapo":
        yield _violation(
            "share_backbone_stage",
            {"rl_config.share_backbone": True, "megatron_training.stage": "ray_dapo"},
            "rl_config.share_backbone has no place in stage ray_dapo, which has no reference model",
            {"rl_config.share_backbone": False},
        )
    if rl.adv_estimator == "gae" and cfg.critic_config is None:
        yield _violation(
            "critic_group",
            {"rl_config.adv_estimator": "gae", "critic_config": None},
            "rl_config.adv_estimator gae needs the group critic_config: it learns the values",
        )


def _rewards(cfg: RunConfig) -> Iterator[Violation]:
    rl = cfg.rl_config
    if rl is None or cfg.is_supervised:
        return
    functions, weights = (
        ("reward_funcs", "reward_weights") if rl.reward_funcs is not None else ("verifier_function", "verifier_weight")
    )
    if rl.rule_reward and len(rl.verifier_function) != len(rl.verifier_weight):
        count = len(rl.verifier_function)
        yield _violation(
            "one_weight_each",
            {f"rl_config.{functions}": rl.verifier_function, f"rl_config.{weights}": rl.verifier_weight},
            f"rl_config.{functions} ({count} entries: {', '.join(rl.verifier_function)}) and rl_config.{weights} "
            f"({len(rl.verifier_weight)} entries) must have the same length",
            {f"rl_config.{weights}": (rl.verifier_weight + [1.0] * count)[:count]},
        )
    scored_by_rules = rl.rule_reward and rl.verifier_function
    if not (scored_by_rules or cfg.reward_config is not None or rl.reward_model or rl.judge_url):
        yield _violation(
            "some_reward",
            {"rl_config.rule_reward": rl.rule_reward, "rl_config.reward_model": None, "reward_config": None},
            "nothing scores the responses: rl_config.rule_reward is false and there is no reward_config, "
            "reward_model or judge_url",
            {"rl_config.rule_reward": True},
        )
    if rl.overlong_buffer_enable and cfg.generate_config is not None:
        limit = cfg.generate_config.sampling_config.max_tokens
        if rl.rollout_max_tokens != limit:
            yield _violation(
                "overlong_limit",
                {"rl_config.rollout_max_tokens": rl.rollout_max_tokens, "generate_config.sampling_config.max_tokens": limit},
                f"rl_config.rollout_max_tokens ({rl.rollout_max_tokens}) must equal "
                f"generate_config.sampling_config.max_tokens ({limit}) "
                f"while overlong_buffer_enable is true",
                {"rl_config.rollout_max_tokens": limit},
            )
        if not 0 < rl.overlong_buffer < limit:
            yield _violation(
                "overlong_buffer",
                {"rl_config.overlong_buffer": rl.overlong_buffer, "generate_config.sampling_config.max_tokens": limit},
                f"rl_config.overlong_buffer ({rl.overlong_buffer}) must be between 1 and "
                "generate_config.sampling_config.max_tokens - 1 "
                f"({limit - 1})",
                {"rl_config.overlong_buffer": min(max(rl.overlong_buffer, 1), limit - 1)},
            )
    if rl.filter_groups_enable and rl.filter_groups_metric not in rl.verifier_function:
        yield _violation(
            "filter_metric",
            {"rl_config.filter_groups_metric": rl.filter_groups_metric, "rl_config.verifier_function": rl.verifier_function},
            f"rl_config.filter_groups_metric ({rl.filter_groups_metric}) must be one of rl_config.{functions} "
            f"({', '.join(rl.verifier_function)})",
            *({"rl_config.filter_groups_metric": name} for name in rl.verifier_function[:1]),
        )
    if rl.filter_groups_enable and rl.dynamic_sample:
        yield _violation(
            "one_filter",
            {"rl_config.filter_groups_enable": True, "rl_config.dynamic_sample": True},
            "rl_config.filter_groups_enable and rl_config.dynamic_sample replace groups in two ways; set only one of them",
            {"rl_config.dynamic_sample": False},
            {"rl_config.filter_groups_enable": False},
        )
    if "soft_overlong" in rl.verifier_function and rl.soft_cache_length is None:
        yield _violation(
            "soft_cache_length",
            {"rl_config.verifier_function": rl.verifier_function, "rl_config.soft_cache_length": None},
            "rl_config.soft_cache_length is not set, but the reward function soft_overlong needs it",
        )


def _losses(cfg: RunConfig) -> Iterator[Violation]:
    rl = cfg.rl_config
    if rl is None or cfg.is_supervised:
        return
    objective = resolve_objective(cfg)
    if rl.clip_higher_enable and rl.clip_ratio_low > rl.clip_ratio_high:
        yield _violation(
            "clip_order",
            {"rl_config.clip_ratio_low": rl.clip_ratio_low, "rl_config.clip_ratio_high": rl.clip_ratio_high},
            f"rl_config.clip_ratio_low ({rl.clip_ratio_low:g}) must be at most rl_config.clip_ratio_high "
            f"({rl.clip_ratio_high:g})",
            {"rl_config.clip_ratio_low": rl.clip_ratio_high},
            {"rl_config.clip_ratio_high": rl.clip_ratio_low},
        )
    if objective.ratio == "cispo_cap" and (not rl.clip_higher_enable or rl.clip_ratio_high < 1):
        yield _violation(
            "absolute_cap",
            {
                "rl_config.loss_type": "cispo_cap",
                "rl_config.clip_higher_enable": rl.clip_higher_enable,
                "rl_config.clip_ratio_high": rl.clip_ratio_high,
            },
            f"rl_config.loss_type cispo_cap needs clip_higher_enable (is {str(rl.clip_higher_enable).lower()}) "
            "and takes clip_ratio_high "
            f"({rl.clip_ratio_high:g}) as an absolute cap, which must be at least 1; loss_type cispo takes it relative to 1",
            {"rl_config.clip_higher_enable": True, "rl_config.clip_ratio_high": max(5.0, rl.clip_ratio_high)},
            {"rl_config.loss_type": "cispo"},
        )
    if rl.clip_ratio_c is not None and rl.delta is not None:
        yield _violation(
            "one_negative_bound",
            {"rl_config.clip_ratio_c": rl.clip_ratio_c, "rl_config.delta": rl.delta},
            f"rl_config.clip_ratio_c ({rl.clip_ratio_c:g}) and rl_config.delta ({rl.delta:g}) bound the same "
            "branch; set only one",
            {"rl_config.clip_ratio_c": None},
            {"rl_config.delta": None},
        )
    if rl.clip_ratio_c is not None and rl.clip_ratio_c <= 1:
        yield _violation(
            "dual_clip",
            {"rl_config.clip_ratio_c": rl.clip_ratio_c},
            f"rl_config.clip_ratio_c ({rl.clip_ratio_c:g}) must be greater than 1",
            {"rl_config.clip_ratio_c": 3.0},
        )
    upper = 1 + objective.clip_high
    if rl.delta is not None and objective.ratio == "clip" and rl.delta < upper:
        yield _violation(
            "two_sided_clip",
            {"rl_config.delta": rl.delta},
            f"rl_config.delta ({rl.delta:g}) must be at least 1 + the upper clip ratio ({upper:g})",
            {"rl_config.delta": round(upper, 6)},
        )
    for name in ("clip_ratio_c", "delta"):
        if getattr(rl, name) is not None and objective.ratio != "clip":
            yield _violation(
                "bound_without_clip",
                {f"rl_config.{name}": getattr(rl, name), "rl_config.loss_type": rl.loss_type},
                f"rl_config.{name} ({getattr(rl, name):g}) has no place in loss_type {rl.loss_type}, which does "
                "not clip this way",
                {f"rl_config.{name}": None},
            )
    if rl.loss_type == "gspo" and rl.importance_sampling_level == "token":
        yield _violation(
            "gspo_level",
            {"rl_config.loss_type": "gspo", "rl_config.importance_sampling_level": "token"},
            "rl_config.importance_sampling_level token contradicts loss_type gspo, whose ratio is that of the sequence",
            {"rl_config.importance_sampling_level": "sequence"},
            {"rl_config.loss_type": "grpo"},
        )
    n, counted = rl.n_samples_per_prompt, "n_samples_per_prompt" if rl.num_generations is None else "num_generations"
    undefined = (
        rl.adv_estimator in GROUP_ESTIMATORS and rl.adv_estimator != "group_norm" or rl.scale_rewards in ("group", "gdpo")
    )
    if rl.num_generations is None and n == 1 and rl.adv_estimator in GROUP_ESTIMATORS and undefined:
        yield _violation(
            "group_of_two",
            {f"rl_config.{counted}": n, "rl_config.adv_estimator": rl.adv_estimator},
            f"rl_config.{counted} ({n}) must be at least 2 for adv_estimator {rl.adv_estimator}: it compares the "
            "responses of a prompt",
            {f"rl_config.{counted}": 2},
        )
    if rl.use_kl_in_reward and (rl.adv_estimator == "gdpo" or rl.scale_rewards == "gdpo"):
        yield _violation(
            "gdpo_kl",
            {"rl_config.use_kl_in_reward": True, "rl_config.adv_estimator": rl.adv_estimator},
            "rl_config.use_kl_in_reward has no place with gdpo, which normalizes each reward function by itself",
            {"rl_config.use_kl_in_reward": False},
        )
    low, high = rl.rollout_importance_sampling_threshold_min, rl.rollout_importance_sampling_threshold
    if low is not None and low > high:
        yield _violation(
            "correction_bounds",
            {
                "rl_config.rollout_importance_sampling_threshold_min": low,
                "rl_config.rollout_importance_sampling_threshold": high,
            },
            f"rl_config.rollout_importance_sampling_threshold_min ({low:g}) must be at most "
            "rollout_importance_sampling_threshold "
            f"({high:g})",
            {"rl_config.rollout_importance_sampling_threshold_min": high},
        )
    mode = rl.rollout_importance_sampling_mode
    if low is not None and mode is not None and not mode.endswith("mask"):
        yield _violation(
            "correction_lower_bound",
            {"rl_config.rollout_importance_sampling_threshold_min": low, "rl_config.rollout_importance_sampling_mode": mode},
            f"rl_config.rollout_importance_sampling_threshold_min ({low:g}) bounds the masking modes only, not {mode}",
            {"rl_config.rollout_importance_sampling_threshold_min": None},
        )


# key: (smallest, largest) value; None is open; "0<" excludes zero.
_RANGES: dict[str, tuple[float | None, float | None, bool]] = {
    "rl_config.epochs": (1, None, False),
    "rl_config.clip_ratio": (0, None, False),
    "rl_config.clip_ratio_low": (0, 1, False),
    "rl_config.clip_ratio_high": (0, None, False),
    "rl_config.init_kl_coef": (0, None, False),
    "rl_config.gamma": (0, 1, False),
    "rl_config.lam": (0, 1, False),
    "rl_config.adv_epsilon": (0, None, False),
    "rl_config.top_entropy_quantile": (0, 1, True),
    "rl_config.tau_pos": (0, None, True),
    "rl_config.tau_neg": (0, None, True),
    "rl_config.rollout_importance_sampling_threshold": (0, None, True),
    "rl_config.reward_failure_limit": (0, 1, False),
    "rl_config.reward_timeout_s": (0, None, True),
    "rl_config.reward_memory_gib": (0, None, True),
    "rl_config.ref_model_sync_steps": (1, None, False),
    "rl_config.ref_model_mixup_alpha": (0, 1, False),
    "rl_config.wait_timeout_s": (0, None, True),
    "rl_config.max_prompt_length": (1, None, False),
    "rl_config.kl_horizon": (1, None, False),
    "generate_config.gpu_memory_utilization": (0, 1, True),
    "generate_config.kv_cache_memory_gib": (0, None, True),
    "generate_config.max_num_seqs": (1, None, False),
    "generate_config.sampling_config.max_tokens": (1, None, False),
    "generate_config.sampling_config.temperature": (0, None, False),
    "generate_config.sampling_config.top_p": (0, 1, True),
    "generate_config.sampling_config.min_p": (0, 1, False),
    "actor_config.lr": (0, None, False),
    "actor_config.min_lr": (0, None, False),
    "actor_config.clip_grad": (0, None, False),
    "actor_config.train_iters": (0, None, False),
    "actor_config.lr_warmup_fraction": (0, 1, False),
    "actor_config.loss_chunk_size": (1, None, False),
    "actor_config.lora_r": (1, None, False),
    "actor_config.dpo_label_smoothing": (0, 0.5, False),
    "actor_config.dpo_beta": (0, None, True),
}


def _ranges(cfg: RunConfig) -> Iterator[Violation]:
    for key, (low, high, open_below) in _RANGES.items():
        holder: Any = cfg
        *groups, name = key.split(".")
        for group in groups:
            holder = None if holder is None else getattr(holder, group)
        value = None if holder is None else getattr(holder, name)
        if value is None:
            continue
        below = low is not None and (value <= low if open_below else value < low)
        if below or (high is not None and value > high):
            bounds = [f"{'greater than' if open_below else 'at least'} {low:g}"] if low is not None else []
            bounds += [f"at most {high:g}"] if high is not None else []
            mended = () if below and open_below else ({key: low if below else high},)
            yield _violation("range", {key: value}, f"{key} ({value:g}) must be {' and '.join(bounds)}", *mended)


def _second_spellings(cfg: RunConfig) -> Iterator[Violation]:
    """Two keys that say the same thing must say the same value."""
    rl = cfg.rl_config
    if rl is None or cfg.is_supervised:
        return
    set_rl = cfg.set_keys.get("rl_config", frozenset())
    original = cfg.spelled

    def differ(first: str, second: str, a: Any, b: Any) -> Violation:
        return _violation(
            "same_meaning",
            {first: a, second: b},
            f"{first} ({a}) and {second} ({b}) say the same thing and must have the same value",
            {second: a},
            {first: b},
        )

    pairs = [
        ("rl_config.num_generations", "rl_config.n_samples_per_prompt"),
        ("rl_config.num_iterations", "rl_config.epochs"),
        ("rl_config.max_completion_length", "generate_config.sampling_config.max_tokens"),
        ("rl_config.reward_funcs", "rl_config.verifier_function"),
        ("rl_config.reward_weights", "rl_config.verifier_weight"),
    ]
    if rl.num_generations is not None:
        pairs.append(("rl_config.beta", "rl_config.init_kl_coef"))
    for first, second in pairs:
        if first in original and second in original and original[first] != original[second]:
            yield differ(first, second, original[first], original[second])
    if rl.num_generations is None:
        for name in ("steps_per_generation", "generation_batch_size"):
            if name in set_rl and getattr(rl, name) is not None:
                yield _violation(
                    "completion_counting",
                    {f"rl_config.{name}": getattr(rl, name), "rl_config.num_generations": None},
                    f"rl_config.{name} ({getattr(rl, name)}) belongs to completion-level counting, which needs "
                    "rl_config.num_generations; "
                    f"with n_samples_per_prompt the keys are global_batch_size and mini_batch_size, both in prompts",
                    {"rl_config.num_generations": rl.n_samples_per_prompt},
                    {f"rl_config.{name}": None},
                )
    elif "mini_batch_size" in set_rl and cfg.actor_config.global_batch_size is not None:
        step = cfg.actor_config.global_batch_size
        if rl.mini_batch_size * rl.n_samples_per_prompt != step:
            yield _violation(
                "same_meaning",
                {"rl_config.mini_batch_size": rl.mini_batch_size, "megatron_training.global_batch_size": step},
                f"rl_config.mini_batch_size ({rl.mini_batch_size} prompts x num_generations {rl.n_samples_per_prompt}) and "
                f"megatron_training.global_batch_size ({step} completions) both say the size of an optimizer step "
                "and must agree",
                *(
                    {"rl_config.mini_batch_size": size}
                    for size in [step // rl.n_samples_per_prompt]
                    if step % rl.n_samples_per_prompt == 0
                ),
            )
    if rl.reward_weights is not None and rl.reward_funcs is None:
        yield _violation(
            "weights_without_functions",
            {"rl_config.reward_weights": rl.reward_weights, "rl_config.reward_funcs": None},
            "rl_config.reward_weights is set without rl_config.reward_funcs; beside verifier_function the key is "
            "verifier_weight",
        )
    if cfg.actor_config.lr_warmup_fraction and cfg.actor_config.lr_warmup_iters:
        fraction, iters = cfg.actor_config.lr_warmup_fraction, cfg.actor_config.lr_warmup_iters
        yield _violation(
            "one_warmup",
            {"actor_config.lr_warmup_fraction": fraction, "actor_config.lr_warmup_iters": iters},
            f"actor_config.lr_warmup_fraction ({fraction:g}) and actor_config.lr_warmup_iters ({iters}) exclude each other",
            {"actor_config.lr_warmup_iters": 0},
            {"actor_config.lr_warmup_fraction": None},
        )


def _rollout_modes(cfg: RunConfig) -> Iterator[Violation]:
    rl, generate = cfg.rl_config, cfg.generate_config
    if rl is None or generate is None or cfg.is_supervised:
        return
    if rl.partial_rollout_max_split > 1 and rl.guarantee_order:
        yield _violation(
            "partial_rollout_order",
            {"rl_config.partial_rollout_max_split": rl.partial_rollout_max_split, "rl_config.guarantee_order": True},
            f"rl_config.partial_rollout_max_split ({rl.partial_rollout_max_split}) above 1 and "
            "rl_config.guarantee_order exclude each other",
            {"rl_config.partial_rollout_max_split": 1},
            {"rl_config.guarantee_order": False},
        )
    if rl.partial_rollout_max_split > 1 and cfg.actor_config.num_layers_per_virtual_pipeline_stage:
        yield _violation(
            "partial_rollout_vpp",
            {
                "rl_config.partial_rollout_max_split": rl.partial_rollout_max_split,
                "actor_config.num_layers_per_virtual_pipeline_stage": cfg.actor_config.num_layers_per_virtual_pipeline_stage,
            },
            "rl_config.partial_rollout_max_split above 1 and num_layers_per_virtual_pipeline_stage exclude each other",
            {"rl_config.partial_rollout_max_split": 1},
        )
    if not rl.multi_turn_enable:
        return
    limit = generate.sampling_config.max_tokens
    if rl.max_total_response_length < limit:
        yield _violation(
            "tool_response_length",
            {
                "rl_config.max_total_response_length": rl.max_total_response_length,
                "generate_config.sampling_config.max_tokens": limit,
            },
            f"rl_config.max_total_response_length ({rl.max_total_response_length}) must be at least "
            f"generate_config.sampling_config.max_tokens ({limit})",
            {"rl_config.max_total_response_length": limit},
        )
    if not rl.async_engine:
        yield _violation(
            "tools_need_async",
            {"rl_config.multi_turn_enable": True, "rl_config.async_engine": False},
            "rl_config.multi_turn_enable needs rl_config.async_engine",
            {"rl_config.async_engine": True},
        )


_RULES: tuple[Rule, ...] = (
    _stage,
    _number_format,
    _lengths,
    _packing,
    _roles,
    _rewards,
    _losses,
    _ranges,
    _second_spellings,
    _rollout_modes,
)


# --- what a run needs beyond being consistent -------------------------------------------------------------------------------


def missing_for_training(cfg: RunConfig) -> list[str]:
    """Return a sentence for each key that a training run needs and the run file leaves unset."""
    actor = cfg.actor_config
    needed = {"train_iters": actor.train_iters, "lr": actor.lr, "data_path": actor.data_path}
    needed |= {"tokenizer_name_or_path": actor.tokenizer_name_or_path}
    return [f"{name} is not set in megatron_training or actor_config" for name, value in needed.items() if value is None]


def unavailable(cfg: RunConfig) -> list[str]:
    """Return a sentence for each feature that the run file switches on and this version does not have.

    They are accepted by `validate`, so that run files of MindSpeed-RL load; a trainer must refuse to start with them.
    """
    found = [(cfg.actor_config.ai_framework is not None, "megatron_training.ai_framework", "torch is the only backend")]
    if (rl := cfg.rl_config) is not None:
        found += [
            (rl.multi_turn_enable, "rl_config.multi_turn_enable", "tools during the rollout are not available"),
            (
                rl.partial_rollout_max_split > 1,
                "rl_config.partial_rollout_max_split",
                "every response is finished in one rollout",
            ),
            (rl.is_multimodal, "rl_config.is_multimodal", "text models only"),
            (
                not rl.use_integrated_worker,
                "rl_config.use_integrated_worker",
                "actor, reference and rollout share their devices",
            ),
        ]
    return [f"{key}: {reason}" for is_on, key, reason in found if is_on]
