"""Answers made by an agent loop: an engine around an engine, for generate, chat and evaluate alike."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar, cast

from mindspeed_rl.config import RLConfig
from mindspeed_rl.inference.engine_interface import Engine, Finish, Piece, Request
from mindspeed_rl.inference.prompt_format import PromptFormat
from mindspeed_rl.rollout.agents import load_agent_loop
from mindspeed_rl.rollout.agents.conversation import TrajectoryLimits
from mindspeed_rl.rollout.agents.loop import AgentRunner, LoopSettings, Task
from mindspeed_rl.rollout.protocol import Generated
from mindspeed_rl.rollout.requests import Sampling
from mindspeed_rl.tools.environments import read_environment
from mindspeed_rl.workers.agents import build_tool_box, choose_parser

if TYPE_CHECKING:
    from mindspeed_rl.rollout.protocol import RolloutEngine
    from mindspeed_rl.tools.interface import ToolBox

_Found = TypeVar("_Found")
#: how long nothing may come before whoever reads is given the word
_LOOK_EVERY_S = 0.2


@dataclass(frozen=True)
class AgentSettings:
    """What the user says about loops and tools: the flags, under their names.

    Attributes:
        tools: a tool file, or the name of a built-in tool.
        agent_loop: a name or module:Class; None: that of the other flags.
        tool_parser: see `tools.parsers`.
        multi_turn_scheduler, environment: module:Class, of the loops of these names.
        max_turns: of the model; None: as many as fit.
    """

    tools: str | None
    agent_loop: str | None
    tool_parser: str | None
    multi_turn_scheduler: str | None
    environment: str | None
    max_turns: int | None

    def rl(self) -> RLConfig:
        """The same as keys of a run file."""
        return RLConfig(
            multi_turn_enable=True,
            agent_loop=self.agent_loop,
            tool_config_path=self.tools,
            tool_parser_format=self.tool_parser,
            multi_turn_scheduler=self.multi_turn_scheduler,
            environment=self.environment,
            max_turns=self.max_turns,
        )


class AgentEngine:
    """An `Engine` whose answers are the trajectories of an agent loop. Tools live as long as it does.

    The turns that wait at the same time are one batch of the inner engine; a trajectory whose tool is slow joins a later one.
    """

    def __init__(self, settings: AgentSettings, prompt_format: PromptFormat, max_model_len: int) -> None:
        """Starts the tools, and lets prompts tell of them.

        Args:
            max_model_len: of prompt and all turns.

        Raises:
            ValueError: the loop, a tool or the parser is wrong, or there is no chat template.
        """
        if settings.environment is not None and read_environment(settings.environment).is_program:
            raise ValueError(
                f"--environment {settings.environment}: an environment of verifiers plays its own rows, not prompts"
            )
        rl = settings.rl()
        turns = prompt_format.turns(has_tools=settings.tools is not None)
        box = None if settings.tools is None else build_tool_box(rl, prompt_format.tokenizer, turns)
        limits = TrajectoryLimits(max_model_len, max_model_len, max_model_len, settings.max_turns)
        loop_settings = LoopSettings(
            prompt_format.tokenizer,
            turns,
            limits,
            box,
            settings.multi_turn_scheduler,
            settings.environment,
            choose_parser(rl, turns),
        )
        self._agents = AgentRunner(load_agent_loop(rl.agent_loop_name)(loop_settings), box)
        self._inner: Engine | None = None
        # one loop for all streams, since tools keep what they have opened in it
        self._events = asyncio.new_event_loop()
        try:
            self._run(self._agents.start())
            if box is not None:
                prompt_format.tools = self._run(_schemas(box))
        except BaseException:
            self.close()
            raise

    def around(self, engine: Engine) -> AgentEngine:
        """Itself, which asks this engine from now on."""
        self._inner = engine
        return self

    def stream(self, requests: Sequence[Request], sampling: Sampling, stop_strings: Sequence[str] = ()) -> Iterator[Piece]:
        """See `Engine.stream`. Tokens come as they are drawn; an aside tells that what came of that answer was an earlier turn.

        While nobody but tools works, empty pieces come, so that whoever reads can break off.

        Raises:
            ValueError: stop strings or a choice of tokens are asked for, which turns with calls do not go with.
            RuntimeError: a plug-in broke off a trajectory.
        """
        if stop_strings or any(request.allowed_ids for request in requests):
            raise ValueError("--tools and --agent-loop do not go with --stop, nor with answers of one token")
        return self._pieces(requests, sampling)

    def _pieces(self, requests: Sequence[Request], sampling: Sampling) -> Generator[Piece, None, None]:
        batches, news = _Batches(self._engine, sampling), _News()

        async def partial() -> list[asyncio.Task[None]]:
            spoken = [_Spoken(batches, number, news.add) for number in range(len(requests))]
            return [asyncio.ensure_future(self._one(*pair, sampling)) for pair in zip(spoken, requests)]

        tasks = self._run(partial())
        serving = self._events.create_task(batches.serve())
        for task in (*tasks, serving):
            # an end is news too, as a task that fails leaves no piece
            task.add_done_callback(lambda _: news.changed.set())
        try:
            while (pieces := self._run(news.next(tasks, serving))) is not None:
                yield from pieces
        finally:
            # who reads may break off: nothing of this stream may run on in the next one
            left = [task for task in (*tasks, serving) if not task.done()]
            for task in left:
                task.cancel()
            self._run(_ended(left))

    async def _one(self, spoken: _Spoken, request: Request, sampling: Sampling) -> None:
        most = sampling.max_tokens if request.max_tokens is None else request.max_tokens
        task = Task(tuple(request.prompt_ids), replace(sampling, max_tokens=most), request.seed)
        # of an engine, loops use `generate` alone; nothing is pushed here
        found = await self._agents.sample(cast("RolloutEngine", spoken), task)
        if found.failure:
            raise RuntimeError(found.failure)
        spoken.end("length" if found.finish == "length" else "stop")

    def next_tokens(self, prompts: Sequence[list[int]], count: int) -> list[list[tuple[int, float]]]:
        """See `Engine.next_tokens`."""
        return self._engine.next_tokens(prompts, count)

    def score(self, sequences: Sequence[list[int]], starts: Sequence[int]) -> list[list[tuple[float, bool]]]:
        """See `Engine.score`."""
        return self._engine.score(sequences, starts)

    def close(self) -> None:
        """Ends the tools; the inner engine is its maker's to end."""
        if not self._events.is_closed():
            try:
                self._run(self._agents.close())
            finally:
                self._run(self._events.shutdown_asyncgens())
                self._events.close()

    @property
    def _engine(self) -> Engine:
        assert self._inner is not None
        return self._inner

    def _run(self, coroutine: Coroutine[Any, Any, _Found]) -> _Found:
        return self._events.run_until_complete(coroutine)


class _News:
    """Pieces that were not handed out yet."""

    def __init__(self) -> None:
        self._pieces: list[Piece] = []
        self.changed = asyncio.Event()

    def add(self, piece: Piece) -> None:
        """It is to be handed out."""
        self._pieces.append(piece)
        self.changed.set()

    async def next(self, tasks: Sequence[asyncio.Task[None]], serving: asyncio.Task[None]) -> list[Piece] | None:
        """Those that have come, an empty one where none comes for a while; None once all tasks have ended.

        Raises:
            Exception: what a task, or the engine, failed with.
        """
        if not self._pieces:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.changed.wait(), _LOOK_EVERY_S)
            self.changed.clear()
        for task in (*tasks, serving):
            if task.done():
                task.result()
        pieces, self._pieces = self._pieces, []
        if not pieces and all(task.done() for task in tasks):
            return None
        return pieces or [Piece(0, [], [], None)]


class _Spoken:
    """What one trajectory sees of the inner engine: a request at a time, whose tokens go out as they are drawn.

    The end of a turn waits until it is known what follows: another turn, or the answer's end.
    """

    def __init__(self, batches: _Batches, index: int, hand_out: Callable[[Piece], None]) -> None:
        self._batches, self._index, self._hand_out = batches, index, hand_out
        self._read: tuple[int, ...] = ()  # what the model has read and drawn
        self._last: Piece | None = None

    async def generate(
        self, prompt_ids: tuple[int, ...], sampling: Sampling, seed: int, partial: Generated | None = None
    ) -> Generated:
        """See `rollout.engine.RolloutEngine`."""
        assert partial is None  # nothing is interrupted here
        if self._last is not None:
            self._hand_out(self._last)
            read = len(self._read)
            told = prompt_ids[read:] if prompt_ids[:read] == self._read else ()  # else the template wrote it all anew
            self._hand_out(Piece(self._index, list(told), [0.0] * len(told), None, aside=True))
        found = await self._batches.generate(Request(list(prompt_ids), seed, max_tokens=sampling.max_tokens), self._hear)
        self._read = (*prompt_ids, *found.token_ids)
        return found

    def end(self, finish: Finish) -> None:
        """The last turn was the answer."""
        last = Piece(self._index, [], [], None) if self._last is None else self._last
        self._hand_out(replace(last, finish=finish))

    def _hear(self, piece: Piece) -> None:
        piece = replace(piece, index=self._index)
        if piece.finish is None:
            self._hand_out(piece)
        else:
            self._last = replace(piece, finish=None)


class _Batches:
    """Requests that wait at the same time go to the inner engine together."""

    def __init__(self, engine: Engine, sampling: Sampling) -> None:
        self._engine, self._sampling = engine, sampling
        self._waiting: list[tuple[Request, Callable[[Piece], None], asyncio.Future[Generated]]] = []
        self._asked = asyncio.Event()

    async def generate(self, request: Request, hear: Callable[[Piece], None]) -> Generated:
        """The whole answer, of which `hear` gets every piece."""
        answered: asyncio.Future[Generated] = asyncio.get_running_loop().create_future()
        self._waiting.append((request, hear, answered))
        self._asked.set()
        return await answered

    async def serve(self) -> None:
        """Asks the engine until it is cancelled."""
        while True:
            await self._asked.wait()
            self._asked.clear()
            batch, self._waiting = self._waiting, []
            drawn: list[tuple[list[int], list[float]]] = [([], []) for _ in batch]
            for piece in self._engine.stream([request for request, _, _ in batch], self._sampling):
                tokens, log_probs = drawn[piece.index]
                tokens += piece.token_ids
                log_probs += piece.log_probs
                _, hear, answered = batch[piece.index]
                # cancelled: nobody listens any more
                if not answered.done():
                    hear(piece)
                    if piece.finish is not None:
                        # version 0 throughout, as nothing is pushed to this engine
                        answered.set_result(Generated(tuple(tokens), tuple(log_probs), (0,) * len(tokens), piece.finish))
                await asyncio.sleep(0)  # tools go on, and pieces are read, while the engine works


async def _schemas(box: ToolBox) -> list[dict[str, Any]]:
    tools = box.open({})
    schemas = tools.schemas
    await tools.close()
    return schemas


async def _ended(tasks: Sequence[asyncio.Future[Any]]) -> None:
    await asyncio.gather(*tasks, return_exceptions=True)
