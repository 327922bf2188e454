"""A group of all ranks for jobs that need nothing but torch.distributed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch.distributed as dist


@contextlib.contextmanager
def gloo_world() -> Iterator[dist.ProcessGroup]:
    """All ranks of the job over gloo; closed at the end, so that the next job can open its own."""
    dist.init_process_group("gloo")
    try:
        world = dist.group.WORLD
        assert world is not None
        yield world
    finally:
        dist.destroy_process_group()
