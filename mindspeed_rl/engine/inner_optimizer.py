"""Torch optimizers inside of Megatron's that keep float32 weights elsewhere than in tensors of the device.

Megatron's optimizers of bf16 models have a float32 copy of each weight that trains. A replacement of the torch optimizer in one
keeps the content of the copies in its own way: their tensors stay, and have memory only while Megatron needs what is in them.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params
from torch import Tensor
from torch.overrides import TorchFunctionMode


class InnerOptimizer(ABC):
    """A torch optimizer, with another place for the states of some of its parameters.

    Attributes:
        inner: steps the other parameters, and has the groups of all.
    """

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Groups of all parameters."""
        return self.inner.param_groups

    @property
    def state(self) -> Any:
        """States of the inner optimizer, which are all of them inside of `on_host`."""
        return self.inner.state

    def state_dict(self) -> dict[str, Any]:
        """Return torch's form of the states; inside of `on_host`."""
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take torch's form of the states; inside of `on_host`."""
        self.inner.load_state_dict(state_dict)

    @abstractmethod
    def on_host(self) -> contextlib.AbstractContextManager[None]:
        """Give the inner optimizer all states, those kept elsewhere as tensors of the host, to save or load them."""

    @abstractmethod
    def step(self) -> None:
        """Make one update of all parameters from their gradients."""

    def device_tensors(self) -> Iterator[Tensor]:
        """Yield the tensors on the device that are neither states of the inner optimizer nor its parameters."""
        yield from ()

    @contextlib.contextmanager
    def leaving_out(self, parameters: Collection[Tensor]) -> Iterator[None]:
        """Leave parameters out of the inner optimizer's groups."""
        full = [group["params"] for group in self.param_groups]
        for group in self.param_groups:
            group["params"] = [parameter for parameter in group["params"] if parameter not in parameters]
        try:
            yield
        finally:
            for group, params in zip(self.param_groups, full):
                group["params"] = params

    def step_others(self, parameters: Collection[Tensor]) -> None:
        """Make one update by the inner optimizer of all but these parameters, and count it in every group.

        TransformerEngine's and Apex's optimizers count no group without parameters, and torch's counts in its states.
        """
        counts = [int(group.get("step", 0)) + 1 for group in self.param_groups]
        with self.leaving_out(parameters):
            self.inner.step()
        for group, count in zip(self.param_groups, counts):
            group["step"] = count


class EmptyMainWeights(TorchFunctionMode):
    """While a Megatron optimizer is built, its float32 copies of 16-bit weights have no memory."""

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is not Tensor.float or args[0].dtype == torch.float32:
            return func(*args, **(kwargs or {}))
        main = torch.empty_like(args[0], dtype=torch.float32)
        main.untyped_storage().resize_(0)
        return main


@dataclass(frozen=True)
class _Names:
    """Attributes of a Megatron optimizer with lists of tensors by group.

    Attributes:
        mains: float32 weights.
        weights: weights of the same ranges in the type of the model.
        models: the parameters of the model that the copy of float32 weights reads.
    """

    mains: str
    weights: str
    models: str


_GROUPS: dict[type, _Names] = {
    DistributedOptimizer: _Names("shard_fp32_from_float16_groups", "shard_float16_groups", "model_float16_groups"),
    Float16OptimizerWithFloat16Params: _Names("fp32_from_float16_groups", "float16_groups", "float16_groups"),
}


def list_parts(optimizer: MegatronOptimizer) -> list[Any]:
    """Return the optimizers of Megatron's chain that have parameters on this rank."""
    return [part for part in getattr(optimizer, "chained_optimizers", [optimizer]) if part.optimizer is not None]


def _find_names(part: Any) -> _Names | None:
    return next((names for kind, names in _GROUPS.items() if isinstance(part, kind)), None)


def list_weights(part: Any) -> dict[Tensor, Tensor]:
    """Return a Megatron optimizer's float32 weights -> the model's [n] in 16 bits; none where the model is in float32."""
    names, weights = _find_names(part), dict[Tensor, Tensor]()
    if names is not None:
        for group, mains in zip(getattr(part, names.weights), getattr(part, names.mains)):
            weights |= {main: weight.detach().view(-1) for weight, main in zip(group, mains)}
    return weights


def replace_inner(part: Any, replacement: InnerOptimizer, stepped: Collection[Tensor]) -> None:
    """Replace the torch optimizer inside of a Megatron optimizer.

    Args:
        stepped: parameters that the replacement steps by itself; it also writes the model's weights of those.
    """
    init_state, names = part.init_state_fn, _find_names(part)
    part.optimizer = replacement
    part.init_state_fn = lambda _, *others: init_state(replacement.inner, *others)
    if names is not None:
        part._copy_main_params_to_model_params = _build_copy(part, names, stepped)


def _build_copy(part: Any, names: _Names, left_out: Collection[Tensor]) -> Callable[[], None]:
    """Return the copy of float32 weights to the model's, of those that are not left out."""
    copy_all: Callable[[], None] = part._copy_main_params_to_model_params

    def copy_main_params() -> None:
        full = {name: getattr(part, name) for name in (names.models, names.mains)}
        rows = [[row for row in zip(*group) if row[1] not in left_out] for group in zip(*full.values())]
        vars(part).update({name: [[row[place] for row in group] for group in rows] for place, name in enumerate(full)})
        try:
            copy_all()
        finally:
            vars(part).update(full)

    return copy_main_params


def step_adamw(
    weights: Sequence[Tensor],
    gradients: Sequence[Tensor],
    first: Sequence[Tensor],
    second: Sequence[Tensor],
    group: Mapping[str, Any],
    step: float,
) -> None:
    """Update weights and their moments in place, by torch's fused AdamW.

    Args:
        weights, gradients, first, second: float32, of equal shapes at each place; `first` and `second` are the moments.
        group: parameter group: lr, betas, weight_decay, eps.
        step: number of this update, from 1 on.
    """
    torch._fused_adamw_(
        list(weights),
        list(gradients),
        list(first),
        list(second),
        [],
        [torch.full((), float(step), device=weights[0].device)] * len(weights),
        lr=float(group["lr"]),
        beta1=group["betas"][0],
        beta2=group["betas"][1],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        amsgrad=False,
        maximize=False,
    )
