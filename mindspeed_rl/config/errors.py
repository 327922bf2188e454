"""The exception of the configuration layer, and the sentences of which it is made."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from mindspeed_rl import registry
from mindspeed_rl.catalogue import ADVANTAGES, POLICY_LOSSES, STAGES
from mindspeed_rl.catalogue.guide import NOT_AVAILABLE
from mindspeed_rl.config.compat import NO_EQUIVALENT, VALUES_ELSEWHERE
from mindspeed_rl.config.roles import ROLE_GROUPS

_FP8 = (
    "vLLM's CPU build computes fp8 products only on processors with AMX, and vllm-ascend on devices after A2 and A3; set "
    "int8, which both have (vllm-ascend names it ascend), mxfp8, which the CPU emulates and an Ascend 950 has, or null for the "
    "format of dtype"
)
#: key -> value that is not available -> the reason, and what is
_NOT_AVAILABLE = {
    **NOT_AVAILABLE,
    "quantization": {
        **dict.fromkeys(("fp8", "fp8_e4m3", "fp8_e5m2"), _FP8),
        "w8a8_mxfp8": "it is what vllm-ascend names mxfp8 with; set mxfp8",
        "w4a8_dynamic": "it is what vllm-ascend names the experts of w4a8 with; set w4a8",
        "ascend": "it is what vllm-ascend names int8 with; set int8, on the NPU too",
    },
}


class ConfigError(ValueError):
    """A run file that cannot be used; `errors` holds one sentence for each violation, all of them at once."""

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


@dataclass(frozen=True)
class KeyNames:
    """Dotted names of keys.

    Attributes:
        here: by the last name of the key; names that several groups have are left out.
        elsewhere: by the name in another project. A dotted name answers groups of verl; one without a dot holds in any group.
    """

    here: Mapping[str, str]
    elsewhere: Mapping[str, str]


def raise_together(checks: Iterable[Callable[[], object]]) -> None:
    """Run all checks, so that one wrong path hides no other.

    Args:
        checks: each raises ValueError for what is wrong with one file.

    Raises:
        ConfigError: one of them fails, or several; a sentence each.
    """
    errors: dict[str, None] = {}
    for check in checks:
        try:
            check()
        except ConfigError as error:
            errors |= dict.fromkeys(error.errors)
        except ValueError as error:
            errors[str(error)] = None
    if errors:
        raise ConfigError(errors)


#: vit_config is read, and has no keys of its own that count
_ROLES = (*ROLE_GROUPS, "vit_config")


def link_reference(path: str) -> str:
    """Return the place in docs/keys.md that describes a key or a group; roles share the entries of megatron_training."""
    group, dot, name = path.partition(".")
    if not group:
        return "docs/keys.md"
    return f"docs/keys.md#{'megatron_training' if group in _ROLES else group}{dot}{name}"


#: characters from which the beginning of a name is a hint
_MIN_BEGINNING = 4


def suggest_name(name: object, known: Iterable[str]) -> str | None:
    """Return the only known name that begins with `name`, else the one most like it, or None when nothing is close."""
    names = list(known)
    completions = [other for other in names if len(str(name)) >= _MIN_BEGINNING and other.startswith(str(name))]
    if len(completions) == 1:
        return completions[0]
    return registry.find_similar(name, names, cutoff=0.5)  # keys are long, so that half a key is a hint


def unknown_key(path: str, value: object, known: Iterable[str], names: KeyNames | None = None) -> str:
    """Return the sentence for a key that no group has, with its name here or the most similar name.

    Args:
        path: the dotted key as the user wrote it, for example "rl_config.clip_ration".
        known: the keys of the same group.
        names: the names of all keys, for a key in the wrong group or under its name in another project.
    """
    names = names or KeyNames({}, {})
    message = f"{path} (value {value!r}) is not a known key"
    if isinstance(value, Mapping) and (inner := _translate_group(path, value, names)):
        return f"{message}; {'; '.join(inner)}"
    group, _, name = path.rpartition(".")
    likely = names.here.get(name) or _find_renamed(path, names)
    if likely is None and (instead := find_longest_end(path, NO_EQUIVALENT)):
        return f"{message}: {instead}"
    if likely is None and (similar := suggest_name(name, known)):
        likely = f"{group}.{similar}" if group else similar
    if likely is None:
        return f"{message}; no key of {group or 'the top level'} has a similar name (see {link_reference(group)})"
    return f"{message}; the nearest known key is {likely} (see {link_reference(likely)})"


def _translate_group(path: str, group: Mapping[str, object], names: KeyNames) -> list[str]:
    """Return a sentence for each key of another project's group."""
    sentences: list[str] = []
    for name, value in group.items():
        inner = f"{path}.{name}"
        if isinstance(value, Mapping):
            sentences += _translate_group(inner, value, names)
        elif likely := _find_renamed(inner, names):
            sentences.append(f"{inner} is {likely} here (see {link_reference(likely)})")
        elif instead := find_longest_end(inner, NO_EQUIVALENT):
            sentences.append(f"{inner}: {instead}")
    return sentences


def _find_renamed(path: str, names: KeyNames) -> str | None:
    """Return the key that another project calls as `path` does; a key of a role stays with the role."""
    likely, group = find_longest_end(path, names.elsewhere), path.rpartition(".")[0]
    return likely.replace("megatron_training", group) if likely and group in _ROLES else likely


def find_longest_end(path: str, table: Mapping[str, str]) -> str | None:
    """Return the entry of the longest dotted end of `path` that the table has."""
    parts = path.split(".")
    return next((table[end] for start in range(len(parts)) if (end := ".".join(parts[start:])) in table), None)


def _find_algorithm(key: str, name: str) -> str:
    """Return the key and value that select an algorithm, where a value of another key that selects algorithms names it."""
    tables = {"megatron_training.stage": STAGES, "rl_config.loss_type": POLICY_LOSSES, "rl_config.adv_estimator": ADVANTAGES}
    others = {path: table for path, table in tables.items() if not path.endswith(f".{key}")}
    for path, table in others.items() if len(others) < len(tables) else ():
        here = VALUES_ELSEWHERE[path.rpartition(".")[2]].get(name, re.sub("[-. ]+", "_", name))
        if here in table:
            return f"write {path}: {here}"
    return ""


def unknown_value(path: str, value: object, allowed: Iterable[object]) -> str:
    """Return the sentence for a value that is not among the allowed ones."""
    allowed = list(allowed)
    key, name = path.rpartition(".")[2], str(value).lower()
    texts = {item.lower(): item for item in allowed if isinstance(item, str)}
    likely = VALUES_ELSEWHERE.get(key, {}).get(name) or texts.get(re.sub("[-. ]+", "_", name))
    missing = _NOT_AVAILABLE.get(key, {}).get(name)
    if missing and not likely:
        return f"{path} is {value!r}, which is not available: {missing}"
    elsewhere = "" if likely else _find_algorithm(key, name)
    likely = likely or suggest_name(value, texts.values())
    hint = f"; {elsewhere}" if elsewhere else f"; did you mean {likely!r}?" if likely else ""
    listed = ", ".join("null" if item is None else str(item) for item in allowed)
    return f"{path} is {value!r}, but must be one of {listed}{hint}"
