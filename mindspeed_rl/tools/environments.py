"""Environments: reads `rl_config.environment` and prepares environments of the user for a loop.

The latter are `module:Class` with reset and step, plain methods or coroutines. Their return values are checked, so that an
error in an environment is reported as such and not as a later crash. Each method has a deadline. Plain methods run in a thread.
"""

from __future__ import annotations

import asyncio
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from mindspeed_rl import registry
from mindspeed_rl.bounds import is_number
from mindspeed_rl.config.run_files import check_yaml
from mindspeed_rl.files import describe_missing
from mindspeed_rl.rewards.swift_plugins import ENVIRONMENTS, GymEnvironment
from mindspeed_rl.rewards.worker import load_plugin
from mindspeed_rl.tools import openenv
from mindspeed_rl.tools.interface import Environment, JsonObject
from mindspeed_rl.tools.option_reader import OptionReader
from mindspeed_rl.tools.running import run_in_thread
from mindspeed_rl.tools.tasks import retrieve_exception
from mindspeed_rl.tools.tool import Config
from mindspeed_rl.tools.verifiers_program import PREFIX

_SUBJECT = "rl_config.environment"
_ROLE_NAME = re.compile(r"[A-Za-z]\w{0,40}")
_ROLES = ("system", "user", "assistant", "tool")
_CLOSE_LIMIT_S = 15.0
_MAX_TIMEOUT_S = 86400.0
#: of one reset or step
_STEP_LIMIT_S = 120.0


@dataclass(frozen=True)
class EnvironmentSpec:
    """The environment of a run file.

    Attributes:
        target: module:Class, openenv:URL, or verifiers:NAME.
        args: arguments of the class, or of the library's load_environment.
        python: an interpreter that has the library; None for this one.
        timeout_s: limit in seconds of one reset or step, or of an episode of a program; None for the default.
        variables: environment variables of a program, `env` of the file; ${NAME} is one of the run.
    """

    target: str
    args: Mapping[str, object] = field(default_factory=dict)
    python: str | None = None
    timeout_s: float | None = None
    variables: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_program(self) -> bool:
        """True for an environment of verifiers, which has its own loop."""
        return self.target.startswith(PREFIX)


def read_environment(spec: str) -> EnvironmentSpec:
    """Read `rl_config.environment`: a target, or a YAML file with environment, args, python and timeout_s.

    Raises:
        ValueError: there is no such file, or it has other keys or values.
    """
    if not spec.endswith((".yaml", ".yml")):
        return EnvironmentSpec(spec)
    import yaml

    path = Path(spec)
    if not path.is_file():
        raise ValueError(f"{_SUBJECT}: there is no file '{path}': {describe_missing(path)}")
    check_yaml(path)
    options = OptionReader(yaml.safe_load(path.read_text(encoding="utf-8")), str(path))
    target, args, python = options.read_text("environment"), options.read("args", {}), options.read_text("python")
    timeout_s = options.read_float("timeout_s", 0.0, 0.0, _MAX_TIMEOUT_S)
    variables = options.read_mapping("env")
    options.reject_unknown()
    if target is None:
        raise ValueError(f"{path}: it has no key 'environment', module:Class or verifiers:NAME")
    if not isinstance(args, Mapping):
        raise ValueError(f"{path}.args must be a mapping, not {type(args).__name__}")
    return EnvironmentSpec(target, dict(args), python, timeout_s or None, variables)


class InvalidEnvironmentError(RuntimeError):
    """An environment took too long, or returned an invalid value."""


def make_environment_factory(
    target: str, args: Config | None = None, *, timeout_s: float | None = None
) -> Callable[[], Environment]:
    """Return a function that creates an environment for a trajectory.

    Args:
        target: module:Class, or any callable that creates one; or openenv:URL.
        args: its arguments.
        timeout_s: limit in seconds of one reset or step; None for the default.

    Raises:
        ValueError: there is no such class, or it lacks reset or step.
    """
    if target.startswith(openenv.PREFIX):
        url, options = target.removeprefix(openenv.PREFIX), dict(args or {})
        known = set(inspect.signature(openenv.OpenEnvEnvironment).parameters) - {"url"}
        if not url.startswith(("http://", "https://", "ws://", "wss://")) or not set(options) <= known:
            raise ValueError(
                f"{_SUBJECT}: {target} must look like {openenv.PREFIX}http://host:port, with args of {', '.join(sorted(known))}"
            )
        return lambda: _CheckedEnvironment(openenv.OpenEnvEnvironment(url, **options), target, timeout_s or _STEP_LIMIT_S)
    factory = registry.load(target, _SUBJECT, wraps=Exception)
    if not callable(factory):
        raise ValueError(f"{_SUBJECT}: {target} is {factory!r}, which cannot create an environment")
    if inspect.isclass(factory):
        missing = [name for name in ("reset", "step") if not callable(getattr(factory, name, None))]
        if missing:
            raise ValueError(f"{_SUBJECT}: {target} has no {' and no '.join(missing)}")
    return lambda: _CheckedEnvironment(factory(**(args or {})), target, timeout_s or _STEP_LIMIT_S)


def open_environment(spec: EnvironmentSpec, external_plugins: Sequence[str]) -> Callable[[], Environment]:
    """Return a function that creates an environment of a run file in this process.

    Args:
        external_plugins: files whose `envs` may have its name.

    Raises:
        ValueError: there is no such class or name, or the file of the environment has keys of a program.
    """
    if spec.python is not None:
        raise ValueError(f"{_SUBJECT}: {spec.target} runs in this process; 'python' is for {PREFIX}NAME")
    if spec.variables:
        raise ValueError(f"{_SUBJECT}: {spec.target} runs in this process; 'env' is for {PREFIX}NAME")
    target, args = spec.target, spec.args
    if ":" not in target:
        for path in external_plugins:
            load_plugin(path)
        if target not in ENVIRONMENTS:
            known = ", ".join(ENVIRONMENTS) or "nothing"
            raise ValueError(f"{_SUBJECT}: '{target}' is not in envs of external_plugins; {known} is")
        target, args = f"{GymEnvironment.__module__}:{GymEnvironment.__name__}", {"name": target}
    return make_environment_factory(target, args, timeout_s=spec.timeout_s)


def is_for_roles(target: str) -> bool:
    """Return True for a class with `roles`, which only the loop of that name can play."""
    is_class = ":" in target and not target.startswith((openenv.PREFIX, PREFIX))
    return is_class and hasattr(registry.load(target, _SUBJECT, wraps=Exception), "roles")


def is_role_name(value: object) -> bool:
    """Return True for a name that a role can have in metrics: letters, digits and _."""
    return isinstance(value, str) and _ROLE_NAME.fullmatch(value) is not None


class RolesEnvironment(Protocol):
    """An episode of several roles: your class has `roles`, reset and step, plain or coroutines, and optionally close."""

    async def reset(self, task: Mapping[str, object]) -> tuple[str, list[JsonObject]]:
        """Start the episode.

        Args:
            task: the data set's row.

        Returns:
            The role that speaks first, and the messages of its prompt; none: it is the row's prompt.
        """
        ...

    async def step(self, role: str, text: str) -> tuple[dict[str, float], str | None, list[JsonObject]]:
        """Take a role's turn.

        Returns:
            Rewards of roles by name, each of the last turn that the role has taken; the next role, None at the end; and the
            messages that it reads before its turn: its prompt's where it has not spoken yet.
        """
        ...

    async def close(self) -> None:
        """End the episode."""
        ...


def make_roles_factory(
    target: str, args: Config | None = None, *, timeout_s: float | None = None
) -> tuple[tuple[str, ...], Callable[[], RolesEnvironment]]:
    """Return the roles of an environment, and a function that creates one for an episode.

    Raises:
        ValueError: there is no such class, or it lacks roles, reset or step.
    """
    factory = registry.load(target, _SUBJECT, wraps=Exception)
    missing = [name for name in ("roles", "reset", "step") if not hasattr(factory, name)]
    if missing:
        raise ValueError(f"{_SUBJECT}: {target} has no {' and no '.join(missing)}, which agent_loop roles needs")
    roles = factory.roles
    is_sound = isinstance(roles, (list, tuple)) and roles and len(set(roles)) == len(roles)
    if not is_sound or not all(map(is_role_name, roles)):
        raise ValueError(f"{_SUBJECT}: {target}.roles must be different names of letters, digits and _, not {roles!r:.200}")
    limit_s = timeout_s or _STEP_LIMIT_S
    return tuple(roles), lambda: _CheckedRoles(factory(**(args or {})), target, limit_s, tuple(roles))


class _Checked:
    """An object of the user whose methods have deadlines and whose messages are checked.

    Args:
        inner: with reset and step, and optionally close().
        name: its name in errors.
    """

    def __init__(self, inner: Any, name: str, timeout_s: float) -> None:
        self._inner, self._name, self._timeout_s = inner, name, timeout_s

    async def close(self) -> None:
        """See `Environment`."""
        if callable(getattr(self._inner, "close", None)):
            await self._run("close", limit_s=_CLOSE_LIMIT_S)

    async def _run(self, method: str, *arguments: object, limit_s: float | None = None) -> object:
        function = getattr(self._inner, method)
        limit_s = limit_s or self._timeout_s
        if inspect.iscoroutinefunction(function):
            task = asyncio.ensure_future(function(*arguments))
        else:
            task = asyncio.ensure_future(run_in_thread(partial(function, *arguments)))
        task.add_done_callback(retrieve_exception)  # one that ends after its time may still raise
        try:
            # not wait_for, which would wait for a coroutine that ignores its cancellation
            done, _ = await asyncio.wait([task], timeout=limit_s)
        except asyncio.CancelledError:
            task.cancel()
            raise
        if not done:
            task.cancel()
            raise InvalidEnvironmentError(f"{self._name}.{method} took longer than {limit_s:g} s")
        return task.result()

    def _check_messages(self, value: object, method: str) -> list[JsonObject]:
        if isinstance(value, Mapping):
            value = [value]
        if isinstance(value, str):
            value = [{"role": "user", "content": value}]
        where = f"{self._name}.{method}"
        if not isinstance(value, Sequence) or not all(isinstance(message, Mapping) for message in value):
            raise InvalidEnvironmentError(f"{where} must return messages with role and content, not {value!r:.200}")
        for message in value:
            if message.get("role") not in _ROLES or not isinstance(message.get("content"), (str, list)):
                roles = ", ".join(_ROLES)
                raise InvalidEnvironmentError(
                    f"{where}: a message has a role of {roles} and a text, or parts with images, not {message!r:.200}"
                )
        return [dict(message) for message in value]


class _CheckedEnvironment(_Checked):
    """See `Environment`."""

    async def reset(self, task: Mapping[str, object]) -> list[JsonObject]:
        """See `Environment`.

        Raises:
            InvalidEnvironmentError: it took too long, or returned no messages.
        """
        return self._check_messages(await self._run("reset", dict(task)), "reset")

    async def step(self, messages: Sequence[JsonObject]) -> tuple[list[JsonObject], float | None, bool]:
        """See `Environment`.

        Raises:
            InvalidEnvironmentError: it took too long, or returned something else.
        """
        result = await self._run("step", [dict(message) for message in messages])
        where = f"{self._name}.step"
        if not isinstance(result, (tuple, list)) or len(result) != 3:
            raise InvalidEnvironmentError(f"{where} must return (messages, reward or None, done), not {result!r:.200}")
        new, reward, done = result
        # a bool is an int in Python, and here most likely `done` at the wrong index
        if reward is not None and (isinstance(reward, bool) or not isinstance(reward, (int, float))):
            raise InvalidEnvironmentError(f"{where}: the reward must be a number or None, not {reward!r:.200}")
        if not isinstance(done, bool):
            raise InvalidEnvironmentError(f"{where}: done must be True or False, not {done!r:.200}")
        new_messages = self._check_messages(new or [], "step")
        if not new_messages and not done:
            raise InvalidEnvironmentError(f"{where}: neither new messages nor the end; the model would have nothing to answer")
        return new_messages, None if reward is None else float(reward), done


class _CheckedRoles(_Checked):
    """See `RolesEnvironment`."""

    def __init__(self, inner: Any, name: str, timeout_s: float, roles: tuple[str, ...]) -> None:
        super().__init__(inner, name, timeout_s)
        self._roles = roles

    async def reset(self, task: Mapping[str, object]) -> tuple[str, list[JsonObject]]:
        """See `RolesEnvironment`.

        Raises:
            InvalidEnvironmentError: it took too long, or returned something else.
        """
        result = await self._run("reset", dict(task))
        if not isinstance(result, (tuple, list)) or len(result) != 2:
            raise InvalidEnvironmentError(f"{self._name}.reset must return (role, messages), not {result!r:.200}")
        role, messages = result
        return self._check_role(role, "reset"), self._check_messages(messages or [], "reset")

    async def step(self, role: str, text: str) -> tuple[dict[str, float], str | None, list[JsonObject]]:
        """See `RolesEnvironment`.

        Raises:
            InvalidEnvironmentError: it took too long, or returned something else.
        """
        result = await self._run("step", role, text)
        where = f"{self._name}.step"
        if not isinstance(result, (tuple, list)) or len(result) != 3:
            raise InvalidEnvironmentError(
                f"{where} must return (rewards by role, next role or None, messages), not {result!r:.200}"
            )
        rewards, following, messages = result
        if not isinstance(rewards, Mapping):
            raise InvalidEnvironmentError(f"{where}: rewards must be numbers by role, not {rewards!r:.200}")
        for name, reward in rewards.items():
            self._check_role(name, "step")
            if not is_number(reward):
                raise InvalidEnvironmentError(f"{where}: the reward of {name} must be a finite number, not {reward!r:.200}")
        following = None if following is None else self._check_role(following, "step")
        return {name: float(value) for name, value in rewards.items()}, following, self._check_messages(messages or [], "step")

    def _check_role(self, role: object, method: str) -> str:
        if not isinstance(role, str) or role not in self._roles:
            raise InvalidEnvironmentError(f"{self._name}.{method}: {role!r:.100} is none of its roles {', '.join(self._roles)}")
        return role
