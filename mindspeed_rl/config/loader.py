"""From a run file to a `RunConfig`: Hydra composes, the schema checks, roles are merged."""

from __future__ import annotations

import glob
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from mindspeed_rl.config.compat.aliases import apply_aliases, rename_deprecated
from mindspeed_rl.config.errors import ConfigError, unknown_key, unknown_value
from mindspeed_rl.config.keys import ROLE_GROUPS, collect_names
from mindspeed_rl.config.keys.audit import AuditKeys
from mindspeed_rl.config.keys.deadlines import TOLERANCE_FORMS
from mindspeed_rl.config.keys.diagnostics import MsprobeConfig, ProfilerGroups
from mindspeed_rl.config.keys.generate import ENGINE_SAMPLING, GenerateConfig
from mindspeed_rl.config.keys.ignored import IGNORED
from mindspeed_rl.config.keys.megatron import DROPOUT_KEYS, MegatronConfig
from mindspeed_rl.config.keys.rl import RLConfig
from mindspeed_rl.config.keys.schema import build, normalize
from mindspeed_rl.config.keys.serve import ServeConfig
from mindspeed_rl.config.model_metadata import read_model_metadata
from mindspeed_rl.config.run import PLATFORMS, RunConfig
from mindspeed_rl.config.run_files import compose, find_project_configs, locate

_G = TypeVar("_G")
#: groups of a run file -> their dataclasses
TOP_LEVEL: dict[str, type] = {
    "megatron_training": MegatronConfig,
    **dict.fromkeys((*ROLE_GROUPS, "vit_config"), MegatronConfig),
    "rl_config": RLConfig,
    "generate_config": GenerateConfig,
    "profiler_config": ProfilerGroups,
    "msprobe_config": MsprobeConfig,
    "audit": AuditKeys,
    "serve_config": ServeConfig,
}


def load_run_config(config_name: str, config_dir: str | Path | None = None, overrides: Iterable[str] = ()) -> RunConfig:
    """Return the run file as typed, merged groups.

    Args:
        config_name: name of the run file with or without ".yaml", or a path to it.
        config_dir: folder of the run file; the project's `configs/`, then `configs/` of the working directory when unset.
            A folder without a `model/` group of its own uses the project's model blocks.
        overrides: "group.key=value" items as on the command line; they also set keys that the file does not have.

    Raises:
        ConfigError: missing file, unknown key, wrong type or unknown model block; all violations at once.
    """
    directory, name = locate(config_name, config_dir)
    return build_run_config(compose(directory, name, list(overrides)), config_name=name, config_dir=str(directory))


def build_run_config(tree: Mapping[str, Any], *, config_name: str = "", config_dir: str = "") -> RunConfig:
    """Return the typed run for plain containers as `compose` gives them.

    A role's engine starts from its model block; the keys of megatron_training override it, then the keys of the role.

    Raises:
        ConfigError: every unknown key, wrong type and unknown model block at once.
    """
    errors: list[str] = []
    tree = normalize(tree)
    groups, deprecated = _read_groups(tree, errors)
    _find_beside(groups, Path(config_dir) if config_dir else None)
    set_keys: dict[str, frozenset[str]] = {}
    sampling = _fill_groups(groups)

    def build_group(name: str, schema: type[_G]) -> _G | None:
        if name not in groups:
            return None
        group, set_keys[name] = build(schema, groups[name], name, errors, collect_names())
        return group

    for name in ("megatron_training", *ROLE_GROUPS, "vit_config"):
        build_group(name, MegatronConfig)
    blocks = _read_model_blocks(tree.get("model"), errors)
    actor = _merge_role(groups, "actor_config", blocks, errors)
    roles = {
        name: _merge_role(groups, name, blocks, errors) if name in groups else None
        for name in ("ref_config", "reward_config", "critic_config", "teacher_config", "vit_config")
    }
    rl = build_group("rl_config", RLConfig)
    if generate := build_group("generate_config", GenerateConfig):
        set_keys["sampling_config"] = sampling
    profiler = build_group("profiler_config", ProfilerGroups) or ProfilerGroups()
    msprobe = build_group("msprobe_config", MsprobeConfig) or MsprobeConfig()
    audit = build_group("audit", AuditKeys) or AuditKeys()
    serve = build_group("serve_config", ServeConfig)
    platform, run_dir = _read_top_level(tree, errors)
    if errors:
        # each once: every role that takes a wrong model block reports it
        raise ConfigError(dict.fromkeys(errors))
    aliased: dict[str, object] = {}
    if rl is not None:
        rl, generate, aliased = apply_aliases(rl, generate, set_keys)
    set_keys["run"] = frozenset(name for name in ("platform", "run_dir") if name in tree)
    cfg = RunConfig(
        config_name=config_name,
        config_dir=config_dir,
        platform=platform,
        run_dir=run_dir,
        megatron_training=_merge_role(groups, "megatron_training", blocks, errors),
        actor_config=actor,
        ref_config=roles["ref_config"] or actor,
        reward_config=roles["reward_config"],
        critic_config=roles["critic_config"],
        teacher_config=roles["teacher_config"],
        vit_config=roles["vit_config"],
        rl_config=rl,
        generate_config=generate,
        profiler_config=profiler,
        msprobe_config=msprobe,
        audit=audit,
        serve_config=serve,
        set_keys=set_keys,
        deprecated=deprecated,
        aliased=aliased,
        ignored=_find_ignored(groups),
        model_metadata={
            group: metadata
            for group, role in {"actor_config": actor, **roles}.items()
            if role is not None and (metadata := read_model_metadata(role)) is not None
        },
    )
    return cfg if cfg.is_supervised or rl is None or rl.dropout_in_update else _disable_dropout(cfg)


def _disable_dropout(cfg: RunConfig) -> RunConfig:
    """Return the run with no dropout in any role: see `rl_config.dropout_in_update`."""
    roles = {name: role for name in ("megatron_training", *ROLE_GROUPS) if (role := getattr(cfg, name)) is not None}
    # a reference without a group of its own is the actor's; what is out of range is left to the rules
    changed = {
        id(role): replace(role, **{name: 0.0 for name in DROPOUT_KEYS if 0.0 <= getattr(role, name) <= 1.0})
        for role in roles.values()
    }
    # a key that is 0 says what happens: it is none that has no effect
    as_written = {name: {key for key in DROPOUT_KEYS if getattr(role, key) == 0.0} for name, role in roles.items()}
    set_keys = {name: keys - as_written.get(name, set()) for name, keys in cfg.set_keys.items()}
    return replace(cfg, set_keys=set_keys, **{name: changed[id(role)] for name, role in roles.items()})


def _read_groups(tree: Mapping[str, object], errors: list[str]) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    """Return the groups by name with the present names of their keys, and the notes about deprecated names."""
    groups: dict[str, dict[str, Any]] = {}
    deprecated: dict[str, str] = {}
    known = (*TOP_LEVEL, "model", "platform", "run_dir")
    for name, value in tree.items():
        if name not in known:
            errors.append(unknown_key(name, value, known, collect_names()))
        elif name in TOP_LEVEL:
            if isinstance(value, Mapping):
                groups[name], notes = rename_deprecated(name, normalize(value), errors)
                deprecated |= notes
            elif value is not None:
                errors.append(f"{name} is {value!r}, but must be a group of keys")
    if "megatron_training" not in groups:
        errors.append("the group megatron_training is missing")
        groups["megatron_training"] = {}
    return groups, deprecated


#: keys of files and folders that a run reads
_INPUTS = frozenset(
    "load pretrained_checkpoint tokenizer_name_or_path ref_model base_model data_path eval_data_path eval_sets "
    "prompt_type_path image_folder reward_model ref_model_load_path external_plugins judge_prompt judge_rubric "
    "tool_config_path expert_map_path environment runtime_env_path".split()
)
_SLICE = re.compile(r"(\[[\d:]*\]|#\d+)$")


def _find_beside(groups: Mapping[str, dict[str, Any]], folder: Path | None) -> None:
    """Replace relative paths that are not in the working directory, but in the folder of the run file.

    Args:
        folder: folder of the run file; None for a run without one.
    """
    if folder is None or folder in (Path.cwd(), find_project_configs()):
        return
    for values in groups.values():
        for name in values.keys() & _INPUTS:
            value = values[name]
            if name == "load" and value == values.get("save"):
                continue  # checkpoints that this run writes
            if isinstance(value, str):
                values[name] = _place(value, folder)
            elif isinstance(value, Mapping):
                values[name] = {key: _place(item, folder) if isinstance(item, str) else item for key, item in value.items()}
            elif isinstance(value, list):
                values[name] = [_place(item, folder) if isinstance(item, str) else item for item in value]


def _place(value: str, folder: Path) -> str:
    path = Path(_SLICE.sub("", value))
    if not path.parts or path.is_absolute() or value.startswith("~") or "," in value or "://" in value:
        return value

    def is_in(base: Path) -> bool:
        # the prefix of preprocessed data is the start of the names of its files
        target = base / path
        return target.exists() or target.parent.is_dir() and any(target.parent.glob(f"{glob.escape(path.name)}_*.idx"))

    try:
        return str(folder / value) if is_in(folder) and not is_in(Path.cwd()) else value
    except (OSError, ValueError):  # a name that no file can have, which a rule reports
        return value


def _fill_groups(groups: dict[str, dict[str, Any]]) -> frozenset[str]:
    """Give groups the values that follow from others of their keys; return the keys of sampling_config that are written."""
    rl, generate = groups.get("rl_config", {}), groups.get("generate_config", {})
    packing, sampling = rl.get("max_packing_token_size"), generate.get("sampling_config")
    if isinstance(tolerance := rl.get("fault_tolerance"), str) and tolerance in TOLERANCE_FORMS:
        groups["rl_config"] = rl = {**rl, "fault_tolerance": TOLERANCE_FORMS[tolerance]}
    if isinstance(packing, list) and packing and rl.get("is_multimodal"):
        # with images upstream has a second limit, of their patches; here their tokens count as others do
        groups["rl_config"] = {**rl, "max_packing_token_size": packing[0]}
    if not isinstance(sampling, Mapping):
        return frozenset()
    written = normalize(sampling)
    generate["sampling_config"] = {**ENGINE_SAMPLING, **written}
    return frozenset(written)


def _read_top_level(tree: Mapping[str, Any], errors: list[str]) -> tuple[Any, str | None]:
    """Return the platform and the folder of the run."""
    platform, run_dir = tree.get("platform"), tree.get("run_dir")
    platform = "auto" if platform is None else platform
    if platform not in PLATFORMS:
        errors.append(unknown_value("platform", platform, PLATFORMS))
    if run_dir is not None and not isinstance(run_dir, str):
        errors.append(f"run_dir is {run_dir!r}, but must be text or null")
    return platform, run_dir


def _find_ignored(groups: Mapping[str, Mapping[str, object]]) -> dict[str, object]:
    """Return the values of the keys that are accepted without effect, by dotted name."""
    without_effect: dict[str, object] = {}
    for group, values in groups.items():
        ignored = IGNORED.get(TOP_LEVEL[group].__name__, {})
        without_effect |= {f"{group}.{name}": value for name, value in values.items() if name in ignored}
        if group == "generate_config" and isinstance(sampling := values.get("sampling_config"), Mapping):
            ignored = IGNORED["SamplingConfig"]
            without_effect |= {f"{group}.sampling_config.{name}": value for name, value in sampling.items() if name in ignored}
    return without_effect


def _read_model_blocks(value: object, errors: list[str]) -> dict[str, dict[str, Any]]:
    """Return the model blocks by name, each checked against the schema."""
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        errors.append(f"model is {value!r}, but must hold model blocks (list them under defaults: [{{model: [...]}}])")
        return {}
    blocks: dict[str, dict[str, Any]] = {}
    for name, block in value.items():
        if isinstance(block, Mapping):
            blocks[str(name)], _ = rename_deprecated(f"model.{name}", normalize(block), errors)
            build(MegatronConfig, blocks[str(name)], f"model.{name}", errors, collect_names())
        else:
            errors.append(f"model.{name} is {block!r}, but must be a group of keys")
    return blocks


def _merge_role(
    groups: Mapping[str, dict[str, Any]], name: str, blocks: Mapping[str, dict[str, Any]], errors: list[str]
) -> MegatronConfig:
    """Return the engine keys of one role: model block, then shared keys, then the keys of the role."""
    shared, role = groups["megatron_training"], groups.get(name, {})
    model = role.get("model") or shared.get("model")
    block: dict[str, Any] = {}
    if isinstance(model, str):
        if model in blocks:
            block = blocks[model]
        else:
            where = f"{name}.model" if role.get("model") else "megatron_training.model"
            message = unknown_value(where, model, blocks) if blocks else f"{where} is {model!r}, but no model block is loaded"
            errors.append(f"{message}; blocks are listed under defaults: [{{model: [...]}}]")
    merged, _ = build(MegatronConfig, {**block, **shared, **role}, name, [])  # errors were reported for each source already
    return merged
