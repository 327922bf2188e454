"""Changes after which a run fits, nearest first: changes that cost nothing, changes that cost time, other layouts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from mindspeed_rl.config.device_limits import HEAD_ROWS
from mindspeed_rl.config.errors import ConfigError
from mindspeed_rl.config.keys.generate import GenerateConfig
from mindspeed_rl.config.keys.megatron import MegatronConfig
from mindspeed_rl.config.loader import build_run_config
from mindspeed_rl.config.run import RunConfig
from mindspeed_rl.config.run_files import apply_values
from mindspeed_rl.planner.devices import Device
from mindspeed_rl.planner.memory import MemoryPlan, plan_memory
from mindspeed_rl.run import Run
from mindspeed_rl.run.draft import draft
from mindspeed_rl.run.rules.validation import is_valid, unavailable

_MAX_SHOWN = 5
_MAX_ROUNDS = 6
#: coefficient of a KL up to which a run without it, and without a reference, is suggested
_SMALL_KL = 0.001

#: new values of keys by dotted name, and their cost in words
_Candidate = tuple[dict[str, object], str]


@dataclass(frozen=True)
class Change:
    """Values of keys, and the plan with them.

    Attributes:
        costs: in words.
    """

    values: dict[str, object]
    costs: str
    plan: MemoryPlan


def find_changes_to_fit(tree: Mapping[str, object], run: Run, plan: MemoryPlan, device: Device) -> list[Change]:
    """Return single changes after which the run fits, nearest first; where none is enough, one set of changes.

    The set is the nearest one where nothing is enough. All changes keep the rules of `explain`.

    Args:
        tree: the run file as `compose` gives it.
        run: its draft.
        plan: its memory.
        device: kind of the devices.
    """
    if plan.verdict == "fits":
        return []
    changes = (_apply(tree, values, costs, device, run.num_nodes) for values, costs in _list_candidates(run))
    enough = [change for change in changes if change is not None and change.plan.verdict == "fits"]
    return enough[:_MAX_SHOWN] or _combine(tree, run, plan, device)


def find_relieving_changes(tree: Mapping[str, object], run: Run, phase: str, device: Device) -> list[Change]:
    """Return single changes after a phase ran out of memory, nearest first.

    They let the run fit; where the plan predicts that it fits, they leave at least a tenth less in that phase.

    Raises:
        ValueError: the run cannot be planned.
    """
    plan = plan_memory(run, device)
    if plan.verdict != "fits":
        return find_changes_to_fit(tree, run, plan, device)

    def count_bytes(planned: MemoryPlan) -> int:
        """Return the bytes of the fullest device in the phase, or of the peak, without those that no key changes."""
        phases = [item for group in planned.groups for item in group.phases if item.name == phase] or [planned.fullest.peak]
        return max(item.total - item.owners.get("driver", 0) - item.owners.get("runtime", 0) for item in phases)

    limit = 0.9 * count_bytes(plan)
    changes = (_apply(tree, values, costs, device, run.num_nodes) for values, costs in _list_candidates(run))
    return [change for change in changes if change is not None and count_bytes(change.plan) < limit][:_MAX_SHOWN]


def _combine(tree: Mapping[str, object], run: Run, plan: MemoryPlan, device: Device) -> list[Change]:
    """Take in each round the first candidate that frees a good part of the fullest device, until the run fits."""
    best: Change | None = None
    for _ in range(_MAX_ROUNDS):
        step: Change | None = None
        for values, costs in _list_candidates(run):
            if best is not None:
                values, costs = best.values | values, _join_costs(best.costs, costs)
            change = _apply(tree, values, costs, device, run.num_nodes)
            if change is None or not _is_better(change.plan, plan):
                continue
            if change.plan.verdict == "fits":
                return [change]
            if step is None or change.plan.fullest.peak.total < 0.97 * step.plan.fullest.peak.total:
                step = change
        if step is None:
            break
        best, plan = step, step.plan
        names = {"config_name": run.config.config_name, "config_dir": run.config.config_dir}
        run = draft(build_run_config(apply_values(tree, step.values), **names), run.num_nodes)
    return [] if best is None else [best]


def _is_better(new: MemoryPlan, old: MemoryPlan) -> bool:
    if len(new.problems) != len(old.problems):
        return len(new.problems) < len(old.problems)
    return new.fullest.peak.total < 0.995 * old.fullest.peak.total


def _join_costs(earlier: str, costs: str) -> str:
    """Return both, each sentence once."""
    return "; ".join(dict.fromkeys([*earlier.split("; "), costs]))


def _apply(tree: Mapping[str, object], values: dict[str, object], costs: str, device: Device, num_nodes: int) -> Change | None:
    """Return the change; None where the run file would break a rule."""
    try:
        run = draft(build_run_config(apply_values(tree, values)), num_nodes)
        if not is_valid(run) or unavailable(run):
            return None
        return Change(values, costs, plan_memory(run, device))
    except (ConfigError, ValueError):
        return None


def _list_candidates(run: Run) -> Iterator[_Candidate]:
    yield from _candidates_without_cost(run.config)
    yield from _candidates_for_time(run.config)
    yield from _candidates_of_ref(run)
    yield from _candidates_of_layout(run.config)
    yield from _candidates_of_dedicated_roles(run)


def _candidates_without_cost(cfg: RunConfig) -> Iterator[_Candidate]:
    actor, rl, generate = cfg.actor_config, cfg.rl_config, cfg.generate_config
    if not actor.use_distributed_optimizer:
        yield {"actor_config.use_distributed_optimizer": True}, "nothing"
    if not actor.sequence_parallel and actor.tensor_model_parallel_size > 1:
        yield {"actor_config.sequence_parallel": True}, "nothing"
    if rl is not None and not cfg.is_supervised and not rl.use_remove_padding:
        yield {"rl_config.use_remove_padding": True}, "nothing"
    if generate is not None and cfg.platform != "cpu":
        for percent in (5, 10, 20, 30):
            fraction = round(generate.gpu_memory_utilization - percent / 100, 2)
            if fraction > 0.15:
                yield {"generate_config.gpu_memory_utilization": fraction}, "fewer responses at a time"
        if generate.max_num_seqs > 64:
            yield {"generate_config.max_num_seqs": generate.max_num_seqs // 2}, "fewer responses at a time"


def _recompute_all(group: str, config: MegatronConfig) -> dict[str, object]:
    keys = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    extra = {"recompute_modules": None} if config.recompute_modules else {}
    return {f"{group}.{name}": value for name, value in (keys | extra).items()}


def _candidates_for_rollout(generate: GenerateConfig) -> Iterator[_Candidate]:
    names = ("offload_train_optimizer", "offload_train_grad", "offload_train_param")
    resident = [name for name in names if not getattr(generate, name)]
    for count in range(1, len(resident) + 1):
        values: dict[str, object] = {f"generate_config.{name}": True for name in resident[:count]}
        yield values, "copies to and from host memory in each iteration"
    if generate.update_weights_bucket_mb > 128:
        yield {"generate_config.update_weights_bucket_mb": 128}, "more exchanges in a weight sync"


def _candidates_for_time(cfg: RunConfig) -> Iterator[_Candidate]:
    actor, rl, generate = cfg.actor_config, cfg.rl_config, cfg.generate_config
    if generate is not None and not cfg.is_supervised:
        yield from _candidates_for_rollout(generate)
    if actor.loss_chunk_size > 256:
        yield {"actor_config.loss_chunk_size": actor.loss_chunk_size // 4}, "smaller products of the head"
    if actor.loss_vocab_chunk_size is None:
        yield {"actor_config.loss_vocab_chunk_size": HEAD_ROWS}, "smaller products of the head"
    if not actor.recompute_activation_function and actor.recompute_granularity is None:
        yield {"actor_config.recompute_activation_function": True}, "the activation functions are computed twice"
    if actor.recompute_granularity != "full" or actor.recompute_method != "uniform":
        yield _recompute_all("actor_config", actor), "a third more operations in the update"
    if rl is not None and not cfg.is_supervised and rl.use_dynamic_bsz:
        tokens = max(1024, (rl.update_max_packing_token_size or 4096) // 2)
        yield {"rl_config.update_max_packing_token_size": tokens}, "smaller micro-batches"
    elif (actor.micro_batch_size or 1) > 1:
        yield {"actor_config.micro_batch_size": 1}, "smaller micro-batches"
    if actor.bf16 and actor.grad_reduce_in_fp32:
        yield {"actor_config.grad_reduce_in_fp32": False}, "gradients are rounded to bf16"
    if cfg.platform != "cpu" and actor.computes_by_module and not actor.offload_gradients:
        yield {"actor_config.offload_gradients": True}, "each layer's gradients are copied to host memory in every micro-batch"
    if cfg.platform != "cpu" and not (actor.swap_optimizer or actor.optimizer_offload_fraction):
        yield {"actor_config.swap_optimizer": True}, "the optimizer's state comes from host memory in every step"
        for fraction in (0.5, 1.0):
            costs = "the host computes AdamW for so many of the parameters"
            yield {"actor_config.optimizer_offload_fraction": fraction}, costs


def _candidates_of_ref(run: Run) -> Iterator[_Candidate]:
    """Yield changes that take the reference's weights off the device, or the reference out of the run."""
    cfg, objective = run.config, run.objective
    group = "ref_config" if "ref_config" in cfg.set_keys else "actor_config"
    if run.has_ref and not cfg.ref_config.stream_ref_weights:
        yield {f"{group}.stream_ref_weights": True}, "the reference's layers come from host memory in each of its passes"
    if objective is None or objective.kl_place is None or objective.kl_coef > _SMALL_KL:
        return
    if not replace(objective, kl_place=None).needs_ref:  # neither the loss nor a distillation reads it
        yield {"rl_config.init_kl_coef": 0.0}, f"no KL to the reference, whose coefficient is {objective.kl_coef:g}"


def _candidates_of_layout(cfg: RunConfig) -> Iterator[_Candidate]:
    actor, generate = cfg.actor_config, cfg.generate_config
    if generate is not None and not cfg.is_supervised:
        size = generate.infer_tensor_parallel_size
        for factor in (2, 4):
            yield {"generate_config.infer_tensor_parallel_size": size * factor}, "fewer, larger rollout replicas"
    for key, size, costs in (
        ("tensor_model_parallel_size", actor.tensor_model_parallel_size, "communication in every layer"),
        ("pipeline_model_parallel_size", actor.pipeline_model_parallel_size, "bubbles of the pipeline"),
        ("context_parallel_size", actor.context_parallel_size, "communication in every attention"),
        ("expert_model_parallel_size", actor.expert_model_parallel_size, "communication of the experts over more ranks"),
    ):
        if key.startswith("expert") and not actor.num_experts:
            continue
        for factor in (2, 4):
            values: dict[str, object] = {f"actor_config.{key}": size * factor}
            if key.startswith("tensor"):
                values["actor_config.sequence_parallel"] = True
            # roles on the actor's devices must have its layout
            if cfg.ref_config is not cfg.actor_config:
                values |= {name.replace("actor_config", "ref_config"): value for name, value in values.items()}
            yield values, costs


def _candidates_of_dedicated_roles(run: Run) -> Iterator[_Candidate]:
    """Yield changes of the keys of models on dedicated devices, for which the actor's keys do nothing."""
    cfg = run.config
    for role in ("critic", "ref", "reward"):
        group, config = f"{role}_config", getattr(cfg, f"{role}_config")
        if role not in run.placement.dedicated or config is None or config is cfg.actor_config:
            continue
        if role == "critic" and config.recompute_granularity != "full":
            yield _recompute_all(group, config), "a third more operations in its update"
        if (config.micro_batch_size or 1) > 1:
            yield {f"{group}.micro_batch_size": 1}, "smaller micro-batches"
        yield {f"{group}.tensor_model_parallel_size": 2 * config.tensor_model_parallel_size}, "communication in every layer"
