"""Megatron's writer of checkpoints: the one that is chosen from release 0.17 on, and where the results of its processes are.

| symbol | releases | why |
|---|---|---|
| dist_checkpointing.strategies.filesystem_async._get_write_results_queue (0.16), get_write_results_queue | 0.16 to 0.19 | \
it starts a process that keeps these results, imports torch for them and stays: seconds of the first save of each rank, and \
350 MiB of host memory per rank. A save that its own process runs to the end needs none |
| dist_checkpointing.strategies.torch.get_async_strategy | 0.17 to 0.19 | `save(async_sharded_save=True)` has "nvrx" for its \
default, which is nvidia-resiliency-ext, a package for NVIDIA's devices; without it every save fails |

`save` takes the strategy as an argument only since 0.17, so the answer is changed instead. It can go with 0.16,
when `engine/checkpoint.py` may say `async_strategy="mcore"`, or where Megatron falls back by itself. The queue can go where
Megatron starts the process only for saves in the background.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import queue
from collections.abc import Iterator

#: releases without a choice of strategies
_WITHOUT_STRATEGIES = ("0.16.",)
_MODULE = "megatron.core.dist_checkpointing.strategies.torch"
_WRITER = "megatron.core.dist_checkpointing.strategies.filesystem_async"
_QUEUES = ("_get_write_results_queue", "get_write_results_queue")


def _installed() -> str:
    try:
        return importlib.metadata.version("megatron-core")
    except importlib.metadata.PackageNotFoundError:  # a source tree
        return ""


def apply() -> None:
    """Make Megatron's own writer the answer for every strategy. Idempotent; call it after Megatron itself is adapted."""
    # nothing is imported for a release that needs nothing
    if _installed().startswith(_WITHOUT_STRATEGIES):
        return
    module = importlib.import_module(_MODULE)
    original = vars(module).get("get_async_strategy")
    if original is None or original.__module__ == __name__:
        return

    def get_async_strategy(async_strategy: str = "mcore", module: str | None = None) -> tuple[str, object]:
        return original("mcore", module)

    vars(module)["get_async_strategy"] = get_async_strategy


@contextlib.contextmanager
def keep_results_in_process() -> Iterator[None]:
    """Let this process keep the results of the writers of a save that starts here, and that it runs itself.

    Raises:
        RuntimeError: Megatron makes the queue of results by another name.
    """
    names = vars(importlib.import_module(_WRITER))
    name = next((name for name in _QUEUES if name in names), None)
    if name is None:
        raise RuntimeError(
            f"{_WRITER} of megatron-core {_installed()} has neither {' nor '.join(_QUEUES)}, which this adaptor changes; set "
            "async_save: true, or install a release that has one of them."
        )
    original, results = names[name], queue.Queue[object]()
    names[name] = lambda mp_mode="spawn": results
    try:
        yield
    finally:
        names[name] = original
