"""Dry run: load a run's plug-ins and reward functions in a short-lived process, before anything else is started.

Side effects of importing a user's file (it ends the process, starts threads, sets environment variables) stay in that process.
Started as `python -m mindspeed_rl.rewards.dry_run` with a frame of {"plugins", "functions", "trial"} on its input; it prints
the fields of a `DryRun`.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

from mindspeed_rl import registry
from mindspeed_rl.config.keys.rl import RLConfig
from mindspeed_rl.isolation.channel import pack, unpack
from mindspeed_rl.rewards import REWARDS
from mindspeed_rl.rewards.samples import RewardSample, RewardSettings
from mindspeed_rl.rewards.scorer import list_parameters

_TIMEOUT_S = 120.0


@dataclass(frozen=True)
class DryRun:
    """What loading plug-ins and reward functions has shown.

    Attributes:
        violations: a sentence for each plug-in that fails to load, and each reward function that is missing afterwards.
        required: parameters without a default by function; a function that cannot be looked into is not there.
    """

    violations: list[str] = field(default_factory=list)
    required: dict[str, list[str]] = field(default_factory=dict)

    def find_missing(self, label: object, columns: Mapping[str, object]) -> list[str]:
        """Return a sentence for each function with a parameter that neither a sample nor a row's columns fill.

        Args:
            label: label of a row; None for data without labels.
            columns: its further columns.
        """
        known = list_parameters(RewardSample(label=label, columns=dict(columns)))
        return [
            f"rl_config.verifier_function: '{name}' has the parameter '{missing[0]}' without a default, which is neither a part"
            f" of a sample nor a column of the data{registry.did_you_mean(missing[0], known)}; the rows have"
            f" {', '.join(['label'] * (label is not None) + list(columns)) or 'no label and no further columns'} (columns are"
            " kept by dataset_additional_keys)"
            for name, required in self.required.items()
            if (missing := [parameter for parameter in required if parameter not in known])
        ]


@dataclass(frozen=True)
class Trial:
    """A made-up response to a row of the data, which every function of a plug-in scores.

    Attributes:
        sample: the response.
        settings: settings of the reward functions.
    """

    sample: RewardSample
    settings: RewardSettings


def dry_run_reward_functions(
    rl: RLConfig, env: Mapping[str, str], *, trial: Trial | None = None, timeout_s: float = _TIMEOUT_S
) -> DryRun:
    """Load plug-ins and reward functions in a process of their own, and read the parameters of the functions.

    Args:
        env: variables that reward processes have in addition to this process's variables.
        trial: what functions that are not built in also score; classes, which may load a model, are left out.
        timeout_s: limit for loading.
    """
    custom = [name for name in rl.verifier_function if name not in REWARDS] if rl.rule_reward else []
    if not (custom or rl.external_plugins):
        return DryRun()
    scored = None if trial is None else asdict(trial)
    request = pack({"plugins": rl.external_plugins, "functions": custom, "trial": scored})
    names = ", ".join([*rl.external_plugins, *custom])
    try:
        finished = subprocess.run(
            [sys.executable, "-m", "mindspeed_rl.rewards.dry_run"],
            input=request,
            capture_output=True,
            timeout=timeout_s,
            env={**os.environ, **env},
        )
    except subprocess.TimeoutExpired:
        done = "load" if trial is None else "score the first row"
        return DryRun([f"rl_config.external_plugins: {names} did not {done} within {timeout_s:g} s"])
    try:
        return DryRun(**json.loads(finished.stdout))
    except json.JSONDecodeError:
        message = (finished.stderr.decode(errors="replace").strip().splitlines() or ["without a message"])[-1]
        ending = f"ends the process with code {finished.returncode}: {message[:500]}"
        done = "loading" if trial is None else "the score of the first row by"
        return DryRun([f"rl_config.external_plugins: {done} {names} {ending}"])


def _load_all(plugins: list[str], functions: list[str], trial: Trial | None) -> DryRun:
    # only in the short-lived process: the driver does not need the scorers
    from mindspeed_rl.isolation.process import describe
    from mindspeed_rl.rewards.scorer import import_scorer, list_required
    from mindspeed_rl.rewards.worker import load_plugin

    violations: list[str] = []
    required: dict[str, list[str]] = {}
    for path in plugins:
        try:
            load_plugin(path)
        except ValueError as error:
            violations.append(f"rl_config.{error}")
    if violations:
        return DryRun(violations)
    for name in functions:
        try:
            if not callable(function := import_scorer(name)):
                violations.append(f"rl_config.verifier_function: '{name}' is {function!r}, which cannot be called")
            else:
                # a class is not instantiated, which may load a model
                called = function.__call__ if inspect.isclass(function) else function
                with contextlib.suppress(ValueError, TypeError):  # written in C
                    required[name] = list_required(called)[1 if inspect.isclass(function) else 0 :]
                if trial is not None and not inspect.isclass(function) and (problem := _try_score(name, trial)):
                    violations.append(problem)
        except ValueError as error:
            violations.append(f"rl_config.verifier_function: {error}")
        except Exception as error:  # noqa: BLE001 (the user's module may raise anything while it is imported)
            violations.append(f"rl_config.verifier_function: '{name}' fails to load: {describe(error)}")
    return DryRun(violations, required)


def _try_score(name: str, trial: Trial) -> str | None:
    """Score the row with a function; return a sentence where it cannot."""
    # only in the short-lived process: the driver does not need the scorers
    from mindspeed_rl.isolation.process import describe
    from mindspeed_rl.rewards.scorer import Scorer, ScorerError, import_scorer

    scorer = Scorer.build(name, import_scorer(name), trial.settings)
    try:
        returned = scorer.call([trial.sample], trial.settings)
        if scorer.is_async:
            returned = asyncio.run(returned)
        scorer.to_values(returned, 1)
    except (Exception, SystemExit) as error:  # noqa: BLE001 (the user's function may raise anything)
        what = str(error) if isinstance(error, ScorerError) else describe(error)
        return (
            f"rl_config.verifier_function: '{name}' cannot score the first row of the data, with the label as the response:"
            f" {what}"
        )
    return None


def _main() -> None:
    """Handle one request; redirect the output of the user's files to standard error."""
    request, output = unpack(sys.stdin.buffer.read()), os.dup(1)
    os.dup2(2, 1)
    trial = request["trial"]
    if trial is not None:
        trial = Trial(RewardSample(**trial["sample"]), RewardSettings.from_message(trial["settings"]))
    result = _load_all(request["plugins"], request["functions"], trial)
    os.write(output, json.dumps(asdict(result)).encode())
    os._exit(0)  # does not wait for threads that a plug-in started


if __name__ == "__main__":
    _main()
