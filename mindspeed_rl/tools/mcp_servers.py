"""Tools of MCP servers, by the `mcp` library: started as processes with stdio, or reached over HTTP.

All trajectories share a server; with `scope: trajectory` each one has its own connections, from its first call to its end, for
servers with state. A server that ends is started again by the next call.
"""

from __future__ import annotations

import asyncio
import json
import logging
import shutil
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from mindspeed_rl import registry
from mindspeed_rl.files import describe_missing, read_json
from mindspeed_rl.http_client import CONNECT_LIMIT_S
from mindspeed_rl.isolation.pool import WorkerPool
from mindspeed_rl.isolation.variables import expand_variables
from mindspeed_rl.tools.interface import JsonObject, ToolCall
from mindspeed_rl.tools.mcp_transport import UNCOMPRESSED, bound_reply, build_relay_command
from mindspeed_rl.tools.option_reader import OptionReader
from mindspeed_rl.tools.process_worker import truncate_middle
from mindspeed_rl.tools.running import run_in_thread
from mindspeed_rl.tools.schemas import validate_schema
from mindspeed_rl.tools.tool import CallSettings, Config, RowOptions, Session, Tool, ToolError, ToolResult

if TYPE_CHECKING:
    from mcp import Client
    from mcp_types import CallToolResult

_LOG = logging.getLogger(__name__)
_CONNECT_LIMIT_S = 60.0
#: a call is cancelled this much later than by the library itself
_GRACE_S = 1.0
_PING_LIMIT_S = 2.0
_MAX_PAGES, _MAX_TOOLS = 100, 1000
#: the library waits about seven seconds for a server that does not end
_CLOSE_LIMIT_S = 12.0


@dataclass(frozen=True)
class _Server:
    """The command of one server with its arguments, or its address.

    Attributes:
        prefix: prefix of the names of its tools, to distinguish equal names of two servers.
    """

    name: str
    command: str | None = None
    args: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    cwd: str | None = None
    url: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    prefix: str = ""


def _read_server(name: str, values: object, where: str) -> _Server:
    """Read a server in the common form of `mcpServers`; ${NAME} in env and headers is an environment variable.

    Raises:
        ValueError: neither command nor url, no such program or folder, or a variable that is not set.
    """
    options = OptionReader(values, where)
    command, url, token = options.read_text("command"), options.read_text("url"), options.read_text("auth_token")
    args, cwd, prefix = options.read_texts("args"), options.read_text("cwd"), options.read_text("prefix") or ""
    env, headers = options.read_mapping("env"), options.read_mapping("headers")
    options.discard("type", "transport")  # determined by the other keys
    options.reject_unknown()
    if (command is None) == (url is None):
        raise ValueError(f"{where}: an MCP server has a command, which is started, or a url, one of them")
    if command is not None and shutil.which(command) is None:
        raise ValueError(f"{where}.command: there is no program '{command}'")
    if cwd is not None and not Path(cwd).is_dir():
        raise ValueError(f"{where}.cwd: there is no folder '{cwd}'")
    if url is not None and (urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).hostname):
        raise ValueError(f"{where}.url is '{url}', but must look like http://host:port/mcp")
    if token is not None:
        headers["Authorization"] = f"Bearer {token}"
    env, headers = expand_variables(env, f"{where}.env"), expand_variables(headers, f"{where}.headers")
    return _Server(name, command, tuple(args), env, cwd, url, headers, prefix)


class McpServers(Tool):
    """The tools of several servers.

    Args:
        config: servers by name, or mcp_servers_config_path, a JSON file with them under mcpServers; tool_selected_list, the
            tools to offer, by default all; scope, "run" or "trajectory".

    Raises:
        ValueError: the configuration is invalid, or the library is missing.
    """

    def __init__(self, config: Config, settings: CallSettings, where: str) -> None:
        options = OptionReader(config, where)
        servers, path = options.read("servers", {}), options.read_text("mcp_servers_config_path")
        self._selection, self._scope = options.read_texts("tool_selected_list"), options.read_text("scope", "run")
        options.reject_unknown()
        if self._scope not in ("run", "trajectory"):
            raise ValueError(f"{where}.scope is {self._scope!r}, but must be one of run, trajectory")
        if not isinstance(servers, Mapping):
            raise ValueError(f"{where}.servers must be a mapping of names to servers, not {type(servers).__name__}")
        if path is not None:
            servers = {**_read_servers_file(path, where), **servers}
        if not servers:
            raise ValueError(f"{where}: no servers; give them under servers, or a file under mcp_servers_config_path")
        self._servers = [_read_server(str(name), values, f"{where}.servers.{name}") for name, values in servers.items()]
        _check_library(where)
        super().__init__(settings)
        self._where = where
        self._connections = [_Connection(server) for server in self._servers]
        self._sources: dict[str, tuple[int, str]] = {}  # name of a function -> index of its server, and its name there

    async def start(self, processes: WorkerPool) -> None:
        """See `Tool`; connects to every server and lists its tools."""
        try:
            listings = await asyncio.gather(*(connection.list_tools() for connection in self._connections))
        except ToolError as error:
            raise ValueError(f"{self._where}: {error}") from None
        offered = [f"{server.prefix}{tool['name']}" for server, tools in zip(self._servers, listings) for tool in tools]
        for name in self._selection:
            if name not in offered:
                hint = registry.did_you_mean(name, offered)
                raise ValueError(f"{self._where}.tool_selected_list: no server has the tool {name!r}{hint}")
        for index, (server, tools) in enumerate(zip(self._servers, listings)):
            for tool in tools:
                name = f"{server.prefix}{tool['name']}"
                if self._selection and name not in self._selection:
                    continue
                if name in self._sources:
                    other = self._servers[self._sources[name][0]].name
                    raise ValueError(f"{self._where}: {other} and {server.name} both have the tool {name!r}; give one a prefix")
                self._sources[name] = (index, tool["name"])
                validate = partial(validate_schema, {**tool, "name": name}, f"{self._where}.servers.{server.name}")
                self.schemas.append(await run_in_thread(validate))
        if self._scope == "trajectory":  # each one has its own connections
            await self.close()

    def open(self, options: RowOptions) -> Session:
        """See `Tool`."""
        is_shared = self._scope == "run"
        connections = self._connections if is_shared else [_Connection(server) for server in self._servers]

        async def run(call: ToolCall, timeout_s: float) -> ToolResult:
            index, name = self._sources[call.name]
            return await connections[index].call(name, call.arguments, timeout_s)

        # a call to a server that has ended waits for a new one, and then has its full time
        grace_s = _CONNECT_LIMIT_S + 2 * _GRACE_S
        return Session(run, grace_s=grace_s) if is_shared else Session(run, partial(_close_all, connections), grace_s=grace_s)

    async def close(self) -> None:
        """See `Tool`."""
        await _close_all(self._connections)


async def _close_all(connections: Sequence[_Connection]) -> None:
    await asyncio.gather(*(connection.close() for connection in connections))


class _Connection:
    """One connection, created on demand. Its contexts are entered and exited in one task, as the library requires."""

    def __init__(self, server: _Server) -> None:
        self._server = server
        self._task: asyncio.Task[None] | None = None
        self._client: Client | None = None
        self._stop = asyncio.Event()
        self._connecting = asyncio.Lock()

    async def list_tools(self) -> list[JsonObject]:
        """Return name, description and parameters of every tool.

        Raises:
            ToolError: the server cannot be reached or does not reply.
        """
        client = await self._connect()
        try:
            return await asyncio.wait_for(self._list_pages(client), _CONNECT_LIMIT_S)
        except ToolError:
            raise
        except Exception as error:  # noqa: BLE001 (the library raises many types, and groups of them)
            reason = _describe(error)
            raise ToolError(f"MCP server {self._server.name} does not list its tools: {reason}", "crashed") from None

    async def _list_pages(self, client: Client) -> list[JsonObject]:
        tools, cursors = list[JsonObject](), set[str]()
        cursor: str | None = None
        while True:
            page = await client.list_tools(cursor=cursor)
            excesses = {
                f"more than {_MAX_TOOLS:,} tools": len(tools) + len(page.tools) > _MAX_TOOLS,
                f"more than {_MAX_PAGES} pages of tools": len(cursors) == _MAX_PAGES,
                "the same page of tools twice": page.next_cursor in cursors,
            }
            for excess, is_there in excesses.items():
                if is_there:
                    raise ToolError(f"MCP server {self._server.name} lists {excess}", "crashed")
            for tool in page.tools:
                tools.append({"name": tool.name, "description": tool.description or "", "parameters": tool.input_schema})
            cursor = page.next_cursor
            if not cursor:
                return tools
            cursors.add(cursor)

    async def call(self, name: str, arguments: JsonObject, timeout_s: float) -> ToolResult:
        """Call a tool of the server and return its text and images.

        Raises:
            ToolError: the tool reports a failure, the server has ended, or does not reply in time.
        """
        from mcp import MCPError
        from mcp_types import CONNECTION_CLOSED, REQUEST_TIMEOUT

        client = await self._connect()
        try:
            request = client.call_tool(name, dict(arguments), read_timeout_seconds=timeout_s)
            result = await asyncio.wait_for(request, timeout_s + _GRACE_S)
        except asyncio.TimeoutError:
            await self._reset_if_silent(client)
            raise ToolError(f"took longer than {timeout_s:g} s and was ended", "timeout") from None
        except MCPError as error:
            if error.code == REQUEST_TIMEOUT:
                await self._reset_if_silent(client)
                raise ToolError(f"took longer than {timeout_s:g} s and was ended", "timeout") from None
            if error.code == CONNECTION_CLOSED:
                await self._reset(client)
                raise ToolError(f"the server {self._server.name} has ended", "crashed") from None
            raise ToolError(error.message) from None
        except ValueError as error:  # of a reply that is not a result; calls of other samples go on
            raise ToolError(f"the server {self._server.name} sent a wrong reply: {_describe(error)}") from None
        except Exception as error:  # noqa: BLE001 (the library raises many types, and groups of them)
            await self._reset_if_silent(client)
            raise ToolError(f"the server {self._server.name} cannot be reached: {_describe(error)}", "crashed") from None
        text = _read_text(result)
        if result.is_error:
            raise ToolError(text)
        images = (f"data:{part.mime_type};base64,{part.data}" for part in result.content if part.type == "image")
        return ToolResult(text, images=tuple(images))

    async def close(self) -> None:
        """End the connection, and the server if it was started for it; may be called twice."""
        task, self._task, self._client = self._task, None, None
        self._stop.set()
        if task is None:
            return
        done, _ = await asyncio.wait([task], timeout=_CLOSE_LIMIT_S)
        if not done:
            task.cancel()
            await asyncio.wait([task], timeout=_CLOSE_LIMIT_S)

    async def _connect(self) -> Client:
        async with self._connecting:
            if self._client is not None and self._task is not None and not self._task.done():
                return self._client
            self._stop = asyncio.Event()
            ready: asyncio.Future[Client] = asyncio.get_running_loop().create_future()
            self._task = asyncio.create_task(self._serve(ready, self._stop))
            try:
                self._client = await asyncio.wait_for(asyncio.shield(ready), _CONNECT_LIMIT_S)
            except asyncio.TimeoutError:
                await self.close()
                raise ToolError(f"MCP server {self._server.name} does not start the session", "crashed") from None
            except ToolError:
                await self.close()
                raise
            except asyncio.CancelledError:
                self._task.cancel()
                raise
            return self._client

    async def _reset(self, client: Client) -> None:
        """Close the connection, so that the next call connects again, unless another call has done so already."""
        async with self._connecting:
            if self._client is client:
                await self.close()

    async def _reset_if_silent(self, client: Client) -> None:
        """Keep the connection after a late call only if the server still replies: others would wait for their limit too."""
        try:
            await asyncio.wait_for(client.send_ping(), _PING_LIMIT_S)
        except Exception:  # noqa: BLE001 (the library raises many types, and groups of them)
            await self._reset(client)

    async def _serve(self, ready: asyncio.Future[Client], stop: asyncio.Event) -> None:
        try:
            async with _open_client(self._server) as client:
                if not ready.done():
                    ready.set_result(client)
                await stop.wait()
        except Exception as error:  # noqa: BLE001 (the library raises many types, and groups of them)
            reason = _describe(error)
            if ready.done():
                _LOG.debug("MCP server %s ended: %s", self._server.name, reason)
            else:
                ready.set_exception(ToolError(f"MCP server {self._server.name} cannot be reached: {reason}", "crashed"))
        finally:
            if not ready.done():
                ready.cancel()


@asynccontextmanager
async def _open_client(server: _Server) -> AsyncIterator[Client]:
    from mcp import Client, StdioServerParameters, stdio_client

    if server.command is not None:
        command, arguments = build_relay_command(server.command, server.args)
        parameters = StdioServerParameters(command=command, args=arguments, env=dict(server.env) or None, cwd=server.cwd)
        async with Client(stdio_client(parameters, errlog=sys.__stderr__ or sys.stderr)) as client:
            yield client
        return
    import httpx2
    from mcp.client.streamable_http import streamable_http_client

    assert server.url is not None  # one of the two is set
    # the deadline of a call is the limit; until then minutes may pass without data
    timeout = httpx2.Timeout(CONNECT_LIMIT_S, read=None)
    headers, hooks = UNCOMPRESSED | dict(server.headers), {"response": [bound_reply]}
    async with httpx2.AsyncClient(headers=headers, timeout=timeout, event_hooks=hooks) as http:
        async with Client(streamable_http_client(server.url, http_client=http)) as client:
            yield client


def _check_library(where: str) -> None:
    try:
        import mcp
    except ImportError as error:
        raise ValueError(f"{where}: MCP servers need the mcp library: pip install 'mindspeed_rl[agents]' ({error})") from None
    if not hasattr(mcp, "Client"):
        raise ValueError(f"{where}: MCP servers need mcp 2.0 or later: pip install 'mindspeed_rl[agents]'")


def _read_servers_file(path: str, where: str) -> JsonObject:
    file = Path(path)
    if not file.is_file():
        raise ValueError(f"{where}.mcp_servers_config_path: there is no file '{path}': {describe_missing(path)}")
    try:
        servers = read_json(file)["mcpServers"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{where}.mcp_servers_config_path: '{path}' has no servers under mcpServers: {error}") from None
    if not isinstance(servers, dict):
        raise ValueError(f"{where}.mcp_servers_config_path: mcpServers of '{path}' is not a mapping")
    return servers


def _read_text(result: CallToolResult) -> str:
    """Return the texts of a result, with other content named by its type; structured content if there is nothing else."""
    parts = [part.text if part.type == "text" else f"[{part.type}]" for part in result.content]
    if not parts and result.structured_content is not None:
        parts = [json.dumps(result.structured_content, ensure_ascii=False)]
    return truncate_middle("\n".join(parts))


def _describe(error: BaseException) -> str:
    """Return the first exception of a group as text."""
    while isinstance(inner := getattr(error, "exceptions", None), tuple) and inner:
        error = inner[0]
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]
