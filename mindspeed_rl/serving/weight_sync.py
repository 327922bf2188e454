"""A weight sync to several rollout servers that outlives the failure of any of them.

The trainers are given as three functions.
"""

from __future__ import annotations

import asyncio
import logging
import re
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import TypeVar

from ray.exceptions import RayActorError, RayError

from mindspeed_rl.loop_thread import LoopThread
from mindspeed_rl.platform.rendezvous import GIVEN_UP, give_up
from mindspeed_rl.resharding.rendezvous import DeliveryReport, Rendezvous
from mindspeed_rl.runtime.futures import LOST_PEER, WorkerError
from mindspeed_rl.serving.engine_pool import ServerClient, ServerLostError, ServerPool

_Sent = TypeVar("_Sent")
#: builds a group of the trainers and the servers of these names; passes the rendezvous to the function
_JoinGroup = Callable[[Sequence[str], Callable[[Rendezvous], None]], None]
#: for each server the reports of its workers, or its failure
_Results = Mapping[str, list[DeliveryReport] | Exception]

_LOG = logging.getLogger(__name__)
#: texts of a member's error when another one is gone or silent
_PEER_ERRORS = (*LOST_PEER, GIVEN_UP, "Timed out", "timed out", "Timeout", "timeout", "Connection refused", "recvValue failed")


class WeightSync:
    """Weight syncs to the servers of a pool; called by the thread that drives the trainers.

    Attributes:
        num_workers: members of a group of each server, by name.
        received_bytes, needed_bytes: sums over the servers of the last sync; see `resharding/push.py`.
        drafts: sums over the servers between the last two syncs; see `DeliveryReport`.
    """

    def __init__(
        self, pool: ServerPool, loop: LoopThread, replace_lost: Callable[[], None], *, num_trainers: int, timeout_s: float
    ) -> None:
        """Keep the pool.

        Args:
            pool: the servers.
            loop: event loop of the pool's coroutines.
            replace_lost: starts servers in place of lost ones, where possible.
            num_trainers: the first members of every group.
            timeout_s: longest silence in a sync.
        """
        self._pool, self._loop, self._replace_lost, self._timeout_s = pool, loop, replace_lost, timeout_s
        self._num_trainers = num_trainers
        self.received_bytes = self.needed_bytes = 0
        self.drafts = (0, 0, 0)
        self.num_workers: dict[str, int] = {}
        self._joined: list[ServerClient] = []  # a replaced server has the name of the one before

    def run(
        self, version: int, join: _JoinGroup, send: Callable[[], tuple[_Sent, Exception | None]], leave: Callable[[], object]
    ) -> tuple[_Sent, int]:
        """Send the trainers' weights to all servers, with proof; remove a server that fails, and continue with the others.

        Args:
            version: version of the weights.
            join: builds a group of trainers and servers.
            send: the trainers send; returns their result, and the error that broke the group or None.
            leave: the trainers leave a broken group.

        Returns:
            The result of `send`, and the number of parameters of a server that were proven to have arrived.

        Raises:
            WorkerError: no server is left.
        """
        failures = 0
        while True:
            self._replace_lost()
            names, servers = self._pool.names, self._pool.servers
            if not names:
                raise WorkerError(f"no rollout server is left: {'; '.join(': '.join(item) for item in self._pool.lost[-4:])}")
            # the plan of a sync is made for the members of a group: both last as long as the servers stay the same
            if servers != self._joined:
                self._joined = []
                if not self._build_group(names, join):
                    leave()
                    failures = self._count_failure(failures, None)
                    continue
                self._joined = servers
            receiving = {name: self._loop.start(self._pool.receive(version, name)) for name in names}
            sent, broken = send()
            if broken is not None:
                leave()  # members that still wait for a bucket get an error
            self._loop.wait(receiving.values(), limit_s=self._timeout_s)
            results = {name: _take_result(future) for name, future in receiving.items()}
            num_proven = self._check_results(results, broken)
            if broken is None and num_proven is not None and not any(map(_is_consequence, results.values())):
                self._pool.version = version
                return sent, num_proven
            # members that failed have left the group, so it is built again
            self._joined = []
            failures = self._count_failure(failures, broken)

    def _count_failure(self, failures: int, broken: Exception | None) -> int:
        # each failure may remove a server: two more failures than servers mean that none of them is the cause
        if failures >= 2 + len(self.num_workers):
            cause = "" if broken is None else f" The trainers reported: {_last_line(broken)}"
            raise WorkerError(f"weight sync: it failed {failures + 1} times and no server can be blamed for it.{cause}")
        return failures + 1

    def _build_group(self, names: Sequence[str], join: _JoinGroup) -> bool:
        """Return True when the trainers and all these servers are in a group."""
        joins: list[Future[bool]] = []
        attempts: list[Rendezvous] = []

        async def join_servers(rendezvous: Rendezvous) -> bool:
            ranks, arguments = dict[str, range](), dict[str, dict[str, object]]()
            first_rank = self._num_trainers
            for name in names:
                # keys of the servers' HTTP interface
                arguments[name] = {"meeting": rendezvous.to_json(), "first_rank": first_rank}
                ranks[name] = range(first_rank, first_rank + self.num_workers[name])
                first_rank = ranks[name].stop

            async def end_wait(name: str, error: ServerLostError) -> None:
                if not _waited_in_vain(error):
                    await asyncio.to_thread(give_up, rendezvous.host, rendezvous.port, rendezvous.name, f"{name} {error}")

            called = await self._pool.call_each("join", arguments, end_wait)
            failures = {name: error for name, error in called.items() if error}
            # a server that waited in vain for another one is not lost
            causes = {name for name, error in failures.items() if not _waited_in_vain(error)}
            causes = causes or _find_absent(failures, ranks) or failures.keys()
            for name in causes:
                self._pool.remove(name, str(failures[name]))
            return not failures

        def invite(rendezvous: Rendezvous) -> None:
            attempts.append(rendezvous)
            joins.append(self._loop.start(join_servers(rendezvous)))

        try:
            join(names, invite)
        except (RayError, RuntimeError, OSError) as error:
            _LOG.warning("weight sync: the trainers could not join the servers' group: %s", error)
            for attempt in attempts:
                give_up(attempt.host, attempt.port, attempt.name, f"the trainers failed: {_last_line(error)}")
        # each of its calls has a deadline of its own
        self._loop.wait(joins)
        is_joined = bool(joins) and joins[0].result()
        return is_joined and set(names) <= set(self._pool.names)

    def make_rendezvous(self, host: str, port: int, names: Sequence[str]) -> Rendezvous:
        """Return a rendezvous of the trainers and all workers of these servers."""
        size = self._num_trainers + sum(self.num_workers[name] for name in names)
        return Rendezvous(host, port, uuid.uuid4().hex[:12], size, self._timeout_s)

    def _check_results(self, results: _Results, broken: Exception | None) -> int | None:
        """Remove servers that failed themselves or have other weights; return the number of proven parameters of another."""
        num_proven, self.received_bytes, self.needed_bytes, self.drafts = None, 0, 0, (0, 0, 0)
        all_sent = broken is None and any(isinstance(result, list) for result in results.values())
        doubtful = []
        for name, result in results.items():
            reason = ""
            if isinstance(result, TimeoutError) and all_sent:
                reason = f"weight sync: no report for {self._timeout_s:.0f} s after the trainers had sent everything"
            elif isinstance(result, TimeoutError) or _is_consequence(result):
                doubtful.append(name)
            elif isinstance(result, Exception):
                is_dead = isinstance(result, RayActorError)
                reason = "its process died during the weight sync" if is_dead else f"weight sync failed: {_last_line(result)}"
            else:
                if differing := list(dict.fromkeys(parameter for report in result for parameter in report.differing)):
                    shown = ", ".join(differing[:5])
                    reason = f"weight sync: {len(differing)} parameters differ from those trained: {shown}"
                elif len(result) != self.num_workers[name]:
                    reason = f"weight sync: {len(result)} reports of {self.num_workers[name]} workers"
                else:
                    num_proven = min(report.num_parameters for report in result)
                    self.received_bytes += sum(report.received_bytes for report in result)
                    self.needed_bytes += sum(report.needed_bytes for report in result)
                    for report in result:
                        proposed, accepted, steps = (old + new for old, new in zip(self.drafts, report.drafts, strict=True))
                        self.drafts = proposed, accepted, steps
            if reason:
                self._loop.run(self._remove(name, reason))
        self._loop.run(self._check_health(doubtful))
        return num_proven

    async def _check_health(self, names: Sequence[str]) -> None:
        """Remove the servers that do not answer."""
        await asyncio.gather(*(self._pool.call(name, "health") for name in names), return_exceptions=True)

    # a coroutine, because the pool belongs to the loop's thread
    async def _remove(self, name: str, reason: str) -> None:
        self._pool.remove(name, reason)


def _take_result(future: Future[list[DeliveryReport]]) -> list[DeliveryReport] | Exception:
    """Return the result of an ended call, or its failure; cancel one that has not ended."""
    if not future.done():
        future.cancel()
        return TimeoutError()
    try:
        return future.result()
    except Exception as error:  # noqa: BLE001 - Ray, HTTP and the server's own errors have no common class
        return error


def _waited_in_vain(error: ServerLostError) -> bool:
    """Return True for a failed join that may follow from the failure of another member."""
    return isinstance(error.__cause__, TimeoutError) or _is_consequence(error)


def _find_absent(failures: Mapping[str, ServerLostError], ranks: Mapping[str, range]) -> set[str]:
    """Return the servers with a rank for which the others waited in vain."""
    texts = re.findall(r"ranks ([\d, ]+) of \d+ did not come", " ".join(map(str, failures.values())))
    absent = {int(rank) for text in texts for rank in text.split(",")}
    return {name for name in failures if absent.intersection(ranks[name])}


def _is_consequence(result: object) -> bool:
    """Return True for a server that failed because another member of the group was gone."""
    return isinstance(result, Exception) and any(text in str(result) for text in _PEER_ERRORS)


def _last_line(error: Exception) -> str:
    lines = [line for line in str(error).strip().splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
