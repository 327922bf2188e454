"""The layout of a run on the devices that are left of its own: the fastest that keeps the rules and fits, by the planner."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from mindspeed_rl.config.keys import ROLE_GROUPS
from mindspeed_rl.config.loader import build_run_config
from mindspeed_rl.config.run import RunConfig
from mindspeed_rl.config.run_files import apply_values, compose, locate
from mindspeed_rl.planner.devices import Device, find_device
from mindspeed_rl.planner.splits import ACCEPTED, SIZES, list_splits, plan_sound, rank_plans
from mindspeed_rl.run import Run
from mindspeed_rl.run.draft import draft

#: no layout splits a layer, or a sequence, over more devices
_MAX_SPLIT = 16
#: keys that say the layers of each pipeline stage
_STAGES = ("num_layer_list", "noop_layers", "num_layers_per_virtual_pipeline_stage")

_SHARED, _ENGINE, _RESOURCE = "megatron_training.", "generate_config.", "rl_config.actor_resource."

_Values = dict[str, object]


@dataclass(frozen=True)
class Shrinker:
    """Fit a run on fewer devices; what a user would write to resume it there by hand.

    Attributes:
        run: the run on all its devices.
        config_name, config_dir, overrides: its run file, as `load_run_config` takes them.
        resolve: `run.models.resolve_run`, which imports torch.
    """

    run: Run
    config_name: str
    config_dir: str | None
    overrides: Sequence[str]
    resolve: Callable[[RunConfig, int], Run]

    def __call__(self, num_devices: int, num_nodes: int) -> tuple[Run, list[str]]:
        """Return the run on so many devices or fewer, in the same run folder, and the keys that differ as "key=value".

        Raises:
            ValueError: no layout keeps the rules and fits.
        """
        directory, name = locate(self.config_name, self.config_dir)
        tree = apply_values(compose(directory, name, list(self.overrides)), {"run_dir": str(self.run.folder)})
        values, nodes = find_layout(self.run, num_devices=num_devices, num_nodes=num_nodes)
        cfg = build_run_config(apply_values(tree, values), config_name=name, config_dir=str(directory))
        return self.resolve(cfg, nodes), [f"{key}={json.dumps(value)}" for key, value in values.items()]


def find_layout(run: Run, *, num_devices: int, num_nodes: int) -> tuple[_Values, int]:
    """Return the keys of the fastest layout on the devices that are left, and its nodes; all other keys stay as they are.

    Devices that are dedicated to other roles keep them. Where no layout has all devices, whole nodes stay idle, or devices of
    the last one. Of layouts whose seconds are within 5 % the one that changes the fewest sizes is taken.

    Args:
        run: the run on all its devices, with the shapes of its models.
        num_devices: devices that are left, of all roles.
        num_nodes: nodes that they are on.

    Raises:
        ValueError: no layout keeps the rules and fits.
    """
    device = find_device(run)
    dedicated = sum(run.placement.dedicated.values())
    for count, nodes in _list_counts(num_devices - dedicated, num_nodes):
        fixed = _choose_engine(run, count)
        ranked = [
            (rank, values)
            for sizes in _list_layouts(run, count)
            if (rank := _rank(run, values := {**sizes, **fixed}, nodes, device)) is not None
        ]
        if ranked:
            return min(ranked, key=lambda entry: entry[0])[1], nodes
    others = f", of which other roles have {dedicated}" if dedicated else ""
    raise ValueError(
        f"rl_config.fault_tolerance.shrink: {num_devices} devices on {num_nodes} node(s) are left{others}, and on none of them "
        "does a layout of this run keep the rules and fit; give the command again when the others are back."
    )


def _list_counts(num_devices: int, num_nodes: int) -> list[tuple[int, int]]:
    """Return the numbers of devices and of nodes to try: all, then fewer nodes, then powers of two on one of them."""
    each = num_devices // num_nodes
    nodes = [(each * count, count) for count in range(num_nodes, 0, -1)]
    powers = [(1 << exponent, 1) for exponent in range(each.bit_length(), -1, -1) if 1 << exponent < each]
    return list(dict.fromkeys(entry for entry in ((num_devices, num_nodes), *nodes, *powers) if entry[0] > 0))


def _choose_engine(run: Run, count: int) -> _Values:
    """Return the keys of the number of devices and, where they generate too, of the rollout engines on them.

    An engine keeps its size, or has the nearest smaller one that divides the devices.
    """
    generate = run.config.generate_config
    if run.config.is_supervised:
        return {"megatron_training.num_npus": count}
    values: _Values = {"rl_config.actor_resource.num_npus": count}
    if generate is None or run.placement.disaggregated:
        return values
    tensor = max(size for size in range(1, min(count, generate.infer_tensor_parallel_size) + 1) if count % size == 0)
    values["generate_config.infer_tensor_parallel_size"] = tensor
    if generate.enable_expert_parallel:
        own, replicas = generate.infer_expert_parallel_size, count // tensor
        shared = max(size for size in range(1, min(own, replicas) + 1) if replicas % size == 0)
        values["generate_config.infer_expert_parallel_size"] = shared
    return values


def _list_layouts(run: Run, count: int) -> Iterator[_Values]:
    """Yield the keys of each division of the actor, and of the roles that share its devices, over so many devices."""
    actor = run.config.actor_config
    heads = actor.num_attention_heads
    divisors = [size for size in range(1, count + 1) if count % size == 0]
    for split in list_splits(
        count,
        layers=actor.num_layers,
        experts=actor.num_experts or 0,
        tensors=[size for size in divisors if size <= _MAX_SPLIT and (heads is None or heads % size == 0)],
        pipelines=divisors,
        contexts=[size for size in divisors if size <= _MAX_SPLIT],
        expert_sizes=divisors,
    ):
        stages: _Values = {}
        if split.pipeline != actor.pipeline_model_parallel_size:
            stages = {name: None for name in _STAGES if getattr(actor, name) is not None}
            if split.layers is not None:
                stages["num_layer_list"] = split.layers
        elif actor.num_layer_list is not None:
            stages["num_layer_list"] = actor.num_layer_list
        sizes: _Values = {**split.sizes, **stages}
        if actor.sequence_parallel and split.tensor == 1:
            sizes["sequence_parallel"] = False
        if actor.fsdp_size is not None and count % actor.fsdp_size:
            sizes["fsdp_size"] = None  # the devices that are left are no equal groups
        yield {f"{group}.{name}": value for name, value in sizes.items() for group in _find_groups(run, name)}


def _find_groups(run: Run, name: str) -> list[str]:
    """Return the groups that set a key of the layout for roles on the actor's devices: the shared one, and roles' own."""
    shared = [group for group in ROLE_GROUPS if group.removesuffix("_config") not in run.placement.dedicated]
    return ["megatron_training", *(group for group in shared if name in run.config.set_keys.get(group, ()))]


def _rank(run: Run, values: _Values, num_nodes: int, device: Device) -> tuple[float, ...] | None:
    """Return the rank of a layout; None where it breaks a rule or does not fit."""
    changed = draft(_apply(run, values), num_nodes)
    plans = plan_sound(changed, device)
    if plans is None or plans[0].verdict not in ACCEPTED:
        return None
    before, after = run.config.actor_config, changed.config.actor_config
    return rank_plans(*plans, sum(getattr(before, name) != getattr(after, name) for name in SIZES))


def _apply(run: Run, values: _Values) -> RunConfig:
    """Return the run file with these keys, without reading it or the models again; roles on other devices stay as they are."""
    cfg = run.config
    sizes: dict[str, Any] = {name.removeprefix(_SHARED): value for name, value in values.items() if name.startswith(_SHARED)}
    groups = [name for name in ROLE_GROUPS if name.removesuffix("_config") not in run.placement.dedicated]
    roles = {name: role for name in ("megatron_training", *groups) if (role := getattr(cfg, name)) is not None}
    # the reference may be the actor's record
    made = {id(role): dataclasses.replace(role, **sizes) for role in roles.values()}
    changed: dict[str, Any] = {name: made[id(role)] for name, role in roles.items()}
    set_keys = dict(cfg.set_keys)
    resource: dict[str, Any] = {
        name.removeprefix(_RESOURCE): value for name, value in values.items() if name.startswith(_RESOURCE)
    }
    if (rl := cfg.rl_config) is not None and resource:
        changed["rl_config"] = dataclasses.replace(rl, actor_resource=dataclasses.replace(rl.actor_resource, **resource))
    engine: dict[str, Any] = {
        name.removeprefix(_ENGINE): value for name, value in values.items() if name.startswith(_ENGINE)
    }
    if cfg.generate_config is not None and engine:
        changed["generate_config"] = dataclasses.replace(cfg.generate_config, **engine)
        set_keys["generate_config"] = cfg.set_keys.get("generate_config", frozenset()) | engine.keys()
    return dataclasses.replace(cfg, **changed, set_keys=set_keys)

