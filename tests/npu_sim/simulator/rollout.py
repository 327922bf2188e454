"""What vllm-ascend 0.23 asks for beyond torch_npu's own operators: paged attention, the atb operators, one Triton kernel.

| stand-in | in place of |
|---|---|
| `atb::_npu_rotary_embedding`, `atb::_npu_reshape_and_cache`, `atb::_npu_matmul_add_fp32` | operators of NNAL's libatb |
| `npu::npu_fused_infer_attention_score` (TND, paged or not, also latent attention's) | aclnnFusedInferAttentionScore |
| `npu::npu_fused_infer_attention_score_v2`, `npu::npu_kv_rmsnorm_rope_cache` | the aclnn kernels of latent attention |
| `npu::npu_interleave_rope`, `npu::npu_transpose_batchmatmul` | the same |
| `npu::npu_dynamic_quant`, `npu::npu_quant_matmul` | the aclnn kernels of int8 products, of the second also of MXFP8 |
| `npu::npu_dynamic_mx_quant`, `npu::npu_grouped_matmul_swiglu_quant_v2` | the aclnn kernels of MXFP8 of a 950 |
| `npu::npu_top_k_top_p` | the aclnn kernel of sampling from fewer tokens |
| `npu::npu_grouped_matmul`, `npu::npu_moe_token_permute`, `npu::npu_moe_token_unpermute` | the aclnn kernels of experts, of \
the first also of int4 |
| `npu::npu_all_gather_base_mm`, `npu::npu_mm_reduce_scatter_base` | see `parallel_products` |
| `npu::npu_moe_distribute_dispatch`, `npu::npu_moe_distribute_combine`, `_v2` of both | see `mc2` |
| `atb::npu_paged_cache_load`, `npu::npu_attention_update` | the kernels of latent attention's chunks |
| `npu::npu_scatter_pa_kv_cache`, `npu::npu_gather_pa_kv_cache` | a 950's, for the atb operators of its cache |
| `npu::npu_moe_init_routing_v2`, `npu::npu_moe_gating_top_k` | a 950's, for vllm-ascend's own operators of experts |
| `_C_ascend::bgmv_*`, `_C_ascend::sgmv_*` | vllm-ascend's products with adapters |
| `_C_ascend::moe_gating_top_k`, `_C_ascend::npu_moe_init_routing_custom` | vllm-ascend's own operators of experts |
| `_C_ascend::npu_dequant_swiglu_quant` | the same, of experts in int8 |
| `vllm::triton_split_qkv_rmsnorm_mrope` | vllm-ascend's Triton kernel of attention with norms, gates and three rotary axes |
| models that run as they are written | torch's compiler, which vLLM calls for `enforce_eager: false` |
| `_C_ascend` operators and Triton kernels of gated delta nets | see `delta_nets` |
| slot mapping of the block table | vLLM's Triton kernel `_compute_slot_mapping_kernel`, for one context-parallel rank |
| `vllm_ascend_C` | the wheel's extension: sleep mode's allocator only (`cann/camem.cpp`) |
| all other custom operators (`_C_ascend`) | said to be absent, so vllm-ascend takes its paths without them |
| Triton | the same; kernels that are called in any case run by its interpreter, see `delta_nets` |

All of it computes on CPU views of device memory. What is asked for in a form that is not here is an error that names it.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from simulator import calls, delta_nets, mc2, parallel_products
from simulator.fused import Tensor, _kernel, _rms_norm, _rotary
from simulator.graphs import recorded
from simulator.memory import cpu_view, device_copy

_ATB = {
    "_npu_rotary_embedding": "(Tensor positions, Tensor(a!) query, Tensor(b!) key, int head_size, Tensor cos_sin_cache, "
    "bool is_neox_style=True) -> ()",
    "_npu_reshape_and_cache": "(Tensor key, Tensor value, Tensor(a!) key_cache, Tensor(b!) value_cache, "
    "Tensor slot_indices) -> ()",
    "_npu_matmul_add_fp32": "(Tensor x, Tensor weight, Tensor(a!) C) -> ()",
    "npu_paged_cache_load": "(Tensor key_cache, Tensor value_cache, Tensor block_table, Tensor context_lens, *, "
    "Tensor? seq_starts=None, bool cumsum=False, Tensor(a!)? key=None, Tensor(b!)? value=None) -> ()",
}
_libraries: list[torch.library.Library] = []


# ---------------------------------------------------------------- atb


def _rotary_embedding(
    positions: Tensor, query: Tensor, key: Tensor, head_size: int, cos_sin_cache: Tensor, is_neox_style: bool = True
) -> None:
    calls["atb::_npu_rotary_embedding"] += 1
    cos, sin = cpu_view(cos_sin_cache).float()[cpu_view(positions).long()].chunk(2, -1)
    cos, sin = cos[:, None], sin[:, None]
    for tensor in (query, key):
        view = cpu_view(tensor)
        heads = view.float().reshape(view.shape[0], -1, head_size)
        width = 2 * cos.shape[-1]
        turned, rest = heads[..., :width], heads[..., width:]
        first, second = turned.chunk(2, -1) if is_neox_style else (turned[..., ::2], turned[..., 1::2])
        parts = (first * cos - second * sin, second * cos + first * sin)
        rotated = torch.cat(parts, -1) if is_neox_style else torch.stack(parts, -1).flatten(-2)
        view.copy_(torch.cat([rotated, rest], -1).reshape(view.shape))


def _reshape_and_cache(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_indices: Tensor) -> None:
    calls["atb::_npu_reshape_and_cache"] += 1
    _write_rows(key, value, key_cache, value_cache, slot_indices)


def _write_rows(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_indices: Tensor) -> None:
    """Writes each token's row to its slot in the caches of blocks, [blocks, size, ...]."""
    slots = cpu_view(slot_indices).long()
    kept = slots >= 0  # padding has no slot
    for new, cache in ((key, key_cache), (value, value_cache)):
        rows = cpu_view(cache).flatten(0, 1)
        rows[slots[kept]] = cpu_view(new)[: slots.numel()][kept].reshape(-1, *rows.shape[1:]).to(rows.dtype)


def _scatter_pa_kv_cache(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor, *,
    compress_lens: Tensor | None = None, compress_seq_offsets: Tensor | None = None, seq_lens: Tensor | None = None,
    cache_mode: str | None = "PA_NZ",
) -> None:  # fmt: skip
    given = [value for value in (compress_lens, compress_seq_offsets, seq_lens) if value is not None]
    if cache_mode != "Norm" or given:
        raise RuntimeError(f"npu_scatter_pa_kv_cache: cache_mode {cache_mode} or compressed rows are not simulated")
    calls["npu::npu_scatter_pa_kv_cache"] += 1
    _write_rows(key, value, key_cache, value_cache, slot_mapping)


def _matmul_add_fp32(x: Tensor, weight: Tensor, C: Tensor) -> None:  # noqa: N803  (the name in the operator's schema)
    calls["atb::_npu_matmul_add_fp32"] += 1
    cpu_view(C).add_(cpu_view(x).float().t() @ cpu_view(weight).float())


def _paged_cache_load(
    key_cache: Tensor, value_cache: Tensor, block_table: Tensor, context_lens: Tensor, *, seq_starts: Tensor | None = None,
    cumsum: bool = False, key: Tensor | None = None, value: Tensor | None = None,
) -> None:  # fmt: skip
    calls["atb::npu_paged_cache_load"] += 1
    if cumsum or key is None or value is None:
        raise RuntimeError("npu_paged_cache_load: sums of lengths and results of its own are not simulated")
    _read_rows("npu_paged_cache_load", key_cache, value_cache, block_table, context_lens, seq_starts, key, value)


def _gather_pa_kv_cache(
    key_cache: Tensor, value_cache: Tensor, block_tables: Tensor, seq_lens: Tensor, key: Tensor, value: Tensor, *,
    seq_offset: Tensor | None = None, is_seq_lens_cumsum: bool = False,
) -> None:  # fmt: skip
    if is_seq_lens_cumsum:
        raise RuntimeError("npu_gather_pa_kv_cache: sums of lengths are not simulated")
    calls["npu::npu_gather_pa_kv_cache"] += 1
    _read_rows("npu_gather_pa_kv_cache", key_cache, value_cache, block_tables, seq_lens, seq_offset, key, value)


def _read_rows(
    name: str, key_cache: Tensor, value_cache: Tensor, block_table: Tensor, context_lens: Tensor, seq_starts: Tensor | None,
    key: Tensor, value: Tensor,
) -> None:  # fmt: skip
    """Reads the rows of each sequence's blocks one after another, from its start on; a start lies at the begin of a block."""
    size, lengths = key_cache.shape[1], cpu_view(context_lens).tolist()
    starts = [0] * len(lengths) if seq_starts is None else cpu_view(seq_starts).tolist()
    if any(start % size for start in starts):
        raise RuntimeError(f"{name}: starts {starts} lie within blocks of {size} tokens")
    for cache, out in ((key_cache, key), (value_cache, value)):
        rows = [
            _gathered(cpu_view(cache), blocks[start // size :], length, cache.shape[2])
            for blocks, start, length in zip(cpu_view(block_table), starts, lengths)
        ]
        cpu_view(out).copy_(torch.cat(rows))


# ---------------------------------------------------------------- attention over a cache


def _gathered(cache: Tensor, blocks: Tensor, length: int, heads: int) -> Tensor:
    """[length, heads, d] of a sequence from a cache of blocks, [blocks, size, heads, d] or [blocks, size, heads * d]."""
    rows = cache[blocks.long()].flatten(0, 1)
    return rows.reshape(len(rows), heads, cache.shape[2:].numel() // heads)[:length]  # a padded row has no blocks


def _attend(query: Tensor, key: Tensor, value: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    """Attention of one sequence, in float32: softmax(q k^T scale) v and the log of the softmax's denominator.

    Args:
        query: [T, N, D], the newest T tokens.
        key: [S, K, D]; N is a multiple of K.
        value: [S, K, E].
        causal: a token sees itself and what lies in front of it; the last query stands beside the last key.

    Returns:
        [T, N, E] and [T, N].
    """
    repeat = query.shape[1] // key.shape[1]
    query = query.float().transpose(0, 1)
    key, value = (part.float().transpose(0, 1).repeat_interleave(repeat, 0) for part in (key, value))
    scores = query @ key.transpose(1, 2) * scale
    if causal:
        forbidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(key.shape[1] - query.shape[1] + 1)
        scores = scores.masked_fill(forbidden, float("-inf"))
    return (scores.softmax(-1) @ value).transpose(0, 1), scores.logsumexp(-1).transpose(0, 1)


def _infer_attention(query: Tensor, key: Tensor, value: Tensor, **settings: Any) -> tuple[Tensor, Tensor]:
    """Attention of each sequence's newest tokens on all that lies in front of them (sparse mode 3) or on all keys (0).

    Layout TND: query [tokens, heads, d], its `actual_seq_lengths` are ends. Keys lie packed in the same way, or in the blocks
    of a cache; `actual_seq_lengths_kv` are ends there and lengths here. Latent attention's rotated part comes beside query and
    packed key, [tokens, heads, d_rope] each, and is as if it were appended to them.

    Returns:
        [tokens, heads, d of the value], and [tokens, heads, 1] float32 (the log of the softmax's denominator) if asked for.
    """
    layout, mode = settings.get("input_layout", "BSH"), settings.get("sparse_mode", 0)
    if layout != "TND" or mode not in (0, 3):
        raise RuntimeError(f"npu_fused_infer_attention_score: layout {layout} with sparse_mode {mode} is not simulated")
    refused = [name for name in ("pse_shift", "dequant_scale1") if settings.get(name) is not None]
    table, query_rope, key_rope = (settings.get(name) for name in ("block_table", "query_rope", "key_rope"))
    if table is not None and query_rope is not None:
        refused += ["query_rope with block_table"]
    if refused:
        raise RuntimeError(f"npu_fused_infer_attention_score: {', '.join(refused)} is not simulated")
    if query_rope is not None:
        query, key = torch.cat([query, query_rope], -1), torch.cat([key, key_rope], -1)
    query_ends, key_lengths = list(settings["actual_seq_lengths"]), list(settings["actual_seq_lengths_kv"])
    heads = settings.get("num_heads", 1)
    key_heads = settings.get("num_key_value_heads", 0) or heads
    out = torch.zeros(*query.shape[:-1], value.shape[-1] if table is None else query.shape[-1], dtype=query.dtype)
    lse = torch.full((*query.shape[:2], 1), float("inf"))  # stays for a row without keys
    start = key_start = 0
    for number, end in enumerate(query_ends):
        if table is None:  # keys lie packed, their lengths are ends
            keys, values = key[key_start : key_lengths[number]], value[key_start : key_lengths[number]]
            key_start = key_lengths[number]
        else:
            blocks = table[number][: -(-key_lengths[number] // key.shape[1])]
            keys, values = (_gathered(cache, blocks, key_lengths[number], key_heads) for cache in (key, value))
        if end > start and len(keys):
            result, denominator = _attend(query[start:end], keys, values, settings.get("scale", 1.0), mode == 3)
            out[start:end], lse[start:end, :, 0] = result.to(out.dtype), denominator
        start = end
    return out, lse if settings.get("softmax_lse_flag") else torch.zeros(1)


def _workspace(query: Tensor, *others: Any, **settings: Any) -> Tensor:
    """Memory that a kernel within a graph works in; the simulated one needs none."""
    return torch.empty(1, dtype=torch.uint8)


def _into(function: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., list[Tensor]]:
    """The form of an operator that writes into given memory, which a captured graph has."""

    def run(*args: Any, out: list[Tensor], workspace: Tensor | None = None, **settings: Any) -> list[Tensor]:
        on_cpu = lambda item: cpu_view(item) if isinstance(item, Tensor) else item  # noqa: E731
        results = function(*map(on_cpu, args), **{name: on_cpu(value) for name, value in settings.items()})
        cpu_view(out[0]).copy_(results[0].reshape(out[0].shape))
        if settings.get("softmax_lse_flag"):
            cpu_view(out[1]).copy_(results[1].reshape(out[1].shape))
        return out

    return run


def _attention_update(lse: list[Tensor], local_out: list[Tensor], update_type: int) -> tuple[Tensor, Tensor]:
    """Attention on several parts of the keys from attention on each: out = sum_i exp(lse_i - lse) out_i.

    Args:
        lse: [N] float32 each, the log of a part's denominator; +inf for a part without keys, as attention returns it.
        local_out: [N, D] float32 each.
    """
    if update_type:
        raise RuntimeError(f"npu_attention_update: update_type {update_type} is not simulated")
    parts = torch.stack(lse).float()
    parts = parts.masked_fill(parts == float("inf"), float("-inf"))
    total = parts.logsumexp(0)
    weights = torch.exp(parts - total).nan_to_num(0.0)
    return (weights[..., None] * torch.stack(local_out).float()).sum(0).to(local_out[0].dtype), total


def _top_k_top_p(logits: Tensor, p: Tensor | None = None, k: Tensor | None = None) -> Tensor:
    """Keep the k largest of [B, V], and of these the most likely until their probabilities sum up to p; others are -inf."""
    values, indices = logits.float().sort(stable=True)
    if k is not None:
        if k.dtype != torch.int32 or not ((k >= 1) & (k <= logits.shape[-1])).all():
            raise RuntimeError(f"npu_top_k_top_p: k is {k.tolist()} ({k.dtype}), which is no number of tokens in int32")
        threshold = values.gather(-1, (values.shape[-1] - k.long())[:, None])
        values = values.masked_fill(values < threshold, float("-inf"))
    if p is not None:
        dropped = values.softmax(-1).cumsum(-1) <= 1 - p.float()[:, None]
        dropped[:, -1] = False
        values = values.masked_fill(dropped, float("-inf"))
    return torch.empty_like(values).scatter_(-1, indices, values).to(logits.dtype)


# ---------------------------------------------------------------- latent attention

#: widths that the device's kernels of latent attention are built for: the latent vector, the rotated part of a head
LATENT, ROTATED = 512, 64


def _check_width(name: str, what: str, width: int, wanted: int) -> None:
    if width != wanted:
        raise RuntimeError(f"{name}: {what} has {width} numbers, and the device's kernel is built for {wanted}")


def _infer_attention_v2(query: Tensor, key: Tensor, value: Tensor, **settings: Any) -> tuple[Tensor, Tensor]:
    """Latent attention of the newest tokens of each sequence, one (layout BNSD_NBSD) or as many as are checked (TND_NTD).

    All heads share one key, whose latent part is the value too:
    out = softmax((q c^T + q_rope k_rope^T) softmax_scale) c, over the first `actual_seq_kvlen` rows of the sequence's blocks;
    with sparse mode 3 a token sees what lies in front of it.

    Args:
        query: [B, N, 1, 512] and query_rope [B, N, 1, 64]; in TND_NTD [T, N, 512] and [T, N, 64], of which sequence i has the
            rows up to `actual_seq_qlen[i]`.
        key: the cache of c, [blocks, 1, size, 512], which `value` is as well, and key_rope [blocks, 1, size, 64].

    Returns:
        [N, B, 1, 512], in TND_NTD [N, T, 512].
    """
    name = "npu_fused_infer_attention_score_v2"
    known = (
        "query_rope", "key_rope", "block_table", "block_size", "actual_seq_kvlen", "num_query_heads", "num_key_value_heads",
        "softmax_scale", "input_layout", "sparse_mode", "atten_mask", "actual_seq_qlen",
    )  # fmt: skip
    refused = [key for key, given in settings.items() if given is not None and key not in known]
    layout, mode, table = settings.get("input_layout", "BSH"), settings.get("sparse_mode", 0), settings.get("block_table")
    ends = settings.get("actual_seq_qlen")
    fits = (layout, mode, ends is None) in (("BNSD_NBSD", 0, True), ("TND_NTD", 3, False))
    if refused or not fits or table is None or settings.get("num_key_value_heads") != 1:
        raise RuntimeError(f"{name}: {layout} with sparse_mode {mode} {' '.join(refused)} is not simulated")
    query_rope, key_rope = settings["query_rope"], settings["key_rope"]
    _check_width(name, "the latent key", key.shape[-1], LATENT)
    _check_width(name, "the rotated key", key_rope.shape[-1], ROTATED)
    out = torch.zeros(query.shape[1], query.shape[0], *query.shape[2:], dtype=query.dtype)
    tokens = torch.cat([query, query_rope], -1)
    if ends is None:  # a token of each sequence, whose place among the others is its sequence's
        ends, tokens = list(range(1, len(query) + 1)), tokens.squeeze(2)
    start = 0
    for number, (end, length) in enumerate(zip(ends, settings["actual_seq_kvlen"])):
        blocks = table[number][: -(-length // key.shape[2])]
        latent, rotated = (_gathered(cache.transpose(1, 2), blocks, length, 1) for cache in (key, key_rope))
        if end > start and length:
            keys = torch.cat([latent, rotated], -1)
            result, _ = _attend(tokens[start:end], keys, latent, settings["softmax_scale"], causal=mode == 3)
            out[:, start:end] = result.transpose(0, 1).reshape(out[:, start:end].shape).to(out.dtype)
        start = end
    return out, torch.zeros(0)


def _interleave_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of pairs of neighbours, which come out as halves: out = y cos + rotate_half(y) sin.

    y has the even numbers of x in front of the odd ones. Queries and keys are put in this order alike, so their products are
    the published model's.

    Args:
        x: [B, N, S, 64].
        cos: [B, 1, S or 1, 64], each angle twice: in the first half and in the second; sin as well.
    """
    _check_width("npu_interleave_rope", "a head", x.shape[-1], ROTATED)
    ordered = torch.cat([x[..., ::2], x[..., 1::2]], -1)
    return _rotary(ordered, cos, sin)


def _kv_rmsnorm_rope_cache(
    kv: Tensor, gamma: Tensor, cos: Tensor, sin: Tensor, index: Tensor, k_cache: Tensor, ckv_cache: Tensor, *,
    epsilon: float = 1e-5, cache_mode: str = "Norm", is_output_kv: bool = False, **scales: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The latent part of new keys normalised, the other part rotated, and both written into the caches of blocks.

    c = kv[..., :512] / rms(kv[..., :512]) gamma and k = interleave_rope(kv[..., 512:]).

    Args:
        kv: [B, 1, S, 512 + 64].
        cos: [B, 1, S, 64], sin as well.
        index: [B * S], the row of each token in a cache whose blocks are laid end to end; padding has -1.
        k_cache: [blocks, size, 1, 64], ckv_cache [blocks, size, 1, 512].

    Returns:
        Both caches themselves, then only k and c of these tokens if asked for.
    """
    name = "npu_kv_rmsnorm_rope_cache"
    calls[f"npu::{name}"] += 1
    given = [key for key, scale in scales.items() if scale is not None]
    if cache_mode not in ("PA", "PA_BNSD") or given:
        raise RuntimeError(f"{name}: cache_mode {cache_mode} {' '.join(given)} is not simulated")
    rows, weight = cpu_view(kv), cpu_view(gamma)
    _check_width(name, "gamma", len(weight), LATENT)
    latent = _rms_norm(rows[..., :LATENT], weight, epsilon)[0]
    rotated = _interleave_rope(rows[..., LATENT:], cpu_view(cos), cpu_view(sin))
    slots = cpu_view(index).flatten().long()
    kept = slots >= 0
    for new, cache in ((rotated, cpu_view(k_cache)), (latent, cpu_view(ckv_cache))):
        size = cache.shape[1]
        cache[slots[kept] // size, slots[kept] % size] = new.reshape(-1, *cache.shape[2:])[kept].to(cache.dtype)
    parts = (rotated, latent) if is_output_kv else (torch.zeros(0), torch.zeros(0))
    # a copy of the caches would be right too, and hundreds of MiB in every layer
    return k_cache, ckv_cache, *(device_copy(part, kv.device) for part in parts)


def _transpose_batchmatmul(
    input: Tensor, weight: Tensor, *, bias: Tensor | None = None, scale: Tensor | None = None,
    perm_x1: list[int] | None = None, perm_x2: list[int] | None = None, perm_y: list[int] | None = None,
    batch_split_factor: int = 1,
) -> Tensor:  # fmt: skip
    """One product for each head between transposes: (input^perm_x1 @ weight^perm_x2)^perm_y.

    Args:
        input: [N, B, K], or what becomes that by perm_x1.
        weight: [N, K, M], or what becomes that by perm_x2.
        perm_y: (1, 0, 2), the only one that the operator has; so the result is [B, N, M].
    """
    if bias is not None or scale is not None or batch_split_factor != 1:
        raise RuntimeError("npu_transpose_batchmatmul: bias, scale and batch_split_factor are not simulated")
    if list(perm_y or (1, 0, 2)) != [1, 0, 2]:
        raise RuntimeError(f"npu_transpose_batchmatmul: perm_y is {list(perm_y)}, and the operator has (1, 0, 2) alone")
    rows, matrices = input.permute(*(perm_x1 or (0, 1, 2))), weight.permute(*(perm_x2 or (0, 1, 2)))
    return (rows.float() @ matrices.float()).to(input.dtype).permute(1, 0, 2).contiguous()


# ---------------------------------------------------------------- mixtures of experts


def _gating_top_k(
    x: Tensor, *, k: int, k_group: int = 1, group_count: int = 1, group_select_mode: int = 0, renorm: int = 0,
    norm_type: int = 0, out_flag: bool = False, routed_scaling_factor: float = 1.0, eps: float = 1e-20,
    bias_opt: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Chosen experts of each token and their weights: the bias has a say in the choice and none in the weights."""
    logits = x.float()
    scores = logits.softmax(-1) if norm_type == 0 else logits.sigmoid()
    choice = scores if bias_opt is None else scores + bias_opt.float()
    if group_count > 1:
        groups = choice.unflatten(-1, (group_count, -1))
        standing = groups.topk(2, -1).values.sum(-1) if group_select_mode == 1 else groups.amax(-1)
        kept = torch.zeros_like(standing).scatter(-1, standing.topk(k_group, -1).indices, 1.0).bool()
        choice = groups.masked_fill(~kept[..., None], float("-inf")).flatten(-2)
    chosen = choice.topk(k, -1).indices
    weights = scores.gather(-1, chosen)
    if renorm or norm_type == 1:
        weights = weights / (weights.sum(-1, keepdim=True) + eps)
    return (weights * routed_scaling_factor).to(x.dtype), chosen.int(), scores


def _init_routing(
    x: Tensor, expert_idx: Tensor, *, scale: Tensor | None = None, offset: Tensor | None = None, active_num: int = -1,
    expert_capacity: int = -1, expert_num: int = -1, drop_pad_mode: int = 0, expert_tokens_num_type: int = 0,
    expert_tokens_num_flag: bool = False, quant_mode: int = -1, active_expert_range: list[int] | None = None,
    row_idx_type: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Rows sorted by expert; where each (token, choice) went, -1 for experts of other ranks; rows of each own expert.

    With quant_mode 1 rows are in int8 and the last result is the scale of each, with 3 they are in MXFP8 with [rows, scales].
    """
    if scale is not None or quant_mode not in (-1, 1, 3) or drop_pad_mode or expert_tokens_num_type != 1 or row_idx_type:
        raise RuntimeError("npu_moe_init_routing: other quantized rows, capacities and other counts are not simulated")
    first, end = active_expert_range or [0, expert_num]
    experts = expert_idx.flatten().long()
    mine = (experts >= first) & (experts < end)
    order = torch.where(mine, experts, expert_num).argsort(stable=True)[: int(mine.sum())]
    rows = torch.zeros(experts.numel(), x.shape[-1], dtype=x.dtype)
    rows[: order.numel()] = x[order // expert_idx.shape[-1]]
    places = torch.full((experts.numel(),), -1, dtype=torch.int32)
    places[order] = torch.arange(order.numel(), dtype=torch.int32)
    counts = torch.bincount(experts[mine] - first, minlength=end - first)
    if quant_mode == 1:
        rows, scales = _dynamic_quant(rows)
        return rows, places, counts, scales
    if quant_mode == 3:
        rows, scales = _dynamic_mx_quant(rows, dst_type=torch.float8_e4m3fn)
        return rows, places, counts, scales.flatten(1)
    return rows, places, counts, torch.zeros(experts.numel())


def _init_routing_v2(
    x: Tensor, expert_idx: Tensor, *, x_dtype: int | None = None, active_expert_range: list[int] | None = None, **others: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    if x_dtype is not None:
        raise RuntimeError(f"npu_moe_init_routing_v2: rows of type {x_dtype} are not simulated")
    return _init_routing(x, expert_idx, active_expert_range=active_expert_range or None, **others)


def _npu_gating_top_k(
    x: Tensor, k: int, *, bias: Tensor | None = None, input_ids: Tensor | None = None, tid2eid: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    if input_ids is not None or tid2eid is not None:
        raise RuntimeError("npu_moe_gating_top_k: experts by a token's number are not simulated")
    return _gating_top_k(x, k=k, bias_opt=bias, **others)


def _token_unpermute(
    permuted_tokens: Tensor, sorted_indices: Tensor, probs: Tensor | None = None, padded_mode: bool = False,
    restore_shape: list[int] | None = None,
) -> Tensor:  # fmt: skip
    """Each token's weighted sum over its experts' rows; without weights, rows where they were before `_token_permute`."""
    if padded_mode:
        raise RuntimeError("npu_moe_token_unpermute: padding is not simulated")
    if probs is None:
        return permuted_tokens[sorted_indices.long()]
    rows = permuted_tokens[sorted_indices.long().clamp(0, len(permuted_tokens) - 1)].float()
    total = (rows.unflatten(0, probs.shape) * probs.float()[..., None]).sum(1)
    return total.to(permuted_tokens.dtype)


def _token_permute(
    tokens: Tensor, indices: Tensor, num_out_tokens: int | None = None, padded_mode: bool = False
) -> tuple[Tensor, Tensor]:
    """Rows sorted by expert, one for each (token, choice), and where each went."""
    if padded_mode or num_out_tokens not in (None, 0, indices.numel()):
        raise RuntimeError("npu_moe_token_permute: padding and dropped tokens are not simulated")
    order = indices.flatten().argsort(stable=True)
    return tokens[order // (indices.numel() // max(len(tokens), 1) or 1)], order.argsort().int()


def _grouped_matmul(x: list[Tensor], weight: list[Tensor], **settings: Any) -> list[Tensor]:
    """Each group of rows times its own matrix; one tensor of rows and one of matrices.

    Of int8 rows and matrices the sums are whole numbers, the result itself (int32), or times a scale of each column of each
    matrix and one of each row: y = (x @ weight) scale per_token_scale. Matrices in int32 are int4: see `_grouped_matmul_a8w4`.
    """
    known = ("bias", "split_item", "group_list", "group_type", "group_list_type", "scale", "per_token_scale", "output_dtype")
    known += ("scale_dtype", "per_token_scale_dtype")
    refused = [name for name, value in settings.items() if value is not None and name not in known]
    if refused or len(x) != 1 or len(weight) != 1 or settings.get("group_type") != 0:
        raise RuntimeError(f"npu_grouped_matmul: this form is not simulated ({', '.join(refused) or 'several tensors'})")
    (rows,), (matrices,), bias = x, weight, settings.get("bias")
    if matrices.dtype == torch.int32:
        return [_grouped_matmul_a8w4(rows, matrices, **settings)]
    scale, token_scale = settings.get("scale") or [None], settings.get("per_token_scale") or [None]
    if rows.dtype == torch.float8_e4m3fn:
        _check_mx("npu_grouped_matmul", settings, "scale_dtype", "per_token_scale_dtype")
        rows, matrices = _decode_mx(rows, token_scale[0]), _decode_mx(matrices, scale[0], columns=True)
        scale = [None]
    is_quantized, kind = rows.dtype == torch.int8, _read_dtype(settings.get("output_dtype"))
    if is_quantized != (matrices.dtype == torch.int8) or (is_quantized and bias) or not (is_quantized or scale[0] is None):
        raise RuntimeError(f"npu_grouped_matmul: rows of {rows.dtype} with matrices of {matrices.dtype} are not simulated")
    if is_quantized and (scale[0] is None) != (kind == torch.int32):
        raise RuntimeError(f"npu_grouped_matmul: int8 rows without scales give int32, with scales numbers, and not {kind}")
    counts = settings["group_list"].long()
    if settings.get("group_list_type") == 0:
        counts = counts.diff(prepend=torch.zeros(1, dtype=torch.long))
    sums = torch.float64 if is_quantized or rows.dtype == torch.float64 else torch.float32
    out, start = torch.zeros(len(rows), matrices.shape[-1], dtype=sums), 0
    for group, count in enumerate(counts.tolist()):
        part = rows[start : start + count].to(sums) @ matrices[group].to(sums)
        if scale[0] is not None:
            part = part * scale[0][group].double() * token_scale[0][start : start + count, None].double()
        out[start : start + count] = part if not bias else part + bias[0][group].float()
        start += count
    return [out.to(kind or rows.dtype)]


def _grouped_matmul_a8w4(rows: Tensor, matrices: Tensor, **settings: Any) -> Tensor:
    """Int8 rows times int4 with a scale for 256 elements of a column: y = ((x - 8) weight scale + bias) per_token_scale.

    The definition, and what the operator takes, are those of aclnnGroupedMatmulV5 (repository cann/ops-transformer, section
    A8W4 of its documentation for A2 and A3). `bias` is required: 8 weight scale, summed over the rows of a matrix; with it, y
    is x weight scale per_token_scale; it is added whatever it is, as the device does. Results may be in float32 too, which the
    device does not have: nothing can be compared closely in 16 bits.

    Args:
        rows: [T, K] int8.
        matrices: [groups, K, N / 8] int32, each the int4 numbers of 8 columns, the first one in the lowest bits.
        settings: scale [groups, K / 256, N] int64, a float32 in its lower half; bias [groups, N] float32; per_token_scale [T].
    """
    name = "npu_grouped_matmul"
    (scale,), (bias,), (token_scale,) = (settings.get(key) or [None] for key in ("scale", "bias", "per_token_scale"))
    given = {key: None if value is None else value.dtype for key, value in (("scale", scale), ("bias", bias))}
    kind = _read_dtype(settings.get("output_dtype"))
    if rows.dtype != torch.int8 or given != {"scale": torch.int64, "bias": torch.float32} or token_scale is None:
        raise RuntimeError(f"{name}: int4 matrices take int8 rows with scales in int64 and a bias in float32, not {given}")
    if settings.get("group_list_type") != 1 or kind is None or not kind.is_floating_point or not matrices.is_contiguous():
        raise RuntimeError(f"{name}: with int4 matrices groups are counts, and results floating-point numbers, not {kind}")
    count, width = matrices.shape[:2]
    columns = 8 * matrices.shape[2]
    if width % 256 or width > 18432 or scale.shape != (count, width // 256, columns) or bias.shape != (count, columns):
        shapes = f"scales {list(scale.shape)}, bias {list(bias.shape)}"
        raise RuntimeError(f"{name}: {shapes} of int4 matrices [{width}, {columns}]")
    halves = scale.contiguous().view(torch.float32).unflatten(-1, (-1, 2))
    if halves[..., 1].view(torch.int32).any() or not torch.equal(halves[..., 0], halves[..., 0].half().float()):
        raise RuntimeError(f"{name}: scales of int4 are the bits of float32 numbers that float16 has")
    numbers = torch.stack([(matrices << 28 - 4 * place) >> 28 for place in range(8)], dim=-1).flatten(2)
    scaled = (numbers.double().unflatten(1, (-1, 256)) * halves[..., :1].transpose(-1, -2).double()).flatten(1, 2)
    out, start = torch.zeros(len(rows), columns, dtype=torch.float64), 0
    for group, size in enumerate(settings["group_list"].tolist()):
        part = (rows[start : start + size].double() - 8) @ scaled[group] + bias[group].double()
        out[start : start + size] = part * token_scale[start : start + size, None].double()
        start += size
    return out.to(kind)


#: the dispatcher gives types by their numbers, torch_npu some by numbers of its own
_DTYPES = {1: torch.int8, 3: torch.int32, 5: torch.float16, 6: torch.float32, 15: torch.bfloat16, 24: torch.float8_e4m3fn}
_DTYPES |= {44: torch.float8_e8m0fnu, 292: torch.float8_e4m3fn, 293: torch.float8_e8m0fnu}


def _read_dtype(dtype: Any) -> Any:
    return _DTYPES.get(dtype, dtype)


def _check_mx(name: str, settings: dict[str, Any], *types: str) -> None:
    given = [_read_dtype(settings.get(kind)) for kind in types]
    if any(kind != torch.float8_e8m0fnu for kind in given):
        raise RuntimeError(f"{name}: 8-bit floats have scales in float8_e8m0fnu, and not in {given}")


def _decode_mx(elements: Tensor, scales: Tensor, *, columns: bool = False) -> Tensor:
    """Numbers of MX elements with a power of two for each 32 of them, in float64.

    Args:
        elements: [..., rows, K] E4M3, with `columns` [..., K, N].
        scales: [..., rows, ceil(K / 64), 2] exponents + 127, with `columns` [..., ceil(K / 64), N, 2].
    """
    if elements.dtype != torch.float8_e4m3fn or scales.dtype != torch.uint8:
        raise RuntimeError(f"MX elements of {elements.dtype} with scales of {scales.dtype} are not simulated")
    numbers = elements.double().transpose(-1, -2) if columns else elements.double()
    powers = torch.exp2(scales.double() - 127)
    powers = (powers.transpose(-2, -3) if columns else powers).flatten(-2)
    expected = (*numbers.shape[:-1], -(-numbers.shape[-1] // 64) * 2)
    if powers.shape != expected:
        raise RuntimeError(f"scales {tuple(scales.shape)} do not fit MX elements {tuple(elements.shape)}")
    numbers = numbers * powers.repeat_interleave(32, -1)[..., : numbers.shape[-1]]
    return numbers.transpose(-1, -2) if columns else numbers


def _dynamic_mx_quant(x: Tensor, **settings: Any) -> tuple[Tensor, Tensor]:
    """Each 32 numbers of a row in E4M3 with a power of two: 2^(floor(log2(largest)) - 8), of the OCP MX specification.

    Returns:
        Elements like x, and exponents + 127, [..., ceil(K / 64), 2]; a last one without numbers is 0.
    """
    expected = {"axis": -1, "round_mode": "rint", "block_size": 32, "scale_alg": 0, "dst_type_max": 0.0, "max_low_bound": 0.0}
    refused = [name for name, value in settings.items() if name != "dst_type" and value != expected[name]]
    if refused or _read_dtype(settings.get("dst_type")) != torch.float8_e4m3fn:
        raise RuntimeError(f"npu_dynamic_mx_quant: this form is not simulated ({settings})")
    width = x.shape[-1]
    rows = torch.nn.functional.pad(x.double(), (0, -width % 64)).unflatten(-1, (-1, 32))
    largest = rows.abs().amax(-1)
    exponents = torch.floor(torch.log2(largest.clamp(min=2.0**-119))) - 8
    elements = (rows * torch.exp2(-exponents)[..., None]).clamp(-448, 448).to(torch.float8_e4m3fn)
    stored = (exponents + 127).to(torch.uint8)
    if -(-width // 32) % 2:
        stored[..., -1] = 0
    return elements.flatten(-2)[..., :width].contiguous(), stored.unflatten(-1, (-1, 2))


def _grouped_matmul_swiglu_quant_v2(
    x: Tensor, weight: list[Tensor], weight_scale: list[Tensor], x_scale: Tensor, group_list: Tensor, **settings: Any
) -> tuple[Tensor, Tensor]:
    """MX rows times the matrix of their group, silu(left) right of the sums, in MX again.

    Args:
        group_list: [groups] ends of the groups' rows.
    """
    name = "npu_grouped_matmul_swiglu_quant_v2"
    known = {"dequant_mode": 2, "quant_mode": 2, "dequant_dtype": torch.float32, "quant_dtype": torch.float8_e4m3fn}
    settings = {"dequant_dtype": torch.float32} | settings
    given = {key: _read_dtype(value) for key, value in settings.items() if value is not None and "scale_dtype" not in key}
    if {key: given.pop(key, None) for key in known} != known or any(given.values()) or x.dtype != torch.float8_e4m3fn:
        raise RuntimeError(f"{name}: this form is not simulated ({settings} of {x.dtype})")
    _check_mx(name, settings, "weight_scale_dtype", "x_scale_dtype")
    rows, matrices = _decode_mx(x, x_scale), _decode_mx(weight[0], weight_scale[0], columns=True)
    sums, start = torch.zeros(len(rows), matrices.shape[-1]), 0
    for group, end in enumerate(group_list.tolist()):
        sums[start:end], start = (rows[start:end] @ matrices[group]).float(), end
    left, right = sums.chunk(2, -1)
    return _dynamic_mx_quant(torch.nn.functional.silu(left) * right, dst_type=torch.float8_e4m3fn)


def _dequant_swiglu_quant(
    x: Tensor, *, weight_scale: Tensor | None = None, activation_scale: Tensor | None = None, bias: Tensor | None = None,
    quant_scale: Tensor | None = None, quant_offset: Tensor | None = None, group_index: Tensor | None = None,
    activate_left: bool = True, quant_mode: int = 0, swiglu_mode: int = 0, **settings: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """silu(left) right of x weight_scale activation_scale, each row in int8 again with a scale of its own.

    Mode 1 is the same where nothing is clamped: of vllm-ascend's kernel both have the halves one after the other.

    Args:
        x: [T, 2H] int32, rows sorted by group.
        weight_scale: [groups, 2H] float32, of one group [2H]; activation_scale [T] float32.
        group_index: [groups] rows of each group.
    """
    given = [name for name, value in settings.items() if value != {"glu_alpha": 1.0}.get(name, 0.0)]
    given += [name for name, value in (("bias", bias), ("scale", quant_scale), ("offset", quant_offset)) if value is not None]
    if given or x.dtype != torch.int32 or not activate_left or quant_mode != 1 or weight_scale is None or group_index is None:
        raise RuntimeError(f"npu_dequant_swiglu_quant: this form is not simulated ({', '.join(given)})")
    counts = group_index.long()
    owners = torch.arange(len(counts)).repeat_interleave(counts)
    rows = x[: len(owners)].float() * weight_scale.view(len(counts), -1)[owners] * activation_scale[: len(owners), None]
    left, right = rows.chunk(2, -1)
    out, scales = torch.zeros(len(x), x.shape[1] // 2, dtype=torch.int8), torch.zeros(len(x))
    out[: len(owners)], scales[: len(owners)] = _dynamic_quant(torch.nn.functional.silu(left) * right)
    return out, scales


def _dynamic_quant(x: Tensor, **settings: Any) -> tuple[Tensor, Tensor]:
    """Each token in int8 with a scale of its own."""
    refused = [name for name, value in settings.items() if value is not None and name != "dst_type"]
    if refused or settings.get("dst_type", torch.int8) not in (torch.int8, 1):
        raise RuntimeError(f"npu_dynamic_quant: this form is not simulated ({settings})")
    return mc2.quantize_rows(x)


def _quant_matmul(x1: Tensor, x2: Tensor, scale: Tensor, **settings: Any) -> Tensor:
    """Rows with a scale of a token each times columns with a scale of a channel each; in int32 the products without scales."""
    known = ("pertoken_scale", "bias", "output_dtype")
    if x1.dtype == torch.float8_e4m3fn:
        return _quant_matmul_mx(x1, x2, scale, **settings)
    refused = [name for name, value in settings.items() if value is not None and name not in known]
    if refused or x1.dtype != torch.int8 or x2.dtype != torch.int8 or not x2.is_contiguous() or scale.dim() != 1:
        raise RuntimeError(f"npu_quant_matmul: this form is not simulated ({', '.join(refused)})")
    if _read_dtype(settings.get("output_dtype")) == torch.int32:
        if settings.get("pertoken_scale") is not None or settings.get("bias") is not None:
            raise RuntimeError("npu_quant_matmul: scales of tokens and a bias with results in int32 are not simulated")
        return (x1.double() @ x2.double()).int()
    # sums of whole numbers are exact, as the device's in int32 are
    out = (x1.double() @ x2.double()).float() * settings["pertoken_scale"][:, None] * scale.float()
    out = out if settings.get("bias") is None else out + settings["bias"].float()
    return out.to(_read_dtype(settings.get("output_dtype")))


def _quant_matmul_mx(x1: Tensor, x2: Tensor, scale: Tensor, **settings: Any) -> Tensor:
    """MX rows [M, K] times MX columns [K, N], with scales [M, ceil(K / 64), 2] and [ceil(K / 64), N, 2]."""
    known = ("pertoken_scale", "bias", "output_dtype", "scale_dtype", "pertoken_scale_dtype", "group_sizes")
    refused = [name for name, value in settings.items() if value is not None and name not in known]
    if refused or list(settings.get("group_sizes") or ()) != [1, 1, 32]:
        raise RuntimeError(f"npu_quant_matmul: this form is not simulated ({', '.join(refused)})")
    _check_mx("npu_quant_matmul", settings, "scale_dtype", "pertoken_scale_dtype")
    out = _decode_mx(x1, settings["pertoken_scale"]) @ _decode_mx(x2, scale, columns=True)
    out = out if settings.get("bias") is None else out + settings["bias"].double()
    return out.to(_read_dtype(settings.get("output_dtype")))


# ---------------------------------------------------------------- adapters

#: products with low-rank adapters, of vllm-ascend's own library
_ADAPTERS = {
    "bgmv_shrink": "(Tensor x, Tensor weight, Tensor indices, Tensor(a!) y, float scale) -> ()",
    "sgmv_shrink": "(Tensor x, Tensor weight, Tensor lora_indices, Tensor seq_len, Tensor(a!) y, float scale) -> ()",
    "bgmv_expand": "(Tensor x, Tensor weight, Tensor indices, Tensor(a!) y, int slice_offset, int slice_size) -> Tensor",
    "sgmv_expand": "(Tensor x, Tensor weight, Tensor lora_indices, Tensor seq_len, Tensor(a!) y, int slice_offset, "
    "int slice_size) -> Tensor",
}  # fmt: skip


def _adapter_rows(name: str, weight: Tensor, indices: Tensor, seq_len: Tensor | None) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields each adapter's rows and its matrix; rows with index -1 have none."""
    if weight.dtype not in (torch.float16, torch.bfloat16):
        raise RuntimeError(f"{name}: only support half and bf16")  # as the compiled operator says
    owners = cpu_view(indices).long()
    if seq_len is not None:
        owners = owners.repeat_interleave(cpu_view(seq_len).long())
    matrices = cpu_view(weight).flatten(0, -3)
    for adapter in owners[owners >= 0].unique().tolist():
        yield (owners == adapter).nonzero()[:, 0], matrices[adapter].float()


def _shrink(name: str, x: Tensor, weight: Tensor, indices: Tensor, seq_len: Tensor | None, y: Tensor, scale: float) -> None:
    """y = scale x A^T for the rows of each adapter; y is float32."""
    calls[f"_C_ascend::{name}"] += 1
    for rows, matrix in _adapter_rows(name, weight, indices, seq_len):
        cpu_view(y)[rows] = cpu_view(x)[rows].float() @ matrix.t() * scale


def _expand(
    name: str, x: Tensor, weight: Tensor, indices: Tensor, seq_len: Tensor | None, y: Tensor, offset: int, size: int
) -> Tensor:
    """y[:, offset : offset + size] += x B^T for the rows of each adapter."""
    calls[f"_C_ascend::{name}"] += 1
    for rows, matrix in _adapter_rows(name, weight, indices, seq_len):
        part = cpu_view(y)[:, offset : offset + size]
        part[rows] = (part[rows].float() + cpu_view(x)[rows].float() @ matrix.t()).to(y.dtype)
    return y


def _adapter_kernel(name: str) -> Callable[..., Tensor | None]:
    function = _shrink if name.endswith("shrink") else _expand
    if name.startswith("sgmv"):
        return lambda x, weight, indices, seq_len, *others: function(name, x, weight, indices, seq_len, *others)
    return lambda x, weight, indices, *others: function(name, x, weight, indices, None, *others)


KERNELS = {
    "npu_attention_update": _attention_update,
    "npu_top_k_top_p": _top_k_top_p,
    "_npu_fused_infer_attention_score_get_max_workspace": _workspace,
    "_npu_fused_infer_attention_score_v2_get_max_workspace": _workspace,
    "npu_dynamic_quant": _dynamic_quant,
    "npu_dynamic_mx_quant": _dynamic_mx_quant,
    "npu_quant_matmul": _quant_matmul,
    "npu_grouped_matmul_swiglu_quant_v2": _grouped_matmul_swiglu_quant_v2,
    "npu_fused_infer_attention_score": _infer_attention,
    "npu_fused_infer_attention_score_v2": _infer_attention_v2,
    "npu_interleave_rope": _interleave_rope,
    "npu_transpose_batchmatmul": _transpose_batchmatmul,
    "npu_moe_token_permute": _token_permute,
    "npu_moe_token_unpermute": _token_unpermute,
    "npu_grouped_matmul": _grouped_matmul,
    "npu_moe_init_routing_v2": _init_routing_v2,
    "npu_moe_gating_top_k": _npu_gating_top_k,
}

#: those that write into what they are given
_WRITING = {
    "npu_kv_rmsnorm_rope_cache": "_kv_rmsnorm_rope_cache",
    "npu_scatter_pa_kv_cache": "_scatter_pa_kv_cache",
    "npu_gather_pa_kv_cache": "_gather_pa_kv_cache",
}

#: those that have a form for graphs, which writes into given memory
_INTO = {
    "npu_fused_infer_attention_score": _infer_attention,
    "npu_fused_infer_attention_score_v2": _infer_attention_v2,
}

#: operators of vllm-ascend's own library that its paths for experts call in any case
_CUSTOM = {
    "moe_gating_top_k": (
        "(Tensor x, *, int k, int k_group=1, int group_count=1, int group_select_mode=0, int renorm=0, int norm_type=0, "
        "bool out_flag=False, float routed_scaling_factor=1.0, float eps=1e-20, Tensor? bias_opt=None) "
        "-> (Tensor, Tensor, Tensor)",
        _gating_top_k,
    ),
    "npu_moe_init_routing_custom": (
        "(Tensor x, Tensor expert_idx, *, Tensor? scale=None, Tensor? offset=None, int active_num=-1, "
        "int expert_capacity=-1, int expert_num=-1, int drop_pad_mode=0, int expert_tokens_num_type=0, "
        "bool expert_tokens_num_flag=False, int quant_mode=-1, int[]? active_expert_range=None, int row_idx_type=0) "
        "-> (Tensor, Tensor, Tensor, Tensor)",
        _init_routing,
    ),
    "npu_dequant_swiglu_quant": (
        "(Tensor x, *, Tensor? weight_scale=None, Tensor? activation_scale=None, Tensor? bias=None, Tensor? quant_scale=None, "
        "Tensor? quant_offset=None, Tensor? group_index=None, bool activate_left=True, int quant_mode=0, int swiglu_mode=0, "
        "float clamp_limit=0.0, float glu_alpha=1.0, float glu_bias=0.0) -> (Tensor, Tensor)",
        _dequant_swiglu_quant,
    ),
}


def _split_qkv_norm_mrope(
    qkv: Tensor, q_weight: Tensor, k_weight: Tensor, cos_sin: Tensor, num_q_heads: int, num_kv_heads: int, head_size: int,
    eps: float, mrope_section: list[int], is_interleaved: bool, rope_dim: int | None = None, q_bias: Tensor | None = None,
    k_bias: Tensor | None = None, has_gate: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Query and key normalised by head and rotated in their first `rope_dim` numbers, the value, and the gate beside queries.

    Frequency i turns by the position on one axis: time, but in interleaved form height for i = 1, 4, 7 ... below 3 times its
    section, and width for i = 2, 5, 8 ...; else the sections come one after the other.

    Args:
        qkv: [tokens, ...]; with a gate each head of the query has its gate behind it.
        cos_sin: [3, tokens, rope_dim], the cosines and then the sines of each axis.
    """
    if q_bias is not None or k_bias is not None:
        raise RuntimeError("triton_split_qkv_rmsnorm_mrope: biases are not simulated")
    width = head_size if rope_dim is None else rope_dim
    axes = [axis for axis, size in enumerate(mrope_section) for _ in range(size)]
    if is_interleaved:
        axes = [index % 3 if index < 3 * mrope_section[index % 3] else 0 for index in range(width // 2)]
    chosen = torch.tensor(axes).expand(1, cos_sin.shape[1], -1)
    cos, sin = (part.float().gather(0, chosen)[0, :, None].repeat(1, 1, 2) for part in cos_sin.chunk(2, -1))
    queries = num_q_heads * head_size * (2 if has_gate else 1)
    query, key, value = qkv.split([queries, num_kv_heads * head_size, num_kv_heads * head_size], -1)
    query, *gate = query.unflatten(-1, (num_q_heads, -1)).split(head_size, -1)
    rows = [_rms_norm(query, q_weight, eps)[0], _rms_norm(key.unflatten(-1, (-1, head_size)), k_weight, eps)[0]]
    turned = [torch.cat([_rotary(part[..., :width].float(), cos, sin), part[..., width:].float()], -1) for part in rows]
    query, key = (part.to(qkv.dtype).flatten(1) for part in turned)
    return query, key, value.contiguous(), gate[0].flatten(1).contiguous() if gate else qkv.new_empty(0)


_MROPE = (
    "triton_split_qkv_rmsnorm_mrope(Tensor qkv, Tensor q_weight, Tensor k_weight, Tensor cos_sin, int num_q_heads, "
    "int num_kv_heads, int head_size, float eps, int[] mrope_section, bool is_interleaved, int? rope_dim=None, "
    "Tensor? q_bias=None, Tensor? k_bias=None, bool has_gate=False) -> (Tensor, Tensor, Tensor, Tensor)"
)


# ---------------------------------------------------------------- what vllm-ascend finds and does not find


class _SlotMapping:
    """Called as a Triton kernel is: where in the cache each token of the batch goes."""

    def __getitem__(self, grid: tuple[int, ...]) -> _SlotMapping:
        return self

    def __call__(
        self, num_tokens: int, max_tokens: int, starts: Tensor, positions: Tensor, table: Tensor, stride: int,
        block_size: int, slots: Tensor, **settings: Any,
    ) -> None:  # fmt: skip
        if settings["TOTAL_CP_WORLD_SIZE"] != 1:
            raise RuntimeError("slot mapping with context parallelism is not simulated")
        starts, positions, table, slots = (cpu_view(tensor) for tensor in (starts, positions, table, slots))
        slots[num_tokens:max_tokens] = settings["PAD_ID"]
        for row, (start, end) in enumerate(zip(starts.tolist(), starts.tolist()[1:])):
            if end > start:
                at = positions[start:end].long()
                slots[start:end] = (table[row][at // block_size].long() * block_size + at % block_size).to(slots.dtype)


def _slot_mapping(module: ModuleType) -> None:
    module._compute_slot_mapping_kernel = _SlotMapping()


def _without_custom_operators(module: ModuleType) -> None:
    module._CUSTOM_OP_ENABLED = False


def _without_triton(module: ModuleType) -> None:
    module.HAS_TRITON = False


def _without_compiler(module: ModuleType) -> None:
    """Models run as they are written: vLLM's compiler is built for the torch of its release.

    Graphs of whole steps (`cudagraph_mode` FULL and FULL_DECODE_ONLY) hold the operators of the model, compiled or not.
    """
    module._should_ignore_torch_compile = lambda cls: True


#: beginning of the name of a device -> the kind for which vllm-ascend is built
DEVICE_TYPES = {"Ascend910B": "A2", "Ascend910_93": "A3", "Ascend950": "A5"}


def _kind_of_device(module: ModuleType) -> None:
    """The wheel for x86_64 is built for an A2; everything else it knows by this name."""
    name = os.environ.get("NPU_SIM_SOC", "Ascend910B3")
    module.__device_type__ = next(kind for beginning, kind in DEVICE_TYPES.items() if name.startswith(beginning))


def _norms_of_all_heads(module: ModuleType) -> None:
    """Registers what MiniMax-M2's attention calls, of Triton kernels, with one size of blocks: none is timed."""
    operators = importlib.import_module("vllm_ascend.ops.triton.linearnorm.split_qkv_tp_rmsnorm_rope")
    kernel = operators._split_qkv_and_compute_local_qk_var_kernel
    kernel.configs = kernel.configs[:1]


#: module of vllm or vllm-ascend -> what happens to it once it has run
AFTER_IMPORT = {
    "vllm_ascend.worker.block_table": _slot_mapping,
    "vllm_ascend._build_info": _kind_of_device,
    "vllm_ascend.utils": _without_custom_operators,
    "vllm.triton_utils.importing": _without_triton,
    "vllm.compilation.decorators": _without_compiler,
    "vllm.triton_utils": delta_nets.triton_by_interpreter,
    "vllm_ascend.ops.triton.triton_utils": delta_nets.triton_of_ascend,
    "vllm_ascend.patch.worker.patch_minimax_m2": _norms_of_all_heads,
}


def extension_spec(name: str) -> importlib.machinery.ModuleSpec | None:
    """Where the stand-in for vllm-ascend's compiled extension lies."""
    folder = next((path for path in os.environ["LD_LIBRARY_PATH"].split(":") if Path(path, "vllm_ascend_C.so").is_file()), None)
    return None if folder is None else importlib.util.spec_from_file_location(name, Path(folder, "vllm_ascend_C.so"))


def install() -> None:
    """Registers the operators; needs no vllm-ascend."""
    from torch_npu.op_plugin.atb import _atb_ops

    _atb_ops._register_atb_extensions = lambda: None  # would open libatb
    # transformers' image processors import torchvision, whose wheel is built for CUDA and then lacks its operators
    vision = torch.library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        vision.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    atb = torch.library.Library("atb", "DEF")
    for name, schema in _ATB.items():
        atb.define(name + schema)
        function = globals()[f"_{name.removeprefix('_').removeprefix('npu_')}"]
        atb.impl(name, recorded(f"atb::{name}", function), "PrivateUse1")
        setattr(_atb_ops.ATB_MODULE, name, getattr(torch.ops.atb, name))
    npu = torch.library.Library("npu", "IMPL")
    for name, function in (KERNELS | mc2.KERNELS | parallel_products.KERNELS).items():
        npu.impl(getattr(torch.ops.npu, name).default, _kernel(name, function), "PrivateUse1", allow_override=True)
    for name, function in _WRITING.items():
        write = recorded(f"npu::{name}", globals()[function])
        npu.impl(getattr(torch.ops.npu, name).default, write, "PrivateUse1", allow_override=True)
    for name, function in _INTO.items():
        write = recorded(f"npu::{name}.out", _into(function))
        npu.impl(getattr(torch.ops.npu, name).out, write, "PrivateUse1", allow_override=True)
    custom = torch.library.Library("_C_ascend", "DEF")
    for name, (schema, function) in (_CUSTOM | delta_nets.OPERATORS).items():
        custom.define(name + schema)
        custom.impl(name, _kernel(name, function), "PrivateUse1")
    for name, (schema, function) in delta_nets.WRITING.items():
        custom.define(name + schema)
        custom.impl(name, recorded(f"_C_ascend::{name}", function), "PrivateUse1")
    for name, schema in _ADAPTERS.items():
        custom.define(name + schema)
        custom.impl(name, recorded(f"_C_ascend::{name}", _adapter_kernel(name)), "PrivateUse1")
    triton = torch.library.Library("vllm", "FRAGMENT")
    triton.define(_MROPE)
    name = _MROPE.partition("(")[0]
    triton.impl(name, _kernel(name, _split_qkv_norm_mrope), "PrivateUse1")
    _libraries.extend((vision, atb, npu, custom, triton))
