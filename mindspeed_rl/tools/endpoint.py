"""Endpoint of a rollout for programs with a loop of their own: clients sample from the engine, and samples are recorded.

A program (an environment of another library, an agent with its own harness) gets an address that belongs to one trajectory,
and speaks OpenAI's or Anthropic's protocol there (`request_forms.py`). Each request becomes a turn of that trajectory: the
session of the address has the conversation in tokens, passes only new messages to the model, and records the sampled tokens
with log-probs and weight versions. The run's sampling parameters apply, regardless of the client's: training needs samples of
the policy's distribution.

The server listens on loopback. An address contains a secret of its trajectory and is valid as long as that.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
import secrets
import socket
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from mindspeed_rl.tools.interface import JsonObject
from mindspeed_rl.tools.request_forms import FORMS, ChatReply, Form, TurnRequest, write_message

_LOG = logging.getLogger(__name__)
_MAX_BYTES = 64 << 20
_START_LIMIT_S, _STOP_LIMIT_S = 30.0, 10.0
#: a stream without a turn yet has a comment as often as this, so that clients do not time out
_PING_S = 10.0
_EVENTS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]

_Scope = Mapping[str, Any]
_Receive = Callable[[], Awaitable[_Scope]]
_Send = Callable[[JsonObject], Awaitable[None]]


class ContextFullError(Exception):
    """The trajectory cannot have another turn: no tokens, context or turns are left."""


class ChatSession(Protocol):
    """A trajectory with an external client, which may request several turns at once."""

    async def complete(self, request: TurnRequest) -> Sequence[ChatReply]:
        """Return the model's next turn, or as many as requested.

        Messages after turns that were recorded are new; a client that has changed earlier ones starts a branch.

        Raises:
            ContextFullError: no further turn is possible.
            ValueError: the chat template cannot render the messages.
        """
        ...

    def count_tokens(self, request: TurnRequest) -> int:
        """Return the number of tokens that the model would read.

        Raises:
            ValueError: the chat template cannot render the messages.
        """
        ...

    def add_reward(self, value: float, reply: str) -> None:
        """Add to the reward of a turn, or of the trajectory where `reply` is "".

        Raises:
            ValueError: there is no turn of this id.
        """
        ...


@dataclass(frozen=True)
class _Address:
    """The address of a trajectory.

    Attributes:
        responses: id -> messages that a request with previous_response_id continues.
    """

    session: ChatSession
    responses: dict[str, tuple[JsonObject, ...]] = field(default_factory=dict)


class RecordingEndpoint:
    """The server and its sessions, in the event loop of the engine's clients.

    Args:
        model: its name for clients.
    """

    def __init__(self, model: str = "policy") -> None:
        self.model = model
        self._sessions: dict[str, _Address] = {}
        self._serving: asyncio.Task[None] | None = None
        self._address = ""

    async def start(self) -> None:
        """Start the server on a free port of loopback.

        Raises:
            RuntimeError: the server does not start.
        """
        import uvicorn  # a dependency of vLLM; only runs with such programs need it

        class Server(uvicorn.Server):
            """Leaves signals to the run."""

            @contextlib.contextmanager
            def capture_signals(self) -> Iterator[None]:
                yield

        listening = socket.socket()
        listening.bind(("127.0.0.1", 0))
        self._address = f"http://127.0.0.1:{listening.getsockname()[1]}"
        config = uvicorn.Config(self, log_level="warning", access_log=False, lifespan="off", timeout_graceful_shutdown=2)
        self._server = Server(config)
        self._serving = asyncio.create_task(self._server.serve(sockets=[listening]))
        deadline = time.monotonic() + _START_LIMIT_S
        while not self._server.started:
            if self._serving.done() or time.monotonic() > deadline:
                await self.close()
                raise RuntimeError(f"the endpoint of agents at {self._address} does not start")
            await asyncio.sleep(0.01)

    def open(self, session: ChatSession) -> str:
        """Return the base URL of a trajectory for OpenAI's clients; valid until `remove`. Anthropic's append /v1 themselves."""
        key = secrets.token_urlsafe(24)
        self._sessions[key] = _Address(session)
        return f"{self._address}/{key}/v1"

    def remove(self, base_url: str) -> None:
        """Invalidate the base URL of a trajectory."""
        self._sessions.pop(base_url.removesuffix("/v1").rpartition("/")[2], None)

    async def close(self) -> None:
        """Stop the server; may be called twice."""
        self._sessions.clear()
        serving, self._serving = self._serving, None
        if serving is None:
            return
        self._server.should_exit = True
        done, _ = await asyncio.wait([serving], timeout=_STOP_LIMIT_S)
        if not done:
            serving.cancel()
            await asyncio.wait([serving], timeout=_STOP_LIMIT_S)

    async def __call__(self, scope: _Scope, receive: _Receive, send: _Send) -> None:
        """Handle one ASGI request."""
        if scope["type"] != "http":
            return
        _, key, path = (scope["path"].split("/", 2) + ["", ""])[:3]
        while path.startswith("v1/"):  # clients differ in who appends it
            path = path.removeprefix("v1/")
        address, model = self._sessions.get(key), {"id": self.model, "object": "model", "created": 0, "owned_by": "run"}
        name = next((name for name in FORMS if path == name or path.startswith(f"{name}/")), "chat/completions")
        if address is None:
            await _send(send, 404, FORMS[name].write_error(404, "this trajectory has ended, or never was", None))
        elif path == "models":
            await _send(send, 200, {"object": "list", "data": [model]})
        elif path.startswith("models/"):
            await _send(send, 200, model)
        elif scope["method"] == "POST" and path in ("reward", *FORMS, "messages/count_tokens", "responses/input_tokens"):
            await _Exchange(address, self.model, path, FORMS[name], receive, send).run()
        else:
            text = f"there are {', '.join(f'/v1/{form}' for form in FORMS)}, /v1/models and /v1/reward here, not {path}"
            await _send(send, 404, FORMS[name].write_error(404, text, None))


@dataclass
class _Exchange:
    """One request to an address and its reply."""

    address: _Address
    model: str
    path: str
    form: Form
    receive: _Receive
    send: _Send
    is_streaming: bool = False

    async def run(self) -> None:
        try:
            await self._answer(await self._read_body())
        except ContextFullError as error:
            await self._refuse(400, f"maximum context length reached: {error}", "context_length_exceeded")
        except ValueError as error:
            await self._refuse(400, str(error))
        except Exception as error:  # noqa: BLE001 (any failure of the engine; the client may stop or try again)
            _LOG.exception("a request of a program failed")
            await self._refuse(500, f"{type(error).__name__}: {error}")

    async def _answer(self, body: JsonObject) -> None:
        session = self.address.session
        if self.path == "reward":
            value, reply = body.get("reward"), body.get("id") or ""
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
                raise ValueError(f"reward is {value!r}, but must be a finite number")
            session.add_reward(float(value), str(reply).rpartition("-" if "-" in str(reply) else "_")[2])
            await _send(self.send, 200, {"reward": value})
            return
        self.form.check_names(body)
        request = self.form.parse(body)
        if request.previous:
            before = self.address.responses.get(request.previous)
            if before is None:
                raise ValueError(f"previous_response_id {request.previous!r} is no response of this trajectory")
            instructions = request.num_instructions
            new = (*request.messages[:instructions], *before, *request.messages[instructions:])
            request = replace(request, messages=new)
        if self.path not in FORMS:
            count = {"input_tokens": session.count_tokens(request)}
            await _send(
                self.send, 200, count | ({} if self.path.startswith("messages") else {"object": "response.input_tokens"})
            )
            return
        replies = await self._wait_for(request)
        if replies is None:
            return
        written = self.form.write(request, replies, self.model)
        if self.path == "responses":
            after = (*request.messages[request.num_instructions :], write_message(replies[0].turn))
            self.address.responses[written["id"]] = after
        if not request.stream:
            await _send(self.send, 200, written)
            return
        events = [_write_event(*event) for event in self.form.write_events(request, replies, self.model)]
        await self._stream("".join(events) + (f"data: {self.form.last}\n\n" if self.form.last else ""), more=False)

    async def _wait_for(self, request: TurnRequest) -> Sequence[ChatReply] | None:
        """Return the turns; None where the client disconnects before: it does not read them, so that nothing is recorded."""
        sampling = asyncio.ensure_future(self.address.session.complete(request))
        leaving = asyncio.ensure_future(self._wait_for_disconnect())
        try:
            while not sampling.done():
                await asyncio.wait(
                    {sampling, leaving}, timeout=_PING_S if request.stream else None, return_when=asyncio.FIRST_COMPLETED
                )
                if leaving.done() and not sampling.done():
                    return None
                if not sampling.done():
                    await self._stream(": the turn is not complete yet\n\n")
            return sampling.result()
        finally:
            for task in (sampling, leaving):
                task.cancel()
            await asyncio.wait([sampling, leaving])

    async def _wait_for_disconnect(self) -> None:
        while (await self.receive())["type"] != "http.disconnect":
            pass

    async def _stream(self, text: str, *, more: bool = True) -> None:
        if not self.is_streaming:
            self.is_streaming = True
            await self.send({"type": "http.response.start", "status": 200, "headers": _EVENTS})
        await self.send({"type": "http.response.body", "body": text.encode(), "more_body": more})

    async def _refuse(self, status: int, message: str, code: str | None = None) -> None:
        error = self.form.write_error(status, message, code)
        if self.is_streaming:
            await self._stream(_write_event("error" if "type" in error else "", error), more=False)
        else:
            await _send(self.send, status, error)

    async def _read_body(self) -> JsonObject:
        body, more = b"", True
        while more:
            event = await self.receive()
            if event["type"] == "http.disconnect":
                raise ValueError("the client has disconnected")
            body += event.get("body", b"")
            more = event.get("more_body", False)
            if len(body) > _MAX_BYTES:
                raise ValueError(f"a request has at most {_MAX_BYTES} bytes")
        try:
            value = json.loads(body)
        except RecursionError:
            raise ValueError("the request is nested too deeply") from None
        if not isinstance(value, dict):
            raise ValueError("a request is a JSON object")
        return value


def _write_event(name: str, data: JsonObject) -> str:
    return (f"event: {name}\n" if name else "") + f"data: {json.dumps(data)}\n\n"


async def _send(send: _Send, status: int, value: JsonObject) -> None:
    body = json.dumps(value).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
