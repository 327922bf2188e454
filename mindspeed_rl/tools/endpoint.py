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
from pathlib import Path
from typing import Any, Protocol

from mindspeed_rl.bounds import check_depth, read_number, show
from mindspeed_rl.data.strict_json import StrictDecoder
from mindspeed_rl.tools.interface import JsonObject
from mindspeed_rl.tools.request_forms import FORMS, ChatReply, Form, TurnRequest, write_message
from mindspeed_rl.tools.running import run_in_thread
from mindspeed_rl.tools.tasks import retrieve_exception

_LOG = logging.getLogger(__name__)
#: of a request for a turn, where its context allows as much, and of a reward
_MAX_BYTES, _MAX_REWARD_BYTES = 64 << 20, 1 << 16
#: of one trajectory: requests at the same time, and in all
_MAX_OPEN, _MAX_REQUESTS = 256, 100_000
#: longest wait for the next part of a body
_MAX_SILENCE_S = 60.0
#: longest time for which the rest of a body that is too long is read
_DROP_S = 10.0
#: a longer body is decoded in a thread
_QUICK_BYTES = 1 << 16
_START_LIMIT_S, _STOP_LIMIT_S = 30.0, 10.0
#: a stream without a turn yet has a comment as often as this, so that clients do not time out
_PING_S = 10.0
#: header by which a program with several agents names the one that asks, and its longest value
_SESSION_HEADER, _MAX_SESSION_BYTES = b"x-session-id", 256
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

    async def count_tokens(self, request: TurnRequest) -> int:
        """Return the number of tokens that the model would read.

        Raises:
            ValueError: the chat template cannot render the messages.
        """
        ...

    def add_reward(self, value: float, reply: str) -> None:
        """Add to the reward of a turn, or of the trajectory where `reply` is "".

        Raises:
            ValueError: there is no turn of this id, or the sum is no finite number.
        """
        ...


@dataclass
class _Address:
    """The address of a trajectory.

    Attributes:
        max_bytes: longest body of a request for a turn.
        serves_turns, takes_rewards: requests that are accepted here.
        secret_files: removed before the first turn is sampled, so that nothing the model says can read them.
        responses: id -> messages that a request with previous_response_id continues.
        num_open, num_requests: requests at this time, and in all.
    """

    session: ChatSession
    max_bytes: int = _MAX_BYTES
    serves_turns: bool = True
    takes_rewards: bool = True
    secret_files: list[Path] = field(default_factory=list)
    responses: dict[str, tuple[JsonObject, ...]] = field(default_factory=dict)
    num_open: int = 0
    num_requests: int = 0

    def remove_secrets(self) -> None:
        """Remove the secret files."""
        while self.secret_files:
            self.secret_files.pop().unlink(missing_ok=True)

    @contextlib.contextmanager
    def count_request(self) -> Iterator[None]:
        """Count a request during the block.

        Raises:
            _RefusedError: there are too many.
        """
        self.num_requests += 1
        if self.num_requests > _MAX_REQUESTS:
            raise _RefusedError(429, f"this trajectory has made {_MAX_REQUESTS} requests, and may make no more")
        if self.num_open >= _MAX_OPEN:
            raise _RefusedError(429, f"this trajectory has {_MAX_OPEN} open requests; wait for one of them")
        self.num_open += 1
        try:
            yield
        finally:
            self.num_open -= 1


@dataclass(frozen=True)
class ProgramAddress:
    """The addresses of a trajectory for a program.

    Attributes:
        base_url: serves turns.
        reward_url: takes rewards; a secret of the program. "" where the base URL takes them.
        secret_files: files that are removed before the first turn is sampled; the program's host adds them.
    """

    base_url: str
    reward_url: str = ""
    secret_files: list[Path] = field(default_factory=list)


class _RefusedError(Exception):
    """A request that is refused with a status of its own."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


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
        # its other implementation keeps headers of any length, which everyone on this machine can send
        config = uvicorn.Config(
            self, http="h11", log_level="warning", access_log=False, lifespan="off", ws="none", timeout_graceful_shutdown=2
        )
        self._server = Server(config)
        self._serving = asyncio.create_task(self._server.serve(sockets=[listening]))
        deadline = time.monotonic() + _START_LIMIT_S
        while not self._server.started:
            if self._serving.done() or time.monotonic() > deadline:
                await self.close()
                raise RuntimeError(f"the endpoint of agents at {self._address} does not start")
            await asyncio.sleep(0.01)

    def open(self, session: ChatSession, max_bytes: int = _MAX_BYTES) -> str:
        """Return the base URL of a trajectory for OpenAI's clients; valid until `remove`. Anthropic's append /v1 themselves.

        Args:
            max_bytes: longest body of a request; a longer one cannot fit into the context.
        """
        return self._open(_Address(session, max_bytes))

    def open_for_command(self, session: ChatSession, max_bytes: int = _MAX_BYTES) -> ProgramAddress:
        """Return the addresses of a trajectory whose base URL takes no rewards: commands of the model may know that one."""
        turns = _Address(session, max_bytes, takes_rewards=False)
        rewards = _Address(session, serves_turns=False)
        return ProgramAddress(self._open(turns), f"{self._open(rewards)}/reward", turns.secret_files)

    def _open(self, address: _Address) -> str:
        key = secrets.token_urlsafe(24)
        self._sessions[key] = address
        return f"{self._address}/{key}/v1"

    def remove(self, url: str) -> None:
        """Invalidate a URL of a trajectory."""
        self._sessions.pop(url.removesuffix("/reward").removesuffix("/v1").rpartition("/")[2], None)

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
            session = next((value for key, value in scope["headers"] if key.lower() == _SESSION_HEADER), b"")
            await _Exchange(address, self.model, path, FORMS[name], receive, send, session).run()
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
    session: bytes
    is_streaming: bool = False

    async def run(self) -> None:
        try:
            with self.address.count_request():
                self._check_place()
                await self._answer(await self._read_body())
        except _RefusedError as error:
            await self._refuse(error.status, str(error))
        except ContextFullError as error:
            await self._refuse(400, f"maximum context length reached: {error}", "context_length_exceeded")
        except ValueError as error:
            await self._refuse(400, str(error))
        except Exception as error:  # noqa: BLE001 (any failure of the engine; the client may stop or try again)
            _LOG.exception("a request of a program failed")
            await self._refuse(500, f"{type(error).__name__}: {error}")

    def _check_place(self) -> None:
        """Check that this address serves the path.

        Raises:
            _RefusedError: it does not.
        """
        if self.path == "reward" and not self.address.takes_rewards:
            text = "rewards are posted to the URL in the file AGENT_REWARD_URL_FILE, which is there until the first turn"
            raise _RefusedError(403, text)
        if self.path != "reward" and not self.address.serves_turns:
            raise _RefusedError(403, "rewards alone are posted to this URL")

    async def _answer(self, body: bytes) -> None:
        session = self.address.session
        if self.path == "reward":
            given = _decode(body)
            value, reply = read_number(given.get("reward"), "reward"), given.get("id")
            if not isinstance(reply, (str, type(None))):
                raise ValueError(f"id is {show(reply)}, but must be that of a completion")
            reply = reply or ""
            session.add_reward(value, reply.rpartition("-" if "-" in reply else "_")[2] or reply)
            await _send(self.send, 200, {"reward": given["reward"]})
            return
        request = self._parse(body) if len(body) <= _QUICK_BYTES else await run_in_thread(lambda: self._parse(body))
        if request.previous:
            before = self.address.responses.get(request.previous)
            if before is None:
                raise ValueError(f"previous_response_id {request.previous!r} is no response of this trajectory")
            instructions = request.num_instructions
            new = (*request.messages[:instructions], *before, *request.messages[instructions:])
            request = replace(request, messages=new)
        if self.path not in FORMS:
            count = {"input_tokens": await session.count_tokens(request)}
            await _send(
                self.send, 200, count | ({} if self.path.startswith("messages") else {"object": "response.input_tokens"})
            )
            return
        self.address.remove_secrets()
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

    def _parse(self, body: bytes) -> TurnRequest:
        """Return the request of a body.

        Raises:
            ValueError: it is wrong, or has an option that is not supported.
        """
        if len(self.session) > _MAX_SESSION_BYTES:
            raise ValueError(f"the header {_SESSION_HEADER.decode()} has at most {_MAX_SESSION_BYTES} bytes")
        value = _decode(body)
        self.form.check_names(value)
        return replace(self.form.parse(value), session=self.session.decode("latin-1"))

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
            # asyncio would log an exception that nothing reads
            retrieve_exception(sampling)
            retrieve_exception(leaving)

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

    async def _read_body(self) -> bytes:
        """Return the body, whose size is looked at first.

        The rest of one that is too long is read and dropped for some time: a client that is still sending reads no reply.

        Raises:
            ValueError: the client has disconnected.
            _RefusedError: the body is too long, or does not arrive.
        """
        max_bytes = _MAX_REWARD_BYTES if self.path == "reward" else self.address.max_bytes
        chunks: list[bytes] = []
        size, more, stop_s = 0, True, math.inf
        while more and time.monotonic() < stop_s:
            try:
                event = await asyncio.wait_for(self.receive(), _MAX_SILENCE_S)
            except asyncio.TimeoutError:
                raise _RefusedError(408, f"nothing arrived for {_MAX_SILENCE_S:.0f} s") from None
            if event["type"] == "http.disconnect":
                raise ValueError("the client has disconnected")
            size += len(event.get("body", b""))
            more = event.get("more_body", False)
            if size <= max_bytes:
                chunks.append(event.get("body", b""))
            elif stop_s == math.inf:
                chunks, stop_s = [], time.monotonic() + _DROP_S
        if size > max_bytes:
            raise _RefusedError(413, f"a request has at most {max_bytes} bytes here, and more cannot fit into the context")
        return b"".join(chunks)


def _decode(body: bytes) -> JsonObject:
    """Return the JSON object of a body.

    Raises:
        ValueError: there is none.
    """
    try:
        value = StrictDecoder().loads(body.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ValueError(f"a request is JSON in UTF-8, and byte {error.start} is none") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"a request is a JSON object, but this is no JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError("a request is a JSON object")
    check_depth(value, "the request")
    return value


def _write_event(name: str, data: JsonObject) -> str:
    return (f"event: {name}\n" if name else "") + f"data: {json.dumps(data)}\n\n"


async def _send(send: _Send, status: int, value: JsonObject) -> None:
    body = json.dumps(value).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
