"""Paths of a run against the folder of its command; workers run elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from mindspeed_rl.config.keys import ROLE_GROUPS
from mindspeed_rl.config.keys.generate import GenerateConfig
from mindspeed_rl.config.keys.megatron import MegatronConfig, is_weight
from mindspeed_rl.config.keys.rl import RLConfig
from mindspeed_rl.run import Run

#: paths of a role that are also names on a hub, or the default, a file that few have: absolute where they are on this machine
_MAYBE_PATHS = ("load", "pretrained_checkpoint", "tokenizer_name_or_path", "ref_model", "prompt_type_path")


def with_absolute_paths(run: Run) -> Run:
    """Return the run with every path of its keys absolute."""
    cfg = run.config
    roles = [getattr(cfg, name) for name in ("megatron_training", *ROLE_GROUPS)]
    roles += [model.config for model in run.models.values()]
    # roles without a group of their own share the record of another
    # a list of raw files and a name on a hub are not paths, and only the driver reads them
    data = [key for key in ("data_path", "eval_data_path") if cfg.is_supervised and key not in run.prepared]
    moved = {id(role): _move_role(role, data) for role in roles if role is not None}
    names = [name for name in ("megatron_training", *ROLE_GROUPS) if getattr(cfg, name) is not None]
    groups: dict[str, Any] = {name: moved[id(getattr(cfg, name))] for name in names}
    profiler = cfg.profiler_config
    return replace(
        run,
        config=replace(
            cfg,
            **groups,
            msprobe_config=_move(cfg.msprobe_config, "dump_path"),
            audit=_move(cfg.audit, "judge_prompt"),
            serve_config=None if cfg.serve_config is None else _move(cfg.serve_config, "folder", "api_keys_file"),
            profiler_config=replace(profiler, integrated=_move(profiler.integrated, "profile_save_path")),
            generate_config=None if cfg.generate_config is None else _move_engine(cfg.generate_config),
            rl_config=None if cfg.rl_config is None else _move_rewards(cfg.rl_config),
        ),
        models={name: replace(model, config=moved[id(model.config)]) for name, model in run.models.items()},
    )


def _move_role(role: MegatronConfig, data: Sequence[str]) -> MegatronConfig:
    """Return a role with absolute paths; `data` are the keys of data that workers read."""
    here = [key for key in _MAYBE_PATHS if (value := getattr(role, key)) and Path(value).expanduser().exists()]
    role = _move(role, *here, "save")
    if "data_path" in data and isinstance(role.data_path, list):
        paths = [item if is_weight(item) else _absolute(str(item)) for item in role.data_path]
        role, data = replace(role, data_path=paths), [key for key in data if key != "data_path"]
    return _move(role, *data)


def _move_engine(generate: GenerateConfig) -> GenerateConfig:
    generate, drafts = _move(generate, "eplb_token_save_path", "expert_map_path"), generate.drafts
    if drafts is None or not isinstance(drafts.get("model"), str):
        return generate
    return replace(generate, speculative_config=drafts | {"model": _absolute(str(drafts["model"]))})


def _move_rewards(rl: RLConfig) -> RLConfig:
    mode = rl.integrated_mode_config
    # another rubric is a column of the rows
    rubric = ["judge_rubric"] if rl.judge_rubric is not None and rl.judge_rubric.endswith(".json") else []
    return replace(
        _move(rl, "reward_model", "tool_config_path", "judge_prompt", *rubric),
        integrated_mode_config=None if mode is None else _move(mode, "ref_model_load_path"),
        external_plugins=[_absolute(path) for path in rl.external_plugins],
    )


def _move(group: Any, *keys: str) -> Any:
    """Return a group of keys with these paths absolute, where they are set."""
    return replace(group, **{key: _absolute(value) for key in keys if (value := getattr(group, key))})


def _absolute(path: str) -> str:
    return str(Path(path).expanduser().resolve())
