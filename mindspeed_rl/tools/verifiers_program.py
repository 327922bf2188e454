"""Environments of the `verifiers` library: `verifiers:NAME`, run by a program that is a client of the recording endpoint.

Such an environment has its own loop and needs a server with OpenAI's interface, so it is no `Environment` of ours: it gets the
URL of a trajectory (`endpoint.py`), requests turns from it, and finally returns the reward of the episode. It runs in its own
process, which may have another Python (`verifiers_host.py` has the reason), and ends with the run.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import os
import shutil
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mindspeed_rl.isolation.variables import expand_variables, select_variables
from mindspeed_rl.tools.tasks import start_task

PREFIX = "verifiers:"
#: file of the program
HOST = Path(__file__).with_name("verifiers_host.py")
_START_LIMIT_S, _CLOSE_LIMIT_S = 120.0, 5.0
#: of a message of the program
_MAX_LINE_BYTES = 4 << 20
_LOG = logging.getLogger(__name__)


class ProgramExitError(RuntimeError):
    """The program of an environment has ended, or did not start."""


@dataclass(frozen=True)
class _EpisodeResult:
    """Result of an episode.

    Attributes:
        reward: None without one.
        error: the reason why the episode was aborted; None if it was not.
        agents: as the program has written them, for release 0.4: "session", "name", "reward" and "trains" of each run of an
            agent; None for earlier releases, which have one.
    """

    reward: float | None
    metrics: Mapping[str, float] = field(default_factory=dict)
    error: str | None = None
    agents: object = None


class VerifiersProgram:
    """One process and many concurrent episodes, in one event loop. After the process has ended, the next episode restarts it.

    Args:
        target: "verifiers:NAME".
        arguments: arguments of the environment's load_environment.
        python: an interpreter that has the library; None for this one.
        folders: with modules of the user, after the folders of the interpreter's PYTHONPATH.
        variables: environment variables in addition to `select_variables`; ${NAME} is one of this process.

    Raises:
        ValueError: the target has no name, there is no such interpreter, or a variable is not set.
    """

    def __init__(
        self,
        target: str,
        arguments: Mapping[str, object] | None = None,
        python: str | None = None,
        folders: Sequence[str] = (),
        variables: Mapping[str, str] | None = None,
    ) -> None:
        name = target.removeprefix(PREFIX)
        if not target.startswith(PREFIX) or not name or name.startswith("-"):
            raise ValueError(f"rl_config.environment is {target!r}, but must look like {PREFIX}NAME")
        if python is not None and shutil.which(python) is None:
            raise ValueError(f"there is no interpreter '{python}' for {target}")
        self._target = target
        self._command = [python or sys.executable, str(HOST), name, "--arguments", json.dumps(dict(arguments or {}))]
        path = os.pathsep.join(path for path in (os.environ.get("PYTHONPATH", ""), *folders) if path)
        given = expand_variables(variables or {}, "the environment's env")
        self._variables = select_variables(os.environ) | {"PYTHONPATH": path} | given
        self._ids = itertools.count()
        self._open: dict[int, asyncio.Future[_EpisodeResult]] = {}
        self._process: asyncio.subprocess.Process | None = None
        self._reading: asyncio.Task[None] | None = None
        self._starting = asyncio.Lock()

    async def start(self) -> None:
        """Start the process and load the environment.

        Raises:
            ValueError: the library or the environment does not exist, or fails to load.
        """
        self._process = await asyncio.create_subprocess_exec(
            *self._command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=_MAX_LINE_BYTES,
            env=self._variables,
            # signals of the terminal must not end it; it ends when its input does
            start_new_session=True,
        )
        try:
            message = await asyncio.wait_for(self._read_message(), _START_LIMIT_S)
        except asyncio.TimeoutError:
            message = {"error": f"no message arrived within {_START_LIMIT_S:g} s"}
        except ValueError as error:
            message = {"error": str(error)[:300]}
        except BaseException:
            await self.close()
            raise
        if error := message.get("error", "it ended without a message"):
            await self.close()
            raise ValueError(f"rl_config.environment: {self._target} cannot be loaded by {self._command[0]}: {error}")
        self._reading = start_task(self._read())  # where it fails, so do the episodes

    async def run_episode(self, row: Mapping[str, object], base_url: str, model: str, timeout_s: float) -> _EpisodeResult:
        """Run an episode.

        Args:
            row: row of the environment's data set: prompt, answer, info, example_id.
            base_url: address of the trajectory, which provides the model's turns.

        Raises:
            ProgramExitError: the program has ended meanwhile.
            ValueError: it had ended, and cannot be restarted.
        """
        async with self._starting:
            if self._reading is not None and self._reading.done():
                await self.close()
                await self.start()
        episode = next(self._ids)
        result = self._open[episode] = asyncio.get_running_loop().create_future()
        try:
            self._send({"id": episode, "row": dict(row), "base_url": base_url, "model": model})
            return await asyncio.wait_for(result, timeout_s)
        except (asyncio.TimeoutError, asyncio.CancelledError) as error:
            with contextlib.suppress(ProgramExitError):
                self._send({"id": episode, "cancel": True})
            if isinstance(error, asyncio.CancelledError):
                raise
            return _EpisodeResult(None, {}, f"the episode took longer than {timeout_s:g} s")
        finally:
            self._open.pop(episode, None)

    async def close(self) -> None:
        """End the program and its child processes; may be called twice."""
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
        self._fail_all()

    def _send(self, message: Mapping[str, object]) -> None:
        # its output ends before its status is available
        has_ended = self._reading is None or self._reading.done()
        if has_ended or self._process is None or self._process.stdin is None:
            raise ProgramExitError(f"the program of {self._target} has ended; see its output")
        self._process.stdin.write((json.dumps(message, default=str) + "\n").encode())

    async def _read_message(self) -> dict[str, Any]:
        """Return the program's next message; an empty one after it has ended.

        Raises:
            ValueError: it is too long, or no object in JSON.
        """
        assert self._process is not None and self._process.stdout is not None
        line = await self._process.stdout.readline()
        try:
            message = json.loads(line) if line else {}
        except RecursionError:
            raise ValueError("a message that is nested too deeply") from None
        if not isinstance(message, dict):
            raise ValueError(f"a message that is not an object: {line[:200]!r}")
        return message

    async def _read(self) -> None:
        try:
            while message := await self._read_message():
                result = self._open.get(message["id"])
                if result is not None and not result.done():
                    result.set_result(_EpisodeResult(*(message[name] for name in ("reward", "metrics", "error", "agents"))))
        except (LookupError, TypeError, ValueError) as error:
            _LOG.warning("the program of %s sent %s: %s", self._target, type(error).__name__, str(error)[:300])
        finally:
            self._fail_all()  # later requests check whether this task is done

    def _fail_all(self) -> None:
        for result in self._open.values():
            if not result.done():
                result.set_exception(ProgramExitError(f"the program of {self._target} has ended; see its output"))
