"""Trainers and engines on other devices: slices go from all trainers to all engines, proven, and who leaves ends it for all."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from engine_model import EngineModel, EngineRank
from ports import find_free_port
from push_jobs import Case, Side, weights_of
from test_weight_push import MOE, TIED

from mindspeed_rl import platform
from mindspeed_rl.resharding.destinations import Destinations, read_destinations
from mindspeed_rl.resharding.disaggregated import ServedModel, WeightSyncGroup
from mindspeed_rl.resharding.exchange import Exchange
from mindspeed_rl.resharding.proof import WeightDeliveryError
from mindspeed_rl.resharding.rendezvous import Rendezvous

TRAINERS, SERVERS = 2, 2
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    platform.select("cpu")


def trainer(case: Case, rank: int) -> Side:
    """A trainer before it meets anybody."""
    return Side(case, Alone(rank), meets=False)


class Alone(Exchange):
    """Says who a member will be."""

    def __init__(self, rank: int) -> None:
        self.rank, self.size = rank, TRAINERS


class Engine:
    """A server of one worker."""

    def __init__(self, shapes: dict[str, tuple[int, ...]]) -> None:
        at = EngineRank(1, 0, 4, 2, 4)
        self.model, self.reference, self.asked = EngineModel(shapes, at), EngineModel(shapes, at), 0

    def read(self, served: ServedModel) -> Destinations:
        self.asked += 1
        return read_destinations(self.model, self.model.load_weights, served.shapes, torch.float32)

    def differs(self, tensors: dict[str, torch.Tensor]) -> list[str]:
        self.reference.load_weights(tensors.items())
        wanted = dict(self.reference.named_parameters())
        vocabulary = tensors["model.embed_tokens.weight"].shape[0]
        results = []
        for name, value in self.model.named_parameters():
            real = vocabulary if name.endswith(("embed_tokens.weight", "lm_head.weight")) else value.shape[0]
            if not torch.equal(value[:real], wanted[name][:real]):
                results.append(name)
        return results


def together(work: Callable[[int, WeightSyncGroup], Any], size: int = TRAINERS + SERVERS) -> list[Any]:
    """What each member says, trainers first; each is a thread with a group of its own."""
    meeting = Rendezvous.from_json(Rendezvous("127.0.0.1", find_free_port(), "meeting", size, 30.0).to_json())

    def member(rank: int) -> Any:
        group = WeightSyncGroup(meeting, rank)
        try:
            return work(rank, group)
        finally:
            group.close()

    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(member, range(size)))


def three_updates(sides: list[Any], engines: list[Engine], frozen: str, delta: bool) -> list[list[tuple[int, int, list[str]]]]:
    """Push three updates of the trainers to the engines, proven; return what each member received, sent, and has otherwise.

    Args:
        frozen: a part of the names of the tensors that do not change.
    """

    def work(rank: int, group: WeightSyncGroup) -> list[tuple[int, int, list[str]]]:
        if rank < TRAINERS:
            push = group.build_trainer_push(sides[rank].trained, delta=delta)
        else:
            push = group.build_engine_push(engines[rank - TRAINERS].read, replica=rank, derived=(), device=CPU)
        said = []
        for update in range(3):
            tensors = weights_of(sides[0].ops, update, torch.float32, frozen)
            if rank < TRAINERS:
                sides[rank].train(tensors)
            model = None if rank < TRAINERS else engines[rank - TRAINERS].model
            push.write(model)
            assert push.compare(model).differing == {}
            sent = push.plan.moves.bytes_by_rank("source").get(rank, 0)
            differs = [] if rank < TRAINERS else engines[rank - TRAINERS].differs(tensors)
            said.append((push.received_bytes, sent, differs))
        return said

    return together(work, TRAINERS + len(engines))


@pytest.mark.parametrize("delta", [False, True])
def test_every_engine_holds_what_was_trained_and_got_nothing_twice(delta: bool) -> None:
    case = Case(MOE, {"ep": 2}, 1, train_ranks=TRAINERS)
    sides = [trainer(case, rank) for rank in range(TRAINERS)]
    engines = [Engine(dict(sides[0].trained.shapes)) for _ in range(SERVERS)]
    size = sum(4 * torch.Size(shape).numel() for shape in sides[0].trained.shapes.values())
    frozen = "mlp.experts.1."
    frozen_size = sum(4 * torch.Size(shape).numel() for name, shape in sides[0].trained.shapes.items() if frozen in name)

    result = three_updates(sides, engines, frozen, delta)
    for said in result[:TRAINERS]:  # both send about half of what two engines need
        assert all(received == 0 and abs(sent - size) < size // 8 for received, sent, _ in said)
    for said in result[TRAINERS:]:
        assert [differs for _, _, differs in said] == [[]] * 3
        assert [received for received, _, _ in said] == [size, *[size - frozen_size if delta else size] * 2]


@pytest.mark.parametrize("delta", [False, True])
def test_many_engines_hold_what_was_trained_and_pass_it_on_to_each_other(delta: bool) -> None:
    servers = 5
    case = Case(MOE, {"ep": 2}, 1, train_ranks=TRAINERS)
    sides = [trainer(case, rank) for rank in range(TRAINERS)]
    for side in sides:  # many buckets
        side.trained = dataclasses.replace(side.trained, bucket_bytes=4096)
    engines = [Engine(dict(sides[0].trained.shapes)) for _ in range(servers)]
    size = sum(4 * torch.Size(shape).numel() for shape in sides[0].trained.shapes.values())
    frozen = "mlp.experts.1."

    result = three_updates(sides, engines, frozen, delta)
    assert all([differs for _, _, differs in said] == [[]] * 3 for said in result[TRAINERS:])
    # without relays each trainer would send half of what five engines need
    assert all(0 < sent < 1.2 * size for said in result for _, sent, _ in said)


def test_engines_take_prediction_layers_all_of_them_or_none() -> None:
    case = Case(TIED, {"tp": 2}, 1, train_ranks=TRAINERS)
    sides = [trainer(case, rank) for rank in range(TRAINERS)]
    shapes = dict(sides[0].trained.shapes)
    # the second layer, in place of one that predicts
    predicted = tuple(name for name in shapes if ".layers.1." in name)
    policy = {name: shape for name, shape in shapes.items() if name not in predicted}
    for side in sides:
        side.trained = dataclasses.replace(side.trained, predicted=predicted)

    class PolicyAlone(Engine):
        def read(self, served: ServedModel) -> Destinations:
            assert served.predicted == predicted
            return super().read(dataclasses.replace(served, shapes=policy))

    result = three_updates(sides, [Engine(shapes), PolicyAlone(policy)], "embed_tokens", delta=True)
    assert [differs for said in result[TRAINERS:] for _, _, differs in said] == [[]] * 6
    whole, alone = (sum(4 * torch.Size(shape).numel() for shape in part.values()) for part in (shapes, policy))
    assert [said[0][0] for said in result[TRAINERS:]] == [whole, alone]

    def join(rank: int, group: WeightSyncGroup) -> str:
        class HalfALayer(Engine):
            def read(self, served: ServedModel) -> Destinations:
                return super().read(dataclasses.replace(served, shapes=policy | {predicted[0]: shapes[predicted[0]]}))

        try:
            if rank < TRAINERS:
                group.build_trainer_push(sides[rank].trained, delta=False)
            else:
                engine = HalfALayer(policy | {predicted[0]: shapes[predicted[0]]})
                group.build_engine_push(engine.read, replica=rank, derived=(), device=CPU)
        except WeightDeliveryError as error:
            return str(error)
        return ""

    assert f"no parameter for {len(predicted) - 1} tensors" in together(join, TRAINERS + 1)[-1]


def test_an_engine_that_holds_other_weights_is_named_to_everybody() -> None:
    case = Case(TIED, {"tp": 2}, 1, train_ranks=TRAINERS)
    sides = [trainer(case, rank) for rank in range(TRAINERS)]
    engines = [Engine(dict(sides[0].trained.shapes)) for _ in range(SERVERS)]

    def work(rank: int, group: WeightSyncGroup) -> Any:
        if rank < TRAINERS:
            sides[rank].train(weights_of(sides[0].ops, 0, torch.float32))
            push, model = group.build_trainer_push(sides[rank].trained, delta=False), None
        else:
            engine = engines[rank - TRAINERS]
            push, model = group.build_engine_push(engine.read, replica=rank, derived=(), device=CPU), engine.model
        push.write(model)
        if rank == 3:
            dict(engines[1].model.named_parameters())["model.norm.weight"].data[0] += 1
        return push.compare(model).differing

    assert together(work) == [{3: ["model.norm.weight"]}] * 4


def test_an_engine_of_another_model_says_so_and_its_leaving_ends_the_push_of_the_others() -> None:
    case = Case(TIED, {"tp": 2}, 1, train_ranks=TRAINERS)
    sides = [trainer(case, rank) for rank in range(TRAINERS)]
    shapes = dict(sides[0].trained.shapes)
    odd = Engine(shapes | {"model.layers.2.input_layernorm.weight": (32,)})
    engines = [Engine(shapes), odd]

    def work(rank: int, group: WeightSyncGroup) -> Any:
        try:
            if rank < TRAINERS:
                sides[rank].train(weights_of(sides[0].ops, 0, torch.float32))
                push, model = group.build_trainer_push(sides[rank].trained, delta=False), None
            else:
                engine = engines[rank - TRAINERS]
                push, model = group.build_engine_push(engine.read, replica=rank, derived=(), device=CPU), engine.model
            push.write(model)
            push.compare(model)
        except WeightDeliveryError as error:
            return str(error)
        except RuntimeError:
            return "broken"
        return "fine"

    *others, said = together(work)
    assert others == ["broken"] * 3
    assert "1 parameters of the rollout engine got no tensor, for example model.layers.2.input_layernorm.weight" in said
