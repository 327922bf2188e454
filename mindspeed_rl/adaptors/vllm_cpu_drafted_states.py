"""Gated delta nets of vLLM's CPU build (0.32) compute drafted tokens as they compute tokens without drafts.

| patch | symbol | why |
|---|---|---|
| a token at a time | `gdn_attention._cpu_gdn_attention_spec_aware` | engines with drafts have other kernels: a convolution \
that rounds before and after SiLU, and a recurrence whose last bits differ, so that drafts change responses |
| states of the convolution | the same | where requests of a step have different numbers of drafts, the states that it keeps \
end at the wrong token |
| prompts of one token | `GDNAttentionMetadataBuilder.build` | the scheduler pads them with drafts, and then their states are \
those of an earlier request; the metadata says which they are |

Here the kernels of an engine without drafts compute the drafted tokens, one position of all requests after the other. A request
keeps its states as vLLM lays them out: of the recurrence, the state after each of its tokens in a slot of its own; of the
convolution, the inputs of all tokens in one row, of which those up to the last accepted token are read.

It can go when both kernels of vLLM agree to the bit; `tests/unit/adaptors` compares responses with and without drafts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn


def apply() -> None:
    """Replace the computation of engines with drafts in this process. Imports vLLM; idempotent."""
    try:
        from vllm.v1.attention.backends.gdn_attn import GDNAttentionMetadataBuilder
    except ImportError:  # a release without gated delta nets
        return
    builder: Any = GDNAttentionMetadataBuilder
    if getattr(builder, _IS_ADAPTED, False):
        return
    try:
        from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention
    except ImportError:
        gdn_attention = None
    if hasattr(gdn_attention, _COMPUTE):
        setattr(gdn_attention, _COMPUTE, _compute)
        _mark_first_tokens(builder)
    else:
        _refuse_drafts(builder)
    setattr(builder, _IS_ADAPTED, True)


_COMPUTE, _IS_ADAPTED = "_cpu_gdn_attention_spec_aware", "_computes_drafts_plainly"
#: attribute of a step's metadata: of each request with drafts, whether its first token is in this step, [requests]
_BEGINS = "begins"


def _refuse_drafts(builder: Any) -> None:
    """Let engines with drafts end when they are built: this release computes them in another way."""
    init = builder.__init__

    def refuse(self: Any, *args: Any, **named: Any) -> None:
        init(self, *args, **named)
        if self.use_spec_decode:
            raise RuntimeError(
                "generate_config.speculative_config: this release of vLLM computes drafts over gated delta nets in a way that "
                "was not looked at, and responses would change; leave it out"
            )

    builder.__init__ = refuse


def _mark_first_tokens(builder: Any) -> None:
    """Let the metadata of a step say which requests with drafts have no state yet."""
    build = builder.build

    def build_marked(self: Any, common_prefix_len: int, common_attn_metadata: Any, *args: Any, **named: Any) -> Any:
        metadata = build(self, common_prefix_len, common_attn_metadata, *args, **named)
        if metadata.spec_sequence_masks_cpu is not None:
            begins = common_attn_metadata.seq_lens <= common_attn_metadata.query_start_loc.diff()
            setattr(metadata, _BEGINS, begins[metadata.spec_sequence_masks_cpu])
        return metadata

    builder.build = build_marked


class _Layer:
    """A layer of gated delta nets with the caches of some requests, one slot each.

    Args:
        layer: vLLM's layer.
        window: the last inputs of the convolution, [requests, channels, width - 1].
        states: states of the recurrence, [requests, heads, value size, key size].
    """

    def __init__(self, layer: Any, window: Tensor, states: Tensor) -> None:
        from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first

        self._layer = layer
        kept = window if is_conv_state_dim_first() else window.transpose(1, 2)
        self.kv_cache = kept.contiguous(), states

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)


@dataclass(frozen=True)
class _Step:
    """One step of a layer of an engine with drafts.

    Attributes:
        layer, metadata: vLLM's layer, and its description of the step.
        given: inputs of the convolution, [tokens, channels], and of both gates, [tokens, value heads].
        out: result, [tokens, value heads, value size]; filled.
        inputs: vLLM's cache of inputs of the convolution, [slots, channels, width - 1 + draft tokens].
        width: tokens that a convolution reads.
    """

    layer: Any
    metadata: Any
    given: tuple[Tensor, Tensor, Tensor]
    out: Tensor
    inputs: Tensor
    width: int

    def compute(self) -> None:
        """Compute requests with drafts, without, and prompts."""
        metadata = self.metadata
        if metadata.spec_sequence_masks is None:
            tokens = torch.arange(metadata.num_decode_tokens + metadata.num_prefill_tokens)
            self._compute_rows(metadata, tokens)
            return
        self._compute_drafts()
        if metadata.num_prefills:
            self._compute_prompts()

    def _compute_rows(self, metadata: Any, tokens: Tensor) -> None:
        """Compute requests of which none has drafts: their last inputs are the first of the cache's row."""
        slots = metadata.non_spec_state_indices_tensor[: metadata.num_decodes + metadata.num_prefills].long()
        window, states = self.inputs[slots, :, : self.width - 1], self.layer.kv_cache[1][slots]
        self.inputs[slots, :, : self.width - 1] = self._compute_plainly(metadata, tokens, window, states)
        self.layer.kv_cache[1][slots] = states

    def _compute_plainly(self, metadata: Any, tokens: Tensor, window: Tensor, states: Tensor) -> Tensor:
        """Compute tokens as an engine without drafts does; return the last inputs, and change `states`."""
        from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention

        layer, out = _Layer(self.layer, window, states), self.out[tokens]
        indices = torch.arange(len(states), dtype=torch.int32)
        described = replace(
            metadata, spec_sequence_masks=None, num_accepted_tokens=None, non_spec_state_indices_tensor=indices
        )
        mixed_qkv, b, a = (given[tokens] for given in self.given)
        gdn_attention._cpu_gdn_attention_nonspec(layer, described, mixed_qkv, b, a, out)
        self.out[tokens] = out
        return gdn_attention._conv_buffer_view(layer)

    def _compute_prompts(self) -> None:
        """Compute requests that are at their prompts; the last token of a prompt alone is decoded, as without drafts."""
        metadata, starts = self.metadata, self.metadata.non_spec_query_start_loc
        lengths = starts.diff()
        is_decoded = (lengths == 1) & metadata.has_initial_state
        order = torch.cat([is_decoded.nonzero()[:, 0], ((lengths > 0) & ~is_decoded).nonzero()[:, 0]])
        tokens = torch.cat([metadata.non_spec_token_indx[starts[row] : starts[row + 1]] for row in order.tolist()]).long()
        num_decodes = int(is_decoded.sum())
        described = replace(
            metadata,
            num_decodes=num_decodes,
            num_decode_tokens=num_decodes,
            num_prefills=len(order) - num_decodes,
            num_prefill_tokens=len(tokens) - num_decodes,
            has_initial_state=metadata.has_initial_state[order],
            non_spec_state_indices_tensor=metadata.non_spec_state_indices_tensor[order],
            non_spec_query_start_loc=nn.functional.pad(lengths[order].cumsum(0), (1, 0)).to(starts.dtype),
        )
        self._compute_rows(described, tokens)

    def _compute_drafts(self) -> None:
        """Compute requests that are at their responses: each position of all of them is a step without drafts."""
        metadata, count, size = self.metadata, self.metadata.num_spec_decodes, self.width - 1
        starts = metadata.spec_query_start_loc[: count + 1].long()
        slots = metadata.spec_state_indices_tensor[:count].long()
        last = metadata.num_accepted_tokens[:count].long() - 1  # of the tokens of the step before
        tokens, lengths, caches = metadata.spec_token_indx.long(), starts.diff(), self.layer.kv_cache[1]
        kept = (last[:, None] + torch.arange(size))[:, None].expand(-1, self.inputs.size(1), -1)
        window = self.inputs[slots[:, 0]].gather(2, kept)
        states = caches[slots[torch.arange(count), last]]
        first, begins = slots[:, 0], getattr(metadata, _BEGINS)
        # a prompt of one token, which vLLM pads with drafts, has no state yet: a step of its own
        groups = [(0, begins & (lengths > 0)), (0, ~begins & (lengths > 0))]
        for position, is_there in groups + [(position, lengths > position) for position in range(1, int(lengths.max()))]:
            rows = is_there.nonzero()[:, 0]
            if len(rows) == 0:
                continue
            is_prompt = position == 0 and bool(begins[rows[0]])
            changed = states[rows]
            described = _describe_tokens(metadata, len(rows), is_prompt)
            window[rows] = self._compute_plainly(described, tokens[starts[rows] + position], window[rows], changed)
            states[rows] = changed
            caches[slots[rows, position]] = changed
            # the row starts with what is read where only the first token is accepted
            self.inputs[first[rows], :, position : position + size] = window[rows]


def _describe_tokens(metadata: Any, count: int, is_prompt: bool) -> Any:
    """Return the description of a step with one token of each of so many requests, all of responses or all whole prompts."""
    counts = dict(zip(("num_decodes", "num_prefills"), (0, count) if is_prompt else (count, 0), strict=True))
    return replace(
        metadata,
        **counts,
        num_decode_tokens=counts["num_decodes"],
        num_prefill_tokens=counts["num_prefills"],
        has_initial_state=torch.full((count,), not is_prompt),
        non_spec_query_start_loc=torch.arange(count + 1, dtype=torch.int32),
    )


def _compute(
    layer: Any, metadata: Any, mixed_qkv: Tensor, b: Tensor, a: Tensor, out: Tensor, width: int, state_len: int
) -> None:
    """Compute one step of a layer, in the place of vLLM's function; see `_Step` for its arguments."""
    from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention

    inputs = gdn_attention._conv_buffer_view(layer)
    _Step(layer, metadata, (mixed_qkv, b, a), out, inputs, width).compute()
