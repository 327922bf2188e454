"""Attention in a window, or with capped scores: prompts that are computed once give what whole sequences do."""

from __future__ import annotations

import pytest
import torch

from mindspeed_rl import adaptors, platform

platform.select("cpu")
adaptors.apply("train")

from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402  (after the adaptor)

from mindspeed_rl.engine.sequence_layout import PackedLayout, SharedPrefixes  # noqa: E402
from mindspeed_rl.models.layers import WindowedAttention  # noqa: E402

CPU = torch.device("cpu")
LENGTHS = [9, 7, 5, 4]
#: the second and third begin like the first, the last like nobody
SHARED = [(0, 0), (0, 4), (0, 4), (3, 0)]


@pytest.mark.parametrize(("window", "softcap"), [(3, None), (6, 0.5), (None, 0.5)])
def test_shared_prompts_change_no_output_and_no_gradient(window: int | None, softcap: float | None) -> None:
    config = TransformerConfig(num_layers=1, hidden_size=32, num_attention_heads=4, num_query_groups=2, attention_dropout=0.0)
    attention = WindowedAttention(config, 1, window=window, softcap=softcap)
    shared = SharedPrefixes.build(LENGTHS, SHARED, CPU)
    generator = torch.Generator().manual_seed(1)
    shapes = [(len(shared.computed), heads, 8) for heads in (4, 2, 2)]
    computed = [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]
    separate = [x.detach().clone().requires_grad_() for x in computed]
    out = attention(*computed, packed_seq_params=PackedLayout.build(LENGTHS, CPU, shared=shared))
    whole = attention(*(x[shared.representatives] for x in separate), packed_seq_params=PackedLayout.build(LENGTHS, CPU))
    torch.testing.assert_close(out, whole[shared.computed])
    direction = torch.randn(out.shape, generator=generator)
    out.backward(direction)
    whole[shared.computed].backward(direction)
    for mine, theirs in zip(computed, separate):
        torch.testing.assert_close(mine.grad, theirs.grad)
