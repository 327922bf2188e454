"""The use that a piece of work makes of a device, counted and not timed: kernels, collectives, copies, waits, peak memory.

A dispatch mode sees every operator call on its way to the device, so the counts are the same on hardware and on a simulator
of it. A kernel here is one operator call that reaches the device; how many launches a library makes of it is not known.
"""

from __future__ import annotations

import contextlib
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mindspeed_rl import platform

_HOST = "cpu"
#: results whose size or value the host has to know before it can go on
_READ_BACK = frozenset(
    "_local_scalar_dense is_nonzero nonzero masked_select _unique2 unique_dim unique_consecutive equal".split()
)
#: calls that are only about memory and metadata; views are told by their schema
_FREE = frozenset(
    "empty empty_like empty_strided new_empty new_empty_strided set_ resize_ _unsafe_view lift_fresh record_stream is_pinned "
    "_pin_memory _reshape_alias".split()
)
_INDEXED = frozenset("index index_put index_put_ _index_put_impl_".split())
#: frames of these pass a wait on; they do not cause it
_MACHINERY = ("/torch/", "/torch_npu/", "/simulator/", "/contextlib.py", __file__)
#: leading folders of source files, which are not shown
_ROOTS = re.compile(r".*/(?=(?:mindspeed_rl|megatron|mindspeed|vllm|vllm_ascend|tests)/)")


class CostLedger(TorchDispatchMode):
    """Count calls, copies and waits inside `with ledger:`, by phase.

    Attributes:
        kernels: (phase, operator) -> calls.
        collectives: (phase, operation, group) -> (calls, bytes of the larger side of each).
        copies: (phase, kind) -> (copies, bytes) between host and device.
        waits: (phase, reason, source line) -> number of waits of the host.
        peak_bytes: phase -> the most memory that was allocated at a time.
    """

    def __init__(self) -> None:
        super().__init__()
        device = platform.current()
        self._kind = device.current_device().type
        self.kernels: Counter[tuple[str, str]] = Counter()
        self.collectives: dict[tuple[str, str, str], tuple[int, int]] = {}
        self.copies: dict[tuple[str, str], tuple[int, int]] = {}
        self.waits: Counter[tuple[str, str, str]] = Counter()
        self.peak_bytes: dict[str, int] = {}
        self._phases: list[str] = ["outside"]
        self._undo = contextlib.ExitStack()

    # ------------------------------------------------------------------ phases

    @contextlib.contextmanager
    def at(self, phase: str) -> Iterator[None]:
        """Count the block under this phase; phases nest: counts belong to the innermost, memory to all of them.

        A phase inside another is named after the outermost too: "update / forward".
        """
        # the peak until here belongs to the phases outside
        self._measure()
        self._phases.append(phase if len(self._phases) == 1 else f"{self._phases[1]} / {phase}")
        try:
            yield
        finally:
            self._measure()
            self._phases.pop()

    def around(self, owner: object, name: str, phase: str) -> None:
        """Count calls of `owner.name` under this phase until the ledger ends; call it inside `with ledger:`."""
        self._enclose(owner, name, lambda: self.at(phase))

    def _measure(self) -> None:
        """Give the peak of memory to all open phases."""
        device = platform.current()
        peak = round(device.memory_stats().peak_gib * 2**30)
        for phase in self._phases:
            self.peak_bytes[phase] = max(self.peak_bytes.get(phase, 0), peak)
        device.reset_peak_memory()

    # ------------------------------------------------------------------ waits that are not operators

    def __enter__(self) -> CostLedger:
        if self._kind != _HOST:
            module = torch.get_device_module(self._kind)
            for owner, name, reason in (
                (module, "synchronize", "device"),
                (module, "empty_cache", "emptied cache"),
                (module.Stream, "synchronize", "stream"),
                (module.Event, "synchronize", "event"),
            ):
                self._enclose(owner, name, partial(self._count_wait, reason))
        platform.current().reset_peak_memory()
        super().__enter__()
        return self

    def __exit__(self, exc_type: object, exc_val: object, exc_tb: object) -> None:
        super().__exit__(exc_type, exc_val, exc_tb)
        self._measure()
        self._undo.close()

    def _enclose(self, owner: object, name: str, enter: Callable[[], AbstractContextManager[None]]) -> None:
        """Run calls of `owner.name` inside a context until the ledger ends."""
        own = name in vars(owner)
        original = getattr(owner, name)

        def run(*args: object, **kwargs: object) -> object:
            with enter():
                return original(*args, **kwargs)

        setattr(owner, name, run)
        self._undo.callback(lambda: setattr(owner, name, original) if own else delattr(owner, name))

    # ------------------------------------------------------------------ operators

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        namespace, _, name = func._schema.name.partition("::")
        if namespace == "c10d":
            self._collective(name, args, kwargs)
            return func(*args, **kwargs)
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        result = func(*args, **kwargs)
        made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        if name in ("copy_", "_to_copy") and namespace == "aten":
            self._copy(name, args, kwargs, made[0])
            return result
        kinds = {tensor.device.type for tensor in (*given, *made)}
        if self._kind not in kinds or func.is_view or name in _FREE:
            return result
        if name in _READ_BACK or _counts_first(name, args, kwargs):
            self._count_wait(name)
        if name != "_local_scalar_dense":  # a copy of one element, no kernel
            self.kernels[self._phases[-1], f"{namespace}::{name}"] += 1
        return result

    def _copy(self, name: str, args: Any, kwargs: Any, made: torch.Tensor) -> None:
        source, target = (args[1], args[0]) if name == "copy_" else (args[0], made)
        kinds = source.device.type, target.device.type
        if self._kind not in kinds:
            return
        if kinds[0] == kinds[1]:
            self.kernels[self._phases[-1], "aten::copy_"] += 1
            return
        queued = args[2] if name == "copy_" and len(args) > 2 else kwargs.get("non_blocking", False)
        host = source if kinds[0] == _HOST else target
        pinned = host.is_pinned()
        direction = "to the device" if kinds[0] == _HOST else "to the host"
        manner = "queued" if queued and pinned else "queued, but not pinned" if queued else "blocking"
        key = self._phases[-1], f"{direction}, {manner}"
        count, size = self.copies.get(key, (0, 0))
        self.copies[key] = count + 1, size + source.numel() * source.element_size()
        if manner != "queued":  # the host waits for copies of memory that is not pinned
            self._count_wait(f"copy {direction}")

    def _collective(self, name: str, args: Any, kwargs: Any) -> None:
        group = "?"
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, torch.ScriptObject):
                with contextlib.suppress(Exception):  # options of a call are of this type too
                    process_group = torch.distributed.ProcessGroup.unbox(leaf)
                    group = f"{process_group.group_desc or process_group.group_name} ({process_group.size()})"
                    break
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if any(tensor.device.type != self._kind for tensor in tensors):
            group += " on the host"
        key = self._phases[-1], name.strip("_"), group
        count, size = self.collectives.get(key, (0, 0))
        largest = max((tensor.numel() * tensor.element_size() for tensor in tensors), default=0)
        self.collectives[key] = count + 1, size + largest

    def _count_wait(self, reason: str) -> contextlib.nullcontext[None]:
        """Count a wait of the host; return a context for the call that waits."""
        self.waits[self._phases[-1], reason, _find_source_line()] += 1
        return contextlib.nullcontext()

    def record(self) -> dict[str, object]:
        """Return all counts as plain lists and numbers, for JSON."""
        return {
            "kernels": [[*key, count] for key, count in self.kernels.items()],
            "collectives": [[*key, *value] for key, value in self.collectives.items()],
            "copies": [[*key, *value] for key, value in self.copies.items()],
            "waits": [[*key, count] for key, count in self.waits.items()],
            "peak_bytes": dict(self.peak_bytes),
        }


def _find_source_line() -> str:
    """Return the nearest line that is neither torch's nor of this file, such as "mindspeed_rl/engine/vocab.py:96"."""
    frame = sys._getframe(2)  # 0 is this function, 1 is `_count_wait`
    while frame is not None:
        path = frame.f_code.co_filename
        if not any(part in path for part in _MACHINERY):
            return f"{_ROOTS.sub('', path)}:{frame.f_lineno}"
        frame = frame.f_back
    return "autograd"  # its threads have only frames of machinery


def _counts_first(name: str, args: Any, kwargs: Any) -> bool:
    """Return whether an operator has to know the values of a tensor before it knows the shape of its result."""
    # the true elements of a mask have to be counted
    if name in _INDEXED:
        return any(isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8) for index in args[1])
    # repeats are a tensor, and their sum is not given
    return name == "repeat_interleave" and isinstance(args[:2][-1], torch.Tensor) and kwargs.get("output_size") is None
