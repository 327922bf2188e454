"""Jobs that train on the engine with the routing of tokens given, or recorded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from training_jobs import Setting, all_rows, engine_of, full_weights, my_rows, parallel_state, summary, weighted_loss

from mindspeed_rl.dataplane.transfer_dock import TransferDock
from mindspeed_rl.engine.batching import Rows
from mindspeed_rl.engine.router_replay import RoutedLayers
from mindspeed_rl.engine.train_engine import TrainEngine
from mindspeed_rl.models.plan import ModelPlan
from mindspeed_rl.run.columns import ROUTED_LENGTHS, name_routed_column
from mindspeed_rl.workers.replica import Replica
from mindspeed_rl.workers.routing import _RecordedRouting

NUM_EXPERTS, TOPK = 4, 2
#: of the tiny model `moe_mixed`
ROUTED_LAYERS = [0, 2, 3]


def add_routed(engine: TrainEngine) -> RoutedLayers:
    """The routers of the engine, which replay from now on."""
    routed = RoutedLayers(engine.model)
    engine.add_part(routed)
    return routed


def given_routing() -> list[torch.Tensor]:
    """[tokens, routed layers, 2] for each row: experts drawn at random, and nothing said of the last token."""
    generator = torch.Generator().manual_seed(11)
    results = []
    for length in all_rows().lengths:
        chances = torch.rand(length, len(ROUTED_LAYERS), NUM_EXPERTS, generator=generator)
        routing = chances.argsort(-1)[..., :TOPK].to(torch.int16)
        routing[-1] = -1
        results.append(routing)
    return results


def _with_routing(engine: TrainEngine) -> Rows:
    """This rank's rows with the routing of its stage's layers."""
    stage = parallel_state.get_pipeline_model_parallel_rank()
    layers = [layer for chunk in engine.model.plan.routed_layers(stage) for layer in chunk]
    columns = [ROUTED_LAYERS.index(layer) for layer in layers]
    rows = replace(all_rows(), routing=[experts[:, columns] for experts in given_routing()])
    return my_rows(rows)


def train_replayed(setting: Setting, steps: int = 3) -> dict[str, Any]:
    """Trains with the given routing; reports it all, and how much of it the routers agreed with."""
    with engine_of(setting) as engine:
        routed = add_routed(engine)
        rows = _with_routing(engine)
        results = [engine.train_step(rows, setting.batching, weighted_loss) for _ in range(steps)]
        return summary(results, full_weights(engine)) | {"agreement": routed.take_agreement()}


def draw_routing(plan: ModelPlan, rows: Rows) -> list[torch.Tensor]:
    """[tokens, routed layers, k] for each row: experts of any family, drawn at random; a prompt has the same in every row."""
    num_layers = sum(len(chunk) for chunk in plan.routed_layers(0))
    model = plan.model_config
    assert model.num_moe_experts is not None
    generator = torch.Generator().manual_seed(11)
    chances = [torch.rand(length, num_layers, model.num_moe_experts, generator=generator) for length in rows.lengths]
    prompts: dict[bytes, torch.Tensor] = {}
    for ids, count, scores in zip(rows.input_ids, rows.prompt_lengths, chances):
        scores[:count] = prompts.setdefault(ids[:count].numpy().tobytes(), scores[:count].clone())
    return [scores.argsort(-1)[..., : model.moe_router_topk].to(torch.int16) for scores in chances]


def train_random_routing(setting: Setting, steps: int = 3) -> dict[str, Any]:
    """Trains any family with experts that are sampled for each token of each layer; a rank has all layers."""
    with engine_of(setting) as engine:
        routed = add_routed(engine)
        rows = my_rows(replace(all_rows(), routing=draw_routing(engine.model.plan, all_rows())))
        results = [engine.train_step(rows, setting.batching, weighted_loss) for _ in range(steps)]
        return summary(results, full_weights(engine)) | {"agreement": routed.take_agreement()}


def forward_replayed(setting: Setting) -> list[Any]:
    """Log-probs of all rows with the given routing, in one process."""
    with engine_of(setting) as engine:
        add_routed(engine)
        output = engine.forward(_with_routing(engine), setting.batching)
        assert output is not None
        return [values.numpy() for values in output[0]]


def by_row_and_layer(
    engine: TrainEngine, routing: Sequence[torch.Tensor], num_rows: int
) -> dict[tuple[int, int], list[list[int]]]:
    """Experts of each token by row and layer, of this rank's share of so many rows and the layers of its stage."""
    stage = parallel_state.get_pipeline_model_parallel_rank()
    layers = [layer for chunk in engine.model.plan.routed_layers(stage) for layer in chunk]
    first, step = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    return {
        (number, layer): sorted_experts(experts[:, place])
        for number, experts in zip(range(first, num_rows, step), routing)
        for place, layer in enumerate(layers)
    }


def record(setting: Setting) -> dict[str, Any]:
    """What a forward pass chose, by row and layer of this rank's stage; then the loss with and without it."""
    with engine_of(setting) as engine:
        routed = add_routed(engine)
        rows = my_rows(all_rows())
        with routed.recording() as recording:
            engine.forward(rows, setting.batching)
        routing = routed.gather_recording(recording, rows)
        replay = engine.measure(replace(rows, routing=routing), setting.batching, weighted_loss)
        plain = engine.measure(rows, setting.batching, weighted_loss)
        return {
            "routing": by_row_and_layer(engine, routing, len(all_rows())),
            "losses": [[float(loss.loss_sum) for loss in losses] for losses in (replay, plain)],
            "agreement": routed.take_agreement(),
        }


class LocalPlane:
    """A transfer dock without an actor around it."""

    def __init__(self, num_rows: int, columns: Sequence[str]) -> None:
        self._dock = TransferDock(num_rows, 1, {"rollout": tuple(columns), "actor_log_prob": (), "actor_train": ()})

    def put(self, data: Any, indexes: Sequence[int]) -> None:
        self._dock.put(data, indexes)

    def get(self, consumer: str, columns: Sequence[str], *, indexes: Sequence[int], timeout_s: float) -> Any:
        result = self._dock.get(consumer, columns, indexes=indexes)
        assert result[0] is not None
        return result


def travel(setting: Setting) -> dict[tuple[int, int], list[list[int]]]:
    """What R2 hands to the update, of rows in another order, by row and layer; through a transfer dock, in one process."""
    with engine_of(setting) as engine:
        rows, numbers = all_rows(), list(range(8))
        plane = LocalPlane(8, [ROUTED_LENGTHS, name_routed_column(0)])
        routing = _RecordedRouting(add_routed(engine), engine.plan, Replica(plane, 10.0, by_stage=True))  # pyrefly: ignore[bad-argument-type]
        routing.forward(engine, rows, setting.batching, numbers)
        order = [5, 2, 7, 0, 1, 3, 6, 4]
        chosen = rows.select(order)
        told = routing.for_update(replace(chosen, columns={"row": [torch.tensor(number) for number in order]}))
        assert told.routing is not None
        return {
            (number, layer): sorted_experts(experts[:, place])
            for number, experts in zip(order, told.routing)
            for place, layer in enumerate(ROUTED_LAYERS)
        }


def sorted_experts(values: torch.Tensor) -> list[list[int]]:
    return values.sort(-1).values.tolist()
