"""What a server's size depends on, from the model folder's config.json."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class CacheShape:
    """Of the keys and values of one token."""

    num_layers: int
    kv_heads: int
    head_size: int

    @classmethod
    def of(cls, folder: str | Path) -> CacheShape:
        """Of the model in a Hugging Face folder."""
        keys = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
        heads = keys["num_attention_heads"]
        size = keys.get("head_dim") or keys["hidden_size"] // heads
        return cls(keys["num_hidden_layers"], keys.get("num_key_value_heads") or heads, size)

    def bytes_per_token(self, bytes_per_number: int) -> int:
        """Keys and values of all layers."""
        return 2 * self.num_layers * self.kv_heads * self.head_size * bytes_per_number
