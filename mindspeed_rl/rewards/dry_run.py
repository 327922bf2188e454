"""Dry run: load a run's plug-ins and reward functions in a short-lived process before anything else is started.

Side effects of importing a user's file (it ends the process, starts threads, sets environment variables) stay in that process.
Started as `python -m mindspeed_rl.rewards.dry_run` with {"plugins", "functions"} on its input; it prints a list of violations.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping

from mindspeed_rl.config.keys.rl import RLConfig
from mindspeed_rl.rewards import REWARDS

_TIMEOUT_S = 120.0


def dry_run_reward_functions(rl: RLConfig, env: Mapping[str, str], *, timeout_s: float = _TIMEOUT_S) -> list[str]:
    """Return a sentence for each plug-in that fails to load and each reward function that is missing afterwards.

    Args:
        env: variables that reward processes have in addition to those of this process.
        timeout_s: limit for loading.
    """
    custom = [name for name in rl.verifier_function if name not in REWARDS] if rl.rule_reward else []
    if not (custom or rl.external_plugins):
        return []
    request = json.dumps({"plugins": rl.external_plugins, "functions": custom})
    names = ", ".join([*rl.external_plugins, *custom])
    try:
        finished = subprocess.run(
            [sys.executable, "-m", "mindspeed_rl.rewards.dry_run"],
            input=request,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
            env={**os.environ, **env},
        )
    except subprocess.TimeoutExpired:
        return [f"rl_config.external_plugins: {names} did not load within {timeout_s:g} s"]
    try:
        return json.loads(finished.stdout)
    except json.JSONDecodeError:
        message = (finished.stderr.strip().splitlines() or ["without a message"])[-1]
        ending = f"ends the process with code {finished.returncode}: {message[:500]}"
        return [f"rl_config.external_plugins: loading {names} {ending}"]


def _load_all(plugins: list[str], functions: list[str]) -> list[str]:
    # only in the short-lived process: the driver does not need the scorers
    from mindspeed_rl.isolation.process import describe
    from mindspeed_rl.rewards.scorer import import_scorer
    from mindspeed_rl.rewards.worker import load_plugin

    violations = []
    for path in plugins:
        try:
            load_plugin(path)
        except ValueError as error:
            violations.append(f"rl_config.{error}")
    if violations:
        return violations
    for name in functions:
        try:
            if not callable(function := import_scorer(name)):
                violations.append(f"rl_config.verifier_function: '{name}' is {function!r}, which cannot be called")
        except ValueError as error:
            violations.append(f"rl_config.verifier_function: {error}")
        except Exception as error:  # noqa: BLE001 (the user's module may raise anything while it is imported)
            violations.append(f"rl_config.verifier_function: '{name}' fails to load: {describe(error)}")
    return violations


def _main() -> None:
    """Handle one request; redirect the output of the user's files to standard error."""
    request, output = json.load(sys.stdin), os.dup(1)
    os.dup2(2, 1)
    violations = _load_all(request["plugins"], request["functions"])
    os.write(output, json.dumps(violations).encode())
    os._exit(0)  # does not wait for threads that a plug-in started


if __name__ == "__main__":
    _main()
