"""An OpenAI-compatible endpoint of a rollout: its clients sample from the engine, and the samples are recorded.

A program with its own loop (an environment of another library, an agent with its own harness) gets an address that belongs to
one trajectory. Each chat completion becomes a turn of that trajectory: the session of the address has the conversation in
tokens, passes only new messages to the model, and records the sampled tokens with log-probs and weight versions. The run's
sampling parameters apply, regardless of the client's: training needs samples of the policy's distribution.

The server listens on loopback. An address contains a secret of its trajectory and is valid as long as that.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import secrets
import socket
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from mindspeed_rl.tools.interface import BrokenCall, JsonObject, ParsedTurn

_LOG = logging.getLogger(__name__)
_MAX_BYTES = 64 << 20
_START_LIMIT_S, _STOP_LIMIT_S = 30.0, 10.0
_COMPLETIONS, _MODELS = "/v1/chat/completions", "/v1/models"

_Scope = Mapping[str, Any]
_Receive = Callable[[], Awaitable[_Scope]]
_Send = Callable[[JsonObject], Awaitable[None]]


class ContextFullError(Exception):
    """The trajectory cannot have another turn: no tokens, context or turns are left."""


@dataclass(frozen=True)
class ChatReply:
    """A sampled turn.

    Attributes:
        turn: parsed.
        ended: True for an end token; False if the turn was truncated.
        prompt_ids, token_ids, log_probs: tokens that the model read and sampled, for clients that record them.
    """

    turn: ParsedTurn
    ended: bool
    prompt_ids: Sequence[int]
    token_ids: Sequence[int]
    log_probs: Sequence[float]


class ChatSession(Protocol):
    """A trajectory with an external client."""

    async def complete(self, messages: Sequence[JsonObject], tools: Sequence[JsonObject], max_tokens: int | None) -> ChatReply:
        """Return the model's next turn.

        Args:
            messages: the client's full conversation, in OpenAI's form. Messages after the recorded turns are new; a client that
                has changed earlier ones starts another sequence.
            tools: offered by the client, and part of the prompt.
            max_tokens: limit of this turn; None for the run's limit.

        Raises:
            ContextFullError: no further turn is possible.
            ValueError: the chat template cannot render the messages.
        """
        ...


class RecordingEndpoint:
    """The server and its sessions, in the event loop of the engine's clients.

    Args:
        model: its name for clients.
    """

    def __init__(self, model: str = "policy") -> None:
        self.model = model
        self._sessions: dict[str, tuple[ChatSession, asyncio.Lock]] = {}
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
        """Return the base URL of a trajectory for OpenAI's clients; valid until `remove`."""
        key = secrets.token_urlsafe(24)
        self._sessions[key] = (session, asyncio.Lock())
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
        if key not in self._sessions:
            await _refuse(send, 404, "this trajectory has ended, or never was")
        elif f"/{path}" == _MODELS:
            await _send(send, 200, {"object": "list", "data": [{"id": self.model, "object": "model", "owned_by": "run"}]})
        elif f"/{path}" != _COMPLETIONS or scope["method"] != "POST":
            await _refuse(send, 404, f"there are {_COMPLETIONS} and {_MODELS} here, not {path}")
        else:
            await self._complete(*self._sessions[key], receive, send)

    async def _complete(self, session: ChatSession, lock: asyncio.Lock, receive: _Receive, send: _Send) -> None:
        try:
            request = _parse_request(await _read_body(receive))
            async with lock:  # one turn of a conversation at a time
                reply = await session.complete(*request)
        except ContextFullError as error:
            await _refuse(send, 400, f"maximum context length reached: {error}", "context_length_exceeded")
        except ValueError as error:
            await _refuse(send, 400, str(error))
        except Exception as error:  # noqa: BLE001 (any failure of the engine; the client may stop or try again)
            _LOG.exception("a chat completion failed")
            await _refuse(send, 500, f"{type(error).__name__}: {error}")
        else:
            await _send(send, 200, self._write_completion(reply))

    def _write_completion(self, reply: ChatReply) -> JsonObject:
        message = write_message(reply.turn)
        finish = "length" if not reply.ended else "tool_calls" if message.get("tool_calls") else "stop"
        logprobs = [
            {"token": f"token_id:{token}", "logprob": value, "bytes": None, "top_logprobs": []}
            for token, value in zip(reply.token_ids, reply.log_probs)
        ]
        choice = {"index": 0, "message": message, "finish_reason": finish, "logprobs": {"content": logprobs}}
        counts = {"prompt_tokens": len(reply.prompt_ids), "completion_tokens": len(reply.token_ids)}
        return {
            "id": f"chatcmpl-{secrets.token_hex(8)}",
            "object": "chat.completion",
            "created": int(time.time()),
            "model": self.model,
            "choices": [choice | {"token_ids": list(reply.token_ids)}],  # as in vLLM with return_token_ids
            "prompt_token_ids": list(reply.prompt_ids),
            "usage": counts | {"total_tokens": sum(counts.values())},
        }


def write_message(turn: ParsedTurn) -> JsonObject:
    """Return a turn of the model as a message in OpenAI's form."""
    # the client receives a broken call as text, and reports the error
    broken = "".join(call.text for call in turn.calls if isinstance(call, BrokenCall))
    message: JsonObject = {"role": "assistant", "content": turn.content + broken}
    if turn.reasoning is not None:
        message["reasoning_content"] = turn.reasoning
    calls = [
        {
            "id": call.id,
            "type": "function",
            "function": {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)},
        }
        for call in turn.calls
        if not isinstance(call, BrokenCall)
    ]
    return message | ({"tool_calls": calls} if calls else {})


def _parse_request(body: bytes) -> tuple[list[JsonObject], list[JsonObject], int | None]:
    """Return (messages, tools, max_tokens) of a request.

    Raises:
        ValueError: it is invalid, or has an unsupported option.
    """
    try:
        request = json.loads(body)
    except RecursionError:
        raise ValueError("the request is nested too deeply") from None
    messages = request.get("messages") if isinstance(request, dict) else None
    if not isinstance(messages, list) or not messages or not all(isinstance(message, dict) for message in messages):
        raise ValueError("a request has messages, a list of objects")
    if request.get("stream"):
        raise ValueError("streaming is not available: a turn is recorded as a whole")
    if request.get("n") not in (None, 1):
        raise ValueError(f"n is {request['n']}, but a trajectory has one answer a turn")
    tools = request.get("tools") or []
    limit = request.get("max_completion_tokens", request.get("max_tokens"))
    if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit < 1):
        raise ValueError(f"max_tokens is {limit!r}, but must be a whole number from 1")
    return [_flatten_content(message) for message in messages], list(tools), limit


def _flatten_content(message: JsonObject) -> JsonObject:
    """Return the message with a text as content; parts of text are concatenated.

    Raises:
        ValueError: it contains images or audio.
    """
    content = message.get("content")
    if isinstance(content, list):
        if not all(isinstance(part, dict) and part.get("type") == "text" for part in content):
            raise ValueError("only messages of text are supported")
        content = "".join(str(part.get("text", "")) for part in content)
    if content is not None and not isinstance(content, str):
        raise ValueError("the content of a message is a text or parts of text")
    return message | {"content": content or ""}


async def _read_body(receive: _Receive) -> bytes:
    body, more = b"", True
    while more:
        event = await receive()
        if event["type"] == "http.disconnect":
            raise ValueError("the client has disconnected")
        body += event.get("body", b"")
        more = event.get("more_body", False)
        if len(body) > _MAX_BYTES:
            raise ValueError(f"a request has at most {_MAX_BYTES} bytes")
    return body


async def _refuse(send: _Send, status: int, message: str, code: str | None = None) -> None:
    await _send(send, status, {"error": {"message": message, "type": "invalid_request_error", "param": None, "code": code}})


async def _send(send: _Send, status: int, value: JsonObject) -> None:
    body = json.dumps(value).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
