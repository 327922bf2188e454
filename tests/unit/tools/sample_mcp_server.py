"""A small MCP server for the tests of this folder: `python sample_mcp_server.py [PORT]`, over stdio or HTTP on loopback."""

import asyncio
import os
import sys
import time

from mcp.server.mcpserver import Image, MCPServer

server = MCPServer("sample")
REMEMBERED = []


@server.tool()
def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


@server.tool()
def remember(word: str) -> str:
    """Remembers a word and tells all it knows."""
    REMEMBERED.append(word)
    return " ".join(REMEMBERED)


@server.tool()
def fail() -> str:
    """Fails."""
    raise ValueError("as always")


@server.tool()
async def wait() -> str:
    """Takes long."""
    await asyncio.sleep(600)
    return "done"


@server.tool()
async def hang() -> str:
    """Stops the server's loop."""
    time.sleep(600)
    return "done"


@server.tool()
def die() -> str:
    """Ends the server."""
    os._exit(3)


@server.tool()
def speak() -> str:
    """Says much."""
    return "begin" + "x" * (4 << 20) + "end"


@server.tool()
def draw() -> Image:
    """Draws."""
    return Image(data=b"no picture", format="png")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        server.run("streamable-http", port=int(sys.argv[1]))
    else:
        server.run("stdio")
