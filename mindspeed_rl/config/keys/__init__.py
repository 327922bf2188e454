"""The groups of a run file, and tables of all their keys by dotted name."""

from __future__ import annotations

import dataclasses
import functools
import typing
from collections import Counter
from collections.abc import Iterator

from mindspeed_rl.catalogue import SETTINGS
from mindspeed_rl.catalogue.records import Bounds
from mindspeed_rl.config.compat import ROLE_NAMES_ELSEWHERE
from mindspeed_rl.config.errors import KeyNames
from mindspeed_rl.config.keys.audit import AuditKeys
from mindspeed_rl.config.keys.diagnostics import MsprobeConfig, ProfilerConfig
from mindspeed_rl.config.keys.generate import GenerateConfig, SamplingConfig
from mindspeed_rl.config.keys.ignored import IGNORED, IgnoredKey
from mindspeed_rl.config.keys.megatron import MegatronConfig
from mindspeed_rl.config.keys.rl import RLConfig
from mindspeed_rl.config.keys.schema import Key, list_keys
from mindspeed_rl.config.keys.serve import ServeConfig
from mindspeed_rl.config.roles import ROLE_GROUPS

#: dotted name of a group -> its class
GROUPS: dict[str, type] = {
    "megatron_training": MegatronConfig,
    "rl_config": RLConfig,
    "generate_config": GenerateConfig,
    "generate_config.sampling_config": SamplingConfig,
    "profiler_config.integrated": ProfilerConfig,
    "msprobe_config": MsprobeConfig,
    "audit": AuditKeys,
    "serve_config": ServeConfig,
}
#: keys of any group that name a file or a folder
PATH_KEYS = frozenset(
    "load save pretrained_checkpoint tokenizer_name_or_path ref_model data_path eval_data_path prompt_type_path reward_model "
    "ref_model_load_path external_plugins judge_prompt tool_config_path expert_map_path eplb_token_save_path "
    "vllm_server_token_file dump_path profile_save_path runtime_env_path wandb_save_dir swanlab_save_dir run_dir "
    "optimizer_offload_path api_keys_file".split()
)


@functools.cache
def collect_keys() -> dict[str, Key]:
    """Return every key of every group by its dotted name, in reading order."""
    return {path: key for group, schema in GROUPS.items() for path, key in _walk(group, schema)}


def _walk(group: str, schema: type) -> Iterator[tuple[str, Key]]:
    for name, key in list_keys(schema).items():
        path = f"{group}.{name}"
        if path not in GROUPS:
            yield path, key
            for kind in (key.kind, *typing.get_args(key.kind)):
                if isinstance(kind, type) and dataclasses.is_dataclass(kind):
                    yield from _walk(path, kind)


def find_range(path: str) -> Bounds | None:
    """Return the bounds of a number, by the dotted name of its key; roles share the bounds of megatron_training."""
    group, _, name = path.rpartition(".")
    if group == "rl_config" and name in SETTINGS:
        return SETTINGS[name]
    key = collect_keys().get(f"megatron_training.{name}" if group in ROLE_GROUPS else path)
    return None if key is None else key.range


#: groups that have names of other groups too; without its group such a name is the other's
_BESIDE = ("profiler_config.integrated", "audit")


@functools.cache
def collect_names() -> KeyNames:
    """Return the names of all keys, here and in other projects."""
    own = {name for group, schema in GROUPS.items() if group not in _BESIDE for name in list_keys(schema)}
    names = [
        (name, f"{group}.{name}")
        for group, schema in GROUPS.items()
        for name in (*list_keys(schema), *IGNORED.get(schema.__name__, ()))
        if group not in _BESIDE or name not in own
    ]
    counts = Counter(name for name, _ in names)
    elsewhere = {other: path for path, key in collect_keys().items() for other in key.elsewhere}
    return KeyNames({name: path for name, path in names if counts[name] == 1}, elsewhere | ROLE_NAMES_ELSEWHERE)


def find_ignored(path: str) -> IgnoredKey:
    """Return the record of a key that is accepted without effect, by its dotted name."""
    group, _, name = path.rpartition(".")
    return IGNORED[GROUPS["megatron_training" if group in (*ROLE_GROUPS, "vit_config") else group].__name__][name]
