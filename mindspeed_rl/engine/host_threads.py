"""Threads of the host that compute in place of a device."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from mindspeed_rl import platform
from mindspeed_rl.config.threads import count_cores


def count_host_threads() -> int:
    """Return the threads that this process may compute with.

    On the CPU these are the ones that it has. The worker of another device has one thread from Ray, and its share of the cores.
    """
    device = platform.current()
    if device.is_host:
        return torch.get_num_threads()
    return max(1, count_cores() // device.device_module.device_count())


@contextlib.contextmanager
def computing_on_host(num_threads: int) -> Iterator[None]:
    """Compute with so many threads in the block."""
    threads = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
