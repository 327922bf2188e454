"""Routers of earlier releases of transformers under FSDP2: a method of the layer chooses experts, and not the router."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mindspeed_rl.engine.fsdp.replay import ModuleReplay
from mindspeed_rl.engine.fsdp.routers import ExpertBalance

TOKENS, EXPERTS, TOPK, WIDTH = 3, 4, 2, 8
GIVEN = torch.tensor([[0, 3], [-1, -1], [2, 1]])


class LogitRouter(nn.Module):
    """A router that returns only logits, as DeepSeek-V3's in transformers 5.10."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(EXPERTS, WIDTH, generator=torch.Generator().manual_seed(0)))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.t()


class Layer(nn.Module):
    """A layer with experts of transformers 5.10: with a router, as in DeepSeek-V3, or without, as in DeepSeek-V2."""

    def __init__(self, *, has_router: bool) -> None:
        super().__init__()
        self.gate = LogitRouter() if has_router else nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = nn.Identity()

    def route_tokens_to_experts(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        scores = logits.sigmoid()
        chosen = torch.topk(scores, k=TOPK, dim=-1, sorted=False)[1]
        weights = scores.gather(1, chosen)
        return chosen, weights / weights.sum(-1, keepdim=True)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.route_tokens_to_experts(x @ self.gate.weight.t())


def build_model(layer: Layer) -> Any:
    name = "layer.mlp.gate.weight"
    op = SimpleNamespace(layer=0, mcore="decoder.layers.0.mlp.router.weight", hf=(name,))
    shape = SimpleNamespace(
        num_moe_experts=EXPERTS,
        moe_router_topk=TOPK,
        moe_router_biased_softmax=False,
        moe_router_score_function="sigmoid",
    )
    plan = SimpleNamespace(
        model_config=shape,
        architecture=SimpleNamespace(weight_ops=lambda _: [op]),
        balancing=SimpleNamespace(coeff=0.1, z_coeff=0.0),
    )
    root = nn.ModuleDict({"layer": nn.ModuleDict({"mlp": layer})})
    places = {name: SimpleNamespace(parameter=name)}
    return SimpleNamespace(plan=plan, places=places, module=SimpleNamespace(model=root), adapters=None)


@pytest.mark.parametrize("has_router", [True, False])
def test_given_experts_take_the_place_of_the_choice_of_a_layer(has_router: bool) -> None:
    layer = Layer(has_router=has_router)
    x = torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(1))
    own, _ = layer(x)
    replay = ModuleReplay(build_model(layer))
    replay.arm(SimpleNamespace(input_ids=torch.zeros(1, TOKENS), routing=GIVEN[:, None]))  # pyrefly: ignore[bad-argument-type]
    chosen, weights = layer(x)
    expected = torch.where(GIVEN >= 0, GIVEN, own)
    assert torch.equal(chosen, expected)
    scores = (x @ layer.gate.weight.t()).sigmoid().gather(1, expected)
    assert torch.equal(weights, scores / scores.sum(-1, keepdim=True))
    replay.reset()
    assert torch.equal(layer(x)[0], own)


def test_a_second_replay_takes_the_place_of_the_first() -> None:
    layer = Layer(has_router=True)
    model = build_model(layer)
    first, second = ModuleReplay(model), ModuleReplay(model)
    x = torch.randn(TOKENS, WIDTH)
    own, _ = layer(x)
    batch: Any = SimpleNamespace(input_ids=torch.zeros(1, TOKENS), routing=GIVEN[:, None])
    first.arm(batch)
    assert torch.equal(layer(x)[0], own)
    second.arm(batch)
    assert torch.equal(layer(x)[0], torch.where(GIVEN >= 0, GIVEN, own))


def test_a_layer_without_a_router_is_not_balanced() -> None:
    config: Any = SimpleNamespace(moe_router_bias_update_rate=0.0, context_parallel_size=1)
    with pytest.raises(ValueError, match="Layer of transformers .* has no router"):
        ExpertBalance(config, build_model(Layer(has_router=False)))
    ExpertBalance(config, build_model(Layer(has_router=True)))
