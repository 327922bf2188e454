# ruff: noqa: E402  (Megatron must be imported after the adaptor)
"""Adapts this process, loads everything the engine uses of Megatron, and prints what it finds, as JSON."""

from __future__ import annotations

import importlib
import json
import pkgutil
import sys
import warnings

import torch
import torch._dynamo  # wraps torch.manual_seed; some releases of Megatron import it

warnings.filterwarnings("ignore")
before = (torch.empty, torch.tensor, torch.device, torch.cuda, torch.cuda.is_available, torch.compile, torch.manual_seed)

from mindspeed_rl import adaptors, platform

platform.select("cpu")
adaptors.apply("train")
adaptors.apply("train")

import mindspeed_rl.engine
import mindspeed_rl.resharding
from mindspeed_rl.adaptors import torch_facade

# imported by `lora` where Megatron has the class that it adapts
of_some_releases = {"mindspeed_rl.engine.lora_experts"}
for package in (mindspeed_rl.engine, mindspeed_rl.resharding):
    for module_info in pkgutil.iter_modules(package.__path__, package.__name__ + "."):
        if module_info.name not in of_some_releases:
            importlib.import_module(module_info.name)
for name in ("optimizer.distrib_optimizer", "transformer.moe.experts", "transformer.multi_latent_attention"):
    importlib.import_module(f"megatron.core.{name}")

modules = {name: vars(module) for name, module in sys.modules.items() if name.startswith("megatron.core.")}
facade = torch_facade.facade
print(
    json.dumps(
        {
            "modules": len(modules),
            "real torch": sorted(name for name, names in modules.items() if names.get("torch") is torch),
            "torch unchanged": before
            == (torch.empty, torch.tensor, torch.device, torch.cuda, torch.cuda.is_available, torch.compile, torch.manual_seed),
            "cuda available": [torch.cuda.is_available(), facade.cuda.is_available()],
            "facade device": str(facade.zeros(1, device="cuda:0").device),
            "facade is a device type": isinstance(torch.device("cpu"), facade.device),
            "other libraries": sorted({"vllm", "ray", "torch_npu", "mindspeed"} & set(sys.modules)),
        }
    )
)
