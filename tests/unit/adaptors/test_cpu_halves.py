"""16-bit products by way of float32 are products of the same numbers, rounded once; nothing else changes."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from mindspeed_rl.adaptors import cpu_halves

#: of a result's size, by which a sum in float32 that is rounded once is off: half of the last digit, and a little
ROUNDING = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
HALVES = pytest.mark.parametrize("dtype", list(ROUNDING), ids=str)
PRODUCTS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "mm": lambda a, b, c: a[0] @ b[0],
    "mm of transposed": lambda a, b, c: a[0] @ b[0].t().contiguous().t(),
    "linear": lambda a, b, c: functional.linear(a, b[0].t()),
    "linear with bias": lambda a, b, c: functional.linear(a, b[0].t(), c[0, 0]),
    "addmm": lambda a, b, c: torch.addmm(c[0], a[0], b[0], beta=0.5, alpha=2.0),
    "bmm": lambda a, b, c: a @ b,
    "baddbmm": lambda a, b, c: torch.baddbmm(c, a, b, beta=2.0, alpha=0.5),
    "mv": lambda a, b, c: a[0] @ b[0, :, 0],
    "einsum": lambda a, b, c: torch.einsum("bij,bjk->ik", a, b),
}


@pytest.fixture
def by_float32() -> Iterator[None]:
    """As on a processor without 16-bit instructions."""
    library = cpu_halves._register()
    yield
    library._destroy()


def operands(dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in ((3, 20, 96), (3, 96, 50), (3, 20, 50))]


def assert_rounded(result: Tensor, exact: Tensor, dtype: torch.dtype) -> None:
    assert result.dtype == dtype and result.shape == exact.shape
    torch.testing.assert_close(result.double(), exact, rtol=ROUNDING[dtype], atol=1e-4)


@pytest.mark.usefixtures("by_float32")
@HALVES
@pytest.mark.parametrize("product", PRODUCTS.values(), ids=PRODUCTS.keys())
def test_products_and_gradients_are_those_of_float64(product: Callable[..., Tensor], dtype: torch.dtype) -> None:
    ours, exact = ([x.to(kind).requires_grad_() for x in operands(dtype)] for kind in (dtype, torch.float64))
    result, wanted = product(*ours), product(*exact)
    assert_rounded(result.detach(), wanted.detach(), dtype)
    direction = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(8)).to(dtype)
    result.backward(direction)
    wanted.backward(direction.double())
    for mine, theirs in zip(ours, exact):
        assert (mine.grad is None) == (theirs.grad is None)
        if theirs.grad is not None:
            assert_rounded(mine.grad, theirs.grad, dtype)


@pytest.mark.usefixtures("by_float32")
def test_float32_and_formats_that_do_not_match_are_torchs_business() -> None:
    a, b, _ = operands(torch.bfloat16)
    for first, second in ((a[0], b[0].float()), (a[0].float(), b[0])):
        with pytest.raises(RuntimeError, match="dtype"):
            torch.mm(first, second)
    wide = a[0].float(), b[0].float()
    assert torch.equal(torch.mm(*wide), functional.linear(wide[0], wide[1].t()))
    assert torch.mm(*wide).dtype == torch.float32


@pytest.mark.usefixtures("by_float32")
def test_no_terms_are_zero() -> None:
    empty = torch.empty(2, 0, dtype=torch.bfloat16)
    assert torch.equal(empty @ empty.t(), torch.zeros(2, 2, dtype=torch.bfloat16))


@pytest.mark.parametrize("worthwhile", [True, False])
def test_only_processors_that_need_it_are_patched(monkeypatch: pytest.MonkeyPatch, worthwhile: bool) -> None:
    registered = []
    monkeypatch.setattr(cpu_halves, "is_worthwhile", lambda: worthwhile)
    monkeypatch.setattr(cpu_halves, "_registration", None)
    monkeypatch.setattr(cpu_halves, "_register", lambda: registered.append(True) or object())
    cpu_halves.apply()
    cpu_halves.apply()
    assert len(registered) == worthwhile


def test_products_are_torchs_own_while_they_are_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = []

    def counted(name: str) -> Callable[..., Tensor]:
        kernel = torch.library.get_kernel(f"aten::{name}", "CPU")

        def product(keys: torch.DispatchKeySet, *operands: Tensor, **options: object) -> Tensor:
            kernels.append(name)
            return kernel.call_boxed(keys, *operands, **options)

        return product

    monkeypatch.setattr(cpu_halves, "_by_float32", counted)
    library = cpu_halves._register()
    monkeypatch.setattr(cpu_halves, "_registration", library)
    a, b, _ = operands(torch.bfloat16)
    try:
        with cpu_halves._suspend():
            own = a[0] @ b[0]
        assert not kernels
        assert torch.equal(a[0] @ b[0], own) and kernels == ["mm"]
    finally:
        cpu_halves._registration._destroy()
