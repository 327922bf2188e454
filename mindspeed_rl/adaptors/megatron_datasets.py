"""Megatron's indexed datasets in processes that have no other use for Megatron: the driver and preprocessing.

`megatron.core` imports everything that it has, torch's compilers included: a second and 77 MiB, where the indexed datasets
need 0.06 s and 4 MiB. Here the packages around them stay unexecuted, and of what Megatron can do without it is told that it is
not there. Nothing of it is left in `sys.modules`, so that a later import of Megatron is a whole one, which an adaptor may come
before.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import sys
import types
from pathlib import Path
from types import ModuleType

from mindspeed_rl.importing import without

_ROOT = "megatron"
_PACKAGES = ("megatron.core", "megatron.core.datasets")
_WANTED = "megatron.core.datasets.indexed_dataset"
#: for kernels, and for tensors that torch shards: 44 MiB with what they bring
_UNWANTED = ("triton", "torch.distributed._tensor")


def indexed_dataset() -> ModuleType:
    """Return the module: Megatron's own where the process has imported Megatron, else one that is executed by itself."""
    return importlib.import_module(_WANTED) if _PACKAGES[0] in sys.modules else _alone()


@functools.cache
def _alone() -> ModuleType:
    root = importlib.util.find_spec(_ROOT)
    folders = root.submodule_search_locations if root is not None else None
    folder = next((Path(location) for location in folders or () if Path(location, "core").is_dir()), None)
    if folder is None:
        return importlib.import_module(_WANTED)  # which says what is missing
    before = {name: module for name, module in sys.modules.items() if _is_megatrons(name)}
    try:
        for name in _PACKAGES:
            shell = types.ModuleType(name)
            shell.__path__ = [str(folder.joinpath(*name.split(".")[1:]))]
            sys.modules[name] = shell
        with contextlib.ExitStack() as stack:
            for name in _UNWANTED:
                stack.enter_context(without(name))
            # the others ask it for parts of themselves: it has to come first, as it does in `megatron.core`
            importlib.import_module("megatron.core.parallel_state")
            return importlib.import_module(_WANTED)
    finally:
        for name in [name for name in sys.modules if _is_megatrons(name)]:
            del sys.modules[name]
        sys.modules.update(before)


def _is_megatrons(name: str) -> bool:
    return name == _ROOT or name.startswith(f"{_ROOT}.")
