"""What goes into the rollout engine and what comes out of it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

import hashlib


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn.

    Attributes:
        temperature: 0 is greedy.
        top_p, top_k, min_p: cut-offs; 1.0, -1 and 0.0 leave the distribution whole.
        max_tokens: most generated tokens.
        stop_token_ids: tokens that end a response; they belong to it.
    """

    temperature: float
    max_tokens: int
    stop_token_ids: tuple[int, ...]
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0

    @property
    def whole_distribution(self) -> bool:
        """True when no token is cut off, so that the engine's log-probs are those of the tempered model."""
        return self.top_p >= 1.0 and self.top_k <= 0 and self.min_p <= 0.0

    def limited(self, max_tokens: int) -> Sampling:
        """The same with responses of at most so many tokens, and no more than before."""
        return replace(self, max_tokens=min(max_tokens, self.max_tokens))


@dataclass(frozen=True)
class GenerationRequest:
    """One response to be generated.

    Attributes:
        prompt_ids: tokens of the prompt.
        seed: of this response alone: results do not depend on what else is in the batch.
    """

    prompt_ids: list[int]
    seed: int


@dataclass(frozen=True)
class Completion:
    """One generated response.

    Attributes:
        token_ids: with the stop token, if one ended it.
        log_probs: of each token under the distribution it was drawn from.
        truncated: True when max_tokens ended it.
        routing: [tokens of prompt and response but the last, layers, k], the experts that each was sent to; None where the
            engine does not say.
    """

    token_ids: list[int]
    log_probs: list[float]
    truncated: bool
    routing: np.ndarray | None = field(default=None, compare=False, repr=False)


def sample_seed(run_seed: int, iteration: int, prompt: int, sample: int) -> int:
    """A 31-bit seed that depends on these four numbers and on nothing else (no rank, no batch order).

    Args:
        run_seed: the run's `seed`.
        iteration: number of the rollout.
        prompt: number of the prompt in the rollout.
        sample: number of the response to that prompt.
    """
    digest = hashlib.blake2b(f"{run_seed}/{iteration}/{prompt}/{sample}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 33


def turn_seed(seed: int, turn: int) -> int:
    """The seed of a turn of the model, from that of its sample and from how many turns came before.

    The first turn has the sample's own seed: an agent that takes one turn draws what a single response would be.
    """
    if not turn:
        return seed
    digest = hashlib.blake2b(f"{seed}#{turn}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 33
