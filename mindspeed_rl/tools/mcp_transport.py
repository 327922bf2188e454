"""Connections to MCP servers with limits: the library parses a message in the event loop, so its size is checked before."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

from mindspeed_rl.tools import mcp_relay
from mindspeed_rl.tools.running import run_in_thread

if TYPE_CHECKING:
    import httpx2

#: a compressed reply could be larger than it looks
UNCOMPRESSED = {"accept-encoding": "identity"}


def build_relay_command(command: str, arguments: tuple[str, ...]) -> tuple[str, list[str]]:
    """Return program and arguments that start a server behind `mcp_relay`."""
    return sys.executable, ["-I", "-S", mcp_relay.__file__, command, *arguments]


async def bound_reply(response: httpx2.Response) -> None:
    """Give a reply the limits of `mcp_relay`, before its body is read; the library limits the events of a stream itself.

    Raises:
        httpx2.ReadError: it is compressed.
    """
    import httpx2

    class BoundedStream(httpx2.AsyncByteStream):
        """A body that is read up to the limits."""

        def __init__(self, inner: httpx2.AsyncByteStream) -> None:
            self._inner = inner

        async def __aiter__(self) -> AsyncIterator[bytes]:
            body = bytearray()
            async for data in self._inner:
                body += data
                if len(body) > mcp_relay.MAX_MESSAGE_BYTES:
                    break
            if reason := await run_in_thread(lambda: mcp_relay.find_excess(body)):
                raise httpx2.ReadError(f"the server sent {reason}")
            yield bytes(body)

        async def aclose(self) -> None:
            await self._inner.aclose()

    if response.headers.get("content-encoding", "identity") != "identity":
        raise httpx2.ReadError("the server sent a compressed reply, which was not requested")
    if not response.headers.get("content-type", "").lower().startswith("text/event-stream"):
        assert isinstance(response.stream, httpx2.AsyncByteStream)  # of an asynchronous client
        response.stream = BoundedStream(response.stream)
