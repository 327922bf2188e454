"""The seed of every sample, from where it stands in the run."""

from __future__ import annotations

import hashlib


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
