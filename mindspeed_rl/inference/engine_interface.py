"""Requests to an engine, the pieces and answers that come back, and what an engine can do."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from mindspeed_rl.rollout.requests import Sampling

Finish = Literal["stop", "length"]


@dataclass(frozen=True)
class Request:
    """One answer to be generated.

    Attributes:
        prompt_ids: tokens of the prompt.
        seed: of this answer alone: it does not depend on what else is in the batch.
        allowed_ids: tokens to choose from; empty allows all.
        max_tokens: most generated tokens, where it differs from the sampling's.
    """

    prompt_ids: list[int]
    seed: int = 0
    allowed_ids: tuple[int, ...] = ()
    max_tokens: int | None = None


@dataclass(frozen=True)
class Piece:
    """What one engine step added to one answer.

    Attributes:
        index: of the request.
        token_ids: new tokens; the stop token is among them.
        log_probs: of these tokens under the untempered model.
        finish: why the answer ends here, None while it goes on.
        aside: what tools replied; all of this answer that came before it was an earlier turn.
    """

    index: int
    token_ids: list[int]
    log_probs: list[float]
    finish: Finish | None
    aside: bool = False


@dataclass
class Answer:
    """A whole answer; `finish` is "length" when the token limit ended it."""

    token_ids: list[int]
    log_prob: float
    finish: Finish


class Engine(Protocol):
    """What generates: in this process, or a group of workers."""

    def stream(self, requests: Sequence[Request], sampling: Sampling, stop_strings: Sequence[str] = ()) -> Iterator[Piece]:
        """Pieces of all answers as they are made; closing the iterator early ends all requests.

        Args:
            stop_strings: texts that end an answer; the last tokens hold the text, which the caller cuts off.
        """
        ...

    def next_tokens(self, prompts: Sequence[list[int]], count: int) -> list[list[tuple[int, float]]]:
        """The `count` most likely next tokens of every prompt with their log-probs, most likely first."""
        ...

    def score(self, sequences: Sequence[list[int]], starts: Sequence[int]) -> list[list[tuple[float, bool]]]:
        """How likely the tokens of each sequence are from a place on: (log-prob, whether it is the most likely one) of each.

        Args:
            starts: number of the first token of each sequence that is scored, at least 1.
        """
        ...

    def close(self) -> None:
        """Ends what the engine started."""
        ...


def collect(pieces: Iterator[Piece], count: int, *, asides: bool = False) -> list[Answer]:
    """The whole answers of `count` requests, in order; with what came before them if asked for."""
    answers = [Answer([], 0.0, "stop") for _ in range(count)]
    for piece in pieces:
        if piece.aside and not asides:
            answers[piece.index] = Answer([], 0.0, "stop")
            continue
        answer = answers[piece.index]
        answer.token_ids += piece.token_ids
        answer.log_prob += sum(piece.log_probs)
        if piece.finish is not None:
            answer.finish = piece.finish
    return answers
