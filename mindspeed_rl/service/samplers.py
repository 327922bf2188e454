"""Sampling sessions: samplers of the backend are made when they are needed, and freed when they are not."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from mindspeed_rl.service.backend import REQUESTS, Backend, CallError
from mindspeed_rl.service.bodies import SampleRequest, read_body, read_json, read_sample
from mindspeed_rl.service.checkpoints import Checkpoints
from mindspeed_rl.service.hangs import describe_hangs
from mindspeed_rl.service.ledger import Ledger, Outcome, make_failure
from mindspeed_rl.service.messages import write_sample_result
from mindspeed_rl.service.store import Request, Sampler
from mindspeed_rl.service.turns import FairQueue, Meter

_LOG = logging.getLogger(__name__)
#: samplers of the backend that are kept while nothing samples from them
_MAX_IDLE = 16
#: clients of one sampling session number their requests in blocks of this size
CLIENT_BLOCK = 1_000_000_000


@dataclass
class _Loaded:
    """A sampler of the backend.

    Attributes:
        making: makes it.
        num_users: samples that run.
    """

    making: asyncio.Future[str]
    num_users: int = 0


class Samplers:
    """Runs the samples of all sampling sessions.

    Args:
        ledger, backend, checkpoints, meter: as of `Lanes`.
        queue: turns between tenants; its width is in sequences.
    """

    def __init__(self, ledger: Ledger, backend: Backend, checkpoints: Checkpoints, queue: FairQueue, meter: Meter) -> None:
        self._ledger, self._backend, self._checkpoints = ledger, backend, checkpoints
        self._queue, self._meter = queue, meter
        self._offered = backend.capabilities()
        #: by path of the weights; None for the base's; least recently used first
        self._loaded: OrderedDict[str | None, _Loaded] = OrderedDict()
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._running: set[str] = set()

    def resume(self) -> None:
        """Start the samples that had not finished before a restart."""
        for request in list(self._ledger.store.requests.values()):
            if request.finished_s is None and request.kind == "asample":
                self.start(request)

    def start(self, request: Request) -> None:
        """Start a request that is on the disk."""
        task = asyncio.create_task(self._perform(request))
        self._tasks[request.id] = task
        task.add_done_callback(lambda _: self._tasks.pop(request.id, None))

    def describe(self, request: Request) -> tuple[str, str | None]:
        """Return the state of the queue for a request that has not finished, in the API's words, and why it waits."""
        if request.id in self._running:
            return "active", None
        return "paused_capacity", "other samples are computed"

    async def cancel(self, request: Request, reason: str) -> None:
        """Stop a request; its result is that it was."""
        task = self._tasks.get(request.id)
        await self._ledger.finish(request, make_failure(reason, "user"))
        if task is not None:
            task.cancel()

    async def _perform(self, request: Request) -> None:
        assert request.body is not None
        tenant = request.tenant
        REQUESTS.set((request.id,))
        try:
            if (text := describe_hangs(request)) is not None:
                raise CallError(text)
            asked = await asyncio.to_thread(self._read, request.body)
            sampler = self._ledger.store.samplers[request.target]
            async with self._queue.turn(tenant, request.cost, asked.call.num_samples):
                self._running.add(request.id)
                with self._meter.measure(tenant):
                    result = await self._use(sampler, lambda name: self._backend.sample(name, asked.call))
            payload = await asyncio.to_thread(
                write_sample_result,
                result,
                top_prompt=asked.top_prompt,
                top_sample=asked.top_sample,
                last_n=asked.last_n,
                targets=asked.targets,
            )
            used = {
                "prompt_tokens": len(asked.call.prompt),
                "sample_tokens": sum(len(sample.tokens) for sample in result.samples),
            }
            outcome = Outcome(payload, is_binary=True, used=used)
        except CallError as error:
            outcome = make_failure(str(error), "user")
        except Exception as error:  # noqa: BLE001 - the client decides about any failure of the backend
            _LOG.exception("request %s failed", request.id)
            outcome = make_failure(f"{type(error).__name__}: {error}", "server")
        finally:
            self._running.discard(request.id)
        await self._ledger.finish(request, outcome, device_s=self._meter.take(tenant))

    def _read(self, body: bytes) -> SampleRequest:
        asked = read_sample(read_body("asample", read_json(body)))
        asked.call.check(self._offered)
        return asked

    async def _use(self, sampler: Sampler, work: Callable[[str], Awaitable[Any]]) -> Any:
        """Return what `work` does with the sampler of the backend."""
        path = sampler.path
        if sampler.inflight_model:
            path = self._ledger.store.models[sampler.inflight_model].inflight
        loaded = self._loaded.get(path)
        if loaded is None:
            loaded = self._loaded[path] = _Loaded(asyncio.ensure_future(self._make(path)))
        self._loaded.move_to_end(path)
        loaded.num_users += 1
        try:
            try:
                # others may wait for the same one: a cancelled sample does not end its making
                name = await asyncio.shield(loaded.making)
            except Exception:
                if self._loaded.get(path) is loaded:
                    del self._loaded[path]
                raise
            return await work(name)
        finally:
            loaded.num_users -= 1
            await self._free_idle()

    async def _make(self, path: str | None) -> str:
        if path is None:
            return await self._backend.make_sampler(None)
        checkpoint = self._ledger.store.checkpoints.get(path)
        if checkpoint is None:
            raise CallError(f"the weights '{path}' are no longer kept; newer ones were saved, or they were deleted.")
        return await self._backend.make_sampler(self._checkpoints.get_folder(checkpoint))

    async def _free_idle(self) -> None:
        idle = [path for path, loaded in self._loaded.items() if not loaded.num_users and loaded.making.done()]
        for path in idle[: max(0, len(idle) - _MAX_IDLE)]:
            await self._free(path)

    async def _free(self, path: str | None) -> None:
        loaded = self._loaded.pop(path)
        if not loaded.making.cancelled() and loaded.making.exception() is None:
            await self._backend.drop_sampler(loaded.making.result())

    async def forget(self, path: str) -> None:
        """Free the sampler of weights that are removed, where nothing samples from it."""
        loaded = self._loaded.get(path)
        if loaded is not None and not loaded.num_users and loaded.making.done():
            await self._free(path)

    async def close(self) -> None:
        """Stop; what has not finished continues after a restart."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
