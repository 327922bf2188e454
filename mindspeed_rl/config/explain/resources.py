"""Who holds which device in which phase, and the parallel groups."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mindspeed_rl.config.keys.megatron import MegatronConfig
from mindspeed_rl.config.placement import Layout
from mindspeed_rl.config.run import RunConfig
from mindspeed_rl.config.sizes import Sizes, round_number

_LISTED_GROUPS = 4


def parallel_groups(layout: Layout, tp_pp_dp: bool = False) -> dict[str, list[list[int]]]:
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


def expert_groups(layout: Layout, role: MegatronConfig) -> list[list[int]]:
    """Return the ranks over which the experts of one layer are spread; empty without expert parallelism.

    Inside a pipeline stage ranks count expert-tensor first, then expert; only for the rank order tp-cp-dp-pp.
    """
    size, inner = role.expert_sizes
    stage = layout.num_npus // layout.pipeline
    if role.num_experts is None or size <= 1 or role.use_tp_pp_dp_mapping or stage % (size * inner):
        return []
    starts = [rank for rank in range(layout.num_npus) if rank // inner % size == 0]
    return [[start + step * inner for step in range(size)] for start in starts]


def resources(cfg: RunConfig, sizes: Sizes) -> dict[str, Any]:
    """Return devices, phases and parallel groups of a run; groups only where the devices come out even."""
    actor = sizes.actor
    count, engines = cfg.placement.num_devices, cfg.placement.engines
    result: dict[str, Any] = {
        "platform": cfg.platform,
        "num_devices": count,
        "num_nodes": sizes.num_nodes,
        "devices_per_node": round_number(count / sizes.num_nodes),
        "roles": {"actor": _role(actor, cfg.actor_config)},
        "phases": _phases(cfg, sizes),
    }
    for role in ("ref", "reward", "critic"):
        layout = getattr(sizes, role)
        if layout is not None:
            result["roles"][role] = _role(layout, getattr(cfg, f"{role}_config"))
    if sizes.counting != "samples":
        result["roles"]["rollout"] = {
            "devices": sizes.rollout.num_npus,
            "replicas": round_number(sizes.rollout.dp_size),
            "infer_tensor_parallel_size": sizes.rollout.tensor,
        }
        if engines is not None and engines.expert_ranks > 1:
            result["roles"]["rollout"] |= {"replicas_sharing_experts": engines.sharing, "ep": engines.expert_ranks}
    if actor.num_npus % actor.replica_size == 0:
        result["parallel_groups"] = parallel_groups(actor, cfg.actor_config.use_tp_pp_dp_mapping)
        if experts := expert_groups(actor, cfg.actor_config):
            result["parallel_groups"]["ep"] = experts
    if sizes.counting != "samples" and sizes.rollout.num_npus % sizes.rollout.replica_size == 0:
        result.setdefault("parallel_groups", {})["rollout"] = parallel_groups(sizes.rollout)["tp"]
        if engines is not None and engines.expert_ranks > 1 and not engines.world_size % engines.expert_ranks:
            result["parallel_groups"]["rollout_ep"] = engines.expert_groups()
    return result


def _role(layout: Layout, role: MegatronConfig) -> dict[str, Any]:
    summary = {"devices": layout.num_npus, "tp": layout.tensor, "pp": layout.pipeline, "cp": layout.context}
    summary |= {"dp": round_number(layout.dp_size)}
    if role.num_experts is not None:
        summary["ep"] = role.expert_model_parallel_size
    return summary


def _phases(cfg: RunConfig, sizes: Sizes) -> list[dict[str, Any]]:
    """Return the phases of one iteration in order, each with its devices and what they hold."""
    everyone = f"0-{sizes.actor.num_npus - 1}" if sizes.actor.num_npus > 1 else "0"
    actor = _engine(sizes.actor)
    if cfg.rl_config is None or cfg.objective is None:
        phases = [{"phase": "train", "devices": everyone, "holds": f"{cfg.stage} on Megatron {actor}"}]
        return phases
    rl, generate, objective = cfg.rl_config, cfg.generate_config, cfg.objective
    dedicated, engines = cfg.placement.dedicated, cfg.placement.engines
    critic = sizes.critic if objective.has_critic else None
    critics, kept = _own(dedicated.get("critic"), everyone), []
    if generate is not None:
        kept = [what for what in ("optimizer", "grad", "param") if not getattr(generate, f"offload_train_{what}")]
    beside = f", beside training {', '.join(kept)}" if kept else ", training state off the device"
    count, tensor = round_number(sizes.rollout.dp_size), sizes.rollout.tensor
    ranks = 1 if engines is None else engines.expert_ranks
    spread = f", experts over {ranks} devices (EP{ranks})" if ranks > 1 else ""
    generators = _generators(cfg, everyone)
    # engines on devices of their own have nothing of the training beside them
    if generators != everyone:
        beside = ""
    phases = [{"phase": "generate", "devices": generators, "holds": f"{count} rollout engine(s) TP{tensor}{spread}{beside}"}]
    scorers = [", ".join(rl.verifier_function)] if rl.rule_reward else []
    if rl.judge_url is not None:
        scorers.append("the judge")
    workers = rl.num_reward_workers or rl.verifier_parallel
    if scorers:
        phases.append({"phase": "rewards", "devices": "host", "holds": f"{' and '.join(scorers)} in {workers} process(es)"})
    if "greedy_baseline" in objective.needs:
        phases.append({"phase": "greedy_baselines", "devices": generators, "holds": f"{count} rollout engine(s) TP{tensor}"})
    if cfg.reward_config is not None or rl.reward_model is not None:
        model, apart = _engine(sizes.reward or sizes.actor), dedicated.get("reward")
        phases.append({"phase": "reward_model", "devices": _own(apart, everyone), "holds": f"reward model on Megatron {model}"})
    if objective.needs_reference:
        what = "the actor with adapters off" if rl.share_backbone else "reference weights"
        phases.append(
            {
                "phase": "ref_log_probs",
                "devices": _own(dedicated.get("ref"), everyone),
                "holds": f"{what} on Megatron {_engine(sizes.ref or sizes.actor)}",
            }
        )
    if objective.needs_old_log_probs(on_policy=sizes.on_policy):
        phases.append({"phase": "old_log_probs", "devices": everyone, "holds": f"actor on Megatron {actor}"})
    if critic is not None:
        phases.append({"phase": "values", "devices": critics, "holds": f"critic on Megatron {_engine(critic)}"})
    phases.append({"phase": "advantages", "devices": "host", "holds": rl.adv_estimator})
    if critic is not None:
        phases.append({"phase": "update_critic", "devices": critics, "holds": f"critic on Megatron {_engine(critic)}"})
    phases.append(
        {"phase": "update_actor", "devices": everyone, "holds": f"actor weights, gradients, optimizer on Megatron {actor}"}
    )
    moves = f"{actor} -> TP{tensor} x {count}{spread}"
    if rl.sync_ref_model and objective.needs_reference:
        share = f"{rl.ref_model_mixup_alpha:g} of the actor enters the reference every {rl.ref_model_sync_steps} iteration(s)"
        phases.append({"phase": "sync_reference", "devices": everyone, "holds": share})
    phases.append({"phase": "update_weights", "devices": everyone, "holds": f"resharding {moves}"})
    return phases


def _own(devices: int | None, shared: str) -> str:
    return shared if devices is None else f"{devices} of its own"


def _generators(cfg: RunConfig, shared: str) -> str:
    """Return the devices that generate."""
    if servers := cfg.placement.servers:
        return f"{len(servers)} server(s) elsewhere"
    return _own(cfg.placement.dedicated.get("rollout"), shared)


def _engine(layout: Layout) -> str:
    context = f" CP{layout.context}" if layout.context > 1 else ""
    return f"TP{layout.tensor} PP{layout.pipeline}{context} DP{round_number(layout.dp_size)}"


def short(groups: list[list[int]]) -> str:
    """Return groups of ranks as text, the first few of many."""
    text = " ".join("[" + " ".join(str(rank) for rank in _trim(group)) + "]" for group in groups[:_LISTED_GROUPS])
    rest = len(groups) - _LISTED_GROUPS
    return f"{text} and {rest} more" if rest > 0 else text


def _trim(group: list[int]) -> Sequence[int | str]:
    return group if len(group) <= 8 else [*group[:3], "...", group[-1]]
