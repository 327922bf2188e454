"""The one exception of the configuration layer, and the sentences it is made of."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from mindspeed_rl import registry
from mindspeed_rl.config.compat.names_elsewhere import OTHERWISE, RENAMED, VALUES


class ConfigError(ValueError):
    """A run file that cannot be used; `errors` holds one sentence for each mistake, all of them at once."""

    def __init__(self, errors: Iterable[str]) -> None:
        self.errors: list[str] = list(errors)
        if len(self.errors) == 1:
            text = self.errors[0]
        else:
            text = f"{len(self.errors)} mistakes in the configuration:\n" + "\n".join(f"  - {error}" for error in self.errors)
        super().__init__(text)

    def __reduce__(self) -> tuple[type, tuple[list[str]]]:
        """Keep `errors` when Ray or multiprocessing carries the exception to another process."""
        return type(self), (self.errors,)


_ROLES = ("actor_config", "ref_config", "reward_config", "critic_config", "vit_config")


def reference(path: str) -> str:
    """Return where docs/keys.md says more of a key, or of a group; roles share the entries of megatron_training."""
    group, dot, name = path.partition(".")
    if not group:
        return "docs/keys.md"
    return f"docs/keys.md#{'megatron_training' if group in _ROLES else group}{dot}{name}"


def nearest(name: object, known: Iterable[str]) -> str | None:
    """Return the known name most like `name`, or None when nothing is close."""
    return registry.nearest(name, known, cutoff=0.5)  # keys are long, so that half a key is a hint


def unknown_key(path: str, value: object, known: Iterable[str], homes: Mapping[str, str] | None = None) -> str:
    """Return the sentence for a key that no group has: what it is called here, or what its name is most like.

    Args:
        path: the dotted key as the user wrote it, for example "rl_config.clip_ration".
        known: the keys of the same group.
        homes: the dotted name of every key by its last name, for a key in the wrong group.
    """
    said = f"{path} (value {value!r}) is not a known key"
    if isinstance(value, Mapping) and (inside := _known_inside(path, value)):
        return f"{said}; {'; '.join(inside)}"
    group, _, name = path.rpartition(".")
    likely = (homes or {}).get(name) or _renamed(path)
    if likely is None and (instead := _elsewhere(path, OTHERWISE)):
        return f"{said}: {instead}"
    if likely is None and (spelled := nearest(name, known)):
        likely = f"{group}.{spelled}" if group else spelled
    if likely is None:
        return f"{said}; no key of {group or 'the top level'} has a similar name (see {reference(group)})"
    return f"{said}; the nearest known key is {likely} (see {reference(likely)})"


def _known_inside(path: str, group: Mapping[Any, Any]) -> list[str]:
    """Return what the keys of another project's group are called here."""
    found: list[str] = []
    for name, value in group.items():
        inner = f"{path}.{name}"
        if isinstance(value, Mapping):
            found += _known_inside(inner, value)
        elif likely := _renamed(inner):
            found.append(f"{inner} is {likely} here (see {reference(likely)})")
        elif instead := _elsewhere(inner, OTHERWISE):
            found.append(f"{inner}: {instead}")
    return found


def _renamed(path: str) -> str | None:
    """Return the key that another project calls as `path` does; a role asks for its own."""
    likely = _elsewhere(path, RENAMED)
    group, _, name = path.rpartition(".")
    return likely.replace("megatron_training", group) if likely and group in _ROLES else likely


def _elsewhere(path: str, table: Mapping[str, str]) -> str | None:
    """Return the entry of the longest dotted end of `path` that the table has."""
    names = path.split(".")
    return next((table[end] for start in range(len(names)) if (end := ".".join(names[start:])) in table), None)


def unknown_value(path: str, value: object, allowed: Iterable[object]) -> str:
    """Return the sentence for a value that is not among the allowed ones."""
    allowed = list(allowed)
    likely = VALUES.get(path.rpartition(".")[2], {}).get(str(value).lower())
    likely = likely or nearest(value, [item for item in allowed if isinstance(item, str)])
    hint = f"; did you mean {likely!r}?" if likely else ""
    listed = ", ".join("null" if item is None else str(item) for item in allowed)
    return f"{path} is {value!r}, but must be one of {listed}{hint}"
