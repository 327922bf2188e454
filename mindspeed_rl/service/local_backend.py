"""The `Backend` of a server: a thread that owns the engines makes its calls one at a time, and samples in between.

Training calls run in the order in which they come. Between two of them the thread makes a step of all samples, so that neither
waits for the other's queue to be empty.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from mindspeed_rl.config import RunConfig
from mindspeed_rl.service.backend import (
    REQUESTS,
    AdamParams,
    AdapterSpec,
    BrokenBackendError,
    Capabilities,
    Datum,
    LossCall,
    PassCall,
    PassResult,
    SampleCall,
    SampleResult,
)
from mindspeed_rl.service.model_folder import ModelRecord
from mindspeed_rl.service.opening import open_tenants

if TYPE_CHECKING:
    from mindspeed_rl.service.call_watch import WatchedTenants
    from mindspeed_rl.service.rank_group import TenantGroup
    from mindspeed_rl.service.tenants import Tenants

    #: the models, of this process or of the processes of several devices
    Models = Tenants | WatchedTenants | TenantGroup

_LOG = logging.getLogger(__name__)
_Result = TypeVar("_Result")
#: between two looks at whether the call that the end waits for has passed its limit
_LOOK_S = 0.2


@dataclass(frozen=True)
class _Work:
    """A function of the engines, and the future of its result.

    Attributes:
        is_short: it runs before training calls that wait.
        model_id: it concerns only this model; "" where it may concern any.
        call: a pass, in place of a function.
        requests: ids of those that it is for.
    """

    function: Callable[[Models], object] | None
    future: Future[Any]
    is_short: bool = False
    model_id: str = ""
    call: PassCall | None = None
    requests: tuple[str, ...] = field(default_factory=REQUESTS.get)


@dataclass
class _Sampling:
    """Calls in the rollout engine.

    Attributes:
        futures: result of each call, by its name in the engine.
        samplers: sampler of each.
        requests: requests of each.
        drops: samplers that are dropped once they have no call.
    """

    futures: dict[str, Future[SampleResult]] = field(default_factory=dict)
    samplers: dict[str, str] = field(default_factory=dict)
    requests: dict[str, tuple[str, ...]] = field(default_factory=dict)
    drops: dict[str, Future[None]] = field(default_factory=dict)


class LocalBackend:
    """A `Backend` on engines of this process. `open` builds one; each is used until `close`."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[_Work | None] = queue.SimpleQueue()
        self._sampling = _Sampling()
        self._capabilities: Capabilities | None = None
        self._thread = threading.Thread(target=self._run, name="service-engines", daemon=True)
        self._opened: Future[Capabilities] = Future()
        self._config: RunConfig | None = None
        self._num_nodes, self._is_watched = 1, False
        self._has_ended = self._has_hung = False
        self._failed: Callable[[BrokenBackendError], None] | None = None
        self._broken: BrokenBackendError | None = None
        #: calls that the thread makes
        self._running: list[Future[Any]] = []

    @classmethod
    def open(cls, cfg: RunConfig, num_nodes: int = 1, *, is_watched: bool = False) -> LocalBackend:
        """Load the base and build the engines of a run file with `serve_config`; takes seconds to minutes.

        Args:
            cfg: the run file.
            num_nodes: machines that the devices are spread over.
            is_watched: of a server: a call that does not end breaks the backend, and the process is killed if it then does
                not end.

        Raises:
            ValueError: the run file is wrong; all violations are named.
            BrokenBackendError: the load did not end.
        """
        backend = cls()
        backend._config, backend._num_nodes, backend._is_watched = cfg, num_nodes, is_watched
        backend._thread.start()
        backend._capabilities = backend._opened.result()
        return backend

    # ------------------------------------------------------------------ the thread

    def _run(self) -> None:
        assert self._config is not None
        try:
            tenants = open_tenants(self._config, self._num_nodes, self._give_up if self._is_watched else None)
        except BaseException as error:  # noqa: BLE001  (raised where `open` waits)
            self._opened.set_exception(error)
            return
        if self._has_hung:  # nobody waits for it any more
            tenants.close()
            return
        self._opened.set_result(tenants.capabilities)
        waiting: list[_Work] = []
        try:
            self._work(tenants, waiting)
        except BrokenBackendError as error:
            self._break(error, waiting)
        except Exception as error:  # noqa: BLE001  (nothing else ends the calls that wait for this thread)
            _LOG.exception("the thread of the engines failed")
            self._break(BrokenBackendError(f"the thread of the engines failed: {type(error).__name__}: {error}"), waiting)
        else:
            for work in waiting:
                work.future.cancel()
            for future in self._sampling.futures.values():
                future.cancel()
        finally:
            tenants.close()

    def _work(self, tenants: Models, waiting: list[_Work]) -> None:
        """Make calls until the end, or until one has taken so long that the backend was given up."""
        while self._broken is None:
            is_idle = not waiting and not tenants.is_sampling
            if self._take(waiting, waits=is_idle):
                return
            if waiting:
                passes = _take_passes(waiting)
                work = passes or [waiting.pop(0)]
                self._running = [each.future for each in work]
                REQUESTS.set(tuple(request for each in work for request in each.requests))
                if passes:
                    _do_passes(passes, tenants)
                else:
                    _do(work[0], tenants)
            if self._broken is None and tenants.is_sampling:
                self._step(tenants)
            if self._broken is None:
                self._drop_samplers(tenants)

    def _break(self, error: BrokenBackendError, waiting: list[_Work]) -> None:
        """Tell the owner that nothing works any more; without one the calls that wait fail."""
        self._broken, self._has_ended = error, True
        if self._failed is not None:
            self._failed(error)
            return
        self._take(waiting, waits=False)
        futures = [*self._running, *(work.future for work in waiting), *self._sampling.futures.values()]
        for future in (future for future in futures if not future.done()):
            future.set_exception(error)

    def _give_up(self, error: BrokenBackendError) -> None:
        """Take the thread for lost, in another one: a call does not end."""
        self._has_hung = True
        if self._opened.done():
            self._break(error, [])
        else:
            self._opened.set_exception(error)

    def watch(self, failed: Callable[[BrokenBackendError], None]) -> None:
        """See `Backend.watch`."""
        self._failed = failed

    def _take(self, waiting: list[_Work], *, waits: bool) -> bool:
        """Move what was requested to `waiting`, short work to its front; return whether the thread ends."""
        num_short = 0
        while True:
            try:
                work = self._queue.get(block=waits)
            except queue.Empty:
                return False
            waits = False
            if work is None:
                return True
            if work.is_short:
                waiting.insert(num_short, work)
                num_short += 1
            else:
                waiting.append(work)

    def _step(self, tenants: Models) -> None:
        """Make a step of all samples; a failure fails every call in the engine."""
        sampling = self._sampling
        REQUESTS.set(tuple(request for requests in sampling.requests.values() for request in requests))
        try:
            for name, result in tenants.step_sampling():
                del sampling.samplers[name], sampling.requests[name]
                future = sampling.futures.pop(name)
                if isinstance(result, Exception):
                    future.set_exception(result)
                else:
                    future.set_result(result)
        except BrokenBackendError:
            raise
        except Exception as error:  # noqa: BLE001  (raised where the calls wait)
            for name, future in list(sampling.futures.items()):
                tenants.abort_sampling(name)
                future.set_exception(error)
            sampling.futures.clear()
            sampling.samplers.clear()
            sampling.requests.clear()

    def _drop_samplers(self, tenants: Models) -> None:
        for sampler in [name for name in self._sampling.drops if name not in self._sampling.samplers.values()]:
            self._running = [self._sampling.drops.pop(sampler)]
            REQUESTS.set(())
            _do(_Work(lambda tenants, sampler=sampler: tenants.drop_sampler(sampler), self._running[0]), tenants)

    # ------------------------------------------------------------------ calls

    def submit(
        self, function: Callable[[Models], _Result], *, is_short: bool = False, model_id: str = ""
    ) -> Future[_Result]:
        """Return the future of a function that the thread calls; one that is cancelled before it began is not called.

        Args:
            is_short: it runs before the training calls that wait.
            model_id: it concerns only this model, so that passes of others need not wait for it; "" where it may concern any.
        """
        future: Future[_Result] = Future()
        self._put(_Work(function, future, is_short, model_id))
        return future

    def _put(self, work: _Work) -> None:
        if self._broken is not None and self._failed is not None:
            # an error would be the result of a request, which is to run after the restart of the server
            raise asyncio.CancelledError(str(self._broken))
        if self._has_ended:
            raise self._broken or RuntimeError("the backend is closed")
        self._queue.put(work)

    async def _call(
        self, function: Callable[[Models], _Result], *, is_short: bool = False, model_id: str = ""
    ) -> _Result:
        return await asyncio.wrap_future(self.submit(function, is_short=is_short, model_id=model_id))

    def capabilities(self) -> Capabilities:
        """See `Backend.capabilities`."""
        assert self._capabilities is not None  # `open` has returned
        return self._capabilities

    async def create_model(self, model_id: str, spec: AdapterSpec | None) -> None:
        """See `Backend.create_model`."""
        await self._call(lambda tenants: tenants.create_model(model_id, spec))

    async def forward_backward(self, model_id: str, data: Sequence[Datum], loss: LossCall, *, forward_only: bool) -> PassResult:
        """See `Backend.forward_backward`."""
        future: Future[PassResult] = Future()
        self._put(_Work(None, future, model_id=model_id, call=PassCall(model_id, data, loss, forward_only)))
        return await asyncio.wrap_future(future)

    async def optim_step(self, model_id: str, params: AdamParams) -> Mapping[str, float]:
        """See `Backend.optim_step`."""
        return await self._call(lambda tenants: tenants.optim_step(model_id, params), model_id=model_id)

    async def save_state(self, model_id: str, folder: Path, *, with_optimizer: bool) -> None:
        """See `Backend.save_state`."""
        await self._call(
            lambda tenants: tenants.save_state(model_id, folder, with_optimizer=with_optimizer), model_id=model_id
        )

    async def load_state(self, model_id: str, folder: Path, *, with_optimizer: bool) -> None:
        """See `Backend.load_state`."""
        await self._call(lambda tenants: tenants.load_state(model_id, folder, with_optimizer=with_optimizer))

    def read_spec(self, folder: Path) -> AdapterSpec | None:
        """See `Backend.read_spec`."""
        return ModelRecord.read(folder, self.capabilities().base_model).spec

    async def make_sampler(self, source: str | Path | None) -> str:
        """See `Backend.make_sampler`."""
        return await self._call(lambda tenants: tenants.make_sampler(source))

    async def sample(self, sampler: str, call: SampleCall) -> SampleResult:
        """See `Backend.sample`."""
        result: Future[SampleResult] = Future()
        result.set_running_or_notify_cancel()
        requests = REQUESTS.get()

        def start(tenants: Models) -> str:
            name = tenants.start_sampling(sampler, call)
            self._sampling.futures[name], self._sampling.samplers[name] = result, sampler
            self._sampling.requests[name] = requests
            return name

        name = await self._call(start, is_short=True)
        try:
            return await asyncio.wrap_future(result)
        except asyncio.CancelledError:
            self._queue.put(_Work(lambda tenants: self._abort(tenants, name), Future(), is_short=True))
            raise

    def _abort(self, tenants: Models, name: str) -> None:
        if self._sampling.futures.pop(name, None) is not None:
            del self._sampling.samplers[name], self._sampling.requests[name]
            tenants.abort_sampling(name)

    async def drop_sampler(self, sampler: str) -> None:
        """See `Backend.drop_sampler`."""
        future: Future[None] = Future()
        await self._call(lambda _: self._sampling.drops.update({sampler: future}), is_short=True)
        await asyncio.wrap_future(future)

    async def unload(self, model_id: str) -> None:
        """See `Backend.unload`."""
        await self._call(lambda tenants: tenants.unload(model_id))

    async def export_adapter(self, source: str | Path, folder: Path) -> None:
        """See `Backend.export_adapter`."""
        await self._call(lambda tenants: tenants.export_adapter(source, folder))

    async def export_merged(self, model_id: str, folder: Path) -> None:
        """See `Backend.export_merged`."""
        await self._call(lambda tenants: tenants.export_merged(model_id, folder))

    async def close(self) -> None:
        """See `Backend.close`."""
        await asyncio.to_thread(self.stop)

    def stop(self) -> None:
        """End the thread, after the call that it makes; one that hangs ends with the process."""
        self._has_ended = True
        self._queue.put(None)
        while self._thread.is_alive() and not self._has_hung:
            self._thread.join(_LOOK_S)


def _take_passes(waiting: list[_Work]) -> list[_Work]:
    """Take the passes that can be computed with the first work, where that is one: the next pass of each other model.

    Work of a model stays in its order: what waits behind other work of its model, or of any, stays there.
    """
    first = waiting[0].call
    if first is None:
        return []
    taken, kept, blocked = list[_Work](), list[_Work](), set[str]()
    for index, work in enumerate(waiting):
        if not work.model_id:
            kept += waiting[index:]
            break
        if work.call is not None and work.model_id not in blocked and work.call.forward_only == first.forward_only:
            taken.append(work)
        else:
            kept.append(work)
        blocked.add(work.model_id)
    waiting[:] = kept
    return taken


def _do_passes(passes: Sequence[_Work], tenants: Models) -> None:
    """Compute passes together, without those whose callers have gone."""
    work = [each for each in passes if each.future.set_running_or_notify_cancel()]
    try:
        results = tenants.run_passes([each.call for each in work if each.call is not None]) if work else []
    except BaseException as error:  # noqa: BLE001  (raised where the calls wait)
        _fail([each.future for each in work], error)
        return
    for each, result in zip(work, results, strict=True):
        if each.future.done():
            continue
        if isinstance(result, Exception):
            each.future.set_exception(result)
        else:
            each.future.set_result(result)


def _do(work: _Work, tenants: Models) -> None:
    """Call the function, unless the caller has gone."""
    if not work.future.set_running_or_notify_cancel():
        return
    assert work.function is not None  # passes are computed in another way
    try:
        result: Any = work.function(tenants)
    except BaseException as error:  # noqa: BLE001  (raised where the call waits)
        _fail([work.future], error)
        return
    if not work.future.done():  # it may have taken so long that its caller was told of an error
        work.future.set_result(result)


def _fail(futures: Sequence[Future[Any]], error: BaseException) -> None:
    """Let calls fail with an error; one after which nothing works is raised, and the calls have no result."""
    if isinstance(error, BrokenBackendError):
        raise error
    for future in futures:
        if not future.done():
            future.set_exception(error)
