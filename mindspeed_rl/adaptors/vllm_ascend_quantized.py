"""vllm-ascend's quantized matrices as weights that every sync replaces in place.

| patch | symbol | why |
|---|---|---|
| experts without NZ | ACL_FORMAT_FRACTAL_NZ of vllm_ascend.quantization.methods.w8a8_dynamic | int8 experts are cast to \
FRACTAL_NZ at load, whatever `weight_nz_mode` says, for the one kernel that reads nothing else \
(`grouped_matmul_swiglu_quant`). In NZ a slice of a matrix is not a strided view, so no sync could write it. The symbol is set \
to the number of the plain format (ND), and the kernel is switched off (`FUSION`): products, activation and quantization are \
then operators that take both formats |
| reported experts | apply and select_experts of the same module, and of w8a8_mxfp8 and w4a8 next to it | \
`enable_return_routed_experts` reports the experts of each token, which router replay reads; vllm-ascend does it for experts \
that are not quantized, and leaves zeros for others |
| gates of shared experts | _forward_shared_experts of AscendFusedMoE, from 0.24 on of AscendMoERunner, of \
vllm_ascend.ops.fused_moe.fused_moe | where shared experts are in int8, vllm-ascend leaves out their gate, which Qwen2-MoE has |

Layouts: as loaded, a matrix is [rows, columns] with scales [rows, 1], in MXFP8 [rows, columns / 32]; of int4 it is [rows / 2,
columns], two rows in a byte, with scales [rows, columns / 256]; experts are stacks.

| layer | elements of the kernel | scales of the kernel | in memory |
|---|---|---|---|
| int8 | [columns, rows] | [rows], of layers and of experts' w13 once more in float32 | as of the kernel |
| int8 experts | [experts, columns, rows] | [experts, rows] | as of the kernel |
| MXFP8 | [columns, rows] | [columns / 64, rows, 2] | as of the kernel |
| MXFP8 experts | [experts, columns, rows] | [experts, columns / 64, rows, 2] | as loaded |
| int4 experts | [experts, columns, rows / 8] int32 | [experts, columns / 256, rows] int64, float32 in its lower half | as of \
the kernel |

Experts in int4 (W4A8_DYNAMIC) have the layout that vllm-ascend calls version 1.0.0, with a scale per group. It is the one whose
loaded bytes are the kernel's, in the same places: the older one loads an element per byte and packs it into new memory. A scale
per row alone goes to a kernel of its own (`grouped_matmul_swiglu_quant_v2`), which reads FRACTAL_NZ only. Groups have 256
elements because the kernel of A2 and A3 takes no others (aclnnGroupedMatmulV5, A8W4). Its product is with x - 8; `scale_bias`,
8 times the sum of the scaled elements of a row, puts that right. Checkpoints bring it along; here each engine computes it from
what was loaded.

What is loaded is a view of the kernel's memory, or the other way round, so addresses stay, which captured graphs need.
Scales of MXFP8 layers are no such view: they are loaded into memory of their own and then copied. MXFP8 is loaded as plain
bytes, because copies between its types would convert numbers.

Looked up in vllm-ascend 0.18 and 0.23 to 0.26. The first patch can go when vllm-ascend leaves experts in the plain format for
the kernels that take it, the second when quantized experts report what they choose, the third when the gate is there;
`tests/npu_sim/test_rollout.py` fails without them.

Not verified on NPU hardware.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from mindspeed_rl.adaptors import npu_devices
from mindspeed_rl.config.quantized_formats import QUANTIZED_FORMATS, find_format
from mindspeed_rl.number_formats import split_pairs

#: settings of vllm-ascend with which experts are computed in the plain format
FUSION = {"ascend_fusion_config": {"fusion_ops_gmmswigluquant": False}}
#: values of `generate_config.quantization` that need them
UNFUSED = ("int8", "w4a8")
#: format of a matrix -> vllm-ascend's name of it
_SCHEMES = {"int8": "W8A8_DYNAMIC", "mxfp8": "W8A8_MXFP8", "w4a8_dynamic": "W4A8_DYNAMIC"}
#: further keys of a model's description, for models with experts in int4
_INT4_KEYS = {"version": "1.0.0", "group_size": QUANTIZED_FORMATS["w4a8_dynamic"].block}
_METHODS = "vllm_ascend.quantization.methods"
_INT8 = f"{_METHODS}.w8a8_dynamic"
_CAST = "ACL_FORMAT_FRACTAL_NZ"
#: module -> its class of quantized experts
_SCHEMES_OF_EXPERTS = {
    _INT8: "AscendW8A8DynamicFusedMoEMethod",
    f"{_METHODS}.w8a8_mxfp8": "AscendW8A8MXFP8DynamicFusedMoEMethod",
    f"{_METHODS}.w4a8": "AscendW4A8DynamicFusedMoEMethod",
}
_LAYER = "vllm_ascend.ops.fused_moe.fused_moe"
_SHARED = "_forward_shared_experts"
#: classes that compute shared experts: of 0.23, and of 0.24 to 0.26
_OWNERS = ("AscendFusedMoE", "AscendMoERunner")
#: releases whose quantized experts are chosen by `select_experts` of their module, and whose runner marks layers that report
_REPORTING = ((0, 23), (0, 24), (0, 25), (0, 26))
#: last release with a scale of int4 per group
_LAST_WITH_GROUPS = (0, 26)
_PLAIN = 2
_EXPERTS = ("w13_weight", "w2_weight")
_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\..*")
#: types of elements other than int8: of the kernels, MXFP8 and int4, and while they are loaded
BLOCK_TYPES = (torch.float8_e4m3fn, torch.int32, torch.uint8)
_BLOCK = 32
#: bytes of int4 that are summed at once
_CHUNK = 1 << 26


def keep_plain_format() -> None:
    """Let int8 experts stay in the plain format when they are loaded, which `after_load` checks. Idempotent."""
    try:
        module: Any = importlib.import_module(_INT8)
    except ImportError:
        return  # of a release that has int8 elsewhere
    if hasattr(module, _CAST):
        setattr(module, _CAST, _PLAIN)


def report_experts() -> None:
    """Let layers of quantized experts report the experts of each token, where the engine reports them. Idempotent."""
    for name, scheme in _SCHEMES_OF_EXPERTS.items():
        try:
            module: Any = importlib.import_module(name)
        except ImportError:
            continue  # of a release that has this format elsewhere, or not at all
        _report_experts_of(module, getattr(module, scheme, None))


def _report_experts_of(module: Any, scheme: Any) -> None:
    """Let the experts of one format report.

    Args:
        module: it has the function that chooses experts.
        scheme: class of the format's experts in it; None where this release has none.
    """
    select = getattr(module, "select_experts", None)
    if scheme is None or select is None or select.__module__ == __name__:
        return  # `check_release` refuses releases without them where experts are to be reported
    compute = scheme.apply
    computed: list[Any] = []  # the layer that is computed and has not chosen yet

    def apply(self: Any, layer: Any, *arguments: Any, **keywords: Any) -> Any:
        # vllm-ascend's runner leaves it at each layer of an engine that reports experts
        if getattr(layer, "_ascend_routed_experts_capturer", None) is None:
            return compute(self, layer, *arguments, **keywords)
        computed.append(layer)
        try:
            result = compute(self, layer, *arguments, **keywords)
            if computed:
                raise RuntimeError("quantized experts were chosen by another function than select_experts, and not reported")
            return result
        finally:
            computed.clear()

    def select_experts(*arguments: Any, **keywords: Any) -> tuple[Tensor, Tensor]:
        weights, experts = select(*arguments, **keywords)
        if computed:
            layer = computed.pop()
            layer._ascend_routed_experts_capturer.capture(layer_id=layer.layer_id, topk_ids=experts)
        return weights, experts

    scheme.apply, module.select_experts = apply, select_experts


def weigh_shared_experts() -> None:
    """Let shared experts in int8 have the gate of their model. Idempotent."""
    owner, compute = _find_shared_experts()
    if owner is None or compute is None or _applies_gate(compute):
        return

    def weigh(self: Any, x: Tensor, *others: Any) -> Tensor | None:
        result, experts = compute(self, x, *others), self._shared_experts
        if result is None or not _has_int8_gate(experts):
            return result
        gate, _ = experts.expert_gate(x)
        return gate.sigmoid() * result

    setattr(owner, _SHARED, weigh)


def _find_shared_experts() -> tuple[type | None, Callable[..., Any] | None]:
    """Return the class that computes shared experts, and its function; None where this release has them elsewhere."""
    try:
        layers: Any = importlib.import_module(_LAYER)
    except ImportError:
        return None, None
    owners = [owner for name in _OWNERS if (owner := getattr(layers, name, None)) is not None and _SHARED in vars(owner)]
    return (owners[0], vars(owners[0])[_SHARED]) if owners else (None, None)


def _applies_gate(compute: Callable[..., Any]) -> bool:
    return compute.__module__ == __name__ or "expert_gate" in compute.__code__.co_names


def _has_int8_gate(experts: Any) -> bool:
    has_gate = getattr(experts, "expert_gate", None) is not None and hasattr(experts, "down_proj")
    return has_gate and _has_type(experts.down_proj.weight, torch.int8)


def check_release(quantization: str | None, release: tuple[int, int], *, reports_experts: bool) -> None:
    """Check that a release of vllm-ascend has what a format needs.

    Args:
        quantization: `generate_config.quantization`.
        release: its first two numbers.
        reports_experts: the engine returns the experts of each token.

    Raises:
        ValueError: it has not.
    """
    installed, known = ".".join(map(str, release)), f"0.23 to {'.'.join(map(str, _LAST_WITH_GROUPS))}"
    if quantization == "w4a8" and release > _LAST_WITH_GROUPS:
        raise ValueError(
            f"generate_config.quantization (w4a8) needs vllm-ascend {known}, and this is {installed}, in which experts in int4 "
            "have no scales of groups; set int8"
        )
    if quantization is not None and reports_experts and release not in _REPORTING:
        raise ValueError(
            f"generate_config.quantization ({quantization}): quantized experts report what they chose with vllm-ascend {known} "
            f"only, and this is {installed}; set router_replay.mode: R2 and eplb_token_collects: false"
        )


def describe_model(quantization: str, names: Mapping[str, bool]) -> dict[str, Any]:
    """Return the content of `quant_model_description.json`, which ModelSlim writes next to quantized weights.

    It is passed as a part of config.json, from which vllm-ascend takes it without a file. A name that a model does not have is
    ignored; one that is missing is an error of vllm-ascend.

    Args:
        quantization: `generate_config.quantization`.
        names: HF names of the weights -> True for those that are quantized.

    Raises:
        ValueError: vllm-ascend does not have the format.
    """
    form = find_format(quantization, "npu")
    if form not in _SCHEMES:
        raise ValueError(f"generate_config.quantization ({quantization}) is not available in this engine")
    npu_devices.check_quantization(quantization, npu_devices.read_soc_number)
    # releases up to 0.18 look the head up also where it is the embedding, which has no weights of its own
    kinds = {"lm_head.weight": "FLOAT"}
    for name, is_quantized in names.items():
        expert = _EXPERT.fullmatch(name)
        matrix_form = form if expert is not None else QUANTIZED_FORMATS[form].others or form
        kind = _SCHEMES[matrix_form] if is_quantized else "FLOAT"
        if expert is not None:
            # vllm-ascend looks the experts of a layer up by their module's name or by those of the first expert
            kinds[f"{expert[1]}.weight"] = kind
            if expert[2] != "0":
                continue
        if name.endswith(".weight"):
            kinds[name] = kind
            # vLLM gives Hy3's shared experts the name of their block
            kinds[name.replace(".mlp.shared_mlp.", ".mlp.")] = kind
    return {"quant_method": "ascend", **(_INT4_KEYS if form == "w4a8_dynamic" else {}), **kinds}


def before_load(model: nn.Module) -> None:
    """Give parameters the layout in which they are loaded; int8 matrices of experts have it already.

    Raises:
        RuntimeError: this vllm-ascend would leave out the gate of shared experts.
    """
    _, compute = _find_shared_experts()
    if (compute is None or not _applies_gate(compute)) and any(map(_has_int8_gate, model.modules())):
        raise RuntimeError(
            "generate_config.quantization: this vllm-ascend computes shared experts in int8 without their gate, in another "
            f"class than {' and '.join(_OWNERS)}, where the adaptor adds it; use 0.23 to 0.26, or leave quantization out"
        )
    for _, module in _list_layers(model, torch.int8):
        if module.weight_scale.dim() == 1:
            module.weight.data, module.weight_scale.data = module.weight.data.t(), module.weight_scale.data[:, None]
    for _, module in _list_experts(model, torch.int8):
        for name in _EXPERTS:
            scales = _scales(module, name)
            if scales.dim() == 2:
                scales.data = scales.data[..., None]
    for _, module in _list_layers(model, torch.float8_e4m3fn):
        module.weight.data = _read_bytes(module.weight.data)
        scales, count = module.weight_scale, module.weight.size(1) // _BLOCK
        scales.kernel_data, scales.data = scales.data, _join_pairs(scales.data)[:, :count].contiguous()
    for _, module in _list_experts(model, torch.float8_e4m3fn):
        for name in _EXPERTS:
            weight, scales = _weight(module, name), _scales(module, name)
            weight.data, scales.data = _read_bytes(weight.data), _join_pairs(scales.data)
    for _, module in _list_experts(model, torch.int32):
        for name in _EXPERTS:
            weight, scales = _weight(module, name), _scales(module, name)
            weight.data, scales.data = _read_int4(weight.data), _read_int4_scales(scales.data)


def after_load(model: nn.Module) -> None:
    """Return to the kernels' layout, and compute what they have beside it.

    Raises:
        RuntimeError: this vllm-ascend has another layout.
    """
    for name, module in _list_int4_experts(model):
        for weight in _EXPERTS:
            _check_plain(name, _weight(module, weight))
            _pack_int4(f"{name}.{weight}", module, weight)
    for name, module in _list_layers(model, torch.int8):
        module.weight.data, module.weight_scale.data = module.weight.data.t(), module.weight_scale.data[:, 0]
        if not module.weight.data.is_contiguous():
            raise RuntimeError(f"weight push: {name}.weight was not a view of the kernel's layout in this vllm-ascend.")
        module.weight_scale_fp32.copy_(module.weight_scale.data)
        # the quantization is symmetric; a new engine has dummy values here
        module.weight_offset.data.zero_()
    for name, module in _list_experts(model, torch.int8):
        for weight in _EXPERTS:
            _check_plain(name, _weight(module, weight))
            scales = _scales(module, weight)
            scales.data = scales.data[..., 0]
            _weight(module, f"{weight}_offset").data.zero_()
        module.w13_weight_scale_fp32.copy_(module.w13_weight_scale.data)
    for _, module in _list_layers(model, torch.uint8):
        scales = module.weight_scale
        pairs = nn.functional.pad(scales.data, (0, scales.size(1) % 2)).unflatten(1, (-1, 2))
        scales.kernel_data.copy_(pairs.transpose(0, 1))
        scales.data, scales.kernel_data = scales.kernel_data, None
        module.weight.data = module.weight.data.t().view(torch.float8_e4m3fn)
    for _, module in _list_experts(model, torch.uint8):
        for name in _EXPERTS:
            weight, scales = _weight(module, name), _scales(module, name)
            weight.data = weight.data.transpose(1, 2).view(torch.float8_e4m3fn)
            scales.data = scales.data.unflatten(2, (-1, 2)).transpose(1, 2)


def list_unpacks(model: nn.Module) -> Iterator[tuple[str, Callable[[Tensor], Tensor]]]:
    """Yield the parameters that `after_load` laid out anew, each with the function that returns what was loaded."""
    for name, module in _list_layers(model, torch.int8):
        if module.weight_scale.dim() == 1:
            yield f"{name}.weight", Tensor.t
            yield f"{name}.weight_scale", partial(_check_copy, module.weight_scale_fp32)
    for name, module in _list_experts(model, torch.int8):
        if module.w13_weight_scale.dim() == 2:
            yield f"{name}.w13_weight_scale", partial(_check_copy, module.w13_weight_scale_fp32)
            yield f"{name}.w2_weight_scale", _add_column
    for name, _ in _list_layers(model, torch.float8_e4m3fn):
        yield from ((f"{name}.weight", _read_bytes), (f"{name}.weight_scale", _join_pairs))
    for name, _ in _list_experts(model, torch.float8_e4m3fn):
        for weight in _EXPERTS:
            yield from ((f"{name}.{weight}", _read_bytes), (f"{name}.{weight}_scale", _join_pairs))
    for name, module in _list_experts(model, torch.int32):
        for weight in _EXPERTS:
            yield from ((f"{name}.{weight}", _read_int4), (f"{name}.{weight}_scale", _BiasCheck(module, weight)))


def _list_int4_experts(model: nn.Module) -> list[tuple[str, Any]]:
    """Return the modules of experts in int4 while they are loaded: bytes with scales that are none, unlike those of MXFP8."""
    return [
        (name, module)
        for name, module in _list_experts(model, torch.uint8)
        if _scales(module, _EXPERTS[0]).dtype == torch.float32
    ]


def _list_layers(model: nn.Module, kind: torch.dtype) -> list[tuple[str, Any]]:
    """Return the quantized linear layers whose elements have a type now, by name."""
    return _list_modules(model, "weight", kind)


def _list_experts(model: nn.Module, kind: torch.dtype) -> list[tuple[str, Any]]:
    """Return the modules of quantized experts whose elements have a type now, by name."""
    return _list_modules(model, _EXPERTS[0], kind)


def _list_modules(model: nn.Module, weight: str, kind: torch.dtype) -> list[tuple[str, Any]]:
    return [
        (name, module)
        for name, module in model.named_modules()
        if f"{weight}_scale" in module._parameters and _has_type(module._parameters.get(weight), kind)
    ]


def _has_type(tensor: Tensor | None, kind: torch.dtype) -> bool:
    return tensor is not None and tensor.dtype == kind


def _weight(module: nn.Module, name: str) -> Any:
    return module._parameters[name]


def _scales(module: nn.Module, name: str) -> Any:
    return module._parameters[f"{name}_scale"]


def _read_format(tensor: Any) -> int:
    """Return the number of a tensor's format in CANN."""
    if tensor.device.type != "npu":
        return _PLAIN
    return importlib.import_module("torch_npu").get_npu_format(tensor)


def _check_plain(name: str, weight: Tensor) -> None:
    """Raise RuntimeError where a matrix of experts is in another format than ND."""
    if (layout := _read_format(weight)) != _PLAIN:
        raise RuntimeError(
            f"weight push: experts of {name} are in the format {layout} of CANN in this vllm-ascend, in which no slice can be "
            "written."
        )


def _add_column(scales: Tensor) -> Tensor:
    return scales[..., None]


def _check_copy(copy: Tensor, scales: Tensor) -> Tensor:
    """Return the scales of int8 as they were loaded; NaN where the copy that kernels read in float32 has another one."""
    return torch.where(copy == scales.float(), scales, torch.nan)[..., None]


def _read_bytes(elements: Tensor) -> Tensor:
    """Return the elements of MXFP8 as they were loaded, [..., columns, rows] -> [..., rows, columns]."""
    return elements.transpose(-1, -2).view(torch.uint8)


def _join_pairs(scales: Tensor) -> Tensor:
    """Return the scales of MXFP8 as they were loaded, [..., pairs, rows, 2] -> [..., rows, 2 pairs]."""
    return scales.transpose(-2, -3).flatten(-2)


def _read_int4(elements: Tensor) -> Tensor:
    """Return int4 as it was loaded, [..., columns, rows / 8] -> [..., rows / 2, columns]."""
    return elements.view(torch.uint8).transpose(-1, -2)


def _read_int4_scales(scales: Tensor) -> Tensor:
    """Return the scales of int4 as they were loaded, [..., groups, rows] -> [..., rows, groups]; a view."""
    return scales.view(torch.float32).unflatten(-1, (-1, 2))[..., 0].transpose(-1, -2)


def _pack_int4(name: str, module: nn.Module, weight: str) -> None:
    """Return experts in int4 to the kernel's layout, and compute what it adds to their products."""
    elements, scales, bias = _weight(module, weight), _scales(module, weight), _weight(module, _bias_name(weight))
    for part in _list_chunks(elements.data):
        bias.data[part].copy_(_sum_int4(elements.data[part].transpose(1, 2), scales.data[part].transpose(1, 2)))
    pairs = scales.data.transpose(1, 2)
    if not elements.data.transpose(1, 2).is_contiguous() or pairs.stride(2) != 2:
        raise RuntimeError(f"weight push: {name} was not a view of the kernel's layout in this vllm-ascend.")
    elements.data = elements.data.transpose(1, 2).view(torch.int32)
    # both halves of all numbers, of which no load writes the upper one
    whole = pairs.as_strided((*pairs.shape, 2), (*pairs.stride(), 1))
    whole[..., 1].zero_()
    scales.data = whole.view(torch.int64)[..., 0]
    offsets = _weight(module, f"{weight}_offset")
    offsets.data.zero_()  # the quantization is symmetric


def _bias_name(weight: str) -> str:
    return f"{weight.removesuffix('_weight')}_scale_bias"


def _list_chunks(elements: Tensor) -> Iterator[slice]:
    """Yield ranges of experts of which so many bytes are computed at once, each expert at least by itself."""
    count = max(1, _CHUNK // max(elements[0].nbytes, 1))
    for first in range(0, len(elements), count):
        yield slice(first, first + count)


def _sum_int4(elements: Tensor, scales: Tensor) -> Tensor:
    """Return 8 times the sum of the scaled elements of each row, [experts, rows].

    Args:
        elements: [experts, columns, rows / 2] bytes.
        scales: [experts, groups, rows].
    """
    halves = [half.unflatten(1, (scales.size(1), -1)).sum(2) for half in split_pairs(elements)]
    sums = torch.stack(halves, dim=-1).flatten(2)
    total = torch.zeros_like(scales[:, 0])
    for group in range(scales.size(1)):  # in this order whatever the number of experts, to the bit
        total += sums[:, group] * scales[:, group]
    return total * 8


class _BiasCheck:
    """Scales of experts in int4 as they were loaded; NaN where one, or what belongs to it, is another.

    What the kernel adds is compared for all experts of a layer at the first call.
    """

    def __init__(self, module: nn.Module, weight: str) -> None:
        self._module, self._weight = module, weight
        self._is_right: Tensor | None = None

    def __call__(self, scales: Tensor) -> Tensor:
        """Return the scales of one expert.

        Args:
            scales: [groups, rows] of one expert, a part of the parameter of all.
        """
        stack = _scales(self._module, self._weight)
        if self._is_right is None:
            self._is_right = self._compare(stack)
        index = (scales.storage_offset() - stack.storage_offset()) // stack.stride(0)
        upper = scales.view(torch.float32).unflatten(-1, (-1, 2))[..., 1]
        is_right = self._is_right[index][:, None] & (upper == 0).t()
        return torch.where(is_right, _read_int4_scales(scales), torch.nan)

    def _compare(self, stack: Tensor) -> Tensor:
        """Return [experts, rows] bool: what the kernel adds is what follows from elements and scales."""
        elements = _weight(self._module, self._weight).view(torch.uint8)
        factors, bias = _read_int4_scales(stack).transpose(1, 2), _weight(self._module, _bias_name(self._weight))
        parts = [_sum_int4(elements[part], factors[part]) == bias[part] for part in _list_chunks(elements)]
        return torch.cat(parts)
