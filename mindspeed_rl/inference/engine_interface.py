"""The interface of an inference engine: requests, deltas and answers, and its methods."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from mindspeed_rl.rollout.requests import Sampling

Finish = Literal["stop", "length"]


@dataclass(frozen=True)
class Request:
    """A request for one answer.

    Attributes:
        prompt_ids: tokens of the prompt.
        seed: seed of this answer: it does not depend on other requests in the batch.
        allowed_ids: tokens to choose from; empty allows all.
        max_tokens: limit of generated tokens, where it differs from the sampling's.
        label, columns: the reference answer and the other columns of the row, for tools and environments.
        images: references of the images in the prompt.
    """

    prompt_ids: list[int]
    seed: int = 0
    allowed_ids: tuple[int, ...] = ()
    max_tokens: int | None = None
    label: str | None = None
    columns: Mapping[str, Any] = field(default_factory=dict)
    images: tuple[str, ...] = ()


@dataclass(frozen=True)
class Delta:
    """The tokens that one engine step adds to one answer.

    Attributes:
        index: index of the request.
        token_ids: new tokens; the stop token is among them.
        log_probs: log-probs of these tokens under the untempered model.
        finish: the reason why the answer ends here, None while it continues.
        from_tools: replies of tools; all deltas of this answer before them were an earlier turn.
    """

    index: int
    token_ids: list[int]
    log_probs: list[float]
    finish: Finish | None
    from_tools: bool = False


@dataclass
class Answer:
    """A complete answer; `finish` is "length" when the token limit ended it."""

    token_ids: list[int]
    log_prob: float
    finish: Finish


class Engine(Protocol):
    """An engine in this process, or a group of workers."""

    def stream(self, requests: Sequence[Request], sampling: Sampling, stop_strings: Sequence[str] = ()) -> Iterator[Delta]:
        """Yield deltas of all answers as they are generated; closing the iterator early ends all requests.

        Args:
            requests: one for each answer.
            sampling: sampling parameters of all answers.
            stop_strings: texts that end an answer; the last tokens contain the text, which the caller removes.
        """
        ...

    def next_tokens(self, prompts: Sequence[list[int]], count: int) -> list[list[tuple[int, float]]]:
        """Return the `count` most likely next tokens of every prompt with their log-probs, most likely first."""
        ...

    def score(self, sequences: Sequence[list[int]], starts: Sequence[int]) -> list[list[tuple[float, bool]]]:
        """Return (log-prob, True for the most likely token) of the tokens of each sequence from a position on.

        Args:
            sequences: token ids.
            starts: index of the first token of each sequence to score, at least 1.
        """
        ...

    def close(self) -> None:
        """End the processes and groups that the engine started."""
        ...


def collect(deltas: Iterator[Delta], count: int, *, earlier_turns: bool = False) -> list[Answer]:
    """Return the complete answers of `count` requests, in order, with the turns before them if requested."""
    answers = [Answer([], 0.0, "stop") for _ in range(count)]
    for delta in deltas:
        if delta.from_tools and not earlier_turns:
            answers[delta.index] = Answer([], 0.0, "stop")
            continue
        answer = answers[delta.index]
        answer.token_ids += delta.token_ids
        answer.log_prob += sum(delta.log_probs)
        if delta.finish is not None:
            answer.finish = delta.finish
    return answers
