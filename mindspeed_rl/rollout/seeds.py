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
