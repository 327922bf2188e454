"""Episodes of a program with a loop of its own, such as an environment of the `verifiers` library.

The program gets the address of a trajectory (`tools/endpoint.py`) and sends the full conversation with every request. The
session of the address has the same conversation in tokens and adds the messages after the model's last turn; sampled tokens
stay as they are. Where the program has changed earlier messages, another sequence starts.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Sequence
from typing import Any

from mindspeed_rl.data.turns import ChatMessage
from mindspeed_rl.rollout.agents.conversation import AgentConversation, Turn
from mindspeed_rl.rollout.agents.loop import LoopSettings, Task
from mindspeed_rl.tools.endpoint import ChatReply, ContextFullError, RecordingEndpoint, write_message
from mindspeed_rl.tools.environments import EnvironmentSpec
from mindspeed_rl.tools.interface import ParsedTurn
from mindspeed_rl.tools.parsers import make_parser, split_thought
from mindspeed_rl.tools.verifiers_program import VerifiersProgram

_EPISODE_LIMIT_S = 1800.0


class EpisodeError(RuntimeError):
    """An episode failed; the message has the program's reason."""


class ProgramEpisodes:
    """Episodes of a program; one endpoint and one program per process.

    Attributes:
        resources: to be started before the first episode, and closed after the last.

    Raises:
        ValueError: the target is wrong, or there is no such interpreter.
    """

    def __init__(self, spec: EnvironmentSpec, settings: LoopSettings) -> None:
        self._program = VerifiersProgram(spec.target, spec.args, spec.python, settings.folders)
        self._endpoint = RecordingEndpoint()
        self.resources = self._program, self._endpoint
        self._settings, self._target = settings, spec.target
        self._timeout_s = spec.timeout_s or _EPISODE_LIMIT_S

    async def play(self, conversation: AgentConversation, task: Task) -> float | None:
        """Play an episode and return the reward that the program gives it.

        Raises:
            EpisodeError: it failed, took too long, or requested no turn.
            ProgramExitError: the program has ended; the next episode starts it again.
        """
        row = task.row
        if "prompt" not in row:
            raise EpisodeError(
                f"the row has no column 'prompt', which {self._target} starts with: name the columns of its data set, prompt "
                "among them, in actor_config.dataset_additional_keys"
            )
        if row.get("answer") is None and task.label is not None:
            row["answer"] = task.label
        session = _TokenSession(conversation, self._settings)
        address = self._endpoint.open(session)
        try:
            outcome = await self._program.run_episode(row, address, self._endpoint.model, self._timeout_s)
        finally:
            self._endpoint.remove(address)
            await session.close()
        for name, value in outcome.metrics.items():
            conversation.metrics[f"environment_{name.replace('/', '_')}"] = value
        if outcome.error is not None:
            raise EpisodeError(outcome.error)
        if not conversation.num_turns:
            raise EpisodeError("it ended before it requested a turn of the model")
        return outcome.reward


class _TokenSession:
    """A trajectory that a client continues by requests; see `tools.endpoint.ChatSession`."""

    def __init__(self, conversation: AgentConversation, settings: LoopSettings) -> None:
        self._conversation, self._settings = conversation, settings
        self._messages: list[ChatMessage] = []  # as the client has them, the model's last turn included
        self._tools: list[dict[str, Any]] = []
        self._turns = settings.turns
        self._can_continue, self._closed = True, False
        self._generating: asyncio.Future[Turn] | None = None

    async def complete(
        self, messages: Sequence[ChatMessage], tools: Sequence[dict[str, Any]], max_tokens: int | None
    ) -> ChatReply:
        """See `ChatSession`."""
        if messages[-1].get("role") == "assistant":
            raise ValueError("the last message is the model's, which it cannot answer")
        if not self._can_continue:
            raise ContextFullError("the trajectory has ended")
        self._can_continue = self._add_messages(messages, list(tools))
        if not self._can_continue:
            raise ContextFullError("no tokens are left")
        # a task of its own, which `close` can cancel while the program still waits for the answer
        self._generating = asyncio.ensure_future(self._conversation.reply(max_tokens))
        try:
            turn = await self._generating
        except asyncio.CancelledError:
            if self._closed:
                raise ContextFullError("the episode has ended") from None
            raise
        self._can_continue = self._conversation.can_continue(turn)
        thinks = self._turns.opens_thought
        if self._tools:
            parser = make_parser(self._settings.tool_parser, self._tools, self._settings.tokenizer, thinks=thinks)
            parsed = parser.parse(turn.text, turn.token_ids)
        else:
            thought, content = split_thought(turn.text, len(turn.text), thinks)
            parsed = ParsedTurn(content.strip(), thought)
        self._messages = [*messages, write_message(parsed)]
        return ChatReply(parsed, turn.ended, turn.prompt_ids, turn.token_ids, turn.log_probs)

    async def close(self) -> None:
        """Stop generating; later requests are refused."""
        self._can_continue, self._closed = False, True
        if self._generating is not None and not self._generating.done():
            self._generating.cancel()
            await asyncio.wait([self._generating])

    def _add_messages(self, messages: Sequence[ChatMessage], tools: list[dict[str, Any]]) -> bool:
        """Add the client's new messages to the conversation; return False where there is no room for an answer."""
        known = len(self._messages)
        follow = known > 0 and tools == self._tools and len(messages) > known
        if follow and all(_normalize(ours) == _normalize(theirs) for ours, theirs in zip(self._messages, messages)):
            return self._conversation.replace([*self._conversation.messages, *messages[known:]])
        self._tools = tools
        self._turns = self._settings.turns.with_tools(has_tools=bool(tools))
        return self._conversation.restart(self._turns.render(messages, tools), self._turns)


def _normalize(message: ChatMessage) -> tuple[object, ...]:
    """Return the parts of a message that a client must not change: role, text without outer blanks, and calls."""
    calls: list[object] = []
    for call in message.get("tool_calls") or []:
        function = call.get("function") or {}
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            with contextlib.suppress(ValueError):  # a client may format JSON otherwise
                arguments = json.loads(arguments)
        calls.append((function.get("name"), arguments))
    return message.get("role"), str(message.get("content") or "").strip(), calls
