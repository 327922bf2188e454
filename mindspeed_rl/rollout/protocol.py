"""The rollout engine as trainers and agent loops see it: tokens in, tokens out, one request at a time.

Two hosts implement it: `in_process` (a worker steps vLLM's engine on the device that trains) and a server with dedicated
devices. No torch, so the driver may import it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal, Protocol

import numpy as np

from mindspeed_rl.rollout.requests import Sampling, derive_seed

if TYPE_CHECKING:
    from torch import Tensor

Finish = Literal["stop", "length", "aborted"]
PauseMode = Literal["wait", "keep", "abort"]


@dataclass(frozen=True)
class Generated:
    """A response, or the tokens of it that exist so far; without arguments none.

    Attributes:
        token_ids: with the stop token, if one ended it.
        log_probs: log-prob of each token under the full distribution at the request's temperature; see `Completion`.
        versions: version of the weights that each token was sampled with.
        finish: "stop": a stop token; "length": max_tokens; "aborted": interrupted, another call may continue it as `partial`.
        routing: [tokens of prompt and response but the last, layers, k], the experts that each was sent to when the next token
            was sampled; None where the engine does not report them.
    """

    token_ids: tuple[int, ...] = ()
    log_probs: tuple[float, ...] = ()
    versions: tuple[int, ...] = ()
    finish: Finish = "aborted"
    routing: np.ndarray | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        if not len(self.token_ids) == len(self.log_probs) == len(self.versions):
            raise ValueError(
                f"a response of {len(self.token_ids)} tokens has {len(self.log_probs)} log-probs and "
                f"{len(self.versions)} weight versions"
            )

    def concat(self, rest: Generated) -> Generated:
        """Return the full response, of which `rest` has the tokens after these."""
        return Generated(
            self.token_ids + rest.token_ids,
            self.log_probs + rest.log_probs,
            self.versions + rest.versions,
            rest.finish,
            continue_routing(self.routing, rest.routing),
        )


class GrowingResponse:
    """A response whose tokens arrive in chunks; a chunk costs its own tokens, however many there are.

    Attributes:
        token_ids, log_probs, versions, finish: as in `Generated`.
    """

    def __init__(self, begun: Generated) -> None:
        """Start with the tokens that exist."""
        self.token_ids, self.log_probs, self.versions = list(begun.token_ids), list(begun.log_probs), list(begun.versions)
        self.finish: Finish = begun.finish
        self._routing = begun.routing

    def add(self, token_ids: Sequence[int], log_probs: Sequence[float], version: int, finish: Finish | None) -> None:
        """Add the tokens of a chunk; None: others may come, at another engine too."""
        self.token_ids += token_ids
        self.log_probs += log_probs
        self.versions += [version] * len(token_ids)
        self.finish = finish or "aborted"

    def freeze(self) -> Generated:
        """Return the response as it is."""
        return Generated(tuple(self.token_ids), tuple(self.log_probs), tuple(self.versions), self.finish, self._routing)


def continue_routing(first: np.ndarray | None, full: np.ndarray | None) -> np.ndarray | None:
    """Return the routing of a continued context: `first` for the tokens that it covers, `full` for those after them.

    Every token keeps the experts with which the next one was sampled, also where a later request computed it again.
    """
    if first is None or full is None:
        return full if first is None else first
    return np.concatenate([first, full[len(first) :]])


@dataclass(frozen=True)
class Continuation:
    """The request by which an engine starts or continues a response.

    Attributes:
        prompt_ids: the prompt and the tokens that the response has.
        sampling: for the remaining tokens.
        seed: see `_continuation_seed`.
    """

    prompt_ids: tuple[int, ...]
    sampling: Sampling
    seed: int

    @classmethod
    def build(cls, prompt_ids: Iterable[int], sampling: Sampling, seed: int, partial: Generated | None) -> Continuation | None:
        """Return the request that starts a response, or continues `partial`; None where it has all tokens that it may have.

        Raises:
            ValueError: `partial` was not interrupted, or has more tokens than it may have.
        """
        prompt = tuple(prompt_ids)
        if partial is None:
            return cls(prompt, sampling, seed)
        num_tokens = len(partial.token_ids)
        if partial.finish != "aborted" or num_tokens > sampling.max_tokens:
            raise ValueError(
                f"a response of {num_tokens} tokens that ended by '{partial.finish}' cannot be continued to max_tokens "
                f"{sampling.max_tokens}"
            )
        if num_tokens == sampling.max_tokens:
            return None
        remaining = replace(sampling, max_tokens=sampling.max_tokens - num_tokens)
        return cls(prompt + partial.token_ids, remaining, _continuation_seed(seed, num_tokens))


def _continuation_seed(seed: int, num_tokens: int) -> int:
    """Return the seed with which a response is continued after `num_tokens` tokens; nothing else decides what is sampled.

    A request's generator cannot move from one engine to another, so each continuation samples from a new one. Without tokens
    it is the response's own seed.
    """
    if not num_tokens:
        return seed
    return derive_seed(f"{seed}+{num_tokens}")


@dataclass(frozen=True)
class PartialResponse:
    """A response to start or to continue, as it is sent to a worker with an engine.

    Attributes:
        seed: seed of the response.
        partial: the tokens that it has; None for a new one.
        images: images of the prompt; see `Sampling`.
    """

    prompt_ids: tuple[int, ...]
    seed: int
    partial: Generated | None
    images: tuple[str, ...] = ()


class RolloutEngine(Protocol):
    """One engine, or several that act as one.

    All methods are coroutines of one event loop. One caller calls `pause` and `resume`, one at a time; many call `generate` at
    once, also while the engine is paused: it then returns after `resume`.
    """

    async def generate(
        self, prompt_ids: tuple[int, ...], sampling: Sampling, seed: int, partial: Generated | None = None
    ) -> Generated:
        """Return a full response; the tokens of `partial` come first, with their log-probs and versions.

        The same arguments and weights give the same response, whatever other requests the engine has.

        Args:
            sampling: max_tokens counts all tokens of the response, with the tokens of `partial`.
            seed: seed of the response; see `_continuation_seed` for the tokens after `partial`.
            partial: a response that was interrupted.

        Raises:
            ValueError: the request cannot be served: too long for the engine, or `partial` has ended.
        """
        ...

    async def pause(self, mode: PauseMode) -> None:
        """Stop generating until `resume`; return once nothing runs.

        Args:
            mode: "wait": running requests end first; "keep": they are frozen, and continue after `resume` with the keys and
                values that they have, so later tokens have other versions; "abort": they return, "aborted", with the tokens
                that they have.
        """
        ...

    async def resume(self) -> None:
        """Continue the frozen requests, and start those that came in meanwhile."""
        ...


class LoadsWeights(Protocol):
    """All of vLLM's models; they have no base class with this method."""

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> Iterable[str]:
        """Take tensors under HF names; return the names of the parameters that were filled."""
        ...
