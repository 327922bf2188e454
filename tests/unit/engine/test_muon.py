"""Muon against its formula in float64, against torch's Muon, and AdamW for everything else."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor

from mindspeed_rl.algorithms.interfaces import LossInputs, LossOutput
from mindspeed_rl.config import MegatronConfig
from mindspeed_rl.engine.batching import MicroBatching, Rows
from mindspeed_rl.engine.muon import MuonAdamW, _Matrix, orthogonalize
from mindspeed_rl.engine.train_engine import TrainEngine
from mindspeed_rl.engine.weights import list_local_weights
from mindspeed_rl.resharding.layouts import full_slice
from mindspeed_rl.resharding.transfer import Sources

LR, DECAY = 0.02, 0.1


def orthogonal_factor(update: np.ndarray, steps: int) -> np.ndarray:
    """The same by its singular values: an odd polynomial of a matrix acts on each singular value."""
    u, s, vt = np.linalg.svd(update, full_matrices=False)
    s = s / math.sqrt((s**2).sum())
    for _ in range(steps):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    return u @ np.diag(s) @ vt


@pytest.mark.parametrize("shape", [(6, 6), (12, 5), (4, 9), (3, 2)])
@pytest.mark.parametrize("steps", [1, 5])
def test_newton_schulz_steps_are_a_polynomial_of_the_singular_values(shape: tuple[int, int], steps: int) -> None:
    update = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape)))
    before = update.clone()
    expected = orthogonal_factor(update.numpy(), steps)
    np.testing.assert_allclose(orthogonalize(update, steps).numpy(), expected, rtol=1e-9, atol=1e-12)
    assert torch.equal(update, before)


def test_five_steps_bring_singular_values_near_one_and_nothing_stays_nothing() -> None:
    update = torch.randn(32, 48, generator=torch.Generator().manual_seed(0))
    values = torch.linalg.svdvals(orthogonalize(update, 5))
    assert 0.6 < values.min() and values.max() < 1.3
    assert not orthogonalize(torch.zeros(3, 4), 5).any()


def make(weights: list[Tensor], matrices: dict[int, _Matrix], **keys: Any) -> tuple[MuonAdamW, list[torch.nn.Parameter]]:
    parameters = [torch.nn.Parameter(weight.clone()) for weight in weights]
    config = MegatronConfig(**{"lr": LR, "weight_decay": DECAY, "optimizer": "muon", **keys})
    groups = [{"params": parameters, "lr": LR, "weight_decay": DECAY}]
    return MuonAdamW(groups, {parameters[index]: matrix for index, matrix in matrices.items()}, config), parameters


def random_weights(*shapes: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(shape, dtype=torch.float64, generator=generator) for shape in shapes]


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize(
    ("mode", "scale"), [("spectral", math.sqrt(8)), ("unit_rms_norm", math.sqrt(8 / 5)), ("shape_scaling", math.sqrt(8 / 5))]
)
def test_steps_equal_the_formula_in_float64(nesterov: bool, mode: str, scale: float) -> None:
    keys = {"muon_use_nesterov": nesterov, "muon_scale_mode": mode, "muon_extra_scale_factor": 0.3, "muon_momentum": 0.8}
    optimizer, (weight,) = make(random_weights((8, 5)), {0: _Matrix()}, **keys)
    expected, momentum = weight.detach().numpy().copy(), np.zeros((8, 5))
    for gradient in random_weights((8, 5), (8, 5), (8, 5)):
        weight.grad = gradient.clone()
        optimizer.step()
        # the sum of Keller Jordan's text: another length, the same direction
        momentum = 0.8 * momentum + gradient.numpy()
        update = gradient.numpy() + 0.8 * momentum if nesterov else momentum
        expected = (1 - LR * DECAY) * expected - LR * 0.3 * scale * orthogonal_factor(update, 5)
        np.testing.assert_allclose(weight.detach().numpy(), expected, rtol=1e-9, atol=1e-12)


def test_queries_keys_and_values_of_a_fused_projection_are_three_matrices() -> None:
    # two query groups, each of two query heads, a key and a value head of three rows
    optimizer, (weight,) = make(random_weights((24, 5)), {0: _Matrix(heads=(6, 3, 3))}, weight_decay=0.0)
    optimizer.param_groups[0]["weight_decay"] = 0.0
    (gradient,) = random_weights((24, 5))
    before = weight.detach().numpy().copy()
    weight.grad = gradient.clone()
    optimizer.step()
    rows = {"q": [*range(6), *range(12, 18)], "k": [*range(6, 9), *range(18, 21)], "v": [*range(9, 12), *range(21, 24)]}
    for part in rows.values():
        direction = orthogonal_factor(gradient.numpy()[part], 5) * math.sqrt(max(len(part), 5))
        np.testing.assert_allclose((before - weight.detach().numpy())[part], LR * direction, rtol=1e-9, atol=1e-12)


def test_other_parameters_move_as_with_torch_s_adamw() -> None:
    weights = random_weights((4, 3), (5,))
    optimizer, ours = make(weights, {}, adam_beta1=0.8, adam_beta2=0.95, adam_eps=1e-6)
    theirs = [torch.nn.Parameter(weight.clone()) for weight in weights]
    reference = torch.optim.AdamW(theirs, lr=LR, betas=(0.8, 0.95), eps=1e-6, weight_decay=DECAY)
    for seed in range(4):
        for mine, other in zip(ours, theirs):
            mine.grad = torch.randn(mine.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
            other.grad = mine.grad.clone()
        optimizer.step()
        reference.step()
    for mine, other in zip(ours, theirs):
        torch.testing.assert_close(mine, other, rtol=1e-12, atol=1e-14)


def test_steps_are_those_of_torch_s_muon_up_to_its_rounding() -> None:
    weights = [weight.float() for weight in random_weights((16, 8))]
    optimizer, (ours,) = make(weights, {0: _Matrix()}, muon_use_nesterov=True, muon_scale_mode="shape_scaling")
    theirs = torch.nn.Parameter(weights[0].clone())
    reference = torch.optim.Muon([theirs], lr=LR, weight_decay=DECAY, momentum=0.95, nesterov=True)
    for seed in range(3):
        ours.grad = torch.randn(16, 8, generator=torch.Generator().manual_seed(seed))
        theirs.grad = ours.grad.clone()
        optimizer.step()
        reference.step()
    moved, expected = ours.detach() - weights[0], theirs.detach() - weights[0]
    # it multiplies in bfloat16
    assert (moved - expected).norm() < 0.02 * expected.norm()


def step_loss(inputs: LossInputs) -> LossOutput:
    losses = torch.where(inputs.mask, -inputs.outputs[0], 0)
    return LossOutput(losses.sum(), inputs.mask.sum())


def test_a_tiny_model_learns_a_text_and_its_state_is_of_the_right_kinds(make_engine: Callable[..., TrainEngine]) -> None:
    engine = make_engine(optimizer="muon", muon_extra_scale_factor=0.2, lr=1e-2, weight_decay=0.0)
    generator = torch.Generator().manual_seed(1)
    rows = Rows([torch.randint(2, 60, (12,), generator=generator) for _ in range(4)], [2] * 4)
    losses = [
        float(sum(loss.loss_sum for loss in result.losses) / sum(loss.count for loss in result.losses))
        for result in (engine.train_step(rows, MicroBatching(4), step_loss) for _ in range(40))
    ]
    assert losses[0] > 3.5 and losses[-1] < 0.5
    names = {name: parameter for name, parameter in engine.chunks[0].named_parameters()}
    (inner,) = (part.optimizer for part in getattr(engine.optimizer, "chained_optimizers", [engine.optimizer]))
    kinds = {name: set(inner.state[parameter]) for name, parameter in names.items()}
    assert {name for name, kind in kinds.items() if kind == {"momentum_buffer"}} == {
        name for name, parameter in names.items() if parameter.dim() == 2 and "embedding" not in name
    }
    assert all(kind == {"exp_avg", "exp_avg_sq"} for kind in kinds.values() if kind != {"momentum_buffer"})
    matrices = sum(names[name].numel() for name, kind in kinds.items() if kind == {"momentum_buffer"})
    count = sum(parameter.numel() for parameter in names.values())
    assert engine.offloader.resident_bytes()["optimizer"] == 4 * (2 * count - matrices)
    before = {name: [value.clone() for value in inner.state[parameter].values()] for name, parameter in names.items()}
    engine.offloader.offload(optimizer=True)
    assert engine.offloader.resident_bytes()["optimizer"] == 0
    engine.offloader.onload(optimizer=True)
    for name, parameter in names.items():
        assert all(map(torch.equal, before[name], inner.state[parameter].values()))


def read_all(engine: TrainEngine, *, gradients: bool) -> dict[str, np.ndarray]:
    """Return copies of all weights, or of their gradients, by their names in Hugging Face's files."""
    found = {}
    weights = [w for w in list_local_weights(engine.model) if not gradients or hasattr(w.parameter, "main_grad")]
    if gradients:
        weights = [dataclasses.replace(w, tensor=w.parameter.main_grad) for w in weights]  # pyrefly: ignore[missing-attribute]
    sources = Sources(weights, {})
    for weight in weights:
        for name, shape in zip(weight.op.hf, weight.op.shapes):
            found[name] = torch.zeros(shape)
            sources.read(name, full_slice(shape), found[name])
    return {name: value.double().numpy() for name, value in found.items()}


def cut_projections(name: str, value: np.ndarray, *, gated: bool, head_dim: int) -> list[np.ndarray]:
    """Return the matrices that one tensor of a file stands for: a gated q_proj has a gate after each head's queries."""
    if not gated or not name.endswith("q_proj.weight"):
        return [value]
    by_head = value.reshape(-1, 2, head_dim, value.shape[1])
    return [by_head[:, part].reshape(-1, value.shape[1]) for part in (0, 1)]


@pytest.mark.parametrize("gated", [True, False], ids=["gate", "no gate"])
@pytest.mark.parametrize("heads", [(8, 4), (8, 2), (4, 4), (24, 4), (6, 2), (3, 1)], ids=str)
def test_a_step_of_fused_attention_is_that_of_the_matrices_in_the_file(
    make_engine: Callable[..., TrainEngine], heads: tuple[int, int], gated: bool
) -> None:
    sizes = {
        "vocab_size": 67,
        "hidden_size": 48,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1],
        "head_dim": 8,
        "max_position_embeddings": 64,
        "tie_word_embeddings": False,
    }
    deltas = {"linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
    hf = (
        transformers.Qwen3_5TextConfig(**sizes, **deltas, full_attention_interval=2)
        if gated
        else transformers.Qwen3Config(**sizes)
    )
    keys = {
        "optimizer": "muon",
        "muon_momentum": 0.0,
        "muon_scale_mode": "unit_rms_norm",
        "weight_decay": 0.0,
        "clip_grad": 0.0,
    }
    torch.manual_seed(0)
    engine = make_engine(model=transformers.AutoModelForCausalLM.from_config(hf), lr=0.5, **keys)
    gradients: dict[str, np.ndarray] = {}
    engine.on_gradients.append(lambda: gradients.update(read_all(engine, gradients=True)))
    generator = torch.Generator().manual_seed(1)
    rows = Rows([torch.randint(2, 60, (12,), generator=generator) for _ in range(4)], [2] * 4)
    before = read_all(engine, gradients=False)
    engine.train_step(rows, MicroBatching(4), step_loss)
    after = read_all(engine, gradients=False)
    names = [name for name in before if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight"))]
    assert len(names) == (3 if gated else 6)
    for name in names:
        cut = [cut_projections(name, values[name], gated=gated, head_dim=8) for values in (before, after, gradients)]
        for first, second, gradient in zip(*cut, strict=True):
            expected = 0.5 * math.sqrt(len(gradient) / gradient.shape[1]) * orthogonal_factor(gradient, 5)
            np.testing.assert_allclose(first - second, expected, rtol=1e-3, atol=1e-5, err_msg=name)
