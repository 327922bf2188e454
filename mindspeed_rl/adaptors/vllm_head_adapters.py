"""Adapters of the output layer in vLLM (0.18 to 0.32), for models that do not name it among the layers that may have one.

| patch | symbol | why |
|---|---|---|
| list of layers | model_manager.get_supported_lora_modules | only models with `embedding_modules` have lm_head in it |

It acts only where `HEAD_ADAPTERS_VARIABLE` is set: a step of an engine with adapters of the head computes them for every token.
It can go when vLLM takes adapters of every model's lm_head.
"""

from __future__ import annotations

import os
from typing import Any

from torch import nn

from mindspeed_rl.platform.environment import HEAD_ADAPTERS_VARIABLE

_applied = False


def apply() -> None:
    """Patch vLLM in this process. Imports vLLM; idempotent."""
    global _applied
    if _applied:
        return
    from vllm.lora import model_manager

    module: Any = model_manager
    list_modules = module.get_supported_lora_modules

    def get_supported_lora_modules(model: nn.Module) -> list[str]:
        added = ["lm_head"] if os.environ.get(HEAD_ADAPTERS_VARIABLE) else []
        return list(dict.fromkeys([*list_modules(model), *added]))

    module.get_supported_lora_modules = get_supported_lora_modules
    _applied = True
