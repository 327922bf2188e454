"""What trainers and agent loops see of a rollout engine: tokens in, tokens out, one request at a time.

Two hosts: `in_process` (a worker steps vLLM's engine on the device that trains) and a server with devices of its own. No torch,
so the driver may import it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal, Protocol

import numpy as np

from mindspeed_rl.rollout.requests import Sampling

if TYPE_CHECKING:
    from torch import Tensor

Finish = Literal["stop", "length", "aborted"]
PauseMode = Literal["wait", "keep", "abort"]


@dataclass(frozen=True)
class Generated:
    """A response, or what there is of one.

    Attributes:
        token_ids: with the stop token, if one ended it.
        log_probs: of each token under the distribution it was drawn from.
        versions: of the weights that each token was drawn with.
        finish: "stop": a stop token; "length": max_tokens; "aborted": interrupted, and may go on as another call's `begun`.
        routing: [tokens of prompt and response but the last, layers, k], the experts that each was sent to when the token
            behind it was drawn; None where the engine does not say.
    """

    token_ids: tuple[int, ...]
    log_probs: tuple[float, ...]
    versions: tuple[int, ...]
    finish: Finish
    routing: np.ndarray | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        if not len(self.token_ids) == len(self.log_probs) == len(self.versions):
            raise ValueError(
                f"a response of {len(self.token_ids)} tokens has {len(self.log_probs)} log-probs and "
                f"{len(self.versions)} weight versions"
            )

    def followed_by(self, rest: Generated) -> Generated:
        """The whole response, of which `rest` is what came after these tokens."""
        return Generated(
            self.token_ids + rest.token_ids,
            self.log_probs + rest.log_probs,
            self.versions + rest.versions,
            rest.finish,
            continued_routing(self.routing, rest.routing),
        )


def continued_routing(first: np.ndarray | None, whole: np.ndarray | None) -> np.ndarray | None:
    """The routing of a context that went on: what was said of its beginning stays, the rest is from `whole`, which has it all.

    So every token keeps the experts with which the one behind it was drawn, also where a later request computed it anew.
    """
    if first is None or whole is None:
        return whole if first is None else first
    return np.concatenate([first, whole[len(first) :]])


#: a response that has no token yet
NOTHING = Generated((), (), (), "aborted")


@dataclass(frozen=True)
class Continuation:
    """What an engine is asked for when a response goes on.

    Attributes:
        prompt_ids: the prompt and the tokens that are kept.
        sampling: for the tokens that are still allowed.
        seed: see `continued_seed`.
    """

    prompt_ids: tuple[int, ...]
    sampling: Sampling
    seed: int


def continuation(prompt_ids: Iterable[int], sampling: Sampling, seed: int, begun: Generated | None) -> Continuation | None:
    """The request by which a response begins, or goes on behind the tokens that it has; None when it has all it may have.

    Raises:
        ValueError: `begun` was not interrupted, or has more tokens than it may.
    """
    prompt = tuple(prompt_ids)
    if begun is None:
        return Continuation(prompt, sampling, seed)
    kept = len(begun.token_ids)
    if begun.finish != "aborted" or kept > sampling.max_tokens:
        raise ValueError(
            f"a response of {kept} tokens that ended by '{begun.finish}' cannot go on to max_tokens {sampling.max_tokens}"
        )
    if kept == sampling.max_tokens:
        return None
    rest = replace(sampling, max_tokens=sampling.max_tokens - kept)
    return Continuation(prompt + begun.token_ids, rest, continued_seed(seed, kept))


def continued_seed(seed: int, num_kept: int) -> int:
    """The seed of a response that goes on behind `num_kept` tokens: these two decide what is drawn, and nothing else.

    A request's generator cannot be carried from one engine to another, so a response draws from a new one for each piece;
    without kept tokens that is the response's own.
    """
    if not num_kept:
        return seed
    digest = hashlib.blake2b(f"{seed}+{num_kept}".encode(), digest_size=8).digest()
    # 31 bits, as in `sample_seed`
    return int.from_bytes(digest, "big") >> 33


@dataclass(frozen=True)
class Piece:
    """A response that is to begin or to go on, on its way to whoever holds an engine.

    Attributes:
        seed: of the response.
        begun: what there is of it.
    """

    prompt_ids: tuple[int, ...]
    seed: int
    begun: Generated | None


class RolloutEngine(Protocol):
    """One engine, or several that answer as one.

    All methods are coroutines of one event loop. `pause`, `update_weights`, `release`, `restore` and `resume` are called by one
    caller, one at a time; `generate` by many at once, also while the engine is paused: it then answers after `resume`.
    """

    async def generate(
        self, prompt_ids: tuple[int, ...], sampling: Sampling, seed: int, begun: Generated | None = None
    ) -> Generated:
        """A whole response, beginning with the tokens of `begun`, which keep their log-probs and versions.

        The same arguments and weights give the same response, whatever else the engine works on.

        Args:
            sampling: max_tokens counts all tokens of the response, those of `begun` too.
            seed: of the response; see `continued_seed` for what is drawn behind `begun`.
            begun: a response that was interrupted.

        Raises:
            ValueError: the request cannot be answered: too long for the engine, or `begun` has ended.
        """
        ...

    async def pause(self, mode: PauseMode) -> None:
        """Nothing is generated from now on until `resume`; returns once that is true.

        Args:
            mode: "wait": what runs has ended first; "keep": what runs is frozen, and goes on after `resume` with the keys and
                values it has, so its later tokens have other versions; "abort": what runs has returned, "aborted" with the
                tokens it has.
        """
        ...

    async def resume(self) -> None:
        """Requests are worked on again: those that were kept, and those that came in meanwhile."""
        ...

    async def update_weights(self, version: int, named: Iterable[tuple[str, Tensor]] | None = None) -> None:
        """Tokens from now on are drawn with these weights and say so. The engine is paused; cached prefixes are dropped.

        Args:
            version: number of the weights, as the trainer counts.
            named: every tensor under its HF checkpoint name, whole; None where the engine's workers take them from a group
                that they share with the trainer's.

        Raises:
            RuntimeError: a parameter was given no tensor.
        """
        ...

    async def release(self) -> None:
        """The device's memory is free for others; the engine is paused, and nothing runs or was kept."""
        ...

    async def restore(self) -> None:
        """The memory is the engine's again; weights are undefined until `update_weights`."""
        ...
