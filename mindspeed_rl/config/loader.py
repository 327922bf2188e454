"""From a run file to a `RunConfig`: Hydra composes, the schema checks, roles are merged."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from mindspeed_rl.config.compat.aliases import apply_second_spellings
from mindspeed_rl.config.compat.deprecated import in_present_names
from mindspeed_rl.config.errors import ConfigError, unknown_key, unknown_value
from mindspeed_rl.config.keys.diagnostics import MsprobeConfig, ProfilerConfig, ProfilerGroups
from mindspeed_rl.config.keys.generate import ENGINE_SAMPLING, GenerateConfig, SamplingConfig
from mindspeed_rl.config.keys.megatron import MegatronConfig
from mindspeed_rl.config.keys.rl import RLConfig
from mindspeed_rl.config.keys.schema import build, field_types, normalized
from mindspeed_rl.config.model_facts import read_model_facts
from mindspeed_rl.config.objective import unusable_plugins
from mindspeed_rl.config.resolve import derive
from mindspeed_rl.config.run import PLATFORMS, RunConfig
from mindspeed_rl.config.run_files import compose, locate

ROLE_GROUPS = ("actor_config", "ref_config", "reward_config", "critic_config", "vit_config")
TOP_LEVEL = ("megatron_training", *ROLE_GROUPS, "rl_config", "generate_config", "profiler_config", "msprobe_config")


def load_run_config(config_name: str, config_dir: str | Path | None = None, overrides: Iterable[str] = ()) -> RunConfig:
    """Return the run file as typed, merged groups.

    Args:
        config_name: name of the run file with or without ".yaml", or a path to it.
        config_dir: folder of the run file; the project's `configs/`, then `configs/` of the working directory when unset.
            A folder without a `model/` group of its own uses the project's model blocks.
        overrides: "group.key=value" items as on the command line; they also set keys that the file does not have.

    Raises:
        ConfigError: missing file, unknown key, wrong type or unknown model block; all mistakes at once.
    """
    directory, name = locate(config_name, config_dir)
    return build_run_config(compose(directory, name, list(overrides)), config_name=name, config_dir=str(directory))


def build_run_config(tree: Mapping[str, Any], *, config_name: str = "", config_dir: str = "") -> RunConfig:
    """Return the typed run for plain containers as `compose` gives them.

    A role's engine starts from its model block; the keys of megatron_training come over it, then the role's own.

    Raises:
        ConfigError: every unknown key, wrong type and unknown model block at once; else every plug-in that cannot be used.
    """
    errors: list[str] = []
    tree = normalized(tree)
    known = (*TOP_LEVEL, "model", "platform", "run_dir")
    groups: dict[str, dict[str, Any]] = {}
    earlier: dict[str, str] = {}
    for name, value in tree.items():
        if name not in known:
            errors.append(unknown_key(name, value, known, homes()))
        elif name in TOP_LEVEL:
            if isinstance(value, Mapping):
                groups[name], notes = in_present_names(name, normalized(value), errors)
                earlier |= notes
            elif value is not None:
                errors.append(f"{name} is {value!r}, but must be a group of keys")
    set_keys: dict[str, frozenset[str]] = {}

    def group(name: str, schema: type) -> Any:
        built, set_keys[name] = build(schema, groups[name], name, errors, homes())
        return built

    if "megatron_training" not in groups:
        errors.append("the group megatron_training is missing")
        groups["megatron_training"] = {}
    for name in ("megatron_training", *ROLE_GROUPS):
        if name in groups:
            group(name, MegatronConfig)
    blocks = _model_blocks(tree.get("model"), errors)
    shared = groups["megatron_training"]
    actor = _role(shared, groups.get("actor_config", {}), "actor_config", blocks, errors)
    roles = {
        name: _role(shared, groups[name], name, blocks, errors) if name in groups else None
        for name in ROLE_GROUPS
        if name != "actor_config"
    }
    rl = group("rl_config", RLConfig) if "rl_config" in groups else None
    generate = None
    if "generate_config" in groups:
        sampling = groups["generate_config"].get("sampling_config")
        if isinstance(sampling, Mapping):
            groups["generate_config"]["sampling_config"] = {**ENGINE_SAMPLING, **normalized(sampling)}
        generate = group("generate_config", GenerateConfig)
        set_keys["sampling_config"] = frozenset(normalized(sampling)) if isinstance(sampling, Mapping) else frozenset()
    profiler = group("profiler_config", ProfilerGroups) if "profiler_config" in groups else ProfilerGroups()
    msprobe = group("msprobe_config", MsprobeConfig) if "msprobe_config" in groups else MsprobeConfig()
    platform = tree.get("platform") or "auto"
    if platform not in PLATFORMS:
        errors.append(unknown_value("platform", platform, PLATFORMS))
    run_dir = tree.get("run_dir")
    if run_dir is not None and not isinstance(run_dir, str):
        errors.append(f"run_dir is {run_dir!r}, but must be text or null")
    if errors and rl is not None and rl.is_multimodal:
        # its other keys belong to what is missing, so that they are no mistakes of the file
        raise ConfigError(["not available in this version: rl_config.is_multimodal: text models only"])
    if errors:
        # each once: every role that takes a wrong model block complains of it
        raise ConfigError(dict.fromkeys(errors))
    spelled = apply_second_spellings(rl, generate, set_keys) if rl is not None else {}
    set_keys["run"] = frozenset(name for name in ("platform", "run_dir") if name in tree)
    cfg = RunConfig(
        config_name=config_name,
        config_dir=config_dir,
        platform=platform,
        run_dir=run_dir,
        megatron_training=_role(shared, {}, "megatron_training", blocks, errors),
        actor_config=actor,
        ref_config=roles["ref_config"] or actor,
        reward_config=roles["reward_config"],
        critic_config=roles["critic_config"],
        vit_config=roles["vit_config"],
        rl_config=rl,
        generate_config=generate,
        profiler_config=profiler,
        msprobe_config=msprobe,
        set_keys=set_keys,
        earlier=earlier,
        spelled=spelled,
        model_facts=read_model_facts(actor),
    )
    cfg = derive(cfg)
    if rl is not None and not cfg.is_supervised and (wrong := unusable_plugins(rl, cfg.stage or "ray_grpo")):
        raise ConfigError(wrong)
    return cfg


@cache
def homes() -> dict[str, str]:
    """Return the dotted name of every key by its last name; one that several groups have is left out."""
    groups = {
        "megatron_training": MegatronConfig,
        "rl_config": RLConfig,
        "generate_config": GenerateConfig,
        "generate_config.sampling_config": SamplingConfig,
        "profiler_config.integrated": ProfilerConfig,
        "msprobe_config": MsprobeConfig,
    }
    found = [(name, f"{group}.{name}") for group, schema in groups.items() for name in field_types(schema)]
    counts = Counter(name for name, _ in found)
    return {name: path for name, path in found if counts[name] == 1}


def _model_blocks(value: Any, errors: list[str]) -> dict[str, dict[str, Any]]:
    """Return the model blocks by name, each checked against the schema."""
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        errors.append(f"model is {value!r}, but must hold model blocks (list them under defaults: [{{model: [...]}}])")
        return {}
    blocks: dict[str, dict[str, Any]] = {}
    for name, block in value.items():
        if isinstance(block, Mapping):
            blocks[str(name)], _ = in_present_names(f"model.{name}", normalized(block), errors)
            build(MegatronConfig, blocks[str(name)], f"model.{name}", errors, homes())
        else:
            errors.append(f"model.{name} is {block!r}, but must be a group of keys")
    return blocks


def _role(
    shared: dict[str, Any], own: dict[str, Any], name: str, blocks: dict[str, dict[str, Any]], errors: list[str]
) -> MegatronConfig:
    """Return one role's engine keys: model block, then shared keys, then its own."""
    model = own.get("model") or shared.get("model")
    block: dict[str, Any] = {}
    if isinstance(model, str):
        if model in blocks:
            block = blocks[model]
        else:
            where = f"{name}.model" if own.get("model") else "megatron_training.model"
            wrong = unknown_value(where, model, blocks) if blocks else f"{where} is {model!r}, but no model block is loaded"
            errors.append(f"{wrong}; blocks are listed under defaults: [{{model: [...]}}]")
    built, _ = build(MegatronConfig, {**block, **shared, **own}, name, [])  # mistakes were reported for each source already
    return built
