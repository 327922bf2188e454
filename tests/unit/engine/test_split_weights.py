"""Float32 weights as a bf16 weight and a remainder: every bit of the run with copies."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_steps import check_equal, check_resumed, steps, weights
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mindspeed_rl.config.device_limits import SPLIT_BUFFERS
from mindspeed_rl.engine import split_weights
from mindspeed_rl.engine.checkpoint import CheckpointSaver, load_checkpoint
from mindspeed_rl.engine.split_weights import SplitWeightOptimizer
from mindspeed_rl.engine.train_engine import TrainEngine
from mindspeed_rl.engine.weight_average import WeightAverage

MakeEngine = Callable[..., TrainEngine]
KEYS = {"weight_decay": 0.1, "lr_decay_style": "linear", "clip_grad": 0.5, "bf16": True}
SPLIT = {"reuse_fp32_param": True}
LAYOUTS: list[dict[str, Any]] = [
    {"use_distributed_optimizer": True},
    {},
    {"grad_reduce_in_fp32": False, "use_distributed_optimizer": True},
    {"lora_target_modules": ["linear_qkv", "linear_proj"], "lora_r": 4},
    {"recompute_activation_function": True, "overlap_grad_reduce": True},
]


@pytest.fixture(autouse=True)
def small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows that divide the tiny model's weights, and join others."""
    monkeypatch.setattr(split_weights, "SPLIT_WINDOW", 1000)
    monkeypatch.setattr(split_weights, "_ALIGNMENT", 64)


def random_floats(count: int) -> Tensor:
    """Finite float32 numbers of any bits; a third lies in the middle between two bf16 numbers."""
    bits = torch.randint(-(1 << 31), 1 << 31, (count,), dtype=torch.int64, generator=torch.Generator().manual_seed(0))
    bits[::3] = (bits[::3] & ~0xFFFF) | 0x8000
    bits[1::30] = bits[1::30] & ~0x7FFFFFFF  # zeros of both signs
    numbers = bits.to(torch.int32).view(torch.float32)
    return torch.where(numbers.isfinite(), numbers, 1.0)


def test_two_halves_and_a_sign_lose_no_bit_of_a_number() -> None:
    count = 20_000
    numbers = random_floats(count)
    rounded = numbers.bfloat16()
    below = numbers.view(torch.int32) - rounded.float().view(torch.int32)
    assert (below == 1 << 15).any() and (below == -(1 << 15)).any()
    main, weight = torch.empty(count), torch.zeros(count, dtype=torch.bfloat16)
    optimizer = SplitWeightOptimizer(torch.optim.AdamW([main]), {main: weight})
    moments = torch.rand(count).where(torch.arange(count) % 4 != 0, 0.0)
    with optimizer.on_host():
        main.data.copy_(numbers)
        optimizer.state[main]["exp_avg_sq"].copy_(moments)
    assert torch.equal(weight.view(torch.int16), rounded.view(torch.int16))
    for _ in range(2):
        with optimizer.on_host():
            assert torch.equal(main.data.view(torch.int32), numbers.view(torch.int32))
            assert torch.equal(optimizer.state[main]["exp_avg_sq"].view(torch.int32), moments.view(torch.int32))


@pytest.mark.parametrize("keys", LAYOUTS, ids=str)
def test_steps_have_the_bits_of_float32_copies(make_engine: MakeEngine, keys: dict[str, Any]) -> None:
    plain, split = make_engine(**KEYS, **keys), make_engine(**KEYS, **keys, **SPLIT)
    assert steps(plain, 5) == steps(split, 5)
    check_equal(plain, split)
    # moments of 8 bytes and main weights of 4, or remainders of 2
    full, left = (engine.offloader.resident_bytes()["optimizer"] for engine in (plain, split))
    assert left * 12 == pytest.approx(full * 10, rel=0.02)


@pytest.mark.parametrize("keys", LAYOUTS, ids=str)
@pytest.mark.parametrize(("saved", "loaded"), [({}, SPLIT), (SPLIT, {}), pytest.param(SPLIT, SPLIT, marks=pytest.mark.slow)])
def test_a_checkpoint_resumes_with_and_without_copies(
    make_engine: MakeEngine, keys: dict[str, Any], saved: dict[str, Any], loaded: dict[str, Any], tmp_path: Path
) -> None:
    plain = make_engine(**KEYS, **keys)
    want = steps(plain, 4)
    first = make_engine(**KEYS, **keys, **saved)
    steps(first, 2)
    CheckpointSaver(first, tmp_path).save(2, {})
    resumed = make_engine(**KEYS, **keys, **loaded)
    check_resumed(plain, want, first, resumed, tmp_path)


def test_it_is_saved_before_the_first_step_and_while_others_follow(make_engine: MakeEngine, tmp_path: Path) -> None:
    engine = make_engine(**KEYS, **SPLIT, async_save=True)
    saver = CheckpointSaver(engine, tmp_path)
    saver.save(0, {})
    want = steps(engine, 3)
    saver.finish()
    resumed = make_engine(**KEYS, **SPLIT)
    steps(resumed, 2)
    load_checkpoint(resumed, tmp_path)
    assert steps(resumed, 3) == want
    check_equal(engine, resumed)


@pytest.mark.parametrize("distributed", [False, True])
def test_weights_that_are_loaded_alone_become_main_weights(make_engine: MakeEngine, distributed: bool, tmp_path: Path) -> None:
    keys = {**KEYS, "use_distributed_optimizer": distributed}
    plain = make_engine(**keys)
    steps(plain, 2)
    CheckpointSaver(plain, tmp_path).save(2, {})
    starts = [make_engine(**keys, finetune=True, **extra) for extra in ({}, SPLIT)]
    for engine in starts:
        steps(engine, 1)
        load_checkpoint(engine, tmp_path)
    assert steps(starts[0], 2) == steps(starts[1], 2)
    check_equal(*starts)


def test_halves_leave_and_return_with_a_rollout(make_engine: MakeEngine) -> None:
    plain, split = make_engine(**KEYS), make_engine(**KEYS, **SPLIT)
    for _ in range(2):
        assert steps(plain, 1) == steps(split, 1)
        split.offloader.offload(params=True, grads=True, optimizer=True)
        assert split.offloader.resident_bytes()["optimizer"] == 0
        split.offloader.onload(params=True, optimizer=True)
    check_equal(plain, split)


def test_a_swapped_optimizer_takes_the_halves_along(make_engine: MakeEngine) -> None:
    plain, split = make_engine(**KEYS), make_engine(**KEYS, **SPLIT, swap_optimizer=True)
    assert steps(plain, 3) == steps(split, 3)
    check_equal(plain, split)
    assert split.offloader.resident_bytes()["optimizer"] == 0


def test_an_average_is_evaluated_in_place_of_weights_without_copies(make_engine: MakeEngine) -> None:
    plain, split = make_engine(**KEYS), make_engine(**KEYS, **SPLIT)
    for engine in (plain, split):
        steps(engine, 2)
        kept = weights(engine)
        average = WeightAverage(engine.list_trained, decay=0.5)
        steps(engine, 1)
        average.update()
        later = weights(engine)
        with average.in_place():
            for shown, first, second in zip(weights(engine), kept, later, strict=True):
                assert torch.equal(shown, torch.lerp(first.float(), second.float(), 0.5).to(shown.dtype))
        assert all(torch.equal(shown, weight) for shown, weight in zip(weights(engine), later, strict=True))
    assert steps(plain, 2) == steps(split, 2)
    check_equal(plain, split)


@pytest.mark.parametrize("left", [0, 1])
def test_updates_are_counted_where_the_inner_optimizer_counts_none(left: int) -> None:
    """torch's AdamW counts in its states, and FusedAdam of TransformerEngine and Apex only groups with parameters."""
    starts = [torch.linspace(-1, 1, 3000).bfloat16(), torch.linspace(-2, 2, 500)[: 500 * left]]
    mains = [start.float().clone() for start in starts]
    settings: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1, "fused": True}
    reference = torch.optim.AdamW([main.clone() for main in mains], **settings)
    optimizer = SplitWeightOptimizer(torch.optim.AdamW(mains[: 1 + left], **settings), {mains[0]: starts[0]})
    for step in range(3):
        for group in (reference.param_groups[0], optimizer.param_groups[0]):
            for index, parameter in enumerate(group["params"]):
                parameter.grad = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(2 * step + index))
        reference.step()
        optimizer.step()
    with optimizer.on_host():
        for main, expected in zip(mains[: 1 + left], reference.param_groups[0]["params"]):
            assert torch.equal(main, expected)


def test_weights_without_moments_need_none_on_the_device(make_engine: MakeEngine, tmp_path: Path) -> None:
    """A run that starts from weights alone has 2 bytes a number until its first step, and 10 from then on."""
    plain = make_engine(**KEYS)
    steps(plain, 2)
    CheckpointSaver(plain, tmp_path).save(2, {})
    engine = make_engine(**KEYS, **SPLIT, finetune=True)
    count = sum(weight.numel() for weight in engine.list_trained().values())
    CheckpointSaver(engine, tmp_path / "first").save(0, {})
    load_checkpoint(engine, tmp_path)
    assert engine.offloader.resident_bytes()["optimizer"] == pytest.approx(2 * count, rel=0.01)
    steps(engine, 1)
    assert engine.offloader.resident_bytes()["optimizer"] == pytest.approx(10 * count, rel=0.01)


class LiveBytes(TorchDispatchMode):
    """Bytes of the storages that operators have made in the block and that are still there; the most of them."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {item.untyped_storage()._cdata for item in tree_leaves((args, kwargs)) if isinstance(item, Tensor)}
        result = func(*args, **(kwargs or {}))
        for made in tree_leaves(result):
            if isinstance(made, Tensor) and (storage := made.untyped_storage())._cdata not in given | self._known:
                self._known.add(storage._cdata)
                self.now += storage.nbytes()
                weakref.finalize(storage, self._free, storage._cdata, storage.nbytes())
        self.peak = max(self.peak, self.now)
        return result

    def _free(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.now -= size


def test_the_buffers_of_a_step_are_those_of_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    count = 1 << 18
    monkeypatch.setattr(split_weights, "SPLIT_WINDOW", 1 << 14)
    weight, main = torch.linspace(-1, 1, count).bfloat16(), torch.empty(count)
    optimizer = SplitWeightOptimizer(torch.optim.AdamW([main]), {main: weight})
    for _ in range(2):  # the first makes the moments
        main.grad = torch.ones(count)
        with LiveBytes() as live:
            optimizer.step()
    assert live.peak == pytest.approx(SPLIT_BUFFERS * (1 << 14), rel=0.01)
