"""Quantized formats that vLLM's CPU build (0.32) has no kernels for: MXFP8 and W4A8 (`number_formats`), emulated.

A quantization method of our own, registered in vLLM under `METHOD`. Elements and scales stay as they are loaded. The first
product after a load makes a copy of the dequantized matrix in float32, packed as in `vllm_cpu_linear` where oneDNN is there;
activations are quantized for each product, which is computed in float32. The numbers are those of a kernel with sums in
float32; it takes more time and memory than a float32 engine.

It can go when vLLM's CPU build has kernels for these formats that quantize activations too.
"""

from __future__ import annotations

import importlib.util
import re
from typing import Any

import torch
from torch import Tensor, nn

from mindspeed_rl.adaptors.vllm_cpu_int8_experts import compute_experts
from mindspeed_rl.adaptors.vllm_cpu_linear import KEPT_SHAPES, LiveLinear, load_kernels
from mindspeed_rl.config.quantized_formats import QUANTIZED_FORMATS
from mindspeed_rl.number_formats import NUMBER_FORMATS

#: name of the method in vLLM and in config.json's `quantization_config`
METHOD = "mindspeed_rl_blocks"
_applied = False


class LiveBlockLinear(LiveLinear):
    """The product with quantized weights [n, stored columns] and their scales; activations are quantized too."""

    def __init__(self, quantization: str) -> None:
        super().__init__()
        self._numbers = NUMBER_FORMATS[quantization]

    def multiply(self, x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
        """Return the product, [..., n] in the type of x."""
        if self._packed is None:
            values = self._numbers.decode(weight, scales)
            packs = load_kernels()._supports_onednn
            self._packed = load_kernels().create_onednn_mm(values.t(), KEPT_SHAPES) if packs else values
            self._packed_bytes = values.nbytes
        rows, factors = self._numbers.quantize_tokens(x.reshape(-1, x.size(-1)))
        if isinstance(self._packed, Tensor):
            out = nn.functional.linear(rows, self._packed)
        else:
            out = load_kernels().onednn_mm(self._packed, rows, None)
        if factors is not None:
            out = out * factors
        if bias is not None:
            out = out + bias.float()
        return out.to(x.dtype).view(*x.shape[:-1], weight.size(0))


def apply() -> None:
    """Register the formats in vLLM. Imports vLLM; idempotent, and nothing where vLLM is absent."""
    global _applied
    if _applied or importlib.util.find_spec("vllm.model_executor.layers.fused_moe.routed_experts") is None:
        return
    _register()
    _applied = True


def build_config(quantization: str, ignore: str) -> Any:
    """Build vLLM's description of a model in this format; imports vLLM.

    Args:
        quantization: `generate_config.quantization`.
        ignore: pattern of the names of layers that keep `dtype`.
    """
    apply()
    from vllm.model_executor.layers.quantization import get_quantization_config

    owner: Any = get_quantization_config(METHOD)
    return owner(quantization, ignore)


def _register() -> None:
    from vllm.model_executor.layers.fused_moe import RoutedExperts
    from vllm.model_executor.layers.fused_moe.activation import apply_moe_activation
    from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
    from vllm.model_executor.layers.fused_moe.routed_experts import FusedMoeWeightScaleSupported
    from vllm.model_executor.layers.linear import (
        LinearBase,
        LinearMethodBase,
        UnquantizedLinearMethod,
        register_weight_loader_v2_supported_method,
    )
    from vllm.model_executor.layers.quantization import register_quantization_config
    from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
    from vllm.model_executor.parameter import GroupQuantScaleParameter, ModelWeightParameter
    from vllm.model_executor.utils import set_weight_attrs

    @register_weight_loader_v2_supported_method
    class BlockLinearMethod(LinearMethodBase):
        """Linear layers."""

        def __init__(self, quantization: str) -> None:
            self._quantization = quantization

        def create_weights(
            self,
            layer: nn.Module,
            input_size_per_partition: int,
            output_partition_sizes: list[int],
            input_size: int,
            output_size: int,
            params_dtype: torch.dtype,
            **extra_weight_attrs: Any,
        ) -> None:
            loader = extra_weight_attrs.pop("weight_loader")
            rows = sum(output_partition_sizes)
            elements, scales = _create(self._quantization, (rows, input_size_per_partition), params_dtype)
            for name, data, kind in (
                ("weight", elements, ModelWeightParameter),
                ("weight_scale", scales, GroupQuantScaleParameter),
            ):
                parameter = kind(data=data, input_dim=1, output_dim=0, weight_loader=loader)
                layer.register_parameter(name, parameter)
                set_weight_attrs(parameter, extra_weight_attrs)

        def process_weights_after_loading(self, layer: nn.Module) -> None:
            owner: Any = layer
            owner.cpu_linear = LiveBlockLinear(self._quantization)

        def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
            return layer.cpu_linear.multiply(x, layer.weight, layer.weight_scale, bias)

    class BlockExpertsMethod(FusedMoEMethodBase):
        """Experts, computed one after another."""

        def __init__(self, quantization: str, moe: Any) -> None:
            if moe.has_bias or not moe.is_act_and_mul:
                raise ValueError("experts with biases, or without a gate, are not quantized")
            super().__init__(moe)
            self._quantization = quantization

        def create_weights(
            self,
            layer: nn.Module,
            num_experts: int,
            hidden_size: int,
            intermediate_size_per_partition: int,
            params_dtype: torch.dtype,
            **extra_weight_attrs: Any,
        ) -> None:
            inner, block_scales = intermediate_size_per_partition, {"quant_method": FusedMoeWeightScaleSupported.BLOCK.value}
            for name, shape in (("w13_weight", (2 * inner, hidden_size)), ("w2_weight", (hidden_size, inner))):
                elements, scales = _create(self._quantization, (num_experts, *shape), params_dtype)
                for suffix, data, kind in (("", elements, {}), ("_scale", scales, block_scales)):
                    parameter = nn.Parameter(data, requires_grad=False)
                    layer.register_parameter(name + suffix, parameter)
                    set_weight_attrs(parameter, extra_weight_attrs | kind)

        def get_fused_moe_quant_config(self, layer: Any) -> None:
            return None

        def process_weights_after_loading(self, layer: nn.Module) -> None:
            owner: Any = layer
            count = owner.w13_weight.size(0)
            owner.cpu_experts = [LiveBlockLinear(self._quantization) for _ in range(2 * count)]

        def apply(
            self,
            layer: Any,
            x: Tensor,
            topk_weights: Tensor,
            topk_ids: Tensor,
            shared_experts: Any = None,
            shared_experts_input: Tensor | None = None,
        ) -> Tensor:
            def activate(wide: Tensor) -> Tensor:
                narrow = wide.new_empty(wide.size(0), wide.size(1) // 2)
                apply_moe_activation(layer.activation, narrow, wide)
                return narrow

            count, weights = layer.w13_weight.size(0), topk_weights
            ids = topk_ids if layer.expert_map is None else layer.expert_map[topk_ids.long()]
            if layer.apply_router_weight_on_input:
                x, weights = x * topk_weights.to(x.dtype), torch.ones_like(topk_weights)
            up, down = layer.cpu_experts[:count], layer.cpu_experts[count:]
            return compute_experts(x, layer, up, down, weights, ids, activate).to(x.dtype)

    @register_quantization_config(METHOD)
    class BlockConfig(QuantizationConfig):
        """Keys of config.json: `format`, and `ignore`, a pattern of the names of layers that keep `dtype`."""

        def __init__(self, quantization: str, ignore: str) -> None:
            super().__init__()
            self._quantization, self._ignore = quantization, re.compile(ignore)

        def __reduce__(self) -> tuple[Any, ...]:
            """Register it where it is read: processes of a server get it with vLLM's settings."""
            return build_config, (self._quantization, self._ignore.pattern), vars(self)

        def get_name(self) -> Any:
            return METHOD

        def get_supported_act_dtypes(self) -> list[torch.dtype]:
            return [torch.bfloat16, torch.float16, torch.float32]

        @classmethod
        def get_min_capability(cls) -> int:
            return 0

        @staticmethod
        def get_config_filenames() -> list[str]:
            return []

        @classmethod
        def from_config(cls, config: dict[str, Any]) -> BlockConfig:
            return cls(config["format"], config["ignore"])

        def get_quant_method(self, layer: nn.Module, prefix: str) -> Any:
            if isinstance(layer, RoutedExperts):
                return BlockExpertsMethod(self._quantization, layer.moe_config)
            if not isinstance(layer, LinearBase):
                return None
            return UnquantizedLinearMethod() if self._ignore.search(prefix) else BlockLinearMethod(self._quantization)


def _create(quantization: str, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return elements and scales of matrices [..., rows, columns] of a rank.

    Raises:
        ValueError: the columns are not whole blocks.
    """
    sizes, columns = QUANTIZED_FORMATS[quantization], shape[-1]
    assert sizes.block is not None
    if columns % sizes.block:
        raise ValueError(
            f"generate_config.quantization ({quantization}) needs rows of a multiple of {sizes.block} elements on each rank "
            f"of the engine, and a matrix has {columns}."
        )
    elements = torch.zeros(*shape[:-1], columns // sizes.columns_per_byte, dtype=torch.uint8)
    return elements, torch.zeros(*shape[:-1], columns // sizes.block, dtype=torch.uint8 if sizes.scale_bytes == 1 else dtype)
