"""Text models of Qwen3.5 in a vLLM that has their classes as parts of classes for images alone (ModelRegistry; vLLM 0.23).

`Qwen3_5ForCausalLM` and `Qwen3_5MoeForCausalLM` are in vLLM's module `qwen3_5`, but not in its registry, and without what the
engine asks of a model with states: their sizes and types, which the classes for images have. vllm-ascend's attention of Qwen3.5
reads three positions of a token (`patch_qwen3_5`); in a text they are equal. So the classes get both here. A config without
sections of the three axes gets some (`give_axes`): with equal positions all of them are the same.

It can go once the release for NPUs has the classes in its registry, as 0.32 has; where it has, nothing changes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

_MODULE = "vllm.model_executor.models.qwen3_5"
_CLASSES, _WITH_IMAGES = ("Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM"), "Qwen3_5ForConditionalGeneration"
#: of vLLM's class for images: what the engine asks of a model with states
_STATES = ("get_mamba_state_dtype_from_config", "get_mamba_state_shape_from_config", "get_mamba_state_copy_func")


def _count_positions(model: object, input_tokens: list[int], mm_features: object) -> tuple[torch.Tensor, int]:
    """Return the positions of a text on the three axes, [3, tokens], and how far they are behind the tokens."""
    return torch.arange(len(input_tokens)).expand(3, -1), 0


def _build_class(name: str) -> type:
    """Return vLLM's class of a text model with what an engine needs to serve it alone."""
    from vllm.model_executor.models import interfaces, qwen3_5

    owner = vars(getattr(qwen3_5, _WITH_IMAGES))
    text: Any = getattr(qwen3_5, name)
    hybrid: Any = interfaces.IsHybrid
    turns: Any = interfaces.SupportsMRoPE
    own = {key: owner[key] for key in _STATES} | {"get_mrope_input_positions": _count_positions, "__module__": _MODULE}
    return type(name, (text, hybrid, turns), own)


def apply() -> None:
    """Let vLLM build these classes; idempotent."""
    from vllm.model_executor.models import config, registry

    base: Any = registry._LazyRegisteredModel

    class BuiltHere(base):
        """A class that is built in this process: vLLM would inspect it in a new one."""

        def inspect_model_cls(self) -> object:
            return registry._ModelInfo.from_model_cls(self.load_model_cls())

        def load_model_cls(self) -> type:
            return _build_class(self.class_name)

    for name in _CLASSES:
        if name not in registry.ModelRegistry.models:
            registry.ModelRegistry.models[name] = BuiltHere(_MODULE, name)
            # states in the format of `mamba_ssm_dtype`
            config.MODELS_CONFIG_MAP[name] = config.MODELS_CONFIG_MAP[_WITH_IMAGES]


def override_config(hf_config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of a model's config.json that vllm-ascend needs otherwise; none but for a text model built here."""
    name = hf_config.get("architectures", [None])[0]
    return give_axes(hf_config) if name in _CLASSES and _is_built_here(name) else {}


def give_axes(hf_config: Mapping[str, Any]) -> dict[str, Any]:
    """Return rotary parameters with sections of the three axes; nothing where a text model's config.json has them."""
    rope = dict(hf_config.get("rope_parameters") or hf_config.get("rope_scaling") or {})
    if "mrope_section" in rope:
        return {}
    if (kind := rope.pop("type", None)) is not None:  # of older files
        rope.setdefault("rope_type", kind)
    share = rope.get("partial_rotary_factor", hf_config.get("partial_rotary_factor", 0.25))
    plain = {"rope_type": "default", "rope_theta": hf_config.get("rope_theta", 10000.0), "partial_rotary_factor": share}
    axes = {"mrope_section": [int(hf_config["head_dim"] * share) // 2, 0, 0], "mrope_interleaved": False}
    return {"rope_parameters": plain | rope | axes}


def _is_built_here(name: str) -> bool:
    """Return True where vLLM has no class of its own for the text model."""
    from vllm.model_executor.models import registry

    return type(registry.ModelRegistry.models.get(name)).__module__ == __name__
