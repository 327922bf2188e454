"""Chunked log-probs and entropy against torch's log_softmax, values and gradients."""

from __future__ import annotations

import pytest
import torch

from mindspeed_rl.engine.vocab import compute_squared_probs, compute_top_log_probs, compute_vocab_log_probs


def reference(
    hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, temperature: float, padding: int, softcap: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    logits = hidden @ weight[: len(weight) - padding].t()
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    log_softmax = (logits / temperature).log_softmax(-1)
    return log_softmax.gather(1, labels[:, None])[:, 0], -(log_softmax.exp() * log_softmax).sum(-1)


def inputs(tokens: int = 11, vocab: int = 37, padding: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(tokens + vocab)
    hidden = torch.randn(tokens, 16, generator=generator)
    weight = torch.randn(vocab, 16, generator=generator)
    labels = torch.randint(0, vocab - padding, (tokens,), generator=generator)
    return hidden, weight, labels


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("padding", [0, 5])
@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("uses_entropy", [False, True])
def test_values_and_gradients_equal_log_softmax(
    temperature: float, padding: int, softcap: float | None, uses_entropy: bool
) -> None:
    hidden, weight, labels = inputs(padding=padding)
    ours = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
    theirs = [hidden.double().requires_grad_(), weight.double().requires_grad_()]
    got = compute_vocab_log_probs(*ours, labels, temperature=temperature, chunk_size=4, padding=padding, softcap=softcap)
    expected = reference(*theirs, labels, temperature, padding, softcap)
    direction = torch.randn(2, 11, generator=torch.Generator().manual_seed(3))
    for (log_probs, entropy), row in ((got, direction), (expected, direction.double())):
        ((log_probs * row[0]).sum() + (entropy * row[1]).sum() * uses_entropy).backward()
    for mine, true in zip(got, expected):
        torch.testing.assert_close(mine, true.float(), rtol=1e-5, atol=2e-6)
    for mine, true in zip(ours, theirs):
        torch.testing.assert_close(mine.grad, true.grad.float(), rtol=1e-4, atol=5e-6)


@pytest.mark.parametrize("settings", [{}, {"temperature": 0.6, "padding": 5}, {"softcap": 3.0, "padding": 5}])
def test_sums_of_squared_probabilities_equal_those_of_the_softmax(settings: dict[str, float]) -> None:
    hidden, weight, _ = inputs()
    logits = hidden.double() @ weight[: len(weight) - int(settings.get("padding", 0))].double().t()
    if "softcap" in settings:
        logits = settings["softcap"] * torch.tanh(logits / settings["softcap"])
    expected = (logits / settings.get("temperature", 1.0)).softmax(-1).square().sum(-1)
    for chunk_size in (4, 1000):
        got = compute_squared_probs(hidden, weight, chunk_size=chunk_size, **settings)
        torch.testing.assert_close(got, expected.float(), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("chunk_size", [1, 5, 11, 1000])
def test_the_chunk_size_does_not_change_the_result(chunk_size: int) -> None:
    hidden, weight, labels = inputs()
    whole = compute_vocab_log_probs(hidden, weight, labels)
    parts = compute_vocab_log_probs(hidden, weight, labels, chunk_size=chunk_size)
    for ours, theirs in zip(parts, whole):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)


def test_padded_rows_get_no_probability_and_no_gradient() -> None:
    hidden, weight, labels = inputs(padding=4)
    weight[-4:] = 100.0  # the largest logits of all, were they real
    weight.requires_grad_()
    log_probs, entropy = compute_vocab_log_probs(hidden, weight, labels, padding=4)
    expected = reference(hidden, weight.detach(), labels, 1.0, 4, None)
    torch.testing.assert_close(log_probs.detach(), expected[0], rtol=1e-5, atol=1e-6)
    (log_probs.sum() + entropy.sum()).backward()
    assert torch.equal(weight.grad[-4:], torch.zeros(4, 16))


def test_no_tokens_give_empty_results_and_zero_gradients() -> None:
    hidden, weight, labels = inputs(tokens=0)
    weight.requires_grad_()
    log_probs, entropy = compute_vocab_log_probs(hidden, weight, labels)
    assert log_probs.shape == entropy.shape == (0,)
    (log_probs.sum() + entropy.sum()).backward()
    assert torch.equal(weight.grad, torch.zeros_like(weight))


def test_huge_logits_stay_finite() -> None:
    hidden, weight, labels = inputs()
    hidden = (hidden * 1e3).requires_grad_()
    log_probs, entropy = compute_vocab_log_probs(hidden, weight, labels)
    (log_probs.sum() + entropy.sum()).backward()
    assert log_probs.isfinite().all() and entropy.isfinite().all() and hidden.grad.isfinite().all()


def test_half_precision_inputs_are_computed_in_float32_and_keep_their_gradient_type() -> None:
    hidden, weight, labels = inputs()
    half = [hidden.bfloat16().requires_grad_(), weight.bfloat16().requires_grad_()]
    log_probs, _ = compute_vocab_log_probs(*half, labels)
    expected, _ = reference(half[0].detach().float(), half[1].detach().float(), labels, 1.0, 0, None)
    assert log_probs.dtype == torch.float32
    torch.testing.assert_close(log_probs.detach(), expected, rtol=0, atol=0.1)
    log_probs.sum().backward()
    assert half[0].grad.dtype == half[1].grad.dtype == torch.bfloat16


@pytest.mark.parametrize("vocab", [37, 9000])  # one block of converted rows, and two
@pytest.mark.parametrize("softcap", [None, 30.0])
def test_a_float32_head_does_not_round_logits_of_bfloat16_weights(vocab: int, softcap: float | None) -> None:
    hidden, weight, labels = inputs(vocab=vocab)
    hidden, weight = (hidden * 4).bfloat16(), (weight * 4).bfloat16()
    theirs = [hidden.double().requires_grad_(), weight.double().requires_grad_()]
    expected = reference(*theirs, labels, 0.7, 0, softcap)
    expected[0].sum().backward()
    errors = []
    for in_float32 in (False, True):
        ours = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
        got = compute_vocab_log_probs(*ours, labels, temperature=0.7, chunk_size=4, softcap=softcap, in_float32=in_float32)
        got[0].sum().backward()
        errors.append(max(float((mine - true).detach().abs().max()) for mine, true in zip(got, expected)))
    assert errors[0] > 0.01 and errors[1] < 1e-4
    for mine, true in zip(ours, theirs):
        # gradients themselves are rounded to the format of what they belong to
        assert mine.grad.dtype == torch.bfloat16
        assert float((mine.grad.double() - true.grad).norm()) < 0.01 * float(true.grad.norm())


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_log_probs_at_the_ids_of_a_teacher_equal_log_softmax_with_their_gradient(
    temperature: float, softcap: float | None
) -> None:
    hidden, weight, labels = inputs(padding=5)
    ids = torch.randint(0, 32, (11, 6), generator=torch.Generator().manual_seed(5))
    ids[2, 4:] = -1
    ours = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
    theirs = [hidden.double().requires_grad_(), weight.double().requires_grad_()]
    got = compute_vocab_log_probs(*ours, labels, temperature=temperature, chunk_size=4, padding=5, softcap=softcap, others=ids)
    logits = theirs[0] @ theirs[1][:32].t()
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    expected = (logits / temperature).log_softmax(-1)
    at_ids, known = expected.gather(1, ids.clamp(min=0)), ids >= 0
    torch.testing.assert_close(got[2][known], at_ids[known].float(), rtol=1e-5, atol=2e-6)
    assert (got[2][~known] == float("-inf")).all()
    (got[0].sum() + got[2][known].square().sum()).backward()
    (expected.gather(1, labels[:, None]).sum() + at_ids[known].square().sum()).backward()
    for mine, true in zip(ours, theirs):
        torch.testing.assert_close(mine.grad, true.grad.float(), rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("k", [1, 5, 32, 40])
def test_the_most_probable_tokens_are_those_of_a_sorted_log_softmax(k: int) -> None:
    hidden, weight, _ = inputs(padding=5)
    log_probs, ids = compute_top_log_probs(hidden, weight, k, temperature=0.7, chunk_size=4, padding=5)
    values, order = (hidden @ weight[:32].t() / 0.7).log_softmax(-1).sort(-1, descending=True)
    count = min(k, 32)
    assert log_probs.shape == ids.shape == (11, k)
    assert torch.equal(ids[:, :count], order[:, :count])
    torch.testing.assert_close(log_probs[:, :count], values[:, :count])
    assert (ids[:, count:] == -1).all() and (log_probs[:, count:] == float("-inf")).all()
