"""Chunked log-probs and entropy against torch's log_softmax, values and gradients."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mindspeed_rl.algorithms.distillation import compute_divergence
from mindspeed_rl.engine.vocab import VocabHead, compute_squared_probs, compute_top_log_probs, compute_vocab_log_probs
from mindspeed_rl.platform.cpu import CpuPlatform


@pytest.fixture(autouse=True, params=[None, 80], ids=["whole", "blocks"])
def logit_block(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits at one time: a chunk of tokens, or two tokens of these vocabularies and one."""
    monkeypatch.setattr(CpuPlatform, "logit_block", request.param)


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
@pytest.mark.parametrize("vocab_chunk_size", [None, 1, 10, 36])
def test_values_and_gradients_equal_log_softmax(
    temperature: float, padding: int, softcap: float | None, uses_entropy: bool, vocab_chunk_size: int | None
) -> None:
    hidden, weight, labels = inputs(padding=padding)
    ours = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
    theirs = [hidden.double().requires_grad_(), weight.double().requires_grad_()]
    head = VocabHead(temperature, 4, padding, softcap, vocab_chunk_size=vocab_chunk_size)
    got = compute_vocab_log_probs(*ours, labels, head)
    expected = reference(*theirs, labels, temperature, padding, softcap)
    direction = torch.randn(2, 11, generator=torch.Generator().manual_seed(3))
    for (log_probs, entropy), row in ((got, direction), (expected, direction.double())):
        ((log_probs * row[0]).sum() + (entropy * row[1]).sum() * uses_entropy).backward()
    for mine, true in zip(got, expected):
        torch.testing.assert_close(mine, true.float(), rtol=1e-5, atol=2e-6)
    for mine, true in zip(ours, theirs):
        torch.testing.assert_close(mine.grad, true.grad.float(), rtol=1e-4, atol=5e-6)


@pytest.mark.parametrize("vocab_chunk_size", [None, 10])
def test_frozen_columns_of_the_weight_have_no_gradient_and_change_no_other(vocab_chunk_size: int | None) -> None:
    hidden, weight, labels = inputs(padding=5)
    ours = [hidden.clone().requires_grad_(), weight[:, 12:].clone().requires_grad_()]
    theirs = [hidden.double().requires_grad_(), weight.double().requires_grad_()]
    head = VocabHead(0.6, 4, 5, frozen=weight[:, :12], vocab_chunk_size=vocab_chunk_size)
    got, expected = compute_vocab_log_probs(*ours, labels, head), reference(*theirs, labels, 0.6, 5, None)
    for log_probs, entropy in (got, expected):
        (log_probs.sum() + entropy.sum()).backward()
    for mine, true in zip(got, expected):
        torch.testing.assert_close(mine, true.float(), rtol=1e-5, atol=2e-6)
    torch.testing.assert_close(ours[0].grad, theirs[0].grad.float(), rtol=1e-4, atol=5e-6)
    torch.testing.assert_close(ours[1].grad, theirs[1].grad[:, 12:].float(), rtol=1e-4, atol=5e-6)


@pytest.mark.parametrize("settings", [{}, {"temperature": 0.6, "padding": 5}, {"softcap": 3.0, "padding": 5}])
def test_sums_of_squared_probabilities_equal_those_of_the_softmax(settings: dict[str, float]) -> None:
    hidden, weight, _ = inputs()
    logits = hidden.double() @ weight[: len(weight) - int(settings.get("padding", 0))].double().t()
    if "softcap" in settings:
        logits = settings["softcap"] * torch.tanh(logits / settings["softcap"])
    expected = (logits / settings.get("temperature", 1.0)).softmax(-1).square().sum(-1)
    for chunk_size, rows in itertools.product((4, 1000), (None, 1, 10)):
        got = compute_squared_probs(hidden, weight, VocabHead(chunk_size=chunk_size, vocab_chunk_size=rows, **settings))
        torch.testing.assert_close(got, expected.float(), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("chunk_size", [1, 5, 11, 1000])
def test_the_chunk_size_does_not_change_the_result(chunk_size: int) -> None:
    hidden, weight, labels = inputs()
    whole = compute_vocab_log_probs(hidden, weight, labels)
    parts = compute_vocab_log_probs(hidden, weight, labels, VocabHead(chunk_size=chunk_size))
    for ours, theirs in zip(parts, whole):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)


def test_padded_rows_get_no_probability_and_no_gradient() -> None:
    hidden, weight, labels = inputs(padding=4)
    weight[-4:] = 100.0  # the largest logits of all, were they real
    weight.requires_grad_()
    log_probs, entropy = compute_vocab_log_probs(hidden, weight, labels, VocabHead(padding=4))
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


@pytest.mark.parametrize("vocab_chunk_size", [None, 3])
def test_huge_logits_stay_finite(vocab_chunk_size: int | None) -> None:
    hidden, weight, labels = inputs()
    hidden = (hidden * 1e3).requires_grad_()
    log_probs, entropy = compute_vocab_log_probs(hidden, weight, labels, VocabHead(vocab_chunk_size=vocab_chunk_size))
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


class _Largest(TorchDispatchMode):
    """Elements of the largest tensor that an operation made."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given, made = ([t for t in tree_leaves(tree) if isinstance(t, torch.Tensor)] for tree in ((args, kwargs), result))
        old = {tensor.untyped_storage().data_ptr() for tensor in given}
        new = [tensor.numel() for tensor in made if tensor.untyped_storage().data_ptr() not in old]
        self.numel = max([self.numel, *new])
        return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab_chunk_size", [None, 1000, 8999])
def test_the_heads_gradient_is_added_to_megatrons_without_a_tensor_of_its_size(
    dtype: torch.dtype, vocab_chunk_size: int | None
) -> None:
    hidden, weight, labels = inputs(vocab=9000, padding=5)
    hidden, weight = hidden.to(dtype), torch.nn.Parameter(weight.to(dtype))
    weight.main_grad = torch.full(weight.shape, 0.5)  # of micro-batches before this one
    theirs = [hidden.double().requires_grad_(), weight.detach().double().requires_grad_()]
    head = VocabHead(0.6, 4, 5, 3.0, vocab_chunk_size=vocab_chunk_size, adds_to_main_grad=True, in_float32=True)
    largest = _Largest()
    for _ in range(2):
        leaf = hidden.clone().requires_grad_()
        with largest:
            log_probs, entropy = compute_vocab_log_probs(leaf, weight, labels, head)
            (log_probs.sum() - 0.3 * entropy.sum()).backward()
    # the smaller of HEAD_ROWS and the chunk of the vocabulary
    assert largest.numel <= max(16 * min(8192, vocab_chunk_size or 9000), 4 * 9000) < weight.numel()
    assert weight.grad is None
    log_probs, entropy = reference(*theirs, labels, 0.6, 5, 3.0)
    (log_probs.sum() - 0.3 * entropy.sum()).backward()
    tolerance = 1e-5 if dtype == torch.float32 else 0.02
    for mine, true in ((weight.main_grad, 0.5 + 2 * theirs[1].grad), (leaf.grad, theirs[0].grad)):
        assert float((mine.double() - true).norm()) < tolerance * float(theirs[1].grad.norm())
    assert torch.equal(weight.main_grad[-5:], torch.full((5, 16), 0.5))


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
        got = compute_vocab_log_probs(*ours, labels, VocabHead(0.7, 4, softcap=softcap, in_float32=in_float32))
        got[0].sum().backward()
        errors.append(max(float((mine - true).detach().abs().max()) for mine, true in zip(got, expected)))
    assert errors[0] > 0.01 and errors[1] < 1e-4
    for mine, true in zip(ours, theirs):
        # gradients themselves are rounded to the format of what they belong to
        assert mine.grad.dtype == torch.bfloat16
        assert float((mine.grad.double() - true.grad).norm()) < 0.01 * float(true.grad.norm())


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("vocab_chunk_size", [None, 10])
def test_log_probs_at_the_ids_of_a_teacher_equal_log_softmax_with_their_gradient(
    temperature: float, softcap: float | None, vocab_chunk_size: int | None
) -> None:
    hidden, weight, labels = inputs(padding=5)
    ids = torch.randint(0, 32, (11, 6), generator=torch.Generator().manual_seed(5))
    ids[2, 4:] = -1
    ours = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
    theirs = [hidden.double().requires_grad_(), weight.double().requires_grad_()]
    head = VocabHead(temperature, 4, 5, softcap, vocab_chunk_size=vocab_chunk_size)
    got = compute_vocab_log_probs(*ours, labels, head, others=ids)
    logits = theirs[0] @ theirs[1][:32].t()
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    expected = (logits / temperature).log_softmax(-1)
    at_ids, known = expected.gather(1, ids.clamp(min=0)), ids >= 0
    torch.testing.assert_close(got[2][known], at_ids[known].float(), rtol=1e-5, atol=2e-6)
    assert (got[2][~known] == float("-inf")).all()
    (got[0].sum() + got[2][known].square().sum()).backward()
    (expected.gather(1, labels[:, None]).sum() + at_ids[known].square().sum()).backward()
    for mine, true in zip(ours, theirs):
        # squares of log-probs give gradients in the thousands, whose sums in float32 depend on the processor's order
        largest = float(true.grad.abs().max())
        torch.testing.assert_close(mine.grad, true.grad.float(), rtol=1e-4, atol=max(2e-5, 1e-6 * largest))


@pytest.mark.parametrize("kind", ["forward_kl", "reverse_kl", "jsd"])
@pytest.mark.parametrize(("k", "softcap"), [(6, None), (32, None), (32, 3.0), (40, None)])
@pytest.mark.parametrize("vocab_chunk_size", [None, 10])
def test_a_divergence_by_chunks_is_that_of_full_log_softmaxes_with_its_gradient(
    kind: str, k: int, softcap: float | None, vocab_chunk_size: int | None
) -> None:
    hidden, weight, labels = inputs(padding=5)
    teacher_logits = 3 * torch.randn(11, 32, generator=torch.Generator().manual_seed(6))
    teacher_logits[3, 5:20] = float("-inf")  # what the teacher excludes
    teacher, ids = torch.nn.functional.pad(teacher_logits.log_softmax(-1), (0, 8), value=float("-inf")).topk(k, -1)
    ids = torch.where(ids < 32, ids, -1).int()
    divergence = partial(compute_divergence, kind=kind, beta=0.3, rest="lump" if k < 32 else "drop")
    ours = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
    theirs = [hidden.double().requires_grad_(), weight.double().requires_grad_()]

    def judge(student: torch.Tensor, teacher: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return divergence(student, teacher), student.detach().exp().sum(-1)

    kept: list[torch.Size] = []
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor.shape) or tensor, lambda tensor: tensor)
    with hooks:
        got = compute_vocab_log_probs(
            *ours,
            labels,
            VocabHead(0.8, 4, 5, softcap, vocab_chunk_size=vocab_chunk_size),
            others=ids,
            teacher=teacher,
            divergence=judge,
        )
    # of tensors as wide as the vocabulary, only what the teacher gave is kept for the backward pass
    assert sum(len(shape) == 2 and shape == (11, k) for shape in kept) == 2
    logits = theirs[0] @ theirs[1][:32].t()
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    log_softmax = (logits / 0.8).log_softmax(-1)
    student = log_softmax.gather(1, ids.long().clamp(min=0)).masked_fill(ids < 0, float("-inf"))
    expected = divergence(student, teacher.double())
    torch.testing.assert_close(got[2], expected.float(), rtol=1e-4, atol=2e-5)
    torch.testing.assert_close(got[3], student.exp().sum(-1).float(), rtol=1e-5, atol=1e-6)
    scale = torch.linspace(0.5, 2.0, 11)
    ((got[2] * scale).sum() + 0.3 * got[0].sum() + 0.1 * got[1].sum()).backward()
    entropy = -(log_softmax.exp() * log_softmax).sum(-1)
    own = log_softmax.gather(1, labels[:, None])
    ((expected * scale).sum() + 0.3 * own.sum() + 0.1 * entropy.sum()).backward()
    for mine, true in zip(ours, theirs):
        torch.testing.assert_close(mine.grad, true.grad.float(), rtol=1e-3, atol=1e-4)


def test_a_divergence_of_no_tokens_is_empty() -> None:
    hidden, weight, labels = inputs()
    nothing = torch.empty(0, 3)
    got = compute_vocab_log_probs(
        hidden[:0], weight, labels[:0], others=nothing.int(), teacher=nothing, divergence=lambda p, q: (p.sum(-1), q.sum(-1))
    )
    assert [len(values) for values in got] == [0, 0, 0, 0]


@pytest.mark.parametrize("k", [1, 5, 32, 40])
@pytest.mark.parametrize("vocab_chunk_size", [None, 3, 33])
def test_the_top_tokens_equal_a_sorted_log_softmax(k: int, vocab_chunk_size: int | None) -> None:
    hidden, weight, _ = inputs(padding=5)
    log_probs, ids = compute_top_log_probs(hidden, weight, k, VocabHead(0.7, 4, 5, vocab_chunk_size=vocab_chunk_size))
    values, order = (hidden @ weight[:32].t() / 0.7).log_softmax(-1).sort(-1, descending=True)
    count = min(k, 32)
    assert log_probs.shape == ids.shape == (11, k)
    assert torch.equal(ids[:, :count], order[:, :count])
    torch.testing.assert_close(log_probs[:, :count], values[:, :count])
    assert (ids[:, count:] == -1).all() and (log_probs[:, count:] == float("-inf")).all()
