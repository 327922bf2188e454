"""A step that has nothing to learn from changes nothing, and one that is not finite ends the run by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mindspeed_rl.algorithms.interfaces import LossInputs, LossOutput
from mindspeed_rl.engine.batching import MicroBatching, Rows
from mindspeed_rl.engine.checkpoint import CheckpointSaver, load_checkpoint
from mindspeed_rl.engine.interface import NonFiniteError
from mindspeed_rl.engine.train_engine import TrainEngine

IDS = torch.arange(2, 12)


def rows(*labelled: bool) -> Rows:
    """Rows of ten tokens, all predicted from the third on; the others have no label."""
    masks = [torch.full((8,), some) for some in labelled]
    return Rows([IDS] * len(labelled), [2] * len(labelled), {"loss_mask": masks}, [IDS[2:]] * len(labelled))


def negative_log_prob(inputs: LossInputs) -> LossOutput:
    mask = inputs.columns["loss_mask"] & inputs.mask
    return LossOutput(-torch.where(mask, inputs.outputs[0], 0.0).sum(), mask.sum())


def state(engine: TrainEngine) -> dict[str, Tensor]:
    """All weights, and the moments and steps of the optimizer."""
    results = {name: tensor.clone() for name, tensor in engine.model.models[0].state_dict().items() if tensor is not None}
    assert engine.optimizer is not None
    for optimizer in getattr(engine.optimizer, "chained_optimizers", [engine.optimizer]):
        for index, values in enumerate(optimizer.optimizer.state.values()):
            results |= {f"{index}.{key}": torch.as_tensor(value).clone() for key, value in values.items()}
    return results


@pytest.mark.parametrize(
    "keys",
    [{}, {"bf16": True}, {"use_distributed_optimizer": True}, {"no_check_for_nan_in_loss_and_grad": True}],
    ids=["float32", "bf16", "distributed", "unchecked"],
)
def test_a_step_without_labels_changes_nothing(make_engine: Callable[..., TrainEngine], keys: dict[str, Any]) -> None:
    engine = make_engine(weight_decay=0.1, **keys)
    each = MicroBatching(1)
    first = engine.train_step(rows(True, False), each, negative_log_prob)
    assert not first.is_skipped and first.grad_norm > 0
    before = state(engine)
    empty = engine.train_step(rows(False, False), each, negative_log_prob)
    assert empty.is_skipped and empty.grad_norm == 0.0
    after = state(engine)
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    # iterations are counted, as the schedule and a resumed run count them
    assert engine.num_updates == 2
    assert not engine.train_step(rows(False, True), each, negative_log_prob).is_skipped
    assert any(not torch.equal(before[name], tensor) for name, tensor in state(engine).items())


@pytest.mark.parametrize(
    "keys", [{}, {"bf16": True}, {"use_distributed_optimizer": True}], ids=["float32", "bf16", "distributed"]
)
def test_a_resumed_run_corrects_adams_bias_by_the_steps_that_adam_has_made(
    make_engine: Callable[..., TrainEngine], tmp_path: Path, keys: dict[str, Any]
) -> None:
    keys = {"lr_decay_style": "constant", **keys}
    engine, each = make_engine(**keys), MicroBatching(1)
    for labelled in (True, False):  # the second one is not Adam's
        engine.train_step(rows(labelled), each, negative_log_prob)
    CheckpointSaver(engine, tmp_path).save(2, {})
    resumed = make_engine(**keys)
    load_checkpoint(resumed, tmp_path)
    for one in (engine, resumed):
        one.train_step(rows(True), each, negative_log_prob)
    ours, theirs = state(resumed), state(engine)
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert (resumed.num_updates, resumed.optimizer_steps) == (3, 2)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_ends_the_run_before_weights_change(
    make_engine: Callable[..., TrainEngine], value: float
) -> None:
    engine = make_engine()
    before = state(engine)

    def broken(inputs: LossInputs) -> LossOutput:
        loss = negative_log_prob(inputs)
        return LossOutput(loss.loss_sum * value, loss.count)

    with pytest.raises(NonFiniteError, match=r"no weight was changed; rank 0: micro-batch 0 with rows \[0\]: loss (nan|inf)"):
        engine.train_step(rows(True), MicroBatching(1), broken)
    assert all(torch.equal(before[name], tensor) for name, tensor in state(engine).items())


def test_a_norm_that_overflows_ends_the_run_though_loss_and_gradients_are_finite(
    make_engine: Callable[..., TrainEngine],
) -> None:
    engine = make_engine(clip_grad=1.0)

    def huge(inputs: LossInputs) -> LossOutput:
        loss = negative_log_prob(inputs)
        return LossOutput(loss.loss_sum * 1e30, loss.count)

    before = state(engine)
    words = r"the norm of the gradient is not finite \(inf\) though .*; no weight was changed"
    with pytest.raises(NonFiniteError, match=words):
        engine.train_step(rows(True), MicroBatching(1), huge)
    assert all(torch.equal(before[name], tensor) for name, tensor in state(engine).items())


@pytest.mark.parametrize(
    "keys", [{}, {"bf16": True}, {"use_distributed_optimizer": True}], ids=["float32", "bf16", "distributed"]
)
def test_the_norm_that_is_read_with_the_metrics_is_megatrons_to_the_bit(
    make_engine: Callable[..., TrainEngine], keys: dict[str, Any]
) -> None:
    engine = make_engine(clip_grad=0.5, **keys)
    norms = []

    def compute_norm() -> None:
        assert engine.optimizer is not None
        norms.append(engine.optimizer.get_grad_norm())

    engine.on_gradients.append(compute_norm)
    results = [engine.train_step(rows(True, True), MicroBatching(1), negative_log_prob).grad_norm for _ in range(3)]
    assert results == norms and norms[0] > 0.5


def test_a_gradient_that_is_not_finite_ends_the_run_though_the_loss_is(make_engine: Callable[..., TrainEngine]) -> None:
    engine = make_engine()
    before = state(engine)

    def broken(inputs: LossInputs) -> LossOutput:
        loss = negative_log_prob(inputs)
        inputs.outputs[0].register_hook(lambda gradient: gradient * float("nan"))
        return loss

    with pytest.raises(NonFiniteError, match="no weight was changed; rank 0: a gradient is not finite"):
        engine.train_step(rows(True), MicroBatching(1), broken)
    assert all(torch.equal(before[name], tensor) for name, tensor in state(engine).items())
