"""Clients of rollout servers: of a Ray actor of the run, or over HTTP of a standalone server."""

from __future__ import annotations

from typing import Any

import aiohttp
from ray.actor import ActorHandle

from mindspeed_rl.serving.server_process import ServerProcess

#: path of the calls of `RolloutService`
CALLS_PATH = "/rollout"


class RayServerClient:
    """A client of a server of this run."""

    def __init__(self, name: str, actor: ActorHandle[ServerProcess]) -> None:
        self.name, self.actor = name, actor

    async def call(self, name: str, **arguments: object) -> Any:
        """Return the result of a call; see `ServerClient.call`."""
        return await self.actor.call.remote(name, arguments)


class HttpServerClient:
    """A client of a standalone server."""

    def __init__(self, host: str, port: int, token: str) -> None:
        self.name = f"rollout server {host}:{port}"
        self._url = f"http://{f'[{host}]' if ':' in host else host}:{port}{CALLS_PATH}"
        self._headers = {"Authorization": f"Bearer {token}"}
        self._session: aiohttp.ClientSession | None = None

    async def call(self, name: str, **arguments: object) -> Any:
        """Return the result of a call; the caller sets a deadline. See `ServerClient.call`.

        Raises:
            RuntimeError: the server refused the call; its own message.
            ConnectionError: the server cannot be reached.
        """
        # made here, because aiohttp ties a session to the running loop
        if self._session is None:
            self._session = aiohttp.ClientSession(headers=self._headers, timeout=aiohttp.ClientTimeout(total=None))
        try:
            async with self._session.post(f"{self._url}/{name}", json=arguments) as response:
                if response.status != 200:
                    raise RuntimeError(f"{response.status} {(await response.text()).strip()[:500]}")
                return await response.json()
        except aiohttp.ClientError as error:
            raise ConnectionError(str(error) or type(error).__name__) from error

    async def close(self) -> None:
        """Close the connections."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()
