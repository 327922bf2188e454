"""vLLM's forward pass on the CPU (0.32) by the functions of `exact_kernels` (`rl_config.exact_log_probs`).

| patch | symbol | why |
|---|---|---|
| products | dispatch_cpu_unquantized_gemm | blocks of rows; biases are added after the result is rounded, as Megatron does |
| products that ranks add up | RowParallelLinear.forward | in slices, added in pairs of neighbours, and the bias once |
| routers | GateLinear.forward | logits in float32, as Megatron has them |
| experts | CPUUnquantizedExperts.apply, process_weights_after_loading | Megatron's order of operations; matrices as they are \
loaded, which the kernel packs |
| norms | RMSNorm.forward_cpu | the residual is rounded before it is normalized |
| activation, rotation | SiluAndMul.forward_cpu, RotaryEmbedding.forward_cpu | the trainer's |
| attention | CPUAttentionBackendImpl.forward | the kernel divides keys by the lengths of a batch |
| its cache | CPUAttentionBackendImpl.do_kv_cache_update | keys and values row by row, where the kernel interleaves them |

Log-probs are in `vllm_log_probs`. vLLM's own `VLLM_BATCH_INVARIANT` is for GPUs: its kernels are Triton's. It can go when that
is for the CPU as well and Megatron has the same kernels; `tests/dist/test_exact_log_probs.py` compares both sides.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from mindspeed_rl.adaptors import exact_kernels
from mindspeed_rl.adaptors.exact_kernels import KEY_BLOCK
from mindspeed_rl.adaptors.vllm_cpu_linear import LiveLinear

_applied = False
#: attribute of a step's metadata: its `_Step`
_STEP = "_exact_step"


class _ExactLinear(LiveLinear):
    """The product of a layer in blocks of rows, and in slices of what a row adds up."""

    def __init__(self, slices: int, packs: bool) -> None:
        super().__init__()
        self._slices = [LiveLinear(packs="large" if packs else "never") for _ in range(slices)]

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        count, rows, parts = len(self._slices), x.reshape(-1, x.size(-1)), []
        pairs = [(rows, weight)] if count == 1 else zip(rows.chunk(count, 1), weight.chunk(count, 1))
        for multiply, (columns, matrix) in zip(self._slices, pairs):
            product = functools.partial(multiply, weight=matrix, bias=None)
            parts.append(exact_kernels.multiply_rows(product, columns))
        out = exact_kernels.add_slices(parts).view(*x.shape[:-1], -1)
        return out if bias is None else out + bias

    @property
    def packed_bytes(self) -> int:
        return sum(part.packed_bytes for part in self._slices)

    def forget(self) -> None:
        for part in self._slices:
            part.forget()


def _reduce(self: Any, input_: Tensor) -> Tensor | tuple[Tensor, Tensor | None]:
    """Compute `RowParallelLinear.forward`."""
    from vllm.distributed import tensor_model_parallel_all_gather as all_gather

    x = input_ if self.input_is_parallel else input_.chunk(self.tp_size, -1)[self.tp_rank]
    out = self.quant_method.apply(self, x, None)
    if self.reduce_results and self.tp_size > 1:
        out = exact_kernels.add_slices(all_gather(out, 0).chunk(self.tp_size))
    out = out if self.bias is None or self.skip_bias_add else out + self.bias
    return (out, self.bias if self.skip_bias_add else None) if self.return_bias else out


def _route(self: Any, x: Tensor) -> Tensor | tuple[Tensor, None]:
    """Compute `GateLinear.forward`."""
    logits = exact_kernels.matmul(x.float(), self.weight.float().t())
    logits = logits if self.bias is None else logits + self.bias.float()
    return (logits, None) if self.return_bias else logits


def _compute_experts(
    self: Any,
    output: Tensor,
    hidden_states: Tensor,
    w1: Tensor,
    w2: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    *others: object,
    **named: object,
) -> None:
    output.copy_(exact_kernels.compute_experts(hidden_states, w1, w2, topk_weights, topk_ids))


def apply(slices: int) -> None:
    """Patch vLLM in this process, after its other adaptors and before an engine is built. Imports vLLM; idempotent.

    Args:
        slices: number of slices of a sum over tensor-parallel ranks: the larger number of ranks of both sides.

    Raises:
        RuntimeError: products of this processor depend on the number of rows, or on the layout of the matrix.
    """
    global _applied
    if _applied:
        return
    import vllm._custom_ops as kernels
    import vllm.model_executor.layers.utils as layer_utils
    from vllm.model_executor.layers.activation import SiluAndMul
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
    from vllm.model_executor.layers.fused_moe.router.gate_linear import GateLinear
    from vllm.model_executor.layers.layernorm import RMSNorm
    from vllm.model_executor.layers.linear import RowParallelLinear
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl

    exact_kernels.check(slices=slices)

    def multiply_packed(rows: Tensor, matrix: Tensor) -> Tensor:
        return LiveLinear(packs="always")(rows, matrix.t(), None)

    # where torch multiplies by MKL (Intel's processors), packed matrices, which are oneDNN's, have other bits
    packs = kernels._supports_onednn and exact_kernels.equals_torch(multiply_packed, slices)
    choose = layer_utils.dispatch_cpu_unquantized_gemm

    def dispatch(layer: Any, remove_weight: bool) -> None:
        choose(layer, remove_weight)
        if isinstance(getattr(layer, "cpu_linear", None), LiveLinear):
            layer.cpu_linear = _ExactLinear(
                max(1, slices // layer.tp_size) if isinstance(layer, RowParallelLinear) else 1, packs
            )

    def normalize(self: Any, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        added = x if residual is None else x + residual
        out = functional.rms_norm(added, self.weight.shape, self.weight, self.variance_epsilon)
        return out if residual is None else (out, added)

    def activate(self: Any, x: Tensor) -> Tensor:
        gate, up = x.chunk(2, -1)
        return exact_kernels.silu(gate) * up

    replaced: tuple[Any, ...] = RMSNorm, SiluAndMul, RotaryEmbedding, CPUAttentionBackendImpl, RowParallelLinear
    layer_utils.dispatch_cpu_unquantized_gemm = dispatch
    replaced[0].forward_cpu, replaced[1].forward_cpu, replaced[2].forward_cpu = normalize, activate, _rotate
    replaced[3].forward, replaced[3].do_kv_cache_update, replaced[4].forward = _attend, _cache, _reduce
    experts: Any = CPUUnquantizedExperts
    experts.apply, experts.process_weights_after_loading = _compute_experts, lambda self, layer: None
    router: Any = GateLinear
    router.forward = _route
    _applied = True


def _rotate(self: Any, positions: Tensor, query: Tensor, key: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    table = getattr(self, "_exact_table", None)
    if table is None:  # of angles; the layer's own is rounded to the format of the weights
        table = self._exact_table = self._compute_cos_sin_cache()
    cos, sin = table.index_select(0, positions.flatten())[:, None].chunk(2, -1)

    def turn(heads: Tensor) -> Tensor:
        return exact_kernels.rotate(heads.view(len(cos), -1, self.head_size), cos, sin).view(heads.shape)

    return turn(query), None if key is None else turn(key)


# ---------------------------------------------------------------- attention


def _split_cache(cache: Tensor) -> tuple[Tensor, Tensor]:
    """Return keys and values [blocks, heads, KEY_BLOCK, d] of vLLM's [blocks, heads, KEY_BLOCK, 2 * d].

    Raises:
        RuntimeError: blocks have another size.
    """
    if cache.size(2) != KEY_BLOCK:
        raise RuntimeError(f"rl_config.exact_log_probs needs blocks of {KEY_BLOCK} keys in vLLM's cache, not {cache.size(2)}")
    keys, values = cache.view(cache.size(0), cache.size(1), 2 * KEY_BLOCK, -1).chunk(2, 2)
    return keys, values


def _cache(self: Any, layer: object, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor) -> None:
    blocks, rows = slot_mapping // KEY_BLOCK, slot_mapping % KEY_BLOCK
    for new, cached in zip((key, value), _split_cache(kv_cache)):
        cached[blocks, :, rows] = new[: len(blocks)]


class _Step:
    """The requests of an engine's step, for all of its layers.

    Attributes:
        prompts: (first token, end, cached blocks, keys) of requests with several tokens.
        tokens: [n] of the other requests, longest first.
        tables: cached blocks of those that have so many, for each block.
        hidden: [n, keys] bool, True after a request's last token; up to the last token of all, a multiple of 32.
    """

    def __init__(self, metadata: Any) -> None:
        starts, lengths = metadata.query_start_loc.tolist(), metadata.seq_lens.tolist()
        requests = [(lengths[i], i) for i in range(len(lengths)) if starts[i + 1] > starts[i]]
        self.prompts = [
            (starts[i], starts[i + 1], metadata.block_table[i, : -(-length // KEY_BLOCK)], length)
            for length, i in requests
            if starts[i + 1] - starts[i] > 1
        ]
        single = sorted(((length, i) for length, i in requests if starts[i + 1] - starts[i] == 1), reverse=True)
        order = torch.tensor([i for _, i in single], dtype=torch.int64)
        self.tokens, seen = torch.tensor([starts[i] for _, i in single]), torch.tensor([length for length, _ in single])
        counts = [int((seen > first).sum()) for first in range(0, single[0][0] if single else 0, KEY_BLOCK)]
        self.tables = [metadata.block_table[order[:count], block] for block, count in enumerate(counts)]
        longest = single[0][0] if single else 0
        # fewer keys would make products so small that another library computes them
        self.hidden = torch.arange(longest + -longest % (2 * exact_kernels.ROWS)) >= seen[:, None]


def _attend(
    self: Any,
    layer: object,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    kv_cache: Tensor,
    attn_metadata: Any,
    output: Tensor,
    output_scale: object = None,
    output_block_scale: object = None,
) -> Tensor:
    if attn_metadata is None:  # before the cache is there
        return output
    if not hasattr(attn_metadata, _STEP):
        setattr(attn_metadata, _STEP, _Step(attn_metadata))
    step: _Step = getattr(attn_metadata, _STEP)
    keys, values = _split_cache(kv_cache)
    for first, end, blocks, length in step.prompts:
        k, v = (x.index_select(0, blocks).transpose(1, 2).flatten(0, 1)[None, :length] for x in (keys, values))
        rows = output[first:end]
        rows.copy_(exact_kernels.causal_attention(query[None, first:end], k, v, self.scale)[0].view_as(rows))
    if count := len(step.tokens):
        groups, shared = self.num_kv_heads, self.num_queries_per_kv
        rows = (query.index_select(0, step.tokens).float() * self.scale).view(count * groups, shared, -1)
        rows = functional.pad(rows, (0, 0, 0, -shared % exact_kernels.QUERY_ROWS))
        scores = rows.new_full((len(rows), shared, step.hidden.size(1)), float("-inf"))
        cached = []
        for table, columns in zip(step.tables, scores.split(KEY_BLOCK, 2)):
            size = columns.size(2)
            pair = [x[:, :, :size].index_select(0, table).flatten(0, 1).float() for x in (keys, values)]
            used = len(pair[0])
            columns[:used] = torch.bmm(rows[:used], pair[0].transpose(1, 2))[:, :shared]
            cached.append(pair[1])
        scores.unflatten(0, (count, groups)).masked_fill_(step.hidden[:, None, None], float("-inf"))
        out = exact_kernels.attend(scores, cached)
        output.view(len(output), -1).index_copy_(0, step.tokens, out.reshape(count, -1).to(output.dtype))
    return output
