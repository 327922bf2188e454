"""Jobs that train and compare the copies of every weight: by the bits that a rank reports, or as a run does by its key."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
from collections.abc import Iterator

import torch
import torch.distributed as dist
from prediction_jobs import masked_rows
from training_jobs import Setting, engine_of, my_rows, weighted_loss

from mindspeed_rl.engine.lora import list_adapters
from mindspeed_rl.engine.train_engine import TrainEngine
from mindspeed_rl.engine.weights import list_local_weights
from mindspeed_rl.resharding.weight_copies import WeightCopies, WeightCopyError

#: tensors of the file, number of shards, shard -> digest of the bits
Copies = dict[tuple[tuple[str, ...], int, int], list[str]]


@contextlib.contextmanager
def comparing_engine(setting: Setting, interval: int) -> Iterator[TrainEngine]:
    """An engine that compares copies, as a role of a run with the key."""
    keys = setting.keys | {"check_weight_copies_interval": interval}
    with engine_of(dataclasses.replace(setting, keys=keys)) as engine:
        copies = WeightCopies.build(engine.config, engine.model)
        assert copies is not None
        engine.add_part(copies)
        yield engine


def train(setting: Setting, steps: int = 3) -> list[Copies]:
    """Trains; returns the weights of this rank after each step, of which one rank may have several copies.

    The engine's own comparison finds no difference.
    """
    found: list[Copies] = []
    with comparing_engine(setting, 1) as engine:
        for _ in range(steps):
            engine.train_step(my_rows(masked_rows()), setting.batching, weighted_loss)
            held: Copies = {}
            for weight in list_local_weights(engine.model):
                bits = weight.tensor.detach().contiguous().view(torch.uint8).numpy().tobytes()
                shards = (weight.num_shards, weight.shard) if any(one.dim is not None for one in weight.op.splits) else (1, 0)
                held.setdefault((weight.op.hf, *shards), []).append(hashlib.sha256(bits).hexdigest())
            found.append(held)
    return found


def change_copy(setting: Setting, changed: str, adapter: str = "", rank: int = 1, steps: int = 4) -> list[str | None]:
    """Changes one element on one rank after the first step; returns the error of each step. Copies are compared every two.

    Args:
        changed: name in the file of the weight; one of its adapter's matrices, "A" or "B", where `adapter` says so.
    """
    errors: list[str | None] = []
    with comparing_engine(setting, 2) as engine:
        for step in range(steps):
            try:
                engine.train_step(my_rows(masked_rows()), setting.batching, weighted_loss, has_next=step + 1 < steps)
                errors.append(None)
            except WeightCopyError as error:
                errors.append(str(error))
            if step == 0 and dist.get_rank() == rank:
                _find(engine, changed, adapter).view(-1)[0] += 0.25
    return errors


def _find(engine: TrainEngine, changed: str, adapter: str) -> torch.Tensor:
    if not adapter:
        return next(weight.tensor for weight in list_local_weights(engine.model) if changed in weight.op.hf)
    found = next(matrices for op, matrices in list_adapters(engine.model) if changed in op.hf)
    return {"A": found.a, "B": found.b}[adapter]
