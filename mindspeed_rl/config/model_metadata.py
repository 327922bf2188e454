"""What config.json and the tokenizer's settings say of the model that a run starts from, where they are on this machine."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mindspeed_rl.config.keys.megatron import MegatronConfig

#: folder inside a Megatron checkpoint that keeps config, generation config and tokenizer of the HF model
HF_FILES = "huggingface"

#: width of a head where config.json has no head_dim and the model type does not divide hidden_size by its heads
_OWN_HEAD_SIZES = {"qwen3": 128, "gemma2": 256, "glm4": 128}


@dataclass(frozen=True, kw_only=True)
class EngineShape:
    """What the rollout engine's limits are about; None where it is not known.

    Attributes:
        source: where it was read, for messages.
        num_heads, num_kv_heads, head_size: of attention; `head_size` is the width of one head.
        is_latent, latent_size: latent attention, and the width of its one cached head.
        max_length: the longest sequence that the model's positions reach, in tokens.
        num_experts: of an expert layer.
    """

    source: str
    num_heads: int | None = None
    num_kv_heads: int | None = None
    head_size: int | None = None
    is_latent: bool = False
    latent_size: int | None = None
    ffn_hidden_size: int | None = None
    max_length: int | None = None
    num_experts: int | None = None


@dataclass(frozen=True)
class ModelMetadata:
    """The model's own files.

    Attributes:
        folder: where they were read.
        shape: what they say; None in it where they do not.
    """

    folder: str
    shape: EngineShape


def read_model_metadata(role: MegatronConfig) -> ModelMetadata | None:
    """Return what is known of the model that a role's keys name; None where no folder of theirs has a readable config.json."""
    for name in (role.load, role.tokenizer_name_or_path, role.pretrained_checkpoint):
        if not name:
            continue
        start = Path(name).expanduser()
        for folder in (start, start / HF_FILES):
            if config := _read(folder / "config.json"):
                return ModelMetadata(str(name), _shape(str(name), folder, config))
    return None


def _shape(source: str, folder: Path, config: Mapping[str, Any]) -> EngineShape:
    heads, hidden = _count(config, "num_attention_heads"), _count(config, "hidden_size")
    width = _count(config, "head_dim") or _OWN_HEAD_SIZES.get(str(config.get("model_type")))
    if width is None and heads is not None and hidden is not None:
        width = hidden // heads
    counts = [_count(config, key) for key in ("num_experts", "n_routed_experts", "num_local_experts")]
    latent, rotary = _count(config, "kv_lora_rank"), _count(config, "qk_rope_head_dim")
    return EngineShape(
        source=source,
        num_heads=heads,
        num_kv_heads=_count(config, "num_key_value_heads") or heads,
        head_size=width,
        is_latent=latent is not None,
        latent_size=None if latent is None or rotary is None else latent + rotary,
        ffn_hidden_size=_count(config, "intermediate_size"),
        max_length=_max_length(folder, config),
        num_experts=next((count for count in counts if count), None),
    )


def _max_length(folder: Path, config: Mapping[str, Any]) -> int | None:
    """As the rollout engine reads it; where versions differ about scaled positions, the longer length."""
    length = _count(config, "max_position_embeddings")
    if length is None:
        return None
    scaling = config.get("rope_scaling") or config.get("rope_parameters")
    scaling = scaling if isinstance(scaling, Mapping) else {}
    factor = scaling.get("factor")
    # models with llama3 scaling count the stretch in max_position_embeddings already
    if isinstance(factor, (int, float)) and scaling.get("rope_type", scaling.get("type")) != "llama3":
        length = int(length * factor)
    tokenizer = _count(_read(folder / "tokenizer_config.json"), "model_max_length")
    return length if tokenizer is None else min(length, tokenizer)


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}  # whoever loads the model says what is wrong with the file
    return found if isinstance(found, dict) else {}


def _count(config: Mapping[str, Any], name: str) -> int | None:
    value = config.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None
