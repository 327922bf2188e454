"""The tool `finish`: the model submits its final answer, and the trajectory ends."""

from __future__ import annotations

from mindspeed_rl.tools.interface import ToolCall
from mindspeed_rl.tools.option_reader import OptionReader
from mindspeed_rl.tools.schemas import validate_schema
from mindspeed_rl.tools.tool import CallSettings, Config, RowOptions, Session, Tool, ToolResult, to_text

_SCHEMA = {
    "name": "finish",
    "description": "Hands over the final answer and ends the conversation.",
    "parameters": {
        "type": "object",
        "properties": {"answer": {"type": "string", "description": "The final answer."}},
        "required": ["answer"],
    },
}


class Finish(Tool):
    """Replies with the first parameter of its schema; it has no configuration."""

    def __init__(self, config: Config, schema: object, settings: CallSettings, where: str) -> None:
        OptionReader(config, where).reject_unknown()
        super().__init__(settings, [validate_schema(_SCHEMA if schema is None else schema, where)])
        self._parameter = next(iter(self.schemas[0]["function"]["parameters"].get("properties", {})), "")

    def open(self, options: RowOptions) -> Session:
        """See `Tool`."""

        async def run(call: ToolCall, timeout_s: float) -> ToolResult:
            return ToolResult(to_text(call.arguments.get(self._parameter)), ends_trajectory=True)

        return Session(run)
