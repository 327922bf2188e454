"""The tool `finish`: the model hands over its answer, and the trajectory ends."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mindspeed_rl.tools.interface import ToolCall
from mindspeed_rl.tools.option_reader import OptionReader
from mindspeed_rl.tools.schemas import validate_schema
from mindspeed_rl.tools.tool import CallSettings, Session, StatelessSession, StatelessTool, ToolResult, to_text

_SCHEMA = {
    "name": "finish",
    "description": "Hands over the final answer and ends the conversation.",
    "parameters": {
        "type": "object",
        "properties": {"answer": {"type": "string", "description": "The final answer."}},
        "required": ["answer"],
    },
}


class Finish(StatelessTool):
    """See the module; the reply's text is the value of the schema's first parameter."""

    def __init__(self, config: Mapping[str, Any], schema: Any, settings: CallSettings, where: str) -> None:
        OptionReader(config, where).end()
        self.settings = settings
        self._schema = validate_schema(_SCHEMA if schema is None else schema, where)

    @property
    def schemas(self) -> list[dict[str, Any]]:
        """See `Tool`."""
        return [self._schema]

    def open(self, options: Mapping[str, Mapping[str, Any]]) -> Session:
        """See `Tool`."""
        return _FinishSession(next(iter(self._schema["function"]["parameters"].get("properties", {})), ""))


class _FinishSession(StatelessSession):
    def __init__(self, parameter: str) -> None:
        self._parameter = parameter

    async def call(self, call: ToolCall, timeout_s: float) -> ToolResult:
        """See `Session`."""
        return ToolResult(to_text(call.arguments.get(self._parameter)), ends_trajectory=True)
