"""Who holds which device in which phase, and the parallel groups."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mindspeed_rl.config.keys.generate import GenerateConfig
from mindspeed_rl.config.keys.megatron import MegatronConfig
from mindspeed_rl.config.objective import resolve_objective
from mindspeed_rl.config.placement import RolloutLayout, rollout_layout
from mindspeed_rl.config.run import RunConfig
from mindspeed_rl.config.sizes import (
    Layout,
    Sizes,
    num_devices,
    own_critic_devices,
    own_reference_devices,
    own_reward_devices,
    own_rollout_devices,
    rollout_servers,
    shown,
)

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
    count = num_devices(cfg)
    result: dict[str, Any] = {
        "platform": cfg.platform,
        "num_devices": count,
        "num_nodes": sizes.num_nodes,
        "devices_per_node": shown(count / sizes.num_nodes),
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
            "replicas": shown(sizes.rollout.dp_size),
            "infer_tensor_parallel_size": sizes.rollout.tensor,
        }
        if (lie := _engines(cfg, sizes)).expert_ranks > 1:
            result["roles"]["rollout"] |= {"replicas_sharing_experts": lie.sharing, "ep": lie.expert_ranks}
    if actor.num_npus % actor.replica_size == 0:
        result["parallel_groups"] = parallel_groups(actor, cfg.actor_config.use_tp_pp_dp_mapping)
        if experts := expert_groups(actor, cfg.actor_config):
            result["parallel_groups"]["ep"] = experts
    if sizes.counting != "samples" and sizes.rollout.num_npus % sizes.rollout.replica_size == 0:
        result.setdefault("parallel_groups", {})["rollout"] = parallel_groups(sizes.rollout)["tp"]
        if (lie := _engines(cfg, sizes)).expert_ranks > 1 and not lie.world_size % lie.expert_ranks:
            result["parallel_groups"]["rollout_ep"] = lie.expert_groups()
    return result


def _engines(cfg: RunConfig, sizes: Sizes) -> RolloutLayout:
    """How the rollout engines lie over the devices."""
    return rollout_layout(cfg.generate_config or GenerateConfig(), sizes.rollout.num_npus)


def _role(layout: Layout, role: MegatronConfig) -> dict[str, Any]:
    summary = {"devices": layout.num_npus, "tp": layout.tensor, "pp": layout.pipeline, "cp": layout.context}
    summary |= {"dp": shown(layout.dp_size)}
    if role.num_experts is not None:
        summary["ep"] = role.expert_model_parallel_size
    return summary


def _phases(cfg: RunConfig, sizes: Sizes) -> list[dict[str, Any]]:
    """Return the phases of one iteration in order, each with its devices and what they hold."""
    everyone = f"0-{sizes.actor.num_npus - 1}" if sizes.actor.num_npus > 1 else "0"
    actor = _engine(sizes.actor)
    if cfg.rl_config is None or sizes.counting == "samples":
        phases = [{"phase": "train", "devices": everyone, "holds": f"{cfg.stage} on Megatron {actor}"}]
        return phases
    rl, generate, objective = cfg.rl_config, cfg.generate_config, resolve_objective(cfg)
    critic = sizes.critic if objective.has_critic else None
    critics, kept = _own(own_critic_devices(cfg), everyone), []
    if generate is not None:
        kept = [what for what in ("optimizer", "grad", "param") if not getattr(generate, f"offload_train_{what}")]
    beside = f", beside training {', '.join(kept)}" if kept else ", training state off the device"
    count, tensor = shown(sizes.rollout.dp_size), sizes.rollout.tensor
    lie = _engines(cfg, sizes)
    spread = f", experts over {lie.expert_ranks} devices (EP{lie.expert_ranks})" if lie.expert_ranks > 1 else ""
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
        model, apart = _engine(sizes.reward or sizes.actor), own_reward_devices(cfg)
        phases.append({"phase": "reward_model", "devices": _own(apart, everyone), "holds": f"reward model on Megatron {model}"})
    if objective.needs_reference:
        what = "the actor with adapters off" if rl.share_backbone else "reference weights"
        phases.append(
            {
                "phase": "ref_log_probs",
                "devices": _own(own_reference_devices(cfg), everyone),
                "holds": f"{what} on Megatron {_engine(sizes.ref or sizes.actor)}",
            }
        )
    if objective.needs_old_log_probs(on_policy=sizes.steps_per_rollout * sizes.epochs == 1):
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
    elsewhere = rollout_servers(cfg)
    if elsewhere:
        return f"{len(elsewhere)} server(s) elsewhere"
    return _own(own_rollout_devices(cfg), shared)


def _engine(layout: Layout) -> str:
    context = f" CP{layout.context}" if layout.context > 1 else ""
    return f"TP{layout.tensor} PP{layout.pipeline}{context} DP{shown(layout.dp_size)}"


def short(groups: list[list[int]]) -> str:
    """Return groups of ranks as text, the first few of many."""
    text = " ".join("[" + " ".join(str(rank) for rank in _trim(group)) + "]" for group in groups[:_LISTED_GROUPS])
    rest = len(groups) - _LISTED_GROUPS
    return f"{text} and {rest} more" if rest > 0 else text


def _trim(group: list[int]) -> Sequence[int | str]:
    return group if len(group) <= 8 else [*group[:3], "...", group[-1]]
