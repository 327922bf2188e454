"""Loads a run's plug-ins and reward functions once, in a process that ends right away, before anything else is started.

Whatever a user's file does while it is imported (end the process, start threads, set environment variables) stays there.
Started as `python -m mindspeed_rl.rewards.dry_run` with {"plugins", "functions"} on its input; it answers a list of mistakes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING

from mindspeed_rl.rewards import REWARDS

if TYPE_CHECKING:
    from mindspeed_rl.config.keys.rl import RLConfig

_TIMEOUT_S = 120.0


def loading_mistakes(rl: RLConfig, env: Mapping[str, str], *, timeout_s: float = _TIMEOUT_S) -> list[str]:
    """Return a sentence for each plug-in that does not load and each reward function that is not there afterwards.

    Args:
        env: variables that reward processes have besides those of this one.
        timeout_s: how long loading may take.
    """
    own = [name for name in rl.verifier_function if name not in REWARDS] if rl.rule_reward else []
    if not (own or rl.external_plugins):
        return []
    request = json.dumps({"plugins": rl.external_plugins, "functions": own})
    where = ", ".join([*rl.external_plugins, *own])
    try:
        done = subprocess.run(
            [sys.executable, "-m", "mindspeed_rl.rewards.dry_run"],
            input=request,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
            env={**os.environ, **env},
        )
    except subprocess.TimeoutExpired:
        return [f"rl_config.external_plugins: {where} did not load within {timeout_s:g} s"]
    try:
        return json.loads(done.stdout)
    except json.JSONDecodeError:
        said = (done.stderr.strip().splitlines() or ["without a word"])[-1]
        return [f"rl_config.external_plugins: loading {where} ends the process with code {done.returncode}: {said[:500]}"]


def _tried(plugins: list[str], functions: list[str]) -> list[str]:
    # in the short process only: the driver's half of this module need not bring what scores
    from mindspeed_rl.rewards.scorer import import_scorer
    from mindspeed_rl.rewards.worker import describe, load_plugin

    mistakes = []
    for path in plugins:
        try:
            load_plugin(path)
        except ValueError as error:
            mistakes.append(f"rl_config.{error}")
    if mistakes:
        return mistakes
    for name in functions:
        try:
            if not callable(found := import_scorer(name)):
                mistakes.append(f"rl_config.verifier_function: '{name}' is {found!r}, which cannot be called")
        except ValueError as error:
            mistakes.append(f"rl_config.verifier_function: {error}")
        except Exception as error:  # what the user's module raises while it is imported
            mistakes.append(f"rl_config.verifier_function: '{name}' fails to load: {describe(error)}")
    return mistakes


def main() -> None:
    """Answer one request; what the user's files print goes to the error output."""
    request, answer = json.load(sys.stdin), os.dup(1)
    os.dup2(2, 1)
    mistakes = _tried(request["plugins"], request["functions"])
    os.write(answer, json.dumps(mistakes).encode())
    os._exit(0)  # threads that a plug-in started need not end


if __name__ == "__main__":
    main()
