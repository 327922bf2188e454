"""Which pairs of token and expert a rank computes, and what comes of adding up the ranks; a loop is the reference."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mindspeed_rl.adaptors.vllm_cpu_experts import _compute_local

EXPERTS, TOKENS, HIDDEN, CHOSEN = 6, 9, 4, 3


def make_inputs() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Weights of the experts, tokens, and the chosen experts of each token with their weights."""
    generator = torch.Generator().manual_seed(5)
    experts = torch.randn(EXPERTS, HIDDEN, HIDDEN, generator=generator)
    tokens = torch.randn(TOKENS, HIDDEN, generator=generator)
    ids = torch.stack([torch.randperm(EXPERTS, generator=generator)[:CHOSEN] for _ in range(TOKENS)])
    return experts, tokens, torch.rand(TOKENS, CHOSEN, generator=generator), ids.to(torch.int32)


def kernel(experts: Tensor, pairs: list[int]):
    """A kernel that knows local expert numbers only, as vLLM's; the number of pairs of each call goes to `pairs`."""

    def compute(output: Tensor, tokens: Tensor, weights: Tensor, ids: Tensor) -> None:
        assert weights.is_contiguous() and ids.is_contiguous() and ids.dtype == torch.int32
        pairs.append(len(tokens))
        for row in range(len(tokens)):
            output[row] = weights[row, 0] * (experts[int(ids[row, 0])] @ tokens[row])

    return compute


def map_of(mine: list[int]) -> Tensor:
    """Number on this rank of each expert, -1 for other ranks' experts."""
    return torch.tensor([mine.index(expert) if expert in mine else -1 for expert in range(EXPERTS)], dtype=torch.int32)


@pytest.mark.parametrize("placement", [[[0, 1, 2], [3, 4, 5]], [[5, 0], [2, 4], [1, 3]], [[0, 1, 2, 3, 4, 5], []]], ids=str)
def test_the_ranks_of_a_group_add_up_to_all_experts_and_share_the_work(placement: list[list[int]]) -> None:
    experts, tokens, weights, ids = make_inputs()
    expected = torch.zeros(TOKENS, HIDDEN)
    for token in range(TOKENS):
        for choice in range(CHOSEN):
            expected[token] += weights[token, choice] * (experts[int(ids[token, choice])] @ tokens[token])
    total, pairs = torch.zeros(TOKENS, HIDDEN), []
    for mine in placement:
        output = torch.full((TOKENS, HIDDEN), float("nan"))  # every row must be written, also of tokens without an expert here
        _compute_local(kernel(experts[mine], pairs), output, tokens, weights, ids, map_of(mine))
        total += output
    torch.testing.assert_close(total, expected)
    assert sum(pairs) == TOKENS * CHOSEN


def test_a_rank_whose_experts_nobody_chose_gives_zeros_and_calls_no_kernel() -> None:
    output, pairs = torch.full((2, HIDDEN), float("nan")), []
    ids = torch.tensor([[0], [1]], dtype=torch.int32)
    _compute_local(kernel(torch.empty(1), pairs), output, torch.randn(2, HIDDEN), torch.ones(2, 1), ids, map_of([3]))
    assert torch.equal(output, torch.zeros(2, HIDDEN)) and pairs == []
