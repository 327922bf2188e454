"""What a server knows, as tables of records, and each change as a record of the journal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, TypeAlias, TypeVar

from mindspeed_rl.service.journal import Record

Values: TypeAlias = Mapping[str, Any]
CheckpointKind = Literal["training", "sampler", "external", "ephemeral"]
#: part of a path -> kind of the checkpoint
SEGMENTS: Mapping[str, CheckpointKind] = {
    "weights": "training",
    "sampler_weights": "sampler",
    "external_weights": "external",
}
_SEGMENTS_OF_KINDS = {kind: segment for segment, kind in SEGMENTS.items()}


@dataclass
class Session:
    """A client of a tenant.

    Attributes:
        id: random, and no secret: only its tenant can use it.
        tenant: owner of the API key.
        user_metadata, display_name, tags, project_id: the client's.
        created_s: time of its creation.
        ended, ended_s: why it has ended, "" while it goes; and when.
    """

    id: str
    tenant: str
    user_metadata: dict[str, Any] | None = None
    display_name: str | None = None
    tags: list[str] = field(default_factory=list)
    project_id: str | None = None
    created_s: float = 0.0
    ended: str = ""
    ended_s: float | None = None


@dataclass
class Model:
    """A training run.

    Attributes:
        id: SESSION:train:NUMBER.
        tenant, session_id: owner.
        spec: fields of its `AdapterSpec`; None for full weights.
        user_metadata: the client's.
        created_s, used_s: times of its creation and of its last request.
        done_seq: requests up to this one are finished; -1 before it is made.
        num_steps: steps of the optimizer.
        is_alive: it was made, and is in the backend, or will be again when it is needed.
        is_failed: it was not made.
        snapshot: folder of its state after request `snapshot_seq`, which has no gradient that waits; "" for none.
        inflight: path of the weights of its sampling clients of this kind; "" for none.
    """

    id: str
    tenant: str
    session_id: str
    spec: dict[str, Any] | None = None
    user_metadata: dict[str, Any] | None = None
    created_s: float = 0.0
    used_s: float = 0.0
    done_seq: int = -1
    num_steps: int = 0
    is_alive: bool = False
    is_failed: bool = False
    snapshot: str = ""
    snapshot_seq: int = 0
    inflight: str = ""


@dataclass
class Sampler:
    """A sampling session.

    Attributes:
        id: SESSION:sample:NUMBER.
        tenant, session_id: owner.
        path: path of its weights; None for the base's.
        inflight_model: the weights are those that this model has published last; "" for fixed ones.
        num_clients: clients that have joined, besides the first.
    """

    id: str
    tenant: str
    session_id: str
    path: str | None = None
    inflight_model: str = ""
    num_clients: int = 0


@dataclass
class Checkpoint:
    """Weights on the disk.

    Attributes:
        id: tinker://MODEL/SEGMENT/NAME.
        tenant, model_id: owner.
        kind: what it is for; ephemeral ones belong to a sampling session, and nobody sees them.
        name: its name.
        folder: folder of the server's.
        created_s, expires_s: times; None for never.
        num_bytes: its size.
        spec: fields of its `AdapterSpec`; None for full weights.
        user_metadata: the client's.
    """

    id: str
    tenant: str
    model_id: str
    kind: CheckpointKind
    name: str
    folder: str
    created_s: float = 0.0
    expires_s: float | None = None
    num_bytes: int = 0
    spec: dict[str, Any] | None = None
    user_metadata: dict[str, Any] | None = None

    @property
    def checkpoint_id(self) -> str:
        """The end of its path, as the API has it."""
        return self.id.removeprefix(f"tinker://{self.model_id}/")


def make_path(model_id: str, kind: CheckpointKind, name: str) -> str:
    """Return the path of a checkpoint."""
    return f"tinker://{model_id}/{_SEGMENTS_OF_KINDS.get(kind, kind)}/{name}"


@dataclass
class Request:
    """An operation that takes time, whose result a client fetches.

    Attributes:
        id: TARGET:NUMBER; a request that is sent twice has the same.
        tenant, session_id: owner.
        kind: name of the call.
        target: model, or sampling session.
        seq: its number at the target.
        digest: digest of what was asked for.
        body: what was asked for, until it is needed neither to run nor to run again after a restart.
        cost: tokens.
        created_s: time of its arrival.
        number: finished requests are numbered; 0 before.
        succeeded: it has a result, and no error.
        payload: result or error, as it is sent; None before, and when it is no longer kept.
        is_binary: the payload is a binary message.
        finished_s, retrieved_s: times; None before.
        num_hangs: ends of the server because a call for it did not end in time.
    """

    id: str
    tenant: str
    session_id: str
    kind: str
    target: str
    seq: int
    digest: bytes
    body: bytes | None = None
    cost: int = 0
    created_s: float = 0.0
    number: int = 0
    succeeded: bool = False
    payload: bytes | None = None
    is_binary: bool = False
    finished_s: float | None = None
    retrieved_s: float | None = None
    num_hangs: int = 0


@dataclass
class Account:
    """What a tenant has used.

    Attributes:
        id: tenant.
        train_tokens, prompt_tokens, sample_tokens: tokens of passes, of prompts and of samples.
        device_s: seconds of the devices; requests that run at the same time share them.
        num_requests: finished requests.
    """

    id: str
    train_tokens: int = 0
    prompt_tokens: int = 0
    sample_tokens: int = 0
    device_s: float = 0.0
    num_requests: int = 0


_Row = TypeVar("_Row", Session, Model, Sampler, Checkpoint, Request, Account)


class Table(dict[str, _Row]):
    """Records by id; they are changed by `put` and `drop`, which return the change for the journal."""

    def __init__(self, name: str, kind: type[_Row]) -> None:
        super().__init__()
        self.name, self._kind = name, kind
        self._names = {item.name for item in fields(kind)}

    def put(self, id: str, **values: object) -> Record:
        """Add a record, or change these values of one."""
        self.apply(id, values)
        return {"table": self.name, "id": id, "values": values}

    def drop(self, id: str) -> Record:
        """Remove a record."""
        self.apply(id, None)
        return {"table": self.name, "id": id, "values": None}

    def apply(self, id: str, values: Values | None) -> None:
        """Apply a change of the journal.

        Raises:
            ValueError: it has a value that this version does not know.
        """
        if values is None:
            self.pop(id, None)
            return
        if unknown := set(values) - self._names:
            raise ValueError(f"the journal has {', '.join(sorted(unknown))} of {self.name}, which this version does not know")
        row = self.get(id)
        if row is None:
            self[id] = self._kind(id=id, **values)
            return
        for name, value in values.items():
            setattr(row, name, value)

    def dump(self) -> Iterator[Record]:
        """Yield records that make this table."""
        for id, row in self.items():
            values = {name: value for name, value in vars(row).items() if name != "id"}
            yield {"table": self.name, "id": id, "values": values}


class Store:
    """All tables."""

    def __init__(self) -> None:
        self.sessions = Table("sessions", Session)
        self.models = Table("models", Model)
        self.samplers = Table("samplers", Sampler)
        self.checkpoints = Table("checkpoints", Checkpoint)
        self.requests = Table("requests", Request)
        self.accounts = Table("accounts", Account)
        self._tables: dict[str, Table[Any]] = {
            table.name: table
            for table in (self.sessions, self.models, self.samplers, self.checkpoints, self.requests, self.accounts)
        }

    def apply(self, record: Record) -> None:
        """Apply a record of the journal.

        Raises:
            ValueError: it is of another version.
        """
        for change in record["records"] if record.get("type") == "all" else (record,):
            if change["table"] not in self._tables:
                raise ValueError(f"the journal has the table {change['table']}, which this version does not know")
            self._tables[change["table"]].apply(change["id"], change["values"])

    def dump(self) -> Iterator[Record]:
        """Yield records that make this store."""
        for table in self._tables.values():
            yield from table.dump()
