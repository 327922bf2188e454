"""Changes after which a run fits, nearest first: what costs nothing, then what costs time, then what changes the layout."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from mindspeed_rl.config.errors import ConfigError
from mindspeed_rl.config.loader import build_run_config
from mindspeed_rl.config.rules.validation import is_valid, unavailable
from mindspeed_rl.config.run import RunConfig
from mindspeed_rl.config.run_files import with_values
from mindspeed_rl.planner.devices import Device
from mindspeed_rl.planner.memory import MemoryPlan, plan_memory

_MOST_SHOWN = 5
_MOST_ROUNDS = 6


@dataclass(frozen=True)
class Change:
    """Values of keys, and the plan that they make.

    Attributes:
        costs: what it costs, in words.
    """

    values: dict[str, Any]
    costs: str
    plan: MemoryPlan


def changes_to_fit(tree: Mapping[str, Any], cfg: RunConfig, plan: MemoryPlan, device: Device, num_nodes: int = 1) -> list[Change]:
    """Return single changes after which the run fits, nearest first; where none is enough, one set of changes that is.

    The list ends with sets that come nearest when nothing helps enough. Every one of them passes the rules of `explain`.

    Args:
        tree: the run file as `compose` gives it.
        cfg: the same, read.
        plan: its memory.
    """
    if plan.verdict == "fits":
        return []
    enough: list[Change] = []
    for values, costs in _candidates(cfg):
        tried = _tried(tree, values, costs, device, num_nodes)
        if tried is not None and tried.plan.verdict == "fits":
            enough.append(tried)
    if enough:
        return enough[:_MOST_SHOWN]
    return _together(tree, cfg, plan, device, num_nodes)


def changes_that_relieve(tree: Mapping[str, Any], cfg: RunConfig, phase: str, device: Device, num_nodes: int = 1) -> list[Change]:
    """Return single changes after a phase ran out of memory, nearest first: those that let the run fit, or, where the plan
    said that it would, those that leave at least a tenth less in that phase.

    Raises:
        ValueError: the run cannot be planned.
    """
    plan = plan_memory(cfg, device, num_nodes)
    if plan.verdict != "fits":
        return changes_to_fit(tree, cfg, plan, device, num_nodes)
    before = _most_in(plan, phase)
    tried = (_tried(tree, values, costs, device, num_nodes) for values, costs in _candidates(cfg))
    return [change for change in tried if change is not None and _most_in(change.plan, phase) < 0.9 * before][:_MOST_SHOWN]


def _most_in(plan: MemoryPlan, phase: str) -> int:
    """Bytes beside the driver's and the runtime's on the fullest device of a phase; of the peak where no phase has the name."""
    found = [one for group in plan.groups for one in group.phases if one.name == phase] or [plan.fullest.peak]
    return max(one.total - one.owners.get("driver", 0) - one.owners.get("runtime", 0) for one in found)


def _together(tree: Mapping[str, Any], cfg: RunConfig, plan: MemoryPlan, device: Device, num_nodes: int) -> list[Change]:
    """Take in each round the first candidate that frees a good part of the fullest device, until the run fits."""
    values: dict[str, Any] = {}
    said: list[str] = []
    best: Change | None = None
    for _ in range(_MOST_ROUNDS):
        step: Change | None = None
        for more, costs in _candidates(cfg):
            tried = _tried(tree, values | more, "; ".join([*said, costs]), device, num_nodes)
            if tried is None or not _better(tried.plan, plan):
                continue
            if tried.plan.verdict == "fits":
                return [tried]
            if step is None or tried.plan.fullest.peak.total < 0.97 * step.plan.fullest.peak.total:
                step = tried
        if step is None:
            break
        best, values, plan, said = step, step.values, step.plan, [step.costs]
        cfg = build_run_config(with_values(tree, values), config_name=cfg.config_name, config_dir=cfg.config_dir)
    return [] if best is None else [best]


def _better(new: MemoryPlan, old: MemoryPlan) -> bool:
    if len(new.problems) != len(old.problems):
        return len(new.problems) < len(old.problems)
    return new.fullest.peak.total < 0.995 * old.fullest.peak.total


def _tried(tree: Mapping[str, Any], values: dict[str, Any], costs: str, device: Device, num_nodes: int) -> Change | None:
    """None where the run file would break a rule."""
    try:
        cfg = build_run_config(with_values(tree, values))
        if not is_valid(cfg, num_nodes) or unavailable(cfg):
            return None
        return Change(values, costs, plan_memory(cfg, device, num_nodes))
    except (ConfigError, ValueError):
        return None


def _candidates(cfg: RunConfig) -> Iterator[tuple[dict[str, Any], str]]:
    yield from _without_cost(cfg)
    yield from _for_time(cfg)
    yield from _of_layout(cfg)
    yield from _of_own_devices(cfg)


def _without_cost(cfg: RunConfig) -> Iterator[tuple[dict[str, Any], str]]:
    actor, rl, generate = cfg.actor_config, cfg.rl_config, cfg.generate_config
    if not actor.use_distributed_optimizer:
        yield {"actor_config.use_distributed_optimizer": True}, "nothing"
    if not actor.sequence_parallel and actor.tensor_model_parallel_size > 1:
        yield {"actor_config.sequence_parallel": True}, "nothing"
    if rl is not None and not cfg.is_supervised and not rl.use_remove_padding:
        yield {"rl_config.use_remove_padding": True}, "nothing"
    if generate is not None and cfg.platform != "cpu":
        for percent in (5, 10, 20, 30):
            share = round(generate.gpu_memory_utilization - percent / 100, 2)
            if share > 0.15:
                yield {"generate_config.gpu_memory_utilization": share}, "fewer responses at a time"
        if generate.max_num_seqs > 64:
            yield {"generate_config.max_num_seqs": generate.max_num_seqs // 2}, "fewer responses at a time"


def _for_time(cfg: RunConfig) -> Iterator[tuple[dict[str, Any], str]]:
    actor, rl, generate = cfg.actor_config, cfg.rl_config, cfg.generate_config
    if generate is not None and not cfg.is_supervised:
        left = [
            name
            for name in ("offload_train_optimizer", "offload_train_grad", "offload_train_param")
            if not getattr(generate, name)
        ]
        for count in range(1, len(left) + 1):
            yield {f"generate_config.{name}": True for name in left[:count]}, "copies to and from host memory in each iteration"
        if generate.update_weights_bucket_mb > 128:
            yield {"generate_config.update_weights_bucket_mb": 128}, "more exchanges in a push"
    if actor.loss_chunk_size > 256:
        yield {"actor_config.loss_chunk_size": actor.loss_chunk_size // 4}, "smaller products of the head"
    if not actor.recompute_activation_function and actor.recompute_granularity is None and not actor.moe_grouped_gemm:
        yield {"actor_config.recompute_activation_function": True}, "the activation functions are computed twice"
    if actor.recompute_granularity != "full" or actor.recompute_method != "uniform":
        keys = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
        extra = {"recompute_modules": None} if actor.recompute_modules else {}
        yield {f"actor_config.{name}": value for name, value in (keys | extra).items()}, "a third more operations in the update"
    if rl is not None and not cfg.is_supervised and rl.use_dynamic_bsz:
        yield (
            {"rl_config.update_max_packing_token_size": max(1024, (rl.update_max_packing_token_size or 4096) // 2)},
            ("smaller micro-batches"),
        )
    elif (actor.micro_batch_size or 1) > 1:
        yield {"actor_config.micro_batch_size": 1}, "smaller micro-batches"
    if not actor.swap_optimizer and cfg.platform != "cpu":
        yield {"actor_config.swap_optimizer": True}, "the optimizer's state comes from host memory in every step"


def _of_layout(cfg: RunConfig) -> Iterator[tuple[dict[str, Any], str]]:
    actor, generate = cfg.actor_config, cfg.generate_config
    if generate is not None and not cfg.is_supervised:
        size = generate.infer_tensor_parallel_size
        for factor in (2, 4):
            yield {"generate_config.infer_tensor_parallel_size": size * factor}, "fewer, larger rollout replicas"
    for key, now, costs in (
        ("tensor_model_parallel_size", actor.tensor_model_parallel_size, "communication in every layer"),
        ("pipeline_model_parallel_size", actor.pipeline_model_parallel_size, "bubbles of the pipeline"),
        ("context_parallel_size", actor.context_parallel_size, "communication in every attention"),
        ("expert_model_parallel_size", actor.expert_model_parallel_size, "communication of the experts over more ranks"),
    ):
        if key.startswith("expert") and not actor.num_experts:
            continue
        for factor in (2, 4):
            changes: dict[str, Any] = {f"actor_config.{key}": now * factor}
            if key.startswith("tensor"):
                changes["actor_config.sequence_parallel"] = True
            # roles on the actor's devices have to have its layout
            if cfg.ref_config is not cfg.actor_config:
                changes |= {name.replace("actor_config", "ref_config"): value for name, value in changes.items()}
            yield changes, costs


def _of_own_devices(cfg: RunConfig) -> Iterator[tuple[dict[str, Any], str]]:
    """What models on devices of their own have settings for; the actor's do nothing for them."""
    if cfg.rl_config is None:
        return
    for role, config, devices in (
        ("critic_config", cfg.critic_config, cfg.placement.dedicated.get("critic")),
        ("ref_config", cfg.ref_config, cfg.placement.dedicated.get("ref")),
        ("reward_config", cfg.reward_config, cfg.placement.dedicated.get("reward")),
    ):
        if devices is None or config is None or config is cfg.actor_config:
            continue
        if role == "critic_config" and config.recompute_granularity != "full":
            keys = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
            extra = {"recompute_modules": None} if config.recompute_modules else {}
            yield {f"{role}.{name}": value for name, value in (keys | extra).items()}, "a third more operations in its update"
        if (config.micro_batch_size or 1) > 1:
            yield {f"{role}.micro_batch_size": 1}, "smaller micro-batches"
        yield {f"{role}.tensor_model_parallel_size": 2 * config.tensor_model_parallel_size}, "communication in every layer"
