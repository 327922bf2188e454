"""How many rows or tokens a pass through a model takes, as the run file says."""

from __future__ import annotations

from typing import Literal

from mindspeed_rl.config import RLConfig
from mindspeed_rl.engine.train_engine import MicroBatching


def micro_batching(rl: RLConfig, use: Literal["update", "actor", "ref"], size: int) -> MicroBatching:
    """Limits of updates, or of forward passes as the actor or the reference makes them.

    Args:
        size: rows of a micro-batch where there is no token budget.
    """
    if not rl.use_dynamic_bsz:
        return MicroBatching(size)
    budgets = {
        "update": (rl.update_max_packing_token_size, rl.update_dynamic_max_batch_size),
        "actor": (rl.actor_max_packing_token_size, rl.actor_dynamic_max_batch_size),
        "ref": (rl.ref_max_packing_token_size, rl.ref_dynamic_max_batch_size),
    }
    return MicroBatching(size, *budgets[use])
