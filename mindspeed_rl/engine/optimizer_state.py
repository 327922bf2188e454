"""What a checkpoint holds of an optimizer: tensors named after the weights alone, under any layout and kind of optimizer.

Megatron makes other state dicts for each kind of optimizer (distributed or not, fp32 or bf16), and as many of them as the
layout has parts (dense and expert parameters). Here every part is reduced to {number: {"exp_avg", "exp_avg_sq", "fp32_param"}},
with numbers that mean something on this rank only and `fp32_param` where weights are bf16. Learning rates and the like are not
saved: they are the run file's, and the number of steps is the schedule's.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params

#: every parameter's state lies under its own name, whatever the data-parallel size
_FORMAT = {"distrib_optim_sharding_type": "fully_reshardable", "chained_optim_avoid_prefix": True}
_STATE = "optimizer.state."

#: by number of a parameter on this rank: its state's tensors, or what stands for them in Megatron's checkpoints
States = dict[int, dict[str, Any]]


def sharded_state(optimizer: MegatronOptimizer, weights: dict[str, Any], *, is_loading: bool) -> dict[str, States]:
    """What Megatron saves or loads, by part of the optimizer; collective.

    Parameters that were never updated get the moments they start with: a save before the first step holds them too.

    Args:
        weights: the model chunks' sharded state.
        is_loading: whether what it holds is about to be replaced.
    """
    return {name: _of_part(part, weights, is_loading=is_loading) for name, part in _parts(optimizer).items()}


def load_state(optimizer: MegatronOptimizer, states: dict[str, States], *, num_steps: int) -> None:
    """Loads moments and main weights; the model's weights must be loaded already.

    Args:
        num_steps: that the optimizer had made when it was saved.
    """
    for name, part in _parts(optimizer).items():
        # Adam's bias correction depends on it
        groups = [{**group, "step": num_steps} for group in part.optimizer.state_dict()["param_groups"]]
        part.load_state_dict(_for_megatron(part, states.get(name, {}), groups))


def _parts(optimizer: MegatronOptimizer) -> dict[str, MegatronOptimizer]:
    """The optimizers behind Megatron's chain that have parameters on this rank."""
    chain = getattr(optimizer, "chained_optimizers", [optimizer])
    return {f"part{index}": part for index, part in enumerate(chain) if part.optimizer is not None}


def _of_part(part: MegatronOptimizer, weights: dict[str, Any], *, is_loading: bool) -> States:
    if part.init_state_fn is not None:
        part.init_state_fn(part.optimizer, part.config)
    found = part.sharded_state_dict(weights, is_loading=is_loading, metadata=_FORMAT)
    if isinstance(part, DistributedOptimizer):
        states = {}
        for number, tensors in found["param_state"].items():
            states[number] = {name: tensors[name] for name in ("exp_avg", "exp_avg_sq")}
            if part.config.bf16:  # an fp32 model's main weights are its weights
                key = tensors["param"].key.removeprefix(f"{_STATE}param.")
                states[number]["fp32_param"] = replace(tensors["param"], key=f"{_STATE}fp32_param.{key}")
        return states
    if isinstance(part, Float16OptimizerWithFloat16Params):
        mains = itertools.chain.from_iterable(found["fp32_from_fp16_params"])
        states = found["optimizer"]["state"]
        return {number: {**states[number], "fp32_param": main} for number, main in enumerate(mains)}
    return found["state"]


def _for_megatron(part: MegatronOptimizer, states: States, groups: list[dict[str, Any]]) -> dict[str, Any]:
    """What the part's `load_state_dict` takes."""
    moments = {number: {name: state[name] for name in ("exp_avg", "exp_avg_sq")} for number, state in states.items()}
    if isinstance(part, DistributedOptimizer):
        if part.config.bf16:
            mains = {number: state["fp32_param"] for number, state in states.items()}
        else:
            # Megatron wants main weights here too: the model's own, which were loaded before
            mains = dict(enumerate(parameter.detach() for buffer in part.buffers for parameter in buffer.param_index_map))
        return {
            "optimizer": {"param_groups": groups},
            "param_state": {number: {**moments[number], "param": mains[number]} for number in states},
            "param_state_sharding_type": _FORMAT["distrib_optim_sharding_type"],
        }
    if isinstance(part, Float16OptimizerWithFloat16Params):
        mains = (states[number]["fp32_param"] for number in range(len(states)))
        grouped = [list(itertools.islice(mains, len(group))) for group in part.fp32_from_float16_groups]
        return {"optimizer": {"state": moments, "param_groups": groups}, "fp32_from_fp16_params": grouped}
    return {"state": moments, "param_groups": groups}
