"""The training engines by name: the only place that knows which one a role has."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from mindspeed_rl.config import MegatronConfig
from mindspeed_rl.engine.build import batch_shape, build_model
from mindspeed_rl.engine.built_model import BuiltModel
from mindspeed_rl.engine.checkpoint import MegatronFiles
from mindspeed_rl.engine.fsdp.checkpoint import DcpFiles
from mindspeed_rl.engine.fsdp.engine import FsdpEngine
from mindspeed_rl.engine.fsdp.model import build_sharded_model
from mindspeed_rl.engine.interface import Adapters, Engine, StateFiles
from mindspeed_rl.engine.lora import MegatronAdapters
from mindspeed_rl.engine.lora_layers import LoraSettings
from mindspeed_rl.engine.router_replay import ExpertReplay, RoutedLayers
from mindspeed_rl.engine.train_engine import TrainEngine
from mindspeed_rl.engine.weights import list_local_weights
from mindspeed_rl.models.plan import ModelPlan
from mindspeed_rl.resharding.layouts import full_slice
from mindspeed_rl.resharding.shard_stream import ShardStream
from mindspeed_rl.resharding.transfer import Sources, WeightSource, WeightStream
from mindspeed_rl.resharding.weight_copies import WeightCopies


@dataclass(frozen=True)
class PassSettings:
    """The settings with which a role computes its rows.

    Attributes:
        packed: rows follow each other in one sequence instead of being padded.
        pad_id: token of the padding.
        temperature: logits are divided by it.
        fixed_width: tokens to which padded rows are padded; 0 for the longest of their micro-batch.
        shares_prefixes: see `BatchShape`.
    """

    packed: bool
    pad_id: int
    temperature: float
    fixed_width: int = 0
    shares_prefixes: bool = False


@dataclass(frozen=True)
class BuiltEngine:
    """An engine with what belongs to it.

    Attributes:
        build_stream: returns its weights for weight sync and export, once they are loaded; collective.
        files: form of its state in a checkpoint.
        adapters: its low-rank adapters; None without.
        replay_experts: has routers take the experts of rows that have them from now on; for a model with experts.
        read_gradients: returns the gradients of a step by HF name, called by `Engine.on_gradients` in a world of one rank.
    """

    engine: Engine
    build_stream: Callable[[], WeightSource]
    files: StateFiles
    replay_experts: Callable[[], ExpertReplay]
    read_gradients: Callable[[], dict[str, Tensor]]
    adapters: Adapters | None = None


def _build_megatron(
    config: MegatronConfig, plan: ModelPlan, hf_folder: Path, passes: PassSettings, trains: bool
) -> BuiltEngine:
    model = build_model(config, plan, trainable=trains)
    shape = batch_shape(
        config,
        packed=passes.packed,
        pad_id=passes.pad_id,
        fixed_width=passes.fixed_width,
        shares_prefixes=passes.shares_prefixes,
        vision=plan.model_config.vision,
        num_predictions=plan.model_config.mtp_num_layers if trains else 0,
    )
    engine = TrainEngine(config, model, shape, temperature=passes.temperature)
    if (copies := WeightCopies.build(config, model)) is not None:
        engine.add_part(copies)
    settings = LoraSettings.from_config(config)
    return BuiltEngine(
        engine,
        lambda: WeightStream(model),
        MegatronFiles(engine),
        lambda: _replay_experts(engine),
        lambda: read_buffers(model),
        None if settings is None else MegatronAdapters(model, settings),
    )


def _replay_experts(engine: TrainEngine) -> RoutedLayers:
    layers = RoutedLayers(engine.model)
    engine.add_part(layers)
    return layers


def read_buffers(model: BuiltModel) -> dict[str, Tensor]:
    """Return Megatron's gradients as HF tensors, in a world of one rank."""
    weights = list_local_weights(model)
    trained = [weight for weight in weights if weight.parameter is not None and weight.parameter.requires_grad]
    # Megatron's mark on a parameter: its gradient in the flat buffer
    gradients = [replace(weight, tensor=cast(Any, weight.parameter).main_grad, merged=None) for weight in trained]
    sources, read = Sources(gradients, {}), {}
    for op in (weight.op for weight in gradients):
        for name, shape in zip(op.hf, op.shapes):
            read[name] = torch.empty(shape)
            sources.read(name, full_slice(shape), read[name])
    return read


def _build_fsdp(config: MegatronConfig, plan: ModelPlan, hf_folder: Path, passes: PassSettings, trains: bool) -> BuiltEngine:
    model = build_sharded_model(config, plan, hf_folder, trains=trains)
    packed = passes.packed and plan.architecture.packs
    shape = batch_shape(
        config,
        packed=packed,
        pad_id=passes.pad_id,
        fixed_width=passes.fixed_width,
        shares_prefixes=packed and passes.shares_prefixes,
        vision=plan.model_config.vision,
    )
    engine = FsdpEngine(config, model, shape, temperature=passes.temperature)
    return BuiltEngine(
        engine,
        lambda: ShardStream(model),
        DcpFiles(engine),
        engine.replay_experts,
        engine.read_gradients,
        model.adapters,
    )


#: value of the key `engine` -> function that builds it; collective over the training world
ENGINES: dict[str, Callable[[MegatronConfig, ModelPlan, Path, PassSettings, bool], BuiltEngine]] = {
    "megatron": _build_megatron,
    "fsdp": _build_fsdp,
}


def build_engine(
    config: MegatronConfig, plan: ModelPlan, hf_folder: Path, passes: PassSettings, *, trains: bool
) -> BuiltEngine:
    """Build the engine that the role's keys name, with random or empty weights; collective over the training world.

    Args:
        config: keys of the role.
        plan: plan of its model.
        hf_folder: has config.json.
        passes: how rows are computed.
        trains: an optimizer changes the weights.
    """
    return ENGINES[config.engine](config, plan, hf_folder, passes, trains)
