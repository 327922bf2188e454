"""completions.jsonl: what the model said, what it was worth, and how much it was pushed."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Tokens:
    """A response token by token; every list that is there is as long as `ids`.

    Attributes:
        ids: as sampled.
        texts: of each; joined they are the response.
        log_probs: of the rollout.
        advantages: what each token is pushed by.
        loss_mask: False where a token does not train.
        trainer_log_probs: of the trainer before the update, where it computed them.
        weights: importance weight, exp(trainer - rollout).
        versions: weight version that each token was drawn from.
        ratios: of the policy that the last step of the update began with to that before the update, as the loss takes them (of
            the whole response where it counts sequences).
        clipped: True where the loss cut the token's policy gradient in that step.
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
        prompt: text the model was given.
        response: text it gave.
        reward: total reward; None for a response that could not be scored.
        parts: unweighted score by verifier.
        advantage: advantage of its tokens (their mean where they differ).
        extra: anything else worth reading: label, length, finish reason, tool calls.
        group: number of the prompt in the batch.
        sample: number of the response to that prompt.
        tokens: the response token by token.
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

    def record(self) -> dict[str, object]:
        """As it stands in the file: without what is not known."""
        fields = asdict(self)
        tokens = fields.pop("tokens")
        known = {name: value for name, value in fields.items() if value is not None or name in ("reward", "advantage")}
        return known | (
            {} if tokens is None else {"tokens": {key: value for key, value in tokens.items() if value is not None}}
        )


def token_texts(decode: Callable[[list[int]], str], ids: Sequence[int]) -> list[str]:
    """The text of each token; joined they are the decoded whole.

    A character whose bytes several tokens share belongs to the last of them, the others have "".

    Args:
        decode: ids -> text, special tokens included.
        ids: tokens of one text.
    """
    texts: list[str] = []
    before: list[int] = []  # what stands in front decides whether a word begins with a space
    waiting: list[int] = []
    for token in ids:
        waiting.append(token)
        text = _behind(decode, before, waiting)
        if text.endswith("\ufffd") and len(waiting) < _LONGEST_CHARACTER:
            texts.append("")
        else:
            texts.append(text)
            before, waiting = waiting, []
    # the text ends inside a character
    if waiting:
        texts[-1] = _behind(decode, before, waiting)
    return texts


def _behind(decode: Callable[[list[int]], str], before: list[int], ids: list[int]) -> str:
    return decode(before + ids)[len(decode(before)) :] if before else decode(ids)


#: tokens that one character may be spread over: UTF-8 has at most four bytes
_LONGEST_CHARACTER = 4


def is_due(iteration: int, interval: int) -> bool:
    """True in the first iteration, which is 1, and every `interval`-th; never where that is 0."""
    return interval > 0 and (iteration == 1 or iteration % interval == 0)


class CompletionWriter:
    """Appends completions of every `interval`-th iteration to a JSONL file.

    Args:
        path: the file; lines of an earlier part of the run stay.
        interval: iterations between two writes; 0 writes none.
        limit: completions kept of one iteration; all when None.
    """

    def __init__(self, path: Path, interval: int = 1, limit: int | None = None) -> None:
        self.path = Path(path)
        self.interval = interval
        self.limit = limit

    def wants(self, iteration: int) -> bool:
        """True when `write` would write: decode texts only then. The first iteration is 1."""
        return is_due(iteration, self.interval)

    def write(self, iteration: int, completions: Sequence[Completion]) -> None:
        """Appends the iteration's completions if it is one to be written."""
        if not self.wants(iteration):
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            for completion in completions[: self.limit]:
                file.write(json.dumps({"iteration": iteration, **completion.record()}, ensure_ascii=False) + "\n")
