"""Every rule between the keys of a run file, all checked at once, each with the nearest values that mend it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

from mindspeed_rl.config.keys import ROLE_GROUPS, collect_keys
from mindspeed_rl.config.rules.batch_rules import Breach, breaches
from mindspeed_rl.config.rules.layout_rules import layout_violations
from mindspeed_rl.config.rules.nearest import is_sound, nearest_single, nearest_together
from mindspeed_rl.config.rules.objective_rules import OBJECTIVE_RULES
from mindspeed_rl.config.rules.run_rules import RUN_RULES
from mindspeed_rl.config.rules.violation import Violation, broken, out_of_range
from mindspeed_rl.config.run import RunConfig
from mindspeed_rl.config.sizes import Sizes, size_keys


def validate(cfg: RunConfig, num_nodes: int = 1) -> list[Violation]:
    """Return every broken rule of a run file; empty for a sound one.

    Args:
        num_nodes: machines of the run; reward rules and dynamic sampling work on each of them.
    """
    if num_nodes < 1:
        raise ValueError(f"the number of nodes is {num_nodes}, but must be at least 1")
    outside = list(_out_of_range(cfg))
    if outside:  # no other rule means anything beside numbers that are none, and the search for nearest values would not end
        return [*outside, *(violation for rule in (*RUN_RULES, *OBJECTIVE_RULES) for violation in rule(cfg))]
    return [*batch_violations(cfg, num_nodes), *other_violations(cfg, num_nodes)]


def is_valid(cfg: RunConfig, num_nodes: int = 1) -> bool:
    """Return whether `validate` finds nothing, without its search for nearest values: for those who try many run files."""
    if any(True for _ in _out_of_range(cfg)) or cfg.sizes is None:
        return False
    sizes = replace(cfg.sizes, num_nodes=num_nodes)
    if not sizes.has_layouts or not is_sound(sizes):
        return False
    return not any(True for rule in (layout_violations, *RUN_RULES, *OBJECTIVE_RULES) for _ in rule(cfg))


def other_violations(cfg: RunConfig, num_nodes: int) -> list[Violation]:
    """Return the broken rules that are not about batch sizes."""
    layouts = _with_nearest(cfg, layout_violations, num_nodes)
    return [*layouts, *(violation for rule in (*RUN_RULES, *OBJECTIVE_RULES) for violation in rule(cfg))]


def _out_of_range(cfg: RunConfig) -> Iterator[Violation]:
    """Yield the numbers of a run file outside the ranges of their keys; rules of their own check those of algorithms."""
    for path, key in collect_keys().items():
        group, _, name = path.rpartition(".")
        if key.range is None:
            continue
        if group == "megatron_training":
            roles = {role: getattr(cfg, role) for role in ROLE_GROUPS}
            values = {f"{role}.{name}": getattr(keys, name) for role, keys in roles.items() if keys is not None}
        else:
            holder: Any = cfg
            for part in path.split("."):
                holder = None if holder is None else getattr(holder, part)
            values = {path: holder}
        checked: list[object] = []
        for where, value in values.items():
            items = value if isinstance(value, list) else [value]
            outside = [item for item in items if isinstance(item, (int, float)) and not key.range.contain(item)]
            if outside and value not in checked:  # a shared key is reported once
                checked.append(value)
                violation = out_of_range(where, outside[0], key.range)
                # a suggestion for one item of a list is no value of the key
                yield replace(violation, nearest=()) if isinstance(value, list) else violation


# --- batch sizes -----------------------------------------------------------------------------------------------------------


def batch_violations(cfg: RunConfig, num_nodes: int) -> Iterator[Violation]:
    """Yield the broken rules between batch sizes and devices; each proposal satisfies all of them."""
    if cfg.actor_config.global_batch_size is None:
        yield broken("is_set", {"megatron_training.global_batch_size": None}, "megatron_training.global_batch_size is not set")
    if cfg.placement.world_size is None:
        name = "rl_config.actor_resource.num_npus"
        unit = cfg.actor_config.model_parallel_size
        yield broken("is_set", {name: None}, f"{name} is not set; it is a multiple of {unit} here")
    if cfg.sizes is None:
        return
    sizes, keys = replace(cfg.sizes, num_nodes=num_nodes), size_keys(cfg)
    if not sizes.has_layouts:
        return  # the layout rules name the parallel size that is below 1
    found = list(breaches(sizes))
    together: dict[str, int] | None = None
    for breach in found:
        singles = [{keys[name]: value} for name in breach.names for value in nearest_single(sizes, name)[:2]]
        if not singles and breach.names:
            if together is None:
                together = nearest_together(sizes, (name for other in found for name in other.names))
            singles = [{keys[name]: value for name, value in together.items()}] if together else []
        yield Violation(breach.rule, _named(breach, sizes, keys), breach.text(keys), tuple(singles))


def _named(breach: Breach, sizes: Sizes, keys: dict[str, str]) -> dict[str, Any]:
    names = breach.names or ("generation_batch_size", "steps_per_generation")
    return {keys[name]: sizes.value(name) for name in names}


# --- layouts: the nearest values are found by trying the rules again ----------------------------------------------------------


def _with_nearest(cfg: RunConfig, rules: Callable[[RunConfig], Iterable[Violation]], num_nodes: int) -> Iterator[Violation]:
    found = list(rules(cfg))
    names = {violation.rule for violation in found}
    for violation in found:
        options = []
        for key, value in violation.keys.items():
            if key.rpartition(".")[2].endswith("parallel_size") and isinstance(value, int):
                options += [{key: other} for other in _nearest_layout(cfg, rules, violation.rule, names, key, value, num_nodes)]
        yield Violation(violation.rule, violation.keys, violation.message, violation.nearest or tuple(options))


def _nearest_layout(
    cfg: RunConfig,
    rules: Callable[[RunConfig], Iterable[Violation]],
    rule: str,
    known: set[str],
    key: str,
    current: int,
    num_nodes: int,
) -> list[int]:
    """Return the nearest sizes below and above that mend `rule` and break no other rule of layout or batch."""
    nearest: list[int] = []
    group, _, name = key.partition(".")
    known_batch = _broken_batch_rules(cfg, num_nodes)
    for candidates in (range(current - 1, 0, -1), range(current + 1, 4 * current + 1)):
        for value in candidates:
            roles = ("megatron_training", "actor_config", "ref_config") if group == "megatron_training" else (group,)
            trial = replace(cfg, **{role: replace(getattr(cfg, role), **{name: value}) for role in roles})
            still = {violation.rule for violation in rules(trial)}
            if rule not in still and still <= known and _broken_batch_rules(trial, num_nodes) <= known_batch:
                nearest.append(value)
                break
    return nearest


def _broken_batch_rules(cfg: RunConfig, num_nodes: int) -> set[str]:
    if cfg.sizes is None or not cfg.sizes.has_layouts:
        return set()
    return {breach.rule for breach in breaches(replace(cfg.sizes, num_nodes=num_nodes))}


# --- what a run needs beyond being consistent -------------------------------------------------------------------------------


def missing_for_training(cfg: RunConfig) -> list[str]:
    """Return a sentence for each key that a training run needs and the run file leaves unset."""
    actor = cfg.actor_config
    length = actor.train_iters if actor.train_epochs is None else actor.train_epochs
    needed = {"train_iters": length, "lr": actor.lr, "data_path": actor.data_path}
    needed |= {"tokenizer_name_or_path": actor.tokenizer_name_or_path}
    return [f"{name} is not set in megatron_training or actor_config" for name, value in needed.items() if value is None]


_SHARED_LAYOUT = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
)


def unavailable(cfg: RunConfig) -> list[str]:
    """Return a sentence for each feature that the run file switches on and this version does not have.

    They are accepted by `validate`, so that run files of MindSpeed-RL load; a trainer must refuse to start with them.
    """
    found = [
        (cfg.actor_config.ai_framework is not None, "megatron_training.ai_framework", "torch is the only backend"),
        (
            cfg.actor_config.save is not None and cfg.actor_config.ckpt_format == "torch",
            "megatron_training.ckpt_format",
            "training writes torch_dist; tools/convert_ckpt.py makes one file a rank of it",
        ),
    ]
    if (rl := cfg.rl_config) is not None:
        found += [
            (
                rl.trainer_mode != "sync" and not cfg.placement.disaggregated,
                "rl_config.trainer_mode",
                f"{rl.trainer_mode} generates while it trains, which needs rollout servers on devices of their own: set "
                "rl_config.use_integrated_worker: false with rl_config.rollout_resource, or generate_config.vllm_server_host",
            ),
            (rl.is_multimodal, "rl_config.is_multimodal", "text models only"),
        ]
        shared = rl.actor_resource.num_npus
        critic = rl.critic_resource
        apart = rl.use_integrated_worker and critic is not None and critic.num_npus not in (None, shared)
        found.append((apart, "rl_config.critic_resource", f"the critic shares the {shared} devices of the actor"))
        for role in ("ref", "critic", "reward"):
            own = getattr(cfg, f"{role}_config")
            if own is None or cfg.placement.dedicated.get(role):
                continue
            for key in _SHARED_LAYOUT:
                theirs, actors = getattr(own, key), getattr(cfg.actor_config, key)
                found.append(
                    (theirs != actors, f"{role}_config.{key}", f"is {theirs}; roles share the actor's layout, {actors}")
                )
    return [f"{key}: {reason}" for is_on, key, reason in found if is_on]
