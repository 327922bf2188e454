"""Bytes of keys and values that a rollout engine keeps of a token."""

from __future__ import annotations

from mindspeed_rl.config import GenerateConfig
from mindspeed_rl.models.model_config import ModelConfig

#: tokens of one KV block on the CPU; a sequence takes whole blocks
_CPU_BLOCK_TOKENS = 128
_MOST_DERIVED_BYTES = 8 << 30


def kv_bytes_per_token(model_config: ModelConfig, itemsize: int, tensor: int = 1) -> int:
    """Bytes a token on one of `tensor` ranks: whole heads, at least one; latent attention caches one head, on every rank.

    Args:
        itemsize: bytes of a cached value.
    """
    if model_config.multi_latent_attention:
        assert model_config.kv_lora_rank is not None and model_config.qk_pos_emb_head_dim is not None
        return model_config.num_layers * (model_config.kv_lora_rank + model_config.qk_pos_emb_head_dim) * itemsize
    heads = -(-model_config.num_query_groups // tensor)
    return 2 * model_config.num_layers * heads * model_config.kv_channels * itemsize


def cpu_cache_bytes(config: GenerateConfig, kv_bytes_per_token: int) -> int:
    """Room on the CPU for `max_num_seqs` full sequences and some spare blocks, at most 8 GiB, unless the run file says a size.

    Args:
        kv_bytes_per_token: of the whole model.
    """
    if config.kv_cache_memory_gib is not None:
        return int(config.kv_cache_memory_gib * (1 << 30))
    blocks = (config.max_num_seqs + 2) * -(-config.max_model_len // _CPU_BLOCK_TOKENS) + 8
    wanted = blocks * _CPU_BLOCK_TOKENS * kv_bytes_per_token // config.infer_tensor_parallel_size
    return min(wanted, _MOST_DERIVED_BYTES)
