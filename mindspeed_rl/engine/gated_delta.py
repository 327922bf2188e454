"""Gated delta net (arXiv:2412.06464): linear attention with a decaying state, in chunks, for packed rows and every layout.

The state S [key size, value size] of a head changes with every token, beginning at 0:

    S <- exp(g) S;   S <- S + k (beta (v - S^T k))^T;   o = S^T q

Tokens of a chunk are computed together. With G the cumulative sum of g in the chunk, D_ij = exp(G_i - G_j) for j <= i and
A = tril(beta_i D_ij (k_i . k_j), -1), the values that a chunk writes are U = (I + A)^-1 (beta v - beta exp(G) k S), so that

    O = exp(G) q S + tril(D q k^T) U;   S' = exp(G_C) S + (exp(G_C - G) k)^T U

Only the last line and U are sequential. Chunks of all sequences are ordered by their index in the sequence, so step c is one
product for all sequences that have a chunk c, whose number falls from step to step; a state never leaves its sequence. Backward
is written out: it saves no matrix of a step, and its memory and time are linear in the tokens.

Tensor parallelism divides the key heads, each with its value heads, as `linear_qkv` divides query groups. With context
parallelism ranks exchange tokens for heads before the convolution, and outputs back after the rule.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.mappings import copy_to_tensor_model_parallel_region
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import (
    ensure_metadata_has_dp_cp_group,
    make_sharded_tensors_for_checkpoint,
    sharded_state_dict_default,
)
from torch import Tensor, nn
from torch.nn import functional

from mindspeed_rl import adaptors
from mindspeed_rl.engine import parallel
from mindspeed_rl.engine.attention import heads_to_sequence, sequence_to_heads
from mindspeed_rl.engine.sequence_layout import ChunkPhase, ChunkPlan, PackedLayout
from mindspeed_rl.models.layers import GatedDeltaNetSubmodules
from mindspeed_rl.models.model_config import LinearAttention


@functools.lru_cache(maxsize=8)
def _plan_rows(count: int, length: int, kernel: int, device: torch.device) -> ChunkPlan:
    return ChunkPlan.build([length] * count, kernel, device)


# ---------------------------------------------------------------------- convolution


class _Convolution(torch.autograd.Function):
    """silu of a causal convolution of each channel: y_t = silu(sum_i w_i x_(t + i)), from [t + K - 1, c] and [c, K]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:  # pyrefly: ignore[bad-override]  (torch: the arguments of `apply`)
        ctx.save_for_backward(x, weight)
        return functional.silu(_convolve(x, weight)).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:  # pyrefly: ignore[bad-override]  (as above)
        x, weight = ctx.saved_tensors
        before = _convolve(x, weight)
        sigmoid = before.sigmoid()
        grad = grad * (sigmoid * (1 + before * (1 - sigmoid)))
        length, kernel = grad.size(0), weight.size(1)
        grad_x = torch.zeros_like(x, dtype=grad.dtype)
        grad_weight = torch.empty_like(weight, dtype=grad.dtype)
        for tap in range(kernel):
            grad_x[tap : tap + length].addcmul_(grad, weight[:, tap])
            grad_weight[:, tap] = (grad * x[tap : tap + length]).sum(0)
        return grad_x.to(x.dtype), grad_weight.to(weight.dtype)


def _convolve(x: Tensor, weight: Tensor) -> Tensor:
    """Return the sums before silu in float32 at least, [t, c]."""
    kernel = weight.size(1)
    length = x.size(0) - kernel + 1
    wide = torch.promote_types(x.dtype, torch.float32)
    out = x[:length].to(wide) * weight[:, 0]
    for tap in range(1, kernel):
        out.addcmul_(x[tap : tap + length].to(wide), weight[:, tap].to(wide))
    return out


def causal_convolution(x: Tensor, weight: Tensor, plan: ChunkPlan) -> Tensor:
    """Return silu of the causal convolution inside each sequence.

    Args:
        x: [t, channels].
        weight: [channels, kernel].
    """
    extended = torch.cat([x, x.new_zeros(1, x.size(1))]).index_select(0, plan.window)
    return _Convolution.apply(extended, weight).index_select(0, plan.ends)


# ---------------------------------------------------------------------- the delta rule


def _invert(lower: Tensor) -> Tensor:
    """Return (I + A)^-1 of strictly lower triangular A [..., C, C], C a power of two, by products of blocks.

    Each product is one of substitution by blocks, so that it is as stable as solving row by row.
    """
    size = lower.size(-1)
    inverse = torch.eye(size, dtype=lower.dtype, device=lower.device).expand_as(lower).contiguous()
    half = 1
    while half < size:
        full = (size // (2 * half), 2 * half)
        blocks, below = (
            x.unflatten(-2, full).unflatten(-1, full).diagonal(dim1=-4, dim2=-2).movedim(-1, -3) for x in (inverse, lower)
        )
        upper_left, lower_right = blocks[..., :half, :half], blocks[..., half:, half:]
        blocks[..., half:, :half] = -(lower_right @ below[..., half:, :half] @ upper_left)
        half *= 2
    return inverse


@dataclass
class _Chunks:
    """Products inside chunks; n chunks, h key heads, r value heads each, C tokens."""

    total: Tensor  # [n, h, r, C] G
    decay: Tensor  # [n, h, r, C, C] D, 0 above the diagonal
    similar: Tensor  # [n, h, 1, C, C] k k^T
    inverse: Tensor  # [n, h, r, C, C]
    to_end: Tensor  # [n, h, r, C, d_k] exp(G_C - G) k
    reading: Tensor  # [n, h, r, C, d_k] (I + A)^-1 beta exp(G) k
    values: Tensor  # [n, h, r, C, d_v] (I + A)^-1 beta v

    @classmethod
    def compute(cls, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, inverse: Tensor | None) -> _Chunks:
        total = g.cumsum(-1)
        above = torch.ones(g.size(-1), g.size(-1), dtype=torch.bool, device=g.device).triu(1)
        decay = (total[..., :, None] - total[..., None, :]).masked_fill_(above, float("-inf")).exp_()
        similar = (k @ k.transpose(-1, -2)).unsqueeze(2)
        if inverse is None:
            inverse = _invert((decay * similar).mul_(beta[..., None]).tril_(-1))
        keys = k.unsqueeze(2)
        # columns of the inverse are scaled instead of rows of keys and values, which are longer
        reading = (inverse * (beta * total.exp())[..., None, :]) @ keys
        to_end = keys * (total[..., -1:] - total).exp()[..., None]
        return cls(total, decay, similar, inverse, to_end, reading, (inverse * beta[..., None, :]) @ v)

    def scan(self, state: Tensor, counts: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
        """Return the state before each chunk [n, h, r, d_k, d_v], U, and the last state of each sequence."""
        n = self.values.size(0)
        heads = self.values.size(1) * self.values.size(2)
        reading, to_end, written = (x.flatten(0, 2) for x in (self.reading, self.to_end.transpose(-1, -2), self.values))
        written = torch.empty_like(written)
        values, keep = self.values.flatten(0, 2), self.total[..., -1].exp().flatten()[:, None, None]
        state = state.flatten(0, 2).clone()
        states = state.new_empty(n * heads, *state.shape[1:])
        first = 0
        for count in counts:
            rows, now = slice(first, first + count * heads), state[: count * heads]
            states[rows] = now
            torch.baddbmm(values[rows], reading[rows], now, alpha=-1, out=written[rows])
            now.mul_(keep[rows]).baddbmm_(to_end[rows], written[rows])
            first += count * heads
        shape = self.values.shape[:3]
        return states.unflatten(0, shape), written.unflatten(0, shape), state.unflatten(0, (-1, *shape[1:]))


class _DeltaRule(torch.autograd.Function):
    """The gated delta rule of chunks, in the order of `ChunkPhase`; all tensors of one floating type.

    q and k are [n, h, C, d_k], v [n, h, r, C, d_v], g and beta [n, h, r, C], the state [sequences, h, r, d_k, d_v]. Returns
    outputs like v and the last states. Padding has g and beta of 0.
    """

    @staticmethod
    def forward(  # pyrefly: ignore[bad-override]  (as above)
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, counts: tuple[int, ...]
    ) -> tuple[Tensor, Tensor]:
        chunks = _Chunks.compute(k, v, g, beta, None)
        states, written, last = chunks.scan(state, counts)
        out = (q.unsqueeze(2) @ states).mul_(chunks.total.exp()[..., None])
        attended = chunks.decay.mul_((q @ k.transpose(-1, -2)).unsqueeze(2))
        out.flatten(0, 2).baddbmm_(attended.flatten(0, 2), written.flatten(0, 2))
        ctx.save_for_backward(q, k, v, g, beta, state, chunks.inverse)
        ctx.counts = counts
        return out, last

    @staticmethod
    def backward(  # pyrefly: ignore[bad-override]  (as above)
        ctx: Any, grad: Tensor, grad_last: Tensor
    ) -> tuple[Tensor | None, ...]:
        q, k, v, g, beta, state, inverse = ctx.saved_tensors
        chunks = _Chunks.compute(k, v, g, beta, inverse)
        states, written, _ = chunks.scan(state, ctx.counts)
        total, decay, keys = chunks.total, chunks.decay, k.unsqueeze(2)
        growth = total.exp()
        products = (q @ k.transpose(-1, -2)).unsqueeze(2)
        attended = decay * products
        # gradients of U from inside the chunk, and of the state from its own outputs
        grad_written = attended.transpose(-1, -2) @ grad
        reached = grad * growth[..., None]
        grad_states = q.unsqueeze(2).transpose(-1, -2) @ reached
        grad_after, grad_state = _scan_back(chunks, grad_written, grad_states, grad_last, ctx.counts)
        # outputs
        grad_reach = reached @ states.transpose(-1, -2)
        grad_products = (grad @ written.transpose(-1, -2)).mul_(decay)
        grad_log = (grad_products * products).tril_(-1)  # as above for the diagonal
        grad_products = grad_products.sum(2)
        grad_q = grad_reach.sum(2) + grad_products @ k
        grad_k = grad_products.transpose(-1, -2) @ q
        grad_total = grad_reach.mul_(q.unsqueeze(2)).sum(-1)
        # the state after the chunk
        grad_end = (written * (total[..., -1:] - total).exp()[..., None]) @ grad_after.transpose(-1, -2)
        grad_k += grad_end.sum(2)
        moved = grad_end.mul_(keys).sum(-1)
        moved[..., -1] = 0  # the last token does not decay, and its terms would cancel up to rounding only
        grad_total -= moved
        kept = growth[..., -1] * grad_after.mul_(states).sum((-1, -2))
        grad_total[..., -1] += moved.sum(-1) + kept
        # U
        grad_source = chunks.inverse.transpose(-1, -2) @ grad_written
        grad_v = grad_source * beta[..., None]
        grad_beta = (grad_source * v).sum(-1)
        grad_read = (grad_source * -growth[..., None]) @ states.transpose(-1, -2)
        read = (grad_read * keys).sum(-1)
        grad_k += grad_read.mul_(beta[..., None]).sum(2)
        grad_beta += read
        grad_total += read * beta
        grad_lower = -(grad_source @ written.transpose(-1, -2)).tril_(-1)
        grad_lower *= decay
        grad_beta += (grad_lower * chunks.similar).sum(-1)
        grad_lower *= beta[..., None]
        grad_log += grad_lower * chunks.similar
        grad_similar = grad_lower.sum(2)
        grad_k += (grad_similar + grad_similar.transpose(-1, -2)) @ k
        grad_total += grad_log.sum(-1) - grad_log.sum(-2)
        grad_g = grad_total.flip(-1).cumsum(-1).flip(-1)
        return grad_q, grad_k, grad_v, grad_g, grad_beta, grad_state, None


def _scan_back(
    chunks: _Chunks, grad_written: Tensor, grad_states: Tensor, grad_last: Tensor, counts: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """Return the gradients of the state after each chunk and of the first states; completes `grad_written` in place."""
    shape, heads = grad_states.shape, grad_states.size(1) * grad_states.size(2)
    reading, to_end = chunks.reading.transpose(-1, -2).flatten(0, 2), chunks.to_end.flatten(0, 2)
    keep = chunks.total[..., -1].exp().flatten()[:, None, None]
    written, states = grad_written.view(-1, *grad_written.shape[3:]), grad_states.flatten(0, 2)
    state = grad_last.flatten(0, 2).clone()
    after = torch.empty_like(states)
    end = shape[0] * heads
    for count in reversed(counts):
        rows, now = slice(end - count * heads, end), state[: count * heads]
        after[rows] = now
        written[rows].baddbmm_(to_end[rows], now)
        now.mul_(keep[rows]).add_(states[rows]).baddbmm_(reading[rows], written[rows], alpha=-1)
        end -= count * heads
    return after.view(shape), state.view(-1, *shape[1:])


def _list_rows(cells: Tensor, heads: int, size: int) -> Tensor:
    """Return the rows of cells in a flattened [n, heads, size, ...] tensor: [cells * heads] int64."""
    return (
        ((cells // size * heads)[:, None] + torch.arange(heads, device=cells.device)) * size + (cells % size)[:, None]
    ).flatten()


class _ToChunks(torch.autograd.Function):
    """Copy of tokens [t, heads, ...] into the chunks of a phase [n, heads, size, ...]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, phase: ChunkPhase, size: int) -> Tensor:  # pyrefly: ignore[bad-override]  (as above)
        ctx.phase, ctx.shape = phase, x.shape
        heads = torch.arange(x.size(1), device=x.device)[:, None]
        rows = (phase.sources.view(-1, 1, size) * x.size(1) + heads).flatten()
        return x.flatten(0, 1).index_select(0, rows).view(-1, x.size(1), size, *x.shape[2:])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # pyrefly: ignore[bad-override]  (as above)
        phase, shape = ctx.phase, ctx.shape
        rows = _list_rows(phase.cells, grad.size(1), grad.size(2))
        part = grad.flatten(0, 2).index_select(0, rows).view(-1, *shape[1:])
        if len(part) < shape[0]:  # other tokens are in another phase
            part = part.new_zeros(shape).index_copy_(0, phase.tokens, part)
        return part, None, None


class _FromChunks(torch.autograd.Function):
    """Copy of the tokens [t, heads, ...] from the chunks of all phases [n, heads, size, ...]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cells: Tensor) -> Tensor:  # pyrefly: ignore[bad-override]  (as above)
        ctx.cells, ctx.shape = cells, x.shape
        return x.flatten(0, 2).index_select(0, _list_rows(cells, x.size(1), x.size(2))).view(-1, x.size(1), *x.shape[3:])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # pyrefly: ignore[bad-override]  (as above)
        rows = _list_rows(ctx.cells, ctx.shape[1], ctx.shape[2])
        out = grad.new_zeros(ctx.shape)
        out.view(-1, *ctx.shape[3:]).index_copy_(0, rows, grad.flatten(0, 1))
        return out, None


def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    plan: ChunkPlan,
    kernel: adaptors.DeltaRuleKernel | None = None,
) -> Tensor:
    """Compute the gated delta rule inside each sequence; in float32 at least, but by a kernel.

    Args:
        q, k: [t, h, d_k], normalized and scaled.
        v: [t, h * r, d_v]; r value heads for each key head, next to each other.
        g, beta: [t, h * r]; g is the logarithm of the decay, at most 0.
        kernel: computes it in the type of v, without prefix sharing; None computes it by torch's operators.

    Returns:
        [t, h * r, d_v] in the type of v.
    """
    if kernel is not None and plan.bounds is not None:
        q, k = (x.to(v.dtype).repeat_interleave(v.size(1) // k.size(1), dim=1) for x in (q, k))
        return kernel(q, k, v, g, beta, plan.bounds)
    wide = torch.promote_types(v.dtype, torch.float32)
    heads, ratio = k.size(1), v.size(1) // k.size(1)
    outputs: list[Tensor] = []
    last: Tensor | None = None
    for phase in plan.phases:
        chunks = [_ToChunks.apply(x.to(wide), phase, plan.size) for x in (q, k, v, g, beta)]
        # padding has any query, key and value, and writes nothing
        chunks[3:] = [x.masked_fill(phase.is_padding.view(-1, 1, plan.size), 0.0) for x in chunks[3:]]
        inputs = [*chunks[:2], *(x.unflatten(1, (heads, ratio)) for x in chunks[2:])]
        if phase.parents is None:
            state = v.new_zeros(phase.counts[0], heads, ratio, q.size(2), v.size(2), dtype=wide)
        else:
            assert last is not None
            state = last.index_select(0, phase.parents)
        out, last = _DeltaRule.apply(*inputs, state, phase.counts)
        outputs.append(out.flatten(1, 2))
    return _FromChunks.apply(torch.cat(outputs), plan.restore).to(v.dtype)


def normalize_head(x: Tensor) -> Tensor:
    """Return x / |x| over the last dimension, in float32 at least."""
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


# ---------------------------------------------------------------------- the module


class _Convolved(nn.Module):
    """Weights of the convolution, under the name of a module as in other implementations: [rows, 1, kernel]."""

    def __init__(self, rows: int, kernel: int, dtype: torch.dtype) -> None:
        super().__init__()
        bound = kernel**-0.5
        self.weight = nn.Parameter(torch.empty(rows, 1, kernel, dtype=dtype).uniform_(-bound, bound))


class _GatedNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight * silu(gate), in the order of rounding of transformers."""

    def __init__(self, config: TransformerConfig, size: int) -> None:
        super().__init__()
        self.eps = config.layernorm_epsilon
        self.weight = nn.Parameter(torch.ones(size, dtype=config.params_dtype))

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        # every tensor-parallel rank has other heads: their gradients are summed
        weight = copy_to_tensor_model_parallel_region(self.weight)
        wide = torch.promote_types(x.dtype, torch.float32)
        normal = adaptors.rms_norm(x.to(wide), torch.ones_like(weight, dtype=wide), self.eps).to(x.dtype)
        return ((normal * weight) * functional.silu(gate.to(wide))).to(x.dtype)


class GatedDeltaNet(MegatronModule):
    """A gated delta net in the place of self-attention, with Megatron's constructor and call signature.

    Rows of `in_proj` and `conv1d` are grouped by key heads (`LinearAttention.group`, `.convolved`), so that the part of a
    tensor-parallel rank is one range of rows.
    """

    def __init__(
        self,
        config: TransformerConfig,
        submodules: GatedDeltaNetSubmodules,
        layer_number: int,
        *,
        shape: LinearAttention,
        pg_collection: ProcessGroupCollection,
        **unused: object,
    ) -> None:
        super().__init__(config)
        self.shape, self.tp_group = shape, pg_collection.tp
        ranks = pg_collection.tp.size()
        assert shape.num_key_heads % (ranks * config.context_parallel_size) == 0  # the plan has been checked
        heads, dtype = shape.num_value_heads // ranks, config.params_dtype
        values = shape.num_value_heads * shape.value_head_dim
        common = {"config": config, "bias": False, "is_expert": False, "tp_group": pg_collection.tp}
        self.in_proj = build_module(
            submodules.in_proj,
            config.hidden_size,
            shape.num_key_heads * sum(shape.group),
            init_method=config.init_method,
            gather_output=False,
            skip_bias_add=False,
            **common,
        )
        self.conv1d = _Convolved(shape.num_key_heads // ranks * sum(shape.convolved), shape.conv_kernel_dim, dtype)
        self.dt_bias = nn.Parameter(torch.ones(heads, dtype=dtype))
        self.A_log = nn.Parameter(torch.empty(heads, dtype=dtype).uniform_(1, 16).log_())
        self.out_norm = _GatedNorm(config, shape.value_head_dim)
        self.out_proj = build_module(
            submodules.out_proj,
            values,
            config.hidden_size,
            init_method=config.output_layer_init_method,
            input_is_parallel=True,
            skip_bias_add=True,
            **common,
        )
        for parameter in (self.conv1d.weight, self.dt_bias, self.A_log):
            parameter.tensor_model_parallel = True  # pyrefly: ignore[missing-attribute]  (Megatron's marks)
            parameter.partition_dim, parameter.partition_stride = 0, 1  # pyrefly: ignore[missing-attribute]

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        *,
        packed_seq_params: PackedLayout | None = None,
        inference_context: object = None,
        **unused: object,
    ) -> tuple[Tensor, Tensor | None]:
        """Return [s, b, h] from [s, b, h] with this rank's tokens; causal, so the mask is ignored."""
        if inference_context is not None:
            raise ValueError("a model with gated delta nets generates only with the rollout engine; set its generate_config.")
        mixed, _ = self.in_proj(hidden_states)
        groups = mixed.unflatten(-1, (-1, sum(self.shape.group)))  # [s, b, key heads, rows]
        convolved, gate, beta, decay = groups.split([sum(self.shape.convolved), *self.shape.group[3:]], dim=-1)
        out = self._attend(torch.cat([convolved, beta, decay], -1), packed_seq_params)
        out = self.out_norm(out, gate.reshape(out.shape))
        output, bias = self.out_proj(out.flatten(2))
        return output, bias

    def _attend(self, groups: Tensor, layout: PackedLayout | None) -> Tensor:
        """Return [s, b, value heads, d_v] from the convolved rows, beta and decay of each key head [s, b, h, rows]."""
        group = parallel.find_context(self.config.context_parallel_size, layout).group
        kernel, device = self.shape.conv_kernel_dim, groups.device
        s, b = groups.shape[:2]
        order = layout
        if group is not None:
            s *= group.size()
            order = layout or PackedLayout.build([s], device, group.size())
            groups = order.order_naturally(sequence_to_heads(groups, group))
        if layout is None:
            # sequences one after the other
            plan = _plan_rows(b, s, kernel, device)
            out = self._compute(groups.transpose(0, 1).flatten(0, 1), plan, group)
            out = out.unflatten(0, (b, s)).transpose(0, 1)
        else:
            out = self._compute(groups.squeeze(1), layout.plan_chunks(kernel), group).unsqueeze(1)
        return out if group is None or order is None else heads_to_sequence(order.order_by_rank(out), group)

    def _compute(self, groups: Tensor, plan: ChunkPlan, group: Any) -> Tensor:
        """Return [t, value heads, d_v] of full sequences from [t, h, rows]."""
        shape, heads = self.shape, groups.size(1)
        ratio = shape.num_value_heads // shape.num_key_heads
        rank = 0 if group is None else group.rank()
        weight, dt_bias, a_log = (
            parameter.narrow(0, rank * heads * rows, heads * rows)
            for parameter, rows in ((self.conv1d.weight, sum(shape.convolved)), (self.dt_bias, ratio), (self.A_log, ratio))
        )
        x, beta, decay = groups.split([sum(shape.convolved), ratio, ratio], dim=-1)
        x = causal_convolution(x.flatten(1), weight.squeeze(1), plan).unflatten(-1, (heads, -1))
        q, k, v = x.split(shape.convolved, dim=-1)
        wide = torch.promote_types(x.dtype, torch.float32)
        g = -a_log.to(wide).exp() * functional.softplus(decay.to(wide).flatten(1) + dt_bias)
        q, k = normalize_head(q) * shape.key_head_dim**-0.5, normalize_head(k)
        v = v.reshape(v.size(0), heads * ratio, shape.value_head_dim)
        kernel = None if self.config.deterministic_mode else adaptors.delta_rule_kernel(v.dtype)
        return gated_delta_rule(q, k, v, g, beta.flatten(1).sigmoid(), plan, kernel)

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: Any = (),  # tuples of three; Megatron declares one of them
        metadata: dict[str, Any] | None = None,
        tp_group: Any = None,
    ) -> ShardedStateDict:
        """Return the parameters as Megatron's distributed checkpoints name them, each divided along its rows."""
        metadata = ensure_metadata_has_dp_cp_group(metadata)
        state: ShardedStateDict = {}
        own: dict[str, Tensor] = {}
        self._save_to_state_dict(own, "", keep_vars=True)
        own["conv1d.weight"] = self.conv1d.weight
        rows = {name: 0 for name in own}
        state |= make_sharded_tensors_for_checkpoint(
            own, prefix, rows, sharded_offsets, tp_group=self.tp_group, dp_cp_group=metadata["dp_cp_group"]
        )
        for name in ("in_proj", "out_norm", "out_proj"):
            child = cast(nn.Module, getattr(self, name))
            state |= sharded_state_dict_default(child, f"{prefix}{name}.", sharded_offsets, metadata, tp_group=self.tp_group)
        return state
