"""Experts over the devices of a communicator, whose tokens MC2 exchanges: each adds its number to rows, and multiplies them."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
import torch_npu
from ranks import rank_settings, report

from mindspeed_rl import platform

WIDTH, CHOICES = 32, 4


def main() -> None:
    """Settings: experts, version ("" or "_v2"), steps, each [tokens of the ranks, those that take part, global_bs]."""
    settings = rank_settings()
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device_kind = platform.select("npu")
    device_kind.set_device(rank % torch.npu.device_count())
    dist.init_process_group("hccl", pg_options=device_kind.process_group_options("default", 4))
    experts, version = settings["experts"], settings["version"]
    dispatch = getattr(torch_npu, f"npu_moe_distribute_dispatch{version}")
    combine = getattr(torch_npu, f"npu_moe_distribute_combine{version}")

    def find_name(group: Any) -> str:
        return group._get_backend(torch.device("npu")).get_hccl_comm_name(dist.get_rank(group))

    def run(name: str, tokens: int, active: int, global_bs: int, counted: bool) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(100 * rank + tokens)
        x = torch.randn(tokens, WIDTH, generator=generator)
        ids = torch.rand(tokens, experts, generator=generator).argsort(-1)[:, :CHOICES].int()
        scales = torch.rand(tokens, CHOICES, generator=generator)
        common = {
            "group_ep": name, "ep_world_size": size, "ep_rank_id": rank, "moe_expert_num": experts, "global_bs": global_bs,
            "x_active_mask": None if active == tokens else (torch.arange(tokens) < active).npu(),
        }  # fmt: skip
        rows, _, info, numbers, sums, tensor_sums, weights = dispatch(
            x.npu(), ids.npu(), expert_scales=scales.npu(), expert_token_nums_type=int(counted), **common
        )[:7]
        counts = numbers if counted else numbers.diff(prepend=numbers.new_zeros(1))
        total, first = int(counts.sum()), rank * (experts // size)
        number = torch.arange(first, first + experts // size).repeat_interleave(counts.cpu())[:, None].npu()
        made = rows.clone()
        made[:total] = rows[:total] * (number + 1) + number
        names = ("expand_idx", "assist_info_for_combine")
        tensor = {} if tensor_sums.numel() == 0 else {"tp_send_counts": tensor_sums}
        out = combine(
            made, ids.npu(), **{names[bool(version)]: info}, ep_send_counts=sums, expert_scales=scales.npu(), **common, **tensor
        )
        chosen = ids[:active, :, None].float()
        expected = (scales[:active, :, None] * (x[:active, None] * (chosen + 1) + chosen)).sum(1)
        return {
            "worst": (out[:active].cpu() - expected).abs().max().item() if active else 0.0,
            "rows": list(rows.shape),
            "arrived": total,
            "left": bool(out[active:].isnan().all())
            and bool(rows[total:].isnan().all())
            and bool(weights[total:].isnan().all()),
        }

    def try_run(name: str, tokens: int, active: int = 2) -> str:
        try:
            run(name, tokens, active, 0, True)
        except RuntimeError as error:
            return str(error)
        return ""

    steps = [(tokens[rank], active[rank], global_bs) for tokens, active, global_bs in settings["steps"]]
    result: dict[str, Any] = {"worst": 0.0, "steps": []}
    for number, step in enumerate(steps):
        result["steps"].append(run(find_name(dist.group.WORLD), *step, counted=number % 2 == 0))
    if settings.get("errors"):
        second = dist.new_group(list(range(size)), pg_options=device_kind.process_group_options("second", 1))
        dist.all_reduce(torch.ones(1).npu(), group=second)
        gone = find_name(second)
        result["small"] = try_run(gone, 512)
        dist.destroy_process_group(second)
        result["gone"] = try_run(gone, 4)
        third = dist.new_group(list(range(size)), pg_options=device_kind.process_group_options("third", 4))
        dist.all_reduce(torch.ones(1).npu(), group=third)
        result["anew"] = run(find_name(third), 4, 3, 0, True)["worst"]
        result["uneven"] = try_run(find_name(third), 4 + rank)
        result["many"] = try_run(find_name(third), 513)
    report(result)


if __name__ == "__main__":
    main()
