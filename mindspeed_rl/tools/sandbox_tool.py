"""The tool `sandbox`: a sandbox for each sample, with commands to run and files to read, write and edit."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Mapping
from typing import Any, ClassVar, TypeVar

from mindspeed_rl.isolation.pool import WorkerPool
from mindspeed_rl.tools.interface import JsonObject, ToolCall
from mindspeed_rl.tools.option_reader import OptionReader
from mindspeed_rl.tools.sandbox_grader import Grader
from mindspeed_rl.tools.sandbox_interface import MAX_FILE_BYTES, CommandResult, Sandbox, SandboxError
from mindspeed_rl.tools.sandboxes import SandboxPool
from mindspeed_rl.tools.tool import AcceptedOptions, CallSettings, Config, RowOptions, Session, Tool, ToolError, ToolResult

_LOG = logging.getLogger(__name__)
_GRACE_S = 20.0
#: gradings of one sample, where a sandbox fails; and the start of another one, to learn whether it is to blame
_MAX_ATTEMPTS, _PROBE_LIMIT_S = 2, 150.0
_T = TypeVar("_T")


def _describe(name: str, description: str, **parameters: str) -> JsonObject:
    properties = {key: {"type": "string", "description": text} for key, text in parameters.items()}
    schema = {"type": "object", "properties": properties, "required": list(parameters)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}


_SCHEMAS = [
    _describe("run", "Runs a shell command and returns its output.", command="The command."),
    _describe("read", "Returns a file.", path="Path of the file."),
    _describe("write", "Writes a file.", path="Path of the file.", content="The text."),
    _describe("edit", "Replaces a text in a file.", path="Path of the file.", old="A text in it.", new="Its replacement."),
]


class SandboxTool(Tool):
    """Offers a sandbox to the model; it is started by the sample's first call and stopped with the sample.

    Args:
        config: `providers`, tried in their order; `warm`, sandboxes that are started ahead; `functions` of run, read, write and
            edit that the model gets, all by default; `commands`, more functions, each a name with the command that it runs;
            `setup`, a command after the files of a row; `grader`, a command whose exit status 0 is a reward of 1, others of 0
            (see `sandbox_grader`).
        schema: none; the functions have their own.
    """

    accepted_options: ClassVar[AcceptedOptions] = {  # pyrefly: ignore[bad-override]
        "create_kwargs": frozenset({"files", "setup"}),
        "calc_reward_kwargs": frozenset({"files", "grader"}),
        "release_kwargs": None,
    }

    def __init__(self, config: Config, schema: object, settings: CallSettings, where: str) -> None:
        options = OptionReader(config, where)
        warm = options.read_integer("warm", 0, 0, 4096)
        self._pool = SandboxPool.read(options.read("providers", ["local"]), warm, f"{where}.providers")
        known = [schema["function"]["name"] for schema in _SCHEMAS]
        names = options.read_texts("functions") or known
        self._commands = options.read_mapping("commands")
        self._setup, self._grader = options.read_text("setup"), options.read_text("grader")
        options.reject_unknown()
        if schema is not None or not set(names) <= set(known):
            raise ValueError(f"{where}: the functions of a sandbox are {', '.join(known)}, with schemas of their own")
        schemas = [schema for schema in _SCHEMAS if schema["function"]["name"] in names]
        schemas += [_describe(name, f"Runs `{command}`.") for name, command in self._commands.items()]
        super().__init__(settings, schemas)

    async def start(self, processes: WorkerPool) -> None:
        """See `Tool`."""
        await self._pool.start()

    async def close(self) -> None:
        """See `Tool`."""
        await self._pool.close()

    def grades(self, options: RowOptions) -> bool:
        """See `Tool`."""
        return self._read_grader(options) is not None

    def _read_grader(self, options: RowOptions) -> Grader | None:
        """Return the grader of a row, or the tool's; None for none."""
        final: dict[str, Any] = {}
        for name in (schema["function"]["name"] for schema in self.schemas):  # a row may name any of the functions
            final |= (options.get(name) or {}).get("calc_reward_kwargs") or {}
        command, files = final.get("grader") or self._grader, final.get("files")
        tests = {str(path): str(content) for path, content in files.items()} if isinstance(files, Mapping) else {}
        return Grader(str(command), tests) if command else None

    def open(self, options: RowOptions) -> Session:
        """See `Tool`; a row may set files and setup, and files and grader of the reward."""
        sandbox: Sandbox | None = None
        create: dict[str, Any] = {}
        for name in (schema["function"]["name"] for schema in self.schemas):  # a row may name any of the functions
            create |= (options.get(name) or {}).get("create_kwargs") or {}
        grader = self._read_grader(options)

        async def get() -> Sandbox:
            nonlocal sandbox
            if sandbox is None:
                started = await self._pool.acquire()
                try:
                    await self._prepare(started, create.get("files"), create.get("setup") or self._setup)
                    sandbox = started
                finally:
                    if sandbox is None:
                        await asyncio.shield(self._pool.release(started))
            return sandbox

        async def run(call: ToolCall, timeout_s: float) -> ToolResult:
            return await self._run(await get(), call, timeout_s)

        async def close() -> float | None:
            nonlocal sandbox
            if sandbox is None and grader is None:
                return None
            try:
                return None if grader is None else await self._grade(grader, await get())
            finally:
                if sandbox is not None:
                    ended, sandbox = sandbox, None
                    await asyncio.shield(self._pool.release(ended))

        limit_s = 15.0 + (_MAX_ATTEMPTS * (4 * self.settings.timeout_s + 4 * _GRACE_S) + _PROBE_LIMIT_S if grader else 0.0)
        return Session(run, close, serial=True, grace_s=_GRACE_S, close_limit_s=limit_s)

    async def _grade(self, grader: Grader, sandbox: Sandbox) -> float:
        """Return the reward of a sample: 0 where it cannot be graded in its sandbox, but in a new one.

        Raises:
            SandboxError: the provider fails, or the files of the row cannot be written anywhere.
        """
        reason = ""
        for _ in range(_MAX_ATTEMPTS):
            try:
                return await grader.grade(sandbox, self.settings.timeout_s)
            except (SandboxError, asyncio.TimeoutError) as error:
                reason = str(error) or "the sandbox does not reply"
        if await self._works_elsewhere(grader):
            _LOG.info("a sample has a reward of 0, since it cannot be graded in its sandbox: %s", reason)
            return 0.0
        raise SandboxError(f"the sample cannot be graded: {reason}")

    async def _works_elsewhere(self, grader: Grader) -> bool:
        """Return True where the grader's files can be written, and a command runs, in a new sandbox."""
        try:
            other = await self._pool.acquire()
            try:
                await grader.check(other, self.settings.timeout_s)
            finally:
                await asyncio.shield(self._pool.release(other))
        except (SandboxError, asyncio.TimeoutError):
            return False
        return True

    async def _prepare(self, sandbox: Sandbox, files: object, setup: str | None) -> None:
        for path, content in (files if isinstance(files, Mapping) else {}).items():
            await sandbox.write(str(path), str(content).encode())
        if setup and (result := await sandbox.run(setup, self.settings.timeout_s)).status:
            raise SandboxError(f"the setup of the sandbox failed: {_show(result)}")

    async def _run(self, sandbox: Sandbox, call: ToolCall, timeout_s: float) -> ToolResult:
        arguments = {name: str(value) for name, value in call.arguments.items()}
        if call.name in self._commands or call.name == "run":
            result = await sandbox.run(self._commands.get(call.name) or arguments["command"], timeout_s)
            return ToolResult(_show(result), metrics={"command_failed": float(result.status != 0)})
        path = arguments["path"]
        if call.name == "write":
            await _within(sandbox.write(path, _encode(arguments["content"])), timeout_s)
            return ToolResult("written")
        data = await _within(sandbox.read(path), timeout_s)
        if len(data) > MAX_FILE_BYTES:
            raise ToolError(f"{path} has more than {MAX_FILE_BYTES:,} bytes, which are the most that are read")
        text = data.decode("utf-8", "replace")
        if call.name == "read":
            return ToolResult(text)
        if (count := text.count(arguments["old"])) != 1 or not arguments["old"]:
            raise ToolError(f"the text to replace is {count} times in {path}, but must be there once")
        await _within(sandbox.write(path, _encode(text.replace(arguments["old"], arguments["new"]))), timeout_s)
        return ToolResult("edited")


async def _within(work: Awaitable[_T], timeout_s: float) -> _T:
    """Return the result of work with a file, which has the time of a call.

    Raises:
        ToolError: it took longer.
    """
    try:
        return await asyncio.wait_for(work, timeout_s)
    except asyncio.TimeoutError:
        raise ToolError(f"took longer than {timeout_s:g} s and was ended", "timeout") from None


def _encode(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError:
        raise ToolError("the text has half a surrogate pair, which no file in UTF-8 can have") from None


def _show(result: CommandResult) -> str:
    output = result.output.strip("\n")
    return output if not result.status else f"{output}\n(exit status {result.status})".strip("\n")
