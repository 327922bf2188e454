"""Linear layers of vLLM's CPU build (0.32) whose weights may be replaced: packed for the kernel at their first product.

- live weights (layers.utils.dispatch_cpu_unquantized_gemm): packing at load empties `layer.weight`; `load_weights` then fails,
  and `reload_weights` is silently wrong for tied embeddings;
- live convolutions of gated delta nets (gdn_attention._causal_conv1d_*): their weights are packed at load too, in place;
- live int8 matrices (CPUInt8ScaledMMLinearKernel): the same, with their scales;
- bfloat16 without AVX-512 (_custom_ops.create_onednn_mm): "could not create a primitive descriptor for the matmul primitive".
  There the packed copy is in float32, and so is the product (see `cpu_halves`).

vLLM packs a matrix into oneDNN's own layout, with which a product of few rows takes half the time. Here the matrix itself
stays, every load of weights writes into it, and the first product after a load makes a packed copy beside it, which costs about
as much as a product of a decoding step. A load drops the copies, and so does a release of the engine's memory. This can go when
vLLM's CPU worker reloads weights in place.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any, Literal

from torch import Tensor, nn

from mindspeed_rl.adaptors import cpu_halves
from mindspeed_rl.config.device_limits import PACKED_ELEMENTS

#: kernel of vLLM's convolution for prompts
_OF_PROMPTS = "_causal_conv1d_fwd_cpu"
#: numbers of rows for which oneDNN keeps a compiled product
KEPT_SHAPES = 32


class LiveLinear:
    """The product of one layer, vLLM's `cpu_linear`: x [..., k] with weight [n, k] and bias [n] or None, [..., n].

    The weight may change between `forget` and the next product, and at no other time.

    Args:
        packs: a weight is packed if it is large, always, or never.
    """

    def __init__(self, *, packs: Literal["large", "always", "never"] = "large") -> None:
        self._packs, self._is_prepared = packs, False
        self._packed: Any = None
        self._packed_bytes = 0

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if not self._is_prepared:
            # once: what cannot be packed now cannot be until another weight is there
            self._is_prepared = True
            if self._packs != "never" and _is_packable(weight, x, PACKED_ELEMENTS if self._packs == "large" else 0):
                self._pack(weight)
        if self._packed is None:
            return nn.functional.linear(x, weight, bias)
        wide = cpu_halves.product_format(x.dtype)
        if wide == x.dtype:
            return load_kernels().onednn_mm(self._packed, x, bias)
        return load_kernels().onednn_mm(self._packed, x.to(wide), None if bias is None else bias.to(wide)).to(x.dtype)

    @property
    def packed_bytes(self) -> int:
        """Number of bytes of the copy, which no allocator of torch's counts; 0 while there is none."""
        return self._packed_bytes

    def forget(self) -> None:
        """Drop the copy: the weight is about to change, or its memory is needed."""
        self._is_prepared, self._packed, self._packed_bytes = False, None, 0

    def _pack(self, weight: Tensor) -> None:
        packed = weight.to(cpu_halves.product_format(weight.dtype)).contiguous()
        self._packed = load_kernels().create_onednn_mm(packed.t(), KEPT_SHAPES)
        self._packed_bytes = packed.nbytes


class LiveInt8Linear(LiveLinear):
    """The product with an int8 weight [n, k] and scales [n, 1]; each row of x is quantized on its own, symmetrically."""

    def multiply(self, x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
        kernels = load_kernels()
        if self._packed is None:
            # True: scales of rows of x come with each product; False: there are no zero points
            self._packed = kernels.create_onednn_scaled_mm(weight.t(), scales, x.dtype, True, False, KEPT_SHAPES)
            self._packed_bytes = weight.nbytes
        rows, x_scales, _ = kernels.onednn_scaled_int8_quant(x.reshape(-1, x.size(-1)), None, None, True)
        out = x.new_empty(rows.size(0), weight.size(0))
        kernels.onednn_scaled_mm(self._packed, rows, out, x_scales, None, None, bias)
        return out.view(*x.shape[:-1], weight.size(0))


@functools.cache
def load_kernels() -> Any:
    # for every product of a decoding step
    import vllm._custom_ops

    return vllm._custom_ops


def _is_packable(weight: Tensor, x: Tensor, min_elements: int) -> bool:
    return load_kernels()._supports_onednn and weight.dim() == 2 and weight.dtype == x.dtype and weight.numel() >= min_elements


def apply() -> None:
    """Give the linear layers that vLLM builds from now on a `LiveLinear` each. Imports vLLM."""
    import vllm.model_executor.layers.utils as layer_utils

    def dispatch(layer: Any, remove_weight: bool) -> None:
        if layer.weight.dim() == 3:  # experts, which have kernels of their own, or a convolution
            if layer.weight.size(1) == 1:
                _pack_convolutions_in_each_step()
            return
        layer.cpu_linear = LiveLinear()

    layer_utils.dispatch_cpu_unquantized_gemm = dispatch

    from vllm.model_executor.kernels.linear.scaled_mm.cpu import CPUInt8ScaledMMLinearKernel

    def keep(self: Any, layer: Any) -> None:
        layer.cpu_linear = LiveInt8Linear()

    def multiply(self: Any, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return layer.cpu_linear.multiply(x, layer.weight, layer.weight_scale, bias)

    kernel: Any = CPUInt8ScaledMMLinearKernel
    kernel.process_weights_after_loading, kernel.apply_weights = keep, multiply


@functools.cache
def _pack_convolutions_in_each_step() -> None:
    """Give the kernels of gated delta nets the weights as they were loaded; they pack these few numbers at each call."""
    from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention

    def replace(name: str) -> None:
        kernel: Any = getattr(gdn_attention, name)

        def convolve(*, x: Tensor, weight: Tensor, is_weight_packed: bool, **named: Any) -> Tensor:
            # the kernel of prompts refuses one token alone, whose matrix is contiguous either way: it gets another to skip
            wide = nn.functional.pad(x.T, (0, 0, 0, 1)).T if name == _OF_PROMPTS and x.size(1) == 1 else x
            out = kernel(x=wide, weight=weight.view(weight.size(0), -1), is_weight_packed=False, **named)
            return out if wide is x else out[:, :1]

        setattr(gdn_attention, name, convolve)

    replace(_OF_PROMPTS)
    replace("_causal_conv1d_update_cpu")


def live_layers(model: nn.Module) -> Iterator[LiveLinear]:
    """Yield the linear layers of an engine's model and of experts in int8; a tied head is the embedding's, and comes once."""
    seen = set()
    for module in model.modules():
        for layer in (getattr(module, "cpu_linear", None), *getattr(module, "cpu_experts", ())):
            if isinstance(layer, LiveLinear) and id(layer) not in seen:
                seen.add(id(layer))
                yield layer


def forget_packed(model: nn.Module) -> None:
    """Drop the copies of all layers of an engine's model."""
    for layer in live_layers(model):
        layer.forget()
