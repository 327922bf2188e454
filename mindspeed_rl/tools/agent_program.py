"""Programs with a loop of their own, unchanged: a command that is started, or a service that is called, for each sample.

The program gets the address of its trajectory (`endpoint.py`) in the environment variables that the clients of OpenAI and
Anthropic read. A command runs in an empty folder of its own, in a process of the tools' pool: it ends with all processes that
it started after its time, at its limits of memory and room, and with the run.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import secrets
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from mindspeed_rl.bounds import read_metrics, read_number, show
from mindspeed_rl.config.keys.rl import AgentKeys
from mindspeed_rl.folders import FileRefusedError, read_beneath, remove_folder
from mindspeed_rl.http_client import HttpClient, HttpError, HttpReply
from mindspeed_rl.isolation.pool import WorkerError
from mindspeed_rl.isolation.variables import expand_variables, select_variables
from mindspeed_rl.redaction import hide_in_text
from mindspeed_rl.scratch import make_owned_folder
from mindspeed_rl.tools.commands import run_command
from mindspeed_rl.tools.endpoint import ProgramAddress
from mindspeed_rl.tools.interface import JsonObject
from mindspeed_rl.tools.process_worker import build_tool_pool
from mindspeed_rl.tools.running import run_in_thread

_LOG = logging.getLogger(__name__)
_SUBJECT = "rl_config.agent"
#: the process that waits for a command is killed this much later than the command
_GRACE_S = 15.0
#: time that a grader has at least
_GRADER_LIMIT_S = 60.0
_REMOVAL_LIMIT_S = 60.0
_MAX_REPLY_BYTES, _MAX_REASON = 1 << 16, 1000
#: folder of the files AGENT_TASK and AGENT_RESULT
_FILES = ".agent"
#: of the file AGENT_RESULT
_MAX_RESULT_BYTES = 4 << 20
#: of the report of a program, in a file, a line or a reply
_REPORT_KEYS = ("reward", "metrics", "output", "error")
_RUN_COMMAND = f"{run_command.__module__}:{run_command.__name__}"
_PLACE = re.compile(r"\{\{|\}\}|(?<!\$)\{([A-Za-z_]\w*)\}")


class ProgramError(RuntimeError):
    """A program failed; the message has the reason."""


class _LateError(ProgramError):
    """A program or grader took too long."""


@dataclass(frozen=True)
class ProgramResult:
    """Report of a program, or of its grader.

    Attributes:
        reward: None for none.
        output: for reward functions.
    """

    reward: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    output: str = ""


@dataclass(frozen=True)
class _Ended:
    """A command that has ended: exit status, both outputs."""

    status: int
    output: str
    errors: str

    def describe(self) -> str:
        """Return the status and the last line that the command wrote."""
        lines = [line.strip() for line in (self.errors + "\n" + self.output).splitlines() if line.strip()]
        cause = f"signal {-self.status}" if self.status < 0 else f"status {self.status}"
        last = [line for line in self.errors.splitlines() if line.strip()][-1:] or lines[-1:]
        return f"it ended with {cause}" + (f": {last[0][:_MAX_REASON]}" if last else "")


class AgentProgram:
    """The program of a run file. `pool` has to be started before the first sample.

    Args:
        keys: `rl_config.agent`.
        folders: with modules of the user, for PYTHONPATH.
    """

    def __init__(self, keys: AgentKeys, folders: Sequence[str] = ()) -> None:
        self._keys, self._folders = keys, folders
        self._slots = asyncio.Semaphore(keys.max_parallel)
        given = {str(name): str(value) for name, value in (keys.env or {}).items()}
        self._given = expand_variables(given, f"{_SUBJECT}.env")
        self._scratch: Path | None = None
        self._making_scratch = asyncio.Lock()
        self.pool = build_tool_pool([run_command.__module__], int(keys.memory_gib * 2**30), select_variables(os.environ))

    async def play(self, row: Mapping[str, Any], address: ProgramAddress, model: str) -> ProgramResult:
        """Play a sample and return what the program reports.

        Args:
            row: columns of the data set.
            address: address of the trajectory.

        Raises:
            ProgramError: it failed, or took too long.
        """
        async with self._slots:
            return await (self._call(row, address.base_url, model) if self._keys.url else self._run(row, address, model))

    async def _run(self, row: Mapping[str, Any], address: ProgramAddress, model: str) -> ProgramResult:
        deadline = time.monotonic() + self._keys.timeout_s
        async with self._open_folder() as folder:
            task, work = folder / _FILES / "task.json", folder / "work"
            for below in (task.parent, work, folder / "tmp"):
                below.mkdir()
            task.write_text(json.dumps(dict(row), default=str, ensure_ascii=False), encoding="utf-8")
            rewards = task.with_name("reward_url")
            rewards.write_text(address.reward_url, encoding="utf-8")
            address.secret_files.append(rewards)
            values = {**row, "base_url": address.base_url, "model": model, "folder": str(folder)}
            env = self._build_environment(values, address.base_url, model, task)
            ended = await self._execute(_fill(self._keys.command, values, "command"), work, env, deadline)
            if ended.status:
                raise ProgramError(ended.describe())
            reported = await run_in_thread(partial(_read_result, folder, ended.output))
            if not self._keys.grader:
                return reported
            grade = await self._grade(values, work, env, deadline)
            return ProgramResult(grade.reward, {**reported.metrics, **grade.metrics}, reported.output)

    async def _grade(
        self, values: Mapping[str, Any], folder: Path, env: Mapping[str, str], deadline: float
    ) -> ProgramResult:
        """Return the report of the grader. Files at which it hangs, fails or crashes are the sample's doing: 0.

        Where its command has {proof}, which is a new text for each sample, only output with this text counts.

        Raises:
            ProgramError: it does not start, or its report has an error.
        """
        proof = secrets.token_urlsafe(16)
        demands_proof = values.get("proof") is None and any("proof" in _PLACE.findall(word) for word in self._keys.grader)
        command = _fill(self._keys.grader, {**values, "proof": proof} if demands_proof else values, "grader")
        try:
            # a program that has used all its time leaves some for the grader
            graded = await self._execute(command, folder, env, max(deadline, time.monotonic() + _GRADER_LIMIT_S))
        except _LateError:
            return ProgramResult(0.0)
        grade = _read_last_line(graded.output)
        if grade is not None and (not demands_proof or grade.get("proof") == proof):
            return _read_report(grade, "the grader's last line")
        if graded.status > 1:  # code of the sample that the grader imports can end it so, and so can an error of its own
            _LOG.warning("the grader: %s; the reward is 0", graded.describe())
        is_right = graded.status == 0 and (not demands_proof or proof in graded.output.split())
        return ProgramResult(float(is_right), {"grader_errors": float(graded.status > 1)})

    @asynccontextmanager
    async def _open_folder(self) -> AsyncIterator[Path]:
        """Make a folder for a sample, and remove it after the block, however deep the program has nested folders there."""
        async with self._making_scratch:
            if self._scratch is None:  # in a thread: folders of runs that were killed are removed first
                self._scratch, _ = await run_in_thread(partial(make_owned_folder, self, "agents-"))
        folder = Path(tempfile.mkdtemp(prefix="agent-", dir=self._scratch)).resolve()
        try:
            yield folder
        finally:
            # shielded: the files of a cancelled sample are removed too
            if not await asyncio.shield(run_in_thread(partial(remove_folder, folder, _REMOVAL_LIMIT_S))):
                _LOG.warning("not all files of a sample's program could be removed: %s", folder)

    async def _execute(self, command: list[str], folder: Path, env: Mapping[str, str], deadline: float) -> _Ended:
        left_s = max(0.1, deadline - time.monotonic())
        arguments: dict[str, Any] = {"command": command, "folder": str(folder), "env": dict(env), "timeout_s": left_s}
        arguments |= {"disk_bytes": int(self._keys.disk_gib * 2**30), "disk_folder": str(folder.parent)}
        request = {"op": "call", "target": _RUN_COMMAND, "arguments": arguments}
        try:
            reply = await self.pool.call(request, left_s + _GRACE_S)
        except WorkerError as error:
            if error.problem == "timeout":
                raise _LateError(f"it took longer than {self._keys.timeout_s:g} s") from None
            raise ProgramError(str(error)) from None
        return _Ended(**json.loads(reply["text"]))

    def _build_environment(self, values: Mapping[str, Any], base_url: str, model: str, task: Path) -> dict[str, str]:
        local = ",".join(filter(None, [os.environ.get("NO_PROXY", os.environ.get("no_proxy", "")), "127.0.0.1"]))
        own = {
            "OPENAI_BASE_URL": base_url,
            "OPENAI_API_BASE": base_url,
            "OPENAI_API_KEY": "none",  # the address has the secret
            "ANTHROPIC_BASE_URL": base_url.removesuffix("/v1"),
            "ANTHROPIC_API_KEY": "none",
            "AGENT_MODEL": model,
            "AGENT_TASK": str(task),
            "AGENT_RESULT": str(task.with_name("result.json")),
            "AGENT_REWARD_URL_FILE": str(task.with_name("reward_url")),
            "TMPDIR": str(values["folder"]) + "/tmp",
            "PYTHONPATH": os.pathsep.join(path for path in (os.environ.get("PYTHONPATH", ""), *self._folders) if path),
            "NO_PROXY": local,
            "no_proxy": local,
        }
        given = dict(zip(self._given, _fill(list(self._given.values()), values, "env")))
        return select_variables(os.environ) | own | given

    async def _call(self, row: Mapping[str, Any], base_url: str, model: str) -> ProgramResult:
        request = {
            "task": dict(row),
            "base_url": base_url,
            "anthropic_base_url": base_url.removesuffix("/v1"),
            "api_key": "none",
            "model": model,
        }
        url, body = str(self._keys.url), json.dumps(request, default=str).encode()
        shown = hide_in_text(url)

        def read(reply: HttpReply) -> ProgramResult:
            if reply.status != 200:
                raise ProgramError(f"{shown} replied with status {reply.status}: {reply.text[:_MAX_REASON]}")
            try:
                value = reply.read_json()
            except ValueError:
                raise ProgramError(f"the reply of {shown} is not JSON: {reply.text[:200]!r}") from None
            return _read_report(value, f"the reply of {shown}")

        headers, timeout_s = {"content-type": "application/json"}, self._keys.timeout_s
        async with HttpClient(_MAX_REPLY_BYTES, headers=headers, follows_redirects=True) as client:
            try:
                return await client.request("POST", url, read, data=body, timeout_s=timeout_s)
            except HttpError as error:
                reason = f" took longer than {timeout_s:g} s" if error.late else f": {error}"
                raise ProgramError(f"{shown}{reason}") from None


def check_program(keys: AgentKeys) -> None:
    """Check that the commands exist, before workers start.

    Raises:
        ValueError: one does not, or the url is none.
    """
    import shutil
    from urllib.parse import urlsplit

    for name in ("command", "grader"):
        words = getattr(keys, name)
        if words and not _PLACE.search(words[0]) and shutil.which(words[0]) is None:
            raise ValueError(f"{_SUBJECT}.{name}: there is no program {words[0]!r} on this machine")
    if keys.url is not None and (urlsplit(keys.url).scheme not in ("http", "https") or not urlsplit(keys.url).hostname):
        raise ValueError(f"{_SUBJECT}.url is {keys.url!r}, but must look like http://127.0.0.1:8000/play")


def _fill(words: Sequence[str], values: Mapping[str, Any], where: str) -> list[str]:
    """Fill columns of the row into the words of a command.

    Raises:
        ProgramError: the row has no column of a name.
    """

    def write(match: re.Match[str]) -> str:
        name = match[1]
        if name is None:
            return match[0][0]
        if values.get(name) is None:
            columns = ", ".join(column for column, value in values.items() if value is not None)
            raise ProgramError(
                f"{_SUBJECT}.{where} names {{{name}}}, but the row has {columns}: name its columns in "
                "megatron_training.dataset_additional_keys"
            )
        return value if isinstance(value := values[name], str) else json.dumps(value, default=str, ensure_ascii=False)

    return [_PLACE.sub(write, word) for word in words]


def _read_result(folder: Path, output: str) -> ProgramResult:
    """Return the result of a command from its file AGENT_RESULT, or from its last line if that is JSON with a reward.

    Args:
        folder: folder of the sample.

    Raises:
        ProgramError: the file has something else, or is none.
    """
    output = output.strip()
    try:
        value = json.loads(read_beneath(folder, f"{_FILES}/result.json", _MAX_RESULT_BYTES))
    except FileNotFoundError:
        line = _read_last_line(output)
        return ProgramResult(output=output) if line is None else _read_report(line, "the last line", output)
    except FileRefusedError as error:
        raise ProgramError(f"AGENT_RESULT: {error}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ProgramError(f"AGENT_RESULT is not JSON: {str(error)[:_MAX_REASON]}") from None
    return _read_report(value if isinstance(value, dict) else {"reward": value}, "AGENT_RESULT", output)


def _read_last_line(output: str) -> JsonObject | None:
    line = (output.strip().splitlines() or [""])[-1]
    try:
        value = json.loads(line) if line.startswith("{") else None
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) and "reward" in value else None


def _read_report(value: object, where: str, output: str = "") -> ProgramResult:
    """Read {"reward": a number or null, "metrics": {name: number}, "output": text, "error": text}, of which all are optional.

    Raises:
        ProgramError: it has an error, or another form.
    """
    if not isinstance(value, dict):
        raise ProgramError(f"{where} must be an object with reward, not {show(value)}")
    if not value.keys() & set(_REPORT_KEYS):
        raise ProgramError(f"{where} has {show(sorted(value))}, but must have one of {', '.join(_REPORT_KEYS)}")
    if value.get("error"):
        raise ProgramError(value["error"][:_MAX_REASON] if isinstance(value["error"], str) else show(value["error"]))
    reward, text = value.get("reward"), value.get("output")
    if not isinstance(text, (str, int, float, type(None))):
        raise ProgramError(f"{where}: output is {show(text)}, but must be a text")
    try:
        number = None if reward is None else read_number(reward, "reward")
        metrics = read_metrics(value.get("metrics") or {}, "metrics")
    except ValueError as error:
        raise ProgramError(f"{where}: {error}") from None
    return ProgramResult(number, metrics, output if text is None else str(text))
