"""Megatron's optimizer, gradient buckets and learning-rate schedule from the run's keys, and its state in a checkpoint."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import (
    MegatronOptimizer,
    OptimizerConfig,
    clip_grads,
    get_megatron_optimizer,
    get_standard_config_overrides,
)
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params
from megatron.core.optimizer.optimizer_config import ParamKey, ParamWithNamePredicate
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from mindspeed_rl.checkpoint.dist import OPTIMIZER_STATE
from mindspeed_rl.config import MegatronConfig
from mindspeed_rl.engine.gradient_sums import showing, windows
from mindspeed_rl.engine.inner_optimizer import EmptyMainWeights, InnerOptimizer
from mindspeed_rl.engine.muon import use_muon
from mindspeed_rl.engine.offloaded_optimizer import OffloadedOptimizer, offload_states
from mindspeed_rl.engine.split_weights import split_weights
from mindspeed_rl.models.vision import TOWER, get_tower_part

#: every parameter's state has its own name, whatever the data-parallel size; the states of all data-parallel ranks are gathered
#: in host memory, on the first of them: Megatron's default has them on every rank, and on the way there a part on the devices
_FORMAT = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "distrib_optim_fully_reshardable_mem_efficient": True,
    "chained_optim_avoid_prefix": True,
}

#: by index of a parameter on this rank: its state's tensors, or their sharded form in Megatron's checkpoints
_States = dict[int, dict[str, object]]


def ddp_config(config: MegatronConfig) -> DistributedDataParallelConfig:
    """Return the config of gradient buckets, which are in fp32 unless the run file asks for the type of the weights."""
    return DistributedDataParallelConfig(
        grad_reduce_in_fp32=config.grad_reduce_in_fp32,
        overlap_grad_reduce=config.overlap_grad_reduce,
        overlap_param_gather=config.overlap_param_gather,
        use_distributed_optimizer=config.use_distributed_optimizer,
        bucket_size=config.ddp_bucket_size,
        check_for_nan_in_grad=False,  # the engine checks, and names the micro-batch
    )


def build_optimizer(config: MegatronConfig, chunks: list[MegatronModule]) -> MegatronOptimizer:
    """Build AdamW, or Muon, over the trainable parameters of the model chunks, with fp32 main parameters under bf16.

    Raises:
        ValueError: no learning rate is set.
    """
    if config.lr is None:
        raise ValueError("lr: no learning rate is set; a role that trains needs one.")
    settings = OptimizerConfig(
        optimizer="adam",
        lr=config.lr,
        min_lr=config.min_lr,
        weight_decay=config.weight_decay,
        adam_beta1=config.adam_beta1,
        adam_beta2=config.adam_beta2,
        adam_eps=config.adam_eps,
        clip_grad=config.clip_grad,
        bf16=config.bf16,
        params_dtype=torch.bfloat16 if config.bf16 else torch.float32,
        use_distributed_optimizer=config.use_distributed_optimizer,
        overlap_param_gather=config.overlap_param_gather,
    )
    # (rate, whether the projector has it)
    rates = [(rate, projects) for rate, projects in ((config.vit_lr, False), (config.aligner_lr, True)) if rate is not None]
    overrides = get_standard_config_overrides(settings) if rates else None
    for rate, projects in rates:
        part = ParamWithNamePredicate(f"vision {rate} {projects}", partial(_is_of_tower, projects=projects))
        # the same schedule, at another height
        # its type asks for weight decay too, which is the group's where it is left out
        assert overrides is not None
        overrides[ParamKey(with_name_predicate=part)] = cast(Any, {"max_lr": rate, "min_lr": config.min_lr * rate / config.lr})
    is_offloaded = config.optimizer_offload_fraction > 0
    with EmptyMainWeights() if is_offloaded or config.reuse_fp32_param else contextlib.nullcontext():
        optimizer = get_megatron_optimizer(settings, chunks, overrides)
    if config.optimizer == "muon":
        use_muon(optimizer, chunks, config)
    if is_offloaded:
        offload_states(optimizer, config)
    elif config.reuse_fp32_param:
        split_weights(optimizer)
    return optimizer


def _is_of_tower(parameter: Tensor, name: str, *, projects: bool) -> bool:
    """Return True for a parameter of the vision tower, or of its projector."""
    _, mark, inner = name.partition(TOWER)
    return bool(mark) and (get_tower_part(inner) == "projector") == projects


def build_scheduler(
    config: MegatronConfig, optimizer: MegatronOptimizer | torch.optim.Optimizer, steps_per_iteration: int
) -> OptimizerParamScheduler:
    """Build warm-up and decay, counted in optimizer steps.

    Args:
        optimizer: Megatron's or torch's; the schedule sets the rates of its groups.
        steps_per_iteration: optimizer steps of one iteration; the schedule's keys count iterations.

    Raises:
        ValueError: the schedule has no length, or two warm-up keys contradict each other.
    """
    assert config.lr is not None  # no optimizer without it
    decay_iters = config.lr_decay_iters or config.train_iters
    if not decay_iters:
        raise ValueError("train_iters: not set; the learning-rate schedule needs train_iters or lr_decay_iters.")
    decay_steps = decay_iters * steps_per_iteration
    if config.lr_warmup_fraction is not None and config.lr_warmup_iters:
        raise ValueError(
            f"lr_warmup_fraction ({config.lr_warmup_fraction}) and lr_warmup_iters ({config.lr_warmup_iters}) are both set."
        )
    warmup_steps = config.lr_warmup_iters * steps_per_iteration
    if config.lr_warmup_fraction is not None:
        warmup_steps = int(config.lr_warmup_fraction * decay_steps)
    if warmup_steps >= decay_steps:
        raise ValueError(f"lr_warmup_iters: the warm-up takes {warmup_steps} steps, the full schedule only {decay_steps}.")
    return OptimizerParamScheduler(
        cast(MegatronOptimizer, optimizer),
        init_lr=config.lr_warmup_init,
        max_lr=config.lr,
        min_lr=config.min_lr,
        lr_warmup_steps=warmup_steps,
        lr_decay_steps=decay_steps,
        lr_decay_style=config.lr_decay_style,
        start_wd=config.weight_decay,
        end_wd=config.weight_decay,
        wd_incr_steps=0,
        wd_incr_style="constant",
        wsd_decay_steps=max(1, decay_steps // 10) if config.lr_decay_style == "WSD" else None,
        lr_wsd_decay_style="linear" if config.lr_decay_style == "WSD" else None,
    )


# ---------------------------------------------------------------------- a step that the host waits for once


@torch.no_grad()
def compute_squared_norms(optimizer: MegatronOptimizer, device: torch.device, *, by_window: bool = False) -> list[Tensor]:
    """Return the squared norm of all gradients as Megatron's `get_grad_norm` computes it, but not read back; collective.

    Args:
        by_window: gradients are not in float32, and few of them become so at a time.

    Returns:
        0-d float32, one for each group of ranks that has gradients of its own: with experts there can be two.
    """
    squares: dict[dist.ProcessGroup | None, Tensor] = {}
    for group, grads in (_read_by_window if by_window else _read_gradients)(optimizer):
        square = torch.zeros(1, device=device)
        if grads:
            flag = torch.zeros(1, dtype=torch.int, device=device)
            norm, _ = clip_grads.multi_tensor_applier(clip_grads.l2_norm_impl, flag, [grads], False)
            square = norm**2.0
        squares[group] = squares[group] + square if group in squares else square
    for group, square in squares.items():
        dist.all_reduce(square, group=group)
    return [square.reshape(()) for square in squares.values()]


_Gradients = Iterator[tuple[dist.ProcessGroup | None, list[Tensor]]]


def _read_gradients(optimizer: MegatronOptimizer) -> _Gradients:
    """Yield a group of ranks and all gradients that count for its norm on this rank."""
    optimizer.prepare_grads()
    gradients: dict[dist.ProcessGroup | None, list[Tensor]] = {}
    for part in _get_chain(optimizer):
        gradients.setdefault(part.get_grad_stats_parallel_group(), []).extend(_read_part(part))
    yield from gradients.items()


def _read_by_window(optimizer: MegatronOptimizer) -> _Gradients:
    """Yield the same, a few gradients at a time, and none at least."""
    for part in _get_chain(optimizer):
        group = part.get_grad_stats_parallel_group()
        yield group, []
        for _ in windows(part):
            part.prepare_grads()
            yield group, _read_part(part)


def _read_part(part: Any) -> list[Tensor]:
    # release 0.19 has the second name
    read = getattr(part, "get_main_grads_for_grad_norm", None) or cast(Any, part).get_grads_for_grad_norm
    return read()


def _get_chain(optimizer: MegatronOptimizer) -> list[Any]:
    return getattr(optimizer, "chained_optimizers", [optimizer])


def step_with_norm(optimizer: MegatronOptimizer, norm: float, *, by_window: bool = False) -> None:
    """Clip the gradients and update the weights, after `compute_squared_norms`; collective.

    Args:
        norm: norm of all gradients.
        by_window: as there.
    """
    if not by_window:
        for part in _get_chain(optimizer):
            _clip(part, norm)
        optimizer.step_with_ready_grads()
        return
    with contextlib.ExitStack() as stack:
        parts: list[Any] = list(_list_parts(optimizer).values())
        for part in parts:
            for _ in windows(part):
                part.prepare_grads()
                _clip(part, norm)
                with _keeping_counts(part):
                    part.optimizer.step()
                cast(Any, part)._copy_main_params_to_model_params()
            stack.enter_context(showing(part, ()))
        # counts the step, and gathers the weights
        optimizer.step_with_ready_grads()


def _clip(part: Any, norm: float) -> None:
    if (parameters := part.get_parameters()) and part.config.clip_grad > 0.0:
        clip_grads.clip_grad_by_total_norm_fp32(cast("list[Tensor]", parameters), part.config.clip_grad, norm)


@contextlib.contextmanager
def _keeping_counts(part: MegatronOptimizer) -> Iterator[None]:
    """Restore the counts of steps after the block."""
    counts = [(group, group.get("step")) for group in part.param_groups]
    yield
    for group, count in counts:
        if count is None:
            group.pop("step", None)
        else:
            group["step"] = count


# ---------------------------------------------------------------------- state in a checkpoint
#
# Tensors are named after the weights only, under any layout and kind of optimizer. Megatron makes other state dicts for each
# kind (distributed or not, fp32 or bf16), and one for each part of the layout (dense and expert parameters). Here every part is
# reduced to {index: {"exp_avg", "exp_avg_sq", "fp32_param"}}, or "momentum_buffer" for a matrix of Muon, with indices that are
# valid on this rank only and `fp32_param` where weights are bf16. Learning rates and the like are not saved: they are the run
# file's, and the number of steps is the schedule's.


def shard_optimizer_state(
    optimizer: MegatronOptimizer, weights: ShardedStateDict, *, is_loading: bool, is_copied: bool = False
) -> dict[str, _States]:
    """Return the sharded state that Megatron saves or loads, by part of the optimizer; collective.

    Parameters that were never updated get their initial moments: a save before the first step has them too.

    Args:
        weights: the model chunks' sharded state.
        is_loading: True where its content is about to be replaced.
        is_copied: states in host memory are copied, because steps follow while they are written.
    """
    return {
        name: _shard_part(part, weights, is_loading=is_loading, is_copied=is_copied)
        for name, part in _list_parts(optimizer).items()
    }


def load_optimizer_state(optimizer: MegatronOptimizer, states: dict[str, _States], *, num_steps: int) -> None:
    """Load moments and main weights; the model's weights must be loaded already.

    Args:
        num_steps: steps of the optimizer at the time of the save.
    """
    for name, part in _list_parts(optimizer).items():
        with _all_states(part):
            # Adam's bias correction depends on it
            groups = [{**group, "step": num_steps} for group in part.optimizer.state_dict()["param_groups"]]
            part.load_state_dict(_build_state_dict(part, states.get(name, {}), groups))


def reload_main_weights(optimizer: MegatronOptimizer) -> None:
    """Copy the model's weights to the main weights, after a load without the optimizer."""
    for part in _list_parts(optimizer).values():
        with _all_states(part):
            part.reload_model_params()


def _all_states(part: MegatronOptimizer) -> contextlib.AbstractContextManager[None]:
    """Give the part's inner optimizer the states that it does not have between steps, too."""
    inner = part.optimizer
    return inner.on_host() if isinstance(inner, InnerOptimizer) else contextlib.nullcontext()


def _list_parts(optimizer: MegatronOptimizer) -> dict[str, MegatronOptimizer]:
    """Return the optimizers of Megatron's chain that have parameters on this rank."""
    chain = getattr(optimizer, "chained_optimizers", [optimizer])
    return {f"part{index}": part for index, part in enumerate(chain) if part.optimizer is not None}


def _shard_part(part: MegatronOptimizer, weights: ShardedStateDict, *, is_loading: bool, is_copied: bool) -> _States:
    with _all_states(part):
        if part.init_state_fn is not None:
            part.init_state_fn(part.optimizer, part.config)
        sharded = part.sharded_state_dict(weights, is_loading=is_loading, metadata=_FORMAT)
        if isinstance(part, DistributedOptimizer):  # copies, gathered on the first of its ranks
            states = {}
            for index, tensors in (sharded["param_state"] or {}).items():
                states[index] = {name: tensors[name] for name in ("exp_avg", "exp_avg_sq")}
                if part.config.bf16:  # an fp32 model's main weights are its weights
                    key = tensors["param"].key.removeprefix(f"{OPTIMIZER_STATE}param.")
                    states[index]["fp32_param"] = replace(tensors["param"], key=f"{OPTIMIZER_STATE}fp32_param.{key}")
            return states
        if isinstance(part, Float16OptimizerWithFloat16Params):
            mains = itertools.chain.from_iterable(sharded["fp32_from_fp16_params"])
            states = sharded["optimizer"]["state"]
            states = {index: {**states[index], "fp32_param": main} for index, main in enumerate(mains)}
        else:
            states = sharded["state"]
        if not isinstance(part.optimizer, InnerOptimizer):
            return states
        is_copied = is_copied and isinstance(part.optimizer, OffloadedOptimizer)  # others have copies on the host
        return {
            index: {name: _hold(value, is_copied=is_copied) for name, value in state.items()} for index, state in states.items()
        }


def _hold(value: Any, *, is_copied: bool) -> object:
    """Return a sharded tensor that keeps the memory that it has now, or a copy of it where that is on the host."""
    data = value.data.detach()
    return replace(value, data=data.clone() if is_copied and data.device.type == "cpu" else data)


def _build_state_dict(part: MegatronOptimizer, states: _States, groups: list[dict[str, object]]) -> dict[str, object]:
    """Return the argument of the part's `load_state_dict`."""
    moments = {index: {name: value for name, value in state.items() if name != "fp32_param"} for index, state in states.items()}
    if isinstance(part, DistributedOptimizer):
        if part.config.bf16:
            mains = {index: state["fp32_param"] for index, state in states.items()}
        else:
            # Megatron needs main weights here too: the model's, which were loaded before
            mains = dict(enumerate(parameter.detach() for buffer in part.buffers for parameter in buffer.param_index_map))
        return {
            "optimizer": {"param_groups": groups},
            "param_state": {index: {**moments[index], "param": mains[index]} for index in states},
            "param_state_sharding_type": _FORMAT["distrib_optim_sharding_type"],
        }
    if isinstance(part, Float16OptimizerWithFloat16Params):
        mains = (states[index]["fp32_param"] for index in range(len(states)))
        grouped = [list(itertools.islice(mains, len(group))) for group in part.fp32_from_float16_groups]
        return {"optimizer": {"state": moments, "param_groups": groups}, "fp32_from_fp16_params": grouped}
    return {"state": moments, "param_groups": groups}
