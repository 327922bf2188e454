"""Jobs that train on rows of several turns: as rows of trajectories, and with each sequence as a row of its own."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from training_jobs import Setting, engine_of, full_weights, my_rows, summary

from mindspeed_rl.algorithms.interfaces import PolicyBatch
from mindspeed_rl.algorithms.policy_losses import policy_loss
from mindspeed_rl.catalogue.objective import Objective
from mindspeed_rl.config import RLConfig
from mindspeed_rl.dataplane.columns import pack
from mindspeed_rl.engine.batching import Rows
from mindspeed_rl.rollout.protocol import Generated
from mindspeed_rl.rollout.trajectory import Segment, TokenSequence, Trajectory
from mindspeed_rl.run.objective import build_objective
from mindspeed_rl.workers.replica import _build_rows
from mindspeed_rl.workers.responses import build_response_columns

#: of each trajectory: of each sequence: tokens of the prompt, then of what is drawn and told by turns
SHAPES = (
    ((3, 4, 2, 5),),
    ((2, 3), (6, 4, 3, 2)),
    ((5, 7),),
    ((1, 2, 4, 3), (7, 1), (9, 6, 1, 1)),
)


def trajectories() -> list[Trajectory]:
    """One of two turns, one that splits after its first, one of a single turn, one that splits twice."""
    generator = torch.Generator().manual_seed(11)

    def sample(count: int) -> tuple[int, ...]:
        return tuple(torch.randint(2, 128, (count,), generator=generator).tolist())

    results = []
    for shapes in SHAPES:
        sequences = []
        for prompt, *turns in shapes:
            segments = [
                Segment.from_context(sample(count)) if place % 2 else Segment.from_generated(_make_generated(sample(count)))
                for place, count in enumerate(turns)
            ]
            sequences.append(TokenSequence(sample(prompt), tuple(segments)))
        results.append(Trajectory(tuple(sequences), "stop"))
    return results


def _make_generated(tokens: tuple[int, ...]) -> Generated:
    return Generated(tokens, (-1.0,) * len(tokens), (0,) * len(tokens), "stop")


ADVANTAGES = (1.0, -0.7, 0.4, 1.6)


def rows_of(given: list[Trajectory], advantages: list[float]) -> Rows:
    """As the workers make rows of what the data plane holds."""
    columns = {name: pack(values) for name, values in build_response_columns(given).items() if name != "trajectories"}
    masks = [mask.clone() for mask in columns["response_mask"]]
    columns |= {"scored_mask": masks, "loss_mask": masks}
    columns["advantages"] = [value * mask.float() for value, mask in zip(advantages, masks)]
    return _build_rows(columns, ["advantages", "scored_mask", "loss_mask"])


def whole() -> Rows:
    return rows_of(trajectories(), list(ADVANTAGES))


def separate_rows() -> Rows:
    """Every sequence is a row."""
    pairs = [(sequence, value) for given, value in zip(trajectories(), ADVANTAGES) for sequence in given.sequences]
    return rows_of([Trajectory((sequence,), "stop") for sequence, _ in pairs], [value for _, value in pairs])


def objective(**keys: Any) -> Objective:
    return build_objective(RLConfig(init_kl_coef=0.0, token_level_loss=True, **keys), "ray_grpo", max_response_length=20)


def update(setting: Setting, is_whole: bool = True) -> dict[str, Any]:
    """One step of the token-level policy loss; log-probs and entropies before it as well."""
    with engine_of(setting) as engine:
        rows = my_rows(whole()) if is_whole else my_rows(separate_rows())
        before = engine.forward(rows, setting.batching)
        loss = partial(policy_loss, objective=objective())
        result = engine.train_step(rows, setting.batching, loss, PolicyBatch.from_inputs)
        actual = summary([result], full_weights(engine))
        return actual | {"before": None if before is None else [[row.tolist() for row in part] for part in before]}
