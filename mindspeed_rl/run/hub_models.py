"""Models and tokenizers that a run file names as on a hub, as folders in the caches of the hubs."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from mindspeed_rl.config import MegatronConfig, RunConfig
from mindspeed_rl.config.keys.rl import RLConfig
from mindspeed_rl.config.model_metadata import ModelMetadata, find_adapter_base, read_model_metadata
from mindspeed_rl.hub import Kind, fetch, parse_hub_name

_ROLES = ("actor_config", "ref_config", "reward_config", "critic_config", "teacher_config", "megatron_training")
#: keys of a role that may be a name on a hub
_HUB_KEYS = ("load", "pretrained_checkpoint", "ref_model", "base_model", "tokenizer_name_or_path")


def fetch_configs(cfg: RunConfig, *, downloads: bool = True) -> RunConfig:
    """Fetch what a run names as on a hub, but for weights; return the run with what the files of its models say.

    Names stay: `fetch_models` replaces them. Arguments and errors are its own.
    """
    changed = _fetch(cfg, _Hubs(downloads, has_weights=False))
    return dataclasses.replace(cfg, model_metadata=cfg.model_metadata | _read_metadata(changed)) if changed else cfg


def fetch_models(cfg: RunConfig, *, downloads: bool = True) -> RunConfig:
    """Return the run with the folders of models and tokenizers that it names as on a hub, and with what their config.json says.

    Args:
        downloads: what is not in the cache is fetched.

    Raises:
        NotFetchedError: something is not in the cache, and `downloads` is False.
        ValueError: a hub has no such model, or cannot be reached.
    """
    changed = _fetch(cfg, _Hubs(downloads))
    return dataclasses.replace(cfg, model_metadata=cfg.model_metadata | _read_metadata(changed), **changed) if changed else cfg


def _fetch(cfg: RunConfig, hubs: _Hubs) -> dict[str, Any]:
    """Return the groups of a run file that change, with folders."""
    group = "megatron_training" if cfg.is_supervised else None
    changed: dict[str, Any] = {}
    for role in _ROLES:
        config: MegatronConfig | None = getattr(cfg, role)
        if config is not None and (values := _fetch_role(config, group or role, hubs)):
            changed[role] = dataclasses.replace(config, **values)
    if cfg.rl_config is not None and not cfg.is_supervised and (others := _fetch_others(cfg.rl_config, hubs)):
        changed["rl_config"] = dataclasses.replace(cfg.rl_config, **others)
    return changed


def _read_metadata(changed: Mapping[str, Any]) -> dict[str, ModelMetadata]:
    """Return what the files of the changed roles say: those that have come only now say as much as those that were here."""
    roles = {role: config for role, config in changed.items() if role not in ("megatron_training", "rl_config")}
    return {role: shape for role, config in roles.items() if (shape := read_model_metadata(config)) is not None}


class _Hubs:
    """The hubs, of which a run takes each model once."""

    def __init__(self, downloads: bool, *, has_weights: bool = True) -> None:
        self._downloads, self._has_weights = downloads, has_weights
        self._folders: dict[tuple[str, Kind], str] = {}

    def find(self, text: str | None, key: str, kind: Kind = "model") -> str | None:
        """Return the folder of a name on a hub; any other text as it is."""
        if not text or (name := parse_hub_name(text)) is None:
            return text
        kind = kind if self._has_weights else "tokenizer"
        # a model is fetched with its tokenizer
        known = self._folders.get((text, "model")) or self._folders.get((text, kind))
        if known is None:
            known = self._folders[text, kind] = str(fetch(name, key, kind, downloads=self._downloads))
        return known


def _fetch_role(config: MegatronConfig, group: str, hubs: _Hubs) -> dict[str, Any]:
    """Return the keys of a role that change, with folders."""
    values: dict[str, Any] = {}
    for key in _HUB_KEYS:
        text = getattr(config, key)
        if key == "base_model" and text is None:
            # the base that an adapter names, which may have been fetched itself
            named = (values.get(other, getattr(config, other)) for other in ("load", "pretrained_checkpoint", "ref_model"))
            text = next(filter(None, map(find_adapter_base, named)), None)
        # a folder of checkpoints that are still to be written
        if key == "load" and (text == config.save or config.pretrained_checkpoint):
            continue
        folder = hubs.find(text, f"{group}.{key}", "tokenizer" if key == "tokenizer_name_or_path" else "model")
        if folder is not None and folder != text:
            values[key] = folder
    return values


def _fetch_others(rl: RLConfig, hubs: _Hubs) -> dict[str, Any]:
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
