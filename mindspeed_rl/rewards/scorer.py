"""How a user's function becomes a scorer: what it may ask for, what it may return.

A parameter is filled by its name:

    per sample   sample, prompt, response (completion), prompt_ids, response_ids (completion_ids), label (solution), truncated,
                 max_response_length
    per batch    samples, prompts, responses (completions), prompt_ids, response_ids (completion_ids), labels (solutions, solution),
                 truncated, max_response_length: lists, one entry a sample
    both         settings (RewardSettings), and any additional dataset column under its own name; `**columns` takes all of them

A function that names `samples`, `responses` or `completions` scores a batch; all others one sample. Either kind may be `async`.
It returns a number (a list of numbers for a batch), None for "no opinion", or a dict of named parts; a dict's score is its entry
"score", or the sum of its entries where there is none.
"""

from __future__ import annotations

import importlib
import inspect
import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mindspeed_rl.rewards import find
from mindspeed_rl.rewards.records import RewardSample, RewardSettings

_BATCH_PARAMETERS = {"samples", "responses", "completions"}


class ScorerError(Exception):
    """A scorer was called in vain: it lacks an argument, or returned what is not a score."""


@dataclass(frozen=True)
class Scorer:
    """A function ready to be called with samples.

    Attributes:
        name: the name it is registered and logged under.
        function: the callable itself.
        batched: it takes lists and returns a list.
        is_async: calling it gives an awaitable.
        wanted: the names of its parameters; None if it takes every column (`**columns`).
        required: the parameters without a default.
    """

    name: str
    function: Callable[..., Any]
    batched: bool
    is_async: bool
    wanted: frozenset[str] | None
    required: frozenset[str]

    @classmethod
    def of(cls, name: str, function: Callable[..., Any], settings: RewardSettings) -> Scorer:
        """Wrap a function, or a class, which is instantiated once (with `settings` if its constructor asks for it)."""
        if inspect.isclass(function):
            wants_settings = "settings" in inspect.signature(function).parameters
            function = function(settings=settings) if wants_settings else function()
        if not callable(function):
            raise ValueError(f"reward function '{name}' is {function!r}, which cannot be called")
        parameters = inspect.signature(function).parameters.values()
        named = [p for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
        takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
        called = function if inspect.isroutine(function) else type(function).__call__
        return cls(
            name=name,
            function=function,
            batched=any(p.name in _BATCH_PARAMETERS for p in named),
            is_async=inspect.iscoroutinefunction(called),
            wanted=None if takes_all else frozenset(p.name for p in named),
            required=frozenset(p.name for p in named if p.default is p.empty),
        )

    def call(self, samples: Sequence[RewardSample], settings: RewardSettings) -> Any:
        """Call the function for these samples (exactly one, unless it is batched); the raw return value, or an awaitable of it.

        Raises:
            ScorerError: a parameter of the function is neither a field nor a column of the sample.
        """
        available = _batch_arguments(samples, settings) if self.batched else _sample_arguments(samples[0], settings)
        missing = sorted(self.required - available.keys())
        if missing:
            raise ScorerError(
                f"it asks for '{missing[0]}', which is not a column of the dataset; there are: {', '.join(sorted(available))}"
            )
        names = available.keys() if self.wanted is None else self.wanted & available.keys()
        return self.function(**{name: available[name] for name in names})

    def values(self, returned: Any, num_samples: int) -> list[dict[str, float] | None]:
        """Turn a return value into one dict of parts a sample; None where the function had no opinion.

        Raises:
            ScorerError: not a finite number, or not as many as there are samples.
        """
        if not self.batched:
            return [self._parts(returned)]
        if not isinstance(returned, Sequence) and hasattr(returned, "tolist"):
            returned = returned.tolist()
        if isinstance(returned, (str, bytes)) or not isinstance(returned, Sequence) or len(returned) != num_samples:
            size = f" of {len(returned)}" if isinstance(returned, Sequence) else ""
            raise ScorerError(
                f"it must return a list of {num_samples} scores, one a sample, not {type(returned).__name__}{size}"
            )
        return [self._parts(value) for value in returned]

    def _parts(self, value: Any) -> dict[str, float] | None:
        if value is None:
            return None
        if not isinstance(value, Mapping):
            return {self.name: _number(value)}
        parts = {f"{self.name}/{key}": _number(part) for key, part in value.items() if part is not None}
        if not parts:
            return None
        total = parts[f"{self.name}/score"] if f"{self.name}/score" in parts else sum(parts.values())
        return {self.name: total, **parts}


def _number(value: Any) -> float:
    if hasattr(value, "item") and not isinstance(value, numbers.Number):
        value = value.item()
    if not isinstance(value, (numbers.Real, bool)) or not math.isfinite(value):
        raise ScorerError(f"it returned {value!r}, which is not a finite number")
    return float(value)


def _sample_arguments(sample: RewardSample, settings: RewardSettings) -> dict[str, Any]:
    solution = sample.columns.get("solution", sample.label)
    return {
        **sample.columns,
        "sample": sample,
        "settings": settings,
        "prompt": sample.prompt,
        "response": sample.response,
        "completion": sample.response,
        "prompt_ids": sample.prompt_ids,
        "response_ids": sample.response_ids,
        "completion_ids": sample.response_ids,
        "label": sample.label,
        "solution": solution,
        "truncated": sample.truncated,
        "max_response_length": sample.max_response_length,
    }


def _batch_arguments(samples: Sequence[RewardSample], settings: RewardSettings) -> dict[str, Any]:
    rows = [_sample_arguments(sample, settings) for sample in samples]
    columns = {name: [sample.columns.get(name) for sample in samples] for sample in samples for name in sample.columns}
    fields = {name: [row[name] for row in rows] for name in rows[0] if name not in samples[0].columns or name == "solution"}
    plural = {"samples": "sample", "prompts": "prompt", "responses": "response", "completions": "completion", "labels": "label"}
    arguments = {**columns, **fields, "settings": settings, "solutions": fields["solution"]}
    return {**arguments, **{name: fields[one] for name, one in plural.items()}}


def import_scorer(name: str) -> Callable[..., Any]:
    """Import what a name stands for.

    Raises:
        ValueError: unknown name, module or attribute.
    """
    entry = find(name)
    if not isinstance(entry, str):
        return entry
    module_name, _, attribute = entry.partition(":")
    try:
        found: Any = importlib.import_module(module_name)
    except ImportError as error:
        raise ValueError(f"reward function '{name}': cannot import the module '{module_name}': {error}") from error
    for step in attribute.split("."):
        if not hasattr(found, step):
            raise ValueError(f"reward function '{name}': the module '{module_name}' has no '{attribute}'")
        found = getattr(found, step)
    return found
