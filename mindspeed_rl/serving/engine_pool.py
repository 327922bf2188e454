"""Several rollout servers that act as one engine: requests are balanced, and outlive the server that generates them.

A server is lost when it reports an error, when it is gone, when it does not answer in time, when a reply of it is wrong (see
`replies`), when it has other weights (it was started again), or when it has requests and no token arrives. It is named, and its
requests continue on other servers, with the tokens that have arrived.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from operator import attrgetter
from typing import Any

from mindspeed_rl.resharding.rendezvous import DeliveryReport
from mindspeed_rl.rollout.protocol import Generated, GrowingResponse, PauseMode
from mindspeed_rl.rollout.requests import Sampling
from mindspeed_rl.serving.replies import (
    MAX_TOKEN_ID,
    Failure,
    NextTokens,
    ReplyError,
    ResponseLimits,
    ServerClient,
    call_server,
)

_LOG = logging.getLogger(__name__)
#: longest time that a server keeps a poll for events open
_POLL_S = 5.0
#: between two polls of a server that answers at once and has nothing to tell
_PAUSE_S = 0.02
#: characters of a reason, which may be a server's own text
_MAX_REASON = 2000


class ServerLostError(RuntimeError):
    """A server does not answer any more, or reported an error; the message has the reason."""


@dataclass(eq=False)
class _Request:
    """A response that is being generated.

    Attributes:
        moves: servers that were lost while they worked on it.
        num_kept: tokens that it had when its server got it.
        refusal: the server that called it invalid, and its error; another one decides whether it is.
    """

    key: str
    prompt_ids: tuple[int, ...]
    sampling: Sampling
    seed: int
    done: asyncio.Future[Generated]
    response: GrowingResponse
    moves: int = 0
    num_kept: int = 0
    refusal: tuple[_Member, ValueError] | None = None

    @property
    def has_moved(self) -> bool:
        """True for a request that a server had before."""
        return self.moves > 0 or self.refusal is not None

    @property
    def load(self) -> int:
        """The maximum number of remaining tokens."""
        return self.sampling.max_tokens - len(self.response.token_ids)


@dataclass(eq=False)
class _Member:
    """A server of the pool and its requests.

    Attributes:
        load: maximum number of tokens that remain in all its requests.
    """

    server: ServerClient
    requests: dict[str, _Request] = field(default_factory=dict)
    load: int = 0
    outbox: list[_Request] = field(default_factory=list)
    last_event_s: float = 0.0
    busy_since: float | None = None
    tasks: list[asyncio.Task[None]] = field(default_factory=list)

    def take(self, request: _Request) -> None:
        """Begin to work on a request."""
        self.requests[request.key] = request
        self.load += request.load

    def drop(self, key: str) -> bool:
        """Stop the work on a request; return False for one that it does not have."""
        request = self.requests.pop(key, None)
        if request is not None:
            self.load -= request.load
        return request is not None


class ServerPool:
    """A `RolloutEngine` of several servers. All methods belong to one event loop.

    Attributes:
        version: version of the weights of the last sync; -1 before the first.
        lost: (name, reason) of every server that was lost.
        waiting: requests without a server.
    """

    def __init__(
        self,
        *,
        timeout_s: float,
        drain_s: float = 1800.0,
        max_moves: int = 8,
        vocab_size: int = MAX_TOKEN_ID + 1,
        on_lost: Callable[[str, str], None] = lambda name, reason: None,
    ) -> None:
        """Make an empty pool.

        Args:
            timeout_s: longest silence of a server: without an answer, or without a token while it has requests.
            drain_s: longest wait of a pause for the end of requests.
            max_moves: servers that may be lost during one request before it is given up: it may be the cause.
            vocab_size: tokens of the model.
            on_lost: called with (name, reason) of every server that is lost.
        """
        self._timeout_s, self._drain_s, self._max_moves, self._on_lost = timeout_s, drain_s, max_moves, on_lost
        self._members: dict[str, _Member] = {}
        self.waiting: list[_Request] = []
        self._vocab_size = vocab_size
        self._paused = self._draining = False
        self._keys = itertools.count()
        self.version = -1
        self.lost: list[tuple[str, str]] = []
        self._busy: list[tuple[str, float, float]] = []

    # ------------------------------------------------------------------ servers

    @property
    def names(self) -> list[str]:
        """The names of the live servers."""
        return list(self._members)

    @property
    def servers(self) -> list[ServerClient]:
        """The clients of the live servers."""
        return [member.server for member in self._members.values()]

    def drain_busy(self) -> list[tuple[str, float, float]]:
        """Return (server, start, end) in seconds since the epoch, of the times with requests since the last call."""
        now_s = time.time()
        for member in self._members.values():
            if member.busy_since is not None:
                self._busy.append((member.server.name, member.busy_since, now_s))
                member.busy_since = now_s
        busy, self._busy = self._busy, []
        return busy

    async def add(self, server: ServerClient) -> None:
        """Give requests to the server, after it has dropped the requests of earlier clients.

        Raises:
            ServerLostError: it does not answer.
        """
        try:
            await self._call(server, "drop", "answer", {})
        except ServerLostError as error:
            raise ServerLostError(f"{server.name} {error}") from error
        member = _Member(server, last_event_s=time.monotonic())
        self._members[server.name] = member
        self._start(member, self._poll_events(member))
        self._assign_waiting()

    def _start(self, member: _Member, work: Coroutine[object, object, None]) -> None:
        """Start work for a server. A failure that the work itself does not handle takes the server out, by its name."""
        # or the finished tasks of a run would pile up
        member.tasks = [task for task in member.tasks if not task.done()]
        task = asyncio.create_task(work)
        member.tasks.append(task)
        task.add_done_callback(lambda ended: self._check_task(member, ended))

    def _check_task(self, member: _Member, task: asyncio.Task[None]) -> None:
        if task.cancelled() or (error := task.exception()) is None:
            return
        _LOG.error("the work for %s failed", member.server.name, exc_info=error)
        if self._members.get(member.server.name) is member:
            self.remove(member.server.name, f"the work for it failed: {type(error).__name__}: {error}")

    def remove(self, name: str, reason: str) -> None:
        """Remove a lost server; its requests continue on others."""
        member = self._members.pop(name, None)  # several tasks may notice one loss
        if member is None:
            return
        reason = reason[:_MAX_REASON]
        self.lost.append((name, reason))
        for request in self._end_member(member):
            request.moves += 1
            if request.moves > self._max_moves:
                _fail(request, ServerLostError(f"{request.moves} servers were lost while they worked on one request: {reason}"))
            else:
                self.waiting.append(request)
        self._assign_waiting()
        # last, because it may raise
        self._on_lost(name, reason)

    def _end_member(self, member: _Member) -> list[_Request]:
        """Stop the tasks of a server that is no member any more; return the requests that it had."""
        # None in a callback
        current = asyncio.current_task()
        for task in member.tasks:
            # the task that noticed a loss may be one of these, and has to reach its end
            if task is not current:
                task.cancel()
        requests = list(member.requests.values())
        member.requests, member.load = {}, 0
        self._note_idle(member)
        return requests

    async def withdraw(self, names: Sequence[str]) -> list[ServerClient]:
        """Take out servers, and return the clients of those that were not lost before.

        Their requests continue on others, from the tokens that they have; the servers abort them. Unlike a loss this may happen
        to a request any number of times.
        """
        members = [self._members.pop(name) for name in names if name in self._members]
        # all at once: a request that moved to the next server to go would be computed again twice
        for member in members:
            self.waiting += self._end_member(member)
        self._assign_waiting()
        calls = [self._call(member.server, "drop", "abort its requests", {}) for member in members]
        for error in await asyncio.gather(*calls, return_exceptions=True):
            # the next user of a server that does not answer finds out
            if isinstance(error, BaseException) and not isinstance(error, ServerLostError):
                raise error
        return [member.server for member in members]

    def rebalance(self) -> int:
        """Move requests to servers with fewer remaining tokens, after others joined; return how many moved.

        Those with the fewest tokens move first: a server computes again what a request has. Each moves once at most.
        """
        moved: dict[str, list[str]] = {}
        new_keys = set[str]()
        while len(self._members) > 1:
            members = sorted(self._members.values(), key=attrgetter("load"))
            target, source = members[0], members[-1]
            request = min(
                (
                    request
                    for request in source.requests.values()
                    # or the target would have as many as the source has now
                    if target.load + request.load < source.load and request.key not in new_keys and request.refusal is None
                ),
                key=lambda request: len(request.response.token_ids),
                default=None,
            )
            if request is None:
                break
            source.drop(request.key)
            self._note_idle(source)
            if request in source.outbox:  # it was not sent yet
                source.outbox.remove(request)
            else:
                moved.setdefault(source.server.name, []).append(request.key)
            # events of the source may still be on their way, and must not count for the new server
            request.key = str(next(self._keys))
            new_keys.add(request.key)
            self._give(target, request)
        for name, keys in moved.items():
            source = self._members[name]
            self._start(source, self._call_or_remove(source, "drop", "abort requests", {"keys": keys}))
        return len(new_keys)

    async def leave(self, name: str) -> None:
        """Remove a server that leaves; its requests continue on others, and it aborts them."""
        member = self._members.get(name)
        self.remove(name, "it has left the run")
        if member is not None:
            with contextlib.suppress(ServerLostError):
                await self._call(member.server, "drop", "abort its requests", {})

    async def call(self, name: str, call: str, **arguments: object) -> Any:
        """Return the result of a call of one server; remove a server that fails or does not answer.

        Raises:
            ServerLostError: that happened.
        """
        member = self._members.get(name)
        if member is None:
            raise ServerLostError(f"{name} was lost before the call {call}")
        try:
            return await self._call(member.server, call, call, arguments)
        except ServerLostError as error:
            self.remove(name, str(error))
            raise ServerLostError(f"{name}: {error}") from error

    async def call_each(
        self,
        call: str,
        arguments: Mapping[str, Mapping[str, object]],
        on_failure: Callable[[str, ServerLostError], Awaitable[None]],
    ) -> dict[str, ServerLostError | None]:
        """Call these servers at once; return the failure of each, or None, without removing it.

        Args:
            call: name of the call.
            arguments: arguments of the call, by the name of the server.
            on_failure: called with each failure at once, while other calls may still wait for this server.
        """

        async def call_server(name: str) -> None:
            try:
                if (member := self._members.get(name)) is None:
                    raise ServerLostError(f"was lost before the call {call}")
                await self._call(member.server, call, call, arguments[name])
            except ServerLostError as error:
                await on_failure(name, error)
                raise

        results = await asyncio.gather(*map(call_server, arguments), return_exceptions=True)
        failures: dict[str, ServerLostError | None] = {}
        for name, result in zip(arguments, results):
            if isinstance(result, BaseException) and not isinstance(result, ServerLostError):
                raise result
            failures[name] = result
        return failures

    async def _call(
        self, server: ServerClient, call: str, purpose: str, arguments: Mapping[str, object], extra_s: float = 0.0
    ) -> Any:
        """Return the result of a call.

        Raises:
            ServerLostError: the call failed or took too long; the message has the purpose and the reason.
        """
        limit_s = self._timeout_s + extra_s
        try:
            return await asyncio.wait_for(call_server(server, call, arguments), limit_s)
        except asyncio.TimeoutError as error:
            raise ServerLostError(f"did not {purpose} within {limit_s:.0f} s") from error
        except ReplyError as error:
            raise ServerLostError(f"failed to {purpose}: {error}") from error
        except Exception as error:  # Ray, HTTP and the server's own errors have no common class
            lines = str(error).strip().splitlines()
            reason = f"{type(error).__name__}: {lines[-1]}" if lines else type(error).__name__
            raise ServerLostError(f"failed to {purpose}: {reason}") from error

    async def close(self) -> None:
        """Stop all tasks and fail all requests."""
        requests = list(self.waiting)
        for member in self._members.values():
            requests += member.requests.values()
            for task in member.tasks:
                task.cancel()
        for request in requests:
            _fail(request, ServerLostError("the pool was closed"))
        self._members, self.waiting = {}, []

    # ------------------------------------------------------------------ requests

    async def generate(
        self, prompt_ids: tuple[int, ...], sampling: Sampling, seed: int, partial: Generated | None = None
    ) -> Generated:
        """Return a response, see `RolloutEngine.generate`; wait while no server is left.

        Raises:
            ValueError: a server reports that the request is invalid.
            ServerLostError: too many servers were lost during the request.
        """
        done = asyncio.get_running_loop().create_future()
        response = GrowingResponse(partial or Generated())
        request = _Request(str(next(self._keys)), tuple(prompt_ids), sampling, seed, done, response)
        self.waiting.append(request)
        if not self._draining:  # a new one waits for the pause
            self._assign_waiting()
        try:
            return await done
        except asyncio.CancelledError:
            self._abort(request)
            raise

    def _assign_waiting(self) -> None:
        """Give waiting requests to the server with the fewest remaining tokens."""
        if self._paused or not self._members:
            return
        # before a pause only requests of lost servers continue
        waiting = [request for request in self.waiting if request.has_moved or not self._draining]
        self.waiting = [request for request in self.waiting if not request.has_moved and self._draining]
        for request in waiting:
            refuser, error = request.refusal or (None, None)
            others = [member for member in self._members.values() if member is not refuser]
            if error is not None and not others:  # the others were lost
                _fail(request, error)
                continue
            self._give(min(others, key=attrgetter("load")), request)

    def _give(self, member: _Member, request: _Request) -> None:
        """Give a request to this server."""
        # its silence counts from here: a server without requests has no events
        if not member.requests:
            member.last_event_s = time.monotonic()
            member.busy_since = time.time()
        member.take(request)
        request.num_kept = len(request.response.token_ids)
        if not member.outbox:
            # requests of the same turn of the loop are sent together
            self._start(member, self._send(member))
        member.outbox.append(request)

    async def _send(self, member: _Member) -> None:
        await asyncio.sleep(0)
        batch, member.outbox = member.outbox, []
        messages: list[dict[str, object]] = []
        for request in batch:
            response = request.response
            partial = {"token_ids": response.token_ids, "log_probs": response.log_probs, "versions": response.versions}
            messages.append(
                {
                    "key": request.key,
                    "prompt_ids": list(request.prompt_ids),
                    "sampling": asdict(request.sampling) | {"stop_token_ids": list(request.sampling.stop_token_ids)},
                    "seed": request.seed,
                    "begun": {name: list(values) for name, values in partial.items()} if response.token_ids else None,
                }
            )
        if messages:
            await self._call_or_remove(member, "submit", "take requests", {"requests": messages})

    async def _call_or_remove(self, member: _Member, call: str, purpose: str, arguments: Mapping[str, object]) -> None:
        try:
            await self._call(member.server, call, purpose, arguments)
        except ServerLostError as error:
            self.remove(member.server.name, str(error))

    def _abort(self, request: _Request) -> None:
        """Abort a cancelled request at its server, without waiting."""
        if request in self.waiting:
            self.waiting.remove(request)
        for member in self._members.values():
            if not member.drop(request.key):
                continue
            self._note_idle(member)
            if request in member.outbox:  # it was not sent yet
                member.outbox.remove(request)
            else:
                self._start(member, self._call_or_remove(member, "drop", "abort a request", {"keys": [request.key]}))

    # ------------------------------------------------------------------ events

    async def _poll_events(self, member: _Member) -> None:
        try:
            await self._follow(member)
        except ServerLostError as error:
            self.remove(member.server.name, str(error))
        except ReplyError as error:
            self.remove(member.server.name, f"sent a wrong reply: {error}")

    async def _follow(self, member: _Member) -> None:
        """Read the server's events.

        Raises:
            ServerLostError: the server is lost.
            ReplyError: a reply does not fit its request.
        """
        last, server, was_other = 0, member.server, False
        # several polls in the longest silence, so that it is noticed soon after it is reached
        wait_s = min(_POLL_S, self._timeout_s / 4)
        while True:
            news = await self._call(server, "news", "report its events", {"after": last, "wait_s": wait_s}, wait_s)
            # `wait_for` of Python 3.11 and earlier ignores a cancellation at the moment of its result; a second poll of a
            # server that has another pool by then would take events away from that pool's
            if self._members.get(server.name) is not member:
                return
            # an answer from before a weight sync may arrive after it; what it brings is sent again with the next one
            is_other = not self._paused and self.version >= 0 and news.version != self.version
            if is_other and was_other:
                raise ServerLostError(f"it has weights of version {news.version}, the run of version {self.version}")
            was_other = is_other
            has_progress = False
            # before the first sync the weights are the server's own
            limits = ResponseLimits(self._vocab_size, max(news.version if self.version < 0 else self.version, 0))
            for event in () if is_other else news.events:
                if event.number > last:
                    last = event.number
                    has_progress |= self._take(member, event, limits)
            now_s = time.monotonic()
            # a pause, or no requests, is not silence
            if has_progress or self._paused or not member.requests:
                member.last_event_s = now_s
            elif (silence_s := now_s - member.last_event_s) > self._timeout_s:
                raise ServerLostError(f"no token for {silence_s:.0f} s while it worked on {len(member.requests)} requests")
            if not has_progress:
                await asyncio.sleep(_PAUSE_S)

    def _take(self, member: _Member, event: NextTokens | Failure, limits: ResponseLimits) -> bool:
        """Add the tokens of an event to its request, or end it; return False for an event that brings nothing.

        Raises:
            ServerLostError: the server reports that it has failed.
            ReplyError: the event does not fit its request.
        """
        request = member.requests.get(event.key)
        # aborted while its tokens were on their way
        if request is None:
            return False
        if isinstance(event, Failure):
            if not event.of_request:
                raise ServerLostError(event.error)
            self._refuse(member, request, ValueError(event.error[:_MAX_REASON]))
            return True
        chunk = event.chunk
        limits.extend(request.response, chunk, request.sampling.max_tokens)
        member.load -= len(chunk.token_ids)
        has_tokens = len(request.response.token_ids) > request.num_kept
        if chunk.finish == "aborted" and not has_tokens and not self._paused:
            raise ReplyError("it aborted a request that it had not begun, and nothing had asked it to")
        if chunk.finish is not None:
            self._end(member, request)
            if not request.done.done():
                request.done.set_result(request.response.freeze())
        refuser, error = request.refusal or (None, None)
        if has_tokens and refuser is not None and self._members.get(refuser.server.name) is refuser:
            self.remove(refuser.server.name, f"it refused a request that {member.server.name} takes: {error}")
        return bool(chunk.token_ids) or chunk.finish is not None

    def _refuse(self, member: _Member, request: _Request, error: ValueError) -> None:
        """Give a request that the server calls invalid to another one, which refuses it too or shows that this one is wrong."""
        self._end(member, request)
        if request.refusal is None and len(self._members) > 1:
            request.refusal = member, error
            self.waiting.append(request)
            self._assign_waiting()
        else:
            _fail(request, error)

    def _end(self, member: _Member, request: _Request) -> None:
        member.drop(request.key)
        self._note_idle(member)

    def _note_idle(self, member: _Member) -> None:
        """Record the end of a server's busy time when it has no requests left."""
        if not member.requests and member.busy_since is not None:
            self._busy.append((member.server.name, member.busy_since, time.time()))
            member.busy_since = None

    # ------------------------------------------------------------------ weights

    async def pause(self, mode: PauseMode) -> None:
        """Pause all servers, see `RolloutEngine.pause`; remove those that fail.

        For mode "wait" and "abort" running requests end here, so that no token arrives after the pause. For mode "wait" the
        requests of a lost server continue on others first.

        Raises:
            TimeoutError: requests did not end; names their number and servers.
        """
        if mode == "wait":
            await self._drain()
        self._paused = True
        if mode == "abort":
            self._end_waiting()
        # listed first: requests that the servers end are no longer among the members'
        running = [request.done for member in self._members.values() for request in member.requests.values()]
        await self._call_all("pause", mode=mode)
        # the last chunks arrive as events, perhaps after the servers' answers
        if mode == "abort" and running:
            await asyncio.wait(running, timeout=self._timeout_s)
            for member in [member for member in self._members.values() if member.requests]:
                count = len(member.requests)
                self.remove(member.server.name, f"did not abort {count} requests within {self._timeout_s:.0f} s of a pause")
            self._end_waiting()

    def _end_waiting(self) -> None:
        """End the requests without a server with the tokens that they have."""
        for request in self.waiting:
            if not request.done.done():
                request.done.set_result(request.response.freeze())
        self.waiting = []

    async def _drain(self) -> None:
        """Wait until no request is running."""
        running = [request.done for member in self._members.values() for request in member.requests.values()]
        running += [request.done for request in self.waiting if request.has_moved]
        if not running:
            return
        self._draining = True
        try:
            _, left = await asyncio.wait(running, timeout=self._drain_s)
        finally:
            self._draining = False
        if left:
            busy = ", ".join(f"{len(m.requests)} on {name}" for name, m in self._members.items() if m.requests)
            raise TimeoutError(
                f"{len(left)} requests did not end within {self._drain_s:.0f} s before a pause "
                f"(rl_config.deadlines.generate): {busy or 'no server works on them'}"
            )

    async def resume(self) -> None:
        """Resume all servers; see `RolloutEngine.resume`."""
        for member in self._members.values():
            member.last_event_s = time.monotonic()  # the pause was no silence
        await self._call_all("resume")
        self._paused = False
        self._assign_waiting()

    async def _call_all(self, call: str, **arguments: object) -> None:
        await asyncio.gather(*(self.call(name, call, **arguments) for name in self.names), return_exceptions=True)

    async def receive(self, version: int, name: str) -> list[DeliveryReport]:
        """Receive weights on this server, which is not removed where it fails; the caller sets a deadline.

        Raises:
            Exception: it failed, or is gone.
        """
        return await call_server(self._members[name].server, "receive", {"version": version})


def _fail(request: _Request, error: Exception) -> None:
    if not request.done.done():
        request.done.set_exception(error)
