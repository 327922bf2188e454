"""Clients of rollout servers: of a Ray actor of the run, or over HTTP of a standalone server."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, cast

from ray.actor import ActorHandle

from mindspeed_rl.data.images import embed_image, find_file, read_image
from mindspeed_rl.http_client import HttpClient, HttpError, HttpReply
from mindspeed_rl.serving.replies import call_server
from mindspeed_rl.serving.server_process import ServerProcess

#: twice what `RolloutService.news` returns: a reply is read in the loop that keeps all deadlines
_MAX_REPLY_BYTES = 16 << 20
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
    """A client of a standalone server. Images in files that the server does not have travel with their requests.

    Attributes:
        name, host: name in messages, and host of the server.
    """

    def __init__(self, host: str, port: int, token: str) -> None:
        self.name, self.host = f"rollout server {host}:{port}", host
        self._url = f"http://{f'[{host}]' if ':' in host else host}:{port}{CALLS_PATH}"
        self._client = HttpClient(_MAX_REPLY_BYTES, headers={"Authorization": f"Bearer {token}"}, follows_redirects=True)
        self._missing: dict[str, bool] = {}  # file of images -> the server does not have it

    async def call(self, name: str, **arguments: object) -> Any:
        """Return the result of a call; the caller sets a deadline. See `ServerClient.call`.

        Raises:
            RuntimeError: the server refused the call; its own message.
            ConnectionError: the server cannot be reached.
        """
        if name == "submit":
            arguments = {"requests": await self._embed_images(cast("Sequence[dict[str, Any]]", arguments["requests"]))}
        try:
            return await self._client.request("POST", f"{self._url}/{name}", _read_result, json=arguments)
        except HttpError as error:
            raise ConnectionError(str(error)) from error

    async def _embed_images(self, requests: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the requests with the bytes of the images that the server cannot read."""
        files_by_image = {image: find_file(image) for request in requests for image in request["sampling"].get("images", ())}
        files = dict(file for file in files_by_image.values() if file is not None and file[0] not in self._missing)
        if files:
            missing = await call_server(self, "list_missing", {"files": files})
            self._missing |= {path: path in missing for path in files}
        sent = {
            image: await asyncio.to_thread(_embed, image) if file is not None and self._missing[file[0]] else image
            for image, file in files_by_image.items()
        }
        if sent == {image: image for image in files_by_image}:
            return list(requests)
        return [
            request | {"sampling": request["sampling"] | {"images": [sent[image] for image in request["sampling"]["images"]]}}
            for request in requests
        ]

    async def close(self) -> None:
        """Close the connections."""
        await self._client.close()


def _embed(image: str) -> str:
    return embed_image(read_image(image))


def _read_result(reply: HttpReply) -> Any:
    if reply.status != 200:
        raise RuntimeError(f"{reply.status} {reply.text.strip()[:500]}")
    return reply.read_json()
