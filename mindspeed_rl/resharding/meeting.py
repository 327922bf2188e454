"""Where trainers and engines on other devices meet, and what an engine says after a push: what the driver passes between them.

Apart from `spanning`, whose plans bring a compiler that the driver has no use for.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass


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


@dataclass(frozen=True)
class Delivery:
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

    def to_json(self) -> str:
        """As it travels to the driver."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Delivery:
        """What `to_json` wrote."""
        return cls(**json.loads(text))
