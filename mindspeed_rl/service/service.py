"""The calls of the API, for a tenant that is known: sessions, models, samples, results, checkpoints."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import secrets
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from mindspeed_rl.config.keys.serve import MAX_PASSES
from mindspeed_rl.service import messages
from mindspeed_rl.service.backend import Backend, CallError
from mindspeed_rl.service.bodies import (
    FUTURES_TARGET,
    JsonObject,
    check_optimizer,
    read_adapter,
    read_body,
    read_form,
    read_prompt,
)
from mindspeed_rl.service.checkpoints import Checkpoints, write_spec
from mindspeed_rl.service.hangs import count_hangs
from mindspeed_rl.service.history import Histories
from mindspeed_rl.service.journal import SYNC_LIMIT_S
from mindspeed_rl.service.lanes import Lanes
from mindspeed_rl.service.ledger import Ledger, Limits, make_result
from mindspeed_rl.service.replies import RefusedError, write_time
from mindspeed_rl.service.samplers import CLIENT_BLOCK, Samplers
from mindspeed_rl.service.store import SEGMENTS, Checkpoint, Model, Request, Sampler, Session
from mindspeed_rl.service.turns import FairQueue, Meter

_LOG = logging.getLogger(__name__)
#: a call for a result waits so long; the SDK gives up after 45 s
_LONG_POLL_S = 25.0
#: sequences that are given to the backend at the same time
_MAX_SEQUENCES = 256
#: between two looks at what has expired
_SWEEP_S = 5.0
#: a session that has made nothing is forgotten so long after its end
_EMPTY_S = 86400.0
#: rows of one answer
_MAX_ROWS = 1000
#: a sample without max_tokens counts as so many, at most
_ASSUMED_TOKENS = 1024
_NO_ACCESS_TOKEN = "weights_access_token is not offered: an API key reads its own checkpoints"


def _digest(*parts: bytes) -> bytes:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.digest()


class Service:
    """All calls.

    Args:
        backend: does the work.
        folder: journal, checkpoints and metrics; one server at a time.
        limits: what a key may use.
        failed: called where the journal cannot be written: the server has to end.
        has_local_clients: clients are on this machine, and can read the tokenizer in the folder of the base.
        price: price of an hour of the devices; 0 where none is known.
        now_s: seconds since the epoch.
        sync_limit_s: seconds in which the disk has to take records of the journal.
    """

    def __init__(
        self,
        backend: Backend,
        folder: Path,
        limits: Limits,
        failed: Callable[[OSError], None],
        *,
        has_local_clients: bool = True,
        price: float = 0.0,
        now_s: Callable[[], float] = time.time,
        sync_limit_s: float = SYNC_LIMIT_S,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self.backend, self._has_local_clients, self._price = backend, has_local_clients, price
        self.offered = backend.capabilities()
        self.ledger = Ledger(folder, limits, failed, now_s, sync_limit_s=sync_limit_s)
        self.store = self.ledger.store
        self.checkpoints = Checkpoints(folder / "checkpoints", self.ledger)
        self._histories = Histories(folder / "metrics")
        passes = FairQueue(min(MAX_PASSES, max(1, self.offered.num_slots)))
        meter = Meter()
        self.lanes = Lanes(self.ledger, backend, self.checkpoints, passes, meter, self._histories)
        self.samplers = Samplers(self.ledger, backend, self.checkpoints, FairQueue(_MAX_SEQUENCES), meter)
        self._heartbeats = {id: now_s() for id in self.store.sessions}
        self._written_accounts: dict[str, int] = {}
        self._sweeping: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        """Continue after a restart, and look at what expires."""
        self.checkpoints.remove_orphans()
        count_hangs(self._folder, self.ledger)
        self.lanes.resume()
        self.samplers.resume()
        for request in list(self.store.requests.values()):
            if request.finished_s is None and request.kind == "unload_model":
                self._start_unload(request)
        self._sweeping = asyncio.create_task(self._sweep_for_ever())

    async def close(self) -> None:
        """Stop: what has not finished continues after a restart."""
        if self._sweeping is not None:
            self._sweeping.cancel()
            await asyncio.wait([self._sweeping, *self._tasks])
        await self.lanes.close()
        await self.samplers.close()
        if not self.ledger.journal.has_failed:  # nor can they be
            self._write_accounts()
        self.ledger.close()

    # ---- the server

    def get_capabilities(self) -> JsonObject:
        """Return the models that are offered, by each name that they have."""
        names = [self.offered.base_model, *([str(self.offered.base_model_folder)] if self._has_local_clients else [])]
        model = {"max_context_length": self.offered.max_tokens, "trainable": True, "sampleable": True}
        return {"supported_models": [{"model_name": name, **model} for name in dict.fromkeys(names)]}

    def _check_base(self, name: str | None) -> str:
        """Return the name that a client uses for the base.

        Raises:
            CallError: it is another model.
        """
        names = [row["model_name"] for row in self.get_capabilities()["supported_models"]]
        if name is not None and name not in names:
            raise CallError(f"base_model: '{name}' is not served here; it can be {' or '.join(names)}.")
        return name or names[0]

    # ---- sessions

    async def create_session(self, tenant: str, body: JsonObject) -> JsonObject:
        """Create a session."""
        asked = read_body("create_session", body)
        limits = self.ledger.limits
        open_of = Counter(row.tenant for row in self.store.sessions.values() if not row.ended)
        if open_of[tenant] >= limits.max_sessions_per_key:
            raise RefusedError(429, f"{open_of[tenant]} sessions of this API key are open, its limit; finish one, or wait")
        if (num_open := open_of.total()) >= limits.max_sessions:
            raise RefusedError(429, f"{num_open} sessions are open, the limit of this server; finish one, or wait")
        id = secrets.token_hex(12)
        change = self.store.sessions.put(
            id,
            tenant=tenant,
            user_metadata=asked["user_metadata"],
            display_name=asked["display_name"],
            tags=list(asked["tags"]),
            project_id=asked["project_id"],
            created_s=self.ledger.now_s(),
        )
        self._heartbeats[id] = self.ledger.now_s()
        await self.ledger.journal.append(change)
        return {"type": "create_session", "session_id": id}

    async def heartbeat(self, tenant: str, body: JsonObject) -> JsonObject:
        """Keep a session open."""
        session = self.ledger.find_session(tenant, read_body("session_heartbeat", body)["session_id"])
        self._heartbeats[session.id] = self.ledger.now_s()
        return {"type": "session_heartbeat"}

    async def finish_session(self, tenant: str, id: str, body: JsonObject) -> JsonObject:
        """End a session; the first reason stays."""
        asked = read_body("finish", body)
        reason = asked["reason"].get("type")
        if reason not in ("success", "errored", "interrupted"):
            raise CallError(f"reason.type is {reason!r}; it can be success, errored or interrupted.")
        session = self.ledger.find(self.store.sessions, "session", tenant, id)
        if not session.ended:
            await self._end_session(session, f"its client has finished it ({reason})")
        return {}

    async def _end_session(self, session: Session, reason: str) -> None:
        change = self.store.sessions.put(session.id, ended=reason, ended_s=self.ledger.now_s())
        await self.ledger.journal.append(change)
        for model in list(self.store.models.values()):
            if model.session_id == session.id:
                await self.lanes.end(model.id, f"session {session.id} has ended: {reason}")
        for request in list(self.store.requests.values()):
            if request.session_id == session.id and request.finished_s is None and request.kind == "asample":
                await self.samplers.cancel(request, f"session {session.id} has ended: {reason}")

    def list_sessions(self, tenant: str, limit: int, offset: int) -> JsonObject:
        """Return the ids of sessions, newest first."""
        rows = [row for row in self.store.sessions.values() if row.tenant == tenant]
        rows.sort(key=lambda row: row.created_s, reverse=True)
        return {"sessions": [row.id for row in rows[offset : offset + limit]]}

    def get_session(self, tenant: str, id: str) -> JsonObject:
        """Return what a session has made."""
        session = self.ledger.find(self.store.sessions, "session", tenant, id)
        return {
            "training_run_ids": [row.id for row in self.store.models.values() if row.session_id == id],
            "sampler_ids": [row.id for row in self.store.samplers.values() if row.session_id == id],
            "user_metadata": _write_metadata(session.user_metadata),
            "display_name": session.display_name,
        }

    # ---- models

    async def create_model(self, tenant: str, body: JsonObject, raw: bytes) -> JsonObject:
        """Create a model; the future's result has its id."""
        asked = read_body("create_model", body)
        session = self.ledger.find_session(tenant, asked["session_id"])
        self._check_base(asked["base_model"])
        check_optimizer(asked["optimizer_config"])
        spec = read_adapter(asked["lora_config"])
        if (spec is None) != self.offered.full_weights:
            needs = "no lora_config: it trains full weights" if self.offered.full_weights else "a lora_config"
            raise CallError(f"create_model: this server needs {needs}.")
        number, metadata = asked["model_seq_id"], asked["user_metadata"]
        return await self._add_model("create_model", session, number, raw, metadata, write_spec(spec))

    async def _add_model(
        self, kind: str, session: Session, number: int, raw: bytes, metadata: JsonObject | None, spec: JsonObject | None
    ) -> JsonObject:
        if not 0 <= number < 1 << 31:
            raise CallError(f"model_seq_id: {number} is not from 0 to 2147483647.")
        id, changes = f"{session.id}:train:{number}", ()
        if id not in self.store.models:
            now_s = self.ledger.now_s()
            values = {"tenant": session.tenant, "session_id": session.id, "spec": spec, "user_metadata": metadata}
            changes = (self.store.models.put(id, **values, created_s=now_s, used_s=now_s),)
        request = await self.ledger.accept(
            kind,
            session,
            id,
            0,
            digest=_digest(kind.encode(), raw),
            body=raw,
            cost=0,
            start=self.lanes.start,
            is_awaited=True,
            changes=changes,
        )
        return {"request_id": request.id, "model_id": id}

    def get_info(self, tenant: str, body: JsonObject) -> JsonObject:
        """Return what a model is."""
        model = self._find_made(tenant, read_body("get_info", body)["model_id"])
        name = self._name_for_clients()
        return {
            "type": "get_info",
            "model_data": {"arch": None, "model_name": name, "tokenizer_id": name},
            "model_id": model.id,
            "optimizer_config": {"type": "adamw"},
            "is_lora": model.spec is not None,
            "lora_rank": None if model.spec is None else model.spec["rank"],
            "model_name": name,
        }

    def _name_for_clients(self) -> str:
        """Return a name of the base from which the SDK can load its tokenizer: of a hub, or a folder of this machine."""
        folder = self.offered.base_model_folder
        is_hub_name = self.offered.base_model.count("/") == 1
        return str(folder) if self._has_local_clients and not is_hub_name and folder.is_dir() else self.offered.base_model

    def _find_made(self, tenant: str, id: str) -> Model:
        model = self.ledger.find_model(tenant, id)
        if model.is_failed:
            raise RefusedError(404, f"model {id} was not made; its request says why")
        return model

    async def unload_model(self, tenant: str, body: JsonObject, raw: bytes) -> JsonObject:
        """Free a model's slot; its checkpoints stay."""
        model = self._find_made(tenant, read_body("unload_model", body)["model_id"])
        session = self.store.sessions[model.session_id]

        request = await self.ledger.accept(
            "unload_model",
            session,
            f"{model.id}:unload",
            0,
            digest=_digest(raw),
            body=raw,
            cost=0,
            start=self._start_unload,
            is_awaited=True,
        )
        return {"request_id": request.id, "model_id": model.id}

    def _start_unload(self, request: Request) -> None:
        task = asyncio.create_task(self._unload(request))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _unload(self, request: Request) -> None:
        model_id = request.target.rpartition(":")[0]
        await self.lanes.end(model_id, "it was unloaded")
        await self.ledger.finish(request, make_result(model_id=model_id, type="unload_model"))

    async def _accept_sequenced(
        self, kind: str, tenant: str, model_id: str, seq: int, raw: bytes, digest: bytes, cost: int
    ) -> JsonObject:
        model = self._find_made(tenant, model_id)
        session = self.ledger.find_session(tenant, model.session_id)
        self.lanes.check_number(model, seq)
        id = f"{model.id}:{seq}"
        if seq <= model.done_seq and id not in self.store.requests:  # done long ago, and not to be done again
            return {"request_id": id, "model_id": model.id}
        request = await self.ledger.accept(
            kind,
            session,
            model.id,
            seq,
            digest=digest,
            body=raw,
            cost=cost,
            start=self.lanes.start,
            is_awaited=self.lanes.is_next(model, seq),
        )
        return {"request_id": request.id, "model_id": model.id}

    async def forward_backward(self, tenant: str, raw: bytes) -> JsonObject:
        """Take a pass; what is wrong with its data is the future's result, since later requests wait for its number."""
        try:
            parsed = await asyncio.to_thread(messages.read_pass_request, raw)
        except ValueError as error:
            raise RefusedError(400, f"a body of forward_backward is a ForwardBackwardRequest (protobuf): {error}") from None
        kind = "forward" if parsed.forward_only else "forward_backward"
        digest = await asyncio.to_thread(parsed.make_digest)
        return await self._accept_sequenced(kind, tenant, parsed.model_id, parsed.seq_id, raw, digest, parsed.num_tokens)

    async def submit(self, kind: str, tenant: str, body: JsonObject, raw: bytes) -> JsonObject:
        """Take an operation of a model whose body is JSON."""
        asked = read_body(kind, body)
        # the SDK takes another number of a sampling session when it sends the same request again
        same = {name: value for name, value in asked.items() if name != "sampling_session_seq_id"}
        digest = _digest(kind.encode(), json.dumps(same, sort_keys=True).encode())
        return await self._accept_sequenced(kind, tenant, asked["model_id"], asked["seq_id"], raw, digest, 0)

    async def load_weights(self, tenant: str, body: JsonObject, raw: bytes) -> JsonObject:
        """Load a checkpoint into a model, or into a new one."""
        asked = read_body("load_weights", body)
        if asked["weights_access_token"] is not None:
            raise CallError(f"{_NO_ACCESS_TOKEN}.")
        check_optimizer(asked["optimizer_config"])
        checkpoint = self.checkpoints.find(tenant, asked["path"], ("training",))
        addressing = [asked[name] is not None for name in ("session_id", "model_seq_id", "model_id", "seq_id")]
        if addressing == [False, False, True, True]:
            digest = _digest(b"load_weights", raw)
            return await self._accept_sequenced("load_weights", tenant, asked["model_id"], asked["seq_id"], raw, digest, 0)
        if addressing != [True, True, False, False]:
            raise CallError("load_weights takes either session_id and model_seq_id (a new model) or model_id and seq_id.")
        self._check_base(asked["base_model"])
        session = self.ledger.find_session(tenant, asked["session_id"])
        return await self._add_model(
            "load_weights", session, asked["model_seq_id"], raw, asked["user_metadata"], checkpoint.spec
        )

    # ---- samples

    async def create_sampling_session(self, tenant: str, body: JsonObject) -> JsonObject:
        """Create a sampling session of a checkpoint or of the base."""
        asked = read_body("create_sampling_session", body)
        session = self.ledger.find_session(tenant, asked["session_id"])
        path, number = asked["model_path"], asked["sampling_session_seq_id"]
        if path is None and asked["base_model"] is None:
            raise CallError("create_sampling_session takes model_path or base_model.")
        self._check_base(asked["base_model"])
        if path is not None:
            self.checkpoints.find(tenant, path, ("sampler", "training"))
        if not 0 <= number < 1 << 31:
            raise CallError(f"sampling_session_seq_id: {number} is not from 0 to 2147483647.")
        id = f"{session.id}:sample:{number}"
        known = self.store.samplers.get(id)
        if known is not None and known.path != path:
            raise RefusedError(400, f"sampling_session_seq_id {number} of this session has other weights already")
        if known is None:
            change = self.store.samplers.put(id, tenant=tenant, session_id=session.id, path=path)
            await self.ledger.journal.append(change)
        return {"type": "create_sampling_session", "sampling_session_id": id}

    def _find_sampler(self, tenant: str, id: str) -> Sampler:
        return self.ledger.find(self.store.samplers, "sampling session", tenant, id)

    async def join_sampling_session(self, tenant: str, body: JsonObject) -> JsonObject:
        """Return the number of another client of a sampling session, which numbers its requests in a block of its own."""
        sampler = self._find_sampler(tenant, read_body("join_sampling_session", body)["sampling_session_id"])
        change = self.store.samplers.put(sampler.id, num_clients=sampler.num_clients + 1)
        number = sampler.num_clients
        await self.ledger.journal.append(change)
        return {"type": "join_sampling_session", "client_counter": number}

    def get_sampler(self, tenant: str, id: str) -> JsonObject:
        """Return what a sampling session samples from."""
        sampler = self._find_sampler(tenant, id)
        is_hidden = sampler.path is None or "/ephemeral/" in sampler.path
        return {"sampler_id": id, "base_model": self._name_for_clients(), "model_path": None if is_hidden else sampler.path}

    async def sample(self, tenant: str, body: JsonObject, raw: bytes) -> JsonObject:
        """Take a request for samples."""
        asked = read_body("asample", body)
        if asked["sampling_session_id"] is None or asked["seq_id"] is None:
            raise CallError("asample takes sampling_session_id and seq_id; create_sampling_session makes a session.")
        sampler, seq, count = self._find_sampler(tenant, asked["sampling_session_id"]), asked["seq_id"], asked["num_samples"]
        session = self.ledger.find_session(tenant, sampler.session_id)
        if seq < 0 or not 1 <= count <= _MAX_ROWS:
            raise CallError(f"seq_id is {seq} and num_samples {count}; expected from 0, and from 1 to {_MAX_ROWS}.")
        longest = asked["sampling_params"].get("max_tokens")
        room = longest if isinstance(longest, int) and longest >= 0 else _ASSUMED_TOKENS
        cost = len(read_prompt(asked["prompt"])) + count * min(room, self.offered.max_tokens)
        request = await self.ledger.accept(
            "asample", session, sampler.id, seq, digest=_digest(raw), body=raw, cost=cost, start=self.samplers.start
        )
        return {"request_id": request.id, "sample_sequence_ids": [f"{request.id}:{index}" for index in range(count)]}

    # ---- results

    async def retrieve(self, tenant: str, body: JsonObject) -> Request | JsonObject:
        """Return a finished request, or what it waits for after some time."""
        request = self.ledger.find_request(tenant, read_body("retrieve_future", body)["request_id"])
        if await self.ledger.wait(request, _LONG_POLL_S):
            return self.ledger.find_request(tenant, request.id)
        describe = self.samplers.describe if request.kind == "asample" else self.lanes.describe
        state, reason = ("active", None) if request.kind == "unload_model" else describe(request)
        why = {} if reason is None else {"queue_state_reason": reason}
        return {"type": "try_again", "request_id": request.id, "queue_state": state, **why}

    async def retrieve_many(self, tenant: str, body: JsonObject) -> JsonObject:
        """Return the requests of a client of a sampling session that have finished since a cursor."""
        asked = read_body("retrieve_futures", body)
        target = read_form(FUTURES_TARGET, asked["target"], "target", kind="sampling_session")
        sampler = self._find_sampler(tenant, target["sampling_session_id"])
        for id in asked["retrieved_request_ids"]:
            request = self.store.requests.get(id)
            if request is not None and request.target == sampler.id and request.finished_s is not None:
                self.ledger.mark_retrieved(request)
        given = asked["timeout"]
        end_s = time.monotonic() + (_LONG_POLL_S if given is None else min(max(given, 0.0), _LONG_POLL_S))
        while True:
            rows = self.ledger.list_finished(sampler.id, asked["prev_cursor"])
            mine = [row for row in rows if row.seq // CLIENT_BLOCK == target["cloned_sampler_id"]][:_MAX_ROWS]
            left_s = end_s - time.monotonic()
            if mine or left_s <= 0:
                break
            await self.ledger.wait_for_news(sampler.id, left_s)
        cursor = mine[-1].number if mine else asked["prev_cursor"]
        return {"completions": [_describe_completion(row) for row in mine], "cursor": cursor}

    async def cancel(self, tenant: str, body: JsonObject) -> JsonObject:
        """Cancel a request for samples; operations of models have an order, and are not cancelled."""
        id = read_body("cancel_future", body)["request_id"]
        request = self.ledger.find_request(tenant, id)
        if request.kind != "asample":
            raise RefusedError(400, f"{id} is a request of a model ({request.kind}); requests for samples can be cancelled")
        if request.finished_s is None:
            await self.samplers.cancel(request, "its client has cancelled it")
        return {}

    # ---- training runs and checkpoints

    def _describe_run(self, model: Model) -> JsonObject:
        rows = self.checkpoints.list_of(model.tenant, model.id)
        last = {kind: next((row for row in rows if row.kind == kind), None) for kind in ("training", "sampler")}
        return {
            "training_run_id": model.id,
            "base_model": self._name_for_clients(),
            "model_owner": model.tenant,
            "is_lora": model.spec is not None,
            "corrupted": False,
            "lora_rank": None if model.spec is None else model.spec["rank"],
            "last_request_time": write_time(model.used_s),
            "last_checkpoint": last["training"] and describe_checkpoint(last["training"]),
            "last_sampler_checkpoint": last["sampler"] and describe_checkpoint(last["sampler"]),
            "user_metadata": _write_metadata(model.user_metadata),
        }

    def list_runs(self, tenant: str, limit: int, offset: int) -> JsonObject:
        """Return training runs, newest first."""
        rows = [row for row in self.store.models.values() if row.tenant == tenant and not row.is_failed]
        rows.sort(key=lambda row: row.created_s, reverse=True)
        shown = [self._describe_run(row) for row in rows[offset : offset + limit]]
        return {"training_runs": shown, "cursor": {"offset": offset, "limit": limit, "total_count": len(rows)}}

    def get_run(self, tenant: str, id: str) -> JsonObject:
        """Return a training run."""
        return self._describe_run(self._find_made(tenant, id))

    def list_checkpoints(self, tenant: str, model_id: str | None, limit: int, offset: int) -> JsonObject:
        """Return checkpoints, newest first."""
        if model_id is not None:
            self._find_made(tenant, model_id)
        rows = self.checkpoints.list_of(tenant, model_id)
        shown = rows if model_id is not None else rows[offset : offset + limit]
        cursor = {"offset": offset, "limit": limit, "total_count": len(rows)}
        return {"checkpoints": [describe_checkpoint(row) for row in shown], "cursor": None if model_id is not None else cursor}

    def find_checkpoint(self, tenant: str, model_id: str, id: str) -> Checkpoint:
        """Return a checkpoint by the parts of its path."""
        segment, _, name = id.partition("/")
        if segment not in SEGMENTS or "/" in name:
            raise RefusedError(404, f"there is no checkpoint '{id[:200]}' of this API key")
        return self.checkpoints.find(tenant, f"tinker://{model_id}/{id}")

    async def delete_checkpoint(self, tenant: str, model_id: str, id: str) -> JsonObject:
        """Delete a checkpoint."""
        await self._drop(self.find_checkpoint(tenant, model_id, id))
        return {}

    async def _drop(self, row: Checkpoint) -> None:
        await self.ledger.journal.append(self.checkpoints.drop(row))
        await self.samplers.forget(row.id)
        await asyncio.to_thread(self.checkpoints.remove_stale_folders)

    async def set_ttl(self, tenant: str, model_id: str, id: str, body: JsonObject) -> JsonObject:
        """Set when a checkpoint expires."""
        ttl_s = read_body("ttl", body)["ttl_seconds"]
        await self.ledger.journal.append(self.checkpoints.set_ttl(self.find_checkpoint(tenant, model_id, id), ttl_s))
        return {}

    def get_weights_info(self, tenant: str, body: JsonObject) -> JsonObject:
        """Return what is needed to load a checkpoint."""
        row = self.checkpoints.find(tenant, read_body("weights_info", body)["tinker_path"])
        spec = row.spec or {}
        return {
            "base_model": self._name_for_clients(),
            "optimizer_config": {"type": "adamw"},
            "is_lora": row.spec is not None,
            "lora_rank": spec.get("rank"),
            **{name: spec.get(name) for name in ("train_unembed", "train_mlp", "train_attn")},
        }

    # ---- what expires

    async def _sweep_for_ever(self) -> None:
        while True:
            await asyncio.sleep(_SWEEP_S)
            try:
                await self.sweep()
            except Exception:  # noqa: BLE001 - the next sweep tries again
                _LOG.exception("a sweep failed")

    async def sweep(self) -> None:
        """End sessions without heartbeats, remove what has expired, and write what tenants have used."""
        now_s, limit_s = self.ledger.now_s(), self.ledger.limits.session_timeout_s
        for session in list(self.store.sessions.values()):
            if not session.ended and now_s - self._heartbeats.get(session.id, now_s) > limit_s:
                await self._end_session(session, f"no heartbeat for {limit_s:.0f} s")
        for row in self.checkpoints.list_stale():
            await self._drop(row)
        await asyncio.to_thread(self.checkpoints.remove_stale_folders)
        used = {row.session_id for table in (self.store.models, self.store.samplers) for row in table.values()}
        for session in list(self.store.sessions.values()):
            if session.ended_s is not None and now_s - session.ended_s > _EMPTY_S and session.id not in used:
                self.ledger.journal.append(self.store.sessions.drop(session.id))
                self._heartbeats.pop(session.id, None)
        self.ledger.forget()
        self._write_accounts()

    def _write_accounts(self) -> None:
        for account in self.store.accounts.values():
            if self._written_accounts.get(account.id) != account.num_requests:
                self._written_accounts[account.id] = account.num_requests
                self._histories.add_account(account.id, account.num_requests, self.get_usage(account.id))

    def get_usage(self, tenant: str) -> JsonObject:
        """Return what a tenant has used: tokens, seconds of the devices, and their price where one is set."""
        account = self.store.accounts.get(tenant)
        if account is None:
            return {}
        price = {"price": account.device_s / 3600 * self._price} if self._price else {}
        return {name: value for name, value in vars(account).items() if name != "id"} | price


def describe_checkpoint(row: Checkpoint) -> JsonObject:
    """Return a checkpoint as the API has it."""
    return {
        "checkpoint_id": row.checkpoint_id,
        "checkpoint_type": row.kind,
        "time": write_time(row.created_s),
        "tinker_path": row.id,
        "size_bytes": row.num_bytes,
        "public": False,
        "user_metadata": _write_metadata(row.user_metadata),
        "expires_at": None if row.expires_s is None else write_time(row.expires_s),
    }


def _write_metadata(metadata: JsonObject | None) -> dict[str, str] | None:
    """Return metadata as texts, as answers have them."""
    return None if metadata is None else {name: str(value) for name, value in metadata.items()}


def _describe_completion(request: Request) -> JsonObject:
    if not request.succeeded:
        return {"state": "failed", "request_id": request.id}
    size = len(request.payload or b"")
    return {"state": "finished", "request_id": request.id, "response_payload_uncompressed_size": size}
