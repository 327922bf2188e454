"""Environments with OpenEnv's protocol: `openenv:URL` of a server, which gives every sample a session over a WebSocket.

Messages are JSON: {"type": "reset" | "step" | "close", "data"}; the server replies {"type": "observation", "data":
{"observation", "reward", "done"}} or {"type": "error", "data": {"message"}}.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from mindspeed_rl.http_client import HttpClient, HttpError, WebSocket
from mindspeed_rl.tools.interface import JsonObject

PREFIX = "openenv:"
_MAX_BYTES = 64 << 20


class OpenEnvError(RuntimeError):
    """The server of an environment refused a message, or closed the session."""


class OpenEnvEnvironment:
    """An episode at a server; see `interface.Environment`.

    Args:
        url: address of the server.
        action: field of the action that gets the model's text; "" where the text itself is the action as a JSON object.
        constants: further fields of every action.
        observation: field of an observation that the model reads; "" for all of it as JSON.
        reset: columns of the row that start an episode, such as seed.
        system: text of the first message of the conversation.
    """

    def __init__(
        self,
        url: str,
        *,
        action: str = "message",
        constants: Mapping[str, object] | None = None,
        observation: str = "",
        reset: Sequence[str] = (),
        system: str = "",
    ) -> None:
        self._url = f"{url.rstrip('/').removesuffix('/ws')}/ws"
        self._action, self._constants, self._observation = action, dict(constants or {}), observation
        self._reset, self._system = tuple(reset), system
        self._client = HttpClient(_MAX_BYTES)
        self._socket: WebSocket | None = None

    async def reset(self, task: Mapping[str, object]) -> list[JsonObject]:
        """Open a session and start an episode.

        Raises:
            OpenEnvError: the server refuses it.
        """
        try:
            self._socket = await self._client.open_socket(self._url)
        except HttpError as error:
            raise OpenEnvError(f"{self._url}: {error}") from None
        missing = [name for name in self._reset if task.get(name) is None]
        if missing:
            raise OpenEnvError(f"the row has no column {', '.join(missing)}, with which an episode starts")
        data = await self._exchange("reset", {name: task[name] for name in self._reset})
        system = [{"role": "system", "content": self._system}] if self._system else []
        return [*system, {"role": "user", "content": self._show(data)}]

    async def step(self, messages: Sequence[JsonObject]) -> tuple[list[JsonObject], float | None, bool]:
        """Send the model's turn as an action.

        Raises:
            OpenEnvError: the server refuses it.
        """
        text = str(messages[-1]["content"])
        action: object = {self._action: text}
        if not self._action:
            try:
                action = json.loads(text)
            except ValueError:
                action = None
            if not isinstance(action, dict):
                return [{"role": "user", "content": "The action must be one JSON object."}], 0.0, False
        assert isinstance(action, dict)
        data = await self._exchange("step", self._constants | action)
        reward, done = data.get("reward"), bool(data.get("done"))
        return [] if done else [{"role": "user", "content": self._show(data)}], None if reward is None else float(reward), done

    async def close(self) -> None:
        """End the session; may be called without one."""
        if self._socket is not None and not self._socket.closed:
            await self._socket.send(json.dumps({"type": "close"}))
            await self._socket.close()
        await self._client.close()

    async def _exchange(self, kind: str, data: Mapping[str, object]) -> dict[str, Any]:
        assert self._socket is not None  # the loop calls reset first
        await self._socket.send(json.dumps({"type": kind, "data": data}, default=str))
        try:
            message = json.loads(await self._socket.receive())
        except HttpError:
            raise OpenEnvError(f"{self._url} closed the session after {kind}") from None
        if message.get("type") != "observation":
            raise OpenEnvError(f"{self._url} replied to {kind}: {str(message.get('data', message))[:500]}")
        return message["data"]

    def _show(self, data: Mapping[str, Any]) -> str:
        observation = data.get("observation")
        if self._observation and isinstance(observation, Mapping):
            if self._observation not in observation:
                raise OpenEnvError(f"an observation has {', '.join(observation)}, not {self._observation}")
            observation = observation[self._observation]
        return observation if isinstance(observation, str) else json.dumps(observation, ensure_ascii=False)
