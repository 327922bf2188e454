"""Attention of a block pair of the ring: values and gradients of the textbook form, and what it keeps for the backward pass."""

from __future__ import annotations

import pytest
import torch

from mindspeed_rl import adaptors, platform

platform.select("cpu")
adaptors.apply("train")

from mindspeed_rl.engine.attention import _block_attention  # noqa: E402  (Megatron must be imported after the adaptor)


def textbook(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, mask: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    repeat = query.size(1) // key.size(1)
    key, value = key.repeat_interleave(repeat, 1), value.repeat_interleave(repeat, 1)
    scores = (query @ key.transpose(-1, -2) * scale).masked_fill(~mask, -torch.inf)
    return scores.softmax(-1) @ value, scores.logsumexp(-1)


@pytest.mark.parametrize("kind", ["causal", "all keys", "some keys"])
@pytest.mark.parametrize(
    ("rows", "heads", "key_heads", "queries", "keys"), [(3, 2, 1, 5, 5), (1, 2, 2, 300, 300), (2, 4, 2, 513, 513)]
)
def test_blocks_are_the_textbooks(kind: str, rows: int, heads: int, key_heads: int, queries: int, keys: int) -> None:
    generator = torch.Generator().manual_seed(queries)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    column = torch.arange(keys)
    mask = {
        "causal": (torch.arange(queries)[:, None] >= column)[None, None],
        "all keys": torch.ones(rows, 1, 1, keys, dtype=torch.bool),
        "some keys": (column < torch.randint(1, keys + 1, (rows, 1), generator=generator))[:, None, None],
    }[kind]
    exact = [draw(rows, heads, queries, 8), draw(rows, key_heads, keys, 8), draw(rows, key_heads, keys, 6)]
    weights = draw(rows, heads, queries, 6), draw(rows, heads, queries)
    results = []
    for inputs, compute in ((exact, textbook), ([tensor.float() for tensor in exact], _block_attention)):
        leaves = [tensor.requires_grad_() for tensor in inputs]
        outputs = compute(*leaves, 0.3, mask)
        sum((output * weight.to(output.dtype)).sum() for output, weight in zip(outputs, weights)).backward()
        results.append([*outputs, *(leaf.grad for leaf in leaves)])
    for expected, result in zip(*results):
        torch.testing.assert_close(result.double(), expected, rtol=1e-4, atol=1e-5)


def count_kept(length: int) -> int:
    """Numbers that autograd keeps of a block pair of this length, with 2 heads of 8."""
    sizes: list[int] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        sizes.append(tensor.numel())
        return tensor

    query, key, value = (torch.randn(1, 2, length, 8, requires_grad=True) for _ in range(3))
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        _block_attention(query, key, value, 0.3, torch.ones(1, 1, 1, length, dtype=torch.bool))
    return sum(sizes)


def test_what_is_kept_grows_with_the_length() -> None:
    # query, key, value and output of 2 heads x 8, log-sums of 2 heads, and the mask
    assert [count_kept(512), count_kept(1024)] == [512 * (4 * 16 + 2 + 1), 1024 * (4 * 16 + 2 + 1)]
