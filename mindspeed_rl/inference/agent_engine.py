"""An engine whose answers come from an agent loop over another engine, for generate, chat and evaluate."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar, cast

from mindspeed_rl.config import RLConfig
from mindspeed_rl.inference.engine_interface import Delta, Engine, Finish, Request
from mindspeed_rl.inference.prompt_format import PromptFormat
from mindspeed_rl.rollout.agents import load_agent_loop
from mindspeed_rl.rollout.agents.conversation import TrajectoryLimits
from mindspeed_rl.rollout.agents.loop import AgentRunner, LoopSettings, Task
from mindspeed_rl.rollout.protocol import Generated, RolloutEngine
from mindspeed_rl.rollout.requests import Sampling
from mindspeed_rl.tools.environments import read_environment
from mindspeed_rl.tools.tasks import retrieve_exception
from mindspeed_rl.tools.toolbox import Toolbox
from mindspeed_rl.workers.agents import build_toolbox, choose_parser

_Result = TypeVar("_Result")
#: limit of the time between two deltas: after it an empty one comes, so that the reader can stop
_IDLE_LIMIT_S = 0.2


@dataclass(frozen=True)
class AgentSettings:
    """Configured loops and tools: the flags, under their names.

    Attributes:
        tools: a tool file, or the name of a built-in tool.
        agent_loop: a name or module:Class; None: by the other flags.
        tool_parser: see `tools.parsers`.
        multi_turn_scheduler, environment: module:Class, of the loops of these names.
        max_turns: largest number of turns of the model; None: as many as fit.
    """

    tools: str | None
    agent_loop: str | None
    tool_parser: str | None
    multi_turn_scheduler: str | None
    environment: str | None
    max_turns: int | None

    def build_rl_config(self) -> RLConfig:
        """Return the settings as keys of a run file."""
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
    """An `Engine` whose answers are the trajectories of an agent loop. Its tools end when it is closed.

    Turns that wait at the same time are one batch of the inner engine; a trajectory with a slow tool joins a later one.
    """

    def __init__(self, settings: AgentSettings, prompt_format: PromptFormat, max_model_len: int) -> None:
        """Start the tools and add them to prompts.

        Args:
            settings: settings of loop and tools.
            prompt_format: gets the schemas of the tools.
            max_model_len: largest length of prompt and all turns together.

        Raises:
            ValueError: the loop, a tool or the parser is wrong, or the chat template is missing.
        """
        if settings.environment is not None and read_environment(settings.environment).is_program:
            raise ValueError(
                f"--environment {settings.environment}: an environment of verifiers plays its own rows, not prompts"
            )
        rl = settings.build_rl_config()
        turns = prompt_format.turns(has_tools=settings.tools is not None)
        toolbox = None if settings.tools is None else build_toolbox(rl, prompt_format.tokenizer, turns)
        limits = TrajectoryLimits(max_model_len, max_model_len, max_model_len, settings.max_turns)
        loop_settings = LoopSettings(
            prompt_format.tokenizer,
            turns,
            limits,
            toolbox,
            multi_turn_scheduler=settings.multi_turn_scheduler,
            environment=settings.environment,
            tool_parser=choose_parser(rl, turns),
        )
        self._agents = AgentRunner(load_agent_loop(rl.agent_loop_name)(loop_settings), toolbox)
        self._engine: Engine  # set by `wrap`
        # one loop for all streams, since tools have open connections in it
        self._events = asyncio.new_event_loop()
        try:
            self._run(self._agents.start())
            if toolbox is not None:
                prompt_format.tools = self._run(_read_schemas(toolbox))
        except BaseException:
            self.close()
            raise

    def wrap(self, engine: Engine) -> AgentEngine:
        """Use this engine from now on; return self."""
        self._engine = engine
        return self

    def stream(self, requests: Sequence[Request], sampling: Sampling, stop_strings: Sequence[str] = ()) -> Iterator[Delta]:
        """See `Engine.stream`. A delta from tools ends an earlier turn of its answer.

        While only tools work, empty deltas come, so that the reader can stop.

        Raises:
            ValueError: stop strings or a choice of tokens are requested, which turns with calls do not support.
            RuntimeError: a plug-in failed a trajectory.
        """
        if stop_strings or any(request.allowed_ids for request in requests):
            raise ValueError("--tools and --agent-loop do not go with --stop, nor with answers of one token")
        return self._stream(requests, sampling)

    def _stream(self, requests: Sequence[Request], sampling: Sampling) -> Generator[Delta, None, None]:
        batches, queue = _Batches(self._engine, sampling), _DeltaQueue()

        async def start() -> list[asyncio.Task[None]]:
            engines = [_TrajectoryEngine(batches, index, queue.add) for index in range(len(requests))]
            return [asyncio.ensure_future(self._run_loop(*pair, sampling)) for pair in zip(engines, requests)]

        tasks = self._run(start())
        serving = self._events.create_task(batches.serve())

        def note_end(task: asyncio.Task[None]) -> None:
            retrieve_exception(task)  # the first one is raised below
            queue.changed.set()  # a task that fails adds no delta

        for task in (*tasks, serving):
            task.add_done_callback(note_end)
        try:
            while (deltas := self._run(queue.take(tasks, serving))) is not None:
                yield from deltas
        finally:
            # the reader may stop early: no task of this stream may run during the next one
            unfinished = [task for task in (*tasks, serving) if not task.done()]
            for task in unfinished:
                task.cancel()
            if unfinished:
                self._run(asyncio.wait(unfinished))

    async def _run_loop(self, engine: _TrajectoryEngine, request: Request, sampling: Sampling) -> None:
        max_tokens = sampling.max_tokens if request.max_tokens is None else request.max_tokens
        sampling = replace(sampling, max_tokens=max_tokens, images=request.images)
        task = Task(tuple(request.prompt_ids), sampling, request.seed, request.label, request.columns)
        # loops use only `generate` of an engine; the weights do not change here
        trajectory = await self._agents.sample(cast("RolloutEngine", engine), task)
        if trajectory.failure:
            raise RuntimeError(trajectory.failure)
        engine.end("length" if trajectory.finish == "length" else "stop")

    def next_tokens(self, prompts: Sequence[list[int]], count: int) -> list[list[tuple[int, float]]]:
        """See `Engine.next_tokens`."""
        return self._engine.next_tokens(prompts, count)

    def score(self, sequences: Sequence[list[int]], starts: Sequence[int]) -> list[list[tuple[float, bool]]]:
        """See `Engine.score`."""
        return self._engine.score(sequences, starts)

    def close(self) -> None:
        """End the tools; the inner engine is closed by its owner."""
        if not self._events.is_closed():
            try:
                self._run(self._agents.close())
            finally:
                self._run(self._events.shutdown_asyncgens())
                self._events.close()

    def _run(self, coroutine: Coroutine[object, None, _Result]) -> _Result:
        return self._events.run_until_complete(coroutine)


class _DeltaQueue:
    """Deltas that were not yielded yet."""

    def __init__(self) -> None:
        self._deltas: list[Delta] = []
        self.changed = asyncio.Event()

    def add(self, delta: Delta) -> None:
        """Add a delta."""
        self._deltas.append(delta)
        self.changed.set()

    async def take(self, tasks: Sequence[asyncio.Task[None]], serving: asyncio.Task[None]) -> list[Delta] | None:
        """Return the waiting deltas, an empty one where none comes for a while; None once all tasks have ended.

        Raises:
            Exception: the failure of a task, or of the engine.
        """
        if not self._deltas:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self.changed.wait(), _IDLE_LIMIT_S)
            self.changed.clear()
        for task in (*tasks, serving):
            if task.done():
                task.result()
        deltas, self._deltas = self._deltas, []
        if not deltas and all(task.done() for task in tasks):
            return None
        return deltas or [Delta(0, [], [], None)]


class _TrajectoryEngine:
    """The inner engine for one trajectory: a request at a time, whose deltas are passed on at once.

    The end of a turn waits until the next turn or the end of the answer.
    """

    def __init__(self, batches: _Batches, index: int, output: Callable[[Delta], None]) -> None:
        self._batches, self._index, self._output = batches, index, output
        self._context: tuple[int, ...] = ()  # tokens that the model has read and generated
        self._last: Delta | None = None

    async def generate(
        self, prompt_ids: tuple[int, ...], sampling: Sampling, seed: int, partial: Generated | None = None
    ) -> Generated:
        """See `rollout.protocol.RolloutEngine`."""
        assert partial is None  # nothing is interrupted here
        if self._last is not None:
            self._output(self._last)
            length = len(self._context)
            # else the template has rendered all of it again
            added = prompt_ids[length:] if prompt_ids[:length] == self._context else ()
            self._output(Delta(self._index, list(added), [0.0] * len(added), None, from_tools=True))
        request = Request(list(prompt_ids), seed, max_tokens=sampling.max_tokens, images=sampling.images)
        response = await self._batches.generate(request, self._pass_on)
        self._context = (*prompt_ids, *response.token_ids)
        return response

    def end(self, finish: Finish) -> None:
        """End the answer: its last turn is complete."""
        last = Delta(self._index, [], [], None) if self._last is None else self._last
        self._output(replace(last, finish=finish))

    def _pass_on(self, delta: Delta) -> None:
        delta = replace(delta, index=self._index)
        if delta.finish is None:
            self._output(delta)
        else:
            self._last = replace(delta, finish=None)


class _Batches:
    """Sends the requests that wait at the same time to the inner engine together."""

    def __init__(self, engine: Engine, sampling: Sampling) -> None:
        self._engine, self._sampling = engine, sampling
        self._waiting: list[tuple[Request, Callable[[Delta], None], asyncio.Future[Generated]]] = []
        self._requested = asyncio.Event()

    async def generate(self, request: Request, output: Callable[[Delta], None]) -> Generated:
        """Return the complete answer; `output` gets every delta."""
        answer: asyncio.Future[Generated] = asyncio.get_running_loop().create_future()
        self._waiting.append((request, output, answer))
        self._requested.set()
        return await answer

    async def serve(self) -> None:
        """Send requests to the engine until this is cancelled."""
        while True:
            await self._requested.wait()
            self._requested.clear()
            batch, self._waiting = self._waiting, []
            generated: list[tuple[list[int], list[float]]] = [([], []) for _ in batch]
            for delta in self._engine.stream([request for request, _, _ in batch], self._sampling):
                tokens, log_probs = generated[delta.index]
                tokens += delta.token_ids
                log_probs += delta.log_probs
                _, output, answer = batch[delta.index]
                if not answer.done():  # else it was cancelled
                    output(delta)
                    if delta.finish is not None:
                        # version 0 throughout, as the weights do not change
                        answer.set_result(Generated(tuple(tokens), tuple(log_probs), (0,) * len(tokens), delta.finish))
                await asyncio.sleep(0)  # tools run, and deltas are read, while the engine works


async def _read_schemas(toolbox: Toolbox) -> list[dict[str, Any]]:
    tools = toolbox.open({})
    schemas = tools.schemas
    await tools.close()
    return schemas
