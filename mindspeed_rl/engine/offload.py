"""Offload of training state from the device while the rollout engine generates, by emptying tensor storages."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from megatron.core.optimizer import MegatronOptimizer
from torch import Tensor

from mindspeed_rl import platform
from mindspeed_rl.engine.built_model import BuiltModel
from mindspeed_rl.engine.inner_optimizer import InnerOptimizer
from mindspeed_rl.platform.base import SideStream

#: timer of copies of training state between device and host, both ways
OFFLOADING = "offload"


def collect_storages(tensors: Iterable[Tensor]) -> dict[int, torch.UntypedStorage]:
    """Return the distinct non-empty storages of tensors, by address."""
    storages: dict[int, torch.UntypedStorage] = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.size():
            storages[storage.data_ptr()] = storage
    return storages


class Storages:
    """Storages that are emptied on the device and filled again; tensors and views over them stay valid objects.

    Copies run on a separate stream, between pinned host memory and the device.

    Attributes:
        is_leaving: they are copied to the host, or about to be, and not freed yet.
    """

    def __init__(self, stream: SideStream, *, keep_content: bool, is_constant: bool = False) -> None:
        """Take storages by `start_emptying`.

        Args:
            stream: stream of the copies.
            keep_content: False where the content does not matter once they are emptied.
            is_constant: their content never changes, so that it is copied to the host once.
        """
        self._stream, self._keep, self._is_constant = stream, keep_content, is_constant
        #: host copies, allocated on first use, because pinning takes longer than copying
        self._copies: list[Tensor] = []
        #: storages that are off the device, or (`is_leaving`) only copied so far, with their sizes
        self._entries: list[tuple[torch.UntypedStorage, int]] = []
        self.is_leaving = self._is_arriving = False

    @property
    def is_away(self) -> bool:
        """True where they are off the device, or on their way to it."""
        return self._is_arriving or (bool(self._entries) and not self.is_leaving)

    def start_emptying(self, storages: Iterable[torch.UntypedStorage]) -> None:
        """Start to copy content that matters to the host. The storages stay, and must not change until they are freed."""
        if self._entries:  # they are off, or on their way: a second round would copy nothing
            return
        self._entries, self.is_leaving = [(storage, storage.size()) for storage in storages], True
        if not self._keep or (self._is_constant and self._copies):
            return
        if [copy.numel() for copy in self._copies] != [size for _, size in self._entries]:
            pin = platform.current().pin_memory
            self._copies = [torch.empty(size, dtype=torch.uint8, pin_memory=pin) for _, size in self._entries]
        with self._stream.issue():
            for (storage, _), copy in zip(self._entries, self._copies):
                copy.copy_(_bytes(storage), non_blocking=True)

    def free(self) -> None:
        """Free the storages' device memory. Queued kernels and copies may still use it: the caller waits for them first."""
        for storage, _ in self._entries:
            storage.resize_(0)
        self.is_leaving = self._is_arriving = False

    def start_filling(self) -> None:
        """Allocate the storages again and start to copy their content; zeros where it is not kept."""
        entries, self._entries = self._entries, []
        if self.is_leaving:  # they are not freed yet
            self.is_leaving = False
            return
        for storage, size in entries:
            storage.resize_(size)
            if not self._keep:
                _bytes(storage).zero_()
        if entries and self._keep:
            with self._stream.issue():
                for (storage, _), copy in zip(entries, self._copies):
                    _bytes(storage).copy_(copy, non_blocking=True)
            self._is_arriving = True

    def fill(self) -> None:
        """Fill the storages, so that work on the current stream after this call finds their content or zeros."""
        self.start_filling()
        if self._is_arriving:
            self._stream.join()
            self._is_arriving = False


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


class StateOffloader(ABC):
    """Weights, gradients and optimizer state of one engine, each on or off the device.

    Code that reads or changes one of them calls `onload` before, even where it may be on the device already.

    Attributes:
        optimizer: None where the model does not train.
        timed: gives the context of a block in which this process waits for copies, by a name; `Timers` of a worker.
    """

    optimizer: Any
    timed: Callable[[str], AbstractContextManager[object]] = nullcontext

    def __init__(self) -> None:
        stream = platform.current().side_stream()
        self._params = Storages(stream, keep_content=True)
        self._grads = Storages(stream, keep_content=False)
        self._optimizer = Storages(stream, keep_content=True)

    @abstractmethod
    def _weight_tensors(self) -> Iterator[Tensor]:
        """Yield the tensors of the weights."""

    @abstractmethod
    def _gradient_tensors(self) -> Iterator[Tensor]:
        """Yield the tensors of the gradients."""

    @abstractmethod
    def _optimizer_tensors(self) -> Iterator[Tensor]:
        """Yield the tensors of the optimizer that are not weights."""

    def resident_bytes(self) -> dict[str, int]:
        """Return the bytes of weights, gradients and optimizer state that are on the device now."""
        weights = collect_storages(self._weight_tensors())
        gradients = collect_storages(self._gradient_tensors())
        optimizer = collect_storages(self._optimizer_tensors()) if self.optimizer is not None else {}
        resident = {"weights": weights, "gradients": gradients, "optimizer": optimizer}
        return {name: sum(storage.size() for storage in storages.values()) for name, storages in resident.items()}

    def start_offload(self, *, optimizer: bool) -> None:
        """Start to copy the optimizer's state to the host in the background; `offload` then only frees it."""
        if optimizer and self.optimizer is not None:
            self._optimizer.start_emptying(collect_storages(self._optimizer_tensors()).values())

    def offload(self, *, params: bool = False, grads: bool = False, optimizer: bool = False) -> None:
        """Offload the named states. Optimizer before params, because its storages are identified by the weights'."""
        with self.timed(OFFLOADING) if params or grads or optimizer else nullcontext():
            self._offload(params=params, grads=grads, optimizer=optimizer)

    def _offload(self, *, params: bool, grads: bool, optimizer: bool) -> None:
        named: list[Storages] = []
        if optimizer and self.optimizer is not None:
            self._optimizer.start_emptying(collect_storages(self._optimizer_tensors()).values())
            named.append(self._optimizer)
        if grads:
            self._grads.start_emptying(collect_storages(self._gradient_tensors()).values())
            named.append(self._grads)
        if params:
            self._params.start_emptying(collect_storages(self._weight_tensors()).values())
            named.append(self._params)
        if leaving := [storages for storages in named if storages.is_leaving]:
            platform.current().synchronize()
            for storages in leaving:
                storages.free()
        platform.current().empty_cache()

    def start_onload(self, *, optimizer: bool) -> None:
        """Start to copy the optimizer's state to the device in the background; `onload` waits for it."""
        if optimizer:
            self._optimizer.start_filling()

    def onload(self, *, params: bool = False, grads: bool = False, optimizer: bool = False) -> None:
        """Put the named states back; those on the device stay unchanged."""
        states = ((params, self._params), (grads, self._grads), (optimizer, self._optimizer))
        named = [storages for is_named, storages in states if is_named]
        with self.timed(OFFLOADING) if any(storages.is_away for storages in named) else nullcontext():
            for storages in named:
                storages.fill()


class Offloader(StateOffloader):
    """The state of Megatron's engine: its flat buffers, and the optimizers that it chains."""

    def __init__(self, model: BuiltModel, optimizer: MegatronOptimizer | None = None) -> None:
        super().__init__()
        self._model, self.optimizer = model, optimizer

    def _weight_tensors(self) -> Iterator[Tensor]:
        for model in self._model.models:
            yield from (parameter.data for parameter in model.parameters())
        for buffer in self._model.gradient_buffers():
            # with the distributed optimizer parameters are views of this buffer
            if buffer.param_data is not None:
                yield buffer.param_data

    def _gradient_tensors(self) -> Iterator[Tensor]:
        yield from (buffer.grad_data for buffer in self._model.gradient_buffers())

    def _optimizer_tensors(self) -> Iterator[Tensor]:
        weights = collect_storages(self._weight_tensors())
        # Megatron chains one optimizer for dense and one for expert parameters
        for optimizer in getattr(self.optimizer, "chained_optimizers", [self.optimizer]):
            inner = optimizer.optimizer
            # this rank has no parameters of that kind
            if inner is None:
                continue
            candidates = [value for state in inner.state.values() for value in state.values() if torch.is_tensor(value)]
            # under bf16 these are the fp32 main weights; in fp32 they are the weights, left to `params`
            candidates += [parameter.data for group in inner.param_groups for parameter in group["params"]]
            if isinstance(inner, InnerOptimizer):
                candidates += inner.device_tensors()
            yield from (tensor for tensor in candidates if tensor.untyped_storage().data_ptr() not in weights)
