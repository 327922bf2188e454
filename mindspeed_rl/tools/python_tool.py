"""Tools of the user's Python code: the base of function and class tools, and the tool of a plain function."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial

from mindspeed_rl import registry
from mindspeed_rl.isolation.channel import Message
from mindspeed_rl.isolation.pool import WorkerPool
from mindspeed_rl.tools.interface import JsonObject, ToolCall
from mindspeed_rl.tools.running import HungThreads, RunIn
from mindspeed_rl.tools.schemas import validate_schema
from mindspeed_rl.tools.tool import (
    AcceptedOptions,
    CallSettings,
    RowOptions,
    Session,
    Tool,
    ToolResult,
    list_parameters,
    to_tool_result,
)


class PythonTool(Tool):
    """A tool of one function; its calls run in the event loop, in threads or in processes."""

    def __init__(self, schema: JsonObject, settings: CallSettings, accepted_options: AcceptedOptions) -> None:
        super().__init__(settings, [schema])
        self.accepted_options = accepted_options
        self._name = schema["function"]["name"]
        self._processes: WorkerPool | None = None
        self._threads = HungThreads(settings.max_parallel)

    async def start(self, processes: WorkerPool) -> None:
        """See `Tool`."""
        self._processes = processes


def decode_result(message: Message) -> ToolResult:
    """Return the result in a process's reply."""
    images = tuple(message["images"])
    return ToolResult(message["text"], message["reward"], message["ends_trajectory"], message["metrics"], images)


def _derive_schema(function: Callable[..., object], where: str) -> JsonObject:
    """Return the schema of a Python function, from its type hints and its Google-style docstring.

    Raises:
        ValueError: a parameter has no type or no description.
    """
    from transformers.utils import get_json_schema
    from transformers.utils.chat_template_utils import DocstringParsingException, TypeHintParsingException

    try:
        schema = get_json_schema(function)
    except (DocstringParsingException, TypeHintParsingException) as error:
        raise ValueError(f"{where}: no schema can be derived from the function ({error}); give it as tool_schema") from None
    schema["function"].pop("return", None)  # no chat template uses it
    return validate_schema(schema, where)


class FunctionTool(PythonTool):
    """A function with the name module:function; it has no state that a trajectory could depend on.

    Args:
        schema: None to derive it.
        run_in: None for a process, or for the event loop if the function is a coroutine function.
        where: prefix of errors.

    Raises:
        ValueError: there is no such function, or no schema can be derived.
    """

    def __init__(self, target: str, schema: object, run_in: RunIn | None, settings: CallSettings, where: str) -> None:
        function = registry.load(target, where, wraps=Exception)
        if not callable(function):
            raise ValueError(f"{where}: {target} is {function!r}, which cannot be called")
        is_async = inspect.iscoroutinefunction(function)
        self.run_in: RunIn = run_in or ("loop" if is_async else "process")
        if self.run_in != "process" and is_async != (self.run_in == "loop"):
            kind = "a coroutine function, which runs in the loop or in a process" if is_async else "not a coroutine function"
            raise ValueError(f"{where}: run_in is {self.run_in!r}, but {target} is {kind}")
        self.modules = (target.partition(":")[0],) if self.run_in == "process" else ()
        self._target, self._function = target, function
        derived = _derive_schema(function, where) if schema is None else validate_schema(schema, where)
        super().__init__(derived, settings, {"execute_kwargs": list_parameters(function)})

    def open(self, options: RowOptions) -> Session:
        """See `Tool`; the option execute_kwargs adds arguments that are hidden from the model."""
        hidden = dict(options.get(self._name, {}).get("execute_kwargs") or {})

        async def run(call: ToolCall, timeout_s: float) -> ToolResult:
            arguments = {**call.arguments, **hidden}
            if self.run_in == "process":
                assert self._processes is not None  # the toolbox starts its tools before it opens sessions
                request = {"op": "call", "target": self._target, "arguments": arguments}
                return decode_result(await self._processes.call(request, timeout_s))
            if self.run_in == "loop":
                return to_tool_result(await self._function(**arguments))
            self._threads.check()
            return to_tool_result(await self._threads.run(partial(self._function, **arguments)))

        return Session(run)
