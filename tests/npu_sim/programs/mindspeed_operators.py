"""Stand-ins for the C++ operators that MindSpeed compiles against CANN at first use.

As the compiled functions, they are called past torch's dispatcher, where nothing counts what they are made of.
"""

from __future__ import annotations

import types

import torch
import torch_npu
from simulator import calls
from simulator.fused import apply_adam_w
from torch.utils._python_dispatch import _disable_current_modes


def _rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, mode: int = 0) -> torch.Tensor:
    return torch_npu.npu_rotary_mul(x, cos.to(x.dtype), sin.to(x.dtype), "half" if mode == 0 else "interleave")


def _groups(group_list: torch.Tensor | list[int]) -> list[int]:
    """Rows of each group from their cumulative ends."""
    ends = group_list if isinstance(group_list, list) else group_list.tolist()
    return [end - start for start, end in zip([0, *ends], ends)]


def _grouped_matmul(x, weight, bias, group_list, group_type, group_list_type):
    (rows,), (weights,) = x, weight
    with _disable_current_modes():
        parts = rows.split(_groups(group_list))
        return [torch.cat([part @ matrix for part, matrix in zip(parts, weights)])]


def _grouped_matmul_backward(grad, x, weight, group_list, group_list_type):
    with _disable_current_modes():
        sizes = _groups(group_list)
        upstream, rows = grad[0].split(sizes), x[0].split(sizes)
        grad_rows = torch.cat([part @ matrix.t() for part, matrix in zip(upstream, weight[0])])
        grad_weights = torch.stack([part.t() @ above for part, above in zip(rows, upstream)])
    return [grad_rows], [grad_weights], []


def _grouped_matmul_backward_fusion(grad, weight, group_list, group_list_type):
    with _disable_current_modes():
        upstream = grad[0].split(_groups(group_list))
        return [torch.cat([part @ matrix.t() for part, matrix in zip(upstream, weight[0])])], [], []


def _adam_w(
    param: torch.Tensor, grad: torch.Tensor, exp_avg: torch.Tensor, exp_avg_sq: torch.Tensor, max_exp_avg_sq: torch.Tensor,
    step: torch.Tensor, *settings: float,
) -> None:  # fmt: skip
    calls["npu::npu_apply_fused_adamw_v2"] += 1
    apply_adam_w(param, grad, exp_avg, exp_avg_sq, max_exp_avg_sq, step, *settings)


#: operator builder's name -> functions of the compiled module
OPERATORS = {
    "npu_rotary_position_embedding": {"npu_rotary_position_embedding": _rotary},
    "npu_apply_fused_adamw_v2": {"npu_apply_fused_adamw_v2": _adam_w},
    "grouped_matmul": {
        "npu_gmm": _grouped_matmul,
        "npu_gmm_backward": _grouped_matmul_backward,
        "npu_gmm_backward_fusion": _grouped_matmul_backward_fusion,
    },
}


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
