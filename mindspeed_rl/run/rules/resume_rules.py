"""Keys that have changed since the checkpoint that a run resumes from: which may not, and what the others do to the run."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from mindspeed_rl.config.keys import ROLE_GROUPS, collect_keys
from mindspeed_rl.config.keys.schema import ON_RESUME, OnResume
from mindspeed_rl.config.run import RunConfig
from mindspeed_rl.redaction import hide_in_configuration

#: keys that follow a model's config.json, or the length of the data, where a run does not set them
_DERIVED = frozenset(
    "model_type num_layers hidden_size ffn_hidden_size num_attention_heads kv_channels q_lora_rank kv_lora_rank qk_head_dim "
    "qk_pos_emb_head_dim v_head_dim linear_attention_freq num_experts n_shared_experts moe_ffn_hidden_size "
    "first_k_dense_replace padded_vocab_size train_iters pretrained_checkpoint".split()
)
#: key whose first adapter has its state in the folder of the run, so that the order of its entries counts
ROLE_ADAPTERS = "rl_config.role_adapters"


@dataclass(frozen=True)
class KeyChange:
    """A key whose value differs from the run that wrote a checkpoint.

    Attributes:
        name: dotted.
        on_resume: its class; see `Key.on_resume`.
        saved, value: values in the checkpoint and in this run, as JSON.
    """

    name: str
    on_resume: OnResume
    saved: str
    value: str

    def __str__(self) -> str:
        return f"{self.name} {self.saved} -> {self.value}"


def record_keys(groups: Mapping[str, object]) -> dict[str, object]:
    """Return, as plain values by dotted name, all keys that a resumed run may not change, or not without a word.

    Args:
        groups: the groups of the run that are there, by name; a role's has the keys of megatron_training.
    """
    values = {}
    for path, key in collect_keys().items():
        declared, _, name = path.partition(".")
        if key.on_resume in (None, "exact"):
            continue
        for group in groups if declared == "megatron_training" else (declared,):
            value = groups.get(group)
            if value is None or (declared == "megatron_training") != (group in ("megatron_training", *ROLE_GROUPS)):
                continue
            for part in name.split("."):
                value = getattr(value, part, None)
            values[f"{group}.{name}"] = _as_plain(value)
    return values


def list_keys_on_resume(cfg: RunConfig) -> dict[str, object]:
    """Return the values that a run which resumes from a checkpoint of this one is compared with, by dotted name."""
    shared = "megatron_training" if cfg.is_supervised else "actor_config"
    groups = {name: getattr(cfg, name) for name in ("critic_config", "rl_config", "generate_config")}
    keys = record_keys({shared: cfg.actor_config} | {name: group for name, group in groups.items() if group is not None})
    return hide_in_configuration(keys)  # a checkpoint has no secrets


def find_changes(saved: Mapping[str, object], values: Mapping[str, object]) -> list[KeyChange]:
    """Return the keys whose values differ; both mappings are from `record_keys`.

    Parts of a model's shape that one side does not set follow its config.json, the length follows train_epochs, and the start
    of a run that had its weights in `load` is now in pretrained_checkpoint.
    """
    changes, saved = [], hide_in_configuration(saved)  # earlier versions wrote all values
    for name in saved.keys() & values.keys():
        group, _, key = name.partition(".")
        on_resume = collect_keys()[f"megatron_training.{key}" if group in ROLE_GROUPS else name].on_resume
        is_derived = None in (saved[name], values[name]) and key in _DERIVED
        if _differ(name, saved[name], values[name]) and on_resume is not None and not is_derived:
            changes.append(KeyChange(name, on_resume, json.dumps(saved[name]), json.dumps(values[name])))
    return sorted(changes, key=lambda change: change.name)


def _differ(name: str, saved: object, value: object) -> bool:
    if name == ROLE_ADAPTERS and isinstance(saved, Mapping) and isinstance(value, Mapping):
        return saved != value or next(iter(saved.values()), None) != next(iter(value.values()), None)
    return saved != value


def describe_changes(changes: list[KeyChange], effects: Mapping[OnResume, bool]) -> list[str]:
    """Return a sentence for each of these effects that a change has, with the keys that have it."""
    sentences = []
    for effect, (text, _) in ON_RESUME.items():
        names = ", ".join(str(change) for change in changes if change.on_resume == effect)
        if names and effects.get(effect):
            sentences.append(f"changed since that checkpoint: {names}: {text}")
    return sentences


def _as_plain(value: object) -> object:
    """Return a value as JSON gives it back; the path of a file that exists is absolute."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = dataclasses.asdict(value)
    if isinstance(value, str) and value and Path(value).expanduser().exists():
        return str(Path(value).expanduser().resolve())
    if isinstance(value, list):
        return [_as_plain(item) for item in value]
    return json.loads(json.dumps(value, default=str))
