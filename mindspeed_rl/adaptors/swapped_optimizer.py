"""MindSpeed's swapped optimizer, which trains as it is, made to save and to load.

With `swap_optimizer` its class takes the place of Megatron's DistributedOptimizer. Between steps the tensors of the state have
no storage on the device and their content is in host memory; a step brings in a sixteenth of it at a time, and writes each
weight as soon as its main weight has changed.

| patch | symbol of MindSpeed's class | why |
|---|---|---|
| gathering | get_parameter_state_dp_zero | its copy of an earlier Megatron's lacks the arguments that checkpoints pass, and \
Megatron's own gathers on the device, which has no room for two thirds of the state: here it stays in host memory, and is not \
copied where this rank has all of it |
| state | _get_main_param_and_optimizer_states, _set_main_param_and_optimizer_states | Megatron's use the tensors without storage |
| load | load_state_dict | its step takes learning rates from the groups of before the load, and steps that are tensors |
| host memory | create_tensor_maps, init_param_opt_state | they make host copies by `empty_like(..., device="cpu")`, which in \
torch_npu 2.13 gives a tensor of the device: nothing would leave it |
| no parameters | __init__ | it fails where this rank has none to train |

They can go when MindSpeed's class has the functions of Megatron 0.16.1.

Not verified on NPU hardware.
"""  # noqa: E501

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
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
    owner.get_parameter_state_dp_zero = _gather_on_host(plain.get_parameter_state_dp_zero)
    owner._get_main_param_and_optimizer_states = _get_state
    owner._set_main_param_and_optimizer_states = _set_state
    owner.load_state_dict = _renew_after(owner.load_state_dict)
    owner.__init__ = _build_init(owner.__init__, plain.__init__)
    owner.create_tensor_maps = classmethod(_keep_on_host(owner.create_tensor_maps.__func__))
    owner.init_param_opt_state = _keep_on_host(owner.init_param_opt_state)


@dataclass(frozen=True)
class _Joined:
    """The states of all parameters of a buffer, as Megatron reads them from one tensor: by the range of a parameter.

    Attributes:
        tensors: first element of a parameter in the buffer -> its state.
    """

    tensors: Mapping[int, Tensor]

    def __getitem__(self, elements: slice) -> Tensor:
        return self.tensors[elements.start].detach().flatten()


def _gather_on_host(gather: Callable[..., dict[Any, Any] | None]) -> Callable[..., dict[Any, Any] | None]:
    """Return the function that gathers the state over the data-parallel ranks, in host memory."""

    @functools.wraps(gather)
    def get_parameter_state_dp_zero(
        self: Any, use_gloo_comm: bool = True, empty_data: bool = False, return_on_all_ranks: bool = False
    ) -> dict[Any, Any] | None:
        del use_gloo_comm
        if self.data_parallel_group.size() > 1:
            return gather(self, use_gloo_comm=True, empty_data=empty_data, return_on_all_ranks=return_on_all_ranks)
        state: dict[Any, Any] = {"buckets_coalesced": True}
        for index, (buffer, ranges) in enumerate(zip(self.buffers, self.gbuf_ranges)):
            starts = {parameter: start for parameter, (start, _, _) in buffer.param_index_map.items()}
            states = {starts[parameter]: self._get_main_param_and_optimizer_states(parameter) for parameter in starts}
            joined: dict[str, Any] = {
                name: _Joined({start: tensors[name] for start, tensors in states.items()})
                for name in ("param", "exp_avg", "exp_avg_sq")
            }
            joined["numel_unpadded"] = buffer.numel_unpadded
            state[index] = dict.fromkeys(ranges, joined)
        return state

    return get_parameter_state_dp_zero


def _keep_on_host(create: Callable[..., None]) -> Callable[..., None]:
    """Return the function that makes the host copies of a main weight, which are in host memory afterwards."""

    @functools.wraps(create)
    def create_on_host(owner: Any, main_param: Tensor, *args: Any) -> None:
        create(owner, main_param, *args)
        states = owner.param_to_cpu_states_map[main_param]
        for name, value in states.items():
            if value is not None and value.device.type != "cpu":
                states[name] = torch.empty(value.shape, dtype=value.dtype, pin_memory=platform.current().pin_memory)
                states[name].copy_(value)

    return create_on_host


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
