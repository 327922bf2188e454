"""Stand-ins for the C++ operators that MindSpeed compiles against CANN at first use."""

from __future__ import annotations

import types

import torch
import torch_npu


def _rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, mode: int = 0) -> torch.Tensor:
    return torch_npu.npu_rotary_mul(x, cos.to(x.dtype), sin.to(x.dtype), "half" if mode == 0 else "interleave")


#: operator builder's name -> functions of the compiled module
OPERATORS = {"npu_rotary_position_embedding": {"npu_rotary_position_embedding": _rotary}}


def install() -> None:
    """Replaces the builders' compile step; an operator without a stand-in is an error that names it."""
    from mindspeed.op_builder import builder

    def load(self: object, verbose: bool = True) -> types.SimpleNamespace:
        name = self.OP_NAME
        if name not in OPERATORS:
            raise RuntimeError(
                f"MindSpeed's operator '{name}' has no stand-in in tests/npu_sim/programs/mindspeed_operators.py"
            )
        return types.SimpleNamespace(**OPERATORS[name])

    builder.MindSpeedOpBuilder.load = load
