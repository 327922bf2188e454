"""Graphs: operators of a capture with the addresses of their tensors, run again from these addresses.

A capture takes its memory from a pool of the real torch_npu, which reuses it only within the pool. What is recorded of a
tensor is its address: a replay reads and writes what lies there then, so a weight that was bound to other memory after the
capture is still read where it was. What a graph cannot hold is an error here as on the device: memory of the host, results that
the host waits for, shapes that depend on values. Collectives are not recorded; the simulated HCCL refuses them in a capture.

A graph that waits for an external event stands until the event is recorded, with the parameters that a task update has given to
its operators meanwhile; work behind a graph that nobody lets go on is an error.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch_npu
from torch.utils._pytree import tree_flatten, tree_map

from simulator.memory import cpu_view


@dataclass
class _Operator:
    """An operator with the addresses of its arguments and of what it returned; None for an argument that it returned."""

    function: Callable[..., Any]
    args: Any
    keywords: Any
    outputs: list[torch.Tensor | None]

    def run(self) -> None:
        results = filter(_is_on_device, tree_flatten(self.function(*self.args, **self.keywords))[0])
        for output, result in zip(self.outputs, results):
            if output is not None:
                cpu_view(output).copy_(cpu_view(result))


@dataclass
class _Event:
    """What a graph does with an external event: it waits for it, or clears it."""

    event: Any
    waits: bool


@dataclass
class _Graph:
    steps: list[_Operator | _Event] = field(default_factory=list)

    def replay(self) -> Generator[None]:
        """Runs the steps; stands where an event was not recorded."""
        for number in range(len(self.steps)):
            step = self.steps[number]
            if isinstance(step, _Event):
                while step.waits and not step.event.__dict__.get("recorded"):
                    yield
                step.event.recorded = step.waits
            else:
                step.run()


_capturing: _Graph | None = None
#: steps that an update records, None outside of one
_updating: list[_Operator | _Event] | None = None
#: a replay that waits for an event
_standing: Generator[None] | None = None
_inside = False


def _is_among(tensor: torch.Tensor, arguments: Any) -> bool:
    """Whether an operator returned one of its arguments."""
    owners = {item.untyped_storage().data_ptr() for item in tree_flatten(arguments)[0] if _is_on_device(item)}
    return not tensor.numel() or tensor.untyped_storage().data_ptr() in owners


def _is_on_device(item: object) -> bool:
    return isinstance(item, torch.Tensor) and item.device.type == "npu"


def _address(name: str, item: object) -> object:
    """A tensor on the device without a hold on its memory; numbers as they are."""
    if not isinstance(item, torch.Tensor):
        return item
    if item.device.type == "npu":
        return torch_npu._C._weak_ref_tensor(item)
    if item.dim():
        raise RuntimeError(f"{name} reads {tuple(item.shape)} of the host's memory while a graph is captured")
    return item.clone()


def recorded(name: str, function: Callable[..., Any], waits: bool | Callable[..., bool] = False) -> Callable[..., Any]:
    """Returns the kernel of an operator that is part of a graph while one is captured.

    Args:
        waits: the host needs its result, which no graph has; or a function of the arguments that says so.
    """

    @functools.wraps(function)
    def run(*args: Any, **keywords: Any) -> Any:
        global _inside
        if _inside:
            return function(*args, **keywords)
        if _capturing is None and _updating is None:
            if _standing is not None:
                raise RuntimeError(f"{name} comes behind a graph that waits for an event which nobody has recorded")
            return function(*args, **keywords)
        if waits(*args, **keywords) if callable(waits) else waits:
            raise RuntimeError(f"{name} needs a result on the host while a graph is captured")
        addresses, named = tree_map(functools.partial(_address, name), (args, keywords))
        if _updating is not None:  # only the parameters change; it runs with the graph
            _updating.append(_Operator(function, addresses, named, []))
            return keywords.get("out")
        assert _capturing is not None
        _inside = True
        try:
            result = function(*args, **keywords)
        finally:
            _inside = False
        outputs = [
            None if _is_among(item, (args, keywords)) else torch_npu._C._weak_ref_tensor(item)
            for item in filter(_is_on_device, tree_flatten(result)[0])
        ]
        step = _Operator(function, addresses, named, outputs)
        _capturing.steps.append(step)
        return result

    return run


def _replay(graph: Any) -> None:
    if _standing is not None:
        raise RuntimeError("a graph comes behind another one that waits for an event which nobody has recorded")
    _go_on(graph.simulated.replay())


def _go_on(replay: Generator[None]) -> None:
    """Runs a replay as far as it goes."""
    global _standing, _inside
    _inside, _standing = True, None
    try:
        for _ in replay:
            _standing = replay
            return
    finally:
        _inside = False


def install() -> None:
    """Replaces what torch_npu's graphs record and replay; their pool of memory stays its own."""
    from torch_npu.npu import graphs, streams

    kind, event = graphs.NPUGraph, streams.ExternalEvent
    begin, end, reset = kind.capture_begin, kind.capture_end, kind.reset

    def capture_begin(self: Any, *args: Any, **keywords: Any) -> None:
        global _capturing
        begin(self, *args, **keywords)
        self.simulated = _capturing = _Graph()

    def capture_end(self: Any) -> None:
        global _capturing
        _capturing = None
        end(self)

    def forget(self: Any) -> None:
        self.simulated = _Graph()
        reset(self)

    def record(self: Any, stream: Any = None) -> None:
        self.recorded = True
        if _standing is not None:
            _go_on(_standing)

    def wait(self: Any, stream: Any = None) -> None:
        if _capturing is not None:
            _capturing.steps.append(_Event(self, waits=True))
        elif not self.__dict__.get("recorded"):
            raise RuntimeError("a stream waits for an external event which nobody has recorded")

    def clear(self: Any, stream: Any = None) -> None:
        if _capturing is not None:
            _capturing.steps.append(_Event(self, waits=False))
        else:
            self.recorded = False

    starts: list[int] = []

    def group_begin(stream: Any) -> None:
        assert _capturing is not None
        starts.append(len(_capturing.steps))

    def group_end(stream: Any) -> tuple[_Graph, int, int]:
        assert _capturing is not None
        return _capturing, starts.pop(), len(_capturing.steps)

    updated: list[tuple[_Graph, int, int]] = []

    def update_begin(stream: Any, handle: tuple[_Graph, int, int]) -> None:
        global _updating
        _updating = []
        updated.append(handle)

    def update_end(stream: Any) -> None:
        global _updating
        graph, first, last = updated.pop()
        if _updating is None or len(_updating) != last - first:
            raise RuntimeError(f"an update has {len(_updating or ())} operators in place of {last - first}")
        graph.steps[first:last] = _updating
        _updating = None

    kind.capture_begin, kind.capture_end, kind.replay, kind.reset = capture_begin, capture_end, _replay, forget
    event.record, event.wait, event.reset = record, wait, clear
    groups = (("begin", group_begin), ("end", group_end))
    for module in (graphs, torch.npu):
        for name, function in groups:
            setattr(module, f"graph_task_group_{name}", function)
        module.graph_task_update_begin, module.graph_task_update_end = update_begin, update_end
