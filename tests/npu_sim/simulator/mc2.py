"""Dispatch and combine of experts' tokens, one operator each (MC2), between the devices of a communicator.

| stand-in | in place of |
|---|---|
| `npu::npu_moe_distribute_dispatch`, `npu::npu_moe_distribute_dispatch_v2` | aclnnMoeDistributeDispatch and its V2 |
| `npu::npu_moe_distribute_combine`, `npu::npu_moe_distribute_combine_v2` | aclnnMoeDistributeCombine and its V2 |

Dispatch sends each token to the devices of its experts: y[row] = x[token] for each (token, choice), sorted by expert, by the
device that sent it, and by its place there. Combine sends the rows back the same way: x[token] = sum_k scale[token, k] row[k].

The operators get the name of a communicator, which is looked up at each call: one that was destroyed, or made anew under
another name, is an error. So are devices that call another operator or other sizes, tokens that do not fit the buffer of the
communicator, and a token that takes part behind one that does not. Rows that the device would leave as they are have NaN, so
that whoever reads them is found. The device has bfloat16 and float16; float32 is here for comparisons with other paths.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

Tensor = torch.Tensor
#: HCCL's numbers of types
_INT8, _INT64 = 0, 5
#: what the operators take on A3
MOST_TOKENS, MOST_CHOICES, MOST_EXPERTS = 512, 16, 1024
#: settings of the operators that stand for parts which are not simulated -> the value that leaves them out
_LEFT_OUT: dict[str, tuple[object, ...]] = {
    "scales": (None,), "elastic_info": (None,), "performance_info": (None,), "quant_mode": (0, 2), "comm_quant_mode": (0,),
    "shared_expert_rank_num": (0,), "expert_shard_type": (0,), "tp_world_size": (0, 1), "comm_alg": ("",),
    "zero_expert_num": (0,), "copy_expert_num": (0,), "const_expert_num": (0,), "y_dtype": (None,), "x_dtype": (None,),
    "scales_dtype": (None,), "activation_scale": (None,), "weight_scale": (None,), "group_list": (None,),
    "shared_expert_x": (None,), "ori_x": (None,), "const_expert_alpha_1": (None,), "const_expert_alpha_2": (None,),
    "const_expert_v": (None,), "out_dtype": (0,),
}  # fmt: skip


@dataclass(frozen=True)
class _Step:
    """What a device says of its call.

    Attributes:
        operator: its number among `KERNELS`, to be equal on all devices.
        tokens: BS.
        choices, width, bytes_of_number, experts, global_tokens: to be equal on all devices.
    """

    operator: int
    tokens: int
    choices: int
    width: int
    bytes_of_number: int
    experts: int
    global_tokens: int

    def facts(self) -> list[int]:
        return list(vars(self).values())


class Communicator:
    """The communicator that a name stands for now."""

    def __init__(self, operator: str, name: str, size: int, rank: int) -> None:
        self.library, self.operator, self.handle = ctypes.CDLL("libhccl.so"), operator, ctypes.c_void_p()
        if self.library.HcomGetCommHandleByGroup(name.encode(), ctypes.byref(self.handle)):
            raise RuntimeError(f"{operator}: this process has no communicator {name}; it was destroyed, or made anew")
        found = (ctypes.c_uint32(), ctypes.c_uint32())
        self.library.HcclGetRankSize(self.handle, ctypes.byref(found[0]))
        self.library.HcclGetRankId(self.handle, ctypes.byref(found[1]))
        self.size, self.rank = size, rank
        if (size, rank) != tuple(number.value for number in found):
            raise RuntimeError(f"{operator}: rank {rank} of {size} is rank {found[1].value} of {found[0].value} in {name}")

    @property
    def buffer_bytes(self) -> int:
        return self.library.npu_sim_buffer_mib(self.handle) << 20

    def gather(self, facts: list[int]) -> list[list[int]]:
        """Return what each device says."""
        mine, all_facts = torch.tensor(facts), torch.empty(self.size, len(facts), dtype=torch.long)
        addresses = (ctypes.c_void_p(tensor.data_ptr()) for tensor in (mine, all_facts))
        self.check(self.library.HcclAllGather(*addresses, ctypes.c_uint64(len(facts)), _INT64, self.handle, None))
        return all_facts.tolist()

    def exchange(self, rows: Tensor, sent: list[int], received: list[int]) -> Tensor:
        """Return [sum of received, bytes]: the rows, [sum of sent, bytes] on each device, that are for this one, by device."""
        rows, width = rows.contiguous(), rows.shape[1]
        out = torch.empty(sum(received), width, dtype=torch.uint8)
        sides = []
        for tensor, counts in ((rows, sent), (out, received)):
            sizes = [count * width for count in counts]
            starts = [sum(sizes[:index]) for index in range(self.size)]
            both = ((ctypes.c_uint64 * self.size)(*numbers) for numbers in (sizes, starts))
            sides += [ctypes.c_void_p(tensor.data_ptr()), *both, _INT8]
        self.check(self.library.HcclAlltoAllV(*sides, self.handle, None))
        return out

    def check(self, error: int) -> None:
        if error:
            raise RuntimeError(f"{self.operator}: HCCL's error {error}, which stderr explains")


def _meet(operator: str, group: Communicator, step: _Step, counts: list[int]) -> list[list[int]]:
    """Return the counts of all devices, once their calls fit each other and the buffer."""
    sound = 0 < step.tokens <= MOST_TOKENS and 0 < step.choices <= MOST_CHOICES and step.experts <= MOST_EXPERTS
    if not sound or step.experts % group.size:
        raise RuntimeError(
            f"{operator}: {step.tokens} tokens with {step.choices} of {step.experts} experts on {group.size} devices; the "
            f"operator takes 1 to {MOST_TOKENS} tokens with {MOST_CHOICES} of {MOST_EXPERTS} experts, as many on each device"
        )
    facts = group.gather([*step.facts(), *counts])
    size = len(step.facts())
    others = [_Step(*numbers[:size]) for numbers in facts]
    for rank, other in enumerate(others):
        tokens = other.tokens if step.global_tokens else step.tokens
        if other.facts() != [step.operator, tokens, *step.facts()[2:]] or tokens * group.size > _global_tokens(step, group):
            raise RuntimeError(f"{operator}: rank {group.rank} calls it as {step}, rank {rank} as {other}")
    # as published for A3: rows of all experts of a device, and those that come back, each twice
    most, row = _global_tokens(step, group) // group.size, 2 * step.width
    local = step.experts // group.size
    needed = 2 * (local * most * group.size * _align(_align(row, 32) + 64, 512) + (step.choices + 1) * most * _align(row, 512))
    if needed > group.buffer_bytes:
        raise RuntimeError(
            f"{operator}: {most} tokens of {group.size} devices need a buffer of {-(-needed >> 20)} MiB (HCCL_BUFFSIZE), and "
            f"the communicator's has {group.buffer_bytes >> 20} MiB"
        )
    return [numbers[size:] for numbers in facts]


def _align(size: int, to: int) -> int:
    return -(-size // to) * to


def _global_tokens(step: _Step, group: Communicator) -> int:
    return step.global_tokens or step.tokens * group.size


def _count_active(operator: str, mask: Tensor | None, tokens: int) -> int:
    """Return how many tokens take part: the first ones."""
    if mask is None:
        return tokens
    if mask.dtype != torch.bool or mask.shape != (tokens,):
        raise RuntimeError(f"{operator}: x_active_mask is {mask.dtype} {tuple(mask.shape)}; simulated is bool ({tokens},)")
    active = int(mask.sum())
    if not mask[:active].all():
        raise RuntimeError(f"{operator}: x_active_mask has a token that takes part behind one that does not")
    return active


def _choose(operator: str, expert_ids: Tensor, active: int, experts: int) -> Tensor:
    """Return [active, K] experts of the tokens that take part."""
    chosen = expert_ids[:active].long()
    ordered = chosen.sort(-1).values
    if expert_ids.dtype != torch.int32 or ((chosen < 0) | (chosen >= experts)).any() or not ordered.diff(dim=-1).all():
        raise RuntimeError(f"{operator}: expert_ids are not {experts} experts' int32 numbers, different ones for each token")
    return chosen


def _refuse(operator: str, settings: dict[str, Any]) -> None:
    asked = [name for name, value in settings.items() if name in _LEFT_OUT and value not in _LEFT_OUT[name]]
    if asked:
        raise RuntimeError(f"{operator}: {', '.join(asked)} is not simulated")


def _as_bytes(tensor: Tensor) -> Tensor:
    """[rows, bytes] of [rows, numbers]."""
    return tensor.contiguous().view(torch.uint8).reshape(len(tensor), tensor.shape[1] * tensor.element_size())


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return rows in int8, and the scale of each: max |row| / 127."""
    scales = x.float().abs().amax(-1) / 127
    # a row of zeros has the scale 0
    return torch.round(x.float() / scales.where(scales > 0, 1.0)[..., None]).to(torch.int8), scales


def _dispatch(number: int, operator: str) -> Callable[..., tuple[Tensor, ...]]:
    is_v2 = operator.endswith("_v2")

    def run(
        x: Tensor, expert_ids: Tensor, group_ep: str, ep_world_size: int, ep_rank_id: int, moe_expert_num: int,
        **settings: Any,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        """Sends tokens to the devices of their experts.

        Args:
            x: [BS, H].
            expert_ids: [BS, K] int32.
            settings: x_active_mask [BS], global_bs (0: all devices have BS tokens), expert_token_nums_type (0: sums so far,
                1: counts), expert_scales [BS, K] (returned for each row), quant_mode (2: rows are sent in int8).

        Returns:
            [A, H] rows with A = global_bs min(experts of a device, K); scale of each row in int8; where each row came from,
            [A * 128] of (device, token, choice), before V2 [BS K] the place of each choice among those of its expert; rows of
            each expert; sums of the rows so far by expert and device; of tensor parallelism; weights of the rows.
        """
        _refuse(operator, settings)
        group = Communicator(operator, group_ep, ep_world_size, ep_rank_id)
        (tokens, width), choices = x.shape, expert_ids.shape[1]
        step = _Step(number, tokens, choices, width, x.element_size(), moe_expert_num, settings.get("global_bs", 0))
        active = _count_active(operator, settings.get("x_active_mask"), tokens)
        experts = _choose(operator, expert_ids, active, moe_expert_num).flatten()
        order = experts.argsort(stable=True)
        counts = torch.bincount(experts, minlength=moe_expert_num)
        all_counts = torch.tensor(_meet(operator, group, step, counts.tolist()))  # [devices, experts]
        local = moe_expert_num // group.size
        mine = all_counts[:, group.rank * local : (group.rank + 1) * local]  # [devices, experts of this one]

        scales = settings.get("expert_scales")
        weights = torch.ones(active, choices) if scales is None else scales[:active].float()
        origins = torch.stack([torch.full_like(order, group.rank), order // choices, order % choices], 1).int()
        sent, row_scales = quantize_rows(x) if settings.get("quant_mode") == 2 else (x, torch.zeros(tokens))
        by_row = torch.stack([weights.flatten()[order], row_scales[order // choices]], 1)
        parts = (sent[order // choices], origins, by_row)
        rows = torch.cat([_as_bytes(part) for part in parts], 1)
        arrived = group.exchange(rows, counts.view(group.size, local).sum(1).tolist(), mine.sum(1).tolist())
        # by device and expert -> by expert and device
        blocks = [part.split(line.tolist()) for part, line in zip(arrived.split(mine.sum(1).tolist()), mine)]
        ordered = torch.cat([device[expert] for expert in range(local) for device in blocks])
        total = len(ordered)
        most = _global_tokens(step, group) * min(local, choices)
        out = torch.full((most, width), float("nan")).to(sent.dtype)
        end = width * sent.element_size()
        out[:total] = ordered[:, :end].contiguous().view(sent.dtype)
        kept, dynamic = torch.full((2, most), float("nan"))
        kept[:total], dynamic[:total] = ordered[:, end + 12 :].contiguous().view(torch.float32).t()
        if is_v2:
            info = torch.full((max(tokens * choices, most * 128),), -1, dtype=torch.int32)
            info[: 3 * total] = ordered[:, end : end + 12].contiguous().view(torch.int32).flatten()
        else:
            info = torch.full((tokens * choices,), -1, dtype=torch.int32)
            places = torch.arange(len(order)) - (counts.cumsum(0) - counts)[experts[order]]
            info[order] = places.int()
        per_expert = mine.sum(0)
        sums = settings.get("expert_token_nums_type", 1) == 0
        return (
            out,
            dynamic,
            info,
            per_expert.cumsum(0) if sums else per_expert,
            mine.t().flatten().cumsum(0).int(),
            torch.full((settings.get("tp_world_size", 0),), total, dtype=torch.int32),
            torch.zeros(0) if scales is None else kept,
        )

    return run


def _combine(number: int, operator: str) -> Callable[..., Tensor]:
    is_v2 = operator.endswith("_v2")

    def run(
        expand_x: Tensor, expert_ids: Tensor, info: Tensor, ep_send_counts: Tensor, expert_scales: Tensor, group_ep: str,
        ep_world_size: int, ep_rank_id: int, moe_expert_num: int, **settings: Any,
    ) -> Tensor:  # fmt: skip
        """Returns [BS, H]: of each token the weighted sum of the rows that its experts made.

        Args:
            expand_x: [A, H], in the order of the dispatch, whose other results these are.
            expert_scales: [BS, K] float32.
        """
        _refuse(operator, settings)
        group = Communicator(operator, group_ep, ep_world_size, ep_rank_id)
        (tokens, choices), width, local = expert_ids.shape, expand_x.shape[1], moe_expert_num // ep_world_size
        active = _count_active(operator, settings.get("x_active_mask"), tokens)
        experts = _choose(operator, expert_ids, active, moe_expert_num).flatten()
        size, asked = expand_x.element_size(), settings.get("global_bs", 0)
        step = _Step(number, tokens, choices, width, size, moe_expert_num, asked)
        sums = ep_send_counts[: local * group.size].long()
        held = sums.diff(prepend=torch.zeros(1, dtype=torch.long)).view(local, group.size).t()  # [devices, experts of this one]
        all_held = torch.tensor(_meet(operator, group, step, held.flatten().tolist())).view(group.size, group.size, local)
        counts = torch.bincount(experts, minlength=moe_expert_num)
        if not torch.equal(all_held[:, group.rank].flatten(), counts):
            held_rows = all_held[:, group.rank].tolist()
            raise RuntimeError(f"{operator}: experts hold {held_rows} rows, and {counts.tolist()} are asked")
        total = int(held.sum())
        origins = info[: 3 * total].view(total, 3) if is_v2 else torch.zeros(total, 3, dtype=torch.int32)
        blocks = torch.cat([_as_bytes(expand_x[:total]), _as_bytes(origins)], 1).split(held.t().flatten().tolist())
        ordered = torch.cat([blocks[expert * group.size + device] for device in range(group.size) for expert in range(local)])
        back = group.exchange(ordered, held.sum(1).tolist(), counts.view(group.size, local).sum(1).tolist())
        values, came = back[:, : width * size].contiguous().view(expand_x.dtype), back[:, width * size :].contiguous()
        if is_v2:
            ranks, token, choice = came.view(torch.int32).long().unbind(1)
            if (ranks != group.rank).any():
                raise RuntimeError(f"{operator}: assist_info_for_combine is not that of the dispatch")
            at = token * choices + choice
        else:
            at = torch.empty(len(experts), dtype=torch.long)
            at[(counts.cumsum(0) - counts)[experts] + info[: len(experts)].long()] = torch.arange(len(experts))
        placed = torch.empty(active * choices, width)
        placed[at] = values.float()
        out = torch.full((tokens, width), float("nan"), dtype=expand_x.dtype)
        weighted = placed.view(active, choices, width) * expert_scales[:active].float()[..., None]
        out[:active] = weighted.sum(1).to(out.dtype)
        return out

    return run


KERNELS: dict[str, Callable[..., Any]] = {
    name: (_dispatch if "dispatch" in name else _combine)(number, name)
    for number, name in enumerate(
        f"npu_moe_distribute_{operator}{version}" for operator in ("dispatch", "combine") for version in ("", "_v2")
    )
}
