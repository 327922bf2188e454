"""Operations of models: in the order of each client's numbers, in turn between tenants, and again after a restart.

A model after a restart is its last snapshot and the finished operations since then, which run again: they give the same bits,
since a tenant's numbers depend on nothing else.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from mindspeed_rl.folders import remove_folder
from mindspeed_rl.service.backend import REQUESTS, Backend, CallError, Datum, LossCall, LossName, check_data, drop_seed
from mindspeed_rl.service.bodies import JsonObject, read_adam, read_body, read_json
from mindspeed_rl.service.checkpoints import Checkpoints, read_spec
from mindspeed_rl.service.hangs import describe_hangs
from mindspeed_rl.service.history import Histories
from mindspeed_rl.service.journal import Record
from mindspeed_rl.service.ledger import Ledger, Outcome, make_failure, make_result
from mindspeed_rl.service.messages import read_pass_request, write_pass_result
from mindspeed_rl.service.replies import RefusedError
from mindspeed_rl.service.store import Model, Request
from mindspeed_rl.service.turns import FairQueue, Meter

_LOG = logging.getLogger(__name__)
#: numbers that a client may be ahead of the next one that is expected
MAX_AHEAD = 100_000
#: a snapshot is written after as many steps of the optimizer, and after as many bytes of requests
_SNAPSHOT_STEPS, _SNAPSHOT_BYTES = 10, 32 << 20
#: bytes of a tenant's passes that have to run again after a restart: without a step there is no snapshot that replaces them
_MAX_KEPT_BYTES = 8 << 30
#: a model without work for so long makes room for one that waits, and between two looks for such a model
_IDLE_S, _LOOK_S = 30.0, 1.0
#: a busy model keeps its slot so long before it makes room for a key without one, or for another model of its key
_TURN_S = 60.0
#: end of the name of an export that is a model of its own, without an adapter
_MERGED = ".merged"
#: times that a restore is tried
_TRIES = 3
#: operations that change a model, and run again after a restart
_REDONE = ("forward_backward", "optim_step")


class _HangsError(Exception):
    """A request has ended the server too often to be tried again."""


@dataclass
class _Lane:
    """The operations of one model.

    Attributes:
        waiting: requests that have arrived and not begun, by number.
        task: works on them; None while the next one has not arrived.
        running: number of the request that runs; None for none, and -1 for what must not be interrupted either.
        waits_for_slot: all slots of the backend are taken.
        gives_way: it leaves its slot before the next operation, and waits for one again.
        idle_since_s: end of its last operation.
        loaded_since_s: when it got its slot.
        metrics: metrics of the passes since the last step: sums of losses and of tokens.
    """

    waiting: dict[int, Request] = field(default_factory=dict)
    task: asyncio.Task[None] | None = None
    running: int | None = None
    waits_for_slot: bool = False
    gives_way: bool = False
    idle_since_s: float = 0.0
    loaded_since_s: float = 0.0
    metrics: dict[str, float] = field(default_factory=dict)


class Lanes:
    """Runs the operations of all models.

    Args:
        ledger: tables.
        backend: does the work.
        checkpoints: folders.
        queue: turns between tenants.
        meter: seconds of the devices.
        histories: metrics of models.
    """

    def __init__(
        self, ledger: Ledger, backend: Backend, checkpoints: Checkpoints, queue: FairQueue, meter: Meter, histories: Histories
    ) -> None:
        self._ledger, self._backend, self._checkpoints = ledger, backend, checkpoints
        self._queue, self._meter, self._histories = queue, meter, histories
        self._offered = backend.capabilities()
        self._lanes: dict[str, _Lane] = {}
        #: models that have a slot of the backend, or are about to get their state there
        self._loaded: set[str] = set()
        #: models that wait for a slot, in the order of their arrival
        self._waiting: dict[str, Model] = {}
        self._slot_freed = asyncio.Event()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._operations: Mapping[str, Callable[[Request, Model], Awaitable[Outcome]]] = {
            "create_model": self._create,
            "load_weights": self._load,
            "forward_backward": self._pass,
            "forward": self._pass,
            "optim_step": self._step,
            "save_weights": self._save,
            "save_weights_for_sampler": self._save_for_sampler,
            "save_weights_external": self._export,
        }

    # ---- arrival

    def resume(self) -> None:
        """Continue after a restart: requests that had not finished run; models are restored when they are needed."""
        store = self._ledger.store
        for model in store.models.values():
            if model.done_seq < 0:  # it was being made
                model.is_alive = False
        for request in store.requests.values():
            if request.finished_s is None and request.kind in self._operations:
                self._lane(request.target).waiting[request.seq] = request
        for model_id in self._lanes:
            self._wake(model_id)

    def start(self, request: Request) -> None:
        """Take a request that is on the disk."""
        self._lane(request.target).waiting[request.seq] = request
        self._wake(request.target)

    def is_next(self, model: Model, seq: int) -> bool:
        """Return True for the number that the model waits for."""
        return seq == model.done_seq + 1

    def check_number(self, model: Model, seq: int) -> None:
        """Raise RefusedError for a number that cannot be one of a request."""
        if not 1 <= seq <= model.done_seq + MAX_AHEAD:
            raise RefusedError(400, f"seq_id {seq} of {model.id} is not from 1 to {model.done_seq + MAX_AHEAD}")

    def describe(self, request: Request) -> tuple[str, str | None]:
        """Return the state of the queue for a request that has not finished, in the API's words, and why it waits."""
        lane, model = self._lane(request.target), self._ledger.store.models[request.target]
        if lane.running == request.seq and lane.task is not None:
            return "active", None
        if request.seq == model.done_seq + 1:
            reason = f"all {self._offered.num_slots} models of this server are in use" if lane.waits_for_slot else None
            return "paused_capacity", reason or "requests of other API keys are computed"
        return "active", f"request {model.done_seq + 1} of this model comes first"

    def _lane(self, model_id: str) -> _Lane:
        return self._lanes.setdefault(model_id, _Lane())

    def _wake(self, model_id: str) -> None:
        lane = self._lane(model_id)
        if lane.task is None or lane.task.done():
            lane.task = asyncio.create_task(self._run(model_id, lane))
            self._tasks.add(lane.task)
            lane.task.add_done_callback(self._tasks.discard)

    # ---- work

    async def _run(self, model_id: str, lane: _Lane) -> None:
        model = self._ledger.store.models[model_id]
        while model.done_seq + 1 in lane.waiting:
            if lane.gives_way and model.is_alive and model_id in self._loaded:
                await self._leave(model, lane)
            if model.is_alive and model_id not in self._loaded:
                await self._take_slot(model, lane)
                if (problem := await self._try_to_restore(model)) is not None:
                    await self.end(model_id, f"its state cannot be restored: {problem}")
                    continue  # a request may have arrived meanwhile
            request = lane.waiting.pop(model.done_seq + 1)
            if request.finished_s is None:
                await self._perform(request, model, lane)
            lane.idle_since_s = time.monotonic()

    async def _try_to_restore(self, model: Model) -> Exception | None:
        """Restore a model; return why it cannot be."""
        problem: Exception | None = None
        for _ in range(_TRIES):
            try:
                async with self._queue.turn(model.tenant, 0):
                    await self._restore(model)
                return None
            except Exception as error:  # noqa: BLE001 - the model may be lost, and the server goes on
                _LOG.exception("model %s is not restored", model.id)
                problem = error
                await self._unload(model.id)
                self._loaded.add(model.id)  # it keeps the slot
        return problem

    async def _perform(self, request: Request, model: Model, lane: _Lane) -> None:
        snapshot, is_users = model.snapshot, False
        REQUESTS.set((request.id,))
        try:
            if (text := describe_hangs(request)) is not None:
                raise _HangsError(text)
            # before the turn: others can have theirs while it waits
            if request.kind in ("create_model", "load_weights"):
                await self._take_slot(model, lane)
            async with self._queue.turn(model.tenant, request.cost):
                lane.running = request.seq
                with self._meter.measure(model.tenant):
                    if request.kind not in ("create_model", "load_weights") and not model.is_alive:
                        raise CallError(f"model {model.id} has been unloaded; load one of its checkpoints.")
                    outcome = await self._operations[request.kind](request, model)
        except (CallError, RefusedError) as error:
            outcome, is_users = make_failure(str(error), "user"), True
        except _HangsError as error:  # not the backend's, so that a step which is not tried again does not run in a restore
            outcome = make_failure(str(error), "user")
        except Exception as error:  # noqa: BLE001 - the client decides about any failure of the backend
            _LOG.exception("%s of %s failed", request.kind, model.id)
            outcome = make_failure(f"{type(error).__name__}: {error}", "server")
            if model.id in self._loaded and model.done_seq >= 0:
                # what the backend has of it is unknown: the next operation restores what was promised
                await self._unload(model.id)
        finally:
            lane.running = None
            REQUESTS.set(())
        if not outcome.succeeded and model.done_seq < 0:  # it was to be made
            self._loaded.discard(model.id)
            outcome = Outcome(
                outcome.payload,
                succeeded=False,
                changes=(*outcome.changes, self._ledger.store.models.put(model.id, is_alive=False, is_failed=True)),
            )
            self._slot_freed.set()
        done = self._ledger.store.models.put(model.id, done_seq=request.seq, used_s=self._ledger.now_s())
        outcome = Outcome(outcome.payload, outcome.succeeded, outcome.is_binary, (*outcome.changes, done), outcome.used)
        # a step that was refused may have dropped the gradient, as it does when it runs again
        is_redone = outcome.succeeded or is_users and request.kind == "optim_step"
        keeps_body, device_s = request.kind in _REDONE and is_redone, self._meter.take(model.tenant)
        await self._ledger.finish(request, outcome, keeps_body=keeps_body, device_s=device_s)
        if model.snapshot != snapshot:
            await self._remove_snapshot(snapshot)
        if request.kind == "optim_step" and outcome.succeeded:
            await self._take_snapshot_where_due(model)

    async def _take_slot(self, model: Model, lane: _Lane) -> None:
        """Wait for a slot of the backend; a model without work for some time makes room, and comes back when it has some.

        After that time a busy one makes room too, see `_request_room`.
        """
        since_s = time.monotonic()
        self._waiting[model.id] = model
        try:
            while model.id not in self._loaded:
                if len(self._loaded) < self._offered.num_slots and self._find_next() == model.id:
                    self._loaded.add(model.id)
                    lane.loaded_since_s = time.monotonic()
                    return
                if len(self._loaded) >= self._offered.num_slots:
                    idle = [(id, self._lanes[id]) for id in self._loaded if self._is_idle(self._lanes[id])]
                    if idle:
                        await self._park(*min(idle, key=lambda item: item[1].idle_since_s))
                        continue
                    if time.monotonic() - since_s > _IDLE_S:
                        self._request_room(model.tenant)
                self._slot_freed.clear()
                lane.waits_for_slot = True
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(self._slot_freed.wait(), _LOOK_S)
        finally:
            lane.waits_for_slot = False
            del self._waiting[model.id]
            self._slot_freed.set()  # another one may be next now

    def _count_slots(self) -> Counter[str]:
        """Return the slots of each tenant."""
        return Counter(self._ledger.store.models[id].tenant for id in self._loaded)

    def _find_next(self) -> str:
        """Return the model that takes the next slot: of the tenant with the fewest, the one that has waited longest."""
        counts = self._count_slots()
        return min(self._waiting, key=lambda id: counts[self._waiting[id].tenant])

    def _request_room(self, tenant: str) -> None:
        """Let a busy model give way to one of this tenant, which has waited.

        It is one of the tenant with the most slots, where that has at least two more than this tenant. Else, as there are more
        keys or models than slots, it is the one that has had its slot for longest, once its turn is over: of this tenant, or of
        any where this one has no slot.
        """
        counts = self._count_slots()
        if not counts or any(self._lanes[id].gives_way for id in self._loaded):
            return
        (most, count), models, now_s = counts.most_common(1)[0], self._ledger.store.models, time.monotonic()
        if count - counts[tenant] >= 2:
            candidates = [(self._lanes[id].idle_since_s, id) for id in self._loaded if models[id].tenant == most]
        else:
            owners = {tenant} if counts[tenant] else set(counts)
            held = [(self._lanes[id].loaded_since_s, id) for id in self._loaded if models[id].tenant in owners]
            candidates = [(since_s, id) for since_s, id in held if now_s - since_s > _TURN_S]
        if candidates:
            self._lanes[min(candidates)[1]].gives_way = True

    @staticmethod
    def _is_idle(lane: _Lane) -> bool:
        is_done = lane.task is None or lane.task.done()
        return is_done and not lane.waiting and time.monotonic() - lane.idle_since_s > _IDLE_S

    async def _park(self, model_id: str, lane: _Lane) -> None:
        """Take a model out of the backend; it is restored with its next operation."""
        model = self._ledger.store.models[model_id]
        lane.idle_since_s = math.inf  # nothing else parks it meanwhile
        parking = lane.task = asyncio.create_task(self._leave(model, lane))
        self._tasks.add(parking)
        parking.add_done_callback(self._tasks.discard)
        await asyncio.shield(parking)
        self._wake(model_id)  # an operation may have arrived

    async def _leave(self, model: Model, lane: _Lane) -> None:
        lane.running = -1
        try:
            redone = self._list_redone(model)
            if redone and redone[-1].kind == "optim_step" and redone[-1].succeeded:  # no gradient waits
                await self._take_snapshot(model)
            await self._unload(model.id)
            self._slot_freed.set()
        finally:
            lane.running, lane.gives_way = None, False

    async def _unload(self, model_id: str) -> None:
        with contextlib.suppress(Exception):  # it may not be there
            await self._backend.unload(model_id)
        self._loaded.discard(model_id)

    async def _create(self, request: Request, model: Model) -> Outcome:
        await self._backend.create_model(model.id, read_spec(model.spec))
        change = self._ledger.store.models.put(model.id, is_alive=True)
        return Outcome(make_result(model_id=model.id, type="create_model").payload, changes=(change,))

    async def _load(self, request: Request, model: Model) -> Outcome:
        body = self._read(request)
        checkpoint = self._checkpoints.find(model.tenant, body["path"], ("training",))
        if model.done_seq >= 0 and drop_seed(read_spec(checkpoint.spec)) != drop_seed(read_spec(model.spec)):
            raise CallError(f"'{body['path']}' has the adapter {checkpoint.spec}, and model {model.id} has {model.spec}.")
        folder = self._checkpoints.get_folder(checkpoint)
        await self._backend.load_state(model.id, folder, with_optimizer=body["optimizer"])
        change = self._ledger.store.models.put(model.id, is_alive=True, spec=checkpoint.spec)
        snapshot = await self._write_snapshot(model, request.seq)
        result = make_result(path=body["path"], model_id=model.id, type="load_weights")
        return Outcome(result.payload, changes=(change, snapshot))

    async def _pass(self, request: Request, model: Model) -> Outcome:
        data, loss = await asyncio.to_thread(self._read_pass, request)
        forward_only = request.kind == "forward"
        kept = self._ledger.kept_bytes[model.tenant]
        if not forward_only and kept > _MAX_KEPT_BYTES:
            text = f"passes of this API key with {kept} bytes wait for an optim_step, and at most {_MAX_KEPT_BYTES} are kept"
            raise CallError(f"forward_backward: {text}; make a step, and send it again.")
        result = await self._backend.forward_backward(model.id, data, loss, forward_only=forward_only)
        if not forward_only:
            metrics = self._lane(model.id).metrics
            for name, value in (("loss:sum", result.metrics.get("loss:sum", 0.0)), ("tokens", float(request.cost))):
                metrics[name] = metrics.get(name, 0.0) + value
        payload = await asyncio.to_thread(write_pass_result, result)
        return Outcome(payload, is_binary=True, used={"train_tokens": request.cost})

    def _read_pass(self, request: Request) -> tuple[list[Datum], LossCall]:
        """Return data and loss of a pass.

        Raises:
            CallError: the backend cannot compute them.
        """
        assert request.body is not None
        parsed = read_pass_request(request.body)
        loss = LossCall(cast("LossName", parsed.loss_fn), parsed.config)  # which refuses other names
        data = parsed.read_data()
        check_data(data, loss, self._offered)
        return data, loss

    async def _step(self, request: Request, model: Model) -> Outcome:
        params = read_adam(self._read(request))
        metrics = await self._backend.optim_step(model.id, params)
        change = self._ledger.store.models.put(model.id, num_steps=model.num_steps + 1)
        passes = self._lane(model.id).metrics
        self._histories.add_step(model.id, model.num_steps, {**passes, **metrics, "learning_rate": params.learning_rate})
        passes.clear()
        finite = {name: value for name, value in metrics.items() if math.isfinite(value)}
        return Outcome(make_result(metrics=finite, type="optim_step").payload, changes=(change,))

    async def _save(self, request: Request, model: Model) -> Outcome:
        body = self._read(request)
        name, ttl_s = body["path"] or f"{request.seq:06d}", body["ttl_seconds"]
        path = self._checkpoints.check_new(model.tenant, model.id, "training", name, ttl_s, overwrite=body["overwrite"])
        folder = self._checkpoints.new_folder()
        await self._backend.save_state(model.id, folder, with_optimizer=True)
        changes = self._checkpoints.add(model, path, "training", folder, ttl_s=ttl_s, user_metadata=body["user_metadata"])
        return Outcome(make_result(path=path, type="save_weights").payload, changes=tuple(changes))

    async def _save_for_sampler(self, request: Request, model: Model) -> Outcome:
        body = self._read(request)
        name, number, kind = body["path"], body["sampling_session_seq_id"], body["kind"]
        if kind not in ("snapshot", "inflight"):
            raise CallError(f"kind: '{kind}' is not offered; it can be snapshot or inflight.")
        if (name is None) == (number is None):
            raise CallError("save_weights_for_sampler takes either path or sampling_session_seq_id.")
        if name is not None:
            path = self._checkpoints.check_new(model.tenant, model.id, "sampler", name, body["ttl_seconds"])
        else:
            path = f"tinker://{model.id}/ephemeral/{request.seq:06d}"
        folder = self._checkpoints.new_folder()
        await self._backend.save_state(model.id, folder, with_optimizer=False)
        changes = self._checkpoints.add(
            model,
            path,
            "ephemeral" if name is None else "sampler",
            folder,
            ttl_s=None if name is None else body["ttl_seconds"],
            user_metadata=body["user_metadata"],
        )
        if kind == "inflight":
            changes.append(self._ledger.store.models.put(model.id, inflight=path))
        if name is not None:
            return Outcome(make_result(path=path, type="save_weights_for_sampler").payload, changes=tuple(changes))
        sampler_id = f"{model.session_id}:sample:{number}"
        if sampler_id in self._ledger.store.samplers:
            raise CallError(f"sampling_session_seq_id: {number} is a sampling session of this session already.")
        sampler = self._ledger.store.samplers.put(
            sampler_id,
            tenant=model.tenant,
            session_id=model.session_id,
            path=path,
            inflight_model=model.id if kind == "inflight" else "",
        )
        result = make_result(sampling_session_id=sampler_id, type="save_weights_for_sampler")
        return Outcome(result.payload, changes=(*changes, sampler))

    async def _export(self, request: Request, model: Model) -> Outcome:
        body = self._read(request)
        if body["age_encryption_recipients"]:
            raise CallError("age_encryption_recipients is not offered; encrypt the files after their download.")
        name, ttl_s = body["path"], body["ttl_seconds"]
        path = self._checkpoints.check_new(model.tenant, model.id, "external", name, ttl_s)
        folder = self._checkpoints.new_folder()
        export = self._backend.export_merged if name.endswith(_MERGED) else self._backend.export_adapter
        await export(model.id, folder)
        changes = self._checkpoints.add(model, path, "external", folder, ttl_s=ttl_s)
        size = self._ledger.store.checkpoints[path].num_bytes
        return Outcome(make_result(path=path, size_bytes=size, type="save_weights_external").payload, changes=tuple(changes))

    @staticmethod
    def _read(request: Request) -> JsonObject:
        assert request.body is not None
        return read_body(request.kind, read_json(request.body))

    # ---- snapshots

    def _list_redone(self, model: Model) -> list[Request]:
        rows = (row for row in self._ledger.list_finished(model.id, 0) if row.kind in _REDONE)
        return sorted((row for row in rows if self._ledger.is_redone(row)), key=lambda row: row.seq)

    async def _restore(self, model: Model) -> None:
        if model.snapshot:
            folder = self._checkpoints.get_folder_by_name(model.snapshot)
            await self._backend.load_state(model.id, folder, with_optimizer=True)
        else:
            await self._backend.create_model(model.id, read_spec(model.spec))
        for request in self._list_redone(model):
            if request.kind == "optim_step":
                with contextlib.suppress(*(() if request.succeeded else (CallError,))):
                    await self._backend.optim_step(model.id, read_adam(self._read(request)))
                continue
            data, loss = await asyncio.to_thread(self._read_pass, request)
            await self._backend.forward_backward(model.id, data, loss, forward_only=False)

    async def _take_snapshot_where_due(self, model: Model) -> None:
        redone = self._list_redone(model)
        steps = sum(request.kind == "optim_step" for request in redone)
        if steps < _SNAPSHOT_STEPS and sum(len(request.body or b"") for request in redone) < _SNAPSHOT_BYTES:
            return
        await self._take_snapshot(model)

    async def _take_snapshot(self, model: Model) -> None:
        old = model.snapshot
        try:
            change = await self._write_snapshot(model, model.done_seq)
        except Exception:  # noqa: BLE001 - a full disk: more runs again after a restart, and nothing is lost
            _LOG.exception("no snapshot of model %s", model.id)
            return
        await self._ledger.journal.append(change)
        await self._remove_snapshot(old)

    async def _remove_snapshot(self, name: str) -> None:
        """Remove the folder of a snapshot that no table names any more; "" is none."""
        if name:
            await asyncio.to_thread(remove_folder, self._checkpoints.get_folder_by_name(name))

    async def _write_snapshot(self, model: Model, seq: int) -> Record:
        folder: Path = self._checkpoints.new_folder()
        await self._backend.save_state(model.id, folder, with_optimizer=True)
        return self._ledger.store.models.put(model.id, snapshot=folder.name, snapshot_seq=seq)

    # ---- end

    async def end(self, model_id: str, reason: str) -> None:
        """Fail what waits, wait for what runs, and free the slot."""
        lane, model = self._lane(model_id), self._ledger.store.models[model_id]
        waiting, lane.waiting = list(lane.waiting.values()), {}
        failure = make_failure(f"model {model_id}: {reason}", "user")
        for request in waiting:
            await self._ledger.finish(request, failure)
        task = lane.task
        if task is not None and not task.done() and task is not asyncio.current_task():
            if lane.running is None:
                task.cancel()  # it waits for its turn, or for a slot
            await asyncio.wait([task])
        unfinished = [row for row in self._ledger.store.requests.values() if row.target == model_id and row.finished_s is None]
        for request in unfinished:
            await self._ledger.finish(request, failure)
        if ended := [request.seq for request in (*waiting, *unfinished)]:
            # later requests would otherwise wait for these numbers for ever
            done_seq, is_failed = max(model.done_seq, *ended), model.is_failed or model.done_seq < 0
            await self._ledger.journal.append(
                self._ledger.store.models.put(model_id, done_seq=done_seq, is_failed=is_failed)
            )
        if model_id in self._loaded:  # also before it was made: it may have waited for its turn with a slot
            await self._unload(model_id)
        if model.is_alive:
            snapshot = model.snapshot
            await self._ledger.journal.append(self._ledger.store.models.put(model_id, is_alive=False, snapshot=""))
            await self._remove_snapshot(snapshot)
        self._slot_freed.set()
        is_done = lane.task is None or lane.task.done()
        if is_done and not lane.waiting and model_id not in self._loaded:  # a checkpoint may have been loaded meanwhile
            self._lanes.pop(model_id, None)

    async def close(self) -> None:
        """Stop; what has not finished continues after a restart."""
        for task in list(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
