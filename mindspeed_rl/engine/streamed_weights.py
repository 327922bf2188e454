"""Weights of a model that does not train, in host memory: each layer is on the device only for its part of a pass.

A pass brings what is outside of the layers (embedding, last norm, head, vision tower) before the first layer, and each layer
while the one before computes. So a device has at most these ends and two layers. Every pass of a micro-batch moves all weights
again, which is slow: large micro-batches move them less often. The numbers equal a run's with all weights on the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron.core.models.gpt.gpt_model import GPTModel
from torch import nn

from mindspeed_rl import platform
from mindspeed_rl.config import MegatronConfig
from mindspeed_rl.engine.built_model import BuiltModel
from mindspeed_rl.engine.offload import Offloader, Storages, collect_storages
from mindspeed_rl.platform.base import SideStream


class _Part:
    """Parameters that come to the device together, and leave it together."""

    def __init__(self, parameters: Sequence[nn.Parameter], stream: SideStream) -> None:
        self._storages = Storages(stream, keep_content=True, is_constant=True)
        self._held = list(collect_storages(parameter.data for parameter in parameters).values())

    def start_arriving(self) -> None:
        """Start to copy the parameters to the device."""
        self._storages.start_filling()

    def arrive(self) -> None:
        """Put the parameters on the device, for work of the current stream after this call."""
        self._storages.fill()

    def start_leaving(self) -> None:
        """Start to copy the parameters to the host, the first time only: they never change."""
        self._storages.start_emptying(self._held)

    def leave(self) -> None:
        """Free the device memory for later work of the current stream, the one on which the parameters were used."""
        self.start_leaving()
        self._storages.free()


class StreamedWeights(Offloader):
    """The weights of a model, off the device except for the layers that compute; nothing else brings them there."""

    @staticmethod
    def is_configured(config: MegatronConfig) -> bool:
        """Return True where the keys of a reference keep its weights in host memory."""
        return config.stream_ref_weights

    def __init__(self, model: BuiltModel) -> None:
        """Move the weights, which are loaded, to host memory."""
        super().__init__(model)
        stream = platform.current().side_stream()
        parts = [part for module in model.models for part in _stream_module(module, stream)]
        for part in parts:
            part.start_leaving()
        platform.current().synchronize()
        for part in parts:
            part.leave()
        platform.current().empty_cache()

    def offload(self, *, params: bool = False, grads: bool = False, optimizer: bool = False) -> None:
        """Do nothing: all of it is off the device between passes."""

    def onload(self, *, params: bool = False, grads: bool = False, optimizer: bool = False) -> None:
        """Do nothing: a pass brings the weights itself."""


def _stream_module(module: GPTModel, stream: SideStream) -> list[_Part]:
    """Let the passes of a model chunk bring its parts to the device and free them; return the parts, which are there now."""
    layers: list[nn.Module] = list(module.decoder.layers)
    in_layers = {parameter for layer in layers for parameter in layer.parameters()}
    ends = _Part([parameter for parameter in module.parameters() if parameter not in in_layers], stream)
    parts = [_Part(list(layer.parameters()), stream) for layer in layers]
    _hook(module, ends, *parts[:1])
    for index, layer in enumerate(layers):
        _hook(layer, *parts[index : index + 2])
    return [ends, *parts]


def _hook(module: nn.Module, part: _Part, *following: _Part) -> None:
    """Let a module bring its part before its forward pass, start to bring the following, and free its part after the pass."""

    def arrive(_: nn.Module, inputs: Any) -> None:
        part.arrive()
        for other in following:
            other.start_arriving()

    def leave(_: nn.Module, inputs: Any, output: Any) -> None:
        part.leave()

    module.register_forward_pre_hook(arrive)
    # after a failed pass too
    module.register_forward_hook(leave, always_call=True)
