"""The other side of `verifiers_program`: plays episodes of an environment of the `verifiers` library, in a Python that has it.

Run as a file, not as a module, so that it needs nothing of this project: verifiers 0.2 and later want mcp before 2, vLLM 0.32
wants 2, so that the two live in virtual environments of their own. A question is a line of JSON on the standard input: {"id",
"row", "base_url", "model"} for an episode, {"id", "cancel": true} to give it up; an answer is a line {"id", "reward",
"metrics", "error"} on the standard output. `--rows FILE` writes the environment's own data set as jsonl instead, and ends.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from typing import Any

_INPUT = ("prompt", "example_id", "answer", "info", "task")


class Host:
    """Episodes that are being played."""

    def __init__(self, environment: Any, answers: int) -> None:
        """
        Args:
            answers: a file descriptor.
        """
        self._environment, self._answers = environment, answers
        self._episodes: dict[int, asyncio.Task[None]] = {}

    async def serve(self) -> None:
        """Play what it is asked to, until there is nobody to ask."""
        reader = asyncio.StreamReader(limit=1 << 28)
        await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
        while line := await reader.readline():
            question = json.loads(line)
            number = question["id"]
            if question.get("cancel"):
                if episode := self._episodes.pop(number, None):
                    episode.cancel()
            else:
                self._episodes[number] = asyncio.create_task(self._play(number, question))

    async def _play(self, number: int, question: dict[str, Any]) -> None:
        try:
            answer = await self._outcome(question)
        except Exception as error:  # of the environment, or of the library
            answer = {"reward": None, "metrics": {}, "error": f"{type(error).__name__}: {error}"[:2000]}
        finally:
            self._episodes.pop(number, None)
        self.tell({"id": number} | answer)

    async def _outcome(self, question: dict[str, Any]) -> dict[str, Any]:
        from verifiers.types import ClientConfig

        row = {name: value for name, value in question["row"].items() if name in _INPUT}
        row.setdefault("example_id", 0)
        # the address holds the trajectory's secret; the key is never looked at
        client = ClientConfig(api_base_url=question["base_url"], api_key_var="VERIFIERS_KEY", max_retries=0)
        played = await self._environment.run_rollout(row, client, question["model"], {"logprobs": True})
        error = played.get("error")
        metrics = {str(name): float(value) for name, value in (played.get("metrics") or {}).items() if _is_number(value)}
        reward = played.get("reward")
        return {
            "reward": float(reward) if _is_number(reward) else None,
            "metrics": metrics,
            "error": None if error is None else _in_words(error)[:2000],
        }

    def tell(self, value: dict[str, Any]) -> None:
        """Write a line, whole."""
        line = (json.dumps(value) + "\n").encode()
        while line:
            line = line[os.write(self._answers, line) :]


def _in_words(error: Any) -> str:
    """What the library says of a failure: a mapping, in newer releases with a message of its own."""
    if not isinstance(error, dict):
        return str(error)
    said = error.get("message") or error.get("error_chain_str")
    return ": ".join(str(part) for part in (error.get("error"), said) if part)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def write_rows(environment: Any, path: str) -> int:
    """Write the environment's data set, a row a line; the number of rows."""
    rows = 0
    with open(path, "w", encoding="utf-8") as file:
        for row in environment.get_dataset():
            file.write(json.dumps({name: row[name] for name in _INPUT if name in row}, ensure_ascii=False, default=str) + "\n")
            rows += 1
    return rows


def main() -> None:
    """Load the environment and plays it, or writes its rows."""
    parser = argparse.ArgumentParser(description="plays an environment of the verifiers library")
    parser.add_argument("name")
    parser.add_argument("--arguments", default="{}", help="of load_environment, as a JSON object")
    parser.add_argument("--rows", metavar="FILE", help="write the environment's data set as jsonl")
    arguments = parser.parse_args()
    # the folder of this file has modules whose names may mean others there
    own = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry) != own]
    answers = os.dup(1)
    os.dup2(2, 1)  # what the environment prints is no answer
    os.environ.setdefault("VERIFIERS_KEY", "none")
    host = Host(None, answers)
    try:
        try:
            from verifiers import load_environment
        except ModuleNotFoundError:
            raise
        except ImportError as error:
            raise ImportError(f"{error}; the releases from 0.1.11 to 0.3.1 have it") from None
        environment = load_environment(arguments.name, **json.loads(arguments.arguments))
    except Exception as error:  # of the environment, or of the library
        host.tell({"id": -1, "error": f"{type(error).__name__}: {error}"[:2000]})
        raise SystemExit(1) from None
    if arguments.rows:
        count = write_rows(environment, arguments.rows)
        os.write(answers, f"{count} rows written to {arguments.rows}\n".encode())
        return
    host.tell({"id": -1, "error": None})
    asyncio.run(Host(environment, answers).serve())


if __name__ == "__main__":
    main()
