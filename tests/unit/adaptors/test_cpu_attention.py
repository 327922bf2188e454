"""The CPU's causal attention equals float64's, whatever its blocks, and so do its gradients."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest
import torch

from mindspeed_rl.adaptors import cpu_attention
from mindspeed_rl.platform.environment import ATTENTION_VARIABLE


@pytest.fixture(autouse=True)
def undecided() -> Iterator[None]:
    """No choice of another test, and none for one."""
    cpu_attention._get_kernel.cache_clear()
    yield
    cpu_attention._get_kernel.cache_clear()


def choose(monkeypatch: pytest.MonkeyPatch, in_blocks: bool) -> None:
    """The driver's choice, as its workers get it."""
    monkeypatch.setenv(ATTENTION_VARIABLE, "blocks" if in_blocks else "torch")


def exact_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
    """[b, s, n, d], [b, t, g, d], [b, t, g, d_v] -> [b, s, n, d_v]: the formula, all at once in float64."""
    shared = query.size(2) // key.size(2)
    q, k, v = (x.double().transpose(1, 2) for x in (query, key, value))
    k, v = (x.repeat_interleave(shared, 1) for x in (k, v))
    scores = (q @ k.transpose(-1, -2)) * scale
    later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1 + key.size(1) - query.size(1))
    return (scores.masked_fill(later, float("-inf")).softmax(-1) @ v).transpose(1, 2)


def inputs(b: int, s: int, n: int, g: int, d: int, d_v: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(b + s + n)
    return [torch.randn(shape, generator=generator) for shape in ((b, s, n, d), (b, s, g, d), (b, s, g, d_v), (b, s, n, d_v))]


def assert_exact(attention: Callable[..., torch.Tensor], qkv: list[torch.Tensor], direction: torch.Tensor, atol: float) -> None:
    """Output and gradients equal float64's; gradients may be ten times as far from it."""
    ours, exact = ([x.clone().requires_grad_() for x in qkv] for _ in range(2))
    got, wanted = attention(*ours, 0.4), exact_attention(*exact, 0.4)
    torch.testing.assert_close(got.double(), wanted, rtol=1e-5, atol=atol)
    got.backward(direction)
    wanted.backward(direction.double())
    for mine, theirs in zip(ours, exact):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-4, atol=10 * atol)


@pytest.mark.parametrize(("block", "scores"), [(64, 1 << 18), (5, 1 << 18), (5, 1), (1, 40), (7, 300)])
@pytest.mark.parametrize(
    "shape",
    [
        (1, 1, 2, 1, 4, 4),
        (3, 17, 4, 2, 8, 8),
        (2, 64, 4, 4, 8, 6),
        (2, 65, 6, 1, 4, 8),
        (1, 200, 4, 2, 16, 16),
        (0, 9, 4, 2, 8, 8),
    ],
    ids=str,
)
def test_attention_and_gradients_are_those_of_float64(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...], block: int, scores: int
) -> None:
    monkeypatch.setattr(cpu_attention, "_BLOCK", block)
    monkeypatch.setattr(cpu_attention, "_SCORES", scores)
    *qkv, direction = inputs(*shape)
    assert_exact(cpu_attention._attention_in_blocks, qkv, direction, atol=1e-6)


@pytest.mark.parametrize("wide", [True, False], ids=["blocks", "torch"])
@pytest.mark.parametrize("last", [1, 7, 40, 65, 900])
def test_the_last_queries_of_a_sequence_have_the_attention_and_gradients_of_the_whole(
    monkeypatch: pytest.MonkeyPatch, last: int, wide: bool
) -> None:
    choose(monkeypatch, wide)
    query, key, value, direction = inputs(2, last + 30, 4, 2, 8, 6)
    query, direction = query[:, -last:], direction[:, -last:]
    assert_exact(cpu_attention.causal_attention, [query, key, value], direction, atol=1e-5)


def test_long_sequences_go_to_torch_and_are_the_same() -> None:
    *qkv, _ = inputs(1, cpu_attention._LONG, 4, 2, 8, 8)
    by_torch = cpu_attention.causal_attention(*qkv, 0.3)
    torch.testing.assert_close(cpu_attention._attention_in_blocks(*qkv, 0.3), by_torch, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("wide", [True, False])
@pytest.mark.parametrize("length", [cpu_attention._LONG - 1, cpu_attention._LONG])
def test_blocks_are_of_short_sequences_where_they_are_chosen(
    monkeypatch: pytest.MonkeyPatch, length: int, wide: bool
) -> None:
    taken = []
    blocks = cpu_attention._attention_in_blocks
    monkeypatch.setattr(cpu_attention, "_attention_in_blocks", lambda *given: taken.append(True) or blocks(*given))
    choose(monkeypatch, wide)
    *qkv, _ = inputs(1, length, 4, 2, 8, 8)
    result = cpu_attention.causal_attention(*(x.bfloat16() for x in qkv), 0.3)
    assert bool(taken) == (wide and length < cpu_attention._LONG)
    exact = exact_attention(*(x.bfloat16() for x in qkv), 0.3)
    torch.testing.assert_close(result, exact.bfloat16(), rtol=8e-3, atol=1e-4)


def test_dropout_drops_probabilities_and_keeps_their_mean() -> None:
    torch.manual_seed(0)
    query, key = torch.zeros(64, 32, 2, 4), torch.zeros(64, 32, 1, 4)
    out = cpu_attention.causal_attention(query, key, torch.ones(64, 32, 1, 4), 1.0, dropout=0.5)
    assert not torch.equal(out, torch.ones_like(out))
    assert abs(out[:, -1].mean().item() - 1.0) < 0.05


def test_blocks_are_chosen_where_they_are_clearly_faster_by_trial() -> None:
    for in_blocks, by_torch, kernel in ((2.0, 4.0, "blocks"), (3.3, 4.0, "torch"), (7.2, 4.0, "torch")):
        choice = cpu_attention._choose(in_blocks / 1e3, by_torch / 1e3)
        assert choice.kernel == kernel
        assert f"{in_blocks} ms" in choice.reason and f"{by_torch} ms" in choice.reason


def test_what_others_do_on_the_machine_does_not_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    # a second of waiting is not a second of the processor, whatever the machine does
    monkeypatch.setattr(cpu_attention, "_TRIAL_SHAPE", (1, 2, 1, 1, 2))

    def wait(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
        time.sleep(1.0)
        return query * key * value

    assert cpu_attention._measure(wait) < 0.5


def test_a_trial_changes_nothing_but_the_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ATTENTION_VARIABLE, raising=False)
    settings = torch.get_num_threads(), torch.get_float32_matmul_precision(), torch.get_rng_state().tolist()
    assert cpu_attention.try_kernels(2).kernel in ("torch", "blocks")
    with torch.inference_mode():  # where a process meets it first
        *qkv, _ = inputs(1, 20, 4, 2, 8, 8)
        torch.testing.assert_close(
            cpu_attention.causal_attention(*qkv, 0.3).double(), exact_attention(*qkv, 0.3), rtol=1e-5, atol=1e-6
        )
    assert cpu_attention._get_kernel() in ("torch", "blocks")
    assert settings == (torch.get_num_threads(), torch.get_float32_matmul_precision(), torch.get_rng_state().tolist())


def test_a_choice_that_a_checkpoint_cannot_have_made_is_refused() -> None:
    assert cpu_attention.keep_kernel("torch").kernel == "torch" and cpu_attention.keep_kernel("blocks").kernel == "blocks"
    with pytest.raises(ValueError, match="cpu_attention of the checkpoint: 'flash' is not one of torch, blocks"):
        cpu_attention.keep_kernel("flash")
