"""RMSNorm for Megatron layers without TransformerEngine or Apex; works under sequence parallelism."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from mindspeed_rl import adaptors


class RMSNorm(nn.Module):
    """y = x / sqrt(mean(x^2) + eps) * weight, with the constructor of Megatron's own norms.

    Megatron's `finalize_model_grads` sums the gradients of parameters marked `sequence_parallel` over the TP group, which
    a norm inside a sequence-parallel region needs because each rank sees a slice of the tokens only.
    """

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **unused: Any) -> None:
        super().__init__()
        self.eps = eps
        self.zero_centered = bool(config.layernorm_zero_centered_gamma)
        initial = torch.zeros if self.zero_centered else torch.ones
        self.weight = nn.Parameter(initial(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # pyrefly: ignore[missing-attribute]  (Megatron's mark)

    def forward(self, x: Tensor) -> Tensor:
        # checkpoints of such networks hold the factor less 1
        weight = self.weight + 1.0 if self.zero_centered else self.weight
        return adaptors.rms_norm(x, weight, self.eps)
