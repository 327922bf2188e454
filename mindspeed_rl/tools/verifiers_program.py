"""Environments of the `verifiers` library: `verifiers:NAME`, played by a program that talks to the recording endpoint.

Such an environment has a loop of its own and wants a server of OpenAI's interface, so it is no `Environment` of ours: it is
given the address of a trajectory (`endpoint.py`), asks it for turns, and says in the end what the episode was worth. It runs in
a process of its own, which may have another Python (see `verifiers_host.py` for why it often must), and ends with the run.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import shutil
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PREFIX = "verifiers:"
_HOST = Path(__file__).with_name("verifiers_host.py")
_START_LIMIT_S, _CLOSE_LIMIT_S = 120.0, 5.0
_LONGEST_LINE = 1 << 26


class ProgramExitError(RuntimeError):
    """The program of an environment has ended, or did not begin."""


@dataclass(frozen=True)
class Outcome:
    """What an episode was worth.

    Attributes:
        reward: None where the environment gave none.
        error: why the episode broke off, in words; None if it did not.
    """

    reward: float | None
    metrics: Mapping[str, float] = field(default_factory=dict)
    error: str | None = None


class VerifiersProgram:
    """One process at a time; many episodes at a time, in one event loop. Where it has ended, the next episode starts it again.

    Args:
        target: "verifiers:NAME".
        arguments: of the environment's load_environment.
        python: an interpreter that has the library; None for this one.

    Raises:
        ValueError: the target has no name, or there is no such interpreter.
    """

    def __init__(self, target: str, arguments: Mapping[str, Any] | None = None, python: str | None = None) -> None:
        name = target.removeprefix(PREFIX)
        if not target.startswith(PREFIX) or not name or name.startswith("-"):
            raise ValueError(f"rl_config.environment is {target!r}, but must look like {PREFIX}NAME")
        if python is not None and shutil.which(python) is None:
            raise ValueError(f"there is no interpreter '{python}' for {target}")
        self._target = target
        self._command = [python or sys.executable, str(_HOST), name, "--arguments", json.dumps(dict(arguments or {}))]
        self._numbers = itertools.count()
        self._open: dict[int, asyncio.Future[Outcome]] = {}
        self._process: asyncio.subprocess.Process | None = None
        self._reading: asyncio.Task[None] | None = None
        self._starting = asyncio.Lock()

    async def start(self) -> None:
        """Return the environment is loaded.

        Raises:
            ValueError: the library or the environment is not there, or fails to load.
        """
        self._process = await asyncio.create_subprocess_exec(
            *self._command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=_LONGEST_LINE,
            # its end is ours to decide: it sees that its input has ended when this process does
            start_new_session=True,
        )
        try:
            said = await asyncio.wait_for(self._line(), _START_LIMIT_S)
        except asyncio.TimeoutError:
            said = {"error": f"nothing was heard within {_START_LIMIT_S:g} s"}
        except BaseException:
            await self.close()
            raise
        if error := said.get("error", "it ended without a word"):
            await self.close()
            raise ValueError(f"rl_config.environment: {self._target} cannot be loaded by {self._command[0]}: {error}")
        self._reading = asyncio.create_task(self._read())

    async def play(self, row: Mapping[str, Any], base_url: str, model: str, timeout_s: float) -> Outcome:
        """Play an episode.

        Args:
            row: of the environment's data set: prompt, answer, info, example_id.
            base_url: of the trajectory, which hears the model's turns.

        Raises:
            ProgramExitError: the program has ended meanwhile.
            ValueError: it had ended, and cannot be started again.
        """
        async with self._starting:
            if self._reading is not None and self._reading.done():
                await self.close()
                await self.start()
        number = next(self._numbers)
        ending = self._open[number] = asyncio.get_running_loop().create_future()
        try:
            self._send({"id": number, "row": dict(row), "base_url": base_url, "model": model})
            return await asyncio.wait_for(ending, timeout_s)
        except asyncio.TimeoutError:
            self._give_up(number)
            return Outcome(None, {}, f"the episode took longer than {timeout_s:g} s")
        except asyncio.CancelledError:
            self._give_up(number)
            raise
        finally:
            self._open.pop(number, None)

    async def close(self) -> None:
        """End the program and whatever it has started; may be called twice."""
        process, self._process = self._process, None
        if process is None:
            return
        if process.stdin is not None:
            process.stdin.close()
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(process.wait(), _CLOSE_LIMIT_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
        if self._reading is not None:
            self._reading.cancel()
            self._reading = None
        self._end()

    def _send(self, message: Mapping[str, Any]) -> None:
        # its output ends before its status is known
        gone = self._reading is None or self._reading.done()
        if gone or self._process is None or self._process.stdin is None:
            raise ProgramExitError(f"the program of {self._target} has ended; its output says why")
        self._process.stdin.write((json.dumps(message, default=str) + "\n").encode())

    def _give_up(self, number: int) -> None:
        with contextlib.suppress(ProgramExitError):
            self._send({"id": number, "cancel": True})

    async def _line(self) -> dict[str, Any]:
        """Return the program's next word, empty once it has ended."""
        assert self._process is not None and self._process.stdout is not None
        line = await self._process.stdout.readline()
        return json.loads(line) if line else {}

    async def _read(self) -> None:
        try:
            while said := await self._line():
                ending = self._open.get(said["id"])
                if ending is not None and not ending.done():
                    ending.set_result(Outcome(said["reward"], said["metrics"], said["error"]))
        finally:
            self._end()  # who waits for an answer; who asks from now on finds this task done

    def _end(self) -> None:
        for ending in self._open.values():
            if not ending.done():
                ending.set_exception(ProgramExitError(f"the program of {self._target} has ended; its output says why"))
