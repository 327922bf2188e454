"""Takes training state off the device while the rollout engine works, and puts it back, by emptying tensor storages."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mindspeed_rl import platform

if TYPE_CHECKING:  # the engine has an offloader
    from mindspeed_rl.engine.train_engine import TrainEngine


def _storages(tensors: Iterable[Tensor]) -> dict[int, torch.UntypedStorage]:
    """Distinct non-empty storages behind tensors, by address."""
    found: dict[int, torch.UntypedStorage] = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.size():
            found[storage.data_ptr()] = storage
    return found


class _Shelf:
    """Storages that are emptied on the device and filled again; tensors and views over them stay valid objects."""

    def __init__(self, *, keep_content: bool) -> None:
        self._keep = keep_content
        self._entries: list[tuple[torch.UntypedStorage, int, Tensor | None]] = []

    def empty(self, storages: Iterable[torch.UntypedStorage]) -> None:
        """Frees the storages' device memory, after a copy to the host where the content matters."""
        # empty already: a second round would keep copies of nothing
        if self._entries:
            return
        for storage in storages:
            host = None
            if self._keep:
                host = torch.empty(storage.size(), dtype=torch.uint8, pin_memory=platform.current().pin_memory)
                host.copy_(_bytes(storage))
            self._entries.append((storage, storage.size(), host))
        # queued kernels and copies may still use what is about to be freed
        platform.current().synchronize()
        for storage, _, _ in self._entries:
            storage.resize_(0)

    def fill(self) -> None:
        """Allocates the storages again, with their content or with zeros."""
        for storage, size, host in self._entries:
            storage.resize_(size)
            view = _bytes(storage)
            if host is None:
                view.zero_()
            else:
                view.copy_(host)
        platform.current().synchronize()
        self._entries.clear()


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


class Offloader:
    """Weights, gradients and optimizer state of one engine, each on or off the device."""

    def __init__(self, engine: TrainEngine) -> None:
        self._engine = engine
        self._params = _Shelf(keep_content=True)
        self._grads = _Shelf(keep_content=False)
        self._optimizer = _Shelf(keep_content=True)

    def _weight_tensors(self) -> Iterator[Tensor]:
        for model in self._engine.model.models:
            yield from (parameter.data for parameter in model.parameters())
        for buffer in self._engine.gradient_buffers():
            # with the distributed optimizer parameters are views of this buffer
            if buffer.param_data is not None:
                yield buffer.param_data

    def _optimizer_tensors(self) -> Iterator[Tensor]:
        weights = _storages(self._weight_tensors())
        # Megatron chains one optimizer for dense and one for expert parameters
        for optimizer in getattr(self._engine.optimizer, "chained_optimizers", [self._engine.optimizer]):
            inner = optimizer.optimizer
            # this rank has no parameters of that kind
            if inner is None:
                continue
            candidates = [value for state in inner.state.values() for value in state.values() if torch.is_tensor(value)]
            # under bf16 these are the fp32 main weights; in fp32 they are the weights, left to `params`
            candidates += [parameter.data for group in inner.param_groups for parameter in group["params"]]
            yield from (tensor for tensor in candidates if tensor.untyped_storage().data_ptr() not in weights)

    def resident_bytes(self) -> dict[str, int]:
        """Bytes of weights, gradients and optimizer state that are on the device now."""
        weights = _storages(self._weight_tensors())
        gradients = _storages(buffer.grad_data for buffer in self._engine.gradient_buffers())
        optimizer = _storages(self._optimizer_tensors()) if self._engine.optimizer is not None else {}
        held = {"weights": weights, "gradients": gradients, "optimizer": optimizer}
        return {name: sum(storage.size() for storage in storages.values()) for name, storages in held.items()}

    def offload(self, *, params: bool = False, grads: bool = False, optimizer: bool = False) -> None:
        """Takes the named parts off the device. Optimizer before params, because it is told apart by its storages."""
        if optimizer and self._engine.optimizer is not None:
            self._optimizer.empty(list(_storages(self._optimizer_tensors()).values()))
        if grads:
            self._grads.empty(list(_storages(buffer.grad_data for buffer in self._engine.gradient_buffers()).values()))
        if params:
            self._params.empty(list(_storages(self._weight_tensors()).values()))
        platform.current().empty_cache()

    def onload(self, *, params: bool = False, grads: bool = False, optimizer: bool = False) -> None:
        """Puts the named parts back; parts that are on the device stay as they are."""
        if params:
            self._params.fill()
        if grads:
            self._grads.fill()
        if optimizer:
            self._optimizer.fill()
