"""completions.jsonl: sampled responses with their rewards and advantages."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TypedDict

#: tokens that one character may be spread over: UTF-8 has at most four bytes
_MAX_CHARACTER_TOKENS = 4


@dataclass(frozen=True)
class Tokens:
    """A response token by token; every list that is present is as long as `ids`.

    Attributes:
        ids: as sampled.
        texts: text of each token; together they are the response.
        log_probs: log-probs from the rollout.
        advantages: advantage of each token.
        loss_mask: False where a token does not train.
        trainer_log_probs: log-probs from the trainer before the update, where it computed them.
        weights: importance weight, exp(trainer - rollout).
        versions: weight version that each token was sampled from.
        ratios: ratios of the policy at the start of the update's last step to the one before the update, as the loss takes
            them (of the full response where it counts sequences).
        clipped: True where the loss clipped the token's policy gradient in that step.
        sampled: False where a tool or the environment wrote the token.
    """

    ids: Sequence[int]
    texts: Sequence[str]
    log_probs: Sequence[float]
    advantages: Sequence[float]
    loss_mask: Sequence[bool]
    trainer_log_probs: Sequence[float] | None = None
    weights: Sequence[float] | None = None
    versions: Sequence[int] | None = None
    ratios: Sequence[float] | None = None
    clipped: Sequence[bool] | None = None
    sampled: Sequence[bool] | None = None


@dataclass(frozen=True)
class Completion:
    """One sampled response with everything its advantage was made of.

    Attributes:
        prompt: the text that the model was given.
        response: its text.
        reward: total reward; None for a response that could not be scored.
        parts: unweighted score by verifier.
        advantage: advantage of its tokens (their mean where they differ).
        extra: more fields: label, length, finish reason, tool calls.
        group: index of the prompt in the batch.
        sample: index of the response among those to the prompt.
        tokens: the response token by token.
        events: turns of an agent and its calls, as `rollout.trajectory.TurnEvent` has them.
    """

    prompt: str
    response: str
    reward: float | None
    parts: Mapping[str, float] = field(default_factory=dict)
    advantage: float | None = None
    extra: Mapping[str, object] = field(default_factory=dict)
    group: int | None = None
    sample: int | None = None
    tokens: Tokens | None = None
    events: Sequence[Mapping[str, object]] | None = None

    def to_record(self) -> dict[str, object]:
        """Return the fields for the file, without unset ones."""
        fields = asdict(self)
        tokens = fields.pop("tokens")
        record = {name: value for name, value in fields.items() if value is not None or name in ("reward", "advantage")}
        if tokens is not None:
            record["tokens"] = {name: value for name, value in tokens.items() if value is not None}
        return record


def choose_group(completions: Sequence[Completion]) -> list[Completion]:
    """Return the responses to the first prompt whose rewards differ, best first; those to the first prompt where none do."""
    groups: dict[int | None, list[Completion]] = {}
    for completion in completions:
        groups.setdefault(completion.group, []).append(completion)
    found = [group for group in groups.values() if len({completion.reward for completion in group}) > 1]
    chosen = next(iter(found or groups.values()), [])
    return sorted(chosen, key=lambda completion: -math.inf if completion.reward is None else completion.reward, reverse=True)


class CompletionRecord(TypedDict):
    """A line of the file that is read back; it may have all other fields of `Completion`."""

    iteration: int
    prompt: str
    response: str


def decode_tokens(decode: Callable[[list[int]], str], ids: Sequence[int]) -> list[str]:
    """Return the text of each token; together they are the decoded response.

    A character whose bytes several tokens share belongs to the last of them, the others have "".

    Args:
        decode: ids -> text, special tokens included.
        ids: tokens of one text.
    """
    texts: list[str] = []
    before: list[int] = []  # the text in front decides whether a word begins with a space
    waiting: list[int] = []

    def decode_waiting() -> str:
        return decode(before + waiting)[len(decode(before)) :] if before else decode(waiting)

    for token in ids:
        waiting.append(token)
        text = decode_waiting()
        if text.endswith("\ufffd") and len(waiting) < _MAX_CHARACTER_TOKENS:
            texts.append("")
        else:
            texts.append(text)
            before, waiting = waiting, []
    # the text ends inside a character
    if waiting:
        texts[-1] = decode_waiting()
    return texts


def is_due(iteration: int, interval: int) -> bool:
    """Return True in the first iteration, which is 1, and every `interval`-th; never where that is 0."""
    return interval > 0 and (iteration == 1 or iteration % interval == 0)
