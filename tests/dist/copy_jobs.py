"""A job that trains and tells the bits of every weight that a rank holds after each step."""

from __future__ import annotations

import hashlib

import torch
from prediction_jobs import masked_rows
from training_jobs import Setting, engine_of, my_rows, weighted_loss

from mindspeed_rl.engine.weights import list_local_weights

#: tensors of the file, number of shards, shard -> digest of the bits
Copies = dict[tuple[tuple[str, ...], int, int], list[str]]


def train(setting: Setting, steps: int = 3) -> list[Copies]:
    """Trains; returns the weights of this rank after each step, of which one rank may have several copies."""
    found: list[Copies] = []
    with engine_of(setting) as engine:
        for _ in range(steps):
            engine.train_step(my_rows(masked_rows()), setting.batching, weighted_loss)
            held: Copies = {}
            for weight in list_local_weights(engine.model):
                bits = weight.tensor.detach().contiguous().view(torch.uint8).numpy().tobytes()
                shards = (weight.num_shards, weight.shard) if any(one.dim is not None for one in weight.op.splits) else (1, 0)
                held.setdefault((weight.op.hf, *shards), []).append(hashlib.sha256(bits).hexdigest())
            found.append(held)
    return found
