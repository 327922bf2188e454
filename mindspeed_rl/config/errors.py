"""The one exception of the configuration layer, and the sentences it is made of."""

from __future__ import annotations

from collections.abc import Iterable

from mindspeed_rl import registry


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


def nearest(name: object, known: Iterable[str]) -> str | None:
    """Return the known name most like `name`, or None when nothing is close."""
    return registry.nearest(name, known, cutoff=0.5)  # keys are long, so that half a key is a hint


def unknown_key(path: str, value: object, known: Iterable[str], synonyms: dict[str, str] | None = None) -> str:
    """Return the sentence for a key that no group has.

    Args:
        path: the dotted key as the user wrote it, for example "rl_config.clip_ration".
        known: the keys of the same group.
        synonyms: spellings of other projects, each with the name of the key here.
    """
    group, _, name = path.rpartition(".")
    likely = (synonyms or {}).get(name) or nearest(name, known)
    if likely:
        hint = f"the nearest known key is {f'{group}.{likely}' if group else likely}"
    else:
        hint = f"no key of {group or 'the top level'} has a similar name"
    return f"{path} (value {value!r}) is not a known key; {hint}"


def unknown_value(path: str, value: object, allowed: Iterable[object]) -> str:
    """Return the sentence for a value that is not among the allowed ones."""
    allowed = list(allowed)
    likely = nearest(value, [item for item in allowed if isinstance(item, str)])
    hint = f"; did you mean {likely!r}?" if likely else ""
    listed = ", ".join("null" if item is None else str(item) for item in allowed)
    return f"{path} is {value!r}, but must be one of {listed}{hint}"
