"""AdamW or Muon over shards with Megatron's groups, norm, clipping and schedule: an update does not depend on the engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from mindspeed_rl.config import MegatronConfig
from mindspeed_rl.engine.fsdp.gradients import StepGradients
from mindspeed_rl.engine.fsdp.images import TOWER
from mindspeed_rl.engine.fsdp.model import ShardedModel
from mindspeed_rl.engine.fsdp.muon import MOMENTUM, ShardedMuon
from mindspeed_rl.engine.fsdp.states import MOMENTS, LeanAdamW
from mindspeed_rl.models.vision import get_tower_part

#: Megatron's; added to the norm by which clipped gradients are divided
_CLIP_EPS = 1e-6


def build_optimizer(config: MegatronConfig, model: ShardedModel, gradients: StepGradients) -> torch.optim.AdamW:
    """Build AdamW, or Muon for matrices; biases and vectors have no weight decay, as in Megatron.

    Raises:
        ValueError: no learning rate is set, or a folder cannot hold the optimizer's states.
    """
    if config.lr is None:
        raise ValueError("lr: no learning rate is set; a role that trains needs one.")
    rates = {"tower": config.vit_lr, "projector": config.aligner_lr}
    groups: dict[tuple[float, float | None], list[torch.nn.Parameter]] = {}
    for name, parameter in model.list_trained().items():
        # biases of stacked experts, such as gate_up_proj_bias, are matrices
        factor = 0.0 if parameter.dim() == 1 or name.endswith("bias") else 1.0
        rate = rates[get_tower_part(name.removeprefix(TOWER))] if name.startswith(TOWER) else None
        groups.setdefault((factor, rate), []).append(parameter)
    members = [
        {"params": parameters, "wd_mult": factor, **_scale_schedule(config, rate)}
        for (factor, rate), parameters in groups.items()
    ]
    settings: dict[str, Any] = {
        "lr": config.lr,
        "betas": (config.adam_beta1, config.adam_beta2),
        "eps": config.adam_eps,
        "weight_decay": config.weight_decay,
        "fused": True,
    }
    if config.optimizer == "muon":
        return ShardedMuon(members, model, config, **settings)
    if config.offload_gradients or config.optimizer_offload_fraction or config.optimizer_state_dtype != "float32":
        return LeanAdamW(members, model, config, gradients, **settings)
    return torch.optim.AdamW(members, **settings)


def _scale_schedule(config: MegatronConfig, rate: float | None) -> dict[str, float]:
    """Return the entries of a group whose schedule has another height; none where it has the role's."""
    assert config.lr is not None
    return {} if rate is None else {"max_lr": rate, "min_lr": config.min_lr * rate / config.lr}


def _list_moments(optimizer: torch.optim.AdamW, parameter: Tensor) -> tuple[str, ...]:
    """Return the names of the states of a parameter that are tensors of its shape."""
    is_matrix = isinstance(optimizer, ShardedMuon) and optimizer.is_matrix(parameter)
    return (MOMENTUM,) if is_matrix else MOMENTS


@torch.no_grad()
def init_moments(optimizer: torch.optim.AdamW, num_steps: int) -> None:
    """Give each parameter its moments where it has none, and set the steps on which Adam's bias correction depends."""
    if isinstance(optimizer, LeanAdamW):
        optimizer.init_moments(num_steps)
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = optimizer.state[parameter]
            for name in _list_moments(optimizer, parameter):
                if name not in state:
                    state[name] = torch.zeros_like(parameter)
            state["step"] = torch.tensor(float(num_steps), device=parameter.device)


def list_states(optimizer: torch.optim.AdamW) -> dict[Tensor, dict[str, DTensor]]:
    """Return the states of each parameter that have its shape, once there are some; their memory is the optimizer's."""
    if isinstance(optimizer, LeanAdamW):
        return optimizer.list_states()
    return {
        parameter: {name: state[name] for name in _list_moments(optimizer, parameter)}
        for parameter, state in optimizer.state.items()
    }


@torch.no_grad()
def compute_squared_norm(gradients: Sequence[Tensor], device: torch.device, copies: int) -> Tensor:
    """Return the squared norm of all gradients, 0-d float32, not read back; collective.

    Args:
        gradients: this rank's rows.
        device: of the result.
        copies: ranks that have the same rows.
    """
    square = torch.zeros(1, device=device)
    if gradients:
        square += torch.stack(torch._foreach_norm(list(gradients))).square().sum() / copies
    dist.all_reduce(square)
    return square.reshape(())


@torch.no_grad()
def clip(gradients: Sequence[Tensor], norm: float, limit: float) -> None:
    """Scale the gradients down to a norm; a limit of 0 leaves them."""
    factor = limit / (norm + _CLIP_EPS)
    if limit > 0.0 and factor < 1.0:
        torch._foreach_mul_(list(gradients), factor)
