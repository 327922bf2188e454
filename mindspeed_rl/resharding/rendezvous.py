"""Messages of a disaggregated weight sync that the driver passes on: the members' rendezvous, and an engine's report.

Separate from `disaggregated`, whose plans import a compiler that the driver does not need.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import TypeVar

_M = TypeVar("_M", bound="_Message")


@dataclass(frozen=True)
class _Message:
    """A message between the driver and the members of a group."""

    def to_json(self) -> str:
        """Return the JSON text of the message."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls: type[_M], text: str) -> _M:
        """Read the text of `to_json`."""
        return cls(**json.loads(text))


@dataclass(frozen=True)
class Rendezvous(_Message):
    """The rendezvous of the members of a group.

    Attributes:
        host, port: address of the store, which rank 0 serves; see `platform/rendezvous.py`.
        name: name of this rendezvous; a group that is built again has another.
        size: number of members.
        timeout_s: limit of the wait for each other, at the rendezvous and in a sync.
    """

    host: str
    port: int
    name: str
    size: int
    timeout_s: float


@dataclass(frozen=True)
class DeliveryReport(_Message):
    """Report of an engine's worker after a weight sync.

    Attributes:
        num_parameters: number of parameters of this worker that were compared with the trained weights.
        differing: parameters of its engine, on any of its workers, without the trained weights.
        received_bytes: bytes that this worker received from trainers.
        needed_bytes: bytes that it needs where all chunks are transferred.
        drafts: draft tokens since the report before, those that were kept, and steps of responses; 0 where another worker of
            the engine reports the same.
    """

    num_parameters: int
    differing: list[str]
    received_bytes: int
    needed_bytes: int
    drafts: list[int] = field(default_factory=lambda: [0, 0, 0])
