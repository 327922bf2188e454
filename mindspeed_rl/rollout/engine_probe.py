"""Hooks that record what a vLLM model computes: embeddings, every layer's parts, logits."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from mindspeed_rl.dumps.record import Sink

#: output of a module; logits exist only on the first rank
_Output = Tensor | tuple[Tensor, Tensor | None] | None
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)$")
_ATTENTION = ("self_attn", "attn", "attention", "self_attention")
_MLP = ("mlp", "block_sparse_moe", "feed_forward")
# by these a sink orders tensors as the forward pass computes them
_PER_STEP, _LAYERS, _PER_LAYER, _FINAL_NORM, _LOGITS = 100_000, 10, 4, 90_000, 90_001


@dataclass(eq=False)
class EngineProbe:
    """Records forward steps of a vLLM model inside `recording`. Outside of it the model has no hooks.

    Every tensor is [tokens of the step, ...]; a step has a token of each running sequence, or chunks of prompts. Layers must
    run eagerly: a captured graph calls no hooks.

    Attributes:
        model: model of this rank.
        first, last: indexes of the first and last forward step to record, from 0; None for no end.
    """

    model: nn.Module
    sink: Sink
    first: int = 0
    last: int | None = None
    _step: int = field(default=-1, init=False)

    @contextlib.contextmanager
    def recording(self) -> Iterator[EngineProbe]:
        """Record forward steps in the block."""
        handles = list(self._hooks())
        try:
            yield self
        finally:
            for handle in handles:
                handle.remove()

    def _hooks(self) -> Iterator[RemovableHandle]:
        yield self.model.register_forward_pre_hook(self._record_inputs, with_kwargs=True)
        for name, module in self.model.named_modules():
            if name.endswith("embed_tokens"):
                yield module.register_forward_hook(self._hook(2, "embedding"))
            elif name.endswith("logits_processor"):
                yield module.register_forward_hook(self._hook(_LOGITS, "logits"))
            elif name.endswith("model.norm"):
                yield module.register_forward_hook(self._hook(_FINAL_NORM, "final_norm", first=True))
            elif match := _LAYER.search(name):
                yield from self._layer_hooks(int(match[1]), module)

    def _layer_hooks(self, index: int, layer: nn.Module) -> Iterator[RemovableHandle]:
        order, name = _LAYERS + index * _PER_LAYER, f"layers.{index}"
        for child, module in layer.named_children():
            if child in _ATTENTION:
                yield module.register_forward_hook(self._hook(order, f"{name}.attention", first=True))
            elif child in _MLP:
                yield module.register_forward_hook(self._hook(order + 1, f"{name}.mlp", first=True))
        yield layer.register_forward_hook(self._hook(order + 2, f"{name}.output"))

    def _record_inputs(self, module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        self._step += 1
        for order, name in enumerate(("input_ids", "positions")):
            value = kwargs.get(name, args[order] if len(args) > order else None)
            if isinstance(value, Tensor):
                self._add(order, name, value)

    def _hook(self, order: int, name: str, *, first: bool = False) -> Callable[[nn.Module, object, _Output], None]:
        """Return a hook that records the output; of a pair its first or the sum, as a layer returns its residual separately."""

        def record(module: nn.Module, inputs: object, output: _Output) -> None:
            if isinstance(output, tuple):
                output = output[0] if first or output[1] is None else output[0] + output[1]
            if output is not None:
                self._add(order, name, output, type(module).__name__)

        return record

    def _add(self, order: int, name: str, tensor: Tensor, kind: str = "Tensor") -> None:
        if self._step >= self.first and (self.last is None or self._step <= self.last):
            self.sink.add(f"token_{self._step}.{name}", self._step * _PER_STEP + order, tensor, kind=kind)
