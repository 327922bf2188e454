"""The engine's attention on one rank, against loops over tokens and heads."""

from __future__ import annotations

import math

import pytest
import torch
from megatron.core.transformer.transformer_config import TransformerConfig

from mindspeed_rl.adaptors import causal_attention
from mindspeed_rl.engine.attention import CoreAttention, packed_attention
from mindspeed_rl.engine.sequence_layout import PackedLayout

CPU = torch.device("cpu")


def looped_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
    """[s, n, d], [s, g, d], [s, g, d_v] -> [s, n, d_v], one query of one head at a time."""
    tokens, heads = query.shape[:2]
    shared_by = heads // key.size(1)
    rows = []
    for t in range(tokens):
        for head in range(heads):
            group = head // shared_by
            scores = torch.stack([query[t, head] @ key[u, group] * scale for u in range(t + 1)])
            weights = scores.exp() / scores.exp().sum()
            rows.append(sum(weights[u] * value[u, group] for u in range(t + 1)))
    return torch.stack(rows).view(tokens, heads, value.size(-1))


def random_qkv(tokens: int, heads: int, groups: int, dim: int, value_dim: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(tokens * 7 + heads)
    shapes = ((tokens, heads, dim), (tokens, groups, dim), (tokens, groups, value_dim))
    return [torch.randn(shape, generator=generator, requires_grad=True) for shape in shapes]


@pytest.mark.parametrize(("heads", "groups", "dim", "value_dim"), [(4, 4, 8, 8), (4, 2, 8, 8), (6, 1, 4, 4), (4, 4, 8, 6)])
def test_causal_attention_equals_the_loop(heads: int, groups: int, dim: int, value_dim: int) -> None:
    query, key, value = random_qkv(7, heads, groups, dim, value_dim)
    got = causal_attention(query[None], key[None], value[None], 0.3)[0]
    torch.testing.assert_close(got, looped_attention(query, key, value, 0.3), rtol=1e-5, atol=1e-6)


def test_attention_of_bfloat16_is_rounded_once_on_the_cpu() -> None:
    inputs = [tensor.detach().bfloat16().requires_grad_() for tensor in random_qkv(23, 4, 2, 8, 8)]
    exact = [tensor.detach().float().requires_grad_() for tensor in inputs]
    got = causal_attention(*(tensor[None] for tensor in inputs), 0.3)[0]
    wanted = looped_attention(*exact, 0.3)
    assert got.dtype == torch.bfloat16
    # half a unit in the last of 8 bits, and what float32 may differ before it is rounded
    torch.testing.assert_close(got.float(), wanted.bfloat16().float(), rtol=2**-7, atol=1e-6)
    assert (got.float() - wanted).abs().max() <= wanted.abs().max() * 2**-8
    direction = torch.randn(got.shape, generator=torch.Generator().manual_seed(1))
    (got.float() * direction).sum().backward()
    (wanted * direction.bfloat16().float()).sum().backward()
    for ours, theirs in zip(inputs, exact):
        torch.testing.assert_close(ours.grad.float(), theirs.grad, rtol=2**-7, atol=1e-5)


@pytest.mark.parametrize("lengths", [[5], [1, 1, 1], [9, 2, 9, 1, 4], [3, 8, 8, 7, 2, 0, 1]])
def test_packed_attention_and_its_gradients_equal_the_loop_over_sequences(lengths: list[int]) -> None:
    inputs = random_qkv(sum(lengths), 4, 2, 8, 8)
    copies = [x.detach().clone().requires_grad_() for x in inputs]
    got = packed_attention(*inputs, PackedLayout.build(lengths, CPU), 0.4)
    parts = zip(*(x.split(lengths) for x in copies))
    expected = torch.cat([looped_attention(q, k, v, 0.4) for q, k, v in parts if len(q)])
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)
    direction = torch.randn(got.shape, generator=torch.Generator().manual_seed(1))
    (got * direction).sum().backward()
    (expected * direction).sum().backward()
    for ours, theirs in zip(inputs, copies):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-6)


def test_the_module_takes_megatrons_shapes_dense_and_packed() -> None:
    config = TransformerConfig(num_layers=1, hidden_size=32, num_attention_heads=4, num_query_groups=2, attention_dropout=0.0)
    module = CoreAttention(config, layer_number=1)
    query, key, value = (x.detach() for x in random_qkv(12, 4, 2, 8, 8))
    scale = 1 / math.sqrt(8)
    packed = module(*(x for x in (query, key, value)), packed_seq_params=PackedLayout.build([7, 5], CPU))
    two = [looped_attention(query[part], key[part], value[part], scale) for part in (slice(0, 7), slice(7, 12))]
    assert packed.shape == (12, 4, 8)
    torch.testing.assert_close(packed, torch.cat(two), rtol=1e-5, atol=1e-6)
    dense = module(*(x.view(2, 6, *x.shape[1:]).transpose(0, 1) for x in (query, key, value)))
    assert dense.shape == (6, 2, 32)
    for row in range(2):
        part = slice(6 * row, 6 * row + 6)
        expected = looped_attention(query[part], key[part], value[part], scale)
        torch.testing.assert_close(dense[:, row].view(6, 4, 8), expected, rtol=1e-5, atol=1e-6)


def test_no_gradient_leaks_between_packed_sequences() -> None:
    query, key, value = random_qkv(10, 2, 2, 4, 4)
    out = packed_attention(query, key, value, PackedLayout.build([4, 6], CPU), 0.5)
    out[:4].sum().backward()
    for x in (query, key, value):
        assert torch.equal(x.grad[4:], torch.zeros_like(x.grad[4:]))
