"""What `rl_config.environment` names, and environments of the user's own, made ready for a loop.

The latter are `module:Class` with reset and step, plain methods or coroutines. What they return is checked, so that a mistake
in an environment is told in its own words and not as a crash behind it. Each method has a deadline. Plain methods run in a
thread.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mindspeed_rl import registry
from mindspeed_rl.config.run_files import check_yaml
from mindspeed_rl.tools.interface import Environment
from mindspeed_rl.tools.option_reader import OptionReader
from mindspeed_rl.tools.running import run_in_thread
from mindspeed_rl.tools.verifiers_program import PREFIX

_SUBJECT = "rl_config.environment"
_ROLES = ("system", "user", "assistant", "tool")
_CLOSE_LIMIT_S = 15.0
_LONGEST_S = 86400.0
#: of one reset or step
_STEP_LIMIT_S = 120.0


@dataclass(frozen=True)
class EnvironmentSpec:
    """What a run file says of its environment.

    Attributes:
        target: module:Class, or verifiers:NAME.
        args: of the class, or of the library's load_environment.
        python: an interpreter that has the library; None for this one.
        timeout_s: of one reset or step, or of an episode that a program plays; None for the usual.
    """

    target: str
    args: Mapping[str, Any] = field(default_factory=dict)
    python: str | None = None
    timeout_s: float | None = None

    @property
    def is_program(self) -> bool:
        """True for one of verifiers, which has a loop of its own."""
        return self.target.startswith(PREFIX)


def read_environment(said: str) -> EnvironmentSpec:
    """What `rl_config.environment` says: a target, or a YAML file with environment, args, python and timeout_s.

    Raises:
        ValueError: there is no such file, or it has other keys or values.
    """
    if not said.endswith((".yaml", ".yml")):
        return EnvironmentSpec(said)
    import yaml

    path = Path(said)
    if not path.is_file():
        raise ValueError(f"{_SUBJECT}: there is no file '{path}'")
    check_yaml(path)
    options = OptionReader(yaml.safe_load(path.read_text(encoding="utf-8")), str(path))
    target, args, python = options.text("environment"), options.take("args", {}), options.text("python")
    timeout_s = options.number("timeout_s", 0.0, 0.0, _LONGEST_S)
    options.end()
    if target is None:
        raise ValueError(f"{path}: it has no key 'environment', module:Class or verifiers:NAME")
    if not isinstance(args, Mapping):
        raise ValueError(f"{path}.args must be a mapping, not {type(args).__name__}")
    return EnvironmentSpec(target, dict(args), python, timeout_s or None)


class InvalidEnvironmentError(RuntimeError):
    """An environment took too long, or returned what it should not."""


def make_environment_factory(
    target: str, args: Mapping[str, Any] | None = None, *, timeout_s: float | None = None
) -> Callable[[], Environment]:
    """What makes an environment for a trajectory.

    Args:
        target: module:Class, or any callable that makes one.
        args: its arguments.
        timeout_s: of one reset or step; None for the usual.

    Raises:
        ValueError: there is no such class, or it lacks reset or step.
    """
    made = registry.load(target, _SUBJECT, wraps=Exception)
    if not callable(made):
        raise ValueError(f"{_SUBJECT}: {target} is {made!r}, which makes no environment")
    if inspect.isclass(made):
        lacking = [name for name in ("reset", "step") if not callable(getattr(made, name, None))]
        if lacking:
            raise ValueError(f"{_SUBJECT}: {target} has no {' and no '.join(lacking)}")
    return lambda: CheckedEnvironment(made(**(args or {})), target, timeout_s or _STEP_LIMIT_S)


class CheckedEnvironment:
    """See `Environment`.

    Args:
        inner: with reset(task) and step(messages), and close() if it holds something.
        name: as errors call it.
    """

    def __init__(self, inner: Any, name: str, timeout_s: float) -> None:
        self._inner, self._name, self._timeout_s = inner, name, timeout_s

    async def reset(self, task: Mapping[str, Any]) -> list[dict[str, Any]]:
        """See `Environment`.

        Raises:
            InvalidEnvironmentError: it took too long, or returned no messages.
        """
        return self._messages(await self._run("reset", dict(task)), "reset")

    async def step(self, messages: Sequence[dict[str, Any]]) -> tuple[list[dict[str, Any]], float | None, bool]:
        """See `Environment`.

        Raises:
            InvalidEnvironmentError: it took too long, or returned something else.
        """
        found = await self._run("step", [dict(message) for message in messages])
        if not isinstance(found, (tuple, list)) or len(found) != 3:
            raise InvalidEnvironmentError(
                f"{self._name}.step must return (messages, reward or None, done), not {_short(found)}"
            )
        new, reward, done = found
        # a truth value is an int in Python, and here most likely `done` in the wrong place
        if reward is not None and (isinstance(reward, bool) or not isinstance(reward, (int, float))):
            raise InvalidEnvironmentError(f"{self._name}.step: the reward must be a number or None, not {_short(reward)}")
        if not isinstance(done, bool):
            raise InvalidEnvironmentError(f"{self._name}.step: done must be True or False, not {_short(done)}")
        said = self._messages(new or [], "step")
        if not said and not done:
            raise InvalidEnvironmentError(
                f"{self._name}.step: neither new messages nor the end; the model would have nothing to answer"
            )
        return said, None if reward is None else float(reward), done

    async def close(self) -> None:
        """See `Environment`."""
        if callable(getattr(self._inner, "close", None)):
            await self._run("close", limit_s=_CLOSE_LIMIT_S)

    async def _run(self, method: str, *arguments: Any, limit_s: float | None = None) -> Any:
        function = getattr(self._inner, method)
        limit_s = limit_s or self._timeout_s
        if inspect.iscoroutinefunction(function):
            running = asyncio.ensure_future(function(*arguments))
        else:
            running = asyncio.ensure_future(run_in_thread(lambda: function(*arguments)))
        try:
            # not wait_for, which waits on for a coroutine that does not heed its cancellation
            done, _ = await asyncio.wait([running], timeout=limit_s)
        except asyncio.CancelledError:
            running.cancel()
            raise
        if not done:
            running.cancel()
            raise InvalidEnvironmentError(f"{self._name}.{method} took longer than {limit_s:g} s")
        return running.result()

    def _messages(self, value: Any, method: str) -> list[dict[str, Any]]:
        if isinstance(value, Mapping):
            value = [value]
        if isinstance(value, str):
            value = [{"role": "user", "content": value}]
        if not isinstance(value, Sequence) or not all(isinstance(message, Mapping) for message in value):
            raise InvalidEnvironmentError(
                f"{self._name}.{method} must return messages with role and content, not {_short(value)}"
            )
        for message in value:
            if message.get("role") not in _ROLES or not isinstance(message.get("content"), str):
                known = ", ".join(_ROLES)
                raise InvalidEnvironmentError(
                    f"{self._name}.{method}: a message has a role of {known} and a text, not {_short(message)}"
                )
        return [dict(message) for message in value]


def _short(value: Any) -> str:
    return repr(value)[:200]
