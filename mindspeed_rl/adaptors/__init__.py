"""Every patch of somebody else's library, one file per library and reason; applied here and nowhere else."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any, Literal

import torch
from torch import Tensor

from mindspeed_rl import platform
from mindspeed_rl.adaptors.engine_hooks import EngineHooks
from mindspeed_rl.config import MegatronConfig

Scope = Literal["train", "rollout"]

#: (platform, scope) -> modules whose `apply()` runs, in order, before the library is imported
ADAPTORS: dict[tuple[str, str], tuple[str, ...]] = {
    ("cpu", "train"): (
        "mindspeed_rl.adaptors.cpu_products",
        "mindspeed_rl.adaptors.cpu_halves",
        "mindspeed_rl.adaptors.gloo_devices",
        "mindspeed_rl.adaptors.megatron_cpu",
        "mindspeed_rl.adaptors.megatron_async_saves",
    ),
    ("cpu", "rollout"): (
        "mindspeed_rl.adaptors.cpu_products",
        "mindspeed_rl.adaptors.cpu_halves",
        "mindspeed_rl.adaptors.gloo_devices",
        "mindspeed_rl.adaptors.llvmlite_names",
        "mindspeed_rl.adaptors.vllm_cpu",
        "mindspeed_rl.adaptors.vllm_cpu_experts",
        "mindspeed_rl.adaptors.vllm_cpu_norm",
        "mindspeed_rl.adaptors.vllm_cpu_routing",
        "mindspeed_rl.adaptors.vllm_cpu_steps",
        "mindspeed_rl.adaptors.vllm_cpu_kernels",
    ),
    ("npu", "train"): (
        "mindspeed_rl.adaptors.gloo_devices",
        "mindspeed_rl.adaptors.mindspeed",
        "mindspeed_rl.adaptors.megatron_async_saves",
    ),
    ("npu", "rollout"): ("mindspeed_rl.adaptors.gloo_devices", "mindspeed_rl.adaptors.vllm_ascend"),
    ("cuda", "train"): (
        "mindspeed_rl.adaptors.gloo_devices",
        "mindspeed_rl.adaptors.packed_rope",
        "mindspeed_rl.adaptors.megatron_async_saves",
    ),
    ("cuda", "rollout"): ("mindspeed_rl.adaptors.gloo_devices",),
}

#: platform -> module and class of what it does around vLLM's calls
ENGINE_HOOKS: dict[str, tuple[str, str]] = {
    "cpu": ("mindspeed_rl.adaptors.vllm_cpu", "VllmCpuHooks"),
    "npu": ("mindspeed_rl.adaptors.vllm_ascend", "VllmAscendHooks"),
    "cuda": ("mindspeed_rl.adaptors.engine_hooks", "EngineHooks"),
}


def engine_hooks() -> EngineHooks:
    """New hooks of the current platform for one vLLM engine."""
    module, attribute = ENGINE_HOOKS[platform.current().name]
    return getattr(importlib.import_module(module), attribute)()


def apply(scope: Scope) -> None:
    """Prepares this process for Megatron ("train") or vLLM ("rollout") on the current platform. Idempotent."""
    for module in ADAPTORS[platform.current().name, scope]:
        importlib.import_module(module).apply()


def _own_module(table: dict[str, str]) -> ModuleType | None:
    """The current platform's module in a table of those that have one, None where it has none."""
    name = table.get(platform.current().name)
    return None if name is None else importlib.import_module(name)


#: platform -> module whose `configure(config)` tells an adapted library about the run, after `apply("train")`
CONFIGURED: dict[str, str] = {"npu": "mindspeed_rl.adaptors.mindspeed"}


def configure(config: MegatronConfig) -> None:
    """Hands the run's keys to adaptors that need them; must come before process groups and models are built."""
    module = _own_module(CONFIGURED)
    if module is not None:
        module.configure(config)


#: platform -> module whose kernels take the place of the engine's portable attention
FUSED_ATTENTION: dict[str, str] = {"npu": "mindspeed_rl.adaptors.npu_attention"}

#: platform -> module whose `causal_attention` takes the place of torch's in the engine's portable attention
CAUSAL_ATTENTION: dict[str, str] = {"cpu": "mindspeed_rl.adaptors.cpu_attention"}

#: platform -> module whose `rms_norm` takes the place of torch's
RMS_NORM: dict[str, str] = {"cpu": "mindspeed_rl.adaptors.cpu_norm"}

#: platform -> module whose TRANSFORMER_SETTINGS switch Megatron's modules to their fused form
FUSED_MODULES: dict[str, str] = {"npu": "mindspeed_rl.adaptors.mindspeed"}


def fused_attention() -> ModuleType | None:
    """`causal_attention`, `packed_attention` and `ring_attention` of the current platform, None where it has no own ones."""
    return _own_module(FUSED_ATTENTION)


def causal_attention(query: Tensor, key: Tensor, value: Tensor, scale: float, dropout: float = 0.0) -> Tensor:
    """Causal attention of [b, s, n, d] queries, by the current platform's fastest kernels.

    Args:
        key, value: [b, t, n_kv, d], [b, t, n_kv, d_v]; queries are those of the last s of t tokens.

    Returns:
        [b, s, n, d_v]
    """
    module = _own_module(CAUSAL_ATTENTION)
    kernel = torch_attention if module is None else module.causal_attention
    return kernel(query, key, value, scale, dropout)


def torch_attention(query: Tensor, key: Tensor, value: Tensor, scale: float, dropout: float = 0.0) -> Tensor:
    """`causal_attention` by torch's kernel, in the format of the tensors."""
    q, k, v = (tensor.transpose(1, 2) for tensor in (query, key, value))
    s, t = q.size(2), k.size(2)
    # torch's own mask begins with the first key
    seen = None if s == t else torch.ones(s, t, dtype=torch.bool, device=q.device).tril(t - s)
    out = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, attn_mask=seen, is_causal=s == t, dropout_p=dropout, scale=scale, enable_gqa=q.size(1) != k.size(1)
    )
    return out.transpose(1, 2)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension of [..., h], by the current platform's fastest kernels."""
    module = _own_module(RMS_NORM)
    if module is None:
        return torch.nn.functional.rms_norm(x, weight.shape, weight, eps)
    return module.rms_norm(x, weight, eps)


def transformer_settings() -> dict[str, Any]:
    """Fields of Megatron's TransformerConfig that the current platform's fused modules need."""
    module = _own_module(FUSED_MODULES)
    return {} if module is None else dict(module.TRANSFORMER_SETTINGS)
