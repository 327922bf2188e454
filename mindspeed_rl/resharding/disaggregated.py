"""Weights from trainers to engines on other devices: a process group of both sides, and a push between its members.

The trainers are the first members, in the order of their world; the workers of each engine follow. Every engine's worker reads
out of its engine what it needs, every trainer sends the slices that are nearest with it, and nobody gathers the model.
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
from mindspeed_rl.platform.rendezvous import meeting_store
from mindspeed_rl.resharding.destinations import Destinations
from mindspeed_rl.resharding.exchange import Exchange
from mindspeed_rl.resharding.push import Trained, WeightPush
from mindspeed_rl.resharding.rendezvous import Rendezvous
from mindspeed_rl.resharding.transfer_plan import Boxes


class WeightSyncGroup:
    """A process group beside those that its members have already. Building it is collective.

    Attributes:
        exchange: messages between its members.
    """

    def __init__(self, meeting: Rendezvous, rank: int) -> None:
        """
        Raises:
            Exception: not all members came in time; torch's own words.
        """
        store = meeting_store(meeting.host, meeting.port, meeting.size, serves=rank == 0, timeout_s=meeting.timeout_s)
        self._store = store  # rank 0 serves it as long as the group lives
        self._group: Any = platform.current().process_group(
            dist.PrefixStore(meeting.name, store), rank, meeting.size, meeting.timeout_s
        )
        self.exchange: Exchange = Exchange(self._group)

    def close(self) -> None:
        """The connections are closed; members need not agree on when."""
        group, self._group = self._group, None
        # it holds the group as well
        del self.exchange
        if hasattr(group, "shutdown"):
            group.shutdown()
        del self._store


def build_trainer_push(group: WeightSyncGroup, trained: Trained, *, delta: bool) -> WeightPush:
    """The push of a trainer; collective over the group."""
    exchange = group.exchange
    exchange.tell(_described(trained, delta) if exchange.rank == 0 else None, trained.device)
    return WeightPush(replace(trained, node_of=_nodes(exchange, trained.device)), None, exchange, delta=delta)


@dataclass(frozen=True)
class ServedModel:
    """What the trainers say of the model.

    Attributes:
        shapes: of every HF tensor, in forward order.
    """

    held: Boxes
    shapes: Mapping[str, tuple[int, ...]]
    copies: Mapping[str, str]
    bucket_bytes: int
    delta: bool


def build_engine_push(
    group: WeightSyncGroup,
    read: Callable[[ServedModel], tuple[Destinations, set[str]]],
    *,
    replica: int,
    derived: tuple[str, ...],
    device: torch.device,
) -> WeightPush:
    """The push of an engine's worker; collective over the group.

    Args:
        read: asks the engine where what lies; with the parameters that it lays out anew after each load.
        replica: number of the engine.
        derived: ends of names of parameters that the engine computes from others.

    Raises:
        WeightDeliveryError: this engine is not of the trainers' model. The other members wait then, until this one leaves.
    """
    exchange = group.exchange
    model = _read_description(exchange.tell(None, device))
    nodes = _nodes(exchange, device)
    destinations, repacked = read(model)
    trained = Trained(model.held, model.shapes, None, device, model.bucket_bytes, nodes, model.copies)
    return WeightPush(trained, destinations, exchange, replica=replica, derived=derived, repacked=repacked, delta=model.delta)


def _nodes(exchange: Exchange, device: torch.device) -> Callable[[int], int]:
    hosts = exchange.gather(socket.gethostname(), device)
    return [hosts.index(host) for host in hosts].__getitem__


def _described(trained: Trained, delta: bool) -> bytes:
    # ranks are named once: thousands of boxes lie on the same ones
    groups: dict[tuple[int, ...], int] = {}
    held = {
        name: [[box, groups.setdefault(tuple(ranks), len(groups))] for box, ranks in boxes.items()]
        for name, boxes in trained.held.items()
    }
    copies = dict(trained.copies or {})
    words = [held, list(groups), dict(trained.shapes), copies, trained.bucket_bytes, delta]
    return zlib.compress(json.dumps(words).encode(), 1)


def _read_description(text: bytes) -> ServedModel:
    held, groups, shapes, copies, bucket_bytes, delta = json.loads(zlib.decompress(text))
    boxes = {
        name: {tuple((start, stop) for start, stop in box): groups[number] for box, number in some}
        for name, some in held.items()
    }
    return ServedModel(boxes, {name: tuple(shape) for name, shape in shapes.items()}, copies, bucket_bytes, delta)
