"""Offloaded state leaves the device, and comes back bit for bit."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from mindspeed_rl import platform
from mindspeed_rl.algorithms.interfaces import LossInputs, LossOutput
from mindspeed_rl.engine.batching import MicroBatching, Rows
from mindspeed_rl.engine.offload import Offloader
from mindspeed_rl.engine.train_engine import TrainEngine
from mindspeed_rl.platform.base import SideStream

ROWS = Rows([torch.arange(2, 9), torch.arange(11, 22)], [3, 2])
LAYOUTS = [{}, {"use_distributed_optimizer": True}, {"bf16": True}, {"bf16": True, "use_distributed_optimizer": True}]


def negative_log_prob(inputs: LossInputs) -> LossOutput:
    return LossOutput(-(inputs.outputs[0] * inputs.mask).sum(), inputs.mask.sum())


def weights(engine: TrainEngine) -> Iterator[Tensor]:
    for model in engine.model.models:
        yield from model.parameters()


def optimizer_state(engine: TrainEngine) -> Iterator[Tensor]:
    for optimizer in engine.optimizer.chained_optimizers:
        for group in optimizer.optimizer.param_groups:
            for parameter in group["params"]:
                yield parameter
                yield from (value for value in optimizer.optimizer.state[parameter].values() if torch.is_tensor(value))


def stepped(make_engine: Callable[..., TrainEngine], keys: dict) -> TrainEngine:
    engine = make_engine(**keys)
    engine.train_step(ROWS, MicroBatching(1), negative_log_prob)
    return engine


@pytest.mark.parametrize("keys", LAYOUTS, ids=str)
def test_everything_leaves_and_comes_back_bit_for_bit(make_engine: Callable[..., TrainEngine], keys: dict) -> None:
    engine = stepped(make_engine, keys)
    before = [tensor.detach().clone() for tensor in (*weights(engine), *optimizer_state(engine))]
    offloader = Offloader(engine.model, engine.optimizer)
    offloader.offload(params=True, grads=True, optimizer=True)
    tensors = [*weights(engine), *optimizer_state(engine)]
    assert {tensor.untyped_storage().size() for tensor in tensors} == {0}
    assert {buffer.grad_data.untyped_storage().size() for chunk in engine.chunks for buffer in chunk.buffers} == {0}
    offloader.onload(params=True, grads=True, optimizer=True)
    for now, then in zip(tensors, before):
        assert torch.equal(now, then)
    assert not any(buffer.grad_data.any() for chunk in engine.chunks for buffer in chunk.buffers)


@pytest.mark.parametrize("keys", LAYOUTS, ids=str)
def test_gradients_have_no_memory_before_the_first_step(make_engine: Callable[..., TrainEngine], keys: dict) -> None:
    engine = make_engine(**keys)
    storages = [buffer.grad_data.untyped_storage() for chunk in engine.chunks for buffer in chunk.buffers]
    assert storages and all(storage.size() == 0 for storage in storages)
    engine.train_step(ROWS, MicroBatching(1), negative_log_prob)
    assert all(storage.size() for storage in storages)


@pytest.mark.parametrize("keys", LAYOUTS, ids=str)
def test_training_goes_on_as_if_nothing_had_been_offloaded(make_engine: Callable[..., TrainEngine], keys: dict) -> None:
    rested, busy = stepped(make_engine, keys), stepped(make_engine, keys)
    offloader = Offloader(rested.model, rested.optimizer)
    offloader.offload(optimizer=True, grads=True)
    offloader.offload(params=True)
    offloader.offload(params=True)
    offloader.onload(params=True)
    offloader.onload(params=True, grads=True, optimizer=True)
    results = [engine.train_step(ROWS, MicroBatching(1), negative_log_prob).grad_norm for engine in (rested, busy)]
    assert results[0] == results[1]
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(weights(rested), weights(busy)))


def test_states_are_offloaded_separately(make_engine: Callable[..., TrainEngine]) -> None:
    engine = stepped(make_engine, {})
    offloader = Offloader(engine.model, engine.optimizer)
    offloader.offload(grads=True)
    assert all(tensor.untyped_storage().size() for tensor in (*weights(engine), *optimizer_state(engine)))
    offloader.onload(grads=True)
    offloader.offload(optimizer=True)
    assert all(tensor.untyped_storage().size() for tensor in weights(engine))
    offloader.onload(optimizer=True)


class Recorded(SideStream):
    """Says what it was asked for; copies that are issued on it say so too."""

    def __init__(self) -> None:
        self.log: list[str] = []

    @contextlib.contextmanager
    def issue(self) -> Iterator[None]:
        self.log.append("issue")
        with Copies(self.log):
            yield

    def join(self) -> None:
        self.log.append("join")


class Copies(TorchDispatchMode):
    """Logs every copy of bytes."""

    def __init__(self, log: list[str]) -> None:
        super().__init__()
        self._log = log

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default and args[0].dtype == torch.uint8:
            self._log.append("copy")
        return func(*args, **(kwargs or {}))


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> Recorded:
    recorded = Recorded()
    monkeypatch.setattr(type(platform.current()), "side_stream", lambda self: recorded)
    return recorded


def test_copies_run_in_the_background_and_are_waited_for_where_they_are_needed(
    make_engine: Callable[..., TrainEngine], stream: Recorded
) -> None:
    engine = stepped(make_engine, {"bf16": True})
    stream.log.clear()
    offloader = engine.offloader
    held = [tensor.detach().clone() for tensor in optimizer_state(engine)]
    offloader.start_offload(optimizer=True)
    out = list(stream.log)
    assert out[0] == "issue" and set(out[1:]) == {"copy"}  # nobody waits yet
    assert all(tensor.untyped_storage().size() for tensor in optimizer_state(engine))
    offloader.offload(optimizer=True)
    assert stream.log == out  # not copied twice
    assert not any(tensor.untyped_storage().size() for tensor in optimizer_state(engine))
    offloader.start_onload(optimizer=True)
    assert stream.log == out * 2
    offloader.onload(params=True, grads=True)  # what is on the device waits for nothing
    assert stream.log == out * 2
    offloader.onload(optimizer=True)
    assert stream.log == [*out, *out, "join"]
    assert all(torch.equal(now, then) for now, then in zip(optimizer_state(engine), held))


def test_what_was_copied_early_is_copied_again_once_it_has_changed(make_engine: Callable[..., TrainEngine]) -> None:
    rested, busy = stepped(make_engine, {"bf16": True}), stepped(make_engine, {"bf16": True})
    rested.offloader.start_offload(optimizer=True)
    for engine in (rested, busy):
        engine.train_step(ROWS, MicroBatching(1), negative_log_prob)
    rested.offloader.offload(optimizer=True)
    rested.offloader.onload(optimizer=True)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(optimizer_state(rested), optimizer_state(busy)))
