"""A toolbox of entries of a tool file, for the tests of this folder."""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import yaml

from mindspeed_rl.tools.interface import ParsedTurn, ToolCall
from mindspeed_rl.tools.tool_file import build_tools, read_tools
from mindspeed_rl.tools.toolbox import CallLimits, Toolbox

COUNTER_SCHEMA = {
    "type": "function",
    "function": {
        "name": "count",
        "description": "Counts.",
        "parameters": {"type": "object", "properties": {"by": {"type": "integer"}}, "required": ["by"]},
    },
}


class NoParser:
    def parse(self, text, token_ids):
        return ParsedTurn(text)


@asynccontextmanager
async def open_toolbox(folder: Path, *entries: Any, limits: CallLimits | None = None) -> AsyncIterator[Toolbox]:
    """Yield the started toolbox; a token is a character."""
    tools = build_tools(read_tools(str(write_tool_file(folder, *entries))))
    box = Toolbox(tools, lambda schemas: NoParser(), limits or CallLimits(), len)
    await box.start()
    try:
        yield box
    finally:
        await box.close()


def write_tool_file(folder: Path, *entries: Any) -> Path:
    """Write a tool file with these entries."""
    file = folder / "tools.yaml"
    file.write_text(yaml.safe_dump({"tools": list(entries)}, sort_keys=False))
    return file


def call(name: str, arguments: Mapping[str, Any] | None = None, /, **more: Any) -> ToolCall:
    """Return a call with arguments from a mapping, from keywords, or from both."""
    return ToolCall(name, {**(arguments or {}), **more}, "call-1")
