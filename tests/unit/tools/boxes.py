"""A tool box made of entries as they stand in a tool file, for the tests beside this file."""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import yaml

from mindspeed_rl.tools.interface import ParsedTurn, ToolCall
from mindspeed_rl.tools.tool_file import build_tools, read_tool_file
from mindspeed_rl.tools.toolbox import CallLimits, LoadedToolBox

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
async def opened(folder: Path, *entries: Any, limits: CallLimits | None = None) -> AsyncIterator[LoadedToolBox]:
    """The started box; a token is a character."""
    tools = build_tools(read_tool_file(written(folder, *entries)))
    box = LoadedToolBox(tools, lambda schemas: NoParser(), limits or CallLimits(), len)
    await box.start()
    try:
        yield box
    finally:
        await box.close()


def written(folder: Path, *entries: Any) -> Path:
    """A tool file with these entries."""
    file = folder / "tools.yaml"
    file.write_text(yaml.safe_dump({"tools": list(entries)}, sort_keys=False))
    return file


def call(name: str, arguments: Mapping[str, Any] | None = None, /, **more: Any) -> ToolCall:
    """A call of that name with the arguments given either way."""
    return ToolCall(name, {**(arguments or {}), **more}, "call-1")
