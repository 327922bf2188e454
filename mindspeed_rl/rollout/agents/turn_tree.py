"""Turns of one trajectory that clients request, as a tree of tokens: sampled tokens are never tokenized again.

A client sends the full conversation with every request. Where its messages extend an earlier turn's, the new turn
continues that turn's tokens; where it has changed earlier messages (a summary, thoughts that it dropped, a sub-agent with a
conversation of its own), a branch starts. Each branch becomes a sequence of the trajectory. Tokens that branches share train
once, in the first of them; in the others they are the context in which later tokens were sampled.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from mindspeed_rl.bounds import MAX_CHARACTERS_PER_TOKEN, add_numbers, check_depth, check_token_ids, show
from mindspeed_rl.data.conversation import MalformedRowError
from mindspeed_rl.data.images import check_images, check_media_limits
from mindspeed_rl.data.turns import ChatMessage, ChatTurns
from mindspeed_rl.rollout.agents.conversation import strip_end
from mindspeed_rl.rollout.agents.loop import LoopSettings, Task
from mindspeed_rl.rollout.protocol import Generated, RolloutEngine
from mindspeed_rl.rollout.requests import Sampling, derive_seed
from mindspeed_rl.rollout.trajectory import Segment, TokenSequence, Trajectory, TurnEvent
from mindspeed_rl.thoughts import closes_thought
from mindspeed_rl.tools.endpoint import ContextFullError
from mindspeed_rl.tools.interface import ParsedTurn, ToolCall
from mindspeed_rl.tools.parsers import make_call_id, make_parser, split_thought
from mindspeed_rl.tools.request_forms import ChatReply, TurnRequest, write_message

_Result = TypeVar("_Result")
#: bytes of a request: at least, for each token of the context, at most without images, and for images in addition
_MIN_BYTES, _MAX_BYTES_PER_TOKEN, _MAX_TEXT_BYTES, _IMAGE_BYTES = 1 << 20, 64, 16 << 20, 64 << 20


@dataclass(frozen=True)
class _Context:
    """Context that a turn is sampled in.

    Attributes:
        parent: the turn whose tokens it continues; None for none.
        added: tokens after the parent's.
        images: images of all these tokens, in their order.
        text: a completion's prompt; "" for a chat.
    """

    parent: _Node | None
    added: tuple[int, ...]
    images: tuple[str, ...] = ()
    text: str = ""

    @property
    def tokens(self) -> tuple[int, ...]:
        """All of them."""
        return self.added if self.parent is None else self.parent.tokens + self.added


@dataclass(eq=False)
class _Node:
    """A turn of the model.

    Attributes:
        context: that it was sampled in.
        tokens: all tokens up to the end of the turn.
        text: a completion's prompt and the text that the client received; "" for a chat.
        num_answers: turns of the model in the conversation so far, with the client's own.
        has_thought: some turn since the last rendering has a thought.
        start_s, end_s: start and end of sampling, since the epoch.
        session: run of an agent that requested it; "" in an episode of one.
        is_continued: another turn follows it.
    """

    id: str
    context: _Context
    tokens: tuple[int, ...]
    segment: Segment
    text: str
    num_answers: int
    has_thought: bool
    start_s: float
    end_s: float
    session: str = ""
    is_continued: bool = False
    reward: float | None = None

    @property
    def parent(self) -> _Node | None:
        """The turn whose tokens it continues; None for the first of a conversation."""
        return self.context.parent


@dataclass(frozen=True)
class _ReadTurn:
    """Meaning of a turn's tokens.

    Attributes:
        text: text that the client receives.
        stop: text of the request that ended it.
        has_thought: see `_Node`.
        digests: digests of the conversation up to the turn, for requests that continue it.
    """

    parsed: ParsedTurn
    text: str
    stop: str | None
    has_thought: bool
    digests: tuple[bytes, ...]


@dataclass(frozen=True)
class AgentRun:
    """A run of an agent in an episode of several.

    Attributes:
        name: role of the agent.
        reward: its own; None for none.
        trains: its turns are the actor's; others, of a simulated user or a judge, are left out of the trajectory.
    """

    name: str
    reward: float | None
    trains: bool


class TurnTree:
    """See the module, and `tools.endpoint.ChatSession`.

    Args:
        has_sessions: each session of the requests is a run of an agent, with conversations of its own.

    Attributes:
        num_turns: sampled so far.
        final_reward: added by the client; None for none.
    """

    def __init__(self, task: Task, engine: RolloutEngine, settings: LoopSettings, *, has_sessions: bool = False) -> None:
        self._task, self._engine, self._settings, self._has_sessions = task, engine, settings, has_sessions
        self._nodes: list[_Node] = []
        self._known: dict[bytes, _Node] = {}  # digest of a conversation -> its last turn
        self._turns: dict[bool, ChatTurns] = {}  # with and without tools
        self._running: set[asyncio.Future[Generated]] = set()
        self._contexts: Counter[bytes] = Counter()  # turns sampled from each context
        self._num_used = self._num_started = self._num_calls = 0
        self._truncated = self._closed = False
        self.num_turns = 0
        self.final_reward: float | None = None

    @property
    def max_bytes(self) -> int:
        """Longest body of a request; a longer one cannot fit into the context."""
        text = _MIN_BYTES + self._settings.limits.max_context_tokens * _MAX_BYTES_PER_TOKEN
        return min(text, _MAX_TEXT_BYTES) + (0 if self._settings.images is None else _IMAGE_BYTES)

    async def complete(self, request: TurnRequest) -> Sequence[ChatReply]:
        """See `ChatSession`."""
        context = await self._in_thread(lambda: self._find_context(request))
        choices = [asyncio.ensure_future(self._sample(request, context)) for _ in range(request.num_choices)]
        try:
            return await asyncio.gather(*choices)
        finally:
            for choice in choices:
                choice.cancel()

    async def count_tokens(self, request: TurnRequest) -> int:
        """See `ChatSession`."""
        return len((await self._in_thread(lambda: self._find_context(request))).tokens)

    async def _in_thread(self, function: Callable[[], _Result]) -> _Result:
        """Run work on texts, one at a time; see `LoopSettings.texts`."""
        return await asyncio.get_running_loop().run_in_executor(self._settings.texts, function)

    def add_reward(self, value: float, reply: str) -> None:
        """See `ChatSession`."""
        if not reply:
            self.final_reward = add_numbers((self.final_reward or 0.0, value), "the sum of the trajectory's rewards")
            return
        node = next((node for node in self._nodes if node.id == reply), None)
        if node is None:
            raise ValueError(f"there is no turn {show(reply)} in this trajectory")
        node.reward = add_numbers((node.reward or 0.0, value), "the sum of the turn's rewards")

    async def close(self) -> None:
        """Stop generating; later requests are refused."""
        self._closed = True
        for generating in self._running:
            generating.cancel()
        if self._running:
            await asyncio.wait(self._running)

    def end(
        self,
        *,
        final_reward: float | None = None,
        is_graded: bool = False,
        failure: str = "",
        metrics: Mapping[str, float] | None = None,
        output: str | None = None,
        agents: Mapping[str, AgentRun] | None = None,
    ) -> Trajectory:
        """Return the trajectory, with a sequence for each branch.

        Args:
            final_reward: reward in place of the one that the client has posted; None: that one.
            is_graded: a grader has decided, so that no posted reward counts, of a turn neither.
            failure: the reason why it failed.
            metrics: metrics of the program.
            output: output of the program, for reward functions.
            agents: runs of agents by session: their last turns have their rewards, turns of agents that do not train and of
                sessions that are not among them (an attempt that was repeated) are left out. None: all turns are the actor's.
        """
        nodes = self._nodes if agents is None else self._assign(agents)
        sequences: list[TokenSequence] = []
        rewards: list[float | None] = []
        placed: dict[_Node, int] = {}  # turn -> index of its first token in the row's response
        num_tokens = 0
        for leaf in (node for node in nodes if not node.is_continued):
            path: list[_Node] = []
            node: _Node | None = leaf
            while node is not None and node not in placed:
                path.insert(0, node)
                node = node.parent
            segments: list[Segment] = []
            for turn in path:
                if segments and turn.context.added:
                    segments.append(Segment.from_context(turn.context.added))
                    num_tokens += len(turn.context.added)
                placed[turn] = num_tokens
                segments.append(turn.segment)
                num_tokens += len(turn.segment.token_ids)
            first = path[0]
            start = first.tokens[: len(first.tokens) - len(first.segment.token_ids)]
            sequences.append(TokenSequence(start, tuple(segments), leaf.context.images))
            rewards += [None if is_graded else turn.reward for turn in path]
        if final_reward is None and not is_graded:
            final_reward = self.final_reward
        return Trajectory(
            sequences=tuple(sequences) or (TokenSequence(self._task.prompt_ids, (), self._task.sampling.images),),
            finish="length" if self._truncated else "stop",
            turn_rewards=tuple(rewards),
            final_reward=final_reward,
            metrics={"turns": float(len(nodes)), "branches": float(max(0, len(sequences) - 1)), **(metrics or {})},
            failure=failure,
            output=output,
            events=tuple(_list_events(nodes, placed, agents or {}, has_rewards=not is_graded)),
        )

    def has_turn_of(self, agents: Mapping[str, AgentRun]) -> bool:
        """Return whether a turn is of an agent that trains."""
        return any(node.session in agents and agents[node.session].trains for node in self._nodes)

    def _assign(self, agents: Mapping[str, AgentRun]) -> list[_Node]:
        """Give the last turn of each run its reward; return the turns that train."""
        last = {node.session: node for node in self._nodes}
        for session, run in agents.items():
            if session in last and run.reward is not None:
                last[session].reward = (last[session].reward or 0.0) + run.reward
        return [node for node in self._nodes if node.session in agents and agents[node.session].trains]

    def _find_context(self, request: TurnRequest) -> _Context:
        """Return what the model reads for a request; runs in the thread of texts.

        Raises:
            ContextFullError: the trajectory has ended, or the request is certainly too long.
            ValueError: the chat template cannot render the messages, or the model cannot read their images.
        """
        if self._closed:
            raise ContextFullError("the episode has ended")
        self._check_size(request)
        if request.prompt is not None:
            return self._find_prompt(request.prompt, self._find_session(request))
        if request.messages[-1].get("role") == "assistant":
            raise ValueError("the last message is the model's, which it cannot answer")
        try:
            return self._find_messages(request, request.messages)
        except MalformedRowError:  # texts after results of tools or other texts, which not every template can write
            merged = _merge_user_messages(request.messages)
            if len(merged) == len(request.messages):
                raise
            return self._find_messages(request, merged)

    def _check_size(self, request: TurnRequest) -> None:
        """Check the lengths of a request before any work on it.

        Raises:
            ContextFullError: no tokenizer can make it fit into the context.
            ValueError: a token id is not in the vocabulary.
        """
        max_tokens = self._settings.limits.max_context_tokens
        num_items = len(request.messages)
        if isinstance(request.prompt, tuple):
            num_items, num_characters = len(request.prompt), 0
        else:
            num_characters = len(request.prompt or "") + _count_characters(request.messages, request.tools)
        if num_items > max_tokens or num_characters > max_tokens * MAX_CHARACTERS_PER_TOKEN:
            raise ContextFullError(
                f"a request of {num_items} messages or tokens and {num_characters} characters is longer than {max_tokens} "
                "tokens"
            )
        if isinstance(request.prompt, tuple):
            check_token_ids(request.prompt, self._settings.num_ids, "prompt")

    def _find_messages(self, request: TurnRequest, messages: Sequence[ChatMessage]) -> _Context:
        """Return what `_find_context` does, for these messages."""
        turns = self._turns_of(request)
        images = [tuple(message.get("images", ())) for message in messages]
        plain = [{name: value for name, value in message.items() if name != "images"} for message in messages]
        last = max(index for index, message in enumerate([{"role": "assistant"}, *messages]) if message["role"] == "assistant")
        parent = self._known.get(_digest(messages[:last], request.tools, self._find_session(request)))
        if parent is not None:
            added = turns.render_next(
                plain[last:], parent.tokens[-1], num_before=parent.num_answers - 1, has_thought=parent.has_thought
            )
            if added is not None:
                return self._place_images(_Context(parent, added, parent.context.images), images[last:])
        # the template would write earlier turns otherwise, or the client has
        return self._place_images(_Context(None, turns.render(plain, list(request.tools))), images)

    def _find_session(self, request: TurnRequest) -> str:
        return request.session if self._has_sessions else ""

    def _place_images(self, context: _Context, images: Sequence[tuple[str, ...]]) -> _Context:
        """Return the context with all tokens of new images, message by message.

        Raises:
            ValueError: the model reads none or not as many, or one is broken.
        """
        new, reader = tuple(image for some in images for image in some), self._settings.images
        if not new:
            return context
        if reader is None:
            raise ValueError("the model of this run reads no images: send only text, or train a model of images")
        check_media_limits(context.images, new, self._settings.max_images, self._settings.max_videos)
        new = reader.decode_videos(new)
        check_images(new)
        ((expanded, _),), _ = reader.expand([(list(context.added), [])], new)
        return replace(context, added=tuple(expanded), images=(*context.images, *new))

    def _find_prompt(self, prompt: str | tuple[int, ...], session: str) -> _Context:
        """Return what `_find_context` does, for a text or tokens to complete."""
        tokenizer = self._settings.tokenizer
        nodes = [node for node in self._nodes if node.session == session]
        if not isinstance(prompt, str):
            before = [node for node in nodes if prompt[: len(node.tokens)] == node.tokens and len(prompt) > len(node.tokens)]
            parent = max(before, key=lambda node: len(node.tokens), default=None)
            images = () if parent is None else parent.context.images
            return _Context(parent, prompt if parent is None else prompt[len(parent.tokens) :], images)
        texts = [node for node in nodes if node.text and prompt.startswith(node.text) and len(prompt) > len(node.text)]
        parent = max(texts, key=lambda node: len(node.text), default=None)
        if parent is None:
            return _Context(None, tuple(tokenizer.encode(prompt)), text=prompt)
        new = tuple(tokenizer.encode(prompt[len(parent.text) :], add_special_tokens=False))
        before_end = strip_end(parent.tokens, self._task.sampling, tokenizer)
        if before_end == parent.tokens:
            return _Context(parent, new, text=prompt)
        return _Context(None, before_end + new, text=prompt)  # the text goes on where the turn had ended

    async def _sample(self, request: TurnRequest, context: _Context) -> ChatReply:
        """Sample a turn and add it to the tree.

        Raises:
            ContextFullError: it does not fit.
            ValueError: the first prompt is too long.
        """
        if self._closed:
            raise ContextFullError("the episode has ended")
        limits, sampling = self._settings.limits, self._task.sampling
        is_first, parent, num_added = not self._num_started, context.parent, len(context.added)
        if is_first and num_added > limits.max_prompt_tokens:
            raise ValueError(
                f"the first messages are {num_added} tokens, and rl_config.max_prompt_length is {limits.max_prompt_tokens}"
            )
        ids = context.tokens
        # a branch repeats its context
        cost = 0 if is_first else num_added if parent is not None and not parent.is_continued else len(ids)
        room = min(sampling.max_tokens, limits.max_tokens - self._num_used - cost, limits.max_context_tokens - len(ids))
        if room < 1 or (limits.max_turns is not None and self._num_started >= limits.max_turns):
            self._truncated = True
            raise ContextFullError("no tokens are left" if room < 1 else f"{limits.max_turns} turns are used")
        max_tokens = min(room, request.max_tokens or room)
        stop = (*sampling.stop, *request.stop)
        sampling = replace(sampling, max_tokens=max_tokens, stop=stop, images=context.images)
        self._num_started += 1
        self._num_used += cost + max_tokens
        was_continued = parent is not None and parent.is_continued
        if parent is not None:
            parent.is_continued = True
        response: Generated | None = None
        turn: _ReadTurn | None = None
        start_s = time.time()
        try:
            response = await self._generate(ids, sampling, self._choose_seed(ids, is_first))
            turn = await self._read_turn(request, context, response)
        finally:
            self._num_used -= max_tokens
            if response is None or turn is None:
                self._num_used -= cost
                self._num_started -= 1
                if parent is not None:
                    parent.is_continued = was_continued or any(node.parent is parent for node in self._nodes)
        self._num_used += len(response.token_ids)
        self._truncated |= response.finish == "length" and max_tokens != request.max_tokens
        return self._record(request, context, response, turn, start_s)

    async def _generate(self, context: tuple[int, ...], sampling: Sampling, seed: int) -> Generated:
        async def generate() -> Generated:
            response: Generated | None = None
            while response is None or response.finish == "aborted":  # new weights may interrupt it; it continues with them
                response = await self._engine.generate(context, sampling, seed, response)
            return response

        # a task of its own, which `close` can cancel while the program still waits for the answer
        generating = asyncio.ensure_future(generate())
        self._running.add(generating)
        try:
            return await generating
        except asyncio.CancelledError:
            if self._closed:
                raise ContextFullError("the episode has ended") from None
            raise
        finally:
            self._running.discard(generating)

    def _choose_seed(self, context: tuple[int, ...], is_first: bool) -> int:
        """Return the seed of a turn, from its context: the order in which requests arrive does not matter."""
        digest = hashlib.blake2b(array("q", context).tobytes(), digest_size=16).digest()
        index = self._contexts[digest]
        self._contexts[digest] += 1
        if is_first and not index:  # as a single response would be sampled
            return self._task.seed
        return derive_seed(f"{self._task.seed}#{digest.hex()}#{index}")

    async def _read_turn(self, request: TurnRequest, context: _Context, response: Generated) -> _ReadTurn:
        """Return what the tokens of a turn mean.

        Raises:
            ContextFullError: the episode has ended meanwhile.
        """
        turn = await self._in_thread(lambda: self._decode(request, context, response))
        if self._closed:
            raise ContextFullError("the episode has ended")
        return turn

    def _decode(self, request: TurnRequest, context: _Context, response: Generated) -> _ReadTurn:
        tokenizer, ids, parent = self._settings.tokenizer, response.token_ids, context.parent
        visible = strip_end(ids, self._task.sampling, tokenizer) if response.finish == "stop" else ids
        # cleaning up would remove spaces that the model sampled
        text = tokenizer.decode(list(visible), clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        stops = [(text.index(stop), stop) for stop in request.stop if stop in text] if response.finish == "stop" else []
        has_thought = closes_thought(text) or (parent is not None and parent.has_thought)
        text = text[: min(stops)[0]] if stops else text
        parsed = self._parse(request, text, ids)
        known = () if request.prompt is not None else (request.messages, _merge_user_messages(request.messages))
        session = self._find_session(request)
        digests = [_digest((*messages, write_message(parsed)), request.tools, session) for messages in known]
        return _ReadTurn(parsed, text, min(stops)[1] if stops else None, has_thought, tuple(digests))

    def _record(
        self, request: TurnRequest, context: _Context, response: Generated, turn: _ReadTurn, start_s: float
    ) -> ChatReply:
        """Add a turn to the tree and return it as the client reads it."""
        ids = response.token_ids
        self.num_turns += 1
        name = hashlib.blake2b(f"{self._task.seed}/{self.num_turns}".encode(), digest_size=6).hexdigest()
        num_answers = 1 + sum(message["role"] == "assistant" for message in request.messages)
        node = _Node(
            name,
            context,
            context.tokens + ids,
            Segment.from_generated(response),
            context.text and context.text + turn.text,
            num_answers,
            turn.has_thought,
            start_s,
            time.time(),
            self._find_session(request),
        )
        self._nodes.append(node)
        self._known.update(dict.fromkeys(turn.digests, node))
        return ChatReply(turn.parsed, response.finish == "stop", context.tokens, ids, response.log_probs, turn.stop, name)

    def _parse(self, request: TurnRequest, text: str, ids: tuple[int, ...]) -> ParsedTurn:
        if request.prompt is not None:
            return ParsedTurn(text)
        thinks = self._turns_of(request).opens_thought
        if not request.tools or request.max_calls == 0:
            thought, content = split_thought(text, len(text), thinks)
            return ParsedTurn(content.strip(), thought)
        parser = make_parser(self._settings.tool_parser, list(request.tools), self._settings.tokenizer, thinks=thinks)
        parsed = parser.parse(text, ids)
        calls = list(parsed.calls[: request.max_calls])
        for index, call in enumerate(calls):  # unique in the trajectory
            if isinstance(call, ToolCall):
                calls[index] = replace(call, id=make_call_id(self._num_calls))
                self._num_calls += 1
        return replace(parsed, calls=tuple(calls))

    def _turns_of(self, request: TurnRequest) -> ChatTurns:
        has_tools = bool(request.tools)
        if has_tools not in self._turns:
            self._turns[has_tools] = self._settings.turns.with_tools(has_tools=has_tools)
        return self._turns[has_tools]


def _list_events(
    nodes: Sequence[_Node], starts: Mapping[_Node, int], agents: Mapping[str, AgentRun], *, has_rewards: bool
) -> Iterator[TurnEvent]:
    index = {node: number for number, node in enumerate(nodes)}
    for node in nodes:
        parent = None if node.parent is None else index[node.parent]
        start = starts[node]
        role = agents[node.session].name if node.session in agents else ""
        reward = node.reward if has_rewards else None
        yield TurnEvent(
            "model", parent, start, start + len(node.segment.token_ids), node.start_s, node.end_s, reward, role=role
        )


def _merge_user_messages(messages: Sequence[ChatMessage]) -> list[ChatMessage]:
    """Return the messages; a user's message after another one, or after a tool's reply, becomes its end."""
    merged: list[ChatMessage] = []
    for message in messages:
        if message["role"] == "user" and merged and merged[-1]["role"] in ("tool", "user"):
            images = [*merged[-1].get("images", ()), *message.get("images", ())]
            text = f"{merged[-1]['content']}\n{message['content']}"
            merged[-1] = {**merged[-1], "content": text} | ({"images": images} if images else {})
        else:
            merged.append(message)
    return merged


def _count_characters(messages: Sequence[ChatMessage], tools: Sequence[ChatMessage]) -> int:
    """Return the number of characters of a conversation, without its images."""
    calls = [message["tool_calls"] for message in messages if message.get("tool_calls")]
    texts = sum(len(message.get("content") or "") for message in messages)
    return texts + len(json.dumps([calls, list(tools)], ensure_ascii=False))


def _digest(messages: Sequence[ChatMessage], tools: Sequence[ChatMessage], session: str) -> bytes:
    """Return a digest of a session's messages that a client must not change: tools, role, stripped text, calls and images."""
    content: list[object] = [session, list(tools)]
    for message in messages:
        calls: list[object] = []
        for call in message.get("tool_calls") or []:
            function = call.get("function") or {}
            arguments = function.get("arguments")
            if isinstance(arguments, str):
                with contextlib.suppress(ValueError, RecursionError):  # a client may format JSON otherwise
                    value = json.loads(arguments)
                    check_depth(value, "arguments")
                    arguments = value
            calls.append((function.get("name"), arguments))
        images = list(message.get("images", ()))
        content.append((message.get("role"), str(message.get("content") or "").strip(), calls, images))
    return hashlib.blake2b(json.dumps(content, sort_keys=True).encode(), digest_size=16).digest()
