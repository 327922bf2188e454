"""Weight sync from trainers to engines on other devices: a process group of both sides, and the sync between its members.

The trainers are the first members, in the order of their ranks; the workers of each engine follow. Every engine worker reads
from its engine the slices that it needs, the nearest trainer that has a slice sends it, and no rank gathers the model. Where
trainers would send more than a worker receives, workers pass slices on to each other (`plan_transfer`).
"""

from __future__ import annotations

import json
import socket
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from mindspeed_rl import platform
from mindspeed_rl.platform.rendezvous import meet, open_store, reach
from mindspeed_rl.resharding.destinations import Destinations
from mindspeed_rl.resharding.exchange import Exchange
from mindspeed_rl.resharding.push import WeightPush
from mindspeed_rl.resharding.rendezvous import Rendezvous
from mindspeed_rl.resharding.trained_weights import TrainedWeights
from mindspeed_rl.resharding.transfer_plan import RanksBySlice

#: parts of the time limit for the way to the trainers, and for the wait for all members: the driver's limit is the whole
_REACH, _MEET = 0.25, 0.5


@dataclass(frozen=True)
class ServedModel:
    """The trainers' description of the model.

    Attributes:
        holders: see `TrainedWeights`.
        shapes: shapes of all HF tensors, in forward order.
        quantized, quantization: see `TrainedWeights`.
        predicted: see `TrainedWeights`.
    """

    holders: RanksBySlice
    shapes: Mapping[str, tuple[int, ...]]
    copies: Mapping[str, str]
    bucket_bytes: int
    delta: bool
    quantized: tuple[str, ...]
    quantization: str | None
    predicted: tuple[str, ...]


class WeightSyncGroup:
    """A process group in addition to its members' own. Building it is collective.

    Attributes:
        exchange: messages between its members.
    """

    def __init__(self, rendezvous: Rendezvous, rank: int) -> None:
        """Connect the members.

        Raises:
            ConnectionError: the trainers cannot be reached.
            RuntimeError: a member failed or did not come, or the members cannot connect to each other.
        """
        host, port, size, timeout_s = rendezvous.host, rendezvous.port, rendezvous.size, rendezvous.timeout_s
        if rank > 0:
            reach(host, port, _REACH * timeout_s)
        store = open_store(host, port, size, serves=rank == 0, timeout_s=timeout_s)
        self._store = store  # rank 0 serves it as long as the group exists
        own = dist.PrefixStore(rendezvous.name, store)
        # the connections of a group are made in one call, which nothing ends before its time is over
        meet(own, rank, size, _MEET * timeout_s)
        self._group: Any = platform.current().process_group(own, rank, size, timeout_s)
        self.exchange: Exchange = Exchange(self._group)

    def close(self) -> None:
        """Close the connections; each member at any time."""
        group, self._group = self._group, None
        # it has a reference to the group as well
        del self.exchange
        if hasattr(group, "shutdown"):
            group.shutdown()
        del self._store

    def build_trainer_push(self, trained: TrainedWeights, *, delta: bool) -> WeightPush:
        """Build the weight sync of a trainer; collective over the group."""
        exchange = self.exchange
        exchange.broadcast(_pack(trained, delta) if exchange.rank == 0 else None, trained.device)
        trained = replace(trained, find_node=_gather_nodes(exchange, trained.device))
        return WeightPush(trained, None, exchange, delta=delta, relays=True)

    def build_engine_push(
        self,
        read: Callable[[ServedModel], Destinations],
        *,
        replica: int,
        derived: tuple[str, ...],
        device: torch.device,
    ) -> WeightPush:
        """Build the weight sync of an engine's worker; collective over the group.

        Args:
            read: returns the engine's destinations.
            replica: index of the engine.
            derived: suffixes of names of parameters that the engine computes from others.
            device: device of the engine's weights.

        Raises:
            WeightDeliveryError: this engine does not fit the trainers' model. The other members then wait until it leaves.
        """
        exchange = self.exchange
        model = _unpack(exchange.broadcast(None, device))
        nodes = _gather_nodes(exchange, device)
        destinations = read(model)
        trained = TrainedWeights(
            *(model.holders, model.shapes, None, device, model.bucket_bytes, nodes, model.copies),
            *(model.quantized, model.quantization, model.predicted),
        )
        return WeightPush(
            trained, destinations, exchange, replica=replica, derived=derived, delta=model.delta, relays=True
        )


def _gather_nodes(exchange: Exchange, device: torch.device) -> Callable[[int], int]:
    hosts = exchange.all_gather(socket.gethostname(), device)
    return [hosts.index(host) for host in hosts].__getitem__


def _pack(trained: TrainedWeights, delta: bool) -> bytes:
    # lists of ranks are sent once: thousands of slices are on the same ones
    groups: dict[tuple[int, ...], int] = {}
    holders = {
        name: [[tensor_slice, groups.setdefault(tuple(ranks), len(groups))] for tensor_slice, ranks in slices.items()]
        for name, slices in trained.holders.items()
    }
    copies = dict(trained.copies or {})
    rest = [trained.bucket_bytes, delta, trained.quantized, trained.quantization, trained.predicted]
    fields = [holders, list(groups), dict(trained.shapes), copies, *rest]
    return zlib.compress(json.dumps(fields).encode(), 1)


def _unpack(content: bytes) -> ServedModel:
    packed, groups, shapes, copies, *rest = json.loads(zlib.decompress(content))
    bucket_bytes, delta, quantized, quantization, predicted = rest
    holders = {
        name: {tuple((start, stop) for start, stop in tensor_slice): groups[index] for tensor_slice, index in slices}
        for name, slices in packed.items()
    }
    shapes = {name: tuple(shape) for name, shape in shapes.items()}
    return ServedModel(holders, shapes, copies, bucket_bytes, delta, tuple(quantized), quantization, tuple(predicted))
