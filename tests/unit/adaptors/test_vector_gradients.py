"""Gradients of vectors that wait for the end of a backward pass give the sums that additions one by one give."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.transformer import TransformerConfig
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from mindspeed_rl.adaptors import vector_gradients

LAYERS, WIDTH, MICRO_BATCHES = 5, 6, 3


@pytest.fixture(scope="module")
def world(single_process_world: None) -> None:
    torch.distributed.init_process_group("gloo")
    parallel_state.initialize_model_parallel()


@pytest.fixture(autouse=True)
def patched(world: None) -> Iterator[None]:
    vector_gradients.apply()
    yield
    vector_gradients.remove()


class Model(torch.nn.Module):
    """Layers of a matrix and a bias in bfloat16, and a scale in float32 that they share."""

    def __init__(self, *, recomputes: bool, reentrant: bool) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH).bfloat16() for _ in range(LAYERS))
        self.scale = torch.nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))
        self._recomputes, self._reentrant = recomputes, reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            run = lambda x, layer=layer: (layer(x) * self.scale).bfloat16().tanh()  # noqa: E731
            x = checkpoint(run, x, use_reentrant=self._reentrant) if self._recomputes else run(x)
        return x


class Additions(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[func._schema.name.removeprefix("aten::")] += 1
        return func(*args, **(kwargs or {}))


def add_up(*, overlaps: bool = False, **form: bool) -> tuple[list[torch.Tensor], Counter[str]]:
    torch.manual_seed(0)
    model = Model(**{"recomputes": False, "reentrant": True} | form)
    config = TransformerConfig(num_layers=1, hidden_size=WIDTH, num_attention_heads=1)
    settings = DistributedDataParallelConfig(grad_reduce_in_fp32=True, overlap_grad_reduce=overlaps)
    ddp = DistributedDataParallel(config, settings, model)
    ddp.zero_grad_buffer()
    with Additions() as additions:
        for index in range(MICRO_BATCHES):
            x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(index)).bfloat16().requires_grad_()
            ddp(x).float().square().sum().backward()
            # complete as soon as the pass has ended
            first = ddp.module.layers[0].bias.main_grad.clone()
    assert torch.equal(first, model.layers[0].bias.main_grad)
    return [parameter.main_grad.clone() for parameter in model.parameters()], additions.calls


@pytest.mark.parametrize("form", [{}, {"recomputes": True}, {"recomputes": True, "reentrant": False}, {"overlaps": True}])
def test_sums_are_those_of_single_additions(form: dict[str, bool]) -> None:
    sums, calls = add_up(**form)
    vector_gradients.remove()
    expected, plain = add_up(**form)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(sums, expected)) and all(bool(each.any()) for each in sums)
    if not form:
        # all biases, and the scale, which has another type
        assert calls["_foreach_add_"] == 2 * MICRO_BATCHES
        assert plain["add_"] - calls["add_"] == (LAYERS + 1) * MICRO_BATCHES
    if form.get("overlaps"):
        assert not calls["_foreach_add_"]


def test_a_backward_pass_that_fails_adds_nothing_later() -> None:
    sums, _ = add_up()

    class Failing(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            raise RuntimeError("a fault")

    torch.manual_seed(0)
    model = Model(recomputes=False, reentrant=True)
    config = TransformerConfig(num_layers=1, hidden_size=WIDTH, num_attention_heads=1)
    ddp = DistributedDataParallel(config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), model)
    with pytest.raises(RuntimeError, match="a fault"):
        ddp(Failing.apply(torch.ones(4, WIDTH).bfloat16().requires_grad_())).float().sum().backward()
    assert not vector_gradients._waiting
    again, _ = add_up()
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(again, sums))


def test_a_sum_that_gets_two_gradients_in_one_pass_has_both() -> None:
    totals = [torch.zeros(WIDTH) for _ in range(2)]
    gradients = [torch.full((WIDTH,), float(1 << index)).bfloat16() for index in range(4)]
    pairs = [(totals[index % 2], gradient) for index, gradient in enumerate(gradients)]
    with Additions() as additions:
        vector_gradients._add_together(vector_gradients._Pairs(pairs))
    assert [total.tolist() for total in totals] == [[1.0 + 4.0] * WIDTH, [2.0 + 8.0] * WIDTH]
    assert additions.calls["_foreach_add_"] == 2
