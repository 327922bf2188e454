"""The API over HTTP, as an ASGI application: paths, keys, bodies and errors."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import urllib.parse
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from mindspeed_rl.service.backend import CallError
from mindspeed_rl.service.bodies import JsonObject, read_body, read_json
from mindspeed_rl.service.doors import ADDRESS_S, BodyReader, Keys, Receive, Scope, Send, decompress, read_headers
from mindspeed_rl.service.journal import JournalError
from mindspeed_rl.service.replies import RefusedError, ServerEndsError, write_time
from mindspeed_rl.service.service import Service
from mindspeed_rl.service.store import Request

_LOG = logging.getLogger(__name__)
_PREFIX = "/api/v1/"
_BINARY = "application/x-protobuf"
#: longest body of a call, and of calls with data
_MAX_BYTES = 1 << 20
_MAX_BYTES_OF_CALLS = {"forward_backward": 64 << 20, "asample": 16 << 20, "telemetry": 16 << 20}
_SEQUENCED = ("optim_step", "save_weights", "save_weights_for_sampler", "save_weights_external")
#: rows of a list where a call asks for none, and at most
_ROWS, _MAX_ROWS = 20, 1000
_BLOCK_BYTES = 1 << 20

_OFFERED = "training, sampling, checkpoints, their lists and their download are"
#: first words of a path -> what is offered instead
_NOT_OFFERED: Mapping[str, str] = {
    "copy_weights": "load_weights makes a model of a checkpoint, and save_weights another checkpoint of it",
    "create_custom_loss": "forward_backward_custom computes the loss at the client: do not upload it (no create_custom_loss)",
    "billing": "the page of `mindspeed-rl report FOLDER/metrics/tenants/OWNER` has what a key has used",
    "admin": "keys are lines of serve_config.api_keys_file",
    "publish": "checkpoints belong to one API key",
    "project": "sessions have no projects",
    "trace_export": "the page of `mindspeed-rl report FOLDER/metrics/models/MODEL` has the steps of a model",
    "search": "GET sessions lists them",
    "whoami": "keys are lines of serve_config.api_keys_file",
    "archive": "save_weights_external and external_weights_urls download a checkpoint as a PEFT folder",
}


class TinkerApp:
    """Answers requests.

    Args:
        service: the calls.
        keys: whose a request is.
        compresses: clients are asked to compress the data of passes.
    """

    def __init__(self, service: Service, keys: Keys, *, compresses: bool) -> None:
        self._service, self._keys, self._compresses = service, keys, compresses
        self._bodies = BodyReader()
        self._has_said_telemetry = False
        by_body: dict[str, Callable[[str, JsonObject], Any]] = {
            "create_session": service.create_session,
            "session_heartbeat": service.heartbeat,
            "get_info": service.get_info,
            "create_sampling_session": service.create_sampling_session,
            "join_sampling_session": service.join_sampling_session,
            "retrieve_futures": service.retrieve_many,
            "cancel_future": service.cancel,
            "weights_info": service.get_weights_info,
            "auth/token": self._make_token,
            "client/config": self._get_client_config,
            "client/dynamic_config": self._get_dynamic_config,
        }
        by_raw: dict[str, Callable[[str, JsonObject, bytes], Awaitable[JsonObject]]] = {
            "create_model": service.create_model,
            "unload_model": service.unload_model,
            "load_weights": service.load_weights,
            "asample": service.sample,
        }
        self._by_body, self._by_raw = by_body, by_raw

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one connection, as ASGI specifies."""
        if scope["type"] == "lifespan":
            message: Mapping[str, object] = {"type": ""}
            while message["type"] != "lifespan.shutdown":
                message = await receive()
                await send({"type": f"{message['type']}.complete"})
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
            return
        has_begun = False

        async def send_noted(message: dict[str, Any]) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        try:
            await self._answer_until_end(scope, receive, send_noted)
        except ServerEndsError as error:
            if not has_begun:  # otherwise uvicorn closes the connection before Content-Length, which the client sees
                await _send_json(send, error.status, {"detail": str(error)})
        except RefusedError as error:
            await _send_json(send, error.status, {"detail": str(error)})
        except CallError as error:
            await _send_json(send, 400, {"detail": str(error)})
        except JournalError as error:
            await _send_json(send, 503, {"detail": str(error)})
        except Exception as error:
            _LOG.exception("%s %s failed", scope["method"], scope["path"])
            if has_begun:  # the connection ends before Content-Length, from which the client sees that the reply is cut off
                raise
            await _send_json(send, 500, {"detail": f"{type(error).__name__}: {error}"})

    async def _answer_until_end(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or raise ServerEndsError where that takes longer than the server has for its end."""
        try:
            await self._answer(scope, receive, send)
        except asyncio.CancelledError:  # uvicorn would log a traceback of it per client
            raise ServerEndsError from None

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = read_headers(scope)
        self._keys.check_host(headers)
        method, path = scope["method"], scope["path"]
        if not path.startswith(_PREFIX):
            raise RefusedError(404, f"there is no {path[:200]}; the API is below {_PREFIX}")
        name = path.removeprefix(_PREFIX).rstrip("/")
        if method == "GET" and name == "healthz":
            await _send_json(send, 200, {"status": "ok"})
            return
        if method == "GET" and name.startswith("files/"):
            await self._send_file(name.removeprefix("files/"), send)
            return
        tenant = self._keys.find_tenant(headers)
        if method == "GET":
            await _send_json(send, 200, self._get(tenant, name, scope, headers))
            return
        if method not in ("POST", "PUT", "DELETE"):
            raise RefusedError(405, f"{method} is no method of this API")
        self._check_offered(name)
        max_bytes = _MAX_BYTES_OF_CALLS.get(name, _MAX_BYTES)
        body = await self._bodies.read(tenant, headers, receive, max_bytes)
        encoding = headers.get(b"content-encoding", b"").decode("latin-1").strip().lower()
        if encoding:
            body = await asyncio.to_thread(decompress, body, encoding, max_bytes)
        kind = headers.get(b"content-type", b"").decode("latin-1").partition(";")[0].strip().lower()
        if method == "POST" and name == "forward_backward":
            if kind != _BINARY:
                raise RefusedError(400, f"forward_backward has the Content-Type {kind[:100]!r}; it takes {_BINARY}")
            await _send_json(send, 200, await self._service.forward_backward(tenant, body))
            return
        if body and kind != "application/json":
            raise RefusedError(400, f"{name[:200]} has the Content-Type {kind[:100]!r}; it takes application/json")
        value = await asyncio.to_thread(read_json, body) if len(body) > 1 << 16 else read_json(body)
        if method == "POST" and name == "retrieve_future":
            await self._send_result(await self._service.retrieve(tenant, value), send)
            return
        await _send_json(send, 200, await self._change(method, tenant, name, value, body))

    async def _change(self, method: str, tenant: str, name: str, value: JsonObject, body: bytes) -> JsonObject:
        """Return the answer to a POST, PUT or DELETE."""
        service, words = self._service, name.split("/")
        if method == "POST":
            if name in self._by_body:
                answer = self._by_body[name](tenant, value)
                return await answer if asyncio.iscoroutine(answer) else answer
            if name in self._by_raw:
                return await self._by_raw[name](tenant, value, body)
            if name in _SEQUENCED:
                return await service.submit(name, tenant, value, body)
            if name == "telemetry":
                if not self._has_said_telemetry:
                    self._has_said_telemetry = True
                    _LOG.info("clients send telemetry; it is dropped (TINKER_TELEMETRY=0 at a client turns it off)")
                return {"status": "accepted"}
            if len(words) == 3 and words[0] == "sessions" and words[2] == "finish":
                return await service.finish_session(tenant, words[1], value)
        elif words[0] == "training_runs" and words[2:3] == ["checkpoints"] and len(words) > 4:
            if method == "DELETE":
                return await service.delete_checkpoint(tenant, words[1], "/".join(words[3:]))
            if words[-1] == "ttl":
                return await service.set_ttl(tenant, words[1], "/".join(words[3:-1]), value)
        raise self._refuse_path(method, name)

    def _get(self, tenant: str, name: str, scope: Scope, headers: Mapping[bytes, bytes]) -> JsonObject:
        """Return the answer to a GET."""
        self._check_offered(name)
        service, words = self._service, name.split("/")
        limit, offset = _read_rows(scope)
        if name == "get_server_capabilities":
            return service.get_capabilities()
        if words[0] == "sessions" and len(words) <= 2:
            return service.list_sessions(tenant, limit, offset) if len(words) == 1 else service.get_session(tenant, words[1])
        if name == "training_runs":
            return service.list_runs(tenant, limit, offset)
        if name == "checkpoints":
            return service.list_checkpoints(tenant, None, limit, offset)
        if name == "usage":
            return service.get_usage(tenant)
        if words[0] == "samplers" and len(words) == 2:
            return service.get_sampler(tenant, words[1])
        if words[0] == "training_runs" and len(words) == 2:
            return service.get_run(tenant, words[1])
        if words[0] == "training_runs" and words[2:] == ["checkpoints"]:
            return service.list_checkpoints(tenant, words[1], limit, offset)
        if words[0] == "training_runs" and words[2:3] == ["checkpoints"] and words[-1] == "external_weights_urls":
            return self._list_addresses(tenant, words[1], "/".join(words[3:-1]), scope, headers)
        raise self._refuse_path("GET", name)

    @staticmethod
    def _check_offered(name: str) -> None:
        words = name.split("/")
        # a checkpoint may have the name of a call
        word = next((word for word in (words[-1], words[0]) if word in _NOT_OFFERED), None)
        is_call = len(words) != 5 or words[0] != "training_runs"
        if word is not None and is_call:
            raise RefusedError(400, f"{name[:200]} is not offered by this server: {_NOT_OFFERED[word]}")

    @staticmethod
    def _refuse_path(method: str, name: str) -> RefusedError:
        return RefusedError(404, f"{method} {name[:200]} is not offered by this server; {_OFFERED}")

    # ---- the server's own

    def _make_token(self, tenant: str, body: JsonObject) -> JsonObject:
        read_body("auth/token", body)
        return {"jwt": self._keys.make_token(tenant)}

    def _get_client_config(self, tenant: str, body: JsonObject) -> JsonObject:
        read_body("client/config", body)
        return {
            "pjwt_auth_enabled": False,
            "credential_default_source": "api_key",
            "parallel_fwdbwd_chunks": True,
            "proto_compress_fwdbwd": self._compresses,
            "sample_use_retrieve_futures": True,
            "sample_join_sampling_session": True,
            "custom_loss_server_side": False,
        }

    @staticmethod
    def _get_dynamic_config(tenant: str, body: JsonObject) -> JsonObject:
        read_body("client/dynamic_config", body)
        return {"refresh_interval_sec": 300, "sample_cancel_enabled": True, "sample_cancel_max_batch_size": 64}

    # ---- results and files

    async def _send_result(self, result: Request | JsonObject, send: Send) -> None:
        if isinstance(result, dict):
            await _send_json(send, 200, result)
            return
        assert result.payload is not None
        await _send(send, 200, result.payload, _BINARY if result.is_binary else "application/json")
        self._service.ledger.mark_retrieved(result)

    def _list_addresses(
        self, tenant: str, model_id: str, id: str, scope: Scope, headers: Mapping[bytes, bytes]
    ) -> JsonObject:
        checkpoint = self._service.find_checkpoint(tenant, model_id, id)
        if checkpoint.kind != "external":
            text = f"'{checkpoint.id}' is a {checkpoint.kind} checkpoint; save_weights_external makes one to download"
            raise RefusedError(400, text)
        folder = self._service.checkpoints.get_folder(checkpoint)
        # behind a proxy that has the certificate
        scheme = headers.get(b"x-forwarded-proto", scope.get("scheme", "http").encode()).decode("latin-1")
        host = headers.get(b"x-forwarded-host", headers.get(b"host", b"")).decode("latin-1")
        base = f"{'https' if scheme == 'https' else 'http'}://{host}{_PREFIX}files/"
        names = sorted(file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file())
        urls = {name: base + self._keys.make_address(checkpoint.folder, name) for name in names}
        return {"urls": urls, "expires": write_time(self._service.ledger.now_s() + ADDRESS_S)}

    async def _send_file(self, address: str, send: Send) -> None:
        folder_name, name = self._keys.read_address(address)
        file = self._service.checkpoints.get_folder_by_name(folder_name) / name
        try:
            stream = await asyncio.to_thread(file.open, "rb")
        except OSError:
            raise RefusedError(404, "there is no such file: its checkpoint was deleted") from None
        with stream:
            size = os.fstat(stream.fileno()).st_size  # the name may be gone by now
            headers = [(b"content-type", b"application/octet-stream"), (b"content-length", str(size).encode())]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            while block := await asyncio.to_thread(stream.read, _BLOCK_BYTES):
                await send({"type": "http.response.body", "body": block, "more_body": True})
            await send({"type": "http.response.body", "body": b""})


def _read_rows(scope: Scope) -> tuple[int, int]:
    """Return limit and offset of a list."""
    query = dict(urllib.parse.parse_qsl(scope.get("query_string", b"").decode("latin-1")))
    values = []
    for name, default, largest in (("limit", _ROWS, _MAX_ROWS), ("offset", 0, 1 << 31)):
        text = query.get(name, str(default))
        if not (text.isascii() and text.isdigit() and len(text) < 12):
            raise RefusedError(400, f"{name} is {text[:100]!r}; expected a whole number")
        values.append(min(int(text), largest))
    return values[0], values[1]


async def _send(send: Send, status: int, body: bytes, kind: str) -> None:
    headers = [
        (b"content-type", kind.encode()),
        (b"content-length", str(len(body)).encode()),
        (b"cache-control", b"no-store"),
        (b"x-content-type-options", b"nosniff"),
    ]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def _send_json(send: Send, status: int, value: object) -> None:
    await _send(send, status, json.dumps(value).encode(), "application/json")
