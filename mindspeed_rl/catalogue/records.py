"""What the catalogue says of an algorithm, and how a record is found: by its name, or as the "module:NAME" of a plug-in."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, TypeVar

from mindspeed_rl import registry

Level = Literal["token", "sequence", "sequence_token"]
Normalizer = Literal["sequence", "token", "constant"]
Scale = Literal["group", "batch", "none", "gdpo"]

#: what an algorithm may ask for beyond rewards, masks and the log-probs of the policy that learns
NEEDS: dict[str, str] = {
    "reference": "log-probs of the reference model",
    "old_log_probs": "log-probs of the policy at the start of the update, computed even where they equal the present ones",
    "values": "the critic's values, so a critic that learns beside the actor",
    "greedy_baseline": "the reward of the greedy response to each prompt",
    "reward_parts": "the score of each reward function, before weights",
    "entropies": "entropies of the policy at the start of the update",
}


@dataclass(frozen=True)
class Bounds:
    """Where a number may lie.

    Attributes:
        low, high: None is open.
        excludes_low: the number must be greater than `low`.
        meaning: what the number is, for the sentence that refuses a wrong one.
        default: a value to propose instead of one outside.
        otherwise: keys of rl_config with the values that make the bound pointless.
        rule: short stable name of the rule that a number outside breaks.
        excludes_high: the number must be less than `high`.
    """

    low: float | None = None
    high: float | None = None
    excludes_low: bool = False
    meaning: str = ""
    default: float | None = None
    otherwise: Mapping[str, Any] = field(default_factory=dict)
    rule: str = "range"
    excludes_high: bool = False

    def contain(self, value: float) -> bool:
        """True when the value lies within."""
        if self.low is not None and (value <= self.low if self.excludes_low else value < self.low):
            return False
        return self.high is None or (value < self.high if self.excludes_high else value <= self.high)

    def __str__(self) -> str:
        parts = [f"{'greater than' if self.excludes_low else 'at least'} {exact(self.low)}"] if self.low is not None else []
        parts += [f"{'less than' if self.excludes_high else 'at most'} {exact(self.high)}"] if self.high is not None else []
        return " and ".join(parts)


def exact(number: float) -> str:
    """A bound as people write it: 1e+09 for a round one, 4294967295 where rounding would change it."""
    return f"{number:g}" if float(f"{number:g}") == number else str(number)


@dataclass(frozen=True)
class Choice:
    """A piece of a formula that depends on one setting.

    Attributes:
        setting: its key in rl_config.
        texts: template by value.
        otherwise: template for every other value.
    """

    setting: str
    texts: Mapping[Any, str]
    otherwise: str = ""


@dataclass(frozen=True, kw_only=True)
class Algorithm:
    """One entry of the catalogue, or what a plug-in brings in its place. Plain values only: it travels to the workers.

    Attributes:
        target: "module:function" of the torch function; it is imported when `load` is called.
        formula: template of what the function computes. `{name}` is a piece of `choices`, or a number of the run: any
            number of rl_config by its key, besides `lower` and `upper` (bounds of the clipped ratio), `group_size` and
            `others` (group_size - 1). None: the algorithm brings no formula.
        choices: pieces of the formula by name.
        reads: keys of rl_config that the function reads; None where nobody said which.
        needs: words of `NEEDS`.
        bounds: bounds of settings that hold for this algorithm besides those of `catalogue.SETTINGS`.
        folders: where the modules of a plug-in are looked for when they are not installed.
    """

    target: str
    formula: str | None = None
    choices: Mapping[str, Choice] = field(default_factory=dict)
    reads: frozenset[str] | None = frozenset()
    needs: frozenset[str] = frozenset()
    bounds: Mapping[str, Bounds] = field(default_factory=dict)
    folders: tuple[str, ...] = ()

    #: the key of rl_config that names such an algorithm
    key: ClassVar[str] = ""
    #: parameters of the function
    parameters: ClassVar[tuple[str, ...]] = ()
    #: words of NEEDS that reach the function
    may_need: ClassVar[frozenset[str]] = frozenset()

    def __post_init__(self) -> None:
        if ":" not in self.target:
            raise ValueError(f"target {self.target!r} of a {type(self).__name__} is not of the form module:function")
        # the record is frozen, and a plug-in may give any collection of words
        object.__setattr__(self, "needs", frozenset(self.needs))
        if self.reads is not None:
            object.__setattr__(self, "reads", frozenset(self.reads))
        if wrong := self.needs - self.may_need:
            allowed = ", ".join(f"{need} ({NEEDS[need]})" for need in sorted(self.may_need)) or "nothing"
            raise ValueError(f"a {type(self).__name__} cannot need {', '.join(sorted(wrong))}; it may need {allowed}")

    def load(self) -> Callable[..., Any]:
        """Return the torch function.

        Raises:
            ValueError: it cannot be imported.
        """
        return _imported(self.target, f"target {self.target!r}", self.folders)

    def may_read(self, name: str) -> bool:
        """True unless the record says that the function does not read this key of rl_config."""
        return self.reads is None or name in self.reads

    def text(self, numbers: Mapping[str, Any]) -> str | None:
        """Return the formula with the run's numbers in it; None when there is no formula.

        Raises:
            KeyError: the template names a number that does not exist.
        """
        if self.formula is None:
            return None
        pieces = {
            name: choice.texts.get(numbers[choice.setting], choice.otherwise).format_map(numbers)
            for name, choice in self.choices.items()
        }
        return self.formula.format_map({**numbers, **pieces})


@dataclass(frozen=True, kw_only=True)
class PolicyLoss(Algorithm):
    """A loss of each token, and how tokens become the loss.

    The function takes `(inputs: PolicyInputs, objective: Objective)` and returns (losses [B, R], clipped [B, R] bool).

    Attributes:
        normalizer: what the summed loss is divided by: a key of `catalogue.NORMALIZERS`.
        level: the importance ratio it takes when importance_sampling_level is unset.
        levels: those it can take.
    """

    normalizer: Normalizer = "token"
    level: Level = "token"
    levels: tuple[Level, ...] = ("token", "sequence", "sequence_token")

    key: ClassVar[str] = "loss_type"
    parameters: ClassVar[tuple[str, ...]] = ("inputs", "objective")
    may_need: ClassVar[frozenset[str]] = frozenset(("reference", "old_log_probs", "entropies"))


@dataclass(frozen=True, kw_only=True)
class AdvantageEstimator(Algorithm):
    """From scores to advantages.

    The function takes `(inputs: AdvantageInputs, objective: Objective)` and returns (advantages, returns), both [B, R].

    Attributes:
        min_group_size: responses of a prompt it compares at least.
        groups_while: (key, values): the minimum holds only while the key has one of these values.
        kl_in_reward: False where there is no reward to take the KL from.
        instead: (key, value, name): with this value of the key, the estimator of that name is meant.
        idle: {key: (other, value)}: the key does nothing while the other key has this value.
    """

    min_group_size: int = 1
    groups_while: tuple[str, tuple[str, ...]] | None = None
    kl_in_reward: bool = True
    instead: tuple[str, str, str] | None = None
    idle: Mapping[str, tuple[str, str]] = field(default_factory=dict)

    key: ClassVar[str] = "adv_estimator"
    parameters: ClassVar[tuple[str, ...]] = ("inputs", "objective")
    may_need: ClassVar[frozenset[str]] = frozenset(("values", "greedy_baseline", "reward_parts"))


@dataclass(frozen=True, kw_only=True)
class KlEstimator(Algorithm):
    """The KL to the reference of each token. The function takes x = log pi - log ref [B, R] and returns [B, R].

    Attributes:
        clamp: (limit of x, limit of the value) with kl_clamp; None: kl_clamp does nothing.
        gradient: "module:function" of x whose gradient is taken in place of the value's; None: the value's own.
    """

    clamp: tuple[float, float] | None = None
    gradient: str | None = None

    key: ClassVar[str] = "kl_penalty"
    parameters: ClassVar[tuple[str, ...]] = ("x",)

    def load_gradient(self) -> Callable[..., Any]:
        """Return the torch function whose gradient is taken.

        Raises:
            ValueError: it cannot be imported.
        """
        return _imported(self.gradient or self.target, f"target {self.target!r}", self.folders)


@dataclass(frozen=True, kw_only=True)
class Correction(Algorithm):
    """Weights for the difference between rollout engine and trainer.

    The function takes `(difference, mask, objective)`, difference = log pi_old - log pi_rollout [B, R], and returns [B, R].

    Attributes:
        weight: over what the weight is taken: each token, the product of the sequence, or its geometric mean.
        bounded: masks alone: over what the number is taken that lies between the thresholds where a weight is kept.
    """

    weight: Literal["token", "sequence", "geometric"] = "token"
    bounded: Literal["token", "sequence", "geometric"] = "token"

    key: ClassVar[str] = "rollout_importance_sampling_mode"
    parameters: ClassVar[tuple[str, ...]] = ("difference", "mask", "objective")


Record = TypeVar("Record", bound=Algorithm)


def find(table: Mapping[str, Record], kind: type[Record], name: str, folders: Sequence[str] = ()) -> Record:
    """Return the record of `name`, or what the plug-in that it spells out brings: a record, or a bare function.

    Args:
        table, kind: names and class of one family.
        folders: searched for a plug-in's module after sys.path.

    Raises:
        ValueError: an unknown name, a plug-in that cannot be imported, one that is neither record nor function, or a function
            with other parameters; it says key and value.
    """
    if name in table:
        return table[name]
    if ":" not in name:
        raise ValueError(f"rl_config.{unknown_name(kind.key, name, table)}, or module:NAME")
    found = _imported(name, f"rl_config.{kind.key} {name!r}", folders)
    try:
        if isinstance(found, Algorithm):
            if not isinstance(found, kind):
                raise ValueError(f"it is a {type(found).__name__}, but a {kind.__name__} is wanted")
            # a worker imports the module where the driver has found it
            record = replace(found, folders=tuple(folders))
        elif callable(found) and not inspect.isclass(found):
            record = kind(target=name, reads=None, folders=tuple(folders))
        else:
            raise ValueError(f"it is neither a {kind.__name__} nor a function, but a {type(found).__name__}")
        check_parameters(record)
    except ValueError as error:
        raise ValueError(f"rl_config.{kind.key} is {name!r}: {error}") from error
    return record


def check_parameters(record: Algorithm) -> None:
    """Raise ValueError unless the record's function can be imported and called with its family's parameters."""
    function = record.load()
    try:
        inspect.signature(function).bind(*record.parameters)
    except TypeError as error:
        wanted = ", ".join(record.parameters)
        raise ValueError(f"{record.target} does not take the parameters ({wanted}): {error}") from error


def unknown_name(key: str, name: object, known: Mapping[str, object] | Sequence[str]) -> str:
    """Return the sentence that names a wrong value, the nearest right one and all right ones."""
    near = registry.nearest(name, known)
    hint = "" if near is None else f"did you mean {near!r}? "
    return f"{key}: unknown value {name!r}; {hint}known values: {', '.join(known)}"


def _imported(target: str, subject: str, folders: Sequence[str]) -> Any:
    """The object that "module:NAME" spells out; the folders stay on sys.path, for what the module imports later."""
    # behind what is installed, so that a file of the working directory never hides a library
    sys.path.extend(folder for folder in folders if folder not in sys.path)
    return registry.load(target, subject, wraps=Exception)  # a user's module may raise anything
