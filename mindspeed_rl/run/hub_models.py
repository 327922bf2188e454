"""Models and tokenizers that a run file names as on a hub, as folders in the caches of the hubs."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

from mindspeed_rl.config import MegatronConfig, RunConfig
from mindspeed_rl.config.keys import ROLE_GROUPS
from mindspeed_rl.config.keys.rl import RLConfig
from mindspeed_rl.config.model_metadata import ModelMetadata, find_adapter_base, read_model_metadata
from mindspeed_rl.hub import Kind, fetch, find_network_problem, parse_hub_name

#: keys of a role that may be a name on a hub
_HUB_KEYS = ("load", "pretrained_checkpoint", "ref_model", "base_model", "tokenizer_name_or_path")


class Hubs:
    """The hubs as one command sees them: it takes every model of them once, and asks once whether they can be reached."""

    def __init__(self, *, downloads: bool = True) -> None:
        """Without `downloads` only what is in the caches is found."""
        self._downloads = downloads
        self._folders: dict[tuple[str, Kind], str] = {}
        self._probe = functools.cache(find_network_problem)

    def find(self, text: str, key: str, kind: Kind) -> str:
        """Return the folder of a name on a hub; any other text as it is."""
        if (name := parse_hub_name(text)) is None:
            return text
        # a model is fetched with its tokenizer
        known = self._folders.get((text, "model")) or self._folders.get((text, kind))
        if known is None:
            known = str(fetch(name, key, kind, downloads=self._downloads, probe=self._probe))
            self._folders[text, kind] = known
        return known


def fetch_configs(cfg: RunConfig, hubs: Hubs) -> RunConfig:
    """Fetch the models that a run names as on a hub, without their weights, and return the run with metadata from their files.

    The run still has the names, which `fetch_models` replaces.

    Raises:
        ValueError: as `fetch_models` does.
    """
    changed = _fetch(cfg, _Finder(hubs, has_weights=False))
    return dataclasses.replace(cfg, model_metadata=cfg.model_metadata | _read_metadata(changed)) if changed else cfg


def fetch_models(cfg: RunConfig, hubs: Hubs) -> RunConfig:
    """Return the run with folders in place of names on hubs, and with metadata from the files in them.

    Raises:
        NotFetchedError: something is not in the cache, and `hubs` downloads nothing.
        ValueError: a hub has no such model or no weights of it, or cannot be reached.
    """
    changed = _fetch(cfg, _Finder(hubs))
    return dataclasses.replace(cfg, model_metadata=cfg.model_metadata | _read_metadata(changed), **changed) if changed else cfg


def will_write_load(config: MegatronConfig) -> bool:
    """Return whether `load` of a role is its folder of checkpoints, which may be still to be written, and no name on a hub."""
    return bool(config.load) and (config.load == config.save or bool(config.pretrained_checkpoint))


def _fetch(cfg: RunConfig, hubs: _Finder) -> dict[str, Any]:
    """Return the groups of a run file that change, with folders."""
    group = "megatron_training" if cfg.is_supervised else None
    changed: dict[str, Any] = {}
    for role in (*ROLE_GROUPS, "megatron_training"):
        config: MegatronConfig | None = getattr(cfg, role)
        if config is not None and (values := _fetch_role(config, group or role, hubs)):
            changed[role] = dataclasses.replace(config, **values)
    if cfg.rl_config is not None and not cfg.is_supervised and (others := _fetch_others(cfg.rl_config, hubs)):
        changed["rl_config"] = dataclasses.replace(cfg.rl_config, **others)
    return changed


def _read_metadata(changed: Mapping[str, Any]) -> dict[str, ModelMetadata]:
    """Return the metadata of the changed roles, by role: their files may not have been here when the run file was read."""
    roles = {role: config for role, config in changed.items() if role not in ("megatron_training", "rl_config")}
    return {role: shape for role, config in roles.items() if (shape := read_model_metadata(config)) is not None}


@dataclasses.dataclass(frozen=True)
class _Finder:
    """Look-ups of models with their weights, or of their other files only."""

    hubs: Hubs
    has_weights: bool = True

    def find(self, text: str | None, key: str, kind: Kind = "model") -> str | None:
        """Return the folder of a name on a hub; any other text as it is."""
        return self.hubs.find(text, key, kind if self.has_weights else "tokenizer") if text else text


def _fetch_role(config: MegatronConfig, group: str, hubs: _Finder) -> dict[str, Any]:
    """Return the keys of a role that change, with folders."""
    values: dict[str, Any] = {}
    for key in _HUB_KEYS:
        text = getattr(config, key)
        if key == "base_model" and text is None:
            # the base that an adapter names, which may have been fetched itself
            named = (values.get(other, getattr(config, other)) for other in ("load", "pretrained_checkpoint", "ref_model"))
            text = next(filter(None, map(find_adapter_base, named)), None)
        if key == "load" and will_write_load(config):
            continue
        folder = hubs.find(text, f"{group}.{key}", "tokenizer" if key == "tokenizer_name_or_path" else "model")
        if folder is not None and folder != text:
            values[key] = folder
    return values


def _fetch_others(rl: RLConfig, hubs: _Finder) -> dict[str, Any]:
    """Return the keys of rl_config that change: reward model, judge, teachers and reference, with folders."""
    values: dict[str, Any] = {"reward_model": hubs.find(rl.reward_model, "rl_config.reward_model")}
    if rl.served_judge is not None:
        values["judge_model"] = hubs.find(rl.served_judge, "rl_config.judge_model")
    if (term := rl.distillation) is not None:
        teachers = [hubs.find(text, "rl_config.distillation.teacher_models") or text for text in term.teacher_models]
        values["distillation"] = dataclasses.replace(term, teacher_models=teachers)
    if (mode := rl.integrated_mode_config) is not None:
        path = hubs.find(mode.ref_model_load_path, "rl_config.integrated_mode_config.ref_model_load_path")
        values["integrated_mode_config"] = dataclasses.replace(mode, ref_model_load_path=path)
    return {name: value for name, value in values.items() if value != getattr(rl, name)}
