"""What a training engine cannot do, in one table: by key of a role, and by key of the run; and what it cannot do with a model.

Every key of a role is either read by the engine, or in one of the tables here: refused with a value that is not allowed, or
listed by `explain` as without effect. `tests/unit/run/test_training_engines.py` has the keys that are read.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from pathlib import Path
from typing import Any, Protocol

from mindspeed_rl.config.keys.megatron import MegatronConfig
from mindspeed_rl.config.run import RunConfig
from mindspeed_rl.files import read_json
from mindspeed_rl.models import has_layers
from mindspeed_rl.models.model_config import ModelConfig
from mindspeed_rl.run.record import Run
from mindspeed_rl.run.rules.violation import Broken, violate

_SHARDS = "it divides every weight over the devices, and not layers"
_STACKED = (
    "linear_fc1 and linear_fc2 are layers of experts, which transformers' module has in one stack without adapters; leave them "
    "out, or set engine: megatron"
)


class ModelFamily(Protocol):
    """What the rules read of `models.architecture.Architecture`, whose file imports torch."""

    @property
    def name(self) -> str: ...

    @property
    def module_obstacle(self) -> str: ...

    @property
    def kept_in_float32(self) -> str: ...

    @property
    def packs(self) -> bool: ...


@dataclass(frozen=True)
class _KeyLimit:
    """Limit of an engine on a key.

    Attributes:
        allowed: values that it takes; the first is suggested.
        reason: why it takes no other.
    """

    allowed: tuple[object, ...]
    reason: str


@dataclass(frozen=True)
class _EngineLimits:
    """Limits of an engine.

    Attributes:
        role_keys: limits on keys of a role.
        run_keys: limits on keys of the run, by dotted name, where any role has the engine.
        without_effect: keys of a role that it does not read -> reason.
        commands: commands that know only another engine's layers.
    """

    role_keys: Mapping[str, _KeyLimit] = field(default_factory=dict)
    run_keys: Mapping[str, _KeyLimit] = field(default_factory=dict)
    without_effect: Mapping[str, str] = field(default_factory=dict)
    commands: tuple[str, ...] = ()


def _same(names: str, allowed: tuple[object, ...], reason: str) -> dict[str, _KeyLimit]:
    return dict.fromkeys(names.split(), _KeyLimit(allowed, reason))


_FSDP = _EngineLimits(
    role_keys={
        **_same("tensor_model_parallel_size pipeline_model_parallel_size", (1,), _SHARDS),
        **_same("expert_model_parallel_size", (1,), _SHARDS),
        **_same("expert_tensor_parallel_size", (None, 1), _SHARDS),
        **_same("num_layers_per_virtual_pipeline_stage num_layer_list noop_layers", (None,), _SHARDS),
        **_same("use_tp_pp_dp_mapping moe_tp_extend_ep", (False,), _SHARDS),
        **_same("recompute_granularity", (None, "full"), "it recomputes whole layers"),
        **_same("recompute_method", (None, "uniform"), "it recomputes every layer"),
        **_same("recompute_num_layers", (None, 1), "it recomputes each layer by itself"),
        **_same("recompute_modules", (None,), "it recomputes whole layers"),
        **_same("recompute_activation_function swap_attention", (False,), "it has the layers of transformers as they are"),
        **_same("reuse_fp32_param", (False,), "its weights are the fp32 ones, and no bf16 copy of them is kept"),
        **_same("grad_reduce_in_fp32", (True,), "it reduces the gradients of fp32 weights in fp32"),
        **_same("stream_ref_weights", (False,), "a reference has a part of every weight on each device"),
        **_same("async_save", (False,), "it writes checkpoints before training continues"),
        **_same("check_weight_copies_interval", (0,), "it does not compare the copies of a weight"),
        **_same("language_model_only", (False,), "it has all of transformers' model; freeze_vit keeps the tower"),
        **_same("mtp_num_layers", (0,), "it trains no multi-token-prediction layers"),
        **_same("dsa_indexer_loss_coeff", (0.0,), "it trains no indexers"),
        **_same("attention_dropout hidden_dropout", (0.0,), "its only dropout is that of adapters"),
    },
    run_keys={
        **_same("rl_config.sync_ref_model", (False,), "it averages no weights"),
        **_same("rl_config.opponents.roles", ([],), "snapshots of earlier weights have not run with it"),
        **_same("rl_config.role_adapters", (None,), "adapters take turns in Megatron's optimizer"),
        **_same("msprobe_config.msprobe", (False,), "dumps record the modules of Megatron"),
    },
    without_effect={
        "use_distributed_optimizer": "the state of the optimizer is always divided over all devices",
        "overlap_grad_reduce": "gradients of a layer are always reduced during the backward pass of the next",
        "overlap_param_gather": "weights of a layer are always gathered during the pass of the one before",
        "ddp_bucket_size": "a layer is a bucket",
        "padded_vocab_size": "its embedding has the rows of config.json",
        "sequence_parallel": _SHARDS,
        **dict.fromkeys(
            "dynamic_context_parallel min_dynamic_context_parallel_size".split(), "all rows are divided over the same devices"
        ),
        "swap_optimizer_times": "a swapped optimizer comes to the device in one part",
        "hccl_group_buffer": "its one group has rl_config.hccl_buffersize",
        "gemm_gradient_accumulation_fusion": "it is a kernel of Megatron's layers",
        **dict.fromkeys(
            "use_fused_ring_attention_update use_ascend_mc2 use_ascend_coc coc_mode coc_parallel_num coc_fused_kernel".split(),
            "it is a kernel of Megatron's layers",
        ),
        "muon_tp_mode": _SHARDS,
        **dict.fromkeys("mtp_loss_scaling_factor mtp_detach_heads".split(), "it trains no multi-token-prediction layers"),
        **dict.fromkeys(
            "moe_grouped_gemm moe_permutation_async_comm moe_alltoall_overlap_comm use_fused_moe_token_permute_and_unpermute "
            "moe_token_dispatcher_type".split(),
            "each device has all experts of a layer while it computes, by transformers' module",
        ),
    },
    commands=("diff", "npu-cost"),
)
_MEGATRON = _EngineLimits(
    role_keys={
        **_same("optimizer_state_dtype", ("float32",), "its moments in bfloat16 would need Transformer Engine's optimizer"),
        **_same("offload_gradients", (False,), "its gradients are in Megatron's buffers on the device"),
        **_same("trust_remote_code", (False,), "its layers are Megatron's, and code of a model folder is not read"),
    }
)
#: value of the key `engine` -> its limits
_LIMITS: dict[str, _EngineLimits] = {"megatron": _MEGATRON, "fsdp": _FSDP}


def training_engine_rules(run: Run) -> Iterator[Broken]:
    """Check each role, and what all roles share, against the limits of its engine."""
    cfg, engines = run.config, dict[str, None]()
    for group in _list_roles(cfg):
        role: MegatronConfig = getattr(cfg, group)
        engines[role.engine] = None
        yield from _check_keys(role.engine, f"{group}.", _LIMITS[role.engine].role_keys, role)
        if role.computes_by_module:
            yield from _check_devices(run, group, role)
            yield from _check_states(group, role)
        targets = role.lora_target_modules or []
        if role.computes_by_module and adapts_experts(targets) and cfg.with_shape(group).num_experts:
            key = f"{group}.lora_target_modules"
            kept = [name for name in targets if not adapts_experts([name])] or None
            yield violate("training_engine", f"[{key}] cannot be used with engine: {role.engine}: {_STACKED}", {key: kept})
    if cfg.rl_config is not None and run.rl.router_replay.mode != "disabled" and trains_other_family(cfg):
        key = "rl_config.router_replay.mode"
        text = f"[{key}] cannot be used with a model that only transformers computes: routers of the support table are known"
        yield violate("training_engine", text, {key: "disabled"})
    for engine in engines:
        for path, limit in _LIMITS[engine].run_keys.items():
            *groups, key = path.split(".")
            holder: object = reduce(_read_group, groups, cfg)
            if holder is not None:
                yield from _check_keys(engine, ".".join([*groups, ""]), {key: limit}, holder)


def _check_devices(run: Run, group: str, role: MegatronConfig) -> Iterator[Broken]:
    """Check the groups of devices that divide weights, or the tokens of a row."""
    name = group.removesuffix("_config")
    world, size = run.placement.dedicated.get(name, run.placement.world_size), role.fsdp_size
    if size is not None and world is not None and (size < 1 or world % size):
        divisors = [number for number in range(1, world + 1) if world % number == 0]
        key = f"{group}.fsdp_size"
        text = f"[{key}] must divide the {world} devices of the role into equal groups, each with a copy of the weights"
        yield violate("fsdp_size", text, {key: min(divisors, key=lambda number: abs(number - size))})
    if role.has_ring_attention:
        key = f"{group}.context_parallel_algo"
        text = f"[{key}] cannot be used with engine: {role.engine}: its attention exchanges tokens for heads, and has no ring"
        yield violate("training_engine", text, {key: "ulysses_cp_algo"})


def _check_states(group: str, role: MegatronConfig) -> Iterator[Broken]:
    """Check where the states of the optimizer are, and their format."""
    fraction, dtype = f"{group}.optimizer_offload_fraction", f"{group}.optimizer_state_dtype"
    gradients = f"{group}.offload_gradients"
    if role.optimizer == "muon" and role.offload_gradients:
        text = f"[{gradients}] cannot be used with [{group}.optimizer] and engine: {role.engine}"
        text += ": it joins gradients on the device"
        yield violate("training_engine", text, {gradients: False}, {f"{group}.optimizer": "adam"})
    for key, default in ((fraction, 0.0), (dtype, "float32")):
        if role.optimizer == "muon" and getattr(role, key.partition(".")[2]) != default:
            text = f"[{key}] cannot be used with [{group}.optimizer] and engine: {role.engine}: it keeps momentum on the device"
            yield violate("training_engine", f"{text}, in float32", {key: default}, {f"{group}.optimizer": "adam"})
    if role.optimizer_offload_fraction and role.optimizer_state_dtype != "float32":
        text = f"[{dtype}] excludes [{fraction}]: states off the device are in float32"
        yield violate("training_engine", text, {dtype: "float32"}, {fraction: 0.0})


def trains_other_family(cfg: RunConfig) -> bool:
    """Return True where the actor's model is of no family of the table, so that only transformers' module computes it."""
    metadata = cfg.model_metadata.get("actor_config")
    if metadata is None or not cfg.actor_config.computes_by_module:
        return False
    return not has_layers(read_json(Path(metadata.hf_folder, "config.json")))


def _read_group(holder: object, name: str) -> object:
    """Return a group of a run file; None where it or the one around it is left out."""
    return None if holder is None else getattr(holder, name)


def _list_roles(cfg: RunConfig) -> list[str]:
    """Return the roles with keys of their own."""
    others = [f"{role}_config" for role in ("ref", "reward", "critic", "teacher")]
    return ["actor_config", *(group for group in others if group in cfg.set_keys)]


def _check_keys(engine: str, prefix: str, limits: Mapping[str, _KeyLimit], group: object) -> Iterator[Broken]:
    for name, limit in limits.items():
        value = getattr(group, name)
        if value not in limit.allowed:
            key = prefix + name
            yield violate(
                "training_engine", f"[{key}] cannot be used with engine: {engine}: {limit.reason}", {key: limit.allowed[0]}
            )


def adapts_experts(targets: Iterable[str]) -> bool:
    """Return True where layers of experts are among those that get adapters, in a model that has experts."""
    return not {"linear_fc1", "linear_fc2"}.isdisjoint(targets)


def list_common_values(engines: Sequence[str]) -> dict[str, Any]:
    """Return the keys of a role that one of the engines limits, with values that each of them takes.

    Raises:
        ValueError: the engines have no value of a key in common.
    """
    common: dict[str, tuple[object, ...]] = {}
    for engine in engines:
        for name, limit in _LIMITS[engine].role_keys.items():
            common[name] = tuple(value for value in common.get(name, limit.allowed) if value in limit.allowed)
    if lacking := sorted(name for name, values in common.items() if not values):
        raise ValueError(f"{lacking[0]}: no value of it is taken by each of the engines {', '.join(engines)}.")
    return {name: values[0] for name, values in common.items()}


def find_idle_reason(role: MegatronConfig, name: str) -> str:
    """Return why the engine of a role does not read a key; empty where it does."""
    reason = _LIMITS[role.engine].without_effect.get(name)
    return "" if reason is None else f"engine is {role.engine}: {reason}"


def check_model_form(config: MegatronConfig, architecture: ModelFamily, model_config: ModelConfig) -> None:
    """Check that the engine of a role computes its model.

    Raises:
        ValueError: it does not.
    """
    if not config.computes_by_module:
        return
    if architecture.module_obstacle:
        raise ValueError(
            f"engine: {config.engine} does not compute {architecture.name}: {architecture.module_obstacle}; set engine: "
            "megatron."
        )
    if config.context_parallel_size > 1 and not architecture.packs:
        raise ValueError(
            f"context_parallel_size: {config.context_parallel_size} with engine: {config.engine} divides the tokens of a row, "
            f"and layers of {architecture.name} compute whole rows only; set it to 1"
        )
    if model_config.num_moe_experts and adapts_experts(config.lora_target_modules or ()):
        raise ValueError(f"lora_target_modules cannot be used with engine: {config.engine}: {_STACKED}")
    if config.bf16 and architecture.kept_in_float32:
        raise ValueError(
            f"bf16: true with engine: {config.engine} computes with everything in bfloat16, and {architecture.name} keeps "
            f"some in float32, such as {architecture.kept_in_float32}; set bf16: false"
        )


def check_command(config: MegatronConfig, group: str, command: str) -> None:
    """Check that a command knows the layers of a role's engine.

    Raises:
        ValueError: it does not.
    """
    if command in _LIMITS[config.engine].commands:
        raise ValueError(
            f"{group}.engine: {config.engine}: mindspeed-rl {command} knows the layers of engine: megatron only; set that for "
            "an answer about Megatron."
        )
