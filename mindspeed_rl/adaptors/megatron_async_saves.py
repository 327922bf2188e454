"""megatron-core from 0.17 on: checkpoints are written in the background by Megatron's own writer.

| symbol | releases | why |
|---|---|---|
| dist_checkpointing.strategies.torch.get_async_strategy | 0.17 to 0.19 | `save(async_sharded_save=True)` has "nvrx" for its \
default, which is nvidia-resiliency-ext, a package for NVIDIA's devices; without it every save fails |

`save` takes the strategy as an argument only since 0.17, so the answer is changed instead. It can go with 0.16,
when `engine/checkpoint.py` may say `async_strategy="mcore"`, or where Megatron falls back by itself.
"""

from __future__ import annotations

import importlib
import importlib.metadata

#: releases without a choice of strategies
_WITHOUT_STRATEGIES = ("0.16.",)
_MODULE = "megatron.core.dist_checkpointing.strategies.torch"


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
