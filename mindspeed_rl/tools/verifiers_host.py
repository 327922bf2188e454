"""The server side of `verifiers_program`: runs episodes of an environment of the `verifiers` library, in a Python that has it.

Run as a file, not as a module, so that it needs nothing of this project: verifiers 0.2 and 0.3 require mcp before 2, vLLM 0.32
requires 2, so the two need separate virtual environments. An environment is loaded by `load_environment` of the library (0.1.11
to 0.3), or is a taskset of `verifiers.v1` (0.4). A request is a line of JSON on standard input: {"id", "row",
"base_url", "model"} for an episode, {"id", "cancel": true} to cancel it; a reply is a line {"id", "reward", "metrics", "error",
"agents"} on standard output; `agents` has the runs of agents of release 0.4, with the session of their requests. `--rows FILE`
instead writes the environment's own data set as jsonl and ends.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import sys
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any, NamedTuple, TypeGuard

_INPUT = ("prompt", "example_id", "answer", "info", "task")


#: rows that are listed of a taskset without an end
_MAX_ROWS = 1000


class _Outcome(NamedTuple):
    """What an episode has given.

    Attributes:
        agents: {"session", "name", "reward", "trains"} of each run of an agent; None where the release has no agents.
    """

    reward: float | None
    metrics: dict[str, float]
    error: str | None
    agents: list[dict[str, Any]] | None = None


class _Environment:
    """An environment of the releases 0.1.11 to 0.3."""

    def __init__(self, environment: Any) -> None:
        self._environment = environment

    def list_rows(self) -> Iterator[dict[str, Any]]:
        """Yield the rows of its data set."""
        for row in self._environment.get_dataset():
            yield {name: row[name] for name in _INPUT if name in row}

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        """Hold what episodes share; here nothing."""
        yield

    async def run(self, row: dict[str, Any], base_url: str, model: str) -> _Outcome:
        """Run an episode."""
        from verifiers.types import ClientConfig

        given = {name: value for name, value in row.items() if name in _INPUT}
        given.setdefault("example_id", 0)
        # the URL has the trajectory's secret; the key is not used
        client = ClientConfig(api_base_url=base_url, api_key_var="VERIFIERS_KEY", max_retries=0)
        state = await self._environment.run_rollout(given, client, model, {"logprobs": True})
        reward, error = state.get("reward"), state.get("error")
        if isinstance(error, dict):  # of newer releases
            message = error.get("message") or error.get("error_chain_str")
            error = ": ".join(str(part) for part in (error.get("error"), message) if part)
        error = None if error is None else str(error)
        return _Outcome(float(reward) if _is_number(reward) else None, _select_numbers(state.get("metrics") or {}), error)


class _Taskset:
    """An environment of release 0.4: a taskset, and the agents that play it as programs on this machine.

    Args:
        name: id of the taskset.
        arguments: keys of the environment's config; others are the taskset's.
    """

    def __init__(self, name: str, arguments: dict[str, Any]) -> None:
        from verifiers.v1.configs.agent import AgentConfig
        from verifiers.v1.utils.loaders import default_harness_id, env_config_type, load_environment, resolve_env_config

        fields = env_config_type(name, arguments.get("id", "")).model_fields
        given = {key: value for key, value in arguments.items() if key in fields}
        others = {key: value for key, value in arguments.items() if key not in fields}
        given["taskset"] = {"id": name, **given.get("taskset", {}), **others}
        for role, field in fields.items():
            if isinstance(field.default, AgentConfig):
                agent = given[role] = dict(given.get(role, {}))
                if field.default.runtime.type == "prime":  # the default: a service elsewhere
                    agent.setdefault("runtime", {"type": "subprocess"})
                if field.default.harness is None and default_harness_id(name) == "bash":  # the default: a shell of this machine
                    agent.setdefault("harness", {"id": "null"})
        self._environment = load_environment(resolve_env_config(given))
        taskset = self._environment.taskset
        self._tasks = list(taskset if taskset.bounded else taskset.take(_MAX_ROWS))

    def list_rows(self) -> Iterator[dict[str, Any]]:
        """Yield a row for each task; `example_id` is its place."""
        for index, task in enumerate(self._tasks):
            data = task.data.model_dump(mode="json")
            prompt, system = data.get("prompt"), data.get("system_prompt")
            messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt or [])
            if system:
                messages.insert(0, {"role": "system", "content": system})
            answer = {} if data.get("answer") is None else {"answer": str(data["answer"])}
            yield {"prompt": messages, "example_id": index, **answer}

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        """Hold the library's proxy and the tool servers of the taskset."""
        async with self._environment.serving():
            yield

    async def run(self, row: dict[str, Any], base_url: str, model: str) -> _Outcome:
        """Run an episode; with several runs of agents that train, the reward is the mean of theirs."""
        from verifiers.v1.clients import EvalClientConfig, ModelContext

        # the URL has the trajectory's secret; the key is not used
        client = EvalClientConfig(base_url=base_url, api_key_var="VERIFIERS_KEY")
        episode = await self._environment.run_episode(self._tasks[int(row["example_id"])], ModelContext(model, client))
        traces = [trace for trace in episode.traces if trace.agent is None or trace.agent.trainable]
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        metrics = [_select_numbers(trace.metrics) for trace in traces]
        if errors and not episode.ok or not traces:
            text = f"{errors[-1].type}: {errors[-1].message}" if errors else "no agent ran"
            return _Outcome(None, {}, text)
        agents = [_describe(trace) for trace in episode.traces]
        return _Outcome(sum(trace.reward for trace in traces) / len(traces), metrics[0], None, agents)


class _Host:
    """Runs episodes.

    Args:
        output: file descriptor for replies.
    """

    def __init__(self, environment: _Environment | _Taskset | None, output: int) -> None:
        self._environment, self._output = environment, output
        self._episodes: dict[int, asyncio.Task[None]] = {}

    async def serve(self) -> None:
        """Handle requests until the input ends."""
        assert self._environment is not None
        reader = asyncio.StreamReader(limit=1 << 28)
        await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
        async with self._environment.serving():
            self.send({"id": -1, "error": None})
            while line := await reader.readline():
                request = json.loads(line)
                request_id = request["id"]
                if request.get("cancel"):
                    if episode := self._episodes.pop(request_id, None):
                        episode.cancel()
                else:
                    self._episodes[request_id] = asyncio.create_task(self._run_episode(request_id, request))

    async def _run_episode(self, request_id: int, request: dict[str, Any]) -> None:
        assert self._environment is not None
        try:
            outcome = await self._environment.run(request["row"], request["base_url"], request["model"])
        except Exception as error:  # noqa: BLE001 (the environment and the library may raise anything)
            outcome = _Outcome(None, {}, f"{type(error).__name__}: {error}")
        finally:
            self._episodes.pop(request_id, None)
        error = None if outcome.error is None else outcome.error[:2000]
        self.send({"id": request_id, **outcome._asdict(), "error": error})

    def send(self, message: dict[str, Any]) -> None:
        """Write a message as a line."""
        line = (json.dumps(message) + "\n").encode()
        while line:
            line = line[os.write(self._output, line) :]


def _describe(trace: Any) -> dict[str, Any]:
    """Return the run of an agent; the library's proxy sends the trace's id with each of its requests."""
    name, trains = (None, True) if trace.agent is None else (trace.agent.name, trace.agent.trainable)
    return {"session": str(trace.id), "name": name or "agent", "reward": float(trace.reward), "trains": bool(trains)}


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _select_numbers(metrics: Mapping[str, object]) -> dict[str, float]:
    return {str(name): float(value) for name, value in metrics.items() if _is_number(value)}


def _load(name: str, arguments: dict[str, Any]) -> _Environment | _Taskset:
    """Load an environment by the interface that the installed release has.

    Raises:
        ImportError: the release has neither.
    """
    import verifiers

    if hasattr(verifiers, "load_environment"):
        return _Environment(verifiers.load_environment(name, **arguments))
    try:
        import verifiers.v1
    except ImportError as error:
        raise ImportError(f"{error}; the releases from 0.1.11 to 0.3 have load_environment, and 0.4 has verifiers.v1") from None
    return _Taskset(name, arguments)


def _write_rows(environment: _Environment | _Taskset, path: str) -> int:
    """Write the environment's rows as jsonl; return their number."""
    count = 0
    with open(path, "w", encoding="utf-8") as file:
        for row in environment.list_rows():
            file.write(json.dumps(row, ensure_ascii=False, default=str) + "\n")
            count += 1
    return count


def _main() -> None:
    """Load the environment and run episodes, or write its rows."""
    parser = argparse.ArgumentParser(description="plays an environment of the verifiers library")
    parser.add_argument("name")
    parser.add_argument("--arguments", default="{}", help="of load_environment, as a JSON object")
    parser.add_argument("--rows", metavar="FILE", help="write the environment's data set as jsonl")
    arguments = parser.parse_args()
    # the modules in the folder of this file may have the names of others
    folder = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry) != folder]
    output = os.dup(1)
    os.dup2(2, 1)  # output of the environment must not mix with replies
    os.environ.setdefault("VERIFIERS_KEY", "none")
    host = _Host(None, output)
    try:
        environment = _load(arguments.name, json.loads(arguments.arguments))
    except Exception as error:  # noqa: BLE001 (the environment and the library may raise anything)
        host.send({"id": -1, "error": f"{type(error).__name__}: {error}"[:2000]})
        raise SystemExit(1) from None
    if arguments.rows:
        count = _write_rows(environment, arguments.rows)
        os.write(output, f"{count} rows written to {arguments.rows}\n".encode())
        return
    asyncio.run(_Host(environment, output).serve())


if __name__ == "__main__":
    _main()
