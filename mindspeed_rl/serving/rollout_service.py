"""A rollout server's side of the conversation: requests in, pieces of responses out, in messages that are plain values.

The same calls reach it from a Ray actor's handle and from HTTP. A client submits requests under names of its own and asks for
news; an answer that got lost is given again, because news are kept until the client says that it has them.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Protocol

from mindspeed_rl.rollout.protocol import Generated, PauseMode
from mindspeed_rl.rollout.requests import Sampling

#: how long pieces are collected before they travel together
_COLLECT_S = 0.02


class ServedEngine(Protocol):
    """What a server needs of its engine; see `AsyncEngine`."""

    version: int

    def pieces(
        self, prompt_ids: Iterable[int], sampling: Sampling, seed: int, partial: Generated | None = None
    ) -> AsyncIterator[Any]: ...

    async def pause(self, mode: PauseMode) -> None: ...

    async def resume(self) -> None: ...

    async def join(self, meeting: str, first_rank: int) -> None: ...

    async def leave(self) -> None: ...

    async def receive(self, version: int) -> list[str]: ...

    async def check(self) -> None: ...


class RolloutService:
    """All methods are coroutines of one event loop; arguments and results are JSON values."""

    #: what clients may call
    CALLS = (
        "describe",
        "submit",
        "news",
        "drop",
        "pause",
        "resume",
        "join",
        "leave",
        "receive",
        "health",
    )

    def __init__(self, engine: ServedEngine, facts: Mapping[str, Any]) -> None:
        """
        Args:
            facts: what a client checks before it uses the server: workers, dtype, max_model_len, logprobs_mode.
        """
        self._engine, self._facts = engine, dict(facts)
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._news: list[dict[str, Any]] = []
        self._number = 0
        self._came = asyncio.Event()

    async def call(self, name: str, arguments: Mapping[str, Any]) -> Any:
        """What the call of that name returns.

        Raises:
            ValueError: there is no such call.
        """
        # names come over HTTP: no other method may be within reach
        if name not in self.CALLS:
            raise ValueError(f"{name} is no call of a rollout server; there are {', '.join(self.CALLS)}.")
        return await getattr(self, name)(**arguments)

    async def describe(self) -> dict[str, Any]:
        """What the server is: see `facts`, with the version of its weights (-1: none yet)."""
        return self._facts | {"version": self._engine.version}

    async def health(self) -> dict[str, Any]:
        """The engine lives; how many requests it works on.

        Raises:
            Exception: it does not; vLLM's own words.
        """
        await self._engine.check()
        return {"running": len(self._tasks), "version": self._engine.version}

    # ------------------------------------------------------------------ requests

    async def submit(self, requests: Sequence[Mapping[str, Any]]) -> None:
        """The requests are worked on. One whose key is known already is the same one, sent again.

        Args:
            requests: each with key, prompt_ids, sampling (fields of `Sampling`), seed and begun (token_ids, log_probs and
                versions that the response has, or None).
        """
        for request in requests:
            key = request["key"]
            if key not in self._tasks:
                self._tasks[key] = asyncio.create_task(self._work(key, request))

    async def _work(self, key: str, request: Mapping[str, Any]) -> None:
        words = dict(request["sampling"])
        sampling = Sampling(**(words | {"stop_token_ids": tuple(words["stop_token_ids"])}))
        kept = request.get("begun")
        partial = None if kept is None else Generated(*(tuple(kept[name]) for name in _KEPT), finish="aborted")
        try:
            async for piece in self._engine.pieces(request["prompt_ids"], sampling, request["seed"], partial):
                if piece.finish is not None:
                    self._tasks.pop(key, None)
                self._tell({"key": key} | asdict(piece))
        except Exception as error:  # whatever it is, the client must hear of it, or waits for ever
            kind = "request" if isinstance(error, ValueError) else "server"
            self._tell({"key": key, "error": f"{type(error).__name__}: {error}", "kind": kind})
        finally:
            # a request that was dropped may have come again under its key, and be worked on by another task by now
            if self._tasks.get(key) is asyncio.current_task():
                del self._tasks[key]

    def _tell(self, event: dict[str, Any]) -> None:
        self._number += 1
        self._news.append(event | {"number": self._number})
        self._came.set()

    async def news(self, after: int, wait_s: float) -> dict[str, Any]:
        """What happened since event `after`, at once or when something does, at the latest after `wait_s` seconds.

        Returns:
            events: pieces with key, token_ids, log_probs, version and finish, or with key and error; each has its number.
            running: requests that are worked on.
        """
        self._news = [event for event in self._news if event["number"] > after]
        if not self._news:
            self._came.clear()
            try:
                await asyncio.wait_for(self._came.wait(), wait_s)
                await asyncio.sleep(_COLLECT_S)
            except TimeoutError:
                pass
        return {"events": list(self._news), "running": len(self._tasks), "version": self._engine.version}

    async def drop(self, keys: Sequence[str] | None = None) -> None:
        """These requests, or all, are given up, and nothing more is said of them."""
        for key in list(self._tasks) if keys is None else keys:
            task = self._tasks.pop(key, None)
            if task is not None:
                task.cancel()
        self._news = [] if keys is None else [event for event in self._news if event["key"] not in set(keys)]

    # ------------------------------------------------------------------ weights

    async def pause(self, mode: PauseMode) -> None:
        """See `RolloutEngine.pause`."""
        await self._engine.pause(mode)

    async def resume(self) -> None:
        """See `RolloutEngine.resume`."""
        await self._engine.resume()

    async def join(self, meeting: str, first_rank: int) -> None:
        """The engine's workers are members of the group that meets there."""
        await self._engine.join(meeting, first_rank)

    async def leave(self) -> None:
        """The engine's workers are in no group."""
        await self._engine.leave()

    async def receive(self, version: int) -> list[str]:
        """The engine holds what the group's trainers send; what each worker says of it."""
        return await self._engine.receive(version)


_KEPT = ("token_ids", "log_probs", "versions")
