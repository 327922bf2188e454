"""Bytes of keys and values that a rollout engine keeps of a token."""

from __future__ import annotations

from mindspeed_rl.config import GenerateConfig
from mindspeed_rl.models.network import Network

#: tokens of one KV block on the CPU; a sequence takes whole blocks
_CPU_BLOCK_TOKENS = 128
_MOST_DERIVED_BYTES = 8 << 30


def kv_bytes_per_token(network: Network, itemsize: int, tensor: int = 1) -> int:
    """Bytes a token on one of `tensor` ranks: whole heads, at least one; latent attention caches one head, on every rank.

    Args:
        itemsize: bytes of a cached value.
    """
    if network.multi_latent_attention:
        assert network.kv_lora_rank is not None and network.qk_pos_emb_head_dim is not None
        return network.num_layers * (network.kv_lora_rank + network.qk_pos_emb_head_dim) * itemsize
    heads = -(-network.num_query_groups // tensor)
    return 2 * network.num_layers * heads * network.kv_channels * itemsize


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
