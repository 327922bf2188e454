"""The gated delta rule in chunks is the recurrence, token by token, whatever sequences are packed."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from mindspeed_rl import adaptors, platform

platform.select("cpu")
adaptors.apply("train")

from mindspeed_rl.engine import gated_delta  # noqa: E402  (Megatron must be imported after the adaptor)
from mindspeed_rl.engine.sequence_layout import ChunkPlan, SharedPrefixes  # noqa: E402

CPU = torch.device("cpu")
KERNEL = 4
#: lengths of packed sequences: below, at and beyond the ends of chunks
PACKED = ([5], [64], [130], [70, 3, 200, 64, 1, 17], [16, 16, 33])


def random_inputs(tokens: int, dtype: torch.dtype, *, decay: float = 0.3) -> list[Tensor]:
    """q, k, v, g and beta of 2 key heads with 2 value heads each."""
    generator = torch.Generator().manual_seed(tokens)

    def sample(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    q, k = functional.normalize(sample(tokens, 2, 8), dim=-1) * 8**-0.5, functional.normalize(sample(tokens, 2, 8), dim=-1)
    g = -decay * functional.softplus(sample(tokens, 4))
    inputs = [q, k, sample(tokens, 4, 12), g, sample(tokens, 4).sigmoid()]
    return [value.to(dtype).requires_grad_() for value in inputs]


def recurrence(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, lengths: list[int]) -> Tensor:
    """S <- exp(g) S; S <- S + k (beta (v - S^T k))^T; o = S^T q, from 0 in each sequence."""
    q, k = (tensor.repeat_interleave(v.size(1) // k.size(1), 1) for tensor in (q, k))
    outputs = []
    start = 0
    for length in lengths:
        state = v.new_zeros(v.size(1), k.size(2), v.size(2))
        for t in range(start, start + length):
            state = state * g[t].exp()[:, None, None]
            known = torch.einsum("hkv,hk->hv", state, k[t])
            state = state + torch.einsum("hk,hv->hkv", k[t], beta[t][:, None] * (v[t] - known))
            outputs.append(torch.einsum("hkv,hk->hv", state, q[t]))
        start += length
    return torch.stack(outputs)


def relative(ours: Tensor, theirs: Tensor) -> float:
    return float(((ours - theirs).abs().max() / theirs.abs().max()).detach())


@pytest.mark.parametrize("lengths", PACKED, ids=str)
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_outputs_and_gradients_are_those_of_the_recurrence(lengths: list[int], dtype: torch.dtype, bound: float) -> None:
    ours = random_inputs(sum(lengths), dtype)
    theirs = [tensor.detach().double().requires_grad_() for tensor in ours]
    output = gated_delta.gated_delta_rule(*ours, ChunkPlan.build(lengths, KERNEL, CPU))
    expected = recurrence(*theirs, lengths)
    weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    (output * weights).sum().backward()
    (expected * weights).sum().backward()
    assert relative(output, expected) < bound
    for mine, other in zip(ours, theirs):
        assert mine.grad is not None and other.grad is not None
        assert relative(mine.grad, other.grad) < bound


def test_a_kernel_gets_heads_of_its_own_and_the_bounds_of_sequences_and_no_prefixes() -> None:
    calls = []

    def kernel(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, bounds: Tensor) -> Tensor:
        calls.append(bounds.tolist())
        assert q.size(1) == k.size(1) == v.size(1) == g.size(1) and q.dtype == v.dtype
        return recurrence(q, k, v, g, beta, bounds.diff().tolist())

    inputs = random_inputs(103, torch.float64)
    plan = ChunkPlan.build([70, 3, 30], KERNEL, CPU)
    output = gated_delta.gated_delta_rule(*inputs, plan, kernel)
    assert calls == [[0, 70, 73, 103]]
    torch.testing.assert_close(output, recurrence(*inputs, [70, 3, 30]), rtol=0, atol=1e-12)
    shared = SharedPrefixes.build([70, 80], [(0, 0), (0, 60)], CPU)
    gated_delta.gated_delta_rule(*random_inputs(90, torch.float64), ChunkPlan.build([70, 80], KERNEL, CPU, shared), kernel)
    assert len(calls) == 1


def test_equal_keys_that_never_decay_stay_exact() -> None:
    # the inverse of a chunk then has alternating signs, and a series of powers would lose every digit
    q, k, v, g, beta = random_inputs(200, torch.float32, decay=0.0)
    inputs = [q, k[:1].expand_as(k), v, g, torch.full_like(beta, 0.999)]
    output = gated_delta.gated_delta_rule(*inputs, ChunkPlan.build([200], KERNEL, CPU))
    assert relative(output, recurrence(*(value.double() for value in inputs), [200])) < 1e-5


def test_outputs_and_gradients_are_those_of_transformers() -> None:
    from transformers.models.qwen3_5 import modeling_qwen3_5

    ours = random_inputs(150, torch.float32)
    theirs = [tensor.detach().clone().requires_grad_() for tensor in ours]
    output = gated_delta.gated_delta_rule(*ours, ChunkPlan.build([150], KERNEL, CPU))
    q, k, *others = theirs
    repeated = [(q * 8**0.5).repeat_interleave(2, 1), k.repeat_interleave(2, 1), *others]
    expected, _ = modeling_qwen3_5.torch_chunk_gated_delta_rule(*(tensor[None] for tensor in repeated))
    assert relative(output, expected[0]) < 1e-5
    output.square().sum().backward()
    expected.square().sum().backward()
    for mine, other in zip(ours, theirs):
        assert mine.grad is not None and other.grad is not None
        assert relative(mine.grad, other.grad) < 1e-5


#: sequences and (first sequence with the prefix, its tokens): two families, one of them with a prefix below the kernel
SHARED = ([75, 90, 71, 10, 6, 5], [(0, 0), (0, 70), (0, 70), (0, 0), (4, 0), (4, 2)])


#: branches of branches, below the kernel too; the last two share what is of a sequence before their owner
TREE = ([75, 90, 95, 30, 6, 5, 200], [(0, 0), (0, 70), (1, 80), (1, 2), (0, 1), (2, 3), (2, 94)])


@pytest.mark.parametrize(("lengths", "families"), [SHARED, TREE], ids=["families", "tree"])
def test_a_prefix_that_is_computed_once_gives_states_and_gradients_to_all_that_follow_it(
    lengths: list[int], families: list[tuple[int, int]]
) -> None:
    shared = SharedPrefixes.build(lengths, families, CPU)
    plan = ChunkPlan.build(lengths, KERNEL, CPU, shared)
    ours = [value.detach()[shared.computed].requires_grad_() for value in random_inputs(sum(lengths), torch.float64)]
    full = [tensor.index_select(0, shared.representatives) for tensor in ours]
    expected = recurrence(*full, lengths)[shared.computed]
    output = gated_delta.gated_delta_rule(*ours, plan)
    torch.testing.assert_close(output, expected, rtol=0, atol=1e-12)
    weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    result = torch.autograd.grad((output * weights).sum(), ours)
    for mine, other in zip(result, torch.autograd.grad((expected * weights).sum(), ours)):
        torch.testing.assert_close(mine, other, rtol=0, atol=1e-11)


@pytest.mark.parametrize(("lengths", "families"), [(SHARED[0], None), SHARED, TREE], ids=["plain", "prefixes", "tree"])
def test_a_convolution_sees_the_tokens_of_its_own_sequence_alone(
    lengths: list[int], families: list[tuple[int, int]] | None
) -> None:
    shared = None if families is None else SharedPrefixes.build(lengths, families, CPU)
    computed = torch.arange(sum(lengths)) if shared is None else shared.computed
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(len(computed), 6, generator=generator, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(6, KERNEL, generator=generator, dtype=torch.float64, requires_grad=True)
    result = gated_delta.causal_convolution(x, weight, ChunkPlan.build(lengths, KERNEL, CPU, shared))
    full = x if shared is None else x.index_select(0, shared.representatives)
    parts = [
        functional.conv1d(part.t()[None], weight[:, None], padding=KERNEL - 1, groups=6)[0, :, : len(part)].t()
        for part in full.split(lengths)
    ]
    expected = functional.silu(torch.cat(parts))[computed]
    torch.testing.assert_close(result, expected)
    weights = torch.randn(result.shape, generator=generator, dtype=torch.float64)
    ours = torch.autograd.grad((result * weights).sum(), [x, weight])
    for mine, other in zip(ours, torch.autograd.grad((expected * weights).sum(), [x, weight])):
        torch.testing.assert_close(mine, other)


def test_what_backward_needs_grows_with_the_tokens_and_not_with_their_square() -> None:
    def saved_bytes(tokens: int) -> int:
        total = 0

        def pack(tensor: Tensor) -> Tensor:
            nonlocal total
            total += tensor.nbytes
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda item: item):
            gated_delta.gated_delta_rule(*random_inputs(tokens, torch.float32), ChunkPlan.build([tokens], KERNEL, CPU))
        return total

    assert saved_bytes(2048) == pytest.approx(4 * saved_bytes(512), rel=0.02)
