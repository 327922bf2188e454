"""Gradients of norms and biases added to their float32 sums by one call per backward pass, in place of one for each.

| patch | symbol | why |
|---|---|---|
| sums | DistributedDataParallel._make_backward_post_hook | an addition for each parameter of each micro-batch |

The gradients of a backward pass wait until it ends. Vectors only: matrices would need memory, and their additions take time.
Numbers do not change. With `overlap_grad_reduce` a sum is sent as soon as it is complete, so nothing waits there. `remove`
takes the patch back, for a comparison. It can go when Megatron adds lists.

Not verified on NPU hardware.
"""

from __future__ import annotations

import functools
import importlib
from collections import Counter
from collections.abc import Callable
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

#: attribute of a parameter whose gradients wait for the end of a backward pass
_WAITS = "gradient_waits"
#: (owner, name, what was there) of every patch
_originals: list[tuple[Any, str, Any]] = []


class _Pairs(list[tuple[Tensor, Tensor]]):
    """(sum, gradient) of each parameter; a list that can be referred to weakly."""


#: backward pass -> its sums and gradients, which the pass itself holds until it ends or fails; one may run inside another that
#: recomputes
_waiting: WeakValueDictionary[int, _Pairs] = WeakValueDictionary()


def apply() -> None:
    """Patch Megatron, after MindSpeed's own patches and before a model is built. Idempotent."""
    owner = importlib.import_module("megatron.core.distributed.distributed_data_parallel").DistributedDataParallel
    original = owner._make_backward_post_hook
    if original.__module__ != __name__:
        _originals.append((owner, "_make_backward_post_hook", original))
        owner._make_backward_post_hook = _build_hooks(original)


def remove() -> None:
    """Put back what was there before `apply`."""
    while _originals:
        setattr(*_originals.pop())


def add(weight: Any, gradient: Tensor) -> None:
    """Add a gradient to the parameter's sum: at the end of this backward pass, or at once where the sum may be sent before."""
    # -1 outside of any backward pass
    task = torch._C._current_graph_task_id() if getattr(weight, _WAITS, False) else -1
    if task < 0:
        weight.main_grad.add_(gradient)
        return
    if task not in _waiting:
        pairs = _waiting[task] = _Pairs()
        torch.autograd.Variable._execution_engine.queue_callback(functools.partial(_add_together, pairs))
    _waiting[task].append((weight.main_grad, gradient))


def _build_hooks(original: Callable[[Any, Any], Callable[..., None]]) -> Callable[[Any, Any], Callable[..., None]]:
    def make_hook(self: Any, param: Any) -> Callable[..., None]:
        plain = original(self, param)
        if self.ddp_config.overlap_grad_reduce or param.dim() != 1:
            return plain
        setattr(param, _WAITS, True)

        def hook(*unused: Any) -> None:
            # others are added in a way of their own
            if param.grad is None or param.grad_added_to_main_grad or param.main_grad.dtype != torch.float32:
                plain(*unused)
            else:
                add(param, param.grad)
                param.grad = None

        return hook

    make_hook.__module__ = __name__
    return make_hook


@torch.no_grad()
def _add_together(pairs: _Pairs) -> None:
    """Add gradients to their sums, those of each type by one call, or by several where a sum gets several."""
    # a call adds to each of its sums once
    lists: dict[tuple[torch.dtype, int], list[tuple[Tensor, Tensor]]] = {}
    turns: Counter[int] = Counter()
    for total, gradient in pairs:
        lists.setdefault((gradient.dtype, turns[total.data_ptr()]), []).append((total, gradient))
        turns[total.data_ptr()] += 1
    for (dtype, _), some in lists.items():
        totals, gradients = [total for total, _ in some], [gradient for _, gradient in some]
        if dtype != torch.float32:
            # the addition of lists takes one type, and a cast of all together is one call
            sizes = [gradient.numel() for gradient in gradients]
            gradients = [*torch.cat(gradients).float().split(sizes)]
        torch._foreach_add_(totals, gradients)
