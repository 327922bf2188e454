"""The declaration of a key, and how a group of a YAML file becomes a dataclass.

Every key of a group is a dataclass field made by `key`, which holds all that is known of the key in one place. `build` turns a
plain mapping into the dataclass and collects every violation.

Not pydantic 2: for the same checks it took more lines (209 here; our rules for numbers become types, its errors are translated
back), 0.18 s of CPU instead of 0.09 s to import the package, and 65 ms instead of 10 ms for a first run file.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeVar

from mindspeed_rl.catalogue.records import Bounds
from mindspeed_rl.config.errors import KeyNames, unknown_key, unknown_value
from mindspeed_rl.config.keys.ignored import IGNORED, AnyGroup, Text

#: (another key of the group, its values): the key is read only while the other key has one of these values
Needs = tuple[str, tuple[object, ...] | Literal["set", "above 1"]]
#: class of a key whose value has changed since the checkpoint that a run resumes from; see `ON_RESUME`
OnResume = Literal["exact", "order", "schedule", "in_flight", "random", "kl", "reference", "fixed"]
#: effect of such a change on the run, in English and Chinese; all but the first and the last are said on the console
ON_RESUME: dict[OnResume, Text] = {
    "exact": (
        "the run continues exactly, with the new value from the next iteration on",
        "运行准确地接着进行，从下一次迭代起用新值",
    ),
    "order": (
        "these are other data, or the same in another order: a new pass over them begins where the run resumes",
        "数据不同，或顺序不同：从续训处开始新的一遍",
    ),
    "schedule": (
        "the learning rate follows the new curve, from the iteration that is reached on",
        "学习率从已到达的迭代起按新的曲线变化",
    ),
    "in_flight": (
        "responses that were being generated are dropped, and generated anew for the same prompts",
        "生成到一半的回答丢弃，对同样的 prompt 重新生成",
    ),
    "random": (
        "random generators start anew, which matters only with dropout",
        "随机数发生器重新开始，只在有 dropout 时有影响",
    ),
    "kl": (
        "an adaptive KL coefficient continues from its last value, not from init_kl_coef",
        "自适应的 KL 系数从上次的值继续，而不是 init_kl_coef",
    ),
    "reference": (
        "the KL divergence is that to another reference model from here on",
        "从这里起 KL 散度相对于另一个参考模型",
    ),
    "fixed": (
        "refused: the training state of the checkpoint does not fit; keep the value, or set finetune: true to start from its "
        "weights",
        "拒绝：检查点的训练状态与之不符；保留原值，或设 finetune: true 只从其权重开始",
    ),
}
_G = TypeVar("_G")
_DAYS_31 = 31 * 86400.0


class Range:
    """Ranges that several keys share. Upper limits are far beyond any run: 1e30 rows are an error message, not a hang."""

    ROWS, TOKENS, TOKENS_FROM_0 = Bounds(1, 10**7), Bounds(1, 10**8), Bounds(0, 10**8)
    ITERATIONS, ITERATIONS_FROM_0, RESTARTS = Bounds(1, 10**9), Bounds(0, 10**9), Bounds(0, 10**4)
    DEVICES, PROCESSES, CALLS = Bounds(1, 10**5), Bounds(1, 4096), Bounds(0, 10**6)
    WIDTH, LAYERS, EXPERTS, PARTS = Bounds(1, 10**7), Bounds(1, 10**4), Bounds(1, 10**5), Bounds(1, 10**4)
    SEED, WEIGHT, RATE = Bounds(0, 2**32 - 1), Bounds(-1e6, 1e6), Bounds(0, 1e3)
    FRACTION, DECAY = Bounds(0, 1), Bounds(0, 1, excludes_high=True, default=0.9)
    FACTOR, POSITIVE = Bounds(0, 1e9, excludes_low=True), Bounds(0, 1e6, excludes_low=True)
    WAIT_S = Bounds(0, _DAYS_31, excludes_low=True, default=1800)
    SCORE_S = Bounds(0, _DAYS_31, excludes_low=True, default=30)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Key:
    """All that is known of a key.

    Attributes:
        doc, zh: what the key does, with its unit, in English and Chinese.
        range: bounds of a number; numbers that algorithms read have theirs in `catalogue.SETTINGS`.
        names: the known names of a string key that also takes "module:function".
        needs: the condition under which the key is read; always when None.
        only_on: the platforms on which the key is read; all when empty.
        stages: the stages that read a key of a role; all when empty.
        supervised: supervised stages read this key of rl_config too.
        no_effect: why the key does nothing although rules check it.
        elsewhere: names of the key in other projects; a dotted one holds inside that group only.
        upstream: the different meaning or default that the key has in MindSpeed-RL.
        on_resume: what a change of the value does to a run that resumes, one of `ON_RESUME`; None is an omission.
        kind: the resolved type of the field.
        default: the value when the run file does not set the key.
    """

    doc: str
    zh: str
    range: Bounds | None
    names: tuple[str, ...]
    needs: Needs | None
    only_on: tuple[str, ...]
    stages: tuple[str, ...]
    supervised: bool
    no_effect: Text | None
    elsewhere: tuple[str, ...]
    upstream: Text | None
    on_resume: OnResume | None = None
    kind: object = None
    default: object = None


def key(
    default: object,
    doc: str,
    zh: str,
    *,
    range: Bounds | None = None,
    names: tuple[str, ...] = (),
    needs: Needs | None = None,
    only_on: str = "",
    stages: str = "",
    supervised: bool = False,
    no_effect: Text | None = None,
    elsewhere: str = "",
    upstream: Text | None = None,
    on_resume: OnResume | None = None,
) -> Any:
    """Declare one key of a group; `Key` describes the arguments, of which lists of words are given as one text.

    Args:
        default: the value when the run file does not set the key; lists are copied, and a class is called, for each instance.
    """
    record = Key(
        doc=doc,
        zh=zh,
        range=range,
        names=names,
        needs=needs,
        only_on=tuple(only_on.split()),
        stages=tuple(stages.split()),
        supervised=supervised,
        no_effect=no_effect,
        elsewhere=tuple(elsewhere.split()),
        upstream=upstream,
        on_resume=on_resume,
    )
    if isinstance(default, type):
        return dataclasses.field(default_factory=default, metadata={"key": record})
    if isinstance(default, list):
        return dataclasses.field(default_factory=lambda: list(default), metadata={"key": record})
    return dataclasses.field(default=default, metadata={"key": record})


@functools.cache
def list_keys(group: type) -> dict[str, Key]:
    """Return the keys of a group: first the class's own, then its bases' from left to right."""
    hints, fields = typing.get_type_hints(group), {field.name: field for field in dataclasses.fields(group)}
    ordered = [fields[name] for item in group.__mro__ for name in vars(item).get("__annotations__", {}) if name in fields]
    result: dict[str, Key] = {}
    for field in ordered:
        default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        result[field.name] = dataclasses.replace(field.metadata["key"], kind=hints[field.name], default=default)
    return result


def normalize(mapping: Mapping[Any, object]) -> dict[str, Any]:
    """Return the mapping with hyphens in its keys written as underscores."""
    return {str(name).replace("-", "_"): value for name, value in mapping.items()}


def build(
    group: type[_G], values: Mapping[str, object], path: str, errors: list[str], names: KeyNames | None = None
) -> tuple[_G, frozenset[str]]:
    """Return the dataclass for `values` and the names of its keys that were set.

    Args:
        group: the dataclass of the group.
        values: keys as in the YAML file; hyphens count as underscores.
        path: the dotted name of the group, for the messages.
        errors: receives one sentence for each unknown key and each value of a wrong type.
        names: the names of all keys, for a key in the wrong group or under its name in another project.
    """
    keys, ignored = list_keys(group), IGNORED.get(group.__name__, {})
    arguments: dict[str, object] = {}
    for name, value in normalize(values).items():
        where = f"{path}.{name}" if path else name
        if name in ignored:
            _read(value, ignored[name].kind, where, errors)
            continue
        if name not in keys:
            errors.append(unknown_key(where, value, (*keys, *ignored), names))
            continue
        violations: list[str] = []
        result, known = _read(value, keys[name].kind, where, violations), keys[name].names
        if not violations and known and isinstance(result, str) and result not in known and ":" not in result:
            violations.append(unknown_value(where, result, [*known, "module:function"]))
        if not violations:
            arguments[name] = result
        errors += violations
    construct: Callable[..., _G] = group
    return construct(**arguments), frozenset(arguments)


def _read(value: object, expected: Any, where: str, errors: list[str]) -> object:
    """Return `value` as the expected type; for one that does not fit, `errors` gets a sentence and the result means nothing.

    A number may be quoted or written as 1e-6 (which plain YAML reads as text); a float without a fraction serves as an int.
    Nothing else is converted: text is never a truth value and a truth value is never a number.
    """
    origin, members = typing.get_origin(expected), typing.get_args(expected)
    if origin in (typing.Union, types.UnionType):
        return _read_union(value, members, where, errors)
    if origin is Literal:
        if not isinstance(value, str) or value not in members:
            errors.append(unknown_value(where, value, members))
        return value
    if origin is list:
        if isinstance(value, (list, tuple)):
            return [_read(item, members[0], f"{where}[{index}]", errors) for index, item in enumerate(value)]
        errors.append(_wrong_type(where, value, expected))
        return value
    if dataclasses.is_dataclass(expected):
        if isinstance(value, Mapping):
            return build(expected, value, where, errors)[0]
        errors.append(f"{where} is {value!r}, but must be a group with the keys {', '.join(list_keys(expected))}")
        return value
    try:
        return _SCALARS[expected](value)
    except (ValueError, OverflowError):
        errors.append(_wrong_type(where, value, expected))
        return value


def _read_union(value: object, members: tuple[Any, ...], where: str, errors: list[str]) -> object:
    if value is None and type(None) in members:
        return None
    members = tuple(member for member in members if member is not type(None))
    if len(members) == 1:
        return _read(value, members[0], where, errors)
    for member in members:
        violations: list[str] = []
        result = _read(value, member, where, violations)
        if not violations:
            return result
    errors.append(_wrong_type(where, value, functools.reduce(operator.or_, members)))
    return value


def _require(kind: type) -> Callable[[object], object]:
    def read(value: object) -> object:
        if not isinstance(value, kind):
            raise ValueError
        return value

    return read


def _to_float(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float, str)) or not math.isfinite(number := float(value)):
        raise ValueError
    return number


def _to_int(value: object) -> int:
    number = _to_float(value)
    if number != int(number):
        raise ValueError
    # an int does not go through float, which rounds beyond 2**53
    return value if isinstance(value, int) else int(number)


_SCALARS = {bool: _require(bool), int: _to_int, float: _to_float, str: _require(str), AnyGroup: _require(Mapping)}
_NAMES = {bool: "true or false", int: "a whole number", float: "a number", str: "text", type(None): "null", AnyGroup: "a group"}


def _describe_type(expected: Any) -> str:
    """Return the type in words that fit after "must be"."""
    origin = typing.get_origin(expected)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_describe_type(member) for member in typing.get_args(expected))
    if origin is Literal:
        return " or ".join("null" if item is None else str(item) for item in typing.get_args(expected))
    if origin is list:
        return f"a list, each item {_describe_type(typing.get_args(expected)[0])}"
    return _NAMES.get(expected, f"a group ({expected.__name__})")


def _wrong_type(path: str, value: object, expected: object) -> str:
    written = "empty" if value is None else repr(value)
    return f"{path} is {written}, but must be {_describe_type(expected)}"
