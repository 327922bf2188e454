"""Records of the catalogue's algorithms, and the search for one: by its name, or as the "module:NAME" of a plug-in."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, TypeVar

from mindspeed_rl import registry

Level = Literal["token", "sequence", "sequence_token"]
Normalizer = Literal["sequence", "token", "constant", "summed"]
Scale = Literal["group", "batch", "none", "gdpo"]

#: inputs that an algorithm may need beyond rewards, masks and the log-probs of the policy that is trained
NEEDS: dict[str, str] = {
    "reference": "log-probs of the reference model",
    "old_log_probs": "log-probs of the policy at the start of the update, computed even where they equal the current ones",
    "values": "the critic's values, so a critic that is trained with the actor",
    "greedy_baseline": "the reward of the greedy response to each prompt",
    "reward_parts": "the score of each reward function, before weights",
    "entropies": "entropies of the policy at the start of the update",
    "squared_probs": "the sum of the squared probabilities of all tokens of the vocabulary, at the start of the update",
}


@dataclass(frozen=True)
class Bounds:
    """Bounds of a number.

    Attributes:
        low, high: None is open.
        excludes_low: the number must be greater than `low`.
        meaning: description of the number, for the error about a wrong one.
        default: a value to propose instead of one outside.
        otherwise: keys of rl_config with the values under which the bound does not matter.
        rule: short stable name of the rule that a number outside violates.
        excludes_high: the number must be less than `high`.
    """

    low: float | None = None
    high: float | None = None
    excludes_low: bool = False
    meaning: str = ""
    default: float | None = None
    otherwise: Mapping[str, object] = field(default_factory=dict)
    rule: str = "range"
    excludes_high: bool = False

    def contain(self, value: float) -> bool:
        """Return True when the value is inside."""
        if self.low is not None and (value <= self.low if self.excludes_low else value < self.low):
            return False
        return self.high is None or (value < self.high if self.excludes_high else value <= self.high)

    def __str__(self) -> str:
        parts = (
            [f"{'greater than' if self.excludes_low else 'at least'} {format_exact(self.low)}"] if self.low is not None else []
        )
        parts += (
            [f"{'less than' if self.excludes_high else 'at most'} {format_exact(self.high)}"] if self.high is not None else []
        )
        return " and ".join(parts)


def format_exact(value: float) -> str:
    """Return a number in its shortest exact form: 1e+09 for a round one, 4294967295 where rounding would change it."""
    return f"{value:g}" if float(f"{value:g}") == value else str(value)


@dataclass(frozen=True)
class Choice:
    """Text in a formula that depends on one setting.

    Attributes:
        setting: its key in rl_config.
        texts: template by value.
        otherwise: template for every other value.
    """

    setting: str
    texts: Mapping[Any, str]
    otherwise: str = ""


def fill_formula(formula: str, choices: Mapping[str, Choice], numbers: Mapping[str, object]) -> str:
    """Return a template with numbers and choices in it; a choice may name those before it.

    Raises:
        KeyError: a template names a number that does not exist.
    """
    values = dict(numbers)
    for name, choice in choices.items():
        values[name] = choice.texts.get(values[choice.setting], choice.otherwise).format_map(values)
    return formula.format_map(values)


@dataclass(frozen=True, kw_only=True)
class Algorithm:
    """One entry of the catalogue, or the record of a plug-in. Plain values only: it travels to the workers.

    Attributes:
        target: "module:function" of the torch function; it is imported when `load` is called.
        formula: template of the function's formula. `{name}` is one of `choices`, or a number of the run: any
            number of rl_config by its key, and `lower` and `upper` (bounds of the clipped ratio), `group_size` and
            `others` (group_size - 1). None: the algorithm has no formula.
        choices: texts in the formula by name.
        reads: keys of rl_config that the function reads; None where they are unknown.
        needs: keys of `NEEDS`.
        bounds: bounds of settings for this algorithm in addition to `catalogue.SETTINGS`.
        folders: searched for the modules of a plug-in that are not installed.
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
    #: keys of NEEDS that the function may use
    may_need: ClassVar[frozenset[str]] = frozenset()

    def __post_init__(self) -> None:
        if ":" not in self.target:
            raise ValueError(f"target {self.target!r} of a {type(self).__name__} is not of the form module:function")
        # the record is frozen, and a plug-in may use any collection
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
        return _import(self.target, f"target {self.target!r}", self.folders)

    def may_read(self, name: str) -> bool:
        """Return True unless the record excludes that the function reads this key of rl_config."""
        return self.reads is None or name in self.reads

    def format_formula(self, numbers: Mapping[str, object]) -> str | None:
        """Return the formula with the run's numbers in it; None without a formula.

        Raises:
            KeyError: the template names a number that does not exist.
        """
        if self.formula is None:
            return None
        return fill_formula(self.formula, self.choices, numbers)


@dataclass(frozen=True, kw_only=True)
class PolicyLoss(Algorithm):
    """A loss of each token, and how tokens become the loss.

    The function takes `(inputs: PolicyInputs, objective: Objective)` and returns (losses [B, R], clipped [B, R] bool).

    Attributes:
        normalizer: divisor of the summed loss: a key of `catalogue.NORMALIZERS`.
        level: level of the importance ratio when importance_sampling_level is unset.
        levels: supported levels.
        marks: "module:function" that chooses tokens of the whole batch at the start of the update, `PolicyInputs.marked`:
            (advantages [B, R], log pi_old [B, R], mask [B, R], objective, torch.Generator) -> [B, R] bool. None: it needs none.
        compares_group: it compares the responses of a prompt, which therefore share a micro-batch.
        has_ratio: it compares the new policy with the old one.
    """

    normalizer: Normalizer = "token"
    level: Level = "token"
    levels: tuple[Level, ...] = ("token", "sequence", "sequence_token")
    marks: str | None = None
    compares_group: bool = False
    has_ratio: bool = True

    key: ClassVar[str] = "loss_type"
    parameters: ClassVar[tuple[str, ...]] = ("inputs", "objective")
    may_need: ClassVar[frozenset[str]] = frozenset(("reference", "old_log_probs", "entropies"))

    def load_marks(self) -> Callable[..., Any] | None:
        """Return the torch function that chooses tokens of a batch; None for a loss without one.

        Raises:
            ValueError: it cannot be imported.
        """
        return None if self.marks is None else _import(self.marks, f"marks {self.marks!r}", self.folders)


@dataclass(frozen=True, kw_only=True)
class AdvantageEstimator(Algorithm):
    """An estimator of advantages from scores.

    The function takes `(inputs: AdvantageInputs, objective: Objective)` and returns (advantages, returns), both [B, R].

    Attributes:
        min_group_size: minimum responses of a prompt that it compares.
        groups_while: (key, values): the minimum applies only while the key has one of these values.
        kl_in_reward: False without a reward from which the KL is subtracted.
        group_signal: what has to differ within a group, or its advantages are 0: total rewards, or scores of a function;
            "none": they are not 0 either way.
        instead: (key, value, name): with this value of the key, the estimator of that name is used.
        idle: {key: (other, value)}: the key has no effect while the other key has this value.
    """

    min_group_size: int = 1
    groups_while: tuple[str, tuple[str, ...]] | None = None
    kl_in_reward: bool = True
    group_signal: Literal["total", "parts", "none"] = "total"
    instead: tuple[str, str, str] | None = None
    idle: Mapping[str, tuple[str, str]] = field(default_factory=dict)

    key: ClassVar[str] = "adv_estimator"
    parameters: ClassVar[tuple[str, ...]] = ("inputs", "objective")
    may_need: ClassVar[frozenset[str]] = frozenset(
        ("values", "greedy_baseline", "reward_parts", "old_log_probs", "squared_probs")
    )


@dataclass(frozen=True, kw_only=True)
class KlEstimator(Algorithm):
    """An estimator of the KL to the reference of each token. The function takes x = log pi - log ref [B, R] and returns [B, R].

    Attributes:
        clamp: (limit of x, limit of the value) with kl_clamp; None: kl_clamp has no effect.
        gradient: "module:function" of x whose gradient replaces the value's; None: the value's.
        weighted_gradient: the same, times the ratio, for the gradient of ratio x value; None: `gradient`.
    """

    clamp: tuple[float, float] | None = None
    gradient: str | None = None
    weighted_gradient: str | None = None

    key: ClassVar[str] = "kl_penalty"
    parameters: ClassVar[tuple[str, ...]] = ("x",)

    def load_gradient(self, *, weighted: bool) -> Callable[..., Any] | None:
        """Return the torch function whose gradient is taken; None for the gradient of the value.

        Args:
            weighted: the value is multiplied by the importance ratio.

        Raises:
            ValueError: it cannot be imported.
        """
        target = (weighted and self.weighted_gradient) or self.gradient
        return None if target is None else _import(target, f"target {target!r}", self.folders)


@dataclass(frozen=True, kw_only=True)
class Correction(Algorithm):
    """Weights that correct the difference between rollout engine and trainer.

    The function takes `(difference, mask, objective)`, difference = log pi_old - log pi_rollout [B, R], and returns [B, R].

    Attributes:
        weight: scope of the weight: each token, the product of the sequence, or its geometric mean; "one": a token is kept or
            left out, and has no weight.
        bounded: only of masks: scope of the number that is compared with the thresholds.
    """

    weight: Literal["one", "token", "sequence", "geometric"] = "token"
    bounded: Literal["token", "sequence", "geometric"] = "token"

    key: ClassVar[str] = "rollout_importance_sampling_mode"
    parameters: ClassVar[tuple[str, ...]] = ("difference", "mask", "objective")


_Record = TypeVar("_Record", bound=Algorithm)


def find(table: Mapping[str, _Record], kind: type[_Record], name: str, folders: Sequence[str] = ()) -> _Record:
    """Return the record of `name`, or of the plug-in that it names, which is a record or a function.

    Args:
        table, kind: names and class of one family.
        folders: searched for a plug-in's module after sys.path.

    Raises:
        ValueError: an unknown name, a plug-in that cannot be imported, one that is neither record nor function, or a function
            with other parameters; the message has key and value.
    """
    if name in table:
        return table[name]
    if ":" not in name:
        raise ValueError(f"rl_config.{describe_unknown_name(kind.key, name, table)}, or module:NAME")
    plugin = _import(name, f"rl_config.{kind.key} {name!r}", folders)
    try:
        if isinstance(plugin, Algorithm):
            if not isinstance(plugin, kind):
                raise ValueError(f"it is a {type(plugin).__name__}, but a {kind.__name__} is expected")
            # a worker imports the module from the folder of the driver
            record = replace(plugin, folders=tuple(folders))
        elif callable(plugin) and not inspect.isclass(plugin):
            record = kind(target=name, reads=None, folders=tuple(folders))
        else:
            raise ValueError(f"it is neither a {kind.__name__} nor a function, but a {type(plugin).__name__}")
        _check_parameters(record)
    except ValueError as error:
        raise ValueError(f"rl_config.{kind.key} is {name!r}: {error}") from error
    return record


def _check_parameters(record: Algorithm) -> None:
    """Raise ValueError unless the record's function can be imported and called with its family's parameters."""
    function = record.load()
    try:
        inspect.signature(function).bind(*record.parameters)
    except TypeError as error:
        expected = ", ".join(record.parameters)
        raise ValueError(f"{record.target} does not take the parameters ({expected}): {error}") from error


def describe_unknown_name(key: str, name: object, known: Mapping[str, object] | Sequence[str]) -> str:
    """Return the message about a wrong value, with the most similar valid one and all valid ones."""
    near = registry.find_similar(name, known)
    hint = "" if near is None else f"did you mean {near!r}? "
    return f"{key}: unknown value {name!r}; {hint}known values: {', '.join(known)}"


def _import(target: str, subject: str, folders: Sequence[str]) -> Any:
    """Return the object that "module:NAME" names; the folders stay on sys.path, for later imports of the module."""
    # after installed packages, so that a file of the working directory never hides a library
    sys.path.extend(folder for folder in folders if folder not in sys.path)
    return registry.load(target, subject, wraps=Exception)  # a user's module may raise anything
