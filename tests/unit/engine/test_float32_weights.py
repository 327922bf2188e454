"""Weights in 16 bits that move by small steps go as far as in float32, also across a checkpoint; scores are not rounded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from megatron.core import parallel_state

from mindspeed_rl.engine.checkpoint import CheckpointSaver, load_checkpoint
from mindspeed_rl.engine.train_engine import TrainEngine
from mindspeed_rl.engine.weights import Float32Weights, list_local_weights
from mindspeed_rl.models.reward_model import _ScoreHead

ALPHA = 0.1


def _targets(engine: TrainEngine) -> list[torch.Tensor]:
    """The weights with one unit in the last place added to each: no step of a tenth of it fits bfloat16."""
    return [(w.tensor.view(torch.int16) + 1).view(torch.bfloat16) for w in list_local_weights(engine.model)]


def _mix(engine: TrainEngine, targets: list[torch.Tensor], steps: int) -> None:
    for _ in range(steps):
        for weight, target in zip(list_local_weights(engine.model), targets):
            engine.stored_weights.mix(weight, target, ALPHA)


def _follow(make_engine: Callable[..., TrainEngine]) -> TrainEngine:
    engine = make_engine(bf16=True, no_save_optim=True, no_load_optim=True)
    engine.stored_weights = Float32Weights(engine.model)
    return engine


def test_twenty_mixes_go_as_far_as_their_formula(make_engine: Callable[..., TrainEngine]) -> None:
    engine = _follow(make_engine)
    start, targets = [w.tensor.clone() for w in list_local_weights(engine.model)], _targets(engine)
    _mix(engine, targets, 1)
    assert all(torch.equal(w.tensor, old) for w, old in zip(list_local_weights(engine.model), start))  # rounded away
    _mix(engine, targets, 19)
    for weight, old, target in zip(list_local_weights(engine.model), start, targets):
        right = old.double() + (1 - (1 - ALPHA) ** 20) * (target.double() - old.double())
        torch.testing.assert_close(weight.tensor, right.to(torch.bfloat16), rtol=0, atol=0)


def test_a_checkpoint_resumes_between_two_representable_weights(
    make_engine: Callable[..., TrainEngine], tmp_path: Path
) -> None:
    through, resumed = _follow(make_engine), _follow(make_engine)
    start, targets = [w.tensor.clone() for w in list_local_weights(through.model)], _targets(through)
    _mix(through, targets, 4)  # a third of the way
    saver = CheckpointSaver(through, tmp_path)
    saver.save(1, {})
    saver.finish()
    _mix(through, targets, 3)  # half of it, and beyond
    load_checkpoint(resumed, tmp_path)
    assert all(torch.equal(w.tensor, old) for w, old in zip(list_local_weights(resumed.model), start))
    _mix(resumed, targets, 3)
    pairs = list(zip(list_local_weights(through.model), list_local_weights(resumed.model), targets))
    assert all(torch.equal(first.tensor, two.tensor) and torch.equal(first.tensor, target) for first, two, target in pairs)


def test_scores_of_a_bfloat16_model_are_not_rounded(make_engine: Callable[..., TrainEngine]) -> None:
    config = make_engine(bf16=True).model.transformer_config
    head = _ScoreHead(config, parallel_state.get_tensor_model_parallel_group(), torch.device("cpu"))
    hidden = torch.randn(9, 1, config.hidden_size, generator=torch.Generator().manual_seed(1)).bfloat16().requires_grad_()
    scores = 100 * head(hidden)
    right = 100 * (hidden.double() @ head.weight.double().t())
    assert scores.dtype == torch.float32 and torch.allclose(scores.double(), right, rtol=1e-5, atol=1e-5)
    assert not torch.equal(scores.bfloat16().float(), scores)
    scores.sum().backward()
    assert hidden.grad.dtype == head.weight.grad.dtype == torch.bfloat16
