"""megatron-core's recomputation of a module's output, without TransformerEngine.

| symbol | releases | why |
|---|---|---|
| tensor_parallel.random.CheckpointWithoutOutput.__init__ | 0.16 | it takes its default, `fp8=False`, for a format in 8 bits \
(`fp8 is not None`) and then asks TransformerEngine: `recompute_modules` layernorm and moe_act fail at the first pass |

It can go when Megatron asks whether `fp8` is true; `tests/unit/adaptors/test_megatron_recompute.py` fails then.
"""

from __future__ import annotations

import importlib
from typing import Any

_MODULE = "megatron.core.tensor_parallel.random"


def apply() -> None:
    """Take 8 bits only for what asks for them. Idempotent; call it after Megatron itself is adapted."""
    owner: Any = importlib.import_module(_MODULE).CheckpointWithoutOutput
    original = owner.__init__
    if original.__module__ == __name__:
        return

    def init(self: Any, fp8: object = False) -> None:
        original(self, fp8 or None)

    owner.__init__ = init
