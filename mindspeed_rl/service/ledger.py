"""Requests from their arrival to the fetching of their results: each is on the disk before its client is told anything."""

from __future__ import annotations

import asyncio
import bisect
import json
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from mindspeed_rl.service.journal import SYNC_LIMIT_S, Journal, Record, read_journal
from mindspeed_rl.service.replies import Category, RefusedError
from mindspeed_rl.service.store import Model, Request, Sampler, Session, Store, Table

_LOG = logging.getLogger(__name__)
_FILE = "journal.bin"
#: seconds that a result is kept after it was fetched, and where it never is
_KEPT_S, _UNFETCHED_S = 600.0, 4 * 3600.0
#: bytes of bodies of one tenant that wait or run, and what each request counts besides
_MAX_BODY_BYTES, _REQUEST_BYTES = 1 << 30, 4096
#: bytes of results of one tenant that wait to be fetched; the oldest go first
_MAX_RESULT_BYTES = 512 << 20
_Owned = TypeVar("_Owned", Session, Model, Sampler)
_UNKNOWN = "there is no {kind} '{id}' of this API key"


@dataclass(frozen=True)
class Limits:
    """What one API key may use.

    Attributes:
        max_sessions: open sessions of all keys together.
        max_sessions_per_key: its open sessions.
        session_timeout_s: seconds without a heartbeat after which a session ends.
        max_tokens_in_flight: tokens of its requests that wait or run.
        max_checkpoints: its checkpoints.
        max_checkpoint_bytes: their size.
    """

    max_sessions: int = 1000
    max_sessions_per_key: int = 250
    session_timeout_s: float = 600.0
    max_tokens_in_flight: int = 10**6
    max_checkpoints: int = 100
    max_checkpoint_bytes: int = 100 << 30


@dataclass(frozen=True)
class Outcome:
    """The end of an operation.

    Attributes:
        payload: result or error, as it is sent.
        succeeded: it is a result.
        is_binary: it is a binary message.
        changes: changes of the tables, which are on the disk with it or not at all.
        used: tokens by field of `Account`.
    """

    payload: bytes
    succeeded: bool = True
    is_binary: bool = False
    changes: tuple[Record, ...] = ()
    used: Mapping[str, int] = field(default_factory=dict)


def make_result(**values: object) -> Outcome:
    """Return the outcome of an operation that has a result in JSON."""
    return Outcome(json.dumps(values).encode())


def make_failure(text: str, category: Category) -> Outcome:
    """Return the outcome of an operation that failed."""
    return Outcome(json.dumps({"error": text, "category": category}).encode(), succeeded=False)


class Ledger:
    """The tables of a server, its journal, and the clients that wait for results.

    Args:
        folder: folder of the journal.
        limits: what a key may use.
        failed: called where the journal cannot be written: the server has to end.
        now_s: seconds since the epoch.
        sync_limit_s: seconds in which the disk has to take records.
    """

    def __init__(
        self,
        folder: Path,
        limits: Limits,
        failed: Callable[[OSError], None],
        now_s: Callable[[], float] = time.time,
        *,
        sync_limit_s: float = SYNC_LIMIT_S,
    ) -> None:
        self.limits, self.now_s = limits, now_s
        self.store = Store()
        for record in read_journal(folder / _FILE):
            try:
                self.store.apply(record)
            except (AttributeError, KeyError, TypeError, ValueError) as error:
                text = f"{folder / _FILE} has a record that is none of this version's: {type(error).__name__}: {error}"
                raise ValueError(f"{text}; start the version that wrote it, or name another serve_config.folder") from None
        self.journal = Journal(folder / _FILE, failed, limit_s=sync_limit_s)
        requests = self.store.requests.values()
        self._number = max((request.number for request in requests), default=0)
        #: tokens and bytes of requests that wait or run, by tenant
        self._in_flight: defaultdict[str, int] = defaultdict(int)
        self._held_bytes: defaultdict[str, int] = defaultdict(int)
        #: bytes of finished requests that have to run again after a restart, by tenant
        self.kept_bytes: defaultdict[str, int] = defaultdict(int)
        for request in requests:
            if request.finished_s is not None:
                self.kept_bytes[request.tenant] += len(request.body or b"")
            else:
                self._in_flight[request.tenant] += request.cost
                self._held_bytes[request.tenant] += _count_bytes(request)
        #: futures of requests that are not on the disk yet, and events of those that are not finished
        self._accepted: dict[str, asyncio.Future[None]] = {}
        self._finished = {request.id: asyncio.Event() for request in requests if request.finished_s is None}
        #: finished requests by target, in the order of their numbers
        self._ended: defaultdict[str, list[Request]] = defaultdict(list)
        for request in sorted(requests, key=lambda row: row.number):
            if request.finished_s is not None:
                self._ended[request.target].append(request)
        #: event of a target: another of its requests has finished
        self._news: defaultdict[str, asyncio.Event] = defaultdict(asyncio.Event)

    # ---- whose it is

    def find(self, table: Table[_Owned], kind: str, tenant: str, id: str) -> _Owned:
        """Return a row of a tenant; another tenant's does not exist for it.

        Args:
            kind: name of a row in messages.

        Raises:
            RefusedError: there is none.
        """
        row = table.get(id)
        if row is None or row.tenant != tenant:
            raise RefusedError(404, _UNKNOWN.format(kind=kind, id=id[:200]))
        return row

    def find_session(self, tenant: str, id: str) -> Session:
        """Return an open session.

        Raises:
            RefusedError: there is none, or it has ended.
        """
        session = self.find(self.store.sessions, "session", tenant, id)
        if session.ended:
            raise RefusedError(410, f"session {id} has ended: {session.ended}; create another one")
        return session

    def find_model(self, tenant: str, id: str) -> Model:
        """Return a model that was made.

        Raises:
            RefusedError: there is none.
        """
        return self.find(self.store.models, "model", tenant, id)

    # ---- requests

    async def accept(
        self,
        kind: str,
        session: Session,
        target: str,
        seq: int,
        *,
        digest: bytes,
        body: bytes,
        cost: int,
        start: Callable[[Request], object],
        is_awaited: bool = False,
        changes: tuple[Record, ...] = (),
    ) -> Request:
        """Take a request, and start it once it is on the disk; one that is sent again is not started again.

        Args:
            kind: name of the call.
            target, seq: what it is for, and its number there.
            digest: digest of what is asked for.
            body: what is asked for.
            cost: its tokens.
            start: starts it.
            is_awaited: others of the target wait for it, so that it is taken beyond the limit of tokens.
            changes: changes of the tables, which are on the disk with it or not at all.

        Raises:
            RefusedError: the number was another request, or the key has too many tokens in flight.
        """
        id = f"{target}:{seq}"
        known = self.store.requests.get(id)
        if known is not None:
            if known.digest != digest:
                raise RefusedError(400, f"seq_id {seq} of {target} was another request ({known.kind}); numbers are used once")
            if id in self._accepted:
                await asyncio.shield(self._accepted[id])
            return known
        in_flight, limit = self._in_flight[session.tenant], self.limits.max_tokens_in_flight
        if in_flight and in_flight + cost > limit and not is_awaited:
            text = f"this API key has {in_flight} tokens in flight and asks for {cost} more; its limit is {limit}"
            raise RefusedError(429, text)
        held, size = self._held_bytes[session.tenant], len(body) + _REQUEST_BYTES
        if held and held + size > _MAX_BODY_BYTES and not is_awaited:
            text = f"the waiting requests of this API key have {held} bytes and this one {size}; the limit is {_MAX_BODY_BYTES}"
            raise RefusedError(429, text)
        change = self.store.requests.put(
            id,
            tenant=session.tenant,
            session_id=session.id,
            kind=kind,
            target=target,
            seq=seq,
            digest=digest,
            body=body,
            cost=cost,
            created_s=self.now_s(),
        )
        request = self.store.requests[id]
        self._in_flight[session.tenant] += cost
        self._held_bytes[session.tenant] += _count_bytes(request)
        self._finished[id] = asyncio.Event()
        written = self._accepted[id] = self.journal.append(change, *changes)

        def begin(future: asyncio.Future[None]) -> None:
            self._accepted.pop(id, None)
            if not future.cancelled() and future.exception() is None:
                start(request)

        written.add_done_callback(begin)
        await asyncio.shield(written)
        return request

    async def finish(self, request: Request, outcome: Outcome, *, keeps_body: bool = False, device_s: float = 0.0) -> None:
        """Write the end of a request, with its changes, and tell those who wait for it.

        Args:
            keeps_body: it may have to run again after a restart.
            device_s: seconds of the devices.
        """
        if request.finished_s is not None or request.id not in self.store.requests:
            return
        self._number += 1
        values = {
            "succeeded": outcome.succeeded,
            "payload": outcome.payload,
            "is_binary": outcome.is_binary,
            "number": self._number,
            "finished_s": self.now_s(),
            **({} if keeps_body else {"body": None}),
        }
        self._in_flight[request.tenant] -= request.cost
        self._held_bytes[request.tenant] -= _count_bytes(request)
        change = self.store.requests.put(request.id, **values)
        self.kept_bytes[request.tenant] += len(request.body or b"")
        written = self.journal.append(change, *outcome.changes, self._charge(request.tenant, outcome, device_s))
        written.add_done_callback(lambda future: future.cancelled() or future.exception() or self._publish(request))
        await asyncio.shield(written)

    def _charge(self, tenant: str, outcome: Outcome, device_s: float) -> Record:
        accounts = self.store.accounts
        if tenant not in accounts:
            accounts.put(tenant)
        account = accounts[tenant]
        sums = {name: getattr(account, name) + count for name, count in outcome.used.items()}
        return accounts.put(
            tenant, **sums, device_s=account.device_s + device_s, num_requests=account.num_requests + 1
        )

    def _publish(self, request: Request) -> None:
        self._ended[request.target].append(request)
        event = self._finished.pop(request.id, None)
        if event is not None:
            event.set()
        self._news.pop(request.target, asyncio.Event()).set()

    def find_request(self, tenant: str, id: str) -> Request:
        """Return a request whose result is kept.

        Raises:
            RefusedError: there is none (404), or its result is no longer kept (410).
        """
        request = self.store.requests.get(id)
        if request is None or request.tenant != tenant:
            model = self.store.models.get(id.rpartition(":")[0])
            number = id.rpartition(":")[2]
            done_seq = model.done_seq if model is not None and model.tenant == tenant else -1
            if number.isascii() and number.isdigit() and int(number[:20]) <= done_seq:
                raise RefusedError(410, f"the result of request {id} is no longer kept")
            raise RefusedError(404, _UNKNOWN.format(kind="request", id=id))
        if request.finished_s is not None and request.payload is None:
            raise RefusedError(410, f"the result of request {id} is no longer kept")
        return request

    async def wait(self, request: Request, limit_s: float) -> bool:
        """Wait until a request has finished; return False where it takes longer."""
        event = self._finished.get(request.id)
        if event is None:
            return True
        try:
            await asyncio.wait_for(event.wait(), limit_s)
        except asyncio.TimeoutError:
            return False
        return True

    async def wait_for_news(self, target: str, limit_s: float) -> None:
        """Wait until another request of a target has finished, or for some time."""
        try:
            await asyncio.wait_for(self._news[target].wait(), limit_s)
        except asyncio.TimeoutError:
            pass

    def list_finished(self, target: str, after: int) -> list[Request]:
        """Return the finished requests of a target whose number is above `after`, in the order of their numbers."""
        rows = self._ended.get(target, [])
        return rows[bisect.bisect_right([row.number for row in rows], after) :]

    def mark_retrieved(self, request: Request) -> None:
        """Note that a client has fetched a result; it is kept for some time, in case the reply was lost."""
        if request.retrieved_s is None:
            request.retrieved_s = self.now_s()

    # ---- what is no longer needed

    def is_redone(self, request: Request) -> bool:
        """Return True for a finished request that has to run again after a restart: one that `finish` left its body."""
        model = self.store.models.get(request.target)
        return (
            model is not None
            and model.is_alive
            and request.body is not None
            and request.seq > model.snapshot_seq
        )

    def forget(self) -> None:
        """Drop results that were fetched, or that nobody fetches, and write the journal anew where it has grown."""
        now_s = self.now_s()
        changes: list[Record] = []
        dropped: set[str] = set()
        kept_bytes: defaultdict[str, int] = defaultdict(int)
        newest_first = sorted(
            (row for row in self.store.requests.values() if row.id not in self._finished),
            key=lambda row: row.number,
            reverse=True,
        )
        for request in newest_first:
            since_s, limit_s = (
                (request.finished_s, _UNFETCHED_S) if request.retrieved_s is None else (request.retrieved_s, _KEPT_S)
            )
            kept_bytes[request.tenant] += len(request.payload or b"")
            is_old = now_s - (since_s or now_s) > limit_s or kept_bytes[request.tenant] > _MAX_RESULT_BYTES
            if request.body is not None and not self.is_redone(request):
                self.kept_bytes[request.tenant] -= len(request.body)
                request.body = None  # the journal loses it when it is written anew
            if not is_old:
                continue
            if not self.is_redone(request):
                changes.append(self.store.requests.drop(request.id))
                dropped.add(request.target)
            elif request.payload is not None:
                changes.append(self.store.requests.put(request.id, payload=None))
        for target in dropped:
            self._ended[target] = [row for row in self._ended[target] if row.id in self.store.requests]
        if changes:
            self.journal.append(*changes)
        if self.journal.needs_rewrite:
            self.journal.rewrite(self.store.dump())

    def close(self) -> None:
        """Write what was promised, and end."""
        self.journal.close()


def _count_bytes(request: Request) -> int:
    """Return the bytes that a request which has not finished counts."""
    return len(request.body or b"") + _REQUEST_BYTES
