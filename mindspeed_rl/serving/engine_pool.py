"""Several rollout servers that answer as one engine: requests are balanced, and outlive the server that works on them.

A server is lost when it says so, when it is gone, when it does not answer in time, or when it works on requests and no token
comes. It is named, and what it was working on goes on elsewhere, with the tokens that had come.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from mindspeed_rl.rollout.protocol import EMPTY_RESPONSE, Generated, PauseMode
from mindspeed_rl.rollout.requests import Sampling

if TYPE_CHECKING:
    from torch import Tensor

#: longest time a server keeps a question for news when there are none
_NEWS_WAIT_S = 5.0


class ServerLostError(RuntimeError):
    """A server answers no more, or with an error of its own; names it and says why."""


class Server(Protocol):
    """The way to one rollout server.

    Attributes:
        name: as messages call it.
    """

    name: str

    async def call(self, name: str, **arguments: Any) -> Any:
        """What `RolloutService` answers to the call.

        Raises:
            Exception: the server cannot be reached, or the call failed there.
        """
        ...


@dataclass(eq=False)
class _Request:
    """One response on its way."""

    key: str
    prompt_ids: tuple[int, ...]
    sampling: Sampling
    seed: int
    done: asyncio.Future[Generated]
    whole: Generated
    moves: int = 0

    @property
    def load(self) -> int:
        """Tokens that may still come."""
        return self.sampling.max_tokens - len(self.whole.token_ids)

    def message(self) -> dict[str, Any]:
        """As `RolloutService.submit` takes it."""
        kept = self.whole
        partial = {"token_ids": kept.token_ids, "log_probs": kept.log_probs, "versions": kept.versions}
        words = asdict(self.sampling) | {"stop_token_ids": list(self.sampling.stop_token_ids)}
        return {
            "key": self.key,
            "prompt_ids": list(self.prompt_ids),
            "sampling": words,
            "seed": self.seed,
            "begun": {name: list(values) for name, values in partial.items()} if kept.token_ids else None,
        }


@dataclass(eq=False)
class _Member:
    """A server of the pool and what it works on."""

    server: Server
    requests: dict[str, _Request] = field(default_factory=dict)
    outbox: list[_Request] = field(default_factory=list)
    heard_s: float = 0.0
    busy_since: float | None = None
    tasks: list[asyncio.Task[Any]] = field(default_factory=list)

    @property
    def load(self) -> int:
        return sum(request.load for request in self.requests.values())


class ServerPool:
    """A `RolloutEngine` of several servers. All methods belong to one event loop.

    Attributes:
        version: of the weights that were pushed last; -1 before the first.
        lost: (name, reason) of every server that was lost.
    """

    def __init__(
        self,
        *,
        timeout_s: float,
        drain_s: float = 1800.0,
        most_moves: int = 8,
        on_lost: Callable[[str, str], None] = lambda name, reason: None,
    ) -> None:
        """
        Args:
            timeout_s: longest silence of a server: without an answer, or without a token while it works on requests.
            drain_s: longest wait of a pause for requests that are to end by themselves.
            most_moves: servers that one request may be lost with before it is given up: it may be what kills them.
            on_lost: told of every server that is lost.
        """
        self._timeout_s, self._drain_s, self._most_moves, self._on_lost = timeout_s, drain_s, most_moves, on_lost
        self._members: dict[str, _Member] = {}
        self._waiting: list[_Request] = []
        self._paused = self._draining = False
        self._numbers = itertools.count()
        self.version = -1
        self.lost: list[tuple[str, str]] = []
        self._busy: list[tuple[str, float, float]] = []

    # ------------------------------------------------------------------ servers

    @property
    def names(self) -> list[str]:
        """Of the servers that live."""
        return list(self._members)

    def drain_busy(self) -> list[tuple[str, float, float]]:
        """(server, from, to) in seconds since the epoch, of the times since the last call in which servers had requests."""
        now_s = time.time()
        for member in self._members.values():
            if member.busy_since is not None:  # goes on
                self._busy.append((member.server.name, member.busy_since, now_s))
                member.busy_since = now_s
        busy, self._busy = self._busy, []
        return busy

    def servers(self) -> list[Server]:
        """Those that live."""
        return [member.server for member in self._members.values()]

    async def add(self, server: Server) -> None:
        """The server takes requests. Whatever it was doing for an earlier client is given up.

        Raises:
            ServerLostError: it does not answer.
        """
        try:
            await asyncio.wait_for(server.call("drop"), self._timeout_s)
        except Exception as error:
            raise ServerLostError(f"{server.name} does not answer: {_said(error)}") from error
        member = _Member(server, heard_s=time.monotonic())
        self._members[server.name] = member
        member.tasks.append(asyncio.create_task(self._listen(member)))
        self._place_waiting()

    def lose(self, name: str, reason: str) -> None:
        """The server is no longer asked; what it was working on goes on elsewhere."""
        member = self._members.pop(name, None)  # several tasks may notice one loss
        if member is None:
            return
        self.lost.append((name, reason))
        self._idle(member)
        current = asyncio.current_task()
        for task in member.tasks:
            # whoever noticed is one of these tasks, and has to get to its end
            if task is not current:
                task.cancel()
        self._on_lost(name, reason)
        for request in member.requests.values():
            request.moves += 1
            if request.moves > self._most_moves:
                self._fail(request, ServerLostError(f"{request.moves} servers were lost while they worked on one request: {reason}"))
            else:
                self._waiting.append(request)
        self._place_waiting()

    async def ask(self, name: str, call: str, **arguments: Any) -> Any:
        """What one server answers to a call; one that does not answer, or fails, is lost.

        Raises:
            ServerLostError: that happened.
        """
        member = self._members.get(name)
        if member is None:
            raise ServerLostError(f"{name} was lost before it was asked to {call}")
        try:
            return await asyncio.wait_for(member.server.call(call, **arguments), self._timeout_s)
        except Exception as error:
            reason = _reason(call, error, self._timeout_s)
            self.lose(name, reason)
            raise ServerLostError(f"{name}: {reason}") from error

    async def close(self) -> None:
        """Nobody listens any more; requests on their way fail."""
        for member in self._members.values():
            for task in member.tasks:
                task.cancel()
        for request in [*self._waiting, *(r for member in self._members.values() for r in member.requests.values())]:
            self._fail(request, ServerLostError("the pool was closed"))
        self._members, self._waiting = {}, []

    # ------------------------------------------------------------------ requests

    async def generate(
        self, prompt_ids: tuple[int, ...], sampling: Sampling, seed: int, partial: Generated | None = None
    ) -> Generated:
        """See `RolloutEngine.generate`. Waits while no server lives.

        Raises:
            ValueError: a server says that the request cannot be answered.
            ServerLostError: it went from server to server too often.
        """
        done = asyncio.get_running_loop().create_future()
        key = str(next(self._numbers))
        request = _Request(key, tuple(prompt_ids), sampling, seed, done, partial or EMPTY_RESPONSE)
        self._waiting.append(request)
        self._place_waiting()
        try:
            return await done
        except asyncio.CancelledError:
            self._give_up(request)
            raise

    @property
    def num_waiting(self) -> int:
        """Requests that no server works on."""
        return len(self._waiting)

    def _place_waiting(self) -> None:
        """Requests without a server get the one with the fewest tokens to come."""
        if self._paused or not self._members:
            return
        # before a pause only those go on that a server was lost with
        waiting = [request for request in self._waiting if request.moves or not self._draining]
        self._waiting = [request for request in self._waiting if not request.moves and self._draining]
        # summed once: a server's load is a sum over all its requests
        loads = {name: member.load for name, member in self._members.items()}
        for request in waiting:
            name = min(loads, key=lambda key: loads[key])
            member = self._members[name]
            loads[name] += request.load
            # its silence counts from here: a server without requests has nothing to tell
            if not member.requests:
                member.heard_s = time.monotonic()
                member.busy_since = time.time()
            member.requests[request.key] = request
            if not member.outbox:
                # those that come in the same turn of the loop travel together
                member.tasks.append(asyncio.create_task(self._send(member)))
            member.outbox.append(request)

    async def _send(self, member: _Member) -> None:
        await asyncio.sleep(0)
        batch, member.outbox = member.outbox, []
        # or the sends of the whole run would pile up
        member.tasks = [task for task in member.tasks if not task.done()]
        if not batch:
            return
        try:
            messages = [request.message() for request in batch]
            await asyncio.wait_for(member.server.call("submit", requests=messages), self._timeout_s)
        except Exception as error:
            self.lose(member.server.name, _reason("take requests", error, self._timeout_s))

    def _give_up(self, request: _Request) -> None:
        """The server that works on it is told; who gives up does not wait for that."""
        if request in self._waiting:
            self._waiting.remove(request)
        for member in self._members.values():
            if member.requests.pop(request.key, None) is None:
                continue
            self._note_idle(member)
            if request in member.outbox:  # the server has never heard of it
                member.outbox.remove(request)
            else:
                member.tasks.append(asyncio.create_task(self._drop(member, request.key)))

    async def _drop(self, member: _Member, key: str) -> None:
        try:
            await asyncio.wait_for(member.server.call("drop", keys=[key]), self._timeout_s)
        except Exception as error:
            self.lose(member.server.name, _reason("drop a request", error, self._timeout_s))

    # ------------------------------------------------------------------ news

    async def _listen(self, member: _Member) -> None:
        heard, server = 0, member.server
        # several questions in the longest silence, so that it is noticed soon after it is reached
        wait_s = min(_NEWS_WAIT_S, self._timeout_s / 4)
        while True:
            try:
                news = await asyncio.wait_for(server.call("news", after=heard, wait_s=wait_s), wait_s + self._timeout_s)
            except Exception as error:
                self.lose(server.name, _reason("tell its news", error, wait_s + self._timeout_s))
                return
            now = time.monotonic()
            # a pause, or nothing to work on, is no silence
            if news["events"] or self._paused or not member.requests:
                member.heard_s = now
            for event in news["events"]:
                if event["number"] > heard:
                    heard = event["number"]
                    if self._take(member, event):
                        return
            silence = now - member.heard_s
            if silence > self._timeout_s:
                count = len(member.requests)
                self.lose(server.name, f"no token for {silence:.0f} s while it worked on {count} requests")
                return

    def _take(self, member: _Member, event: Mapping[str, Any]) -> bool:
        """A piece reaches its request; True when the server was lost by it."""
        request = member.requests.get(event["key"])
        # given up while its pieces were on their way
        if request is None:
            return False
        if "error" in event:
            # any other server would refuse it too
            if event["kind"] == "request":
                del member.requests[request.key]
                self._note_idle(member)
                self._fail(request, ValueError(event["error"]))
                return False
            self.lose(member.server.name, event["error"])
            return True
        tokens = tuple(event["token_ids"])
        # "aborted" until the last piece: so what there is can go on at another server
        piece = Generated(tokens, tuple(event["log_probs"]), (event["version"],) * len(tokens), event["finish"] or "aborted")
        request.whole = request.whole.concat(piece)
        if event["finish"] is not None:
            del member.requests[request.key]
            self._note_idle(member)
            if not request.done.done():
                request.done.set_result(request.whole)
        return False

    def _note_idle(self, member: _Member) -> None:
        if not member.requests:
            self._idle(member)

    def _idle(self, member: _Member) -> None:
        if member.busy_since is not None:
            self._busy.append((member.server.name, member.busy_since, time.time()))
            member.busy_since = None

    def _fail(self, request: _Request, error: Exception) -> None:
        if not request.done.done():
            request.done.set_exception(error)

    # ------------------------------------------------------------------ weights

    async def pause(self, mode: PauseMode) -> None:
        """See `RolloutEngine.pause`. Servers that do not manage are lost.

        What runs is ended here for mode "wait" and "abort", so that no later token comes behind the pause. For mode "wait" what
        a server is lost with goes on elsewhere first.

        Raises:
            TimeoutError: requests that were waited for did not end; says how many, and on which servers.
        """
        if mode == "wait":
            await self._drain()
        self._paused = True
        if mode == "abort":
            # no server will answer these
            for request in self._waiting:
                if not request.done.done():
                    request.done.set_result(request.whole)
            self._waiting = []
        # noted first: what the servers end on the way is no longer among their requests
        running = [request.done for member in self._members.values() for request in member.requests.values()]
        await self._ask_all("pause", mode=mode)
        # the last pieces come as news, perhaps behind the servers' answers
        if mode == "abort" and running:
            await asyncio.wait(running, timeout=self._timeout_s)

    async def _drain(self) -> None:
        """No request is under way."""
        running = [request.done for member in self._members.values() for request in member.requests.values()]
        running += [request.done for request in self._waiting if request.moves]
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
        """See `RolloutEngine.resume`."""
        for member in self._members.values():
            member.heard_s = time.monotonic()  # the pause was no silence
        await self._ask_all("resume")
        self._paused = False
        self._place_waiting()

    async def _ask_all(self, call: str, **arguments: Any) -> None:
        await asyncio.gather(*(self.ask(name, call, **arguments) for name in self.names), return_exceptions=True)

    async def receive(self, version: int, names: Sequence[str]) -> dict[str, list[str] | Exception]:
        """What each of these servers says of the weights that it took, or how it failed; none is lost by that here."""

        # looked up inside, so that a server which is gone by then is one of the results
        async def one(name: str) -> list[str]:
            return await self._members[name].server.call("receive", version=version)

        results = await asyncio.gather(*(one(name) for name in names), return_exceptions=True)
        found: dict[str, list[str] | Exception] = {}
        for name, result in zip(names, results):
            if isinstance(result, BaseException) and not isinstance(result, Exception):
                raise result
            found[name] = result
        return found

    async def update_weights(self, version: int, named: Iterable[tuple[str, Tensor]] | None = None) -> None:
        """See `RolloutEngine.update_weights`: all servers take what the trainers send meanwhile.

        Raises:
            ServerLostError: a server did not.
        """
        if named is not None:
            raise ValueError("servers take weights from a group that they share with the trainers.")
        for name, result in (await self.receive(version, self.names)).items():
            if isinstance(result, Exception):
                self.lose(name, _reason("take weights", result, self._timeout_s))
                raise ServerLostError(f"{name}: {_said(result)}")
        self.version = version

    async def release(self) -> None:
        """The servers' devices are their own: nobody waits for their memory."""

    async def restore(self) -> None:
        """See `release`."""


def _said(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[-1]}" if lines else type(error).__name__


def _reason(call: str, error: BaseException, timeout_s: float) -> str:
    if isinstance(error, (TimeoutError, asyncio.TimeoutError)):
        return f"did not {call} within {timeout_s:.0f} s"
    return f"failed to {call}: {_said(error)}"
