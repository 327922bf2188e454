"""Experts in int8 in vLLM's CPU build (0.32) whose weights may be replaced (experts.cpu_moe.CPUExpertsInt8).

vLLM packs them in place at load, for processors with AMX only, with SiLU only and without expert parallelism. Here each matrix
stays as it was loaded, and its product is the one of the linear layers in int8 (`vllm_cpu_linear`): oneDNN's, on every
processor, with a packed copy that goes with the next load of weights. The experts of a step are computed one after another.

It can go when vLLM's CPU worker reloads experts in int8 in place; `tests/unit/adaptors` fails then.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
from torch import Tensor, nn

from mindspeed_rl.adaptors.vllm_cpu_linear import LiveInt8Linear

_ORACLE = "vllm.model_executor.layers.fused_moe.oracle.int8"
_applied = False


def compute_experts(
    x: Tensor,
    layer: Any,
    up: list[LiveInt8Linear],
    down: list[LiveInt8Linear],
    weights: Tensor,
    ids: Tensor,
    activate: Any,
) -> Tensor:
    """Return the weighted sums of the experts of each token, [T, hidden] float32.

    Args:
        x: tokens [T, hidden].
        layer: has w13_weight [experts, 2 * inner, hidden], w2_weight [experts, hidden, inner], both int8, and their scales.
        up, down: the products of each expert.
        weights, ids: [T, k]; ids of experts in `layer`, negative for those of other ranks.
        activate: from [rows, 2 * inner] to [rows, inner].
    """
    total = torch.zeros(x.shape, dtype=torch.float32)
    for expert in ids.unique().tolist():
        if expert < 0:
            continue
        token, choice = (ids == expert).nonzero(as_tuple=True)
        wide = up[expert].multiply(x[token], layer.w13_weight[expert], layer.w13_weight_scale[expert], None)
        narrow = activate(wide)
        out = down[expert].multiply(narrow, layer.w2_weight[expert], layer.w2_weight_scale[expert], None)
        # summed in float32, as the kernel of other formats does over the experts of a token
        total.index_add_(0, token, out.float() * weights[token, choice, None].float())
    return total


def apply() -> None:
    """Give vLLM's experts in int8 these products. Imports vLLM; idempotent, and nothing in releases without such experts."""
    global _applied
    if _applied or importlib.util.find_spec(_ORACLE) is None:
        return
    _replace()
    _applied = True


def _replace() -> None:
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation, apply_moe_activation
    from vllm.model_executor.layers.fused_moe.experts import cpu_moe
    from vllm.model_executor.layers.fused_moe.oracle import int8
    from vllm.platforms import current_platform

    owner: Any = cpu_moe.CPUExpertsInt8
    base: Any = cpu_moe.mk.FusedMoEExperts

    class LiveInt8Experts(owner):
        """The experts of one layer."""

        @staticmethod
        def _supports_current_device() -> bool:
            return current_platform.is_cpu()

        @staticmethod
        def is_supported_config(
            cls: Any, moe_config: Any, weight_key: Any, activation_key: Any, activation_format: Any
        ) -> tuple[bool, str | None]:
            if moe_config.has_bias:
                return False, "experts with biases are not quantized"
            # the shapes of a linear layer, not of the kernel that packs in place
            return base.is_supported_config(cls, moe_config, weight_key, activation_key, activation_format)

        @staticmethod
        def _supports_activation(activation: MoEActivation) -> bool:
            return activation.is_gated

        @staticmethod
        def _supports_routing_method(*args: object) -> bool:
            return True  # the CPU's router has chosen the experts

        def supports_expert_map(self) -> bool:
            return True

        def process_weights_after_loading(self, layer: nn.Module) -> None:
            experts: Any = layer
            products = [[LiveInt8Linear() for _ in weight] for weight in (experts.w13_weight, experts.w2_weight)]
            self._layer, (self._up, self._down) = layer, products
            experts.cpu_experts = [*self._up, *self._down]

        def apply(
            self,
            output: Tensor,
            hidden_states: Tensor,
            w1: Tensor,
            w2: Tensor,
            topk_weights: Tensor,
            topk_ids: Tensor,
            activation: MoEActivation,
            global_num_experts: int,
            expert_map: Tensor | None,
            *others: Any,
            apply_router_weight_on_input: bool = False,
            **keywords: Any,
        ) -> None:
            def activate(wide: Tensor) -> Tensor:
                narrow = wide.new_empty(wide.size(0), wide.size(1) // 2)
                apply_moe_activation(activation, narrow, wide)
                return narrow

            ids = topk_ids if expert_map is None else expert_map[topk_ids.long()]
            weights = torch.ones_like(topk_weights) if apply_router_weight_on_input else topk_weights
            output.copy_(compute_experts(hidden_states, self._layer, self._up, self._down, weights, ids, activate))

    choose = int8.backend_to_kernel_cls

    def choose_live(backend: Any) -> list[Any]:
        return [LiveInt8Experts] if backend == int8.Int8MoeBackend.CPU else choose(backend)

    replaced: Any = int8
    replaced.backend_to_kernel_cls = choose_live
