"""The bounds of the product of features let rounding through, and no gradient that is missing or halved."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import tiny_hf
import torch
from product_bounds import InconclusiveError, check_gradients
from slow_product import _round_output
from slow_reference import Margins, SlowModel, Step
from torch import Tensor

_Chosen = list[list[Tensor]]


def _find_gradients(model: SlowModel, texts: list[list[int]], experts: _Chosen | None) -> tuple[dict[str, np.ndarray], _Chosen]:
    """Gradients of the log-probs of texts, and the experts of their tokens."""
    model.model.zero_grad()
    chosen = []
    for place, ids in enumerate(texts):
        log_probs, _ = model.read(ids, 3, None if experts is None else experts[place])
        (log_probs * torch.linspace(-1, 1, len(log_probs))).mean().backward()
        chosen.append(list(model.chosen))
    gradients = {
        name: weight.grad[part] for name, (weight, part) in model.named_parameters().items() if weight.grad is not None
    }
    return {name: value.double().numpy() for name, value in gradients.items()}, chosen


@pytest.mark.parametrize("kind", ["moe_mixed", "deepseek"])
def test_a_missing_or_halved_gradient_of_an_expert_fails_in_bfloat16_and_rounding_does_not(tmp_path: Path, kind: str) -> None:
    tiny_hf.build(kind).save_pretrained(tmp_path)
    exact, rounded, run = (SlowModel(str(tmp_path), 1.0, Margins()) for _ in range(3))
    generator = torch.Generator().manual_seed(4)
    texts = torch.randint(3, 128, (8, 20), generator=generator).tolist()
    with torch.no_grad():
        for model in (exact, rounded):
            for weight in model.model.parameters():
                weight.copy_(weight.bfloat16().double())
    for module in rounded.model.modules():
        module.register_forward_hook(_round_output)
    run.model.bfloat16()
    gradients, experts = _find_gradients(exact, texts, None)
    moved, _ = _find_gradients(rounded, texts, experts)
    found, _ = _find_gradients(run, texts, experts)  # by torch in bfloat16

    def check(values: dict[str, np.ndarray], *, free: bool = False) -> None:
        steps = Step(gradients, 1.0), Step(moved, 1.0)
        check_gradients(values, *steps, is_rough=True, where="the actor", routes_freely=free)

    check(found)
    names = [name for name in found if ".experts." in name]
    assert len(names) >= 12
    total = np.sqrt(sum(np.square(value).sum() for value in gradients.values()))
    for name in names:
        assert np.linalg.norm(gradients[name]) > 0.005 * total, name
        for factor in (0.0, 0.5, 2.0):
            with pytest.raises(AssertionError, match="gradient"):
                check(found | {name: factor * found[name]})
            with pytest.raises((AssertionError, InconclusiveError), match="gradient"):
                check(found | {name: factor * found[name]}, free=True)


def test_rounding_that_hides_a_part_of_a_gradient_makes_a_run_inconclusive_and_no_fault_of_another_one() -> None:
    right = {"one": np.ones(4), "other": np.full(4, 0.5)}
    moved = Step(right | {"one": 1.08 * right["one"]}, 1.0)

    def check(found: dict[str, np.ndarray]) -> None:
        check_gradients(found, Step(right, 1.0), moved, is_rough=True, where="the actor")

    with pytest.raises(InconclusiveError, match="gradient one"):
        check(right)
    with pytest.raises(AssertionError, match="gradient other"):
        check(right | {"other": 0.5 * right["other"]})
    plain = Step(right, 1.0)
    check_gradients({name: 0.95 * value for name, value in right.items()}, plain, plain, is_rough=True, where="the actor")
    with pytest.raises(AssertionError, match="all gradients"):
        check_gradients({name: 0.87 * value for name, value in right.items()}, plain, plain, is_rough=True, where="the actor")
