"""Jobs on rows of which several have a prompt in common."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from replay_jobs import ROUTED_LAYERS, by_row_and_layer
from training_jobs import Setting, engine_of, full_weights, my_rows, summary, weighted_loss

from mindspeed_rl.engine.batching import Rows
from mindspeed_rl.engine.router_replay import RoutedLayers

#: tokens of each prompt, and of its responses; one prompt has a single token, one response none
GROUPS = ((9, (5, 1, 12, 7)), (1, (3, 6)), (6, (0, 8, 2)), (4, (10,)))


def grouped_rows() -> Rows:
    """Ten rows with a weight for every response token, group after group."""
    generator = torch.Generator().manual_seed(7)

    def sample(count: int) -> torch.Tensor:
        return torch.randint(2, 128, (count,), generator=generator)

    rows = [(prompt, sample(length)) for size, lengths in GROUPS for prompt in [sample(size)] for length in lengths]
    return Rows(
        input_ids=[torch.cat(row) for row in rows],
        prompt_lengths=[len(prompt) for prompt, _ in rows],
        # around 2: a loss whose terms cancel would show nothing but rounding
        columns={"weights": [2.0 + torch.randn(len(response), generator=generator) for _, response in rows]},
    )


#: samples of agents: (sequence of the sample that it continues or -1, its tokens that are kept, context, sampled tokens)
TREES = (
    ((-1, 0, 30, 12), (0, 36, 3, 9), (1, 45, 2, 8), (0, 20, 1, 5)),
    ((-1, 0, 30, 7), (0, 37, 4, 6)),
    ((-1, 0, 3, 2), (-1, 0, 25, 4), (1, 27, 1, 3), (1, 29, 5, 20), (2, 28, 1, 1)),
)


def tree_rows() -> Rows:
    """Three samples of several sequences, which are branches of one another; the first two start alike."""
    generator = torch.Generator().manual_seed(11)
    start = torch.randint(2, 128, (30,), generator=generator)
    rows, spans, weights = [], [], []
    for tree in TREES:
        sequences: list[torch.Tensor] = []
        for parent, kept, context, sampled in tree:
            new = torch.randint(2, 128, (context + sampled,), generator=generator)
            if parent < 0 and context == len(start):
                new[: len(start)] = start
            sequences.append(torch.cat([sequences[parent][:kept], new]) if parent >= 0 else new)
        rows.append(torch.cat(sequences))
        spans.append([(kept + context, sampled) for _, kept, context, sampled in tree])
        weights.append(2.0 + torch.randn(sum(sampled for *_, sampled in tree), generator=generator))
    return Rows(rows, [row[0][0] for row in spans], sequences=spans, columns={"weights": weights})


def train(setting: Setting, steps: int = 3, *, trees: bool = False) -> dict[str, Any]:
    """Trains and reports each step's metrics and gradient norm, and the weights at the end."""
    with engine_of(setting) as engine:
        rows = my_rows(tree_rows() if trees else grouped_rows())
        results = [engine.train_step(rows, setting.batching, weighted_loss) for _ in range(steps)]
        return summary(results, full_weights(engine))


def forward(setting: Setting) -> list[Any]:
    """Log-probs of all rows, in one process."""
    with engine_of(setting) as engine:
        output = engine.forward(grouped_rows(), setting.batching)
        assert output is not None
        return [values.numpy() for values in output[0]]


def record(setting: Setting) -> dict[str, Any]:
    """What a forward pass chose, by row and layer of this rank's stage, and how much of it a pass with it agreed with."""
    with engine_of(setting) as engine:
        routed = RoutedLayers(engine.model)
        engine.add_part(routed)
        rows = my_rows(grouped_rows())
        with routed.recording() as recording:
            engine.forward(rows, setting.batching)
        routing = routed.gather_recording(recording, rows)
        engine.measure(replace(rows, routing=routing), setting.batching, weighted_loss)
        result = by_row_and_layer(engine, routing, len(grouped_rows()))
        assert {layer for _, layer in result} <= set(ROUTED_LAYERS)
        return {
            "routing": result,
            "agreement": routed.take_agreement(),
        }
