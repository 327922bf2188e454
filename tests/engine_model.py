"""A model that lays its weights out as a rollout engine does, written down once more and by hand.

Fused query, key and value with repeated key/value heads, fused gate and up, stacked experts whole or cut, a padded vocabulary,
latent attention's fused down projections. Two oddities on request: experts transposed, and a loader that deals out rows.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

_FUSED = {
    "q_proj": "qkv_proj", "k_proj": "qkv_proj", "v_proj": "qkv_proj", "gate_proj": "gate_up_proj", "up_proj": "gate_up_proj",
    "q_a_proj": "fused_qkv_a_proj", "kv_a_proj_with_mqa": "fused_qkv_a_proj",
}  # fmt: skip
_BY_COLUMNS = ("o_proj", "down_proj")
_WHOLE = ("q_a_proj", "kv_a_proj_with_mqa", "norm", "layernorm", "gate", "shared_expert_gate")
_EXPERT = re.compile(r"^(.*\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj)\.(weight(?:_scale)?)$")


@dataclass(frozen=True)
class EngineRank:
    """Where an engine rank stands.

    Attributes:
        heads, kv_heads: of the whole model.
        num_experts: of a layer.
        expert_ranks, expert_rank: over how many ranks whole experts are spread, and this rank's number; 1 cuts each over `tp`.
        transposed: experts are held as [experts, in, out].
        dealt: rows of output projections are dealt out, the even ones first.
        quantization: the format of matrices that have scales; with w4a8_dynamic, experts are not cut over `tp`.
    """

    tp: int
    rank: int
    heads: int = 1
    kv_heads: int = 1
    num_experts: int = 0
    expert_ranks: int = 1
    expert_rank: int = 0
    transposed: bool = False
    dealt: bool = False
    quantization: str | None = "int8"


class EngineModel(nn.Module):
    """Parameters under an engine's names and a `load_weights` that takes whole tensors under HF names."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], at: EngineRank, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self._at = at
        self._writers: dict[str, list[tuple[str, Callable[[Tensor, Tensor], None]]]] = {}
        sizes: dict[str, list[int]] = {}
        for name, shape in shapes.items():
            match = _EXPERT.match(name)
            if match and (match[4] == "weight" or at.quantization == "w4a8_dynamic"):
                self._expert(name, match, shape, sizes)
            else:
                self._plain(name, shape, sizes)
        self._tensors = {
            name: nn.Parameter(torch.randn(size).to(self._format(name, dtype, sizes)), requires_grad=False)
            for name, size in sizes.items()
        }

    def _format(self, name: str, dtype: torch.dtype, sizes: Mapping[str, list[int]]) -> torch.dtype:
        """Matrices that have scales are in bytes, the scales in float32, or in a byte where they are powers of two."""
        if f"{name}_scale" in sizes:
            in_int8 = self._at.quantization == "int8" or (self._at.quantization == "w4a8_dynamic" and "experts" not in name)
            return torch.int8 if in_int8 else torch.uint8
        if name.endswith("_scale"):
            return torch.uint8 if self._at.quantization == "mxfp8" else torch.float32
        return dtype

    def named_parameters(self, *args: object, **kwargs: object):
        return iter(self._tensors.items())

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        loaded = set()
        for name, tensor in weights:
            for parameter, write in self._writers.get(name, []):
                write(self._tensors[parameter].data, tensor)
                loaded.add(parameter)
        return loaded

    def _plain(self, name: str, shape: tuple[int, ...], sizes: dict[str, list[int]]) -> None:
        at, parts = self._at, name.split(".")
        module = parts[-2]
        rows, first, stop = shape[0], 0, shape[0]
        columns = slice(None)
        if module in ("embed_tokens", "lm_head"):
            padded = (rows + 63) // 64 * 64 // at.tp
            sizes[name] = [padded, *shape[1:]]
            first, stop = at.rank * padded, min((at.rank + 1) * padded, rows)
            self._add(name, name, lambda held, whole: held[: max(0, stop - first)].copy_(whole[first:stop]))
            return
        if module in _BY_COLUMNS and parts[-1] == "weight":
            width = shape[1] // at.tp
            columns = slice(at.rank * width, (at.rank + 1) * width)
        elif module in ("k_proj", "v_proj") and at.kv_heads < at.tp:
            head = at.rank * at.kv_heads // at.tp
            first, stop = head * rows // at.kv_heads, (head + 1) * rows // at.kv_heads
        elif module not in _BY_COLUMNS and not any(module == whole or module.endswith("norm") for whole in _WHOLE):
            first, stop = at.rank * rows // at.tp, (at.rank + 1) * rows // at.tp
        parameter = ".".join([*parts[:-2], _FUSED.get(module, module), parts[-1]])
        size = sizes.setdefault(parameter, [0, *(shape[1:] if columns == slice(None) else (shape[1] // at.tp,))])
        offset = size[0]
        size[0] += stop - first
        if module == "o_proj" and at.dealt:
            order = [*range(0, rows, 2), *range(1, rows, 2)]
            self._add(name, parameter, lambda held, whole: held.copy_(whole[order][:, columns]))
        else:
            index = (slice(first, stop), columns)[: len(shape)]
            self._add(name, parameter, lambda held, whole: held[offset : offset + stop - first].copy_(whole[index]))

    def _expert(self, name: str, match: re.Match[str], shape: tuple[int, ...], sizes: dict[str, list[int]]) -> None:
        at, expert, kind = self._at, int(match[2]), match[3]
        ffn, hidden = (shape[1], shape[0]) if kind == "down_proj" else shape
        local, width, start = expert, ffn // at.tp, at.rank * ffn // at.tp
        count = at.num_experts
        if at.expert_ranks > 1:
            count //= at.expert_ranks
            local, width, start = expert - at.expert_rank * count, ffn, 0
        parameter = f"{match[1]}.{'w2' if kind == 'down_proj' else 'w13'}_{match[4]}"
        size = [count, hidden, width] if kind == "down_proj" else [count, 2 * width, hidden]
        sizes[parameter] = [size[0], size[2], size[1]] if at.transposed else size
        if not 0 <= local < count:
            return
        offset = width if kind == "up_proj" else 0

        def write(held: Tensor, whole: Tensor) -> None:
            result = held[local].t() if at.transposed else held[local]
            if kind == "down_proj":
                result.copy_(whole[:, start : start + width])
            else:
                result[offset : offset + width].copy_(whole[start : start + width])

        self._add(name, parameter, write)

    def _add(self, name: str, parameter: str, write: Callable[[Tensor, Tensor], None]) -> None:
        self._writers.setdefault(name, []).append((parameter, write))
