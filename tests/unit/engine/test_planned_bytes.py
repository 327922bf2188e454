"""Bytes that are planned from shapes against the bytes of models that Megatron built."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from megatron_release import PLAIN_LATENT_QUERIES
from torch.overrides import TorchFunctionMode

sys.path.append(str(Path(__file__).parents[1] / "models"))
import tiny_models

from mindspeed_rl.config import MegatronConfig
from mindspeed_rl.config.keys.ignored import IGNORED
from mindspeed_rl.config.run_files import find_project_configs
from mindspeed_rl.engine import parallel
from mindspeed_rl.engine.attention import CoreAttention
from mindspeed_rl.engine.build import build_model, plan_transformer_config
from mindspeed_rl.engine.offload import Offloader
from mindspeed_rl.engine.policy_model import PolicyModel, ValueModel
from mindspeed_rl.engine.train_engine import TrainEngine
from mindspeed_rl.models.builder import build_gpt_model, layer_spec
from mindspeed_rl.models.layers import RMSNorm
from mindspeed_rl.models.plan import plan_model
from mindspeed_rl.planner.shapes import count_stage_elements, plan_role

MODELS = "llama31-tied qwen2 qwen3 mixtral qwen2-moe qwen3-moe deepseek3 gemma2 glm4".split()
MODELS += ["deepseek2-lite"] * PLAIN_LATENT_QUERIES


@pytest.mark.parametrize("name", MODELS)
def test_planned_parameters_are_those_of_the_built_model(name: str, training_world: None, tmp_path: Path) -> None:
    config_class = tiny_models.CONFIGS[name]()
    architectures = {"architectures": [f"{type(config_class).__name__.removesuffix('Config')}ForCausalLM"]}
    (tmp_path / "config.json").write_text(
        json.dumps({**json.loads(config_class.to_json_string(use_diff=False)), **architectures})
    )
    config = MegatronConfig(bf16=False, load=str(tmp_path))
    parallel._seed_all(1)
    built = build_model(config, plan_model(config, tmp_path), trainable=False)
    (planned,) = count_stage_elements(plan_role(config), config)
    parameters = dict(built.models[0].named_parameters())
    experts = sum(value.numel() for key, value in parameters.items() if ".experts." in key and "shared_experts" not in key)
    assert planned.expert == experts
    assert planned.dense == sum(value.numel() for value in parameters.values()) - experts
    ends = ("embedding", "output_layer")
    matrices = [value for key, value in parameters.items() if value.dim() == 2 and not key.startswith(ends)]
    assert planned.matrices == sum(value.numel() for value in matrices if min(value.shape) > 1)


BLOCKS = {path.stem: yaml.safe_load(path.read_text())[path.stem] for path in (find_project_configs() / "model").glob("*.yaml")}


class _WithoutMemory(TorchFunctionMode):
    """Tensors are made on the meta device, whatever device Megatron names."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func in (torch.empty, torch.zeros, torch.ones)
        return func(*args, **{**(kwargs or {}), **({"device": "meta"} if made else {})})


# of models of images: tests/unit/planner/test_planner_memory.py
@pytest.mark.parametrize("name", sorted(name for name, keys in BLOCKS.items() if "model_type" not in keys))
def test_a_shipped_block_is_counted_as_the_model_that_megatron_builds(name: str, training_world: None) -> None:
    keys = {key: value for key, value in BLOCKS[name].items() if key not in IGNORED["MegatronConfig"]}
    config = MegatronConfig(**keys, bf16=False)
    plan = plan_role(config)
    transformer = plan_transformer_config(config, plan)
    transformer.perform_initialization = False
    spec = layer_spec(plan.model_config, transformer, norm=RMSNorm, core_attention=CoreAttention, layout=plan.layout)
    with _WithoutMemory():
        built = build_gpt_model(
            plan.model_config,
            transformer,
            spec,
            pre_process=True,
            post_process=True,
            vp_stage=None,
            lm_class=PolicyModel,
            reward_class=ValueModel,
        )
    parameters = dict(built.named_parameters())
    (planned,) = count_stage_elements(plan, config)
    assert planned.parameters == sum(value.numel() for value in parameters.values())


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("distributed", [False, True])
def test_planned_gradients_and_optimizer_are_those_of_the_engine(
    bf16: bool, distributed: bool, make_engine: Callable[..., TrainEngine]
) -> None:
    engine = make_engine(bf16=bf16, use_distributed_optimizer=distributed)
    held = list(engine.model.models[0].parameters())
    parameters = sum(value.numel() for value in held)
    assert sum(value.main_grad.numel() * value.main_grad.itemsize for value in held) == 4 * parameters  # what the plan counts
    main = 0
    for optimizer in getattr(engine.optimizer, "chained_optimizers", [engine.optimizer]):
        for group in optimizer.optimizer.param_groups:
            main += sum(value.numel() * value.itemsize for value in group["params"])
    # float32 weights of the optimizer's own under bf16; without, they are the model's
    assert main == 4 * parameters


@pytest.mark.parametrize("distributed", [False, True])
def test_the_engine_measures_the_bytes_of_its_owners(distributed: bool, make_engine: Callable[..., TrainEngine]) -> None:
    engine = make_engine(bf16=True, use_distributed_optimizer=distributed)
    offloader = Offloader(engine.model, engine.optimizer)
    parameters = sum(value.numel() for value in engine.model.models[0].parameters())
    assert engine.offloader.resident_bytes()["gradients"] == 0  # before the first step
    engine.offloader.onload(grads=True)
    held = offloader.resident_bytes()
    # buffers pad each parameter to 64 elements, and there are few small ones
    assert 2 * parameters <= held["weights"] <= 2.2 * parameters + 2048 * 16
    assert 4 * parameters <= held["gradients"] <= 4.4 * parameters + 4096 * 16
    assert held["optimizer"] == 4 * parameters  # before the first step
    offloader.offload(grads=True, optimizer=True)
    assert offloader.resident_bytes() | {"weights": 0} == {"weights": 0, "gradients": 0, "optimizer": 0}
