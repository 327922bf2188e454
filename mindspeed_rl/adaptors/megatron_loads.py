"""Megatron's `dist_checkpointing.load` with readers that execute nothing of a checkpoint's files.

| symbol | releases | why |
|---|---|---|
| strategies.torch._get_filesystem_reader, from 0.19 in serialization too | all | its readers unpickle `.metadata`, \
and pass objects in .distcp files to a planner that loads them with `weights_only=False` |
| strategies.common.TorchCommonLoadStrategy.load_common | 0.16 | `torch.load` without `weights_only`: an environment variable \
(TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD) makes it an unpickler |
| serialization.load_common | 0.17 to 0.19 | the same; 0.19 reads it from checkpoints of earlier releases, and saves it as an \
object in .distcp |

Both take no reader as an argument, so they are replaced while a load runs. They can go when torch reads `.metadata` and objects
with `weights_only`; `tests/unit/checkpoint/test_foreign_code.py` fails for each that is no longer needed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

_PACKAGE = "megatron.core.dist_checkpointing"


@contextlib.contextmanager
def reading_with(reader: Callable[[str | Path], object], load_common: Callable[[Path], Mapping[str, Any]]) -> Iterator[None]:
    """Read checkpoints with these in the block; one load at a time in a process.

    Args:
        reader: builds a `FileSystemReader` of torch.distributed.checkpoint for the folder of a checkpoint.
        load_common: returns the content of the file `common.pt`.
    """
    strategies, common = import_module(f"{_PACKAGE}.strategies.torch"), import_module(f"{_PACKAGE}.strategies.common")
    serialization = import_module(f"{_PACKAGE}.serialization")
    owner = serialization if hasattr(serialization, "load_common") else common.TorchCommonLoadStrategy
    readers = [module for module in (strategies, serialization) if hasattr(module, "_get_filesystem_reader")]
    places: list[tuple[Any, str, Callable[..., object]]] = [
        *((module, "_get_filesystem_reader", lambda folder, *unused, **options: reader(folder)) for module in readers),
        # the folder is the only argument of the function, and the last one of the method
        (owner, "load_common", lambda *arguments: dict(load_common(Path(arguments[-1], common.COMMON_STATE_FNAME)))),
    ]
    with contextlib.ExitStack() as originals:
        for place, name, replacement in places:
            originals.callback(setattr, place, name, getattr(place, name))
            setattr(place, name, replacement)
        yield
