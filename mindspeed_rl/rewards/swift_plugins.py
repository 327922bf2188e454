"""Plug-in files of ms-swift: the modules that they import, so that a file of `external_plugins` works unchanged.

`install` puts modules named swift, swift.plugin, swift.rewards, swift.rollout and so on into `sys.modules` of a process that
loads such a file next: one that scores, one that checks the functions, or one that leads conversations of several turns. They
have ORM and AsyncORM with their registry `orms`, MultiTurnScheduler with `multi_turns`, Env with `envs`, and a placeholder for
every other name, which raises once it is called: model engines, templates and reward-model plug-ins of ms-swift are not here.
"""

from __future__ import annotations

import inspect
import logging
import sys
from collections.abc import Awaitable, Callable, Iterator, Mapping, MutableMapping, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar, cast
from uuid import uuid4

from mindspeed_rl.rewards import REWARDS
from mindspeed_rl.rewards.samples import RewardSample, RewardSettings
from mindspeed_rl.rewards.scorer import Scorer, import_scorer

#: names of schedulers that plug-in files have registered, and their classes
MULTI_TURNS: dict[str, type] = {}
#: the same of environments
ENVIRONMENTS: dict[str, Callable[[Mapping[str, Any]], Any]] = {}
#: names in ms-swift -> ours
_BUILT_IN = {
    "accuracy": "accuracy",
    "math": "accuracy",
    "format": "think_answer_alone",
    "cosine": "cosine",
    "repetition": "repetition",
    "soft_overlong": "soft_overlong",
}
#: names of built-in classes -> names of reward functions there
_CLASSES = {
    "MathAccuracy": "accuracy",
    "Format": "format",
    "CosineReward": "cosine",
    "RepetitionPenalty": "repetition",
    "SoftOverlong": "soft_overlong",
}


class ORM:
    """Base class of ms-swift's reward functions; `args` has the settings of the run."""

    def __init__(self, args: object = None, **kwargs: object) -> None:
        self.args = args

    def __call__(self, completions: Sequence[str], **columns: object) -> Sequence[float]:
        """Return a score for each completion."""
        raise NotImplementedError


class _AsyncORM(ORM):
    """The same, whose call is awaited."""


class _Arguments:
    """The settings of a run under ms-swift's names, as a constructor gets them."""

    def __init__(self, settings: RewardSettings) -> None:
        self._settings = settings

    def __getattr__(self, name: str) -> object:
        own = {"max_completion_length": "max_tokens"}.get(name, name)
        if own.startswith("_") or not hasattr(self._settings, own):
            raise AttributeError(f"args.{name} of ms-swift is not available to a reward function here")
        return getattr(self._settings, own)


class _Reward:
    """A reward function in ms-swift's form: one call for a batch, all columns of the rows as keyword arguments.

    Attributes:
        target: the class, or function, of the plug-in file.
    """

    target: ClassVar[Callable[..., Any]]

    def __init__(self, settings: RewardSettings) -> None:
        self._function: Callable[..., Any] = _construct(self.target, settings)

    def __call__(self, completions: Sequence[str], samples: Sequence[RewardSample]) -> object:
        """Return the scores of a batch."""
        return self._function(list(completions), **_collect_columns(samples))


class _AsyncReward(_Reward):
    async def __call__(self, completions: Sequence[str], samples: Sequence[RewardSample]) -> object:
        return await cast("Awaitable[object]", super().__call__(completions, samples))


def _construct(target: Callable[..., Any], settings: RewardSettings) -> Callable[..., Any]:
    """Return the callable of a plug-in: an instance that gets the settings which its constructor names."""
    if not inspect.isclass(target):
        return target
    arguments, names = _Arguments(settings), inspect.signature(target).parameters
    known = {name: getattr(arguments, name) for name in names if name != "args" and hasattr(arguments, name)}
    return cast("Callable[..., Any]", target(**({"args": arguments} if "args" in names else {}), **known))


def _collect_columns(samples: Sequence[RewardSample]) -> dict[str, list[Any]]:
    """Return the keyword arguments of a batch: columns of the dataset, solution, messages and token ids."""
    names = dict.fromkeys(name for sample in samples for name in sample.columns)
    columns = {name: [sample.columns.get(name) for sample in samples] for name in names}
    messages = [
        [*(sample.columns.get("messages") or [{"role": "user", "content": sample.prompt}]),
         {"role": "assistant", "content": sample.response}]
        for sample in samples
    ]  # fmt: skip
    columns |= {"messages": messages, "response_token_ids": [list(sample.response_ids) for sample in samples]}
    if "solution" not in columns and any(sample.label is not None for sample in samples):
        columns["solution"] = [sample.label for sample in samples]
    return columns


class _Registry(MutableMapping[str, Any]):
    """`orms`: what a plug-in file writes into it is a reward function here."""

    def __init__(self) -> None:
        self._own: dict[str, Any] = {}

    def __setitem__(self, name: str, target: Any) -> None:
        self._own[name] = target
        called = target if inspect.isroutine(target) else target.__call__
        base = _AsyncReward if inspect.iscoroutinefunction(called) else _Reward
        # a function must not become a method
        held = target if inspect.isclass(target) else staticmethod(target)
        REWARDS[name] = type(str(getattr(target, "__name__", name)), (base,), {"target": held})

    def __getitem__(self, name: str) -> Any:
        if name in self._own:
            return self._own[name]
        return _build_in_class(name)

    def __delitem__(self, name: str) -> None:
        del self._own[name]

    def __iter__(self) -> Iterator[str]:
        return iter({**dict.fromkeys(_BUILT_IN), **self._own})

    def __len__(self) -> int:
        return len({*_BUILT_IN, *self._own})


orms = _Registry()


def _build_in_class(name: str) -> type[ORM]:
    """Return a class in ms-swift's form for one of the built-in reward functions.

    Raises:
        KeyError: there is none of this name.
    """
    ours = _BUILT_IN[name]

    class BuiltIn(ORM):
        """A built-in reward function, called with completions and columns."""

        def __call__(self, completions: Sequence[str], solution: Sequence[Any] = (), **columns: Any) -> list[float]:
            columns |= {"solution": solution} if solution else {}
            settings = self.args._settings if isinstance(self.args, _Arguments) else RewardSettings()
            scorer = Scorer.build(ours, import_scorer(ours), settings)
            rows = [{key: values[row] for key, values in columns.items()} for row in range(len(completions))]
            samples = [
                RewardSample(
                    response=text,
                    label=row.get("solution"),
                    columns=row,
                    response_ids=list(row.get("response_token_ids") or []),
                )
                for text, row in zip(completions, rows)
            ]
            values = [scorer.to_values(scorer.call([sample], settings), 1)[0] for sample in samples]
            return [0.0 if value is None else value[0][ours] for value in values]

    return BuiltIn


class _MultiTurnScheduler:
    """Base class of schedulers: `step` returns what follows a turn, `check_finished` ends the conversation."""

    def __init__(self, infer_engine: object = None, max_turns: int | None = None, *args: object, **kwargs: object) -> None:
        self.infer_engine, self.max_turns = infer_engine, max_turns
        self.tokenizer = kwargs.get("tokenizer")

    def step(self, infer_request: object, response_choice: object, current_turn: int) -> Mapping[str, Any]:
        """Return {"infer_request": the request with further messages}."""
        raise NotImplementedError

    def check_finished(self, infer_request: object, response_choice: Any, current_turn: int) -> bool:
        """Return True after a turn that ran out of room, and after the last of max_turns."""
        return response_choice.finish_reason == "length" or (self.max_turns is not None and current_turn >= self.max_turns)


class _Env:
    """Base class of environments: coroutines reset, step and close."""

    def __init__(self, env_config: object) -> None:
        self.env_config = env_config

    async def close(self) -> None:
        """Release what the environment holds."""


class GymEnvironment:
    """An environment of `envs` with the methods of ours; the column env_config of a row may name another one."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._inner: Any = None

    async def reset(self, row: Mapping[str, Any]) -> list[dict[str, str]]:
        """Return the system message, if there is one, and the first observation.

        Raises:
            ValueError: no plug-in file has the environment.
        """
        config = row.get("env_config") or {}
        name = config.get("name", self._name)
        if name not in ENVIRONMENTS:
            raise ValueError(f"environment '{name}' is not in envs of external_plugins; they have {', '.join(ENVIRONMENTS)}")
        self._inner = ENVIRONMENTS[name](config)
        request = SimpleNamespace(messages=list(row.get("messages") or []), data_dict=dict(row), uuid=str(uuid4()))
        observation, _, system = await self._inner.reset(request)
        opening = [{"role": "system", "content": system}] if system else []
        return [*opening, {"role": "user", "content": observation}]

    async def step(self, messages: list[dict[str, Any]]) -> tuple[list[dict[str, str]], float, bool]:
        """Return what follows the model's turn, its reward, and True at the end of the episode."""
        observation, reward, done, _ = await self._inner.step(messages)
        return [] if done else [{"role": "user", "content": observation}], float(reward), bool(done)

    async def close(self) -> None:
        """Close the environment, if an episode began."""
        if self._inner is not None:
            await self._inner.close()


class _Absent:
    """A name of ms-swift that is not here; it can be imported and inherited from."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        raise ValueError(f"{type(self).__module__}.{type(self).__name__} of ms-swift is not available here")


class _Module(ModuleType):
    """A module of ms-swift: the names that are here, and a placeholder for every other one."""

    def __init__(self, name: str, **names: object) -> None:
        super().__init__(name, "Names of ms-swift for plug-in files.")
        self.__dict__.update(names, __path__=[])

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (_Absent,), {"__module__": self.__name__})


def install() -> None:
    """Make the modules of ms-swift importable in this process; an installed ms-swift is not looked at. Idempotent."""
    if isinstance(sys.modules.get("swift"), _Module):
        return
    rewards: dict[str, object] = {"ORM": ORM, "AsyncORM": _AsyncORM, "orms": orms, "rm_plugins": {}, "prms": {}}
    rewards |= {name: _build_in_class(own) for name, own in _CLASSES.items()}
    turns: dict[str, object] = {"MultiTurnScheduler": _MultiTurnScheduler, "multi_turns": MULTI_TURNS, "Messages": list}
    turns["RolloutScheduler"] = _MultiTurnScheduler
    gym: dict[str, object] = {"Env": _Env, "envs": ENVIRONMENTS, "ContextManager": _Env, "context_managers": {}}
    utils: dict[str, object] = {"get_logger": lambda *names: logging.getLogger("swift")}
    messages: dict[str, object] = {"Messages": list}
    everything = rewards | turns | gym
    contents = {
        "swift": {},
        "swift.plugin": everything,
        **{f"swift.plugin.{name}": everything for name in ("orm", "prm", "rm_plugin", "multi_turn", "env")},
        **{f"swift.{name}": rewards | turns for name in ("rewards", "rewards.orm", "rewards.prm", "rewards.rm_plugin")},
        **{f"swift.{name}": turns | gym for name in ("rollout", "rollout.multi_turn", "rollout.gym_env")},
        "swift.utils": utils,
        **{f"swift.{name}": messages for name in ("llm", "template", "infer_engine", "infer_engine.protocol")},
    }
    for name, names in contents.items():
        sys.modules[name] = _Module(name, **names)
        parent, _, last = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], last, sys.modules[name])
