"""Rewards: scorers, the registry that names them, and the pool of killable processes that runs them.

Importing this package loads only the registry. A scorer is a function; its parameters (filled by name) and its return values
are described in `scorer.py`. A new built-in scorer is one function and one line below; your own is
`module:function`, or a file in `external_plugins` that calls `register` (or assigns to `REWARDS`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any

from mindspeed_rl import registry

RewardFunction = Callable[..., Any]
"""A function, or a class whose instances can be called; `scorer.py` lists its parameters and its return value."""

REWARDS: dict[str, str | RewardFunction] = {
    # MindSpeed-RL's verifiers
    "acc": "mindspeed_rl.rewards.math_scores:acc",
    "format": "mindspeed_rl.rewards.text_scores:think_answer",
    "step": "mindspeed_rl.rewards.text_scores:step",
    "strict_format": "mindspeed_rl.rewards.text_scores:strict_format",
    "base_acc": "mindspeed_rl.rewards.math_scores:base_acc",
    "math_17k_acc": "mindspeed_rl.rewards.math_scores:boxed_grade",
    "acc_for_dapo": "mindspeed_rl.rewards.math_scores:acc_for_dapo",
    "acc_for_ppo": "mindspeed_rl.rewards.math_scores:boxed_grade",
    "math_verify_reward": "mindspeed_rl.rewards.math_scores:math_verify_reward",
    "retool_reward": "mindspeed_rl.rewards.math_scores:retool_reward",
    # ms-swift's and TRL's (`format` is above)
    "accuracy": "mindspeed_rl.rewards.math_scores:accuracy",
    "think_answer_alone": "mindspeed_rl.rewards.text_scores:think_answer_alone",
    "cosine": "mindspeed_rl.rewards.shaping:cosine",
    "repetition": "mindspeed_rl.rewards.shaping:repetition",
    "soft_overlong": "mindspeed_rl.rewards.shaping:soft_overlong",
    "think_format": "mindspeed_rl.rewards.text_scores:think_alone",
    # other projects' own, score by score
    **{
        name: f"mindspeed_rl.rewards.source_scores:{name}"
        for name in "verl_default verl_gsm8k verl_math_dapo verl_math verl_geo3k verl_search_em slime_deepscaler slime_math "
        "slime_dapo slime_f1 slime_boxed_f1 swift_accuracy swift_cosine swift_repetition swift_soft_overlong "
        "trl_accuracy trl_reasoning_accuracy trl_think_format trl_cosine trl_repetition".split()
    },
    # others
    "exact_match": "mindspeed_rl.rewards.text_scores:exact_match",
    "multiple_choice": "mindspeed_rl.rewards.text_scores:multiple_choice",
    "gsm8k": "mindspeed_rl.rewards.math_scores:gsm8k",
    "gsm8k_flexible": "mindspeed_rl.rewards.math_scores:gsm8k_flexible",
    "code": "mindspeed_rl.rewards.code:code",
    "json_format": "mindspeed_rl.rewards.text_scores:json_format",
    "regex_format": "mindspeed_rl.rewards.text_scores:regex_format",
    "length": "mindspeed_rl.rewards.shaping:length",
    "judge": "mindspeed_rl.rewards.judge:Judge",
}
"""Name -> scorer, or the `module:function` of one, which only the worker imports."""


ACCURACIES: set[str] = {
    "acc",
    "base_acc",
    "math_17k_acc",
    "acc_for_dapo",
    "acc_for_ppo",
    "math_verify_reward",
    "retool_reward",
    "accuracy",
    *"verl_gsm8k verl_math_dapo verl_math verl_search_em slime_deepscaler slime_math slime_dapo swift_accuracy".split(),
    "trl_accuracy",
    "trl_reasoning_accuracy",
    "exact_match",
    "multiple_choice",
    "gsm8k",
    "gsm8k_flexible",
    "code",
}
"""Scorers that judge an answer: 1.0 if it is right, less if it is not. Only their mean may be called accuracy."""


def register(name: str, *, is_accuracy: bool = False) -> Callable[[RewardFunction], RewardFunction]:
    """Register the decorated function (or class) as `name`.

    Args:
        is_accuracy: see `ACCURACIES`.

    Raises:
        ValueError: another function has the name.
    """

    def add(scorer: RewardFunction) -> RewardFunction:
        known = REWARDS.get(name)
        if known is not None and known is not scorer and not _is_same_source(known, scorer):
            raise ValueError(f"the reward name '{name}' is already taken by {known}; register the function under another name")
        REWARDS[name] = scorer
        if is_accuracy:
            ACCURACIES.add(name)
        return scorer

    return add


def _is_same_source(known: str | RewardFunction, scorer: RewardFunction) -> bool:
    """Return True for one function of one file, which is loaded as a plug-in and as a module."""
    if isinstance(known, str) or known.__qualname__ != scorer.__qualname__:
        return False
    files = [sys.modules[each.__module__].__file__ for each in (known, scorer) if each.__module__ in sys.modules]
    return len(files) == 2 and None not in files and files[0] == files[1]


def find(name: str, others: Iterable[str] = ()) -> str | RewardFunction:
    """Return the registry's entry for a name; a `module:function` is its own entry.

    Args:
        others: further names that a message lists as known.

    Raises:
        ValueError: unknown name; the message lists the known names and the nearest one.
    """
    if name in REWARDS:
        return REWARDS[name]
    if ":" in name:
        return name
    known = sorted({*REWARDS, *others})
    raise ValueError(
        f"unknown reward function '{name}'{registry.did_you_mean(name, known) or '.'} Known: {', '.join(known)}; "
        "or give module:function, or a file that registers the name in external_plugins"
    )
