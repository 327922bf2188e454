"""The server's side of the calls of a rollout server: requests in, chunks of responses out, as plain values.

The same calls reach it from a Ray actor's handle and from HTTP. A client submits requests under its own keys and polls for
events; a lost result is sent again, because events are stored until the client acknowledges them.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, Protocol, TypedDict, get_args

from mindspeed_rl.rollout.protocol import Finish, Generated, PauseMode
from mindspeed_rl.rollout.requests import Sampling

#: chunks are collected for this time, then sent together
_COLLECT_S = 0.02
#: bytes of the events of a reply, and of an event and a token as JSON
_MAX_NEWS_BYTES, _EVENT_BYTES, _TOKEN_BYTES = 8 << 20, 200, 40
#: longest time that a poll is kept open, whatever its client asks for
_MAX_WAIT_S = 60.0

#: parts of an engine that sleeps
WakePart = Literal["weights", "cache"]

#: reasons of the end of a response
FINISHES: tuple[Finish, ...] = get_args(Finish)

#: tokens of a call whose requests are read in the event loop; larger calls are read in a thread
_MAX_TOKENS_IN_LOOP = 2_000_000
#: calls of clients, which are the routes of the HTTP server: of this class, and of the engine
_OWN_CALLS = ("describe", "submit", "news", "drop", "health", "list_missing")
_ENGINE_CALLS = ("pause", "resume", "join", "leave", "receive", "sleep", "wake")


@dataclass(frozen=True)
class ResponseChunk:
    """The next tokens of a response; see `Generated`.

    Attributes:
        token_ids, log_probs: ids and log-probs of the tokens.
        version: version of the weights.
        finish: None while more chunks follow.
    """

    token_ids: tuple[int, ...]
    log_probs: tuple[float, ...]
    version: int
    finish: Finish | None


class ServedEngine(Protocol):
    """An engine that a service can serve, with the methods of `AsyncEngine`.

    Attributes:
        version: version of the weights; -1 before the first.
    """

    version: int

    def stream(
        self, prompt_ids: Iterable[int], sampling: Sampling, seed: int, partial: Generated | None = None
    ) -> AsyncIterator[ResponseChunk]:
        """Yield the tokens after `partial`, as they are sampled; the last chunk has a finish."""

    async def check(self) -> None:
        """Raise an error when the engine is dead."""

    async def pause(self, mode: PauseMode) -> None:
        """Pause the engine."""

    async def resume(self) -> None:
        """Resume the engine."""

    async def join(self, rendezvous: str, first_rank: int) -> None:
        """Make the engine's workers members of a new group."""

    async def leave(self) -> None:
        """Remove the engine's workers from their group."""

    async def receive(self, version: int) -> list[str]:
        """Receive the weights from the group's trainers; return a report of each worker."""

    async def sleep(self) -> None:
        """Offload the weights."""

    async def wake(self, part: WakePart | None = None) -> None:
        """Load the weights, the cache or both again."""


class Event(TypedDict, total=False):
    """An event of `RolloutService.news`: the next tokens of a response, or an error."""

    number: int
    key: str
    token_ids: list[int]
    log_probs: list[float]
    version: int
    finish: Finish | None
    error: str
    kind: str


class _Request(TypedDict):
    """A request of `RolloutService.submit`.

    Attributes:
        sampling: fields of `Sampling`.
        begun: token_ids, log_probs and versions of the existing part of the response, or None.
    """

    key: str
    prompt_ids: list[int]
    sampling: dict[str, Any]
    seed: int
    begun: dict[str, list[Any]] | None


@dataclass(frozen=True)
class _Work:
    """A request in the types of the engine."""

    key: str
    prompt_ids: list[int]
    sampling: Sampling
    seed: int
    partial: Generated | None


#: annotation of a field of `Sampling` -> JSON types of its values
_SAMPLING_KINDS: dict[str, tuple[type, ...]] = {
    "float": (int, float),
    "int": (int,),
    "str": (str,),
    "tuple[int, ...]": (list, tuple),
    "tuple[str, ...]": (list, tuple),
}


def _read_request(request: _Request) -> _Work:
    """Convert a request of a client.

    Raises:
        ValueError: it lacks a field, or a value has another type; the message has its key.
    """
    if not isinstance(request, dict) or not isinstance(request.get("key"), str):
        raise ValueError("a request is a JSON object with a text as its key")
    try:
        values, sampling = dict(request["sampling"]), {}
        for field in fields(Sampling):
            value = values.pop(field.name, field.default)
            if not isinstance(value, _SAMPLING_KINDS[str(field.type)]) or isinstance(value, bool):
                raise ValueError(f"sampling has no {field.name} of type {field.type}")
            sampling[field.name] = tuple(value) if isinstance(value, list) else value
        if values:
            raise ValueError(f"sampling has no field {', '.join(map(repr, values))}")
        part, lists, partial = request.get("begun"), [list(request["prompt_ids"])], None
        if part is not None:
            partial = Generated(tuple(part["token_ids"]), tuple(part["log_probs"]), tuple(part["versions"]), finish="aborted")
            lists += [list(partial.token_ids), list(partial.versions)]
        if set(map(type, itertools.chain([request["seed"]], *lists))) != {int}:
            raise ValueError("token ids, versions and the seed are integers")
        return _Work(request["key"], lists[0], Sampling(**sampling), request["seed"], partial)
    except (KeyError, TypeError, ValueError) as error:
        problem = f"it lacks {error}" if isinstance(error, KeyError) else str(error)
        raise ValueError(f"request {request['key'][:100]!r}: {problem}") from None


def _read_requests(requests: Sequence[_Request]) -> list[_Work]:
    return [_read_request(request) for request in requests]


def _count_tokens(request: object) -> int:
    """Count the tokens of a request, which may be malformed."""
    part = request.get("begun") if isinstance(request, dict) else None
    lists = [request.get("prompt_ids") if isinstance(request, dict) else None]
    lists += list(part.values()) if isinstance(part, dict) else []
    return sum(len(ids) for ids in lists if isinstance(ids, (list, tuple)))


class RolloutService:
    """All methods are coroutines of one event loop; arguments and results are JSON values.

    Methods, arguments and fields are named as in the HTTP interface.
    """

    def __init__(self, engine: ServedEngine, metadata: Mapping[str, object]) -> None:
        """Keep the engine.

        Args:
            engine: that generates.
            metadata: checked by clients before they use the server: workers, dtype, max_model_len, logprobs_mode.
        """
        self._engine, self._metadata = engine, dict(metadata)
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._events: list[Event] = []
        self._num_events = 0
        self._has_events = asyncio.Event()

    async def call(self, name: str, arguments: Mapping[str, Any]) -> Any:
        """Return the result of a call.

        Raises:
            ValueError: the call does not exist.
        """
        if name == "join":
            return await self._engine.join(arguments["meeting"], arguments["first_rank"])
        # names come over HTTP: no other method may be reachable
        if name not in (*_OWN_CALLS, *_ENGINE_CALLS):
            raise ValueError(f"{name} is not a call of a rollout server; there are {', '.join((*_OWN_CALLS, *_ENGINE_CALLS))}.")
        return await getattr(self if name in _OWN_CALLS else self._engine, name)(**arguments)

    async def describe(self) -> dict[str, object]:
        """Return the server's metadata and the version of its weights (-1: none yet)."""
        return self._metadata | {"version": self._engine.version}

    async def list_missing(self, files: Mapping[str, int]) -> list[str]:
        """Return the files, by path and size, that this machine does not have."""
        return await asyncio.to_thread(_list_missing, files)

    async def health(self) -> dict[str, int]:
        """Return the number of running requests.

        Raises:
            Exception: vLLM's own; the engine is dead.
        """
        await self._engine.check()
        return {"running": len(self._tasks), "version": self._engine.version}

    async def submit(self, requests: Sequence[_Request]) -> None:
        """Start the requests. One with a known key is the same request, sent again.

        Raises:
            ValueError: one is incomplete, or a field has another type; nothing is started.
        """
        # all of them before any is started, so that a call with a wrong one starts nothing
        is_large = sum(map(_count_tokens, requests)) > _MAX_TOKENS_IN_LOOP
        works = await asyncio.to_thread(_read_requests, requests) if is_large else _read_requests(requests)
        for work in works:
            if work.key not in self._tasks:
                self._tasks[work.key] = asyncio.create_task(self._generate(work))

    async def _generate(self, work: _Work) -> None:
        try:
            async for chunk in self._engine.stream(work.prompt_ids, work.sampling, work.seed, work.partial):
                if chunk.finish is not None:
                    self._tasks.pop(work.key, None)
                # plain values, as JSON has them: a client of the run gets them without JSON
                self._add_event(
                    {
                        "key": work.key,
                        "token_ids": list(map(int, chunk.token_ids)),
                        "log_probs": list(map(float, chunk.log_probs)),
                        "version": chunk.version,
                        "finish": chunk.finish,
                    }
                )
        except Exception as error:  # noqa: BLE001 - any failure is reported to the client, which would wait forever otherwise
            kind = "request" if isinstance(error, ValueError) else "server"
            self._add_event({"key": work.key, "error": f"{type(error).__name__}: {error}", "kind": kind})
        finally:
            # a request that was dropped may have been sent again with its key, and be another task by now
            if self._tasks.get(work.key) is asyncio.current_task():
                del self._tasks[work.key]

    def _add_event(self, event: Event) -> None:
        self._num_events += 1
        event["number"] = self._num_events
        self._events.append(event)
        self._has_events.set()

    async def news(self, after: int, wait_s: float) -> dict[str, object]:
        """Return the events since event `after`, at once or when there is one, at the latest after `wait_s` seconds.

        Returns:
            events: chunks with key, token_ids, log_probs, version and finish, or key and error; each has its number.
            running: number of running requests.
        """
        if type(after) is not int or isinstance(wait_s, bool) or not isinstance(wait_s, (int, float)):
            raise ValueError(f"after is the number of an event and wait_s a number of seconds, not {after!r} and {wait_s!r}")
        self._events = [event for event in self._events if event["number"] > after]
        if not self._events:
            self._has_events.clear()
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._has_events.wait(), min(wait_s, _MAX_WAIT_S))
                await asyncio.sleep(_COLLECT_S)
        return {"events": self._list_events(), "running": len(self._tasks), "version": self._engine.version}

    def _list_events(self) -> list[Event]:
        """Return the first events, as many as fit into a reply; the next call returns the others."""
        events: list[Event] = []
        num_bytes = 0
        for event in self._events:
            num_bytes += _EVENT_BYTES + _TOKEN_BYTES * len(event.get("token_ids", ())) + len(event.get("error", ""))
            if events and num_bytes > _MAX_NEWS_BYTES:
                break
            events.append(event)
        return events

    async def drop(self, keys: Sequence[str] | None = None) -> None:
        """Abort these requests, or all, and remove their events."""
        for key in list(self._tasks) if keys is None else keys:
            task = self._tasks.pop(key, None)
            if task is not None:
                task.cancel()
        self._events = [] if keys is None else [event for event in self._events if event["key"] not in set(keys)]


def _list_missing(files: Mapping[str, int]) -> list[str]:
    sizes = {path: os.path.getsize(path) for path in map(os.path.expanduser, files) if os.path.isfile(path)}
    return [path for path, size in files.items() if sizes.get(os.path.expanduser(path)) != size]
