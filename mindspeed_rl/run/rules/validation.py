"""All rules between the keys of a run file, checked at once, each with suggestions of one key."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from mindspeed_rl.config.keys import ROLE_GROUPS, collect_keys
from mindspeed_rl.config.run import RunConfig
from mindspeed_rl.run.batch_sizes import size_keys
from mindspeed_rl.run.divisions import move_devices, moves_devices
from mindspeed_rl.run.draft import decide
from mindspeed_rl.run.record import Run
from mindspeed_rl.run.rules.batch_rules import ROLLOUT_SIZES, find_size_violations, suggest_values
from mindspeed_rl.run.rules.layout_rules import layout_violations
from mindspeed_rl.run.rules.objective_rules import OBJECTIVE_RULES
from mindspeed_rl.run.rules.run_rules import RUN_RULES
from mindspeed_rl.run.rules.violation import Broken, Violation, fill_keys, find_key, read_key, violate_range

#: all rules except for sizes and layouts, in the order of the report
_RULES = (*RUN_RULES, *OBJECTIVE_RULES)


def validate(run: Run) -> list[Violation]:
    """Return every broken rule of a draft; empty for a sound one."""
    read = partial(read_key, run)
    outside = [item.fill(read) for item in _out_of_range(run)]
    # rules of sizes mean nothing for numbers out of range, and the search for suggestions would not end
    sizes = [] if outside else [*_batch_violations(run), *_suggest_layouts(run)]
    found = [*outside, *sizes, *(item.fill(read, find_key) for rule in _RULES for item in rule(run))]
    return found or list(_moved_violations(run))


def is_valid(run: Run) -> bool:
    """Return True where `validate` finds nothing, without its search for suggestions: for searches over many run files."""
    sizes = run.sizes
    if sizes is None or any(True for _ in _out_of_range(run)):
        return False
    if not sizes.has_layouts or any(True for _ in find_size_violations(sizes)):
        return False
    if any(True for rule in (layout_violations, *_RULES) for _ in rule(run)):
        return False
    return not moves_devices(run.config) or is_valid(_decide_moved(run))


def _decide_moved(run: Run) -> Run:
    """Return the run once devices of the rollout train."""
    return decide(move_devices(run.config), run.num_nodes, run.platform)


def _moved_violations(run: Run) -> Iterator[Violation]:
    """Yield the rules that a sound run breaks once devices of the rollout train."""
    if not moves_devices(run.config):
        return
    name = "rl_config.elastic_training_devices"
    for violation in validate(_decide_moved(run)):
        text = f"{name} ({run.rl.elastic_training_devices}): with these devices moved, {violation.message}"
        yield Violation(f"moved_{violation.rule}", {name: run.rl.elastic_training_devices, **violation.keys}, text)


def _out_of_range(run: Run) -> Iterator[Broken]:
    """Check the numbers of a run file against the ranges of their keys; numbers of algorithms have their rules."""
    for path, key in collect_keys().items():
        if key.range is None:
            continue
        checked: list[object] = []
        for where, value in _list_values(run.config, path).items():
            items = value if isinstance(value, list) else [value]
            outside = [item for item in items if isinstance(item, (int, float)) and not key.range.contain(item)]
            if outside and value not in checked:  # a shared key is reported once
                checked.append(value)
                item = violate_range(where, outside[0], key.range)
                # a suggestion for one item of a list is not a value of the key
                yield replace(item, suggestions=()) if isinstance(value, list) else item


def _list_values(cfg: RunConfig, path: str) -> dict[str, object]:
    """Return the values of a key by dotted name, of each role where it is one of theirs; None where its group is left out."""
    group, _, name = path.rpartition(".")
    if group == "megatron_training":
        roles = {role: getattr(cfg, role) for role in ROLE_GROUPS}
        return {f"{role}.{name}": getattr(keys, name) for role, keys in roles.items() if keys is not None}
    value: object = cfg
    for part in path.split("."):
        value = None if value is None else getattr(value, part)
    return {path: value}


def _batch_violations(run: Run) -> Iterator[Violation]:
    """Yield the broken rules between batch sizes and devices; each suggestion satisfies all of them."""
    cfg, sizes = run.config, run.sizes
    if cfg.actor_config.global_batch_size is None:
        name = "megatron_training.global_batch_size"
        yield Violation("is_set", {name: None}, f"{name} is not set")
    if run.placement.world_size is None:
        name, unit = "rl_config.actor_resource.num_npus", cfg.actor_config.model_parallel_size
        yield Violation("is_set", {name: None}, f"{name} is not set; it is a multiple of {unit} here")
    # where a parallel size is below 1 the layout rules name it
    if sizes is None or not sizes.has_layouts:
        return
    keys = size_keys(cfg)
    for item in find_size_violations(sizes):
        suggestions = tuple({keys[name]: value} for name in item.names for value in suggest_values(sizes, name))
        values = {keys[name]: sizes.value(name) for name in item.names or ROLLOUT_SIZES}
        message, _ = fill_keys(item.sentence, sizes.value, keys.__getitem__)
        yield Violation(item.rule, values, message, suggestions)


def _suggest_layouts(run: Run) -> Iterator[Violation]:
    """Yield the broken layout rules, with parallel sizes that satisfy them."""
    violations = list(layout_violations(run))
    rules = {violation.rule for violation in violations}
    for violation in violations:
        options = [
            {key: size}
            for key, value in violation.keys.items()
            if key.rpartition(".")[2].endswith("parallel_size") and isinstance(value, int)
            for size in _suggest_sizes(run, violation.rule, rules, key, value)
        ]
        yield violation if violation.suggestions else replace(violation, suggestions=tuple(options))


def _suggest_sizes(run: Run, rule: str, known: set[str], key: str, current: int) -> Iterator[int]:
    """Yield the nearest sizes below and above that satisfy `rule` and break no other rule of layout or batch."""
    cfg = run.config
    group, _, name = key.partition(".")
    roles = ("megatron_training", "actor_config", "ref_config") if group == "megatron_training" else (group,)
    known_batch = _broken_batch_rules(run)
    for candidates in (range(current - 1, 0, -1), range(current + 1, 4 * current + 1)):
        for value in candidates:
            sizes = {role: replace(getattr(cfg, role), **{name: value}) for role in roles}
            changed = decide(replace(cfg, **sizes), run.num_nodes, run.platform)
            broken = {violation.rule for violation in layout_violations(changed)}
            if rule not in broken and broken <= known and _broken_batch_rules(changed) <= known_batch:
                yield value
                break


def _broken_batch_rules(run: Run) -> set[str]:
    if run.sizes is None or not run.sizes.has_layouts:
        return set()
    return {violation.rule for violation in find_size_violations(run.sizes)}


# --- further requirements of a training run -------------------------------------------------------------------------------


def missing_for_training(run: Run) -> list[str]:
    """Return a sentence for each key that a training run needs and the run file leaves unset."""
    cfg = run.config
    actor, critic = cfg.actor_config, cfg.critic_config
    length = actor.train_iters if actor.train_epochs is None else actor.train_epochs
    needed = {"train_iters": length, "lr": actor.lr, "data_path": actor.data_path}
    # the folder of weights says more about a model without weights, once it is looked for
    needed |= {"load": actor.load or actor.pretrained_checkpoint or actor.tokenizer_name_or_path or None}
    missing = [f"{name} is not set in megatron_training or actor_config" for name, value in needed.items() if value is None]
    if run.objective is not None and run.objective.has_critic and critic is not None:
        missing += ["lr is not set in critic_config"] if critic.lr is None else []
    return missing


_SHARED_LAYOUT = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
)


def unavailable(run: Run) -> list[str]:
    """Return a sentence for each feature that the run file switches on and this version, or this run, does not have.

    `validate` accepts them, so that run files of MindSpeed-RL load; a run with them does not start.
    """
    cfg = run.config
    lacks = "not available in this version;"
    checks = [
        (cfg.actor_config.ai_framework is not None, "megatron_training.ai_framework", f"{lacks} torch is the only backend"),
        (
            cfg.actor_config.save is not None and cfg.actor_config.ckpt_format == "torch",
            "megatron_training.ckpt_format",
            f"{lacks} training writes torch_dist; tools/convert_ckpt.py makes one file a rank of it",
        ),
    ]
    if (rl := cfg.rl_config) is not None:
        checks += [
            (
                rl.trainer_mode != "sync" and not run.placement.disaggregated,
                "rl_config.trainer_mode",
                f"{rl.trainer_mode} generates while it trains, which needs rollout servers on devices of their own: set "
                "rl_config.use_integrated_worker: false with rl_config.rollout_resource, or generate_config.vllm_server_host",
            ),
        ]
        shared = rl.actor_resource.num_npus
        critic = rl.critic_resource
        differs = rl.use_integrated_worker and critic is not None and critic.num_npus not in (None, shared)
        checks.append((differs, "rl_config.critic_resource", f"the critic shares the {shared} devices of the actor"))
        for role in ("ref", "critic", "reward", "teacher"):
            config = getattr(cfg, f"{role}_config")
            if config is None or run.placement.dedicated.get(role):
                continue
            for key in _SHARED_LAYOUT:
                size, actors = getattr(config, key), getattr(cfg.actor_config, key)
                checks.append((size != actors, f"{role}_config.{key}", f"is {size}; roles share the actor's layout, {actors}"))
    return [f"{key}: {reason}" for is_on, key, reason in checks if is_on]
