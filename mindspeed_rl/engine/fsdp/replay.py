"""Router replay in transformers' modules: their routers take given experts, and weigh them by their own formula.

Every router of the support table's families chooses once by `torch.topk` over the scores of all experts, and computes weights
from that result. So this one call returns the given experts here, with their scores, and all else stays the class's. In earlier
releases of transformers, such as 5.10, a method of the layer may choose in place of the router.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from mindspeed_rl.engine.batching import MicroBatch
from mindspeed_rl.engine.fsdp.model import ShardedModel
from mindspeed_rl.engine.fsdp.routers import find_choices, order_by_position, order_by_row
from mindspeed_rl.engine.router_replay import ExpertReplay, ReplayedRouter


class _Choice(TorchFunctionMode):
    """Replaces the result of the call that chooses experts.

    Attributes:
        calls: how often it was called.
    """

    def __init__(self, num_experts: int, topk: int, choose: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self._num_experts, self._topk, self._choose = num_experts, topk, choose
        self.calls = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func not in (torch.topk, Tensor.topk):
            return result
        scores = args[0] if args else kwargs["input"]
        # groups of experts are chosen by the same function, from fewer scores or in three dimensions
        if scores.dim() != 2 or scores.size(1) != self._num_experts or result.indices.size(1) != self._topk:
            return result
        self.calls += 1
        chosen = self._choose(result.indices)
        return torch.return_types.topk((scores.gather(1, chosen), chosen))


class ModuleReplay(ExpertReplay):
    """The routers of a model of transformers."""

    def __init__(self, model: ShardedModel) -> None:
        """Give the routers of the model a choice that can be replaced; a later replay of the same model takes its place."""
        shape = model.plan.model_config
        self._num_experts, self._choices = shape.num_moe_experts or 0, shape.moe_router_topk
        #: experts of the micro-batch that is computed, by layer, and whether the layer has compared them
        self._experts: tuple[Tensor, ...] | None = None
        self._compared: set[int] = set()
        self._rows = 0
        replays = []
        for layer, (module, method) in enumerate(find_choices(model).values()):
            replays.append(ReplayedRouter())
            module.__dict__.pop(method, None)  # of an earlier replay
            setattr(module, method, functools.partial(self._route, layer, module, getattr(module, method)))
        super().__init__(replays, shape.moe_router_topk, sequence_parallel=False)

    def arm(self, micro_batch: MicroBatch) -> None:
        """Prepare the next forward pass, its recomputation included, over the micro-batch."""
        self._record_pass(micro_batch)
        self._compared.clear()
        self._rows = micro_batch.input_ids.size(0)
        routing = micro_batch.routing
        self._experts = None if routing is None else tuple(order_by_row(x, self._rows) for x in routing.unbind(1))

    def reset(self) -> None:
        """Stop the replay after all passes, completed or failed."""
        self._experts = None

    def _route(self, layer: int, module: nn.Module, choose: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Return what a module's own method returns with the given experts."""
        with _Choice(self._num_experts, self._choices, functools.partial(self._replace, layer)) as choice:
            output = choose(*args, **kwargs)
        if choice.calls != 1:
            raise RuntimeError(
                f"{type(module).__name__} of this transformers has chosen experts {choice.calls} times and not once by "
                "torch.topk, so that they cannot be replayed; set rl_config.router_replay.mode: disabled"
            )
        return output

    def _replace(self, layer: int, default: Tensor) -> Tensor:
        """Return the experts of a layer's tokens, row by row."""
        replay, is_forward = self._routers[layer], layer not in self._compared
        self._compared.add(layer)
        if replay.recorded is not None:
            replay.recorded.append(order_by_position(default.detach(), self._rows))
        experts = None if self._experts is None else self._experts[layer]
        return replay.replace(default, experts, is_forward=is_forward)
