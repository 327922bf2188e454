"""Megatron's forward pass by the functions of `exact_kernels` (`rl_config.exact_log_probs`), on the CPU.

| patch | symbol | why |
|---|---|---|
| products | tensor_parallel.layers: `torch.matmul` | blocks of rows; its only uses are in forward passes |
| rotation | rope_utils._apply_rotary_pos_emb_bshd | in float32, by operations that round alike at every place |

Attention, SiLU and the sums of the head are called through `adaptors`. It can go when torch's own operators are
batch-invariant; `tests/dist/test_exact_log_probs.py` compares with the rollout engine.
"""

from __future__ import annotations

import importlib
import types
from typing import Any

import torch
from torch import Tensor

from mindspeed_rl.adaptors import cpu_rope, exact_kernels

#: fields of Megatron's TransformerConfig
TRANSFORMER_SETTINGS = {"activation_func": exact_kernels.silu}

_PREFIX = "megatron.core"
_applied = False


class _ExactTorch(types.ModuleType):
    """torch as a module of Megatron has it, with another `matmul`."""

    def __init__(self, original: Any) -> None:
        super().__init__("torch")
        self._original, self.matmul = original, exact_kernels.matmul

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)


def _make_tables(freqs: Tensor, mscale: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    half = freqs[..., : freqs.size(-1) // 2].float()
    return half.cos(), half.sin()


def apply() -> None:
    """Patch Megatron in this process, after `megatron_cpu`. Imports parts of it; idempotent.

    Raises:
        RuntimeError: products of this processor depend on the number of rows.
    """
    global _applied
    if _applied:
        return
    exact_kernels.check()
    layers: Any = importlib.import_module(f"{_PREFIX}.tensor_parallel.layers")
    layers.torch = _ExactTorch(layers.torch)
    rotary: Any = importlib.import_module(f"{_PREFIX}.models.common.embeddings.rope_utils")
    # another factor is of a model that plays no part in the rollout
    cpu_rope.adapt(rotary, exact_kernels.rotate, _make_tables, scales=False)
    _applied = True
