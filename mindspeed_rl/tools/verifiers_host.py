"""The server side of `verifiers_program`: runs episodes of an environment of the `verifiers` library, in a Python that has it.

Run as a file, not as a module, so that it needs nothing of this project: verifiers 0.2 and later require mcp before 2, vLLM
0.32 requires 2, so the two need separate virtual environments. A request is a line of JSON on standard input: {"id", "row",
"base_url", "model"} for an episode, {"id", "cancel": true} to cancel it; a reply is a line {"id", "reward", "metrics", "error"}
on standard output. `--rows FILE` instead writes the environment's own data set as jsonl and ends.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from typing import Any, TypeGuard

_INPUT = ("prompt", "example_id", "answer", "info", "task")


class _Host:
    """Runs episodes.

    Args:
        output: file descriptor for replies.
    """

    def __init__(self, environment: Any, output: int) -> None:
        self._environment, self._output = environment, output
        self._episodes: dict[int, asyncio.Task[None]] = {}

    async def serve(self) -> None:
        """Handle requests until the input ends."""
        reader = asyncio.StreamReader(limit=1 << 28)
        await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
        while line := await reader.readline():
            request = json.loads(line)
            request_id = request["id"]
            if request.get("cancel"):
                if episode := self._episodes.pop(request_id, None):
                    episode.cancel()
            else:
                self._episodes[request_id] = asyncio.create_task(self._run_episode(request_id, request))

    async def _run_episode(self, request_id: int, request: dict[str, Any]) -> None:
        from verifiers.types import ClientConfig

        result: dict[str, Any] = {"reward": None, "metrics": {}, "error": None}
        try:
            row = {name: value for name, value in request["row"].items() if name in _INPUT}
            row.setdefault("example_id", 0)
            # the URL has the trajectory's secret; the key is not used
            client = ClientConfig(api_base_url=request["base_url"], api_key_var="VERIFIERS_KEY", max_retries=0)
            state = await self._environment.run_rollout(row, client, request["model"], {"logprobs": True})
            metrics, reward, error = state.get("metrics") or {}, state.get("reward"), state.get("error")
            result["metrics"] = {str(name): float(value) for name, value in metrics.items() if _is_number(value)}
            result["reward"] = float(reward) if _is_number(reward) else None
            if isinstance(error, dict):  # of newer releases
                message = error.get("message") or error.get("error_chain_str")
                error = ": ".join(str(part) for part in (error.get("error"), message) if part)
            result["error"] = None if error is None else str(error)[:2000]
        except Exception as error:  # noqa: BLE001 (the environment and the library may raise anything)
            result = {"reward": None, "metrics": {}, "error": f"{type(error).__name__}: {error}"[:2000]}
        finally:
            self._episodes.pop(request_id, None)
        self.send({"id": request_id} | result)

    def send(self, message: dict[str, Any]) -> None:
        """Write a message as a line."""
        line = (json.dumps(message) + "\n").encode()
        while line:
            line = line[os.write(self._output, line) :]


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _write_rows(environment: Any, path: str) -> int:
    """Write the environment's data set as jsonl; return the number of rows."""
    count = 0
    with open(path, "w", encoding="utf-8") as file:
        for row in environment.get_dataset():
            file.write(json.dumps({name: row[name] for name in _INPUT if name in row}, ensure_ascii=False, default=str) + "\n")
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
        try:
            from verifiers import load_environment
        except ModuleNotFoundError:
            raise
        except ImportError as error:
            raise ImportError(f"{error}; the releases from 0.1.11 to 0.3.1 have it") from None
        environment = load_environment(arguments.name, **json.loads(arguments.arguments))
    except Exception as error:  # noqa: BLE001 (the environment and the library may raise anything)
        host.send({"id": -1, "error": f"{type(error).__name__}: {error}"[:2000]})
        raise SystemExit(1) from None
    if arguments.rows:
        count = _write_rows(environment, arguments.rows)
        os.write(output, f"{count} rows written to {arguments.rows}\n".encode())
        return
    host.send({"id": -1, "error": None})
    asyncio.run(_Host(environment, output).serve())


if __name__ == "__main__":
    _main()
