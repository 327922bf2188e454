"""Every patch of a foreign library, one file per library and reason; applied here and nowhere else."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from types import ModuleType
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from mindspeed_rl import platform
from mindspeed_rl.adaptors.engine_hooks import EngineHooks
from mindspeed_rl.config import MegatronConfig
from mindspeed_rl.importing import collecting_seldom
from mindspeed_rl.platform.environment import EXACT_VARIABLE

Scope = Literal["train", "rollout"]
#: q, k [n, h, d_k], v [n, h, d_v], g, beta [n, h], bounds of the sequences [sequences + 1] int64 -> outputs as v; see
#: `engine.gated_delta`
DeltaRuleKernel = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]

#: (platform, scope) -> modules whose `apply()` runs, in order, before the library is imported
_ADAPTORS: dict[tuple[str, str], tuple[str, ...]] = {
    ("cpu", "train"): (
        "mindspeed_rl.adaptors.torchvision_cpu",
        "mindspeed_rl.adaptors.cpu_products",
        "mindspeed_rl.adaptors.cpu_halves",
        "mindspeed_rl.adaptors.gloo_devices",
        "mindspeed_rl.adaptors.megatron_cpu",
        "mindspeed_rl.adaptors.megatron_async_saves",
        "mindspeed_rl.adaptors.megatron_recompute",
        "mindspeed_rl.adaptors.megatron_padded_states",
    ),
    ("cpu", "rollout"): (
        "mindspeed_rl.adaptors.torchvision_cpu",
        "mindspeed_rl.adaptors.cpu_products",
        "mindspeed_rl.adaptors.cpu_halves",
        "mindspeed_rl.adaptors.gloo_devices",
        "mindspeed_rl.adaptors.llvmlite_names",
        "mindspeed_rl.adaptors.vllm_cpu",
        "mindspeed_rl.adaptors.vllm_cpu_experts",
        "mindspeed_rl.adaptors.vllm_cpu_int8_experts",
        "mindspeed_rl.adaptors.vllm_cpu_block_formats",
        "mindspeed_rl.adaptors.vllm_cpu_norm",
        "mindspeed_rl.adaptors.vllm_cpu_routing",
        "mindspeed_rl.adaptors.vllm_cpu_steps",
        "mindspeed_rl.adaptors.vllm_cpu_adapters",
        "mindspeed_rl.adaptors.vllm_cpu_kernels",
        "mindspeed_rl.adaptors.vllm_cpu_drafted_states",
        "mindspeed_rl.adaptors.vllm_cpu_vision",
        "mindspeed_rl.adaptors.model_classes",
        "mindspeed_rl.adaptors.vllm_dummy_weights",
        "mindspeed_rl.adaptors.vllm_stacked_experts",
        "mindspeed_rl.adaptors.vllm_log_probs",
        "mindspeed_rl.adaptors.vllm_drafts",
        "mindspeed_rl.adaptors.vllm_float32_head",
        "mindspeed_rl.adaptors.vllm_head_adapters",
        "mindspeed_rl.adaptors.vllm_video_positions",
        "mindspeed_rl.adaptors.vllm_video_prompts",
    ),
    ("npu", "train"): (
        "mindspeed_rl.adaptors.gloo_devices",
        "mindspeed_rl.adaptors.mindspeed",
        "mindspeed_rl.adaptors.megatron_async_saves",
    ),
    ("npu", "rollout"): (
        "mindspeed_rl.adaptors.gloo_devices",
        "mindspeed_rl.adaptors.vllm_ascend",
        "mindspeed_rl.adaptors.vllm_ascend_experts",
        "mindspeed_rl.adaptors.vllm_hybrid_texts",
        "mindspeed_rl.adaptors.model_classes",
        "mindspeed_rl.adaptors.vllm_dummy_weights",
        "mindspeed_rl.adaptors.vllm_stacked_experts",
        "mindspeed_rl.adaptors.vllm_log_probs",
        "mindspeed_rl.adaptors.vllm_drafts",
        "mindspeed_rl.adaptors.vllm_float32_head",
        "mindspeed_rl.adaptors.vllm_head_adapters",
        "mindspeed_rl.adaptors.vllm_video_positions",
        "mindspeed_rl.adaptors.vllm_video_prompts",
    ),
    ("cuda", "train"): (
        "mindspeed_rl.adaptors.gloo_devices",
        "mindspeed_rl.adaptors.packed_rope",
        "mindspeed_rl.adaptors.megatron_async_saves",
        "mindspeed_rl.adaptors.megatron_recompute",
        "mindspeed_rl.adaptors.megatron_padded_states",
    ),
    ("cuda", "rollout"): (
        "mindspeed_rl.adaptors.gloo_devices",
        "mindspeed_rl.adaptors.model_classes",
        "mindspeed_rl.adaptors.vllm_dummy_weights",
        "mindspeed_rl.adaptors.vllm_stacked_experts",
        "mindspeed_rl.adaptors.vllm_log_probs",
        "mindspeed_rl.adaptors.vllm_drafts",
        "mindspeed_rl.adaptors.vllm_float32_head",
        "mindspeed_rl.adaptors.vllm_head_adapters",
        "mindspeed_rl.adaptors.vllm_video_positions",
        "mindspeed_rl.adaptors.vllm_video_prompts",
    ),
}

#: platform -> module and class of what it does around vLLM's calls
_ENGINE_HOOKS: dict[str, tuple[str, str]] = {
    "cpu": ("mindspeed_rl.adaptors.vllm_cpu", "VllmCpuHooks"),
    "npu": ("mindspeed_rl.adaptors.vllm_ascend", "VllmAscendHooks"),
    "cuda": ("mindspeed_rl.adaptors.engine_hooks", "EngineHooks"),
}

#: the same, after the others, for log-probs that are equal bit for bit on both sides (`rl_config.exact_log_probs`)
_EXACT_ADAPTORS: dict[tuple[str, str], tuple[str, ...]] = {
    ("cpu", "train"): ("mindspeed_rl.adaptors.megatron_exact",),
    ("cpu", "rollout"): ("mindspeed_rl.adaptors.vllm_exact",),
}
#: slices of a sum over tensor-parallel ranks once this process computes such log-probs, else 0
_exact = 0


def engine_hooks() -> EngineHooks:
    """Create hooks of the current platform for one vLLM engine."""
    module, attribute = _ENGINE_HOOKS[platform.current().name]
    return getattr(importlib.import_module(module), attribute)()


def apply(scope: Scope) -> None:
    """Prepare this process for Megatron ("train") or vLLM ("rollout") on the current platform. Idempotent.

    Reads `EXACT_VARIABLE` of the environment: log-probs that are equal bit for bit on both sides.
    """
    global _exact
    _exact = _exact or int(os.environ.get(EXACT_VARIABLE, 0))
    key = platform.current().name, scope
    with collecting_seldom():
        for module in _ADAPTORS[key]:
            importlib.import_module(module).apply()
        for module in _EXACT_ADAPTORS.get(key, ()) if _exact else ():
            importlib.import_module(module).apply(_exact)


#: (platform, function of this package) -> module that has the platform's own form of it
_KERNELS: dict[tuple[str, str], str] = {
    ("npu", "configure"): "mindspeed_rl.adaptors.mindspeed",
    ("npu", "fused_attention"): "mindspeed_rl.adaptors.npu_attention",
    ("npu", "tower_attention"): "mindspeed_rl.adaptors.npu_attention",
    ("npu", "transformer_settings"): "mindspeed_rl.adaptors.mindspeed",
    ("npu", "delta_rule_kernel"): "mindspeed_rl.adaptors.mindspeed",
    ("cpu", "causal_attention"): "mindspeed_rl.adaptors.cpu_attention",
    ("cpu", "rms_norm"): "mindspeed_rl.adaptors.cpu_norm",
}
#: the same where log-probs are exact
_EXACT_KERNELS: dict[tuple[str, str], str] = {
    ("cpu", "causal_attention"): "mindspeed_rl.adaptors.exact_kernels",
    ("cpu", "rms_norm"): "mindspeed_rl.adaptors.exact_kernels",
    ("cpu", "multiply_rows"): "mindspeed_rl.adaptors.exact_kernels",
    ("cpu", "sum_rows"): "mindspeed_rl.adaptors.exact_kernels",
    ("cpu", "log_softmax"): "mindspeed_rl.adaptors.exact_kernels",
    ("cpu", "transformer_settings"): "mindspeed_rl.adaptors.megatron_exact",
}


def _find_module(function: str) -> ModuleType | None:
    """Return the current platform's module for a function, None where it has none."""
    key = platform.current().name, function
    name = (_exact and _EXACT_KERNELS.get(key)) or _KERNELS.get(key)
    return None if name is None else importlib.import_module(name)


def configure(config: MegatronConfig) -> None:
    """Pass the run's keys to adaptors that need them, after `apply("train")` and before process groups and models are built."""
    module = _find_module("configure")
    if module is not None:
        module.configure(config)


def fused_attention() -> ModuleType | None:
    """Return the module of the platform's `causal_attention`, `packed_attention` and `ring_attention`, None without one."""
    return _find_module("fused_attention")


def tower_attention() -> str:
    """Return the name under which transformers finds the attention of vision towers, registered for this platform."""
    module = _find_module("tower_attention")
    return "sdpa" if module is None else module.tower_attention()


def causal_attention(query: Tensor, key: Tensor, value: Tensor, scale: float, dropout: float = 0.0) -> Tensor:
    """Compute causal attention of [b, s, n, d] queries, by the current platform's fastest kernels.

    Args:
        key, value: [b, t, n_kv, d], [b, t, n_kv, d_v]; queries belong to the last s of t tokens.

    Returns:
        [b, s, n, d_v]
    """
    module = _find_module("causal_attention")
    kernel = torch_attention if module is None else module.causal_attention
    return kernel(query, key, value, scale, dropout)


def torch_attention(query: Tensor, key: Tensor, value: Tensor, scale: float, dropout: float = 0.0) -> Tensor:
    """Compute `causal_attention` by torch's kernel, in the format of the tensors."""
    q, k, v = (tensor.transpose(1, 2) for tensor in (query, key, value))
    s, t = q.size(2), k.size(2)
    # torch's own mask begins with the first key
    seen = None if s == t else torch.ones(s, t, dtype=torch.bool, device=q.device).tril(t - s)
    out = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, attn_mask=seen, is_causal=s == t, dropout_p=dropout, scale=scale, enable_gqa=q.size(1) != k.size(1)
    )
    return out.transpose(1, 2)


def delta_rule_kernel(dtype: torch.dtype) -> DeltaRuleKernel | None:
    """Return the platform's kernel of the gated delta rule for values of this type, None without one."""
    module = _find_module("delta_rule_kernel")
    return None if module is None else module.delta_rule_kernel(dtype)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Compute x / sqrt(mean(x^2) + eps) * weight over the last dimension of [..., h], by the platform's fastest kernels."""
    module = _find_module("rms_norm")
    if module is None:
        return torch.nn.functional.rms_norm(x, weight.shape, weight, eps)
    return module.rms_norm(x, weight, eps)


def has_row_exact_products() -> bool:
    """Return True where all operations on tokens, there and back, give a token the same bits whatever else is in the batch."""
    return _find_module("multiply_rows") is not None


def multiply_rows(product: Callable[[Tensor], Tensor], rows: Tensor) -> Tensor:
    """Return the product of [n, k] rows; where log-probs are exact, a row's bits depend on nothing but the row."""
    module = _find_module("multiply_rows")
    return product(rows) if module is None else module.multiply_rows(product, rows)


def sum_rows(x: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """Return this rank's part of the sums over the last dimension, that all ranks of the group have equal parts of.

    Where log-probs are exact, the first rank returns the full sums and the others 0, and zeros at the end change none of them.
    """
    module = _find_module("sum_rows")
    return x.sum(-1) if module is None else module.sum_rows(x, group)


def log_softmax(logits: Tensor) -> Tensor:
    """Return the log-probs of [n, v] float32 logits; where they are exact, equal to the log-probs of the trainer's head."""
    module = _find_module("log_softmax")
    return logits.log_softmax(-1) if module is None else module.log_softmax(logits)


def transformer_settings(activation: str) -> dict[str, Any]:
    """Return the fields of Megatron's TransformerConfig that the current platform's modules need for a model's activation."""
    module = _find_module("transformer_settings")
    settings = {} if module is None else dict(module.TRANSFORMER_SETTINGS)
    return {name: value for name, value in settings.items() if name != "activation_func" or activation == "silu"}
