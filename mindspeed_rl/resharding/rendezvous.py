"""Where trainers and engines on other devices meet, and what an engine says after a push: what the driver passes between them.

Apart from `spanning`, whose plans bring a compiler that the driver has no use for.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import TypeVar

_M = TypeVar("_M", bound="_Message")


@dataclass(frozen=True)
class _Message:
    """What travels between the driver and the members of a group."""

    def to_json(self) -> str:
        """As it travels."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls: type[_M], text: str) -> _M:
        """What `to_json` wrote."""
        return cls(**json.loads(text))


@dataclass(frozen=True)
class Rendezvous(_Message):
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


@dataclass(frozen=True)
class DeliveryReport(_Message):
    """What an engine's worker says after a push.

    Attributes:
        num_parameters: of this worker that were compared with what was trained.
        differing: parameters of its engine, on any of its workers, that do not hold that.
        received_bytes: what this worker got from trainers.
        needed_bytes: what it needs where nothing is left out.
    """

    num_parameters: int
    differing: list[str]
    received_bytes: int
    needed_bytes: int
