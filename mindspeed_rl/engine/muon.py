"""Muon for the matrices of a model and AdamW for everything else, inside Megatron's optimizers.

A matrix moves along the orthogonal factor of its momentum instead of along the momentum (Keller Jordan's Muon; scaled up in
arXiv:2502.16982). With gradient G and learning rate lr:

    M <- mu M + (1 - mu) G                       U = M, or with Nesterov (1 - mu) G + mu M
    O = X_n, X_0 = U / |U|_F, X_k+1 = a X_k + b (X_k X_k^T) X_k + c (X_k X_k^T)^2 X_k
    W <- (1 - lr wd) W - lr s O                  s by `muon_scale_mode` from the rows and columns of the matrix

The iteration (Newton-Schulz) takes every singular value of U close to 1. Megatron 0.16 has a class of this kind, which imports
the package emerging_optimizers; that needs Python 3.12. Gradients, their norm, float32 main weights and checkpoints stay
Megatron's: only the torch optimizer inside of its wrappers is another one. Its state is on every data-parallel rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from mindspeed_rl.config import MegatronConfig
from mindspeed_rl.models.vision import TOWER

#: a, b and c: of Keller Jordan, the steepest at 0 for which all singular values stay near 1
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
#: parts of a model, by their names in Megatron, whose matrices AdamW updates
ENDS = ("embedding.", "output_layer.", TOWER)
#: rows and columns of a matrix -> s, so that learning rates carry over between widths
_SCALES: dict[str, Callable[[int, int], float]] = {
    "spectral": lambda rows, columns: math.sqrt(max(rows, columns)),
    "unit_rms_norm": lambda rows, columns: math.sqrt(rows / columns),
    "shape_scaling": lambda rows, columns: math.sqrt(max(1.0, rows / columns)),
}


@dataclass(frozen=True)
class _Matrix:
    """A weight that is updated by the orthogonal factor of its momentum.

    Attributes:
        group: ranks that hold a part of it each, in the order of the parts; None where this rank has all of it, or where parts
            count as matrices of their own.
        dim: along which it is split.
        heads: a fused projection of queries, their gates where the attention has one, keys and values: rows of each in a
            query group, which count as matrices of their own; None for other weights.
    """

    group: dist.ProcessGroup | None = None
    dim: int = 0
    heads: tuple[int, ...] | None = None


class MuonAdamW(torch.optim.Optimizer):
    """The torch optimizer inside of a Megatron optimizer: Muon for some parameters, AdamW for the others."""

    def __init__(self, groups: Iterable[dict[str, Any]], matrices: Mapping[Tensor, _Matrix], config: MegatronConfig) -> None:
        """Take over the parameter groups of Megatron's AdamW, with their learning rates and decays.

        Args:
            matrices: the parameters that Muon updates.
        """
        betas = (config.adam_beta1, config.adam_beta2)
        super().__init__(groups, {"lr": config.lr, "betas": betas, "eps": config.adam_eps, "weight_decay": config.weight_decay})
        self._matrices, self._config = matrices, config

    def init_state(self) -> None:
        """Make the state of parameters that have none, so that a save before the first step has it too."""
        for parameter in (parameter for group in self.param_groups for parameter in group["params"]):
            names = ("momentum_buffer",) if parameter in self._matrices else ("exp_avg", "exp_avg_sq")
            if not self.state[parameter]:
                self.state[parameter] = {name: torch.zeros_like(parameter) for name in names}

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # pyrefly: ignore[bad-override]  (torch has overloads)
        """Make one update from the gradients in `parameter.grad`; collective over ranks that share a matrix."""
        assert closure is None  # Megatron passes none
        self.init_state()
        for group in self.param_groups:
            # one count a group, which Megatron's checkpoints keep
            group["step"] = int(group.get("step", 0)) + 1
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.update(parameter, group)
        return None

    def is_matrix(self, parameter: Tensor) -> bool:
        """Return True for a parameter that Muon updates, and False for one of AdamW."""
        return parameter in self._matrices

    @torch.no_grad()
    def update(self, parameter: Tensor, group: Mapping[str, Any]) -> None:
        """Update a parameter that has a gradient and a state; collective over ranks that share a matrix."""
        if not self.is_matrix(parameter):
            state, gradient = self.state[parameter], parameter.grad
            assert gradient is not None
            move_by_adam(parameter, gradient, state["exp_avg"], state["exp_avg_sq"], group)
            return
        parameter.mul_(1.0 - group["lr"] * group["weight_decay"])
        parameter.add_(self._compute_direction(parameter), alpha=-group["lr"])

    def _compute_direction(self, parameter: Tensor) -> Tensor:
        """Return s O of the parameter, this rank's part of it, after the update of its momentum."""
        config, matrix, momentum = self._config, self._matrices[parameter], self.state[parameter]["momentum_buffer"]
        gradient = parameter.grad
        assert gradient is not None  # a parameter without one does not change
        momentum.lerp_(gradient, 1.0 - config.muon_momentum)
        update = gradient.lerp(momentum, config.muon_momentum) if config.muon_use_nesterov else momentum
        if matrix.group is None:
            return orthogonalize_parts(update, matrix.heads, config)
        parts = [torch.empty_like(update, memory_format=torch.contiguous_format) for _ in range(matrix.group.size())]
        dist.all_gather(parts, update.contiguous(), group=matrix.group)
        # rows of a gated layer are in another order than without the split, which only permutes the rows of O
        full = orthogonalize_parts(torch.cat(parts, matrix.dim), matrix.heads, config)
        return full.chunk(len(parts), matrix.dim)[matrix.group.rank()]


def orthogonalize_parts(update: Tensor, heads: tuple[int, ...] | None, config: MegatronConfig) -> Tensor:
    """Return s O of a full matrix of Megatron's, or of each of its parts that count as matrices.

    Args:
        heads: as of `split_heads`.
    """
    if heads is None:
        parts = [update]
    else:
        by_group = update.view(-1, sum(heads), update.size(1)).split(heads, dim=1)
        parts = [part.flatten(0, 1) for part in by_group]
    scale = _SCALES[config.muon_scale_mode]
    moved = [
        orthogonalize(part, config.muon_num_ns_steps).mul_(config.muon_extra_scale_factor * scale(*part.shape))
        for part in parts
    ]
    if heads is None:
        return moved[0]
    by_group = [part.view(-1, rows, update.size(1)) for part, rows in zip(moved, heads)]
    return torch.cat(by_group, dim=1).view_as(update)


class _Heads(Protocol):
    """The fields that are read from Megatron's config of a model, or from this package's."""

    @property
    def kv_channels(self) -> int | None: ...

    @property
    def num_query_groups(self) -> int | None: ...

    @property
    def num_attention_heads(self) -> int: ...

    @property
    def attention_output_gate(self) -> bool: ...


def split_heads(name: str, config: MegatronConfig, model: _Heads) -> tuple[int, ...] | None:
    """Return the rows of queries, their gates where the attention has one, keys and values in a query group.

    They count as matrices of their own. None for other weights than a fused projection, and where the run file joins them.
    """
    if not config.muon_split_qkv or not name.endswith("linear_qkv.weight"):
        return None
    width, num_groups = model.kv_channels, model.num_query_groups
    assert width is not None and num_groups is not None  # both are set by Megatron where the config leaves them out
    queries = model.num_attention_heads // num_groups * width
    return (queries, queries, width, width) if model.attention_output_gate else (queries, width, width)


def move_by_adam(weight: Tensor, gradient: Tensor, first: Tensor, second: Tensor, group: Mapping[str, Any]) -> None:
    """Update a weight and its moments m and v in place: W <- (1 - lr wd) W - lr m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps).

    arXiv:1711.05101.
    """
    (beta1, beta2), count = group["betas"], group["step"]
    weight.mul_(1.0 - group["lr"] * group["weight_decay"])
    first.lerp_(gradient, 1.0 - beta1)
    second.mul_(beta2).addcmul_(gradient, gradient, value=1.0 - beta2)
    spread = second.sqrt().div_(math.sqrt(1.0 - beta2**count)).add_(group["eps"])
    weight.addcdiv_(first, spread, value=-group["lr"] / (1.0 - beta1**count))


def orthogonalize(update: Tensor, num_steps: int) -> Tensor:
    """Return the orthogonal factor of a matrix by Newton-Schulz steps, a new tensor: about U V^T of U S V^T."""
    a, b, c = _COEFFICIENTS
    # products with the shorter side, whose square is the smaller
    is_tall = update.size(0) > update.size(1)
    result = update.t() if is_tall else update
    result = result / result.norm().clamp(min=torch.finfo(result.dtype).tiny)
    for _ in range(num_steps):
        square = result @ result.t()
        result = a * result + torch.addmm(square, square, square, beta=b, alpha=c) @ result
    return result.t().contiguous() if is_tall else result


def use_muon(optimizer: MegatronOptimizer, chunks: Iterable[MegatronModule], config: MegatronConfig) -> None:
    """Replace the AdamW inside of Megatron's optimizers; not collective.

    Muon updates all matrices but embeddings, heads and vision towers.

    Args:
        optimizer: optimizer of the chunks, before its first step; not the distributed one, which has no full matrices.
    """
    matrices: dict[Tensor, _Matrix] = {}
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            # by name, as every stage has it: Megatron marks neither the copy of prediction layers nor the copy of a tied head
            is_end = any(end in name for end in ENDS)
            if parameter.requires_grad and parameter.dim() == 2 and min(parameter.shape) > 1 and not is_end:
                # under bf16 Megatron steps on a copy in float32
                matrices[getattr(parameter, "main_param", parameter)] = _describe(name, parameter, chunk, config)
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        if part.optimizer is not None:  # this rank has parameters of this kind
            part.optimizer = MuonAdamW(part.optimizer.param_groups, matrices, config)
            part.init_state_fn = lambda inner, *_: inner.init_state()


def _describe(name: str, parameter: Tensor, chunk: MegatronModule, config: MegatronConfig) -> _Matrix:
    group, heads = None, split_heads(name, config, cast(_Heads, chunk.config))
    is_expert = not getattr(parameter, "allreduce", True)
    if getattr(parameter, "tensor_model_parallel", False) and config.muon_tp_mode == "duplicated":
        ranks = parallel_state.get_expert_tensor_parallel_group if is_expert else parallel_state.get_tensor_model_parallel_group
        ranks_group = ranks()
        group = ranks_group if ranks_group is not None and ranks_group.size() > 1 else None
    if heads is not None:
        # tensor parallelism divides query groups, so that a rank has whole ones
        assert parameter.size(0) % sum(heads) == 0, f"{name}: {parameter.size(0)} rows do not divide into groups of {heads}"
    return _Matrix(group, getattr(parameter, "partition_dim", 0) if group is not None else 0, heads)
