"""MindSpeed's swapped optimizer, which trains as it is, made to save and to load.

With `swap_optimizer` its class takes the place of Megatron's DistributedOptimizer. Between steps the tensors of the state have
no storage on the device and their content is in host memory; a step brings in a sixteenth of it at a time, and writes each
weight as soon as its main weight has changed.

| patch | symbol of MindSpeed's class | why |
|---|---|---|
| gathering | get_parameter_state_dp_zero | its copy of an earlier Megatron's lacks the arguments that checkpoints pass; Megatron's own is used |
| state | _get_main_param_and_optimizer_states, _set_main_param_and_optimizer_states | Megatron's use the tensors without storage |
| load | load_state_dict | its step takes learning rates from the groups of before the load, and steps that are tensors |
| no parameters | __init__ | it fails where this rank has none to train |

They can go when MindSpeed's class has the functions of Megatron 0.16.1.

Not verified on NPU hardware.
"""  # noqa: E501

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from mindspeed_rl import platform

_MODULE = "mindspeed.core.optimizer.swap_optimizer.swap_optimizer"


def swaps(owner: type) -> bool:
    """Return whether this class of the distributed optimizer is MindSpeed's, which swaps its state."""
    return owner.__module__ == _MODULE


def adapt(owner: Any) -> None:
    """Patch the class of the distributed optimizer where it swaps its state. A second call changes nothing."""
    if not swaps(owner) or owner._set_main_param_and_optimizer_states is _set_state:
        return
    plain = owner.__base__
    owner.get_parameter_state_dp_zero = plain.get_parameter_state_dp_zero
    owner._get_main_param_and_optimizer_states = _get_state
    owner._set_main_param_and_optimizer_states = _set_state
    owner.load_state_dict = _renew_after(owner.load_state_dict)
    owner.__init__ = _build_init(owner.__init__, plain.__init__)


def _get_state(self: Any, model_param: Tensor) -> dict[str, Tensor]:
    """Return the main weight and the moments of a parameter where their content is now: on the device or in host memory."""
    group, index = self.model_param_group_index_map[model_param]
    main = self.optimizer.param_groups[group]["params"][index]
    # the maximum of second moments is None
    tensors = {name: value for name, value in {"param": main, **self.optimizer.state[main]}.items() if value is not None}
    hosts = self.param_to_cpu_states_map[main]
    platform.current().synchronize()  # copies to the host may be under way
    return {name: value if value.untyped_storage().size() else hosts[name] for name, value in tensors.items()}


@torch.no_grad()
def _set_state(self: Any, model_param: Tensor, tensors: Mapping[str, Tensor]) -> None:
    """Set the main weight and the moments of a parameter."""
    for name, target in _get_state(self, model_param).items():
        target.copy_(tensors[name])


def _renew_after(load: Callable[[Any, Mapping[str, object]], None]) -> Callable[[Any, Mapping[str, object]], None]:
    """Return the loader, after which the step finds the new groups, with numbers of steps as it counts them."""

    @functools.wraps(load)
    def load_state_dict(self: Any, state_dict: Mapping[str, object]) -> None:
        load(self, state_dict)
        inner = self.optimizer
        inner.param_to_group_map = {param: group for group in inner.param_groups for param in group["params"]}
        for group in inner.param_groups:
            if "step" in group:
                group["step"] = torch.tensor(int(group["step"]), dtype=torch.int64, device=platform.current().current_device())

    return load_state_dict


def _build_init(swapping: Callable[..., None], plain: Callable[..., None]) -> Callable[..., None]:
    """Return the initializer, which is Megatron's where there is nothing to train."""

    @functools.wraps(swapping)
    def init(self: Any, optimizer: object, *args: Any, **kwargs: Any) -> None:
        (plain if optimizer is None else swapping)(self, optimizer, *args, **kwargs)

    return init
