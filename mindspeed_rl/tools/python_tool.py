"""What tools of the user's Python have in common, be they functions or classes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mindspeed_rl.tools.processes import ProcessPool
from mindspeed_rl.tools.running import HungThreads
from mindspeed_rl.tools.tool import Answer, CallSettings, TakenOptions, ToolError


class PythonTool:
    """A tool of one function, whose calls run in the event loop, in threads or in processes; subclasses have `open`."""

    def __init__(self, schema: dict[str, Any], settings: CallSettings, takes: TakenOptions) -> None:
        self.settings, self.takes = settings, takes
        self._schema = schema
        self._processes: ProcessPool | None = None
        self._threads = HungThreads(settings.max_parallel)

    @property
    def schemas(self) -> list[dict[str, Any]]:
        """See `Tool`."""
        return [self._schema]

    async def start(self, processes: ProcessPool) -> None:
        """See `Tool`."""
        self._processes = processes

    async def close(self) -> None:
        """See `Tool`."""


def refuse_if_hung(threads: HungThreads) -> None:
    """Raises ToolError if as many calls of the tool hang as may run at the same time."""
    if threads.full:
        raise ToolError("the tool hangs: as many calls as may run at once have not come back", "crashed")


def answer_from(message: Mapping[str, Any]) -> Answer:
    """The answer that a process has sent."""
    return Answer(message["text"], message["reward"], message["ends_trajectory"], message["metrics"])
