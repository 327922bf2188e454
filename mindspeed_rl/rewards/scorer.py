"""Scorers: user functions with their parameters and return values.

A parameter is filled by its name:

    per sample   sample, prompt, response (completion; solution_str in verl), prompt_ids, response_ids (completion_ids,
                 response_token_ids), label (ground_truth in verl), solution (that column, else the label), truncated,
                 max_response_length
    per batch    samples, prompts, responses (completions), queries (prompt and response in one, as in OpenRLHF), labels,
                 solutions, and the other names above: lists, one entry for each sample
    EasyR1       reward_input: {"response", "response_length", "ground_truth"}; per batch reward_inputs, a list of these
    both         settings (RewardSettings), any additional dataset column under its name; `**columns` takes all of them

A dataset without reference answers has no `label` and no `solution`: parameters of these names then need a default.


`async`. A callable class is instantiated once in each worker, with `settings` (or `args`) if its constructor has that
parameter; its attribute `timeout_s`, if any, replaces `reward_timeout_s`. The attribute `is_accuracy = True` of a function or
instance, or of its registration, means that the score judges whether an answer is right.

It returns a number (a list of numbers for a batch, or a dict with that list as "rewards", as in OpenRLHF), None for "no
opinion", or a dict of named parts. A dict's score is its entry "score" (of a function in EasyR1's form "overall"), else the
sum of its numbers; its strings become notes.
"""

from __future__ import annotations

import inspect
import math
import numbers
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mindspeed_rl import registry
from mindspeed_rl.rewards import ACCURACIES, RewardFunction, find
from mindspeed_rl.rewards.samples import LARGEST_SCORE, RewardSample, RewardSettings

_BATCH_PARAMETERS = {"samples", "responses", "completions", "queries", "reward_inputs"}
#: parameters of EasyR1's functions, whose score is the part "overall"
_EASYR1_PARAMETERS = {"reward_input", "reward_inputs"}


Value = tuple[dict[str, float], dict[str, str]]
"""Parts and notes of one sample."""


class ScorerError(Exception):
    """A scorer lacks an argument, or returned something that is not a score."""


@dataclass(frozen=True)
class Scorer:
    """A function ready to be called with samples.

    Attributes:
        name: under which it is registered and logged.
        function: the callable itself.
        batched: it takes and returns lists.
        is_async: it returns an awaitable.
        parameters: the names of its parameters; None if it takes every column (`**columns`).
        required: the parameters without a default.
        timeout_s: its own time limit, None for `reward_timeout_s`.
        is_accuracy: it judges whether an answer is right, see `rewards.ACCURACIES`.
        total: the part of a returned dict that is the score.
    """

    name: str
    function: RewardFunction
    batched: bool
    is_async: bool
    parameters: frozenset[str] | None
    required: frozenset[str]
    timeout_s: float | None
    is_accuracy: bool
    total: str = "score"

    @classmethod
    def build(cls, name: str, function: RewardFunction, settings: RewardSettings) -> Scorer:
        """Wrap a function, or an instance of a class."""
        instance: object = function
        if inspect.isclass(function):
            constructor = inspect.signature(function).parameters
            instance = function(**{key: settings for key in ("settings", "args") if key in constructor})
        if not callable(instance):
            raise ValueError(f"reward function '{name}' is {instance!r}, which cannot be called")
        parameters = inspect.signature(instance).parameters.values()
        named = [p for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
        takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
        # an instance is not a coroutine function, but its __call__ may be one
        called = instance if inspect.isroutine(instance) else type(instance).__call__
        return cls(
            name=name,
            function=instance,
            batched=any(p.name in _BATCH_PARAMETERS for p in named),
            is_async=inspect.iscoroutinefunction(called),
            parameters=None if takes_all else frozenset(p.name for p in named),
            required=frozenset(p.name for p in named if p.default is p.empty),
            timeout_s=getattr(instance, "timeout_s", None),
            is_accuracy=name in ACCURACIES or bool(getattr(instance, "is_accuracy", False)),
            total="overall" if any(p.name in _EASYR1_PARAMETERS for p in named) else "score",
        )

    def call(self, samples: Sequence[RewardSample], settings: RewardSettings) -> Any:
        """Call the function for these samples (exactly one, unless it is batched); return its value, or an awaitable of it.

        Raises:
            ScorerError: a parameter of the function is neither a field nor a column of the sample.
        """
        available = _batch_arguments(samples, settings) if self.batched else _sample_arguments(samples[0], settings)
        missing = sorted(self.required - available.keys())
        if missing:
            known = ", ".join(sorted(available))
            raise ScorerError(f"its parameter '{missing[0]}' is not a column of the dataset; there are: {known}")
        names = available.keys() if self.parameters is None else self.parameters & available.keys()
        return self.function(**{name: available[name] for name in names})

    def to_values(self, returned: Any, num_samples: int) -> list[Value | None]:
        """Convert a return value to one value for each sample; None where the function had no opinion.

        Raises:
            ScorerError: not finite numbers, or not as many as there are samples.
        """
        if not self.batched:
            return [self._to_value(returned)]
        if isinstance(returned, Mapping) and "rewards" in returned:
            returned = returned["rewards"]
        # arrays and tensors, without importing their libraries
        if hasattr(returned, "tolist"):
            returned = returned.tolist()
        if isinstance(returned, (str, bytes)) or not isinstance(returned, Sequence) or len(returned) != num_samples:
            actual = f"{len(returned)} of them" if isinstance(returned, Sequence) else type(returned).__name__
            raise ScorerError(f"it must return a list of {num_samples} scores, one for each sample, not {actual}")
        return [self._to_value(value) for value in returned]

    def _to_value(self, value: object) -> Value | None:
        if value is None:
            return None
        items = value.items() if isinstance(value, Mapping) else ()
        notes = {f"{self.name}/{key}": text for key, text in items if isinstance(text, str)}
        found = read_score(value, self.total)
        if found is None:
            return None
        return {self.name: found[0], **{f"{self.name}/{key}": part for key, part in found[1].items()}}, notes


def read_score(value: object, total: str = "score") -> tuple[float, dict[str, float]] | None:
    """Return a score and its parts: a number, or of a mapping the entry `total`, else the sum of its numbers.

    Texts and None are no parts; a mapping without numbers is no opinion, None.

    Raises:
        ScorerError: a number is not finite in float32, or is none.
    """
    if not isinstance(value, Mapping):
        return _to_float(value), {}
    parts = {key: _to_float(part) for key, part in value.items() if part is not None and not isinstance(part, str)}
    if not parts:
        return None
    score = parts.pop(total) if total in parts else math.fsum(parts.values())
    return _to_float(score), parts


def _to_float(value: Any) -> float:
    if hasattr(value, "item") and not isinstance(value, numbers.Number):
        value = value.item()
    magnitude: Any = abs(value) if isinstance(value, numbers.Real) else math.nan
    # a comparison takes integers of any length, and is False for NaN
    if not magnitude <= LARGEST_SCORE:
        raise ScorerError(f"it returned {reprlib.repr(value)}, which is not a finite number in float32")
    return float(value)


def _sample_arguments(sample: RewardSample, settings: RewardSettings) -> dict[str, Any]:
    answers = {
        "label": sample.label,
        "ground_truth": sample.columns.get("ground_truth", sample.label),
        "solution": sample.columns.get("solution", sample.label),
    }
    of_easyr1 = {
        "response": sample.response,
        "response_length": len(sample.response_ids),
        "ground_truth": answers["ground_truth"],
    }
    return {
        **sample.columns,
        **{name: answer for name, answer in answers.items() if answer is not None},
        "reward_input": of_easyr1,
        "sample": sample,
        "settings": settings,
        "prompt": sample.prompt,
        "response": sample.response,
        "completion": sample.response,
        "solution_str": sample.response,
        "prompt_ids": sample.prompt_ids,
        "response_ids": sample.response_ids,
        "completion_ids": sample.response_ids,
        "response_token_ids": sample.response_ids,
        "truncated": sample.truncated,
        "max_response_length": sample.max_response_length,
    }


def _batch_arguments(samples: Sequence[RewardSample], settings: RewardSettings) -> dict[str, Any]:
    rows = [_sample_arguments(sample, settings) for sample in samples]
    names = {name: None for row in rows for name in row}
    arguments = {name: [row.get(name) for row in rows] for name in names}
    plural = {
        name: arguments[name.removesuffix("s")]
        for name in ("samples", "prompts", "responses", "completions", "labels", "solutions", "reward_inputs")
        if name.removesuffix("s") in arguments
    }
    queries = [f"{sample.prompt}{sample.response}" for sample in samples]
    return {**arguments, **plural, "queries": queries, "settings": settings}


def list_parameters(sample: RewardSample) -> set[str]:
    """Return the names of parameters that a sample like this one fills, for functions of a sample and of a batch."""
    return _sample_arguments(sample, RewardSettings()).keys() | _batch_arguments([sample], RewardSettings()).keys()


def list_required(function: RewardFunction) -> list[str]:
    """Return the names of the parameters without a default.

    Raises:
        ValueError: a function whose parameters cannot be read.
    """
    parameters = inspect.signature(function).parameters.values()
    return [p.name for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL) and p.default is p.empty]


def import_scorer(name: str) -> RewardFunction:
    """Import the scorer of a name and return it.

    Raises:
        ValueError: unknown name, module or attribute.
    """
    entry = find(name)
    return registry.load(entry, f"reward function '{name}'") if isinstance(entry, str) else entry
