"""Steps of an engine for the tests of this folder, and its weights after them."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from mindspeed_rl.algorithms.interfaces import LossInputs, LossOutput
from mindspeed_rl.engine.batching import MicroBatching, Rows
from mindspeed_rl.engine.checkpoint import load_checkpoint
from mindspeed_rl.engine.train_engine import TrainEngine

ROWS = Rows([torch.arange(2, 9), torch.arange(11, 22)], [3, 2])


def negative_log_prob(inputs: LossInputs) -> LossOutput:
    return LossOutput(-(inputs.outputs[0] * inputs.mask).sum(), inputs.mask.sum())


def steps(engine: TrainEngine, count: int, rows: Rows = ROWS) -> list[float]:
    """The norm of the gradient of each step."""
    return [engine.train_step(rows, MicroBatching(1), negative_log_prob).grad_norm for _ in range(count)]


def weights(engine: TrainEngine) -> list[Tensor]:
    return [parameter.detach().clone() for model in engine.model.models for parameter in model.parameters()]


def check_equal(engine: TrainEngine, other: TrainEngine) -> None:
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(weights(engine), weights(other), strict=True))


def check_resumed(plain: TrainEngine, want: list[float], saved: TrainEngine, resumed: TrainEngine, folder: Path) -> None:
    """An engine that resumes after two steps, and the one that was saved then, take the other steps of a plain one."""
    steps(resumed, 1)  # what it has is replaced
    load_checkpoint(resumed, folder)
    for engine in (resumed, saved):  # the save has changed nothing
        assert steps(engine, 2) == want[2:]
        check_equal(plain, engine)
