"""A conversation that a plug-in continues: after each turn of the model it adds messages, changes them or ends.

There are two kinds, under ms-swift's names: a class with `step` and `check_finished` (its multi_turn_scheduler), or a function
of a list of rows (its multi_turn_func) that adds to `messages` or sets `finished`.
"""

from __future__ import annotations

import copy
import inspect
import os
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from mindspeed_rl import registry
from mindspeed_rl.bounds import check_token_ids, read_number
from mindspeed_rl.data.turns import ChatMessage
from mindspeed_rl.rewards.swift_plugins import MULTI_TURNS
from mindspeed_rl.rewards.worker import load_plugin
from mindspeed_rl.rollout.agents.conversation import AgentConversation, Turn
from mindspeed_rl.rollout.agents.loop import AgentLoop, LoopSettings, Task
from mindspeed_rl.rollout.protocol import RolloutEngine
from mindspeed_rl.rollout.trajectory import Trajectory
from mindspeed_rl.tools.toolbox import Tools

_T = TypeVar("_T")


@dataclass
class _InferRequest:
    """The conversation as a scheduler gets it.

    Attributes:
        messages: from the prompt on, the model's turn last. The prompt is one message with its decoded text, or the row's
            column `messages`.
        data_dict: the row's columns.
    """

    messages: list[dict[str, Any]]
    data_dict: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class _ChoiceMessage:
    """The model's turn as a message."""

    content: str
    role: str = "assistant"


@dataclass(frozen=True)
class _ResponseChoice:
    """The model's turn.

    Attributes:
        finish_reason: "stop", or "length" for lack of room.
    """

    message: _ChoiceMessage
    finish_reason: str
    token_ids: list[int]


class MultiTurnScheduler:
    """Optional base of schedulers: any class with these two methods works."""

    def __init__(self, max_turns: int | None = None) -> None:
        self.max_turns = max_turns

    def step(self, infer_request: _InferRequest, response_choice: _ResponseChoice, current_turn: int) -> Mapping[str, Any]:
        """Return what follows the turn.

        Args:
            infer_request: the conversation.
            response_choice: the model's turn.
            current_turn: 1 for the first.

        Returns:
            {"infer_request": the request with further messages}, and "rollout_infos", a dict: its numbers become metrics of
            the trajectory. If the last message is the model's, changed, the model continues it. The turn's tokens may be given
            as "response_token_ids", and "response_loss_mask" marks those that train, by default all that were sampled: tokens
            after the sampled ones are context, and a message that is changed there is not tokenized.
        """
        raise NotImplementedError

    def check_finished(self, infer_request: _InferRequest, response_choice: _ResponseChoice, current_turn: int) -> bool:
        """Return True where no turn follows."""
        return False


@dataclass(frozen=True)
class _Next:
    """The messages after a turn.

    Attributes:
        token_ids: token ids of the turn, where the plug-in returns them.
        trains: True for those that train; None: those that were sampled.
    """

    messages: Sequence[ChatMessage]
    metrics: Mapping[str, object] = field(default_factory=dict)
    token_ids: tuple[int, ...] | None = None
    trains: tuple[bool, ...] | None = None


def _read_tokens(
    token_ids: Sequence[int] | None, mask: Sequence[int] | None
) -> tuple[tuple[int, ...] | None, tuple[bool, ...] | None]:
    """Read the turn's tokens that `step` returned.

    Raises:
        ValueError: it is not a list of tokens with a mask of the same length.
    """
    if not token_ids:
        if mask:
            raise ValueError("step returned response_loss_mask without response_token_ids")
        return None, None
    if not all(isinstance(token, int) and not isinstance(token, bool) for token in token_ids):
        raise ValueError("step returned response_token_ids that are not a list of whole numbers")
    if not mask:
        return tuple(token_ids), None
    if len(mask) != len(token_ids) or not all(value in (0, 1) for value in mask):
        raise ValueError(
            f"step returned {len(token_ids)} response_token_ids, so that response_loss_mask must be as many of 0 and 1, not "
            f"{str(mask)[:120]}"
        )
    return tuple(token_ids), tuple(bool(value) for value in mask)


async def _await_if_needed(value: _T | Awaitable[_T]) -> _T:
    return await value if inspect.isawaitable(value) else value


def _load_scheduler(target: str, plugins: Sequence[str]) -> Any:
    """Return the class or function of module:Class, or of a name in `multi_turns` of a plug-in file.

    Raises:
        ValueError: there is none, or it drives ms-swift's engine by a `run` of its own.
    """
    if ":" in target:
        return registry.load(target, "rl_config.multi_turn_scheduler", wraps=Exception)
    for path in plugins:
        load_plugin(path)
    if target not in MULTI_TURNS:
        known = ", ".join(MULTI_TURNS) or "nothing"
        raise ValueError(f"rl_config.multi_turn_scheduler: '{target}' is not in multi_turns of external_plugins; {known} is")
    scheduler = MULTI_TURNS[target]
    if callable(getattr(scheduler, "run", None)):
        raise ValueError(f"rl_config.multi_turn_scheduler: {target} has a run of its own, which drives ms-swift's engine")
    return scheduler


class SchedulerLoop(AgentLoop):
    """A conversation that a plug-in continues."""

    def __init__(self, settings: LoopSettings) -> None:
        super().__init__(settings)
        target = settings.multi_turn_scheduler
        if target is None:
            raise ValueError(
                "rl_config.agent_loop scheduler needs rl_config.multi_turn_scheduler, module:Class or module:function"
            )
        self._target = _load_scheduler(target, settings.external_plugins)
        methods = [name for name in ("step", "check_finished") if not callable(getattr(self._target, name, None))]
        if inspect.isclass(self._target) and methods:
            raise ValueError(f"rl_config.multi_turn_scheduler: {target} has no method {' and no '.join(methods)}")
        if not callable(self._target):
            raise ValueError(f"rl_config.multi_turn_scheduler: {target} is neither a class nor a function")

    async def run(self, task: Task, engine: RolloutEngine, tools: Tools | None) -> Trajectory:
        conversation = self.start_conversation(task, engine)
        prompt = self._prompt_messages(task)
        plugin = self._target
        if inspect.isclass(plugin):
            # ms-swift's base class takes max_turns, your own class need not
            takes = inspect.signature(plugin).parameters
            given = {"max_turns": self.settings.limits.max_turns, "tokenizer": self.settings.tokenizer}
            takes_all = any(item.kind is item.VAR_KEYWORD for item in takes.values())
            plugin = plugin(**{name: value for name, value in given.items() if takes_all or name in takes})
        has_room = True
        while has_room:
            turn = await conversation.reply()
            if not conversation.can_continue(turn):
                break
            # a copy: changes by your code are found by comparing the two
            request = _InferRequest([copy.deepcopy(dict(message)) for message in [*prompt, *conversation.messages]], task.row)
            choice = _ResponseChoice(_ChoiceMessage(turn.text), "stop" if turn.ended else "length", list(turn.token_ids))
            try:
                following = await self._call(plugin, request, choice, conversation.num_turns)
                if following is None:
                    break
                has_room = self._apply(conversation, turn, prompt, following)
            except Exception as error:  # noqa: BLE001  # your code may raise anything: the sample has failed, not the run
                return conversation.end(failure=f"multi_turn_scheduler: {type(error).__name__}: {error}")
        return conversation.end()

    async def _call(self, plugin: Any, request: _InferRequest, choice: _ResponseChoice, turn: int) -> _Next | None:
        """Return the messages after a turn, from a plug-in of either kind; None where no turn follows."""
        if inspect.isclass(self._target):
            if await _await_if_needed(plugin.check_finished(request, choice, turn)):
                return None
            result = await _await_if_needed(plugin.step(request, choice, turn))
            messages, metrics = list(result["infer_request"].messages), result.get("rollout_infos") or {}
            return _Next(messages, metrics, *_read_tokens(result.get("response_token_ids"), result.get("response_loss_mask")))
        row = {**request.data_dict, "messages": request.messages, "finished": False}
        result = await _await_if_needed(plugin([row]))
        (row,) = result[0] if isinstance(result, tuple) else result
        finished = row.get("finished", False) or (isinstance(result, tuple) and bool(result[1]))
        return None if finished else _Next(list(row["messages"]))

    def _prompt_messages(self, task: Task) -> list[ChatMessage]:
        messages = task.columns.get("messages")
        if isinstance(messages, list) and messages:
            return [dict(message) for message in messages]
        # without the special tokens of the chat template
        text = self.settings.tokenizer.decode(list(task.prompt_ids), skip_special_tokens=True)
        return [{"role": "user", "content": text}]

    def _apply(self, conversation: AgentConversation, turn: Turn, prompt: list[ChatMessage], following: _Next) -> bool:
        """Apply the plug-in's messages to the conversation; return False where an answer does not fit."""
        for name, value in following.metrics.items():
            if isinstance(value, (int, float)):
                conversation.metrics[f"scheduler_{name}"] = read_number(value, f"rollout_infos: {name}", allows_bool=True)
        messages = following.messages
        if messages[: len(prompt)] != prompt:
            raise ValueError("the messages of the prompt were changed")
        after = messages[len(prompt) :]
        num_before = len(conversation.messages)
        reopens = bool(after) and after[-1]["role"] == "assistant"
        if (reopens or following.token_ids is not None) and after[: num_before - 1] != conversation.messages[:-1]:
            raise ValueError("earlier turns were changed while the last one is to go on, or has tokens of its own")
        if following.token_ids is not None:
            if len(after) < num_before or after[num_before - 1]["role"] != "assistant":
                raise ValueError("step returned response_token_ids, but the model's turn is not among the messages")
            own = set(turn.token_ids)  # the model can read what it has sampled
            given = [token for token in following.token_ids if token not in own]
            check_token_ids(given, self.settings.num_ids, "new response_token_ids of step")
            # by default those train that the model sampled: up to the first that differs
            same = len(os.path.commonprefix([following.token_ids, turn.token_ids]))
            trains = following.trains or (True,) * same + (False,) * (len(following.token_ids) - same)
            if not conversation.amend(following.token_ids, trains, str(after[num_before - 1]["content"])):
                return False
            return conversation.add_messages(after[num_before:]) if after[num_before:] else True
        return conversation.reopen(str(after[-1]["content"])) if reopens else conversation.replace(after)
