"""A program with a loop of its own asks for turns: environments of the `verifiers` library.

It is given the address of a trajectory (`tools/endpoint.py`) and sends the whole conversation with every request. The session
behind the address holds the same conversation in tokens and looks for what is new: messages behind the model's last turn are
told to it, and what was drawn stays as it was drawn. A program that has changed what was said begins another sequence.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

from mindspeed_rl.rollout.agents.conversation import Dialogue, Turn, row_of
from mindspeed_rl.rollout.agents.loop import LoopSettings, Task
from mindspeed_rl.tools.endpoint import ChatReply, ContextFullError, RecordingEndpoint, chat_message
from mindspeed_rl.tools.environments import EnvironmentSpec
from mindspeed_rl.tools.interface import ParsedTurn
from mindspeed_rl.tools.parsers import make_parser
from mindspeed_rl.tools.parsers.json_calls import split_thought
from mindspeed_rl.tools.verifiers_program import VerifiersProgram

_EPISODE_LIMIT_S = 1800.0


class EpisodeFailed(RuntimeError):
    """The program says why."""


class PlayedByProgram:
    """Episodes of a program; one endpoint and one program a process.

    Raises:
        ValueError: the target is wrong, or there is no such interpreter.
    """

    def __init__(self, spec: EnvironmentSpec, settings: LoopSettings) -> None:
        self._program = VerifiersProgram(spec.target, spec.args, spec.python)
        self._endpoint = RecordingEndpoint()
        self._settings, self._target = settings, spec.target
        self._timeout_s = spec.timeout_s or _EPISODE_LIMIT_S

    async def start(self) -> None:
        """See `AgentLoop.start`."""
        await self._program.start()
        await self._endpoint.start()

    async def close(self) -> None:
        """See `AgentLoop.close`."""
        await self._program.close()
        await self._endpoint.close()

    async def play(self, dialogue: Dialogue, task: Task) -> float | None:
        """What the program says that the episode was worth.

        Raises:
            EpisodeFailed: it broke off, took too long, or asked for no turn.
            ProgramExitError: the program has ended; the next episode starts it again.
        """
        row = row_of(task.columns, task.label)
        if "prompt" not in row:
            raise EpisodeFailed(
                f"the row has no column 'prompt', which {self._target} begins with: name the columns of its data set, prompt "
                "among them, in actor_config.dataset_additional_keys"
            )
        if row.get("answer") is None and task.label is not None:
            row["answer"] = task.label
        session = TokenSession(dialogue, self._settings)
        address = self._endpoint.open(session)
        try:
            outcome = await self._program.play(row, address, self._endpoint.model, self._timeout_s)
        finally:
            self._endpoint.forget(address)
            await session.close()
        for name, value in outcome.metrics.items():
            dialogue.metrics[f"environment_{name.replace('/', '_')}"] = value
        if outcome.error is not None:
            raise EpisodeFailed(outcome.error)
        if not dialogue.num_turns:
            raise EpisodeFailed("it ended before the model was asked")
        return outcome.reward


class TokenSession:
    """A trajectory that is talked to; see `tools.endpoint.ChatSession`."""

    def __init__(self, dialogue: Dialogue, settings: LoopSettings) -> None:
        self._dialogue, self._settings = dialogue, settings
        self._said: list[dict[str, Any]] = []  # as the client has it, the model's last turn included
        self._tools: list[dict[str, Any]] = []
        self._turns = settings.turns
        self._may_go_on, self._has_ended = True, False
        self._drawing: asyncio.Future[Turn] | None = None

    async def answer(
        self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]], max_tokens: int | None
    ) -> ChatReply:
        """See `ChatSession`."""
        if messages[-1].get("role") == "assistant":
            raise ValueError("the last message is the model's, which it cannot answer")
        if not self._may_go_on:
            raise ContextFullError("the trajectory has ended")
        self._may_go_on = self._hear(messages, list(tools))
        if not self._may_go_on:
            raise ContextFullError("no tokens are left")
        # a task of its own, which `close` can cancel while the program still waits for the answer
        self._drawing = asyncio.ensure_future(self._dialogue.reply(max_tokens))
        try:
            turn = await self._drawing
        except asyncio.CancelledError:
            if self._has_ended:
                raise ContextFullError("the episode has ended") from None
            raise
        self._may_go_on = self._dialogue.may_go_on(turn)
        parsed = self._parse(turn)
        self._said = [*messages, chat_message(parsed)]
        return ChatReply(parsed, turn.ended, turn.prompt_ids, turn.token_ids, turn.log_probs)

    async def close(self) -> None:
        """Nothing is drawn any more."""
        self._may_go_on, self._has_ended = False, True
        if self._drawing is not None and not self._drawing.done():
            self._drawing.cancel()
            await asyncio.wait([self._drawing])

    def _hear(self, messages: Sequence[dict[str, Any]], tools: list[dict[str, Any]]) -> bool:
        """The model is to answer these; False where there is no room."""
        said = len(self._said)
        goes_on = said > 0 and tools == self._tools and len(messages) > said
        if goes_on and all(_is_same(*pair) for pair in zip(self._said, messages)):
            return self._dialogue.replace([*self._dialogue.messages, *messages[said:]])
        self._tools = tools
        self._turns = self._settings.turns.telling(has_tools=bool(tools))
        return self._dialogue.begin(self._turns.opening(messages, tools), self._turns)

    def _parse(self, turn: Turn) -> ParsedTurn:
        thinks = self._turns.opens_thought
        if not self._tools:  # nobody can be called
            thought, content = split_thought(turn.text, len(turn.text), thinks)
            return ParsedTurn(content.strip(), thought)
        parser = make_parser(self._settings.tool_parser, self._tools, self._settings.tokenizer, thinks=thinks)
        return parser.parse(turn.text, turn.token_ids)


def _is_same(ours: dict[str, Any], theirs: dict[str, Any]) -> bool:
    """The client has the message as it was; blanks around a text and thoughts are its own affair."""
    return ours.get("role") == theirs.get("role") and _text(ours) == _text(theirs) and _calls(ours) == _calls(theirs)


def _text(message: dict[str, Any]) -> str:
    return str(message.get("content") or "").strip()


def _calls(message: dict[str, Any]) -> list[tuple[Any, Any]]:
    """Names and arguments; a library may write the latter otherwise."""
    functions = [call.get("function") or {} for call in message.get("tool_calls") or []]
    return [(function.get("name"), _read(function.get("arguments"))) for function in functions]


def _read(arguments: Any) -> Any:
    try:
        return json.loads(arguments) if isinstance(arguments, str) else arguments
    except ValueError:
        return arguments
