"""Dropout of adapters under FSDP2: in an update only, and before A only."""

from __future__ import annotations

import functools

import torch
from torch import nn

from mindspeed_rl.engine.fsdp.lora import AdapterSwitch, _add_low_rank
from mindspeed_rl.engine.lora_layers import LoraSettings


def test_inputs_of_adapters_are_dropped_in_an_update_only() -> None:
    torch.manual_seed(0)
    layer, a, b = nn.Linear(6, 4), nn.Linear(6, 2, bias=False), nn.Linear(2, 4, bias=False)
    layer.add_module("lora_A", nn.ModuleDict({"default": a}))
    layer.add_module("lora_B", nn.ModuleDict({"default": b}))
    settings = LoraSettings(r=2, alpha=4, dropout=0.5, targets=("linear_fc1",))
    layer.register_forward_hook(functools.partial(_add_low_rank, settings, AdapterSwitch()))
    x = torch.randn(3, 6)
    base = x @ layer.weight.T + layer.bias
    torch.testing.assert_close(layer.eval()(x), base + 2.0 * (x @ a.weight.T) @ b.weight.T)
    torch.manual_seed(1)
    kept = nn.functional.dropout(torch.ones_like(x), 0.5)  # 0 or 2
    torch.manual_seed(1)
    torch.testing.assert_close(layer.train()(x), base + 2.0 * ((x * kept) @ a.weight.T) @ b.weight.T)
    assert not torch.equal(kept, torch.ones_like(kept))
