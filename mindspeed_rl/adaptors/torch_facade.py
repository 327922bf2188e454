"""What Megatron sees under the name `torch` on a machine without an accelerator.

The facade is torch itself, except that `torch.cuda` is a CPU stand-in and that `device="cuda"` means the CPU in factory
functions. It is bound in the globals of Megatron's modules only: torch stays as it is for everybody else in the process
(`torch.cuda.is_available()` is False, vLLM and transformers notice nothing).
"""

from __future__ import annotations

import contextlib
import functools
import time
import types
from collections.abc import Callable
from typing import Any

import torch

_CPU = torch.device("cpu")


class _Event:
    """A CUDA event of a machine where everything is done when the call returns."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        self.time_s = 0.0

    def record(self, *args: object) -> None:
        self.time_s = time.perf_counter()

    def wait(self, *args: object) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: _Event) -> float:
        return (other.time_s - self.time_s) * 1e3


class _Stream:
    """A CUDA stream of a machine that has only one."""

    cuda_stream = 0

    def __init__(self, *args: object, **kwargs: object) -> None:
        pass

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *exc: object) -> None:
        return None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Stream)

    # a class that defines __eq__ loses it
    __hash__ = object.__hash__

    def wait_stream(self, other: object) -> None:
        pass

    def wait_event(self, event: object) -> None:
        pass

    def record_event(self, event: _Event | None = None) -> _Event:
        event = event or _Event()
        event.record()
        return event

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True


def _nothing(*args: object, **kwargs: object) -> None:
    return None


def _returns(value: object) -> Callable[..., Any]:
    return lambda *args, **kwargs: value


class _Cuda(types.ModuleType):
    """`torch.cuda` for the CPU. Names that are not here fall through to the real module."""

    def __init__(self) -> None:
        super().__init__("torch.cuda")
        self.Stream, self.Event = _Stream, _Event
        for name in ("Float", "Half", "BFloat16", "Long", "Int", "Byte"):
            setattr(self, f"{name}Tensor", getattr(torch, f"{name}Tensor"))
        self.is_available = self.is_initialized = self.is_current_stream_capturing = _returns(False)
        # a device in place of an index: Megatron hands it on as `device=`
        self.current_device, self.device_count = _returns(_CPU), _returns(1)
        # less than any fused kernel asks for
        self.get_device_capability = _returns((0, 0))
        self.set_device = self.synchronize = self.empty_cache = self.set_stream = self.reset_peak_memory_stats = _nothing
        self.memory_allocated = self.max_memory_allocated = _returns(0)
        self.memory_reserved = self.max_memory_reserved = _returns(0)
        self.memory_stats = lambda *args, **kwargs: {}
        self.stream = lambda stream: contextlib.nullcontext()
        self.current_stream = self.default_stream = lambda *args: _Stream()
        self.get_rng_state = lambda *args, **kwargs: torch.get_rng_state()
        self.set_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)
        self.manual_seed = self.manual_seed_all = torch.manual_seed

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cuda, name)


def _to_cpu(device: Any) -> Any:
    return _CPU if device is not None and str(device).startswith("cuda") else device


def _on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return the factory function, with "cuda" read as the CPU and without pinning, which needs a device runtime."""

    @functools.wraps(factory)
    def call(*args: object, **kwargs: object) -> torch.Tensor:
        if "device" in kwargs:
            kwargs["device"] = _to_cpu(kwargs["device"])
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        return factory(*args, **kwargs)

    return call


class _DeviceType(type):
    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, torch.device)

    def __call__(cls, *args: Any, **kwargs: Any) -> torch.device:
        return _to_cpu(torch.device(*args, **kwargs))


class _Device(metaclass=_DeviceType):
    """`torch.device`, with "cuda" read as the CPU; isinstance works."""


class _TorchFacade(types.ModuleType):
    """torch as Megatron sees it on the CPU."""

    _FACTORIES = (
        "arange as_tensor empty empty_like eye full full_like linspace ones ones_like rand rand_like randint randn "
        "randn_like tensor zeros zeros_like"
    ).split()

    def __init__(self) -> None:
        super().__init__("torch")
        self.cuda = _Cuda()
        self.device = _Device
        for name in self._FACTORIES:
            setattr(self, name, _on_cpu(getattr(torch, name)))

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def __dir__(self) -> list[str]:
        return dir(torch)


facade = _TorchFacade()
