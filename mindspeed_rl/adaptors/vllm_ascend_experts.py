"""vllm-ascend's exchange of tokens between experts that are spread over devices: which one, and by all-gather with a map.

| patch | symbol | why |
|---|---|---|
| exchange | vllm_ascend.ascend_forward_context.select_moe_comm_method | vllm-ascend chooses MC2 by itself for small steps \
on A3 and 950 (on A2 from 16 devices on), and has no setting for another (`infer_moe_token_dispatcher_type`) |
| places | TokenDispatcherWithAllGather of vllm_ascend.ops.fused_moe.token_dispatcher | with `expert_map_path` it gets places \
of experts and looks them up in a table of experts, so that the weights of experts that a map moved become 0 |
| reported experts | vllm.model_executor.layers.fused_moe.routed_experts_capturer.RoutedExpertsCapturer.capture | all-gather \
and MC2 pad each replica's tokens to the largest number of one, at which vLLM 0.23 stops; MC2 and all-to-all divide them over \
tensor parallel ranks, of which each one reports its share alone |

With all-gather each device gets all tokens of the group and keeps what its experts add to them: more bytes than MC2 or
all-to-all, by plain collectives. Looked up in vllm-ascend 0.18 to 0.30. The first can go when vllm-ascend has such a setting,
the second when it looks places up among places, the third when vllm-ascend applies its own patch of that method to 0.23 too;
`tests/npu_sim/test_rollout.py` fails without them.

Not verified on NPU hardware.
"""

from __future__ import annotations

import dataclasses
import importlib
import os
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.utils.weak import WeakTensorKeyDictionary

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


def look_up_places() -> None:
    """Let the exchange by all-gather look places of experts up in a table of places. Idempotent."""
    module: Any = importlib.import_module("vllm_ascend.ops.fused_moe.token_dispatcher")
    dispatcher = module.TokenDispatcherWithAllGather
    dispatch: Callable[..., Any] = dispatcher.token_dispatch
    if dispatch.__module__ == __name__:
        return
    tables = WeakTensorKeyDictionary()  # of each layer, whose map stays

    def token_dispatch(self: Any, token_dispatch_input: Any) -> Any:
        routing = token_dispatch_input.routing
        if routing.expert_map is not None and routing.log2phy is not None:
            if routing.log2phy not in tables:
                tables[routing.log2phy] = order_by_place(routing.expert_map, routing.log2phy)
            routing = dataclasses.replace(routing, expert_map=tables[routing.log2phy])
            token_dispatch_input = dataclasses.replace(token_dispatch_input, routing=routing)
        return dispatch(self, token_dispatch_input)

    dispatcher.token_dispatch = token_dispatch


def order_by_place(expert_map: Tensor, places: Tensor) -> Tensor:
    """Return [experts] the index on this device of the expert at each place, -1 on other devices.

    Args:
        expert_map: [experts] the same by expert.
        places: [experts] place of each expert, all different (`config.expert_map` takes no copies).
    """
    return expert_map.to(places.device)[places.argsort()]


def report_own_tokens() -> None:
    """Let engines that share experts report the experts of each replica's own tokens, all of them. Idempotent."""
    try:
        module: Any = importlib.import_module("vllm.model_executor.layers.fused_moe.routed_experts_capturer")
    except ImportError:
        return  # of a release that reports none
    capturer = module.RoutedExpertsCapturer
    capture: Callable[..., None] = capturer.capture
    if capture.__module__ == __name__:
        return

    def capture_own(self: Any, layer_id: int, topk_ids: Tensor) -> None:
        context = module.get_forward_context()
        own, kind = context.num_tokens, context.moe_comm_type.name
        if kind == "ALLGATHER" and context.dp_metadata is not None:
            most, replicas = context.max_tokens_across_dp, len(context.dp_metadata.num_tokens_across_dp_cpu)
            if len(topk_ids) == most * replicas:  # else without padding, which vLLM takes
                topk_ids = topk_ids[self.dp_rank * most :][:own]
        elif kind != "ALLGATHER":
            if self.tp_size > 1 and not context.moe_comm_method.prepare_finalize.enable_shared_expert_dp:
                # MC2 pads tokens to equal shares, all-to-all to one of each rank
                total = context.padded_num_tokens if "MC2" in kind else max(own, self.tp_size)
                most = -(-total // self.tp_size)
                gathered = module.get_tp_group().all_gather(pad(topk_ids, (0, 0, 0, most - len(topk_ids))), 0)
                topk_ids = join_shares(gathered, total, self.tp_size)
            topk_ids = topk_ids[:own]
        capture(self, layer_id, topk_ids)

    capturer.capture = capture_own


def join_shares(gathered: Tensor, total: int, ranks: int) -> Tensor:
    """Return the rows of all ranks one after another, without padding.

    Args:
        gathered: [ranks x largest share, ...] shares of `tensor_split`, of which the first ones may have a row more.
        total: rows of all ranks.
    """
    small, larger = divmod(total, ranks)
    shares = gathered.chunk(ranks)
    return torch.cat([share[: small + (rank < larger)] for rank, share in enumerate(shares)])
