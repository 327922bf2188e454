"""Weights from trainers to engines on other devices: a process group of both sides, whole tensors, in buckets.

`send` and `receive` are the two ends of one push. They know nothing of who trains or who generates: a plan that sends slices
from every trainer takes their place without a change around them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mindspeed_rl import platform
from mindspeed_rl.platform.rendezvous import meeting_store

#: most bytes of one message, unless a single tensor is larger
BUCKET_BYTES = 256 << 20
#: tensors of a bucket begin at multiples of this, so that their bytes can be viewed as any type
_ALIGNMENT = 16
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.int64)}


@dataclass(frozen=True)
class Meeting:
    """Where the members of a group meet.

    Attributes:
        host, port: of the store, which rank 0 serves.
        name: of this meeting; a group that is made anew has another.
        size: members.
        timeout_s: longest wait for each other, at the meeting and in a push.
    """

    host: str
    port: int
    name: str
    size: int
    timeout_s: float

    def to_json(self) -> str:
        """As it travels to the members."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Meeting:
        """What `to_json` wrote."""
        return cls(**json.loads(text))


class SpanningGroup:
    """A process group beside those that its members have already. Building it is collective.

    Rank 0 is a trainer, the others are workers of rollout engines.
    """

    def __init__(self, meeting: Meeting, rank: int) -> None:
        """
        Raises:
            Exception: not all members came in time; torch's own words.
        """
        store = meeting_store(meeting.host, meeting.port, meeting.size, serves=rank == 0, timeout_s=meeting.timeout_s)
        self._store = store  # rank 0 serves it as long as the group lives
        self._group: Any = platform.current().process_group(
            dist.PrefixStore(meeting.name, store), rank, meeting.size, meeting.timeout_s
        )
        self.rank = rank

    def broadcast(self, tensor: Tensor) -> None:
        """The tensor of rank 0 is that of all members."""
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        self._group.broadcast([tensor], options).wait()

    def close(self) -> None:
        """The connections are closed; members need not agree on when."""
        group, self._group = self._group, None
        if hasattr(group, "shutdown"):
            group.shutdown()
        del self._store


def send(group: SpanningGroup, named: Iterable[tuple[str, Tensor]], *, bucket_bytes: int = BUCKET_BYTES) -> None:
    """All other members receive these tensors; called by rank 0.

    Args:
        named: whole tensors, one at a time in memory beside the bucket.
    """
    parts: list[tuple[str, Tensor]] = []
    size = 0
    for name, tensor in named:
        if parts and size + tensor.nbytes > bucket_bytes:
            _send_bucket(group, parts)
            parts, size = [], 0
        parts.append((name, tensor.detach().contiguous()))
        size += _aligned(tensor.nbytes)
    if parts:
        _send_bucket(group, parts)
    group.broadcast(torch.zeros(2, dtype=torch.int64, device=platform.current().current_device()))


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _send_bucket(group: SpanningGroup, parts: list[tuple[str, Tensor]]) -> None:
    device = parts[0][1].device
    contents, offset = [], 0
    for name, tensor in parts:
        contents.append([name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape), offset])
        offset += _aligned(tensor.nbytes)
    table = torch.tensor(list(json.dumps(contents).encode()), dtype=torch.uint8, device=device)
    payload = torch.empty(offset, dtype=torch.uint8, device=device)
    for (_, tensor), (_, _, _, start) in zip(parts, contents):
        payload[start : start + tensor.nbytes].copy_(tensor.reshape(-1).view(torch.uint8))
    group.broadcast(torch.tensor([table.numel(), payload.numel()], dtype=torch.int64, device=device))
    group.broadcast(table)
    group.broadcast(payload)


def receive(group: SpanningGroup) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of everything that rank 0 sends; a tensor is a view of its bucket.

    Raises:
        Exception: the sender is gone or late; torch's own words.
    """
    device = platform.current().current_device()
    while True:
        sizes = torch.empty(2, dtype=torch.int64, device=device)
        group.broadcast(sizes)
        table_size, payload_size = sizes.tolist()
        if not table_size:
            return
        table = torch.empty(table_size, dtype=torch.uint8, device=device)
        payload = torch.empty(payload_size, dtype=torch.uint8, device=device)
        group.broadcast(table)
        group.broadcast(payload)
        for name, kind, shape, start in json.loads(bytes(table.tolist())):
            dtype = _DTYPES[kind]
            length = dtype.itemsize
            for side in shape:
                length *= side
            yield name, payload[start : start + length].view(dtype).view(shape)
