"""A share of the optimizer's states in host memory or in a file, updated there by the host's processors.

The states of a parameter are its float32 weights (under bf16) and the moments. A parameter whose states are off the device
keeps its gradient and its weights there. Its step goes through slices, so that little memory is needed beside the states:

    gradient        device -> host, the next slice while one is computed
    states          file -> host and back likewise; states in host memory are computed where they are
    AdamW           on the host by the vectorised kernel of torch; states on the device are updated at the same time
    weights         host -> device, rounded to bf16 on the host

A matrix of Muon needs products that a device computes, so that its states are loaded there for its step, one matrix at a time.

Numbers: the host's kernel is the one that a run on the CPU has for all of its states, so that every share gives the same bits
there. On a device the host may round in another way than the device's kernel.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from megatron.core.optimizer import MegatronOptimizer
from torch import Tensor

from mindspeed_rl import platform
from mindspeed_rl.config import MegatronConfig
from mindspeed_rl.engine.host_threads import computing_on_host, count_host_threads
from mindspeed_rl.engine.inner_optimizer import InnerOptimizer, list_parts, list_weights, replace_inner, step_adamw
from mindspeed_rl.engine.muon import MuonAdamW, move_by_adam

#: float32 numbers of a slice of one state: large enough for a disk, small beside any model
SLICE = 4 << 20
#: numbers between the starts of two states in a file: a page of memory
_ALIGNMENT = 1024
#: name of the float32 weights among the states
_MAIN = "param"
#: slices of all states in memory at a time: one is read, one is computed, one is written
_BUFFERS = 3

#: (float32 weights, gradient, states by name, group) -> update of weights and states in place
_Kernel = Callable[[Tensor, Tensor, Mapping[str, Tensor], Mapping[str, Any]], None]


@dataclass(frozen=True)
class _Slice:
    """A range of the numbers of a parameter's states.

    Attributes:
        states: indices of its states.
        start, stop: range in each of them.
    """

    states: range
    start: int
    stop: int


class _States(Protocol):
    """States off the device, all of float32 and one-dimensional."""

    def map(self) -> list[Tensor]:
        """Return the whole states; a change of their content is a change of the states."""

    def start_reading(self, item: _Slice, *, is_replaced: bool = False) -> None:
        """Start to load the next slice.

        Args:
            is_replaced: its content does not matter.
        """

    def finish_reading(self) -> list[Tensor]:
        """Return the slice that was started, to be changed in place before `start_writing`."""

    def start_writing(self) -> None:
        """Start to store the slice that was returned last; it must not change after."""

    def finish_writing(self) -> None:
        """Wait until all slices are stored."""


class _MemoryStates:
    """States in host memory, all zeros; memory is taken as they are written."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self._tensors = [torch.zeros(size) for size in sizes]
        self._next: list[Tensor] = []

    def map(self) -> list[Tensor]:
        return self._tensors

    def start_reading(self, item: _Slice, *, is_replaced: bool = False) -> None:
        self._next = [self._tensors[index][item.start : item.stop] for index in item.states]

    def finish_reading(self) -> list[Tensor]:
        return self._next

    def start_writing(self) -> None:
        pass

    def finish_writing(self) -> None:
        pass


class _Buffer:
    """Memory for a slice of the states in a file.

    Attributes:
        tensors: the slice.
        item: its place in the file.
        pending: the read or write that is under way, or done.
    """

    def __init__(self, width: int, length: int) -> None:
        self._memory = torch.empty(width, length)
        self.item, self.tensors = _Slice(range(0), 0, 0), list[Tensor]()
        self.pending: Future[None] | None = None

    def take(self, item: _Slice) -> None:
        """Make room for a slice."""
        self.finish()
        self.item, self.tensors = item, [row[: item.stop - item.start] for row in self._memory[: len(item.states)]]

    def finish(self) -> None:
        """Wait for the read or write; its error is raised here."""
        pending, self.pending = self.pending, None
        if pending is not None:
            pending.result()


class _FileStates:
    """States in a file without a name, all zeros; the system frees its blocks when the process ends, however it ends."""

    def __init__(self, sizes: Sequence[int], folder: str, width: int) -> None:
        """Make the file, with all of its blocks.

        Args:
            width: most states of a parameter.

        Raises:
            ValueError: the folder cannot hold the file.
        """
        self._sizes, self._starts, end = sizes, list[int](), 0
        for size in sizes:
            self._starts.append(end)
            end += -(-size // _ALIGNMENT) * _ALIGNMENT
        self._num_bytes, self._folder = 4 * end, folder
        try:
            self._file = tempfile.TemporaryFile(dir=folder, buffering=0)
            if end:
                os.posix_fallocate(self._file.fileno(), 0, self._num_bytes)
        except OSError as error:
            role = f"has no room for {self._num_bytes / 2**30:.2f} GiB of the optimizer's states"
            raise ValueError(self._explain(error, role)) from error
        self._buffers = [_Buffer(width, min(SLICE, max(sizes, default=0))) for _ in range(_BUFFERS)]
        self._next = self._present = self._buffers[0]
        self._executor = ThreadPoolExecutor(_BUFFERS - 1, thread_name_prefix="optimizer states")

    def map(self) -> list[Tensor]:
        if not self._num_bytes:  # an empty file cannot be mapped
            return [torch.empty(0) for _ in self._sizes]
        # by its number, for it has no name
        storage: Any = torch.UntypedStorage.from_file(f"/proc/self/fd/{self._file.fileno()}", True, self._num_bytes)
        return [torch.empty(0).set_(storage, start, (size,), (1,)) for start, size in zip(self._starts, self._sizes)]

    def start_reading(self, item: _Slice, *, is_replaced: bool = False) -> None:
        self._next = buffer = self._buffers[0]
        self._buffers = [*self._buffers[1:], buffer]
        buffer.take(item)
        if not is_replaced:
            buffer.pending = self._executor.submit(self._transfer, os.preadv, buffer)

    def finish_reading(self) -> list[Tensor]:
        self._present = self._next
        self._present.finish()
        return self._present.tensors

    def start_writing(self) -> None:
        self._present.pending = self._executor.submit(self._transfer, os.pwritev, self._present)

    def finish_writing(self) -> None:
        for buffer in self._buffers:
            buffer.finish()

    def _transfer(self, call: Callable[[int, list[memoryview], int], int], buffer: _Buffer) -> None:
        """Read or write the slice of each state.

        Raises:
            RuntimeError: the disk failed; the states are lost.
        """
        for index, tensor in zip(buffer.item.states, buffer.tensors):
            view, offset = tensor.numpy().data.cast("B"), 4 * (self._starts[index] + buffer.item.start)
            while view:
                try:
                    count = call(self._file.fileno(), [view], offset)
                except OSError as error:
                    raise RuntimeError(self._explain(error, "lost the optimizer's states")) from error
                if not count:
                    raise RuntimeError(f"optimizer_offload_path: the file in {self._folder} is too short for the states.")
                view, offset = view[count:], offset + count

    def _explain(self, error: OSError, role: str) -> str:
        room = f" ({shutil.disk_usage(self._folder).free / 2**30:.2f} GiB are free)" if error.errno == errno.ENOSPC else ""
        return f"optimizer_offload_path: {self._folder} {role}: {error.strerror}{room}."


class _NoCopies:
    """Tensors of the CPU, which are on the host."""

    def start_fetching(self, tensors: list[Tensor]) -> None:
        self._fetched = tensors

    def finish_fetching(self) -> list[Tensor]:
        return self._fetched

    def send(self, host: Tensor, target: Tensor) -> None:
        if host.data_ptr() != target.data_ptr():
            target.copy_(host)

    def finish(self) -> None:
        pass


class _StagedCopies:
    """Copies between the device and the host through pinned memory, on streams of their own."""

    def __init__(self) -> None:
        device = platform.current()
        self._arriving, self._leaving = device.side_stream(), device.side_stream()
        self._staged = [torch.empty(2, SLICE, pin_memory=device.pin_memory) for _ in range(2)]
        self._sent = torch.empty(SLICE, pin_memory=device.pin_memory)
        self._turn, self._fetched = 0, list[Tensor]()

    def start_fetching(self, tensors: list[Tensor]) -> None:
        """Start to copy float32 slices of equal length to the host."""
        self._turn = 1 - self._turn
        self._fetched = [row[: tensor.numel()] for row, tensor in zip(self._staged[self._turn], tensors)]
        with self._arriving.issue():
            for host, tensor in zip(self._fetched, tensors):
                host.copy_(tensor, non_blocking=True)

    def finish_fetching(self) -> list[Tensor]:
        """Return the slices on the host; they may change until the call after the next one starts to fetch."""
        self._arriving.synchronize()
        return self._fetched

    def send(self, host: Tensor, target: Tensor) -> None:
        """Start to copy a slice to the device, rounded to the type of the target."""
        self._leaving.synchronize()  # one slice is on its way at a time
        staged = self._sent.view(target.dtype)[: host.numel()].copy_(host)
        with self._leaving.issue():
            target.copy_(staged, non_blocking=True)

    def finish(self) -> None:
        """Let later work of the device wait for the last slice."""
        self._leaving.join()


@dataclass(frozen=True)
class _Parameter:
    """A parameter of the optimizer whose states are off the device.

    Attributes:
        weight: [n] on the device, to which the float32 weights are rounded; None: the parameter is the weight itself.
        names: names of its states.
        states: their indices.
        on_device: Muon updates it.
    """

    weight: Tensor | None
    names: tuple[str, ...]
    states: range
    on_device: bool

    def slices(self, count: int, num_states: int | None = None) -> Iterator[_Slice]:
        """Yield the slices of its `count` numbers, of the first of its states or of all."""
        for start in range(0, count, SLICE):
            yield _Slice(self.states[:num_states], start, min(count, start + SLICE))


class OffloadedOptimizer(InnerOptimizer):
    """The torch optimizer inside of a Megatron optimizer, and the states of some of its parameters off the device.

    A float32 weight that is off the device keeps its tensor there, whose storage is empty but while a checkpoint is saved or
    loaded (`on_host`), when the tensor is the host's.

    Attributes:
        gradients: gradients of a step that are not in `parameter.grad`, by parameter; they may be in host memory.
    """

    def __init__(
        self, inner: torch.optim.Optimizer, weights: Mapping[Tensor, Tensor], offloaded: Sequence[Tensor], folder: str | None
    ) -> None:
        """Make the states of parameters off the device, before the first step; their float32 weights are the model's.

        Args:
            weights: weight of the model by the float32 one that the optimizer has for it.
            offloaded: parameters of `inner`.
            folder: folder of the file with the states; None: they are in host memory.
        """
        super().__init__(inner)
        self.gradients: Mapping[Tensor, Tensor] = {}
        self._muon = inner if isinstance(inner, MuonAdamW) else None
        self._kernel: _Kernel = _step_fused if self._muon is None else _step_plain
        self._parameters: dict[Tensor, _Parameter] = {}
        sizes: list[int] = []
        for parameter in offloaded:
            is_matrix = self._muon is not None and self._muon.is_matrix(parameter)
            names = ("momentum_buffer",) if is_matrix else ("exp_avg", "exp_avg_sq")
            weight = weights.get(parameter)
            names = names if weight is None else (_MAIN, *names)
            states = range(len(sizes), len(sizes) + len(names))
            sizes += [parameter.numel()] * len(names)
            self._parameters[parameter] = _Parameter(weight, names, states, is_matrix)
        width = max((len(item.names) for item in self._parameters.values()), default=0)
        self._states: _States = _MemoryStates(sizes) if folder is None else _FileStates(sizes, folder, width)
        self._copies = _NoCopies() if platform.current().is_host else _StagedCopies()
        self._num_threads = count_host_threads()
        for parameter, record in self._parameters.items():
            for item in () if record.weight is None else record.slices(parameter.numel(), num_states=1):
                assert record.weight is not None
                self._states.start_reading(item, is_replaced=True)
                self._states.finish_reading()[0].copy_(record.weight[item.start : item.stop])
                self._states.start_writing()
        self._states.finish_writing()

    @contextlib.contextmanager
    def on_host(self) -> Iterator[None]:
        """Give the inner optimizer all states, those off the device as tensors of the host, to save or load them."""
        tensors, empty = self._states.map(), dict[Tensor, Tensor]()
        named = {
            parameter: {name: tensors[index].view(parameter.shape) for name, index in zip(item.names, item.states)}
            for parameter, item in self._parameters.items()
        }
        for parameter, states in named.items():
            if _MAIN in states:
                empty[parameter], parameter.data = parameter.data, states[_MAIN]
            self.inner.state[parameter] = {name: value for name, value in states.items() if name != _MAIN}
        try:
            yield
            for parameter, states in named.items():  # a load may have put other tensors there
                loaded = {_MAIN: parameter.data, **self.inner.state[parameter]}
                for name, value in states.items():
                    if loaded[name].data_ptr() != value.data_ptr():
                        value.copy_(loaded[name])
        finally:
            for parameter in named:
                self.inner.state.pop(parameter, None)
            for parameter, data in empty.items():
                parameter.data = data

    @torch.no_grad()
    def step(self) -> None:
        """Make one update of all parameters from their gradients."""
        self.step_others(self._parameters)  # a device computes this while the host continues
        grouped = [(parameter, group) for group in self.param_groups for parameter in group["params"]]
        here = [(parameter, group) for parameter, group in grouped if parameter in self._parameters]
        here = [(parameter, group) for parameter, group in here if self._find_gradient(parameter) is not None]
        with computing_on_host(self._num_threads):
            self._step_on_host([pair for pair in here if not self._parameters[pair[0]].on_device])
        for parameter, group in here:
            if self._parameters[parameter].on_device:
                self._step_on_device(parameter, group)

    def _find_gradient(self, parameter: Tensor) -> Tensor | None:
        return self.gradients.get(parameter, parameter.grad)

    def _step_on_host(self, pairs: Sequence[tuple[Tensor, Mapping[str, Any]]]) -> None:
        work = [(pair, item) for pair in pairs for item in self._parameters[pair[0]].slices(pair[0].numel())]
        for index, ((parameter, group), item) in enumerate(work):
            if not index:
                self._start(parameter, item)
            (gradient, *own), states = self._copies.finish_fetching(), self._states.finish_reading()
            if index + 1 < len(work):
                (following, _), next_item = work[index + 1]
                self._start(following, next_item)
            record = self._parameters[parameter]
            named = dict(zip(record.names, states))
            weight = named.get(_MAIN) if record.weight is not None else own[0]
            assert weight is not None  # the first of the states
            self._kernel(weight, gradient, named, group)
            target = parameter.view(-1) if record.weight is None else record.weight
            self._copies.send(weight, target[item.start : item.stop])
            self._states.start_writing()
        self._states.finish_writing()
        self._copies.finish()

    def _start(self, parameter: Tensor, item: _Slice) -> None:
        """Start to load what the update of a slice reads."""
        self._states.start_reading(item)
        gradient = self._find_gradient(parameter)
        assert gradient is not None
        fetched = [gradient] if self._parameters[parameter].weight is not None else [gradient, parameter]
        self._copies.start_fetching([tensor.view(-1)[item.start : item.stop] for tensor in fetched])

    def _read(self, slices: Sequence[_Slice]) -> Iterator[tuple[_Slice, list[Tensor]]]:
        """Yield the states of slices, while the next ones are loaded."""
        for item, following in zip(slices, [*slices[1:], None]):
            if item is slices[0]:
                self._states.start_reading(item)
            states = self._states.finish_reading()
            if following is not None:
                self._states.start_reading(following)
            yield item, states

    def _step_on_device(self, parameter: Tensor, group: Mapping[str, Any]) -> None:
        """Load the states of a matrix, update it, and store them."""
        record, muon = self._parameters[parameter], self._muon
        assert muon is not None
        main = parameter.view(-1)
        if record.weight is not None:
            parameter.untyped_storage().resize_(parameter.numel() * parameter.itemsize)
        momentum = torch.empty_like(parameter)
        tensors = {_MAIN: main, "momentum_buffer": momentum.view(-1)}
        slices = list(record.slices(parameter.numel()))
        for item, states in self._read(slices):
            for name, host in zip(record.names, states):
                tensors[name][item.start : item.stop].copy_(host)
        muon.state[parameter] = {"momentum_buffer": momentum}
        muon.update(parameter, group)
        del muon.state[parameter]
        for item in slices:
            self._states.start_reading(item, is_replaced=True)
            for name, host in zip(record.names, self._states.finish_reading()):
                host.copy_(tensors[name][item.start : item.stop])
            self._states.start_writing()
        self._states.finish_writing()
        if record.weight is not None:
            record.weight.copy_(main)
            platform.current().synchronize()
            parameter.untyped_storage().resize_(0)


def _step_fused(weight: Tensor, gradient: Tensor, states: Mapping[str, Tensor], group: Mapping[str, Any]) -> None:
    """AdamW by torch's vectorised kernel."""
    step_adamw([weight], [gradient], [states["exp_avg"]], [states["exp_avg_sq"]], group, group["step"])


def _step_plain(weight: Tensor, gradient: Tensor, states: Mapping[str, Tensor], group: Mapping[str, Any]) -> None:
    """AdamW as Muon's optimizer has it for what is not a matrix."""
    move_by_adam(weight, gradient, states["exp_avg"], states["exp_avg_sq"], group)


# ---------------------------------------------------------------------- inside of Megatron's optimizers


def offload_states(optimizer: MegatronOptimizer, config: MegatronConfig) -> None:
    """Take a share of an optimizer's states off the device, before its first step.

    Raises:
        ValueError: the folder cannot hold the file.
    """
    for part in list_parts(optimizer):
        _offload_part(part, config)


def choose_offloaded(parameters: Sequence[Tensor], fraction: float) -> list[Tensor]:
    """Choose parameters with at least this share of all numbers: those that stay are the largest that fit into the rest."""
    room = int((1.0 - fraction) * sum(parameter.numel() for parameter in parameters))
    stays = set[Tensor]()
    for parameter in sorted(parameters, key=torch.numel, reverse=True):
        if parameter.numel() <= room:
            room -= parameter.numel()
            stays.add(parameter)
    return [parameter for parameter in parameters if parameter not in stays]


def _offload_part(part: Any, config: MegatronConfig) -> None:
    weights = list_weights(part)
    offloaded = choose_offloaded(part.get_parameters(), config.optimizer_offload_fraction)
    for main in weights.keys() - set(offloaded):
        main.untyped_storage().resize_(main.numel() * main.itemsize)
        main.copy_(weights[main].view(main.shape))
    replace_inner(part, OffloadedOptimizer(part.optimizer, weights, offloaded, config.optimizer_offload_path), set(offloaded))
