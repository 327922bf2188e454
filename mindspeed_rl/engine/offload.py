"""Takes training state off the device while the rollout engine works, and puts it back, by emptying tensor storages."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mindspeed_rl import platform
from mindspeed_rl.platform.streams import SideStream

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
    """Storages that are emptied on the device and filled again; tensors and views over them stay valid objects.

    Copies run on a stream of their own, between pinned host memory and the device.
    """

    def __init__(self, stream: SideStream, *, keep_content: bool) -> None:
        self._stream, self._keep = stream, keep_content
        #: host copies: made when they are first needed, since pinning takes longer than copying
        self._hosts: list[Tensor] = []
        #: what is off the device, or (`_begun`) only copied so far, with its size
        self._entries: list[tuple[torch.UntypedStorage, int]] = []
        self._begun = self._arriving = False

    def begin_emptying(self, storages: Iterable[torch.UntypedStorage]) -> None:
        """Content that matters is on its way to the host. The storages stay, and must not change until they are emptied."""
        if self._entries:  # they are off, or on their way: a second round would keep copies of nothing
            return
        self._entries, self._begun = [(storage, storage.size()) for storage in storages], True
        if not self._keep:
            return
        if [host.numel() for host in self._hosts] != [size for _, size in self._entries]:
            pin = platform.current().pin_memory
            self._hosts = [torch.empty(size, dtype=torch.uint8, pin_memory=pin) for _, size in self._entries]
        with self._stream.issue():
            for (storage, _), host in zip(self._entries, self._hosts):
                host.copy_(_bytes(storage), non_blocking=True)

    @property
    def is_leaving(self) -> bool:
        """True between `begin_emptying` and `drop`."""
        return self._begun

    def drop(self) -> None:
        """Frees the storages' device memory. Queued kernels and copies may still use it: the caller waits for them first."""
        for storage, _ in self._entries:
            storage.resize_(0)
        self._begun = self._arriving = False

    def begin_filling(self) -> None:
        """The storages are allocated again; their content, or zeros, is on its way."""
        entries, self._entries = self._entries, []
        if self._begun:  # they have not left yet
            self._begun = False
            return
        for storage, size in entries:
            storage.resize_(size)
            if not self._keep:
                _bytes(storage).zero_()
        if entries and self._keep:
            with self._stream.issue():
                for (storage, _), host in zip(entries, self._hosts):
                    _bytes(storage).copy_(host, non_blocking=True)
            self._arriving = True

    def fill(self) -> None:
        """The storages have their content, or zeros, for whatever the current stream does next."""
        self.begin_filling()
        if self._arriving:
            self._stream.join()
            self._arriving = False


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


class Offloader:
    """Weights, gradients and optimizer state of one engine, each on or off the device.

    Whoever reads or changes a part asks for it by `onload` first, also where it may be on the device already.
    """

    def __init__(self, engine: TrainEngine) -> None:
        self._engine = engine
        stream = platform.current().side_stream()
        self._params = _Shelf(stream, keep_content=True)
        self._grads = _Shelf(stream, keep_content=False)
        self._optimizer = _Shelf(stream, keep_content=True)

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

    def begin_offload(self, *, optimizer: bool) -> None:
        """The optimizer's state is on its way to the host, beside what computes; `offload` will find it there."""
        if optimizer and self._engine.optimizer is not None:
            self._optimizer.begin_emptying(_storages(self._optimizer_tensors()).values())

    def offload(self, *, params: bool = False, grads: bool = False, optimizer: bool = False) -> None:
        """Takes the named parts off the device. Optimizer before params, because it is told apart by its storages."""
        named: list[_Shelf] = []
        if optimizer and self._engine.optimizer is not None:
            self._optimizer.begin_emptying(_storages(self._optimizer_tensors()).values())
            named.append(self._optimizer)
        if grads:
            self._grads.begin_emptying(_storages(buffer.grad_data for buffer in self._engine.gradient_buffers()).values())
            named.append(self._grads)
        if params:
            self._params.begin_emptying(_storages(self._weight_tensors()).values())
            named.append(self._params)
        if leaving := [shelf for shelf in named if shelf.is_leaving]:
            platform.current().synchronize()
            for shelf in leaving:
                shelf.drop()
        platform.current().empty_cache()

    def begin_onload(self, *, optimizer: bool) -> None:
        """The optimizer's state is on its way to the device, beside what computes; `onload` waits for it."""
        if optimizer:
            self._optimizer.begin_filling()

    def onload(self, *, params: bool = False, grads: bool = False, optimizer: bool = False) -> None:
        """Puts the named parts back; parts that are on the device stay as they are."""
        if params:
            self._params.fill()
        if grads:
            self._grads.fill()
        if optimizer:
            self._optimizer.fill()
