"""Keys that have changed since the checkpoint that a run resumes from: which may not, and what the others do to the run."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mindspeed_rl.config.keys import collect_keys
from mindspeed_rl.config.keys.schema import ON_RESUME, OnResume

if TYPE_CHECKING:
    from mindspeed_rl.config.run import RunConfig


@dataclass(frozen=True)
class KeyChange:
    """A key whose value differs from that of the run that wrote a checkpoint.

    Attributes:
        name: dotted.
        on_resume: its class; see `Key.on_resume`.
        saved, value: of the checkpoint and of this run, as text.
    """

    name: str
    on_resume: OnResume
    saved: str
    value: str

    def __str__(self) -> str:
        return f"{self.name} {self.saved} -> {self.value}"


def record_keys(cfg: RunConfig) -> dict[str, object]:
    """Return, as plain values by dotted name, all keys that a resumed run may not change, or not without a word."""
    return {name: value for name, _, value in _list_values(cfg)}


def find_changes(cfg: RunConfig, saved: Mapping[str, object]) -> list[KeyChange]:
    """Return the keys that differ from what `record_keys` has returned for another run."""
    return [
        KeyChange(name, on_resume, json.dumps(saved[name]), json.dumps(value))
        for name, on_resume, value in _list_values(cfg)
        if name in saved and saved[name] != value
    ]


def describe_changes(changes: list[KeyChange], effects: frozenset[OnResume]) -> list[str]:
    """Return a sentence for each of these effects that a change has, with the keys that have it."""
    sentences = []
    for effect in ON_RESUME:
        names = ", ".join(str(change) for change in changes if change.on_resume == effect)
        if names and effect in effects:
            sentences.append(f"changed since that checkpoint: {names}: {ON_RESUME[effect][0]}")
    return sentences


def _list_values(cfg: RunConfig) -> Iterator[tuple[str, OnResume, object]]:
    """Yield name, class and value of each key that is compared; keys of the roles are those of actor and critic."""
    shared = "megatron_training" if cfg.is_supervised else "actor_config"
    for path, key in collect_keys().items():
        group, _, name = path.partition(".")
        if key.on_resume in (None, "exact"):
            continue
        for holder in (shared, "critic_config") if group == "megatron_training" else (group,):
            value: object = getattr(cfg, holder, None)
            for part in name.split("."):
                value = getattr(value, part, None)
            if getattr(cfg, holder, None) is not None:
                yield f"{holder}.{name}", key.on_resume, _as_plain(value)


def _as_plain(value: object) -> object:
    """Return a value as JSON gives it back; the path of a file that exists is absolute."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = dataclasses.asdict(value)
    if isinstance(value, str) and "/" in value and Path(value).expanduser().exists():
        return str(Path(value).expanduser().resolve())
    if isinstance(value, list):
        return [_as_plain(item) for item in value]
    return json.loads(json.dumps(value, default=str))
