"""A weight push to several rollout servers that outlives the failure of any of them.

Needs no Ray: who trains is given as three callables.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import uuid
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from ray.exceptions import RayActorError

from mindspeed_rl.resharding.rendezvous import DeliveryReport, Rendezvous
from mindspeed_rl.runtime.futures import LOST_PEER, WorkerError
from mindspeed_rl.serving.engine_pool import Server, ServerLostError, ServerPool

Answer = TypeVar("Answer")

_LOG = logging.getLogger(__name__)
#: what members of a group say when another one is gone or silent
_OTHERS_FAULT = (*LOST_PEER, "Timed out", "timed out", "Timeout", "timeout", "Connection refused", "recvValue failed")


class LoopThread:
    """An event loop in a thread of its own, for a process whose other code waits."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def start(self, work: Coroutine[Any, Any, Answer]) -> Future[Answer]:
        """The coroutine runs in the loop."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def run(self, work: Coroutine[Any, Any, Answer]) -> Answer:
        """What the coroutine returns."""
        future = self.start(work)
        try:
            return future.result()
        except BaseException:
            # also on Ctrl-C: the coroutine would go on in its own thread
            future.cancel()
            raise

    def close(self) -> None:
        """What runs in the loop is cancelled, and the loop ends."""
        with contextlib.suppress(Exception):
            self.start(_cancel_others()).result(timeout=5)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=5)
        if not self._thread.is_alive():
            self._loop.close()


async def _cancel_others() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


class WeightPush:
    """Pushes to the servers of a pool; called by the thread that drives the trainers.

    Attributes:
        workers_of: members of a group that each server brings, by name.
        received_bytes, needed_bytes: of all servers that took the last push; see `WeightPush` of `resharding/push.py`.
    """

    def __init__(
        self, pool: ServerPool, loop: LoopThread, replace_lost: Callable[[], None], *, num_trainers: int, timeout_s: float
    ) -> None:
        """
        Args:
            loop: in which the pool's coroutines run.
            replace_lost: starts servers in place of those that were lost, where it can.
            num_trainers: who are the first members of every group.
            timeout_s: longest silence in a push.
        """
        self._pool, self._loop, self._replace_lost, self._timeout_s = pool, loop, replace_lost, timeout_s
        self._num_trainers = num_trainers
        self.received_bytes = self.needed_bytes = 0
        self.workers_of: dict[str, int] = {}
        self._joined: list[Server] = []  # a server that was started anew has the name of the one before

    def push(
        self,
        version: int,
        meet: Callable[[Sequence[str], Callable[[Rendezvous], None]], None],
        send: Callable[[], tuple[Any, Exception | None]],
        leave: Callable[[], object],
    ) -> tuple[Any, int]:
        """All servers hold the trainers' weights, proven; a server that does not manage is taken out, and the others go on.

        Args:
            version: of the weights.
            meet: makes a group of the trainers and the servers of these names; calls back with the meeting.
            send: the trainers send; what they return, or the error that broke the group.
            leave: the trainers leave a group that broke.

        Returns:
            What `send` returned, and how many parameters of a server were proven to have arrived.

        Raises:
            WorkerError: no server is left.
        """
        failures = 0
        while True:
            self._replace_lost()
            names, servers = self._pool.names, self._pool.servers()
            if not names:
                raise WorkerError(f"no rollout server is left: {'; '.join(': '.join(item) for item in self._pool.lost[-4:])}")
            # the plan of a push is made for the members of a group: both last as long as the servers stay the same
            if servers != self._joined:
                self._joined = []
                if not self._meet(names, meet):
                    leave()
                    failures = self._count(failures, None)
                    continue
                self._joined = servers
            receiving = self._loop.start(self._pool.receive(version, names))
            sent, broken = send()
            if broken is not None:
                leave()  # who still waits for a bucket hears of it
            results = self._results(receiving, names)
            proof = self._judge(results)
            if broken is None and proof is not None and not any(self._is_innocent(item) for item in results.values()):
                self._pool.version = version
                return sent, proof
            # who failed has left the group, so the others have to meet anew
            self._joined = []
            failures = self._count(failures, broken)

    def _count(self, failures: int, broken: Exception | None) -> int:
        # each failure may take out a server: two more failures than servers mean that none of them is the cause
        if failures >= 2 + len(self.workers_of):
            cause = "" if broken is None else f" The trainers said: {_last_line(broken)}"
            raise WorkerError(f"weight push: it failed {failures + 1} times and no server can be blamed for it.{cause}")
        return failures + 1

    def _meet(self, names: Sequence[str], meet: Callable[[Sequence[str], Callable[[Rendezvous], None]], None]) -> bool:
        """True when the trainers and all these servers are in a group."""
        joins: list[Future[list[Any]]] = []

        def invite(meeting: Rendezvous) -> None:
            joins.append(self._loop.start(self._join_all(names, meeting)))

        try:
            meet(names, invite)
        except Exception as error:
            _LOG.warning("weight push: the trainers could not meet the servers: %s", error)
        results = joins[0].result() if joins else []
        alive = set(self._pool.names)
        return bool(joins) and all(name in alive for name in names) and not any(isinstance(r, Exception) for r in results)

    async def _join_all(self, names: Sequence[str], meeting: Rendezvous) -> list[Any]:
        first, calls = self._num_trainers, []
        for name in names:
            calls.append(self._pool.ask(name, "join", meeting=meeting.to_json(), first_rank=first))
            first += self.workers_of[name]
        return await asyncio.gather(*calls, return_exceptions=True)

    def new_meeting(self, host: str, port: int, names: Sequence[str]) -> Rendezvous:
        """Where the trainers and all workers of these servers meet."""
        size = self._num_trainers + sum(self.workers_of[name] for name in names)
        return Rendezvous(host, port, uuid.uuid4().hex[:12], size, self._timeout_s)

    def _results(self, receiving: Future[dict[str, Any]], names: Sequence[str]) -> dict[str, Any]:
        try:
            return receiving.result(timeout=self._timeout_s)
        except TimeoutError:
            receiving.cancel()
            return {name: TimeoutError() for name in names}

    def _judge(self, results: Mapping[str, Any]) -> int | None:
        """Takes out who failed by itself or holds other weights; the parameters of one that holds the right ones."""
        proof, self.received_bytes, self.needed_bytes = None, 0, 0
        for name, result in results.items():
            if isinstance(result, TimeoutError) or self._is_innocent(result):
                with contextlib.suppress(ServerLostError):
                    self._loop.run(self._pool.ask(name, "health"))  # lost when it does not answer
            elif isinstance(result, Exception):
                dead = isinstance(result, RayActorError)
                reason = "its process died during the weight push" if dead else f"weight push failed: {_last_line(result)}"
                self._lose(name, reason)
            else:
                parts = [DeliveryReport.from_json(text) for text in result]
                differing = [parameter for part in parts for parameter in part.differing]
                if differing:
                    names = list(dict.fromkeys(differing))
                    self._lose(name, f"weight push: {len(names)} parameters differ from those trained: {', '.join(names[:5])}")
                else:
                    proof = min(part.num_parameters for part in parts)
                    self.received_bytes += sum(part.received_bytes for part in parts)
                    self.needed_bytes += sum(part.needed_bytes for part in parts)
        return proof

    def _is_innocent(self, result: Any) -> bool:
        """True for a server that failed because another member of the group was gone."""
        return isinstance(result, Exception) and any(sign in str(result) for sign in _OTHERS_FAULT)

    def _lose(self, name: str, reason: str) -> None:
        # the pool belongs to the loop's thread
        async def lose() -> None:
            self._pool.lose(name, reason)

        self._loop.run(lose())


def _last_line(error: Exception) -> str:
    lines = [line for line in str(error).strip().splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
