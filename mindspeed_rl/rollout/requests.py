"""Requests to the rollout engine, its completions, and the seed of every sample."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True)
class Sampling:
    """Parameters of a response, all but its tokens.

    Attributes:
        temperature: 0 is greedy.
        top_p, top_k, min_p: cut-offs; 1.0, -1 and 0.0 leave the full distribution.
        max_tokens: upper limit of generated tokens.
        min_tokens: no stop token is sampled before so many tokens.
        stop_token_ids: tokens that end a response; they belong to it.
        repetition_penalty, presence_penalty, frequency_penalty: 1.0, 0.0 and 0.0 are off.
        stop: texts that end a response; the token that completes one is its last.
        structured_output: fields of vLLM's `StructuredOutputsParams` as JSON; empty where any text is allowed.
        images: references of the images in the context, in the order of their tokens.
        adapter: name of an adapter of the engine that samples in place of the trained one.
    """

    temperature: float
    max_tokens: int
    stop_token_ids: tuple[int, ...]
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    structured_output: str = ""
    images: tuple[str, ...] = ()
    adapter: str = ""

    def list_penalties(self) -> list[str]:
        """Return the names of what changes the logits as an answer grows."""
        off = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0, "min_tokens": 0}
        return [name for name, value in off.items() if getattr(self, name) != value]


#: greedy sampling of the model's own distribution: no cut-off, no penalty
_PLAIN: dict[str, Any] = {
    **{"temperature": 0.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0},
    **{"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0},
}


@dataclass(frozen=True)
class EvaluationSampling:
    """Responses to each held-out prompt.

    Attributes:
        temperature: 0 is greedy, without cut-offs and penalties; None is the sampling of training. Stop texts and the form of
            responses are for training in any case.
        num_samples: responses to each prompt.
        top_p, top_k: cut-offs of responses that are not greedy; None is training's.
    """

    temperature: float | None = 0.0
    num_samples: int = 1
    top_p: float | None = None
    top_k: int | None = None

    @property
    def name(self) -> str:
        """Its name for the console."""
        return "greedy" if self.temperature == 0.0 else "sampled"

    def apply(self, sampling: Sampling) -> Sampling:
        """Return the parameters of a response, made from the training parameters."""
        if self.temperature == 0.0:
            return replace(sampling, **_PLAIN)
        own: dict[str, Any] = {"temperature": self.temperature, "top_p": self.top_p, "top_k": self.top_k}
        return replace(sampling, **{name: value for name, value in own.items() if value is not None})


@dataclass(frozen=True)
class Completion:
    """One generated response.

    Attributes:
        token_ids: with the stop token, if one ended it.
        log_probs: log-prob of each token under the full distribution at the request's temperature (1 for greedy ones), before
            cut-offs.
        truncated: True when max_tokens ended it.
        routing: [tokens of prompt and response but the last, layers, k], the experts that each was sent to; None where the
            engine does not report them.
    """

    token_ids: list[int]
    log_probs: list[float]
    truncated: bool
    routing: np.ndarray | None = field(default=None, compare=False, repr=False)


def sample_seed(run_seed: int, iteration: int, prompt: int, sample: int) -> int:
    """Return a 31-bit seed that depends on these four integers and on nothing else (no rank, no batch order).

    Args:
        run_seed: the run's `seed`.
        iteration: index of the rollout.
        prompt: index of the prompt in the rollout.
        sample: index of the response to that prompt.
    """
    return derive_seed(f"{run_seed}/{iteration}/{prompt}/{sample}")


def derive_seed(text: str) -> int:
    """Return a 31-bit seed that depends on the text and on nothing else; texts of other kinds have other separators."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 33
