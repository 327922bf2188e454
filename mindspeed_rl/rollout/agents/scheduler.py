"""A plug-in decides after each turn of the model whether and how the conversation goes on.

Two kinds, by the names that ms-swift gave them: a class with `step` and `check_finished` (its multi_turn_scheduler), or a
function of a list of rows (its multi_turn_func) that adds to `messages` or sets `finished`.
"""

from __future__ import annotations

import copy
import inspect
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from mindspeed_rl import registry
from mindspeed_rl.rollout.agents.conversation import Dialogue, Turn, row_of
from mindspeed_rl.rollout.agents.loop import AgentLoop, LoopSettings, Task
from mindspeed_rl.rollout.protocol import RolloutEngine
from mindspeed_rl.rollout.trajectory import Trajectory
from mindspeed_rl.tools.interface import Tools


@dataclass
class InferRequest:
    """What a scheduler sees of a conversation.

    Attributes:
        messages: from the prompt on, the model's turn last. The prompt is one message of its decoded text, or the row's
            column `messages`.
        data_dict: the row's columns.
    """

    messages: list[dict[str, Any]]
    data_dict: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ChoiceMessage:
    """The model's turn as a message."""

    content: str
    role: str = "assistant"


@dataclass(frozen=True)
class ResponseChoice:
    """The model's turn.

    Attributes:
        finish_reason: "stop", or "length" for lack of room.
    """

    message: ChoiceMessage
    finish_reason: str
    token_ids: list[int]


class MultiTurnScheduler:
    """The base of schedulers, where they want one; any class with these two methods will do."""

    def __init__(self, max_turns: int | None = None) -> None:
        self.max_turns = max_turns

    def step(self, infer_request: InferRequest, response_choice: ResponseChoice, current_turn: int) -> Mapping[str, Any]:
        """What follows the turn.

        Args:
            current_turn: 1 for the first.

        Returns:
            {"infer_request": the request with further messages}, and "rollout_infos", a dict: its numbers become figures of
            the trajectory. A request whose last message is the model's, changed, lets it go on writing there. The turn's tokens
            may come along as "response_token_ids", and "response_loss_mask" says which of them train, by default all that were
            drawn: tokens behind those are told as they are, and a message that is changed there is not tokenized.
        """
        raise NotImplementedError

    def check_finished(self, infer_request: InferRequest, response_choice: ResponseChoice, current_turn: int) -> bool:
        """True where no turn follows."""
        return False


class _Plugin(Protocol):
    """Either kind."""

    async def next_messages(self, request: InferRequest, choice: ResponseChoice, turn: int) -> _Next | None:
        """None where no turn follows."""
        ...


@dataclass(frozen=True)
class _Next:
    """What follows a turn.

    Attributes:
        token_ids: of the turn, where the plug-in says them.
        trains: which of them train; None: those that were drawn.
    """

    messages: list[dict[str, Any]]
    figures: Mapping[str, Any] = field(default_factory=dict)
    token_ids: tuple[int, ...] | None = None
    trains: tuple[bool, ...] | None = None


@dataclass(frozen=True)
class _Class:
    scheduler: Any

    async def next_messages(self, request: InferRequest, choice: ResponseChoice, turn: int) -> _Next | None:
        if await _awaited(self.scheduler.check_finished(request, choice, turn)):
            return None
        found = await _awaited(self.scheduler.step(request, choice, turn))
        messages, figures = list(found["infer_request"].messages), found.get("rollout_infos") or {}
        return _Next(messages, figures, *_tokens(found.get("response_token_ids"), found.get("response_loss_mask")))


@dataclass(frozen=True)
class _Function:
    function: Any

    async def next_messages(self, request: InferRequest, choice: ResponseChoice, turn: int) -> _Next | None:
        row = {**request.data_dict, "messages": request.messages, "finished": False}
        found = await _awaited(self.function([row]))
        (row,) = found[0] if isinstance(found, tuple) else found
        finished = row.get("finished", False) or (isinstance(found, tuple) and bool(found[1]))
        return None if finished else _Next(list(row["messages"]))


def _tokens(token_ids: Any, mask: Any) -> tuple[tuple[int, ...] | None, tuple[bool, ...] | None]:
    """What `step` says of the turn's tokens.

    Raises:
        ValueError: it is no list of tokens with a mask of the same length.
    """
    if not token_ids:
        if mask:
            raise ValueError("step returned response_loss_mask without response_token_ids")
        return None, None
    if not all(isinstance(token, int) and not isinstance(token, bool) for token in token_ids):
        raise ValueError("step returned response_token_ids that are no list of whole numbers")
    if not mask:
        return tuple(token_ids), None
    if len(mask) != len(token_ids) or not all(value in (0, 1) for value in mask):
        raise ValueError(
            f"step returned {len(token_ids)} response_token_ids, so that response_loss_mask must be as many of 0 and 1, not "
            f"{str(mask)[:120]}"
        )
    return tuple(token_ids), tuple(bool(value) for value in mask)


async def _awaited(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value


class Scheduled(AgentLoop):
    """The conversation that a plug-in leads."""

    def __init__(self, settings: LoopSettings) -> None:
        super().__init__(settings)
        target = settings.multi_turn_scheduler
        if target is None:
            raise ValueError(
                "rl_config.agent_loop scheduler needs rl_config.multi_turn_scheduler, module:Class or module:function"
            )
        self._target = registry.load(target, "rl_config.multi_turn_scheduler", wraps=Exception)
        methods = [name for name in ("step", "check_finished") if not callable(getattr(self._target, name, None))]
        if inspect.isclass(self._target) and methods:
            raise ValueError(f"rl_config.multi_turn_scheduler: {target} has no method {' and no '.join(methods)}")
        if not callable(self._target):
            raise ValueError(f"rl_config.multi_turn_scheduler: {target} is neither a class nor a function")

    async def run(self, task: Task, engine: RolloutEngine, tools: Tools | None) -> Trajectory:
        dialogue = self.dialogue(task, engine)
        prompt = self._prompt_messages(task)
        plugin = self._plugin()
        goes_on = True
        while goes_on:
            turn = await dialogue.reply()
            if not dialogue.may_go_on(turn):
                break
            # a copy: what the user's code changes is told from what was said by comparing the two
            request = InferRequest(copy.deepcopy([*prompt, *dialogue.messages]), row_of(task.columns, task.label))
            choice = ResponseChoice(ChoiceMessage(turn.text), "stop" if turn.ended else "length", list(turn.token_ids))
            try:
                following = await plugin.next_messages(request, choice, dialogue.num_turns)
                if following is None:
                    break
                goes_on = self._follow(dialogue, turn, prompt, following)
            except Exception as error:  # whatever the user's code raises
                return dialogue.end(failure=f"multi_turn_scheduler: {type(error).__name__}: {error}")
        return dialogue.end()

    def _plugin(self) -> _Plugin:
        if not inspect.isclass(self._target):
            return _Function(self._target)
        # ms-swift's base class takes max_turns, a class of the user's own need not
        takes = inspect.signature(self._target).parameters
        return _Class(self._target(**({"max_turns": self.settings.limits.max_turns} if "max_turns" in takes else {})))

    def _prompt_messages(self, task: Task) -> list[dict[str, Any]]:
        messages = task.columns.get("messages")
        if isinstance(messages, list) and messages:
            return [dict(message) for message in messages]
        # the chat template's own marks are no part of what was said
        text = self.settings.tokenizer.decode(list(task.prompt_ids), skip_special_tokens=True)
        return [{"role": "user", "content": text}]

    def _follow(self, dialogue: Dialogue, turn: Turn, prompt: list[dict[str, Any]], following: _Next) -> bool:
        """See `Dialogue.tell`."""
        for name, value in following.figures.items():
            if isinstance(value, (int, float)):
                dialogue.metrics[f"scheduler_{name}"] = float(value)
        messages = following.messages
        if messages[: len(prompt)] != prompt:
            raise ValueError("the messages of the prompt were changed")
        said = messages[len(prompt) :]
        num_said = len(dialogue.messages)
        goes_on = bool(said) and said[-1]["role"] == "assistant"
        if (goes_on or following.token_ids is not None) and said[: num_said - 1] != dialogue.messages[:-1]:
            raise ValueError("earlier turns were changed while the last one is to go on, or has tokens of its own")
        if following.token_ids is not None:
            if len(said) < num_said or said[num_said - 1]["role"] != "assistant":
                raise ValueError("step returned response_token_ids, but the model's turn is not among the messages")
            trains = following.trains or _drawn(following.token_ids, turn.token_ids)
            if not dialogue.amend(following.token_ids, trains, str(said[num_said - 1]["content"])):
                return False
            return dialogue.tell(said[num_said:]) if said[num_said:] else True
        return dialogue.reopen(str(said[-1]["content"])) if goes_on else dialogue.replace(said)


def _drawn(token_ids: tuple[int, ...], drawn: tuple[int, ...]) -> tuple[bool, ...]:
    """Which tokens of a turn stand where the model drew them: those up to the first that differs."""
    same = len(os.path.commonprefix([token_ids, drawn]))
    return (True,) * same + (False,) * (len(token_ids) - same)
