"""Checks of a model's arguments against the schema of a function: in the event loop where that is quick, else in a process."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping

from mindspeed_rl.isolation.pool import WorkerError
from mindspeed_rl.isolation.variables import select_variables
from mindspeed_rl.tools.process_worker import build_tool_pool
from mindspeed_rl.tools.schemas import ArgumentSchema, check_arguments, find_problem

_LIMIT_S = 5.0
_MAX_PARALLEL, _MEMORY_BYTES = 4, 1 << 29
_CHECK = f"{check_arguments.__module__}:{check_arguments.__name__}"


class ArgumentChecks:
    """The processes for checks that may take long; they start with the first one."""

    def __init__(self) -> None:
        self._pool = build_tool_pool([check_arguments.__module__], _MEMORY_BYTES, select_variables(os.environ))
        self._is_started = False
        self._starting, self._slots = asyncio.Lock(), asyncio.Semaphore(_MAX_PARALLEL)

    async def start(self) -> None:
        """Start the processes; may be called again.

        Raises:
            ValueError: they cannot be started.
        """
        async with self._starting:
            if not self._is_started:
                await self._pool.start()
                self._is_started = True

    async def find_problem(self, schema: ArgumentSchema, arguments: Mapping[str, object], limit_s: float) -> str | None:
        """Return a sentence for the model about arguments that do not match a schema; None if they match."""
        if schema.is_quick(arguments):
            return find_problem(schema.parameters, arguments)
        await self.start()
        request = {
            "op": "call",
            "target": _CHECK,
            "arguments": {"parameters": schema.parameters, "arguments": dict(arguments)},
        }
        async with self._slots:
            try:
                return (await self._pool.call(request, min(_LIMIT_S, limit_s)))["text"] or None
            except WorkerError as error:
                return f"the arguments cannot be checked against the schema of the tool: the check {error}"

    async def close(self) -> None:
        """End the processes."""
        await self._pool.close()
