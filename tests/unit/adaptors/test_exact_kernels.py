"""Kernels that give a token the same bits whatever is computed next to it, against torch's own in double precision."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from mindspeed_rl import adaptors, platform
from mindspeed_rl.adaptors import cpu_halves, cpu_products, exact_kernels


@pytest.fixture(autouse=True)
def products() -> None:
    """As in workers."""
    platform.select("cpu")
    cpu_products.apply()
    cpu_halves.apply()


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [100, 896, 4864])
def test_a_row_has_the_same_product_among_any_others(dtype: torch.dtype, width: int) -> None:
    x, matrix = normal(300, width).to(dtype), normal(width, 60).to(dtype)
    full = exact_kernels.matmul(x, matrix)
    torch.testing.assert_close(full.double(), x.double() @ matrix.double(), rtol=1e-2, atol=1e-2 * width**0.5)
    for first, count in ((0, 1), (3, 2), (17, 31), (40, 256), (299, 1)):
        assert torch.equal(exact_kernels.matmul(x[first : first + count], matrix), full[first : first + count])


@pytest.mark.parametrize(("heads", "groups", "size"), [(4, 2, 16), (14, 2, 64), (3, 3, 32)])
def test_attention_of_a_token_is_the_same_in_any_chunk_of_any_batch(heads: int, groups: int, size: int) -> None:
    query, key, value = normal(3, 300, heads, size), normal(3, 300, groups, size), normal(3, 300, groups, size + 1)[..., :size]
    full = exact_kernels.causal_attention(query, key, value, 0.3)
    q, k, v = (x.double().transpose(1, 2) for x in (query, key, value))
    expected = functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.3, enable_gqa=True).transpose(1, 2)
    torch.testing.assert_close(full.double(), expected, rtol=1e-4, atol=1e-5)
    for row, first, end in ((1, 0, 1), (0, 5, 6), (2, 100, 140), (1, 127, 129), (2, 255, 300)):
        q, k, v = (x[row : row + 1, :end] for x in (query, key, value))
        part = exact_kernels.causal_attention(q[:, first:], k, v, 0.3)
        assert torch.equal(part, full[row : row + 1, first:end])


def test_the_gradient_of_attention_is_that_of_torch() -> None:
    ours = [normal(2, 70, heads, 16).requires_grad_() for heads in (4, 2, 2)]
    theirs = [x.detach().double().transpose(1, 2).requires_grad_() for x in ours]
    weights = normal(2, 70, 4, 16)
    (exact_kernels.causal_attention(*ours, 0.25) * weights).sum().backward()
    expected = functional.scaled_dot_product_attention(*theirs, is_causal=True, scale=0.25, enable_gqa=True).transpose(1, 2)
    (expected * weights).sum().backward()
    for mine, other in zip(ours, theirs):
        torch.testing.assert_close(mine.grad.double(), other.grad.transpose(1, 2), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("width", [1, 5, 16, 33, 331, 1000])
def test_zeros_at_the_end_change_no_sum(width: int) -> None:
    x = normal(7, width)
    sums = exact_kernels.sum_rows(x)
    torch.testing.assert_close(sums.double(), x.double().sum(-1), rtol=1e-4, atol=1e-4)
    for added in (1, 16, 53, 700):
        assert torch.equal(exact_kernels.sum_rows(functional.pad(x, (0, added))), sums)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("ranks", "slices"), [(1, 3), (2, 2), (2, 8), (4, 8)])
def test_ranks_that_add_their_own_slices_first_have_the_sum_of_one_rank(ranks: int, slices: int, dtype: torch.dtype) -> None:
    x, matrix = normal(40, 960).to(dtype), normal(960, 60).to(dtype)
    full = exact_kernels.matmul(x, matrix, slices)
    torch.testing.assert_close(full.double(), x.double() @ matrix.double(), rtol=1e-2, atol=0.5)
    of_ranks = [exact_kernels.matmul(a, b, slices // ranks) for a, b in zip(x.chunk(ranks, 1), matrix.chunk(ranks))]
    assert torch.equal(exact_kernels.add_slices(of_ranks), full)
    # and each has columns of other products
    assert torch.equal(torch.cat([exact_kernels.matmul(x, columns, slices) for columns in matrix.chunk(ranks, 1)], 1), full)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_token_has_the_same_output_of_its_experts_among_any_others(dtype: torch.dtype) -> None:
    x, up, down = normal(50, 32).to(dtype), normal(6, 48, 32).to(dtype), normal(6, 32, 24).to(dtype)
    weights, ids = normal(50, 6).softmax(1).topk(3)
    full = exact_kernels.compute_experts(x, up, down, weights, ids)
    expected = torch.zeros(50, 32, dtype=torch.float64)
    for token in range(50):
        for weight, expert in zip(weights[token], ids[token]):
            gate, value = (up[expert].double() @ x[token].double()).chunk(2)
            expected[token] += weight.double() * (down[expert].double() @ (functional.silu(gate) * value))
    torch.testing.assert_close(full.double(), expected, rtol=0.05, atol=1e-3 if dtype == torch.float32 else 2.0)
    for first, end in ((0, 1), (7, 30), (49, 50)):
        chosen = ids[first:end].flip(1)  # in any order of the experts
        part = exact_kernels.compute_experts(x[first:end], up, down, weights[first:end].flip(1), chosen)
        assert torch.equal(part, full[first:end])


def test_outputs_of_experts_go_back_to_their_tokens_and_so_do_gradients() -> None:
    tokens = torch.tensor([0, 2, 3, 1, 3, 0, 1, 2])  # of two experts each
    outputs = normal(8, 5).requires_grad_()
    sums = exact_kernels.unpermute(outputs, tokens, 4)
    torch.testing.assert_close(sums, torch.stack([outputs[tokens == token].sum(0) for token in range(4)]))
    slope = normal(4, 5)
    (sums * slope).sum().backward()
    assert torch.equal(outputs.grad, slope[tokens])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_silu_and_rotation_round_alike_at_every_place(dtype: torch.dtype) -> None:
    x, angles = normal(90, 66).to(dtype), normal(90, 33) * 100
    activated, turned = exact_kernels.silu(x), exact_kernels.rotate(x, angles.cos(), angles.sin())
    torch.testing.assert_close(activated, functional.silu(x), rtol=1e-2, atol=1e-6)
    for first, end in ((0, 1), (7, 10), (33, 90)):
        assert torch.equal(exact_kernels.silu(x[first:end]), activated[first:end])
        part = exact_kernels.rotate(x[first:end], angles[first:end].cos(), angles[first:end].sin())
        assert torch.equal(part, turned[first:end])


def test_models_with_another_activation_keep_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adaptors, "_exact", 1)
    assert adaptors.transformer_settings("silu") == {"activation_func": exact_kernels.silu}
    assert adaptors.transformer_settings("gelu_tanh") == {}


def test_products_whose_rows_depend_on_their_number_do_not_equal_torchs() -> None:
    exact_kernels.check()

    def multiply(rows: Tensor, matrix: Tensor) -> Tensor:
        out = rows @ matrix
        return out if len(rows) > 16 else torch.nextafter(out.float(), torch.tensor(1e9)).to(out.dtype)

    assert exact_kernels.equals_torch(torch.mm) and not exact_kernels.equals_torch(multiply)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_the_largest_block_have_the_bits_of_every_smaller_one(dtype: torch.dtype) -> None:
    size = exact_kernels.find_max_rows(dtype)
    assert size in (16, 32, 64, 128, 256)
    generator = torch.Generator().manual_seed(3)
    for width, columns in ((64, 8), (896, 896), (1024, 48)):
        rows = torch.randn(size, width, generator=generator).to(dtype)
        matrix = torch.randn(width, columns, generator=generator).to(dtype)
        full = torch.mm(rows, matrix)
        for count in range(16, size, 16):
            assert torch.equal(torch.mm(rows[:count], matrix), full[:count]), (width, columns, count)


MULTIPLY = torch.mm


def multiply_by_number_of_rows(rows: Tensor, matrix: Tensor) -> Tensor:
    """The product of a processor whose kernel for bfloat16 adds up more than 16 rows in another order, as with AMX."""
    out = MULTIPLY(rows, matrix)
    if rows.dtype == torch.bfloat16 and len(rows) > exact_kernels.ROWS:
        out = torch.stack([MULTIPLY(rows[:, i::2], matrix[i::2]).float() for i in (0, 1)]).sum(0).to(out.dtype)
    return out


def multiply_by_place(rows: Tensor, matrix: Tensor) -> Tensor:
    """The product of a processor on which every fourth row of a block is added up in another order."""
    out = MULTIPLY(rows, matrix)
    out[3::4] = MULTIPLY(rows.flip(1), matrix.flip(0))[3::4]
    return out


def test_blocks_are_small_where_products_of_bfloat16_depend_on_the_number_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    large = exact_kernels.find_max_rows(torch.float32)
    monkeypatch.setattr(torch, "mm", multiply_by_number_of_rows)
    exact_kernels._try_blocks.cache_clear()
    try:
        assert exact_kernels.find_max_rows(torch.bfloat16) == exact_kernels.ROWS
        assert exact_kernels.find_max_rows(torch.float32) == large
        exact_kernels.check()
        x, matrix = normal(300, 896).bfloat16(), normal(896, 60).bfloat16()
        full = exact_kernels.matmul(x, matrix)
        torch.testing.assert_close(full.double(), x.double() @ matrix.double(), rtol=1e-2, atol=0.3)
        for first, count in ((0, 1), (17, 31), (40, 200)):
            assert torch.equal(exact_kernels.matmul(x[first : first + count], matrix), full[first : first + count])
    finally:
        exact_kernels._try_blocks.cache_clear()
    assert exact_kernels.find_violation(1, 1) is None


def test_a_processor_without_exact_products_is_named_before_a_worker_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = torch.get_num_threads(), torch.get_float32_matmul_precision(), cpu_halves._registration
    monkeypatch.setattr(torch, "mm", multiply_by_place)
    problem = exact_kernels.find_violation(1, settings[0] + 1)
    assert problem is not None and problem.startswith("rl_config.exact_log_probs: products of torch.float32 on this processor")
    assert "set it to false" in problem
    assert settings == (torch.get_num_threads(), torch.get_float32_matmul_precision(), cpu_halves._registration)
    with pytest.raises(RuntimeError) as refused:
        exact_kernels.check()
    # the start of a worker ends with the same sentence
    assert str(refused.value) == problem
