"""The ways to rollout servers: a Ray actor of the run, or HTTP to one that was started by hand."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import aiohttp
from ray.actor import ActorHandle

from mindspeed_rl.config import GenerateConfig
from mindspeed_rl.serving.server_process import ServerProcess

#: the token that servers ask for, where no file has it
TOKEN_VARIABLE = "MINDSPEED_RL_SERVER_TOKEN"
#: below this path a server answers the calls of `RolloutService`
CALLS_PATH = "/rollout"


def server_token(config: GenerateConfig) -> str:
    """What calls of servers that were started by hand carry.

    Raises:
        ValueError: neither the file nor the variable has it.
    """
    path = config.vllm_server_token_file
    try:
        token = os.environ.get(TOKEN_VARIABLE, "") if path is None else Path(path).expanduser().read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"generate_config.vllm_server_token_file: {path} cannot be read ({error.strerror}).") from None
    if not token.strip():
        where = f"the variable {TOKEN_VARIABLE} is not set" if path is None else f"{path} is empty"
        raise ValueError(
            f"generate_config.vllm_server_token_file: {where}; it holds the token that `mindspeed-rl rollout` was started with."
        )
    return token.strip()


class RayServer:
    """A server of this run."""

    def __init__(self, name: str, actor: ActorHandle[ServerProcess]) -> None:
        self.name, self.actor = name, actor

    async def call(self, name: str, **arguments: Any) -> Any:
        """See `Server.call`."""
        return await self.actor.call.remote(name, arguments)


class HttpServer:
    """A server that was started by hand."""

    def __init__(self, host: str, port: int, token: str) -> None:
        self.name = f"rollout server {host}:{port}"
        self._url = f"http://{f'[{host}]' if ':' in host else host}:{port}{CALLS_PATH}"
        self._headers = {"Authorization": f"Bearer {token}"}
        self._session: aiohttp.ClientSession | None = None

    async def call(self, name: str, **arguments: Any) -> Any:
        """See `Server.call`; deadlines are the caller's.

        Raises:
            RuntimeError: the server said no; its own words.
        """
        # made here, because aiohttp ties a session to the loop that runs when it is made
        if self._session is None:
            limits = aiohttp.ClientTimeout(total=None)
            self._session = aiohttp.ClientSession(headers=self._headers, timeout=limits)
        async with self._session.post(f"{self._url}/{name}", json=arguments) as answer:
            if answer.status != 200:
                raise RuntimeError(f"{answer.status} {(await answer.text()).strip()[:500]}")
            return await answer.json()

    async def close(self) -> None:
        """Connections are closed."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()
