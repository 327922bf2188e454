"""The tool `code_interpreter`: Python statements in the rewards' sandbox, with names that last for a trajectory.

Nothing lives between calls. A call runs all earlier statements of its trajectory again, silently, and then its own: so a
thousand trajectories hold no processes and no memory while their model thinks, a call that is cut off leaves nothing behind,
and the sandbox's limits bind every call whole. The price is that work is done again, and that what depends on the clock or on
chance may come out differently (`random` begins with the same seed each time). Statements that raise are part of what is run
again, as in a notebook; those of a call that was ended for its time or memory are not.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any

from mindspeed_rl.rewards.sandbox import SandboxLimits, SandboxResult, available_isolation, run_python
from mindspeed_rl.tools.interface import ToolCall
from mindspeed_rl.tools.option_reader import OptionReader
from mindspeed_rl.tools.processes import ProcessPool
from mindspeed_rl.tools.schemas import validate_schema
from mindspeed_rl.tools.tool import IGNORED_OPTIONS, AcceptedOptions, CallSettings, Session, ToolError, ToolResult

_LOG = logging.getLogger(__name__)
_SCHEMA = {
    "name": "code_interpreter",
    "description": "Runs Python code and returns what it prints and the value of its last line. Later calls know its names.",
    "parameters": {
        "type": "object",
        "properties": {"code": {"type": "string", "description": "The code to run."}},
        "required": ["code"],
    },
}
_FENCE = re.compile(r"```(?:python|py|python3)?[ \t]*\r?\n(.*?)```", re.DOTALL | re.IGNORECASE)
#: how much later than the sandbox's end of time the process that waits for it is ended itself
_GRACE_S = 5.0
_CHARACTERS = 1 << 16
#: MiB of a program; the process that waits for it may take 2 GiB with it
_MEMORY = (64, 1536)
_FOREIGN = tuple(
    "sandbox_fusion_url default_timeout num_workers rate_limit enable_global_rate_limit default_language type".split()
)

# __BLOCKS__ is the JSON text of the list of statements; all but the last run without being heard.
_PROGRAM = r"""
import ast as _ast, io as _io, json as _json, os as _os, random as _random, sys as _sys, traceback as _traceback
_random.seed(0)

def _run(code, number, names):
    name = "<call %d>" % number
    try:
        tree = _ast.parse(code, name)
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], _ast.Expr) else None
        exec(compile(tree, name, "exec"), names)
        if last is not None:
            value = eval(compile(_ast.Expression(last.value), name, "eval"), names)
            if value is not None:
                print(repr(value))
    except SystemExit:
        pass
    except BaseException as error:
        trace = error.__traceback__
        while trace is not None and not trace.tb_frame.f_code.co_filename.startswith("<call "):
            trace = trace.tb_next
        _sys.stdout.flush()
        _sys.stderr.write("".join(_traceback.format_exception(type(error), error, trace, limit=20)))
    finally:
        _sys.stdout.flush()
        _sys.stderr.flush()

_blocks = _json.loads(__BLOCKS__)
_names = {"__name__": "__main__", "__builtins__": __builtins__, "exit": _sys.exit, "quit": _sys.exit}
_out, _err = _os.dup(1), _os.dup(2)
_null = _os.open(_os.devnull, _os.O_WRONLY)
_os.dup2(_null, 1)
_os.dup2(_null, 2)
for _number, _code in enumerate(_blocks[:-1]):
    _run(_code, _number + 1, _names)
_os.dup2(_out, 1)
_os.dup2(_err, 2)
_run(_blocks[-1], len(_blocks), _names)
_os._exit(0)
"""


class CodeInterpreter:
    """See the module.

    Args:
        config: memory_mib of a program; and of MindSpeed-RL's tool default_timeout and memory_limit_mb. Its keys that speak of
            a server (sandbox_fusion_url, rate limits) are told to have no effect: code runs in the sandbox of this project.
        schema: None for the tool's own; else it has one parameter of text.
    """

    modules: tuple[str, ...] = (__name__,)
    takes: AcceptedOptions = IGNORED_OPTIONS

    def __init__(self, config: Mapping[str, Any], schema: Any, settings: CallSettings, where: str) -> None:
        options = OptionReader(config, where)
        self._memory_mib = options.whole("memory_mib", options.whole("memory_limit_mb", 512, *_MEMORY), *_MEMORY)
        self.settings = settings
        # default_timeout and the number of calls at once are read in tool_file
        foreign = options.ignore(*_FOREIGN)
        options.end()
        if url := foreign.get("sandbox_fusion_url"):
            _LOG.warning("%s: sandbox_fusion_url=%s is not asked; code runs in this project's sandbox", where, url)
        self._schema = validate_schema(_SCHEMA if schema is None else schema, where)
        properties = self._schema["function"]["parameters"].get("properties", {})
        if "code" not in properties:
            raise ValueError(f"{where}: the schema of a code interpreter has a parameter 'code', not {', '.join(properties)}")
        self._processes: ProcessPool | None = None

    @property
    def schemas(self) -> list[dict[str, Any]]:
        """See `Tool`."""
        return [self._schema]

    async def start(self, processes: ProcessPool) -> None:
        """See `Tool`; says once what isolation this machine does not give."""
        self._processes = processes
        try:
            tried = await processes.call({"op": "call", "target": f"{__name__}:missing_isolation", "arguments": {}}, 60.0)
        except ToolError as error:
            raise ValueError(f"code_interpreter: the sandbox cannot be started: {error}") from None
        if tried["text"]:
            _LOG.warning("code_interpreter: the code of models runs without isolation of %s on this machine", tried["text"])

    def open(self, options: Mapping[str, Mapping[str, Any]]) -> Session:
        """See `Tool`."""
        assert self._processes is not None  # the tool box starts its tools before it opens any
        return _InterpreterSession(self._processes, self._memory_mib)

    async def close(self) -> None:
        """See `Tool`."""


class _InterpreterSession:
    """The statements of a trajectory so far."""

    serial, grace_s = True, 2 * _GRACE_S

    def __init__(self, processes: ProcessPool, memory_mib: int) -> None:
        self._processes, self._memory_mib = processes, memory_mib
        self._blocks: list[str] = []

    async def call(self, call: ToolCall, timeout_s: float) -> ToolResult:
        """See `Session`."""
        code = call.arguments["code"]
        if fenced := _FENCE.findall(code):
            code = "\n".join(fenced)
        question = {
            "op": "call",
            "target": f"{__name__}:run_blocks",
            "arguments": {"blocks": [*self._blocks, code], "wall_s": timeout_s, "memory_mib": self._memory_mib},
        }
        answer = await self._processes.call(question, timeout_s + _GRACE_S)
        self._blocks.append(code)
        return ToolResult(answer["text"], metrics=answer["metrics"])

    async def close(self) -> float | None:
        """See `Session`."""
        self._blocks.clear()
        return None


def warm_up() -> None:
    """Return the process that others are forked from has found out what isolation there is."""
    available_isolation()


def missing_isolation() -> str:
    """What the sandbox cannot keep from a program on this machine; empty for nothing."""
    return ", ".join(run_python("pass").missing)


def run_blocks(blocks: Sequence[str], wall_s: float, memory_mib: int) -> ToolResult:
    """What the last of these blocks says when it runs after the others; in a process of the tools.

    Raises:
        ToolError: its time or memory was not enough, or the program ended in another way.
    """
    program = _PROGRAM.replace("__BLOCKS__", repr(json.dumps(list(blocks))))
    limits = SandboxLimits(wall_s=wall_s, cpu_s=int(wall_s) + 1, memory_mib=memory_mib)
    result = run_python(program, b"", limits)
    said = "\n".join(text for text in (_text(result.output), _text(result.errors)) if text)
    if result.timed_out:
        raise ToolError(_with(said, f"the code took longer than {wall_s:g} s and was ended"), "timeout")
    if result.out_of_memory:
        raise ToolError(_with(said, f"the code took more than {memory_mib} MiB of memory and was ended"))
    if result.status != 0:
        raise ToolError(_with(said, f"the program ended with {_ending(result)}"))
    return ToolResult(said, metrics={"code_raised": float(bool(result.errors))})


def _text(output: bytes) -> str:
    text = output.decode("utf-8", "replace").strip("\n")
    return text if len(text) <= _CHARACTERS else f"{text[: _CHARACTERS // 2]}\n...(truncated)...\n{text[-_CHARACTERS // 2 :]}"


def _with(said: str, problem: str) -> str:
    return f"{said}\n{problem}" if said else problem


def _ending(result: SandboxResult) -> str:
    return f"signal {-result.status}" if result.status < 0 else f"status {result.status}"
