"""The tool `code_interpreter`: Python code in the sandbox of the rewards, with names that persist within a trajectory.

No process lives between calls. A call runs all earlier code of its trajectory again, with its output discarded, and then its
own: a thousand trajectories need no processes and no memory while the model generates, a cancelled call leaves nothing, and the
sandbox's limits hold for every call as a whole. The price is repeated work, and results that depend on the clock or on random
numbers may differ (`random` starts with the same seed each time). Code that raised is run again too, as in a notebook; code
that was killed for its time or memory is not.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Sequence

from mindspeed_rl.isolation.pool import WorkerError, WorkerPool
from mindspeed_rl.isolation.sandbox import SandboxLimits, available_isolation, run_python
from mindspeed_rl.tools.interface import ToolCall
from mindspeed_rl.tools.option_reader import OptionReader
from mindspeed_rl.tools.sandboxes import SandboxFusion
from mindspeed_rl.tools.schemas import validate_schema
from mindspeed_rl.tools.tool import CallSettings, Config, RowOptions, Session, Tool, ToolError, ToolResult

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
#: the process that waits for the sandbox is killed this much later than the sandbox
_GRACE_S = 5.0
_MAX_CHARACTERS = 1 << 16
#: MiB of a program; with the process that waits for it, at most 2 GiB
_MEMORY = (64, 1536)
_FOREIGN = tuple("default_timeout num_workers rate_limit enable_global_rate_limit default_language type".split())

# __BLOCKS__ is the JSON text of the list of code blocks; the output of all but the last is discarded.
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


class CodeInterpreter(Tool):
    """Runs code in the sandbox of this project.

    Args:
        config: memory_mib of a program; or default_timeout and memory_limit_mb of MindSpeed-RL's tool. With sandbox_fusion_url
            the code runs at that server of SandboxFusion; other keys for it are ignored.
        schema: None for the tool's own; otherwise with a parameter of text, `code`.
    """

    modules = (__name__,)

    def __init__(self, config: Config, schema: object, settings: CallSettings, where: str) -> None:
        options = OptionReader(config, where)
        memory_mib = options.read_integer("memory_limit_mb", 512, *_MEMORY)
        self._memory_mib = options.read_integer("memory_mib", memory_mib, *_MEMORY)
        # default_timeout and the number of parallel calls are read in tool_file
        url = options.read_text("sandbox_fusion_url")
        server = {"url": url, "memory_mib": self._memory_mib}
        self._server = None if url is None else SandboxFusion(OptionReader(server, where), where)
        options.discard(*_FOREIGN)
        options.reject_unknown()
        super().__init__(settings, [validate_schema(_SCHEMA if schema is None else schema, where)])
        properties = self.schemas[0]["function"]["parameters"].get("properties", {})
        if "code" not in properties:
            raise ValueError(f"{where}: the schema of a code interpreter has a parameter 'code', not {', '.join(properties)}")
        self._processes: WorkerPool | None = None

    async def start(self, processes: WorkerPool) -> None:
        """See `Tool`; logs once which isolation is missing on this machine."""
        self._processes = processes
        if self._server is not None:
            return
        try:
            reply = await processes.call({"op": "call", "target": f"{__name__}:_list_missing_isolation", "arguments": {}}, 60.0)
        except WorkerError as error:
            raise ValueError(f"code_interpreter: the sandbox cannot be started: {error}") from None
        if reply["text"]:
            _LOG.warning("code_interpreter: the code of models runs without isolation of %s on this machine", reply["text"])

    async def close(self) -> None:
        """See `Tool`."""
        if self._server is not None:
            await self._server.close()

    def open(self, options: RowOptions) -> Session:
        """See `Tool`."""
        assert self._processes is not None  # the toolbox starts its tools before it opens sessions
        processes, memory_mib, blocks = self._processes, self._memory_mib, list[str]()

        async def run(call: ToolCall, timeout_s: float) -> ToolResult:
            code = call.arguments["code"]
            if fenced := _FENCE.findall(code):
                code = "\n".join(fenced)
            if self._server is not None:
                result, _ = await self._server.run_code(_build_program([*blocks, code]), "python", timeout_s, {})
                if result.status == 124:  # it is not run again
                    raise ToolError(result.output.strip(), "timeout")
                blocks.append(code)
                return ToolResult(result.output.strip("\n"))
            arguments = {"blocks": [*blocks, code], "wall_s": timeout_s, "memory_mib": memory_mib}
            request = {"op": "call", "target": f"{__name__}:run_blocks", "arguments": arguments}
            reply = await processes.call(request, timeout_s + _GRACE_S)
            blocks.append(code)
            return ToolResult(reply["text"], metrics=reply["metrics"])

        return Session(run, serial=True, grace_s=2 * _GRACE_S)


def warm_up() -> None:
    """Determine the available isolation once, in the process from which the others are forked."""
    available_isolation()


def _list_missing_isolation() -> str:
    """Return the isolation that the sandbox lacks on this machine, "" for none."""
    return ", ".join(run_python("pass").missing)


def run_blocks(blocks: Sequence[str], wall_s: float, memory_mib: int) -> ToolResult:
    """Return the output of the last block, run after the others; called in a process of the tools.

    Raises:
        ToolError: it exceeded its time or memory, or the program ended in another way.
    """
    program = _build_program(blocks)
    limits = SandboxLimits(wall_s=wall_s, cpu_s=int(wall_s) + 1, memory_mib=memory_mib)
    result = run_python(program, b"", limits)
    texts = [_decode(result.output), _decode(result.errors)]
    problem = ""
    if result.timed_out:
        problem = f"the code took longer than {wall_s:g} s and was ended"
    elif result.out_of_memory:
        problem = f"the code took more than {memory_mib} MiB of memory and was ended"
    elif result.status != 0:
        status = f"signal {-result.status}" if result.status < 0 else f"status {result.status}"
        problem = f"the program ended with {status}"
    text = "\n".join(text for text in (*texts, problem) if text)
    if problem:
        raise ToolError(text, "timeout" if result.timed_out else "failed")
    return ToolResult(text, metrics={"code_raised": float(bool(result.errors))})


def _build_program(blocks: Sequence[str]) -> str:
    return _PROGRAM.replace("__BLOCKS__", repr(json.dumps(list(blocks))))


def _decode(output: bytes) -> str:
    text = output.decode("utf-8", "replace").strip("\n")
    if len(text) <= _MAX_CHARACTERS:
        return text
    return f"{text[: _MAX_CHARACTERS // 2]}\n...(truncated)...\n{text[-_MAX_CHARACTERS // 2 :]}"
