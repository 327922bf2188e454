"""Devices of each phase of a run, their contents, and the parallel groups."""

from __future__ import annotations

from typing import TypedDict

from mindspeed_rl.config.keys.megatron import MegatronConfig
from mindspeed_rl.config.placement import Layout
from mindspeed_rl.config.run import RunConfig
from mindspeed_rl.config.sizes import Sizes, round_number

_LISTED_GROUPS = 4


class _Phase(TypedDict):
    phase: str
    devices: str
    holds: str


def list_parallel_groups(layout: Layout, tp_pp_dp: bool = False) -> dict[str, list[list[int]]]:
    """Return the ranks of every tensor, context, data and pipeline parallel group.

    Ranks count tensor first, then context, data and pipeline (Megatron's tp-cp-dp-pp); with `tp_pp_dp` data comes last.

    Raises:
        ValueError: the devices do not divide into replicas.
    """
    if layout.num_npus % layout.replica_size:
        raise ValueError(f"{layout.num_npus} devices do not divide into replicas of {layout.replica_size}")
    sizes = {"tp": layout.tensor, "cp": layout.context, "dp": layout.num_npus // layout.replica_size, "pp": layout.pipeline}
    order = ("tp", "cp", "pp", "dp") if tp_pp_dp else ("tp", "cp", "dp", "pp")
    strides, stride = {}, 1
    for axis in order:
        strides[axis] = stride
        stride *= sizes[axis]
    groups: dict[str, list[list[int]]] = {}
    for axis in ("tp", "cp", "dp", "pp"):
        starts = [rank for rank in range(layout.num_npus) if rank // strides[axis] % sizes[axis] == 0]
        groups[axis] = [[start + step * strides[axis] for step in range(sizes[axis])] for start in starts]
    return groups


def _list_expert_groups(layout: Layout, role: MegatronConfig) -> list[list[int]]:
    """Return the ranks over which the experts of one layer are spread; empty without expert parallelism.

    Inside a pipeline stage ranks count expert-tensor first, then expert; only for the rank order tp-cp-dp-pp.
    """
    size, inner = role.expert_sizes
    stage = layout.num_npus // layout.pipeline
    if role.num_experts is None or size <= 1 or role.use_tp_pp_dp_mapping or stage % (size * inner):
        return []
    starts = [rank for rank in range(layout.num_npus) if rank // inner % size == 0]
    return [[start + step * inner for step in range(size)] for start in starts]


def describe_resources(cfg: RunConfig, sizes: Sizes) -> dict[str, object]:
    """Return devices, phases and parallel groups of a run; groups only where the devices divide into replicas."""
    actor, engines, num_devices = sizes.actor, cfg.placement.engines, cfg.placement.num_devices
    shares_experts = engines is not None and engines.expert_ranks > 1
    roles = {"actor": _describe_role(actor, cfg.actor_config)}
    for role in ("ref", "reward", "critic"):
        layout = getattr(sizes, role)
        if layout is not None:
            roles[role] = _describe_role(layout, getattr(cfg, f"{role}_config"))
    groups: dict[str, list[list[int]]] = {}
    if actor.num_npus % actor.replica_size == 0:
        groups |= list_parallel_groups(actor, cfg.actor_config.use_tp_pp_dp_mapping)
        if experts := _list_expert_groups(actor, cfg.actor_config):
            groups["ep"] = experts
    if sizes.counting != "samples":
        roles["rollout"] = {
            "devices": sizes.rollout.num_npus,
            "replicas": round_number(sizes.rollout.dp_size),
            "infer_tensor_parallel_size": sizes.rollout.tensor,
        }
        if engines is not None and shares_experts:
            roles["rollout"] |= {"replicas_sharing_experts": engines.sharing, "ep": engines.expert_ranks}
        if sizes.rollout.num_npus % sizes.rollout.replica_size == 0:
            groups["rollout"] = list_parallel_groups(sizes.rollout)["tp"]
            if engines is not None and shares_experts and not engines.world_size % engines.expert_ranks:
                groups["rollout_ep"] = engines.expert_groups()
    return {
        "platform": cfg.platform,
        "num_devices": num_devices,
        "num_nodes": sizes.num_nodes,
        "devices_per_node": round_number(num_devices / sizes.num_nodes),
        "roles": roles,
        "phases": _list_phases(cfg, sizes),
        **({"parallel_groups": groups} if groups else {}),
    }


def _describe_role(layout: Layout, role: MegatronConfig) -> dict[str, object]:
    summary: dict[str, object] = {"devices": layout.num_npus, "tp": layout.tensor, "pp": layout.pipeline, "cp": layout.context}
    summary |= {"dp": round_number(layout.dp_size)}
    if role.num_experts is not None:
        summary["ep"] = role.expert_model_parallel_size
    return summary


def _list_phases(cfg: RunConfig, sizes: Sizes) -> list[_Phase]:
    """Return the phases of one iteration in order, each with its devices and their contents."""
    shared = f"0-{sizes.actor.num_npus - 1}" if sizes.actor.num_npus > 1 else "0"
    actor, phases = _engine(sizes.actor), list[_Phase]()

    def add(phase: str, devices: str, holds: str) -> None:
        phases.append({"phase": phase, "devices": devices, "holds": holds})

    if cfg.rl_config is None or cfg.objective is None:
        add("train", shared, f"{cfg.stage} on Megatron {actor}")
        return phases
    rl, generate, objective = cfg.rl_config, cfg.generate_config, cfg.objective
    engines, servers = cfg.placement.engines, cfg.placement.servers
    dedicated = {role: f"{count} dedicated" for role, count in cfg.placement.dedicated.items() if count is not None}
    critic = sizes.critic if objective.has_critic else None
    critics = dedicated.get("critic", shared)
    parts = ("optimizer", "grad", "param")
    on_device = [] if generate is None else [part for part in parts if not getattr(generate, f"offload_train_{part}")]
    training = f", next to training {', '.join(on_device)}" if on_device else ", training state off the device"
    count, tensor = round_number(sizes.rollout.dp_size), sizes.rollout.tensor
    ranks = 1 if engines is None else engines.expert_ranks
    spread = f", experts over {ranks} devices (EP{ranks})" if ranks > 1 else ""
    generators = f"{len(servers)} standalone server(s)" if servers else dedicated.get("rollout", shared)
    # engines on dedicated devices hold no training state
    training = training if generators == shared else ""
    add("generate", generators, f"{count} rollout engine(s) TP{tensor}{spread}{training}")
    scorers = [", ".join(rl.verifier_function)] if rl.rule_reward else []
    if rl.judge_url is not None:
        scorers.append("the judge")
    if scorers:
        workers = rl.num_reward_workers or rl.verifier_parallel
        add("rewards", "host", f"{' and '.join(scorers)} in {workers} process(es)")
    if "greedy_baseline" in objective.needs:
        add("greedy_baselines", generators, f"{count} rollout engine(s) TP{tensor}")
    if cfg.reward_config is not None or rl.reward_model is not None:
        model = _engine(sizes.reward or sizes.actor)
        add("reward_model", dedicated.get("reward", shared), f"reward model on Megatron {model}")
    if objective.needs_reference:
        weights = "the actor with adapters off" if rl.share_backbone else "reference weights"
        holds = f"{weights} on Megatron {_engine(sizes.ref or sizes.actor)}"
        add("ref_log_probs", dedicated.get("ref", shared), holds)
    if objective.needs_old_log_probs(on_policy=sizes.on_policy):
        add("old_log_probs", shared, f"actor on Megatron {actor}")
    if critic is not None:
        add("values", critics, f"critic on Megatron {_engine(critic)}")
    add("advantages", "host", rl.adv_estimator)
    if critic is not None:
        add("update_critic", critics, f"critic on Megatron {_engine(critic)}")
    add("update_actor", shared, f"actor weights, gradients, optimizer on Megatron {actor}")
    if rl.sync_ref_model and objective.needs_reference:
        part = f"{rl.ref_model_mixup_alpha:g} of the actor"
        add("sync_reference", shared, f"{part} enters the reference every {rl.ref_model_sync_steps} iteration(s)")
    add("update_weights", shared, f"resharding {actor} -> TP{tensor} x {count}{spread}")
    return phases


def _engine(layout: Layout) -> str:
    context = f" CP{layout.context}" if layout.context > 1 else ""
    return f"TP{layout.tensor} PP{layout.pipeline}{context} DP{round_number(layout.dp_size)}"


def shorten_groups(groups: list[list[int]]) -> str:
    """Return groups of ranks as text, the first few of many."""
    listed: list[list[int | str]] = [[*group] if len(group) <= 8 else [*group[:3], "...", group[-1]] for group in groups]
    text = " ".join("[" + " ".join(str(rank) for rank in group) + "]" for group in listed[:_LISTED_GROUPS])
    others = len(groups) - _LISTED_GROUPS
    return f"{text} and {others} more" if others > 0 else text
