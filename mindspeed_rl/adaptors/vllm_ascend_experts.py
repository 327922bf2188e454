"""vllm-ascend's exchange of tokens between experts that are spread over devices, as `infer_moe_token_dispatcher_type` says.

| patch | symbol | why |
|---|---|---|
| exchange | vllm_ascend.ascend_forward_context.select_moe_comm_method | vllm-ascend chooses MC2 by itself for small steps on \
A3 and 950 (on A2 from 16 devices on), and has no setting for another |

With all-gather each device gets all tokens of the group and keeps what its experts add to them: more bytes than MC2 or
all-to-all, by plain collectives. Looked up in vllm-ascend 0.18 to 0.30. It can go when vllm-ascend has such a setting.

Not verified on NPU hardware.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from typing import Any

from mindspeed_rl.platform.environment import EXPERTS_EXCHANGE_VARIABLE

_SELECTOR = "select_moe_comm_method"
_HOME = "vllm_ascend.ascend_forward_context"
#: modules that have imported the selector by name, where they are imported already
_USERS = ("vllm_ascend.worker.model_runner_v1", "vllm_ascend.worker.v2.model_runner")


def apply() -> None:
    """Let every step exchange by all-gather where the environment says so. Idempotent."""
    if os.environ.get(EXPERTS_EXCHANGE_VARIABLE) != "allgather":
        return
    home: Any = importlib.import_module(_HOME)
    select: Callable[..., Any] = home.select_moe_comm_method
    if select.__module__ == __name__:
        return
    allgather = home.MoECommType.ALLGATHER

    def select_moe_comm_method(*arguments: Any, **keywords: Any) -> Any:
        # None: a model without experts
        return None if select(*arguments, **keywords) is None else allgather

    for name in (_HOME, *_USERS):
        if name in sys.modules:
            setattr(sys.modules[name], _SELECTOR, select_moe_comm_method)
