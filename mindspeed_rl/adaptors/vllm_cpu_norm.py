"""RMS norms of vLLM's CPU build (0.32) by its own compiled kernels.

| patch | symbol | why |
|---|---|---|
| norm, without and with the residual added | RMSNorm.forward_cpu | eight operators, called from Python: a tenth of a step |

vLLM has the kernels and takes them on GPUs only. What they do not know (a variance of part of a row, no weight, a weight of
another format) stays as it was, and so does bfloat16 without AVX-512: there they cut its digits off, and do not round, which
doubles the error of what is added up along the layers. With it they round once, where the operators round twice. It can go when
vLLM's CPU platform takes them itself; `tests/unit/adaptors` fails then.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mindspeed_rl.adaptors.cpu_products import has_avx512

_applied = False


def apply() -> None:
    """Norms of this process's models are computed in one call each. Imports vLLM; idempotent."""
    global _applied
    if _applied:
        return
    from vllm.model_executor.layers.layernorm import RMSNorm

    norm: Any = RMSNorm
    formats = {torch.float32, torch.bfloat16} if has_avx512() else {torch.float32}

    def forward_cpu(self: Any, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        known = self.has_weight and self.variance_size_override is None
        if not known or x.dtype != self.weight.dtype or x.dtype not in formats:
            return self.forward_native(x, residual)
        # the kernels take rows that lie one behind the other; heads of a layer's queries do not, nor what ranks have gathered
        x = x.contiguous()
        if residual is None:
            out = torch.empty_like(x)
            torch.ops._C.rms_norm(out, x, self.weight.data, self.variance_epsilon)
            return out
        residual = residual.contiguous()
        torch.ops._C.fused_add_rms_norm(x, residual, self.weight.data, self.variance_epsilon)
        return x, residual

    norm.forward_cpu = forward_cpu
    _applied = True
