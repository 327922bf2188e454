"""Prompts that a model in supervised training answers, and its answers, without the engine that generates them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class AnswerRequest:
    """A prompt to answer.

    Attributes:
        prompt_ids: token ids of the prompt.
        seed: seed of the answer; it depends on no other request.
    """

    prompt_ids: Sequence[int]
    seed: int


@dataclass
class GeneratedAnswer:
    """An answer.

    Attributes:
        token_ids: with the stop token, if one ended it.
        truncated: the limit of tokens ended it.
    """

    token_ids: list[int] = field(default_factory=list)
    truncated: bool = False
