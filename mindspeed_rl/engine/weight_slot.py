"""All weights of a model as the slot of a service that trains full weights; adapters have `adapter_slot.AdapterSlot`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from mindspeed_rl.engine.built_model import BuiltModel
from mindspeed_rl.engine.lora_layers import LoraSettings


class WeightSlot:
    """The weights that train, by chunk and name, in float32; passes compute with the weights of `fill`.

    Weights in 16 bits are rounded from them. Not collective, on a rank that has all of each layer.

    Attributes:
        rank: adapters have none here.
    """

    rank = 0

    def __init__(self, model: BuiltModel) -> None:
        """Take a model with the weights of the base, which are kept in host memory."""
        self._parameters: dict[str, nn.Parameter] = {
            f"{index}.{name}": parameter
            for index, chunk in enumerate(model.models)
            for name, parameter in chunk.named_parameters()
            if parameter.requires_grad
        }
        self._base = {
            name: parameter.detach().to("cpu", torch.float32, copy=True) for name, parameter in self._parameters.items()
        }

    def init(self, settings: LoraSettings | None, seed: int) -> dict[str, Tensor]:
        """Return the weights of a new model: the base's."""
        return dict(self._base)

    @torch.no_grad()
    def fill(self, matrices: Mapping[str, Tensor], settings: LoraSettings | None) -> None:
        """Compute with these weights from now on."""
        for name, parameter in self._parameters.items():
            parameter.copy_(matrices[name])

    def read_gradients(self, matrices: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the gradients of all weights after a pass: views of Megatron's buffers."""
        # Megatron's mark on a parameter: its gradient in the flat buffer
        return {name: cast(Any, parameter).main_grad for name, parameter in self._parameters.items()}
