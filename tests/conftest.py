"""Fixtures of all tests; nothing heavy is imported before a test asks for it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from ports import free_port


@pytest.fixture(scope="module")
def one_process_world() -> Iterator[None]:
    """The environment of rank 0 of 1; the process groups that a test makes are gone after its module."""
    rank = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in rank.items():
            patch.setenv(name, value)
        yield
        import torch.distributed as dist
        from megatron.core import parallel_state

        if dist.is_initialized():
            parallel_state.destroy_model_parallel()
            dist.destroy_process_group()
