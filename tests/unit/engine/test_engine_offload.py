"""What is offloaded leaves the device, and comes back bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from mindspeed_rl.algorithms.interfaces import LossInputs, LossOutput
from mindspeed_rl.engine.batching import Rows
from mindspeed_rl.engine.offload import Offloader
from mindspeed_rl.engine.train_engine import MicroBatching, TrainEngine

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
    offloader = Offloader(engine)
    offloader.offload(params=True, grads=True, optimizer=True)
    tensors = [*weights(engine), *optimizer_state(engine)]
    assert {tensor.untyped_storage().size() for tensor in tensors} == {0}
    assert {buffer.grad_data.untyped_storage().size() for chunk in engine.chunks for buffer in chunk.buffers} == {0}
    offloader.onload(params=True, grads=True, optimizer=True)
    for now, then in zip(tensors, before):
        assert torch.equal(now, then)
    assert not any(buffer.grad_data.any() for chunk in engine.chunks for buffer in chunk.buffers)


@pytest.mark.parametrize("keys", LAYOUTS, ids=str)
def test_training_goes_on_as_if_nothing_had_been_offloaded(make_engine: Callable[..., TrainEngine], keys: dict) -> None:
    rested, busy = stepped(make_engine, keys), stepped(make_engine, keys)
    offloader = Offloader(rested)
    offloader.offload(optimizer=True, grads=True)
    offloader.offload(params=True)
    offloader.offload(params=True)
    offloader.onload(params=True)
    offloader.onload(params=True, grads=True, optimizer=True)
    results = [engine.train_step(ROWS, MicroBatching(1), negative_log_prob).grad_norm for engine in (rested, busy)]
    assert results[0] == results[1]
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(weights(rested), weights(busy)))


def test_parts_can_leave_alone(make_engine: Callable[..., TrainEngine]) -> None:
    engine = stepped(make_engine, {})
    offloader = Offloader(engine)
    offloader.offload(grads=True)
    assert all(tensor.untyped_storage().size() for tensor in (*weights(engine), *optimizer_state(engine)))
    offloader.onload(grads=True)
    offloader.offload(optimizer=True)
    assert all(tensor.untyped_storage().size() for tensor in weights(engine))
    offloader.onload(optimizer=True)
