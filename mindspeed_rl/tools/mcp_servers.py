"""Tools of MCP servers, by the `mcp` library: started as processes and spoken to over stdio, or reached over HTTP.

A server is shared by all trajectories, or with `scope: trajectory` connected to by each for itself, from its first call to its
end, for servers that remember what they were told. A server that ends is started again by the next call.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import shutil
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from mindspeed_rl import registry
from mindspeed_rl.tools.interface import ToolCall
from mindspeed_rl.tools.option_reader import OptionReader
from mindspeed_rl.tools.process_worker import truncate_middle
from mindspeed_rl.tools.processes import ProcessPool
from mindspeed_rl.tools.schemas import validate_schema
from mindspeed_rl.tools.tool import IGNORED_OPTIONS, AcceptedOptions, CallSettings, Session, ToolError, ToolResult

if TYPE_CHECKING:
    from mcp import Client

_LOG = logging.getLogger(__name__)
_VARIABLE = re.compile(r"\$\{(\w+)\}")
_CONNECT_LIMIT_S = 60.0
#: how much later than the library's own end of time a call is ended here
_GRACE_S = 1.0
#: the library gives a server that does not want to end about seven seconds
_CLOSE_LIMIT_S = 12.0


@dataclass(frozen=True)
class Server:
    """How one server is reached: a command with its arguments, or an address.

    Attributes:
        prefix: of the names of its tools, where two servers would have the same.
    """

    name: str
    command: str | None = None
    args: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    cwd: str | None = None
    url: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    prefix: str = ""


def read_server(name: str, values: Any, where: str) -> Server:
    """Return a server as it is written in the field's `mcpServers`; ${NAME} in env and headers is the variable of that name.

    Raises:
        ValueError: neither command nor url, no such program or folder, or a variable that is not set.
    """
    options = OptionReader(values, where)
    command, url, token = options.text("command"), options.text("url"), options.text("auth_token")
    args, cwd, prefix = options.texts("args"), options.text("cwd"), options.text("prefix") or ""
    env, headers = options.mapping("env"), options.mapping("headers")
    options.ignore("type", "transport")  # said by what else is there
    options.end()
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
    env = {key: _filled(value, f"{where}.env.{key}") for key, value in env.items()}
    headers = {key: _filled(value, f"{where}.headers.{key}") for key, value in headers.items()}
    return Server(name, command, tuple(args), env, cwd, url, headers, prefix)


def _filled(value: str, where: str) -> str:
    for name in _VARIABLE.findall(value):
        if name not in os.environ:
            raise ValueError(f"{where}: the environment variable {name} is not set")
    return _VARIABLE.sub(lambda match: os.environ[match[1]], value)


class McpServers:
    """The tools of several servers.

    Args:
        config: servers by name, or mcp_servers_config_path, a JSON file with them under mcpServers; tool_selected_list, the
            tools to offer, all if absent; scope, "run" or "trajectory".

    Raises:
        ValueError: the configuration is wrong, or the library is missing.
    """

    modules: tuple[str, ...] = ()
    takes: AcceptedOptions = IGNORED_OPTIONS

    def __init__(self, config: Mapping[str, Any], settings: CallSettings, where: str) -> None:
        options = OptionReader(config, where)
        servers, path = options.take("servers", {}), options.text("mcp_servers_config_path")
        self._chosen, self._scope = options.texts("tool_selected_list"), options.text("scope", "run")
        options.end()
        if self._scope not in ("run", "trajectory"):
            raise ValueError(f"{where}.scope is {self._scope!r}, but must be one of run, trajectory")
        if not isinstance(servers, Mapping):
            raise ValueError(f"{where}.servers must be a mapping of names to servers, not {type(servers).__name__}")
        if path is not None:
            servers = {**_servers_in(path, where), **servers}
        if not servers:
            raise ValueError(f"{where}: no servers; give them under servers, or a file under mcp_servers_config_path")
        self._servers = [read_server(str(name), values, f"{where}.servers.{name}") for name, values in servers.items()]
        _need_library(where)
        self._where, self.settings = where, settings
        self._connections = [Connection(server) for server in self._servers]
        self._schemas: list[dict[str, Any]] = []
        self._homes: dict[str, tuple[int, str]] = {}

    @property
    def schemas(self) -> list[dict[str, Any]]:
        """See `Tool`."""
        return self._schemas

    async def start(self, processes: ProcessPool) -> None:
        """See `Tool`; connects to every server and asks for its tools."""
        try:
            told = await asyncio.gather(*(connection.tools() for connection in self._connections))
        except ToolError as error:
            raise ValueError(f"{self._where}: {error}") from None
        offered = [f"{server.prefix}{tool['name']}" for server, tools in zip(self._servers, told) for tool in tools]
        for name in self._chosen:
            if name not in offered:
                hint = registry.did_you_mean(name, offered)
                raise ValueError(f"{self._where}.tool_selected_list: no server has the tool {name!r}{hint}")
        for index, (server, tools) in enumerate(zip(self._servers, told)):
            for tool in tools:
                name = f"{server.prefix}{tool['name']}"
                if self._chosen and name not in self._chosen:
                    continue
                if name in self._homes:
                    other = self._servers[self._homes[name][0]].name
                    raise ValueError(f"{self._where}: {other} and {server.name} both have the tool {name!r}; give one a prefix")
                self._homes[name] = (index, tool["name"])
                self._schemas.append(validate_schema({**tool, "name": name}, f"{self._where}.servers.{server.name}"))
        if self._scope == "trajectory":  # each has its own
            await asyncio.gather(*(connection.close() for connection in self._connections))

    def open(self, options: Mapping[str, Mapping[str, Any]]) -> Session:
        """See `Tool`."""
        if self._scope == "run":
            return _McpSession(self._connections, self._homes, owns=False)
        return _McpSession([Connection(server) for server in self._servers], self._homes, owns=True)

    async def close(self) -> None:
        """See `Tool`."""
        await asyncio.gather(*(connection.close() for connection in self._connections))


class _McpSession:
    # a call that finds its server gone waits for a new one, and then has its whole time
    serial, grace_s = False, _CONNECT_LIMIT_S + 2 * _GRACE_S

    def __init__(self, connections: list[Connection], homes: Mapping[str, tuple[int, str]], owns: bool) -> None:
        self._connections, self._homes, self._owns = connections, homes, owns

    async def call(self, call: ToolCall, timeout_s: float) -> ToolResult:
        """See `Session`."""
        index, name = self._homes[call.name]
        return ToolResult(await self._connections[index].call(name, call.arguments, timeout_s))

    async def close(self) -> float | None:
        """See `Session`."""
        if self._owns:
            await asyncio.gather(*(connection.close() for connection in self._connections))
        return None


class Connection:
    """One connection, made when it is needed. Its contexts are entered and left in a task of its own, as the library asks."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._task: asyncio.Task[None] | None = None
        self._client: Client | None = None
        self._stop = asyncio.Event()
        self._connecting = asyncio.Lock()

    async def tools(self) -> list[dict[str, Any]]:
        """Name, description and parameters of every tool.

        Raises:
            ToolError: the server cannot be reached or does not answer.
        """
        client, found, cursor = await self._connected(), [], None
        try:
            while True:
                page = await asyncio.wait_for(client.list_tools(cursor=cursor), _CONNECT_LIMIT_S)
                for tool in page.tools:
                    found.append({"name": tool.name, "description": tool.description or "", "parameters": tool.input_schema})
                cursor = page.next_cursor
                if not cursor:
                    return found
        except Exception as error:  # the library's own kinds, and those of its transports
            raise ToolError(f"MCP server {self._server.name} does not tell its tools: {_words(error)}", "crashed") from None

    async def call(self, name: str, arguments: Mapping[str, Any], timeout_s: float) -> str:
        """Return the text that the server's tool answers.

        Raises:
            ToolError: it says that it failed, the server has ended, or does not answer in time.
        """
        from mcp import MCPError
        from mcp_types import CONNECTION_CLOSED, REQUEST_TIMEOUT

        client = await self._connected()
        try:
            asked = client.call_tool(name, dict(arguments), read_timeout_seconds=timeout_s)
            result = await asyncio.wait_for(asked, timeout_s + _GRACE_S)
        except asyncio.TimeoutError:
            raise ToolError(f"took longer than {timeout_s:g} s and was ended", "timeout") from None
        except MCPError as error:
            if error.code == REQUEST_TIMEOUT:
                raise ToolError(f"took longer than {timeout_s:g} s and was ended", "timeout") from None
            if error.code == CONNECTION_CLOSED:
                await self._lost(client)
                raise ToolError(f"the server {self._server.name} has ended", "crashed") from None
            raise ToolError(error.message) from None
        except Exception as error:  # of the transport: closed streams, refused connections
            await self._lost(client)
            raise ToolError(f"the server {self._server.name} cannot be reached: {_words(error)}", "crashed") from None
        text = _text(result)
        if result.is_error:
            raise ToolError(text)
        return text

    async def close(self) -> None:
        """Return the connection ends, and the server if it was started for it; may be called twice."""
        task, self._task, self._client = self._task, None, None
        self._stop.set()
        if task is None:
            return
        done, _ = await asyncio.wait([task], timeout=_CLOSE_LIMIT_S)
        if not done:
            task.cancel()
            await asyncio.wait([task], timeout=_CLOSE_LIMIT_S)

    async def _connected(self) -> Client:
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
                raise ToolError(f"MCP server {self._server.name} does not begin to talk", "crashed") from None
            except ToolError:
                await self.close()
                raise
            except asyncio.CancelledError:
                self._task.cancel()
                raise
            return self._client

    async def _lost(self, client: Client) -> None:
        """Return the next call connects anew, unless another has done so already."""
        async with self._connecting:
            if self._client is client:
                await self.close()

    async def _serve(self, ready: asyncio.Future[Client], stop: asyncio.Event) -> None:
        try:
            async with _client(self._server) as client:
                if not ready.done():
                    ready.set_result(client)
                await stop.wait()
        except Exception as error:  # the library's own kinds, and groups of them
            if ready.done():
                _LOG.debug("MCP server %s ended: %s", self._server.name, _words(error))
            else:
                ready.set_exception(ToolError(f"MCP server {self._server.name} cannot be reached: {_words(error)}", "crashed"))
        finally:
            if not ready.done():
                ready.cancel()


@asynccontextmanager
async def _client(server: Server) -> AsyncIterator[Client]:
    from mcp import Client, StdioServerParameters, stdio_client

    if server.command is not None:
        words = {"command": server.command, "args": list(server.args), "env": dict(server.env) or None, "cwd": server.cwd}
        transport = stdio_client(StdioServerParameters(**words), errlog=sys.__stderr__ or sys.stderr)
        async with Client(transport) as client:
            yield client
        return
    import httpx2
    from mcp.client.streamable_http import streamable_http_client

    assert server.url is not None  # one of the two is given
    # a call's own deadline binds; until then nothing may come for minutes
    timeout = httpx2.Timeout(30.0, read=None)
    async with httpx2.AsyncClient(headers=dict(server.headers), timeout=timeout) as http:
        async with Client(streamable_http_client(server.url, http_client=http)) as client:
            yield client


def _need_library(where: str) -> None:
    try:
        import mcp
    except ImportError as error:
        raise ValueError(f"{where}: MCP servers need the mcp library: pip install 'mindspeed_rl[agents]' ({error})") from None
    if not hasattr(mcp, "Client"):
        raise ValueError(f"{where}: MCP servers need mcp 2.0 or later: pip install 'mindspeed_rl[agents]'")


def _servers_in(path: str, where: str) -> dict[str, Any]:
    file = Path(path)
    if not file.is_file():
        raise ValueError(f"{where}.mcp_servers_config_path: there is no file '{path}'")
    try:
        servers = json.loads(file.read_text(encoding="utf-8"))["mcpServers"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{where}.mcp_servers_config_path: '{path}' has no servers under mcpServers: {error}") from None
    if not isinstance(servers, dict):
        raise ValueError(f"{where}.mcp_servers_config_path: mcpServers of '{path}' is no mapping")
    return servers


def _text(result: Any) -> str:
    """Return the texts of a result; what is no text is named by its kind; structured content where nothing else is said."""
    parts = [part.text if part.type == "text" else f"[{part.type}]" for part in result.content]
    if not parts and result.structured_content is not None:
        parts = [json.dumps(result.structured_content, ensure_ascii=False)]
    return truncate_middle("\n".join(parts))


def _words(error: BaseException) -> str:
    """Return the first reason in a group of exceptions."""
    while isinstance(inner := getattr(error, "exceptions", None), tuple) and inner:
        error = inner[0]
    return f"{type(error).__name__}: {error}"[:300]
