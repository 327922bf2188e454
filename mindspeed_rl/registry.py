"""Names of the suite and what they stand for: where "module:object" is imported, and the message about a wrong name.

A registry is a dict literal in the `__init__` of its package, name -> "module:object", so that reading it imports none of its
entries. Wherever it takes a name it also takes a "module:object" of the user's own.
"""

from __future__ import annotations

import difflib
import importlib
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any


def find_similar(name: object, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """Return the known name most like `name`, or None when none is as close as `cutoff`: from 0, unlike, to 1, the same."""
    similar = difflib.get_close_matches(str(name), list(known), n=1, cutoff=cutoff)
    return similar[0] if similar else None


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """Return the part of a sentence that proposes the nearest name, such as "; did you mean 'sft'?", or nothing."""
    near = find_similar(name, known)
    return "" if near is None else f"; did you mean {near!r}?"


def search_folders(folders: Iterable[Path]) -> None:
    """Find modules in these folders too, after all others: a console script has not even the working directory."""
    for folder in folders:
        if folder not in [Path(entry).absolute() for entry in sys.path]:
            sys.path.append(str(folder))


def load(target: str, subject: str, wraps: type[Exception] = ImportError) -> Any:
    """Import "module:object"; the object may be an attribute of an attribute, such as "module:Class.method".

    Args:
        subject: what the target is for, as the message begins with it, such as "rl_config.judge_parser".
        wraps: what the module may raise while it is imported so that a ValueError reports it; anything else passes.

    Raises:
        ValueError: not of that form, no such module, or nothing of that name in it.
    """
    module_name, colon, path = target.partition(":")
    if not colon:
        raise ValueError(f"{subject}: '{target}' is not of the form module:function")
    try:
        loaded: Any = importlib.import_module(module_name)
    except wraps as error:
        reason = str(error) if isinstance(error, ImportError) else f"{type(error).__name__}: {error}"
        raise ValueError(f"{subject}: cannot import the module '{module_name}': {reason}") from error
    for name in path.split("."):
        if not hasattr(loaded, name):
            raise ValueError(f"{subject} cannot be imported: the module '{module_name}' has no '{path}'")
        loaded = getattr(loaded, name)
    return loaded


def load_class(target: str, subject: str, base: str) -> Any:
    """Import the class that "module:Class" names.

    Args:
        base: "module:Class" of what it must derive from; a target because the caller must not import it before it is needed.

    Raises:
        ValueError: as `load`, or it is not such a class.
    """
    loaded, expected = load(target, subject), load(base, subject)
    if not (isinstance(loaded, type) and issubclass(loaded, expected)):
        raise ValueError(f"{subject}: {target} is not a subclass of {base}")
    return loaded


def target_of(registry: Mapping[str, str], name: str, subject: str, hint: str = "or module:Class of your own") -> str:
    """Return the "module:object" that a registered name stands for; one of the user's own stands for itself.

    Args:
        subject: what the user wrote, such as "--task gsm8"; the message begins with it.
        hint: what else may be written; the message ends with it.

    Raises:
        ValueError: unknown name; the message proposes the nearest and lists all.
    """
    if name in registry or ":" in name:
        return registry.get(name, name)
    near = find_similar(name, registry)
    proposal = "." if near is None else f"; did you mean {near}?"
    raise ValueError(f"{subject} is unknown{proposal} There are {', '.join(registry)}, {hint}")
