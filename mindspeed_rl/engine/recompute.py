"""`recompute_activation_function` where no adapted library has it: MLPs that drop what enters linear_fc2 until backward.

The output of the activation is computed again from linear_fc1's output, which backward keeps anyway; of an MLP's three large
activations one is saved at the price of an elementwise operation.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel.random import CheckpointWithoutOutput
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from torch import Tensor, nn

from mindspeed_rl.models import specs


class RecomputingMLP(MLP):
    """A gated MLP without biases that computes its activation function twice."""

    def forward(
        self, hidden_states: Tensor, per_token_scale: Tensor | None = None, **unused: Any
    ) -> tuple[Tensor, Tensor | None]:
        if not torch.is_grad_enabled():
            return super().forward(hidden_states, per_token_scale, **unused)
        inner, bias = self.linear_fc1(hidden_states)
        assert bias is None and self.config.gated_linear_unit
        # fp8=False would mean yes, and ask for TransformerEngine
        checkpoint = CheckpointWithoutOutput(fp8=None)
        scale = () if per_token_scale is None else (per_token_scale,)
        output, output_bias = self.linear_fc2(checkpoint.checkpoint(self._activate, inner, *scale))
        checkpoint.discard_output_and_register_recompute(output)
        return output, output_bias

    def _activate(self, inner: Tensor, per_token_scale: Tensor | None = None) -> Tensor:
        gate, up = inner.chunk(2, dim=-1)
        product = self.activation_func(gate) * up
        return product if per_token_scale is None else (product * per_token_scale.unsqueeze(-1)).to(inner.dtype)


class RecomputingSharedExpertMLP(SharedExpertMLP, RecomputingMLP):  # pyrefly: ignore[inconsistent-inheritance]  (Megatron's)
    """The experts that every token goes through, likewise."""


class RecomputingSequentialMLP(SequentialMLP):
    """Experts one by one, likewise."""

    def __init__(self, num_local_experts: int, config: Any, submodules: Any, pg_collection: Any = None, **named: Any) -> None:
        super().__init__(num_local_experts, config, submodules, pg_collection=pg_collection, **named)
        self.local_experts = nn.ModuleList(
            RecomputingMLP(
                self.config,
                submodules,
                ffn_hidden_size=self.config.moe_ffn_hidden_size,
                is_expert=True,
                tp_group=pg_collection.expt_tp,
            )
            for _ in range(num_local_experts)
        )


_RECOMPUTING: dict[type, type] = {
    MLP: RecomputingMLP,
    SharedExpertMLP: RecomputingSharedExpertMLP,
    SequentialMLP: RecomputingSequentialMLP,
}


def recompute_activations(spec: TransformerBlockSubmodules) -> None:
    """Replaces the MLPs in a block's spec by those that compute their activation function again in backward.

    Raises:
        ValueError: experts are grouped.
    """
    specs.substitute_layers(spec, _recomputing)


def _recomputing(name: str, part: Any) -> Any:
    module = specs.get_class(part)
    if module is None:
        return part
    if specs.GROUPED_EXPERTS is not None and issubclass(module, specs.GROUPED_EXPERTS):
        raise ValueError(
            "recompute_activation_function: experts in grouped products cannot do it here; set moe_grouped_gemm: false or use "
            "recompute_granularity."
        )
    return specs.replace_class(part, _RECOMPUTING[module]) if module in _RECOMPUTING else part
