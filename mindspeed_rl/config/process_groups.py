"""Megatron's process groups by name, and the buffers that `hccl_group_buffer` gives them."""

from __future__ import annotations

#: the groups that Megatron-core 0.16 makes, by the names it asks options for
GROUPS = (
    "cp", "dp", "dp_cp", "embd", "ep", "ep_dp", "ep_tp", "hcp", "inter_ep_dp", "intra_dist_opt_instance", "intra_dp_cp",
    "intra_ep_dp", "mp", "pos_embd", "pp", "tp", "tp_cp", "tp_dp", "tp_dp_cp", "tp_ep_mp", "tp_ep_pp",
)  # fmt: skip


def group_buffers(text: str | None) -> dict[str, int]:
    """Group name -> MiB from a key like "tp:256;dp:64" (commas do too).

    Raises:
        ValueError: a part is not group:MiB, or Megatron has no such group.
    """
    sizes: dict[str, int] = {}
    for part in (text or "").replace(",", ";").split(";"):
        if not part.strip():
            continue
        name, _, size = (piece.strip() for piece in part.partition(":"))
        if not size.isdigit() or int(size) < 1:
            raise ValueError(f"hccl_group_buffer: '{part.strip()}' is not a group with its MiB, like tp:256.")
        if name not in GROUPS:
            raise ValueError(f"hccl_group_buffer: '{name}' is not one of Megatron's groups {', '.join(GROUPS)}.")
        sizes[name] = int(size)
    return sizes
