"""What config.json and the tokenizer's settings say of the model that a run starts from, where they are on this machine."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mindspeed_rl.config.megatron import MegatronConfig


@dataclass(frozen=True)
class ModelFacts:
    """The model's own limits; None where its files do not say.

    Attributes:
        folder: where they were read.
        num_heads, num_kv_heads: of attention.
        max_length: the longest sequence that its positions reach, in tokens.
        num_experts: of an expert layer; None for models without.
    """

    folder: str
    num_heads: int | None
    num_kv_heads: int | None
    max_length: int | None
    num_experts: int | None = None


def read_model_facts(role: MegatronConfig) -> ModelFacts | None:
    """Return the limits of the model that a role's keys name; None where no folder of theirs has a readable config.json."""
    for name in (role.load, role.tokenizer_name_or_path, role.pretrained_checkpoint):
        folder = Path(name).expanduser() if name else None
        if folder is not None and (config := _read(folder / "config.json")):
            heads = _count(config, "num_attention_heads")
            kv_heads = _count(config, "num_key_value_heads") or heads
            counts = [_count(config, key) for key in ("num_experts", "n_routed_experts", "num_local_experts")]
            experts = next((count for count in counts if count), None)
            return ModelFacts(str(name), heads, kv_heads, _max_length(folder, config), experts)
    return None


def _max_length(folder: Path, config: Mapping[str, Any]) -> int | None:
    """As the rollout engine reads it; where versions differ about scaled positions, the longer length."""
    length = _count(config, "max_position_embeddings")
    if length is None:
        return None
    scaling = config.get("rope_scaling") or config.get("rope_parameters")
    scaling = scaling if isinstance(scaling, Mapping) else {}
    factor = scaling.get("factor")
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
