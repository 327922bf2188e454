"""Records of a probe of the training engine against results of the model without one."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from mindspeed_rl.algorithms.interfaces import LossInputs, LossOutput
from mindspeed_rl.dumps.record import Cut
from mindspeed_rl.engine.batching import MicroBatching, Rows
from mindspeed_rl.engine.probe import ModelProbe
from mindspeed_rl.engine.train_engine import TrainEngine


class Kept:
    """A sink that keeps what it is given."""

    def __init__(self, *, takes_backward: bool = False) -> None:
        self.takes_backward = takes_backward
        self.gradients: dict[str, Tensor] = {}
        self.tensors: dict[str, Tensor] = {}
        self.orders: list[int] = []

    def add(
        self, name: str, order: int, tensor: Tensor, *, cut: Cut | None = None, everywhere: bool = False,
        kind: str = "Tensor", is_gradient: bool = False,
    ) -> None:  # fmt: skip
        if is_gradient:
            self.gradients[name] = gradient = tensor.detach().clone()
            assert gradient.shape == self.tensors[name].shape and kind != "Tensor"
            return
        assert name not in self.tensors and cut is None and everywhere == (".gradients." in name)
        self.tensors[name] = tensor.detach().clone()
        self.orders.append(order)


def rows() -> Rows:
    generator = torch.Generator().manual_seed(0)
    ids = [torch.randint(2, 67, (size,), generator=generator) for size in (5, 7, 4)]
    return Rows(ids, [2, 3, 1], {"weights": [torch.ones(len(row) - size) for row, size in zip(ids, (2, 3, 1))]})


def loss(inputs: LossInputs) -> LossOutput:
    mask = inputs.mask
    return LossOutput(-(inputs.outputs[0] * inputs.columns["weights"] * mask).sum(), mask.sum())


def step(engine: TrainEngine, kept: Kept | None = None, **keys: bool) -> float:
    if kept is None:
        return engine.train_step(rows(), MicroBatching(2), loss).grad_norm
    with ModelProbe(engine, kept, **keys).recording() as probe:
        return engine.train_step(rows(), MicroBatching(2), probe.loss(probe.inputs(loss))).grad_norm


def num_hooks(engine: TrainEngine) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for model in engine.model.models for m in model.modules())


def test_an_update_is_recorded_in_full_and_computes_the_same_as_without_a_probe(
    make_engine: Callable[..., TrainEngine],
) -> None:
    engine, kept = make_engine(clip_grad=0.0), Kept()
    before = num_hooks(engine)
    norm = step(engine, kept)
    assert num_hooks(engine) == before and engine.on_gradients == []
    names = list(kept.tensors)
    assert len(set(kept.orders)) == len(names)
    assert [name for name in names if name.startswith("update_0.micro_0.")][:8] == [
        "update_0.micro_0." + name
        for name in (
            "embedding",
            "layers.0.attention",
            "layers.0.mlp",
            "layers.0.output",
            "layers.1.attention",
            "layers.1.mlp",
            "layers.1.output",
            "final_norm",
        )
    ]
    tensors = {name.removeprefix("update_0."): tensor for name, tensor in kept.tensors.items()}
    # the residual stream: what a layer adds is its attention and its feed-forward network
    stream = tensors["micro_0.embedding"] + tensors["micro_0.layers.0.attention"] + tensors["micro_0.layers.0.mlp"]
    torch.testing.assert_close(stream, tensors["micro_0.layers.0.output"])
    # three rows in micro-batches of two; the responses have 3, 4 and 3 tokens
    assert tensors["micro_0.loss.count"] == 7 and tensors["micro_1.loss.count"] == 3
    head = tensors["micro_0.head"]
    assert head.shape[:2] == (2, 2)
    torch.testing.assert_close(-head[0].sum(), tensors["micro_0.loss.sum"])
    torch.testing.assert_close(head[0], tensors["micro_0.loss_inputs.outputs.0"])
    squares = sum(float(tensor.double().square().sum()) for name, tensor in tensors.items() if name.startswith("gradients."))
    assert abs(squares**0.5 - norm) < 1e-5 * norm
    assert tensors["gradients.model.embed_tokens.weight"].shape == (67, 32)
    assert tensors["gradients.model.layers.1.self_attn.k_proj.weight"].shape == (16, 32)
    assert norm == step(make_engine(clip_grad=0.0))


def test_gradients_of_outputs_are_those_of_the_residual_stream(make_engine: Callable[..., TrainEngine]) -> None:
    """The output of a layer is the stream plus its feed-forward network, so both have one gradient; the update is the same."""
    kept = Kept(takes_backward=True)
    assert step(make_engine(clip_grad=0.0), kept) == step(make_engine(clip_grad=0.0))
    modules = {name for name in kept.tensors if name.endswith((".embedding", ".attention", ".mlp", ".output", ".final_norm"))}
    assert kept.gradients.keys() == modules and len(modules) == 2 * 8
    for micro in range(2):
        for layer in range(2):
            gradient = kept.gradients[f"update_0.micro_{micro}.layers.{layer}.mlp"]
            assert gradient.abs().max() > 0
            torch.testing.assert_close(gradient, kept.gradients[f"update_0.micro_{micro}.layers.{layer}.output"])


def test_what_recomputation_computes_again_is_left_out(make_engine: Callable[..., TrainEngine]) -> None:
    keys = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    plain, recomputed = Kept(), Kept()
    step(make_engine(), plain)
    step(make_engine(**keys), recomputed)  # the sink refuses a name that comes twice
    assert plain.tensors.keys() == recomputed.tensors.keys()


def test_losses_alone_need_no_hooks(make_engine: Callable[..., TrainEngine]) -> None:
    kept = Kept()
    step(make_engine(), kept, modules=False)
    kinds = {name.split(".", 2)[2] for name in kept.tensors}
    assert kinds == {
        "loss_inputs.outputs.0", "loss_inputs.outputs.1", "loss_inputs.mask", "loss_inputs.weights", "loss.sum", "loss.count"
    }  # fmt: skip


def test_a_forward_pass_is_recorded_by_micro_batch(make_engine: Callable[..., TrainEngine]) -> None:
    engine, kept = make_engine(), Kept()
    engine.optimizer = None  # as of a reference
    with ModelProbe(engine, kept).recording():
        log_probs, _ = engine.forward(rows(), MicroBatching(2)) or ([], [])
    torch.testing.assert_close(kept.tensors["micro_1.head"][0, 0, :3], log_probs[2])
