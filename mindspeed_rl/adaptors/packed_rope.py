"""Megatron's rotary embedding of packed sequences, without reading their boundaries back and without a loop over them.

| patch | symbol | why |
|---|---|---|
| rope | rope_utils._apply_rotary_pos_emb_thd | it cuts the angles sequence by sequence, for query and key of every layer |

The boundaries lie on the host (`engine.sequence_layout.PackedLayout`), and the angles of a micro-batch are gathered once: as
long as boundaries and table are the same, what was gathered is used again. Boundaries enclose whole sequences; where not
all of their tokens are computed, `set_positions` gives their positions. It can go when Megatron gathers by positions itself.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from mindspeed_rl import platform

#: boundaries -> positions of their tokens, where these are not all tokens between them
_positions_of_computed = WeakTensorKeyDictionary()
#: boundaries whose tokens come with their own angles
_with_own_angles = WeakTensorKeyDictionary()


def expect_angles(cu_seqlens: Tensor) -> None:
    """Take the angles that come with these very boundaries as the tokens' angles, one row each, and not as a table."""
    _with_own_angles[cu_seqlens] = True


def set_positions(cu_seqlens: Tensor, positions: Tensor) -> None:
    """Set the positions of the packed tokens that come with these very boundaries: [tokens] int64 on the host."""
    _positions_of_computed[cu_seqlens] = positions


def packed_positions(cu_seqlens: Tensor, cp_size: int, cp_rank: int) -> Tensor:
    """Return [tokens / cp_size], the position in its sequence of each packed token of a CP rank (zigzag slices)."""
    lengths = cu_seqlens.diff().long() // cp_size
    starts = lengths.cumsum(0) - lengths
    positions = torch.arange(int(lengths.sum())) - starts.repeat_interleave(lengths)
    if cp_size == 1:
        return positions
    half, full = (lengths // 2).repeat_interleave(lengths), (lengths * cp_size).repeat_interleave(lengths)
    second = full - (cp_rank + 2) * half + positions  # chunk 2 * cp_size - 1 - cp_rank, less the half in front of it
    return torch.where(positions < half, cp_rank * half + positions, second)


class _Angles:
    """The angles of the packed tokens of the micro-batch that was last asked for."""

    def __init__(self) -> None:
        self._bounds: Tensor | None = None
        self._slice = 1, 0
        self._positions: Tensor | None = None
        self._table: Tensor | None = None
        self._gathered: Tensor | None = None

    def gather(self, cu_seqlens: Tensor, table: Tensor, group: dist.ProcessGroup) -> Tensor:
        """Return [tokens, ...], the rows of the table [positions, ...]."""
        cut = group.size(), group.rank()
        if cu_seqlens is not self._bounds or cut != self._slice or self._positions is None:
            positions = (
                _positions_of_computed[cu_seqlens]
                if cu_seqlens in _positions_of_computed
                else packed_positions(cu_seqlens, *cut)
            )
            (self._positions,) = platform.current().to_device([positions], table.device)
            self._bounds, self._slice, self._table = cu_seqlens, cut, None
        # a table that is held cannot be freed, so an equal address means the same one, also where it is sliced anew
        same = self._table is not None and self._table.data_ptr() == table.data_ptr() and self._table.shape == table.shape
        if not same or self._gathered is None:
            self._table, self._gathered = table, table.index_select(0, self._positions)
        return self._gathered


def apply() -> None:
    """Patch Megatron on a platform that patches nothing else there."""
    adapt(importlib.import_module("megatron.core.models.common.embeddings.rope_utils"))


def adapt(module: Any) -> None:
    """Patch Megatron's `rope_utils`; a second call changes nothing."""
    original, angles = module._apply_rotary_pos_emb_thd, _Angles()
    if original.__module__ == __name__:
        return

    def apply_thd(
        t: Tensor,
        cu_seqlens: Tensor,
        freqs: Tensor,
        rotary_interleaved: bool = False,
        multi_latent_attention: bool = False,
        mscale: float = 1.0,
        cp_group: dist.ProcessGroup | None = None,
        mla_rotary_interleaved: bool = False,
    ) -> Tensor:
        # in order: megatron-core 0.19 has another name for the second one
        settings = rotary_interleaved, multi_latent_attention or mla_rotary_interleaved, mscale
        if cu_seqlens in _with_own_angles:
            return module._apply_rotary_pos_emb_bshd(t.unsqueeze(1), freqs, *settings).squeeze(1)
        # an error, boundaries of another caller, or a table of all tokens instead of positions
        if cp_group is None or not cu_seqlens.is_cpu or (len(cu_seqlens) > 2 and freqs.size(0) == cu_seqlens[-1]):
            return original(t, cu_seqlens, freqs, *settings, cp_group=cp_group)
        packed = angles.gather(cu_seqlens, freqs, cp_group)
        return module._apply_rotary_pos_emb_bshd(t.unsqueeze(1), packed, *settings).squeeze(1)

    module._apply_rotary_pos_emb_thd = apply_thd
