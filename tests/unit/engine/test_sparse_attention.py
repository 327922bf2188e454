"""Sparse attention equals a loop over queries and heads, whatever part of the scores exists at a time."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from mindspeed_rl import adaptors

adaptors.apply("train")

from mindspeed_rl.engine import sparse_attention as module  # noqa: E402  (Megatron must be imported after the adaptor)
from mindspeed_rl.engine.sparse_attention import IndexFeatures, select_keys, sparse_attention  # noqa: E402

TOPK, SCALE = 4, 0.3


def _make_inputs(rows: int, queries: int, keys: int, seed: int = 0) -> list[Tensor]:
    """Query, key, value; queries, keys and weights of the indexer; float64 with gradients."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(rows, queries, 3, 6), (rows, keys, 3, 6), (rows, keys, 3, 5)]
    shapes += [(rows, queries, 8, 4), (rows, keys, 4), (rows, queries, 8)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_() for shape in shapes]


def _loop(tensors: list[Tensor], topk: int) -> tuple[Tensor, Tensor]:
    """Attention and divergences, a query and a head at a time."""
    query, key, value, index_query, index_key, index_weight = tensors
    before = key.size(1) - query.size(1)
    outs = torch.zeros(*query.shape[:3], value.size(3), dtype=query.dtype)
    divergences = torch.zeros(query.shape[:2], dtype=query.dtype)
    for r in range(query.size(0)):
        for i in range(query.size(1)):
            scores = []
            for j in range(before + i + 1):
                heads = range(index_query.size(2))
                scores.append(sum(index_weight[r, i, h] * (index_query[r, i, h] @ index_key[r, j]).clamp(min=0) for h in heads))
            order = sorted(range(len(scores)), key=lambda j: (-scores[j].item(), j))[:topk]
            target = torch.zeros(len(order), dtype=query.dtype)
            for head in range(query.size(2)):
                weights = torch.stack([query[r, i, head] @ key[r, j, head] * SCALE for j in order]).softmax(0)
                outs[r, i, head] = sum(weight * value[r, j, head] for weight, j in zip(weights, order))
                target += weights.detach() / query.size(2)
            chosen = torch.stack([scores[j] for j in order]).log_softmax(0)
            divergences[r, i] = (target * (target.log() - chosen)).sum()
    return outs, divergences


@pytest.mark.parametrize("scores", [1, 300, 1 << 20])
@pytest.mark.parametrize(("queries", "keys"), [(9, 9), (5, 9)])
def test_attention_its_divergence_and_all_gradients_equal_a_loop(
    monkeypatch: pytest.MonkeyPatch, scores: int, queries: int, keys: int
) -> None:
    monkeypatch.setattr(module, "_SCORES", scores)
    mine, theirs = (_make_inputs(2, queries, keys) for _ in range(2))
    out, divergence = sparse_attention(*mine[:3], IndexFeatures(*mine[3:]), TOPK, SCALE, groups=())
    expected, expected_divergence = _loop(theirs, TOPK)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(divergence, expected_divergence)
    factor = torch.arange(out.numel(), dtype=out.dtype).view_as(out).sin()
    for actual, other in ((out, divergence), (expected, expected_divergence)):
        ((actual * factor).sum() + (other * other.detach()).sum()).backward()
    for actual, other in zip(mine, theirs):
        torch.testing.assert_close(actual.grad, other.grad)


def test_without_a_divergence_the_indexer_gets_no_gradient() -> None:
    tensors = _make_inputs(1, 9, 9)
    sparse_attention(*tensors[:3], IndexFeatures(*tensors[3:]), TOPK, SCALE)[0].sum().backward()
    assert [tensor.grad is None or not tensor.grad.any() for tensor in tensors] == [False] * 3 + [True] * 3


def test_the_first_of_equal_scores_are_chosen_in_any_number_of_columns() -> None:
    inf = math.inf
    scores = torch.tensor([[0.0, 2.0, 0.0, 0.0, 1.0, -1.0], [0.0] * 6, [3.0, -inf, -inf, -inf, -inf, -inf]])
    chosen = [row.nonzero()[:, 0].tolist() for row in select_keys(scores, 3)]
    assert chosen == [[0, 1, 4], [0, 1, 2], [0]]
    wider = torch.cat([scores, torch.full((3, 5), -inf)], dim=1)
    assert [row.nonzero()[:, 0].tolist() for row in select_keys(wider, 3)] == chosen
    assert select_keys(scores, 6).sum().item() == 13


def test_what_backward_keeps_is_linear_in_the_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_SCORES", 1 << 12)

    def count(tokens: int) -> int:
        kept: dict[int, int] = {}

        def keep(tensor: Tensor) -> Tensor:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        tensors = _make_inputs(1, tokens, tokens)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            out = sparse_attention(*tensors[:3], IndexFeatures(*tensors[3:]), TOPK, SCALE)
        del out
        return sum(kept.values())

    assert count(256) < 2.2 * count(128)
