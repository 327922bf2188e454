"""The rollout engine on the device that trains: one worker steps an engine, and the ranks of its replica follow."""

from __future__ import annotations

import asyncio
import itertools
import pickle
from collections.abc import Callable, Coroutine, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mindspeed_rl import platform
from mindspeed_rl.rollout.protocol import Continuation, Finish, Generated, PauseMode
from mindspeed_rl.rollout.requests import Completion, Sampling
from mindspeed_rl.rollout.step_engine import StepEngine

_Result = TypeVar("_Result")

#: turns of the event loop before a step: requests made at once, by coroutines that start coroutines, enter the same step
_TURNS = 4
#: what the ranks of a replica do after the commands
_NOTHING, _STEP, _END = 0, 1, 2


@dataclass
class _Running:
    """A request in the engine.

    Attributes:
        spans: (index of its first token, version of the weights) of each span of tokens.
        started: True once the command that adds it was executed.
    """

    response: asyncio.Future[Generated]
    spans: list[tuple[int, int]]
    started: bool = False


@dataclass(frozen=True)
class _Add:
    name: str
    request: Continuation


@dataclass(frozen=True)
class _Abort:
    names: tuple[str, ...]


_Command = _Add | _Abort | Literal["release", "weights", "cache"]


@dataclass
class InProcessEngine:
    """A `RolloutEngine` on the engine of this rank; `RolloutEngine` describes the coroutines.

    Requests are made on the first rank of the replica, inside `run`, which all its ranks call. Before each step the first rank
    broadcasts which requests were added and aborted, so all ranks schedule alike. Requests that are frozen when `run` ends
    continue in the next one.

    Attributes:
        engine: this rank's.
        group: the ranks of the replica; None where it has one rank.
        first: global index of the replica's first rank.
    """

    engine: StepEngine
    group: dist.ProcessGroup | None = None
    first: int = 0
    _running: dict[str, _Running] = field(default_factory=dict, init=False)
    _commands: list[_Command] = field(default_factory=list, init=False)
    _names: Iterator[str] = field(default_factory=lambda: map(str, itertools.count()), init=False)
    _frozen: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self._has_peers = self.group is not None and self.group.size() > 1
        self._loop = asyncio.new_event_loop()
        self._open = asyncio.Event()  # requests are taken
        self._open.set()
        self._changed = asyncio.Event()  # there may be something to step, or nothing left

    # ------------------------------------------------------------------ the ranks of a replica together

    def run(self, work: Callable[[], Coroutine[object, None, _Result]]) -> _Result | None:
        """Return the result of `work` on the first rank of the replica, None on the others. Collective over the replica.

        No generator is used but the requests' own.
        """
        with platform.current().preserve_rng_state():  # vLLM draws a seed for every token, also where the request has its own
            if self._has_peers and dist.get_rank() != self.first:
                self._repeat_steps()
                return None
            return self._loop.run_until_complete(self._lead(work()))

    def run_without_steps(self, work: Callable[[], Coroutine[object, None, None]]) -> None:
        """Run `work` on the first rank of the replica without a step of the engine. Not collective."""
        if self.group is None or dist.get_rank() == self.first:
            self._loop.run_until_complete(work())

    async def _lead(self, work: Coroutine[object, None, _Result]) -> _Result:
        """Step the engine while `work` has requests."""
        task = asyncio.ensure_future(work)
        task.add_done_callback(lambda _: self._changed.set())
        try:
            while True:
                for _ in range(_TURNS):
                    await asyncio.sleep(0)
                if self.engine.layout.in_step:
                    if not self.engine.has_unfinished(busy=not task.done()):
                        break
                    self._step()
                    continue
                if task.done():
                    break
                if self._running and not self._frozen:
                    self._step()
                else:
                    self._changed.clear()
                    await self._changed.wait()
        finally:
            task.cancel()
            # also after a failure: the other ranks wait in a broadcast
            self._broadcast(_END)
        return task.result()

    def _step(self) -> None:
        self._broadcast(_STEP)
        for name, completion in self.engine.step():
            running = self._running.pop(name)
            if not running.response.done():
                finish: Finish = "length" if completion.truncated else "stop"
                running.response.set_result(_add_versions(completion, running.spans, finish))
        self._changed.set()

    def _broadcast(self, then: int = _NOTHING) -> None:
        """Execute the waiting commands, here and on the other ranks of the replica, which do `then` after them."""
        commands, self._commands = self._commands, []
        if self._has_peers:
            content = pickle.dumps(commands) if commands else b""
            # the others need the size first; without commands, as in most steps, this is the only message
            header = torch.tensor([len(content), then])
            dist.broadcast(header, src=self.first, group=self.group)
            if content:
                dist.broadcast(torch.frombuffer(bytearray(content), dtype=torch.uint8), src=self.first, group=self.group)
        self._execute(commands)

    def _repeat_steps(self) -> None:
        """Step as the first rank does, until its `run` ends."""
        while True:
            header = torch.zeros(2, dtype=torch.int64)
            dist.broadcast(header, src=self.first, group=self.group)
            size, then = header.tolist()
            if size:
                content = torch.empty(size, dtype=torch.uint8)
                dist.broadcast(content, src=self.first, group=self.group)
                self._execute(pickle.loads(content.numpy().tobytes()))  # by a process of this very run
            if then == _END:
                return
            if then == _STEP:
                self.engine.step()

    def _execute(self, commands: Iterable[_Command]) -> None:
        for command in commands:
            match command:
                case _Add(name, request):
                    self.engine.add_request(name, request.prompt_ids, request.sampling, request.seed)
                    if name in self._running:
                        self._running[name].started = True
                case _Abort(names):
                    self.engine.abort(names)
                case "release":
                    self.engine.release_memory()
                case "weights" | "cache":
                    self.engine.restore_memory(command)

    # ------------------------------------------------------------------ the protocol

    async def generate(
        self, prompt_ids: tuple[int, ...], sampling: Sampling, seed: int, partial: Generated | None = None
    ) -> Generated:
        request = Continuation.build(prompt_ids, sampling, seed, partial)
        if request is None:
            assert partial is not None
            return replace(partial, finish="length")
        self.engine.check_request(len(request.prompt_ids), request.sampling)
        # before the version is read: other weights may come while the engine is paused
        await self._open.wait()
        name = next(self._names)
        running = _Running(asyncio.get_running_loop().create_future(), [(0, self.engine.weight_version)])
        self._running[name] = running
        self._commands.append(_Add(name, request))
        self._changed.set()
        try:
            rest = await running.response
        except asyncio.CancelledError:
            if self._running.pop(name, None) is not None:
                self._commands.append(_Abort((name,)))
            raise
        return rest if partial is None else partial.concat(rest)

    async def pause(self, mode: PauseMode) -> None:
        self._open.clear()
        if mode == "keep":
            self.engine.check_freezable()
            self._frozen = True
        elif mode == "abort":
            for name, running in self._running.items():
                # the command that adds it may still be waiting
                completion = Completion([], [], truncated=False)
                if running.started:
                    completion = self.engine.partial_completion(name)
                if not running.response.done():
                    running.response.set_result(_add_versions(completion, running.spans, "aborted"))
            self._commands.append(_Abort(tuple(self._running)))
            self._running.clear()
        while self._running and mode == "wait":
            waiting = [running.response for running in self._running.values()]
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)

    async def resume(self) -> None:
        self._frozen = False
        self._open.set()
        self._changed.set()

    async def update_weights(self, version: int, named: Iterable[tuple[str, Tensor]] | None = None) -> None:
        """Sample later tokens with these weights, and report their version. The engine is paused; cached prefixes are dropped.

        Args:
            version: index of the weights, as the trainer counts.
            named: every full tensor under its HF checkpoint name; None where the engine's workers take them from a process
                group with the trainers.

        Raises:
            RuntimeError: a parameter was given no tensor.
        """
        if self._has_peers or named is None:
            raise RuntimeError("ranks that share a rollout engine take weights together, by `load`, and only from the trainer")
        self.load(named, version)

    async def release(self) -> None:
        """Free the device's memory; the engine is paused and has no requests, neither running nor frozen."""
        self._commands.append("release")
        # at once: no step follows that would carry it
        self._broadcast()

    async def restore(self) -> None:
        """Allocate the memory again; weights are undefined until `update_weights`."""
        self._commands.append("weights")
        self._commands.append("cache")
        self._broadcast()

    # ------------------------------------------------------------------ weights, on every rank of the replica

    def load(self, weights: Iterable[tuple[str, Tensor]] | Callable[[nn.Module], None], version: int) -> None:
        """Replace the engine's weights; frozen requests continue with them.

        Called between two `run`s; inside one only where the replica has one rank.

        Args:
            weights: every full tensor under its HF checkpoint name, or a function that fills the engine's model in place; see
                `StepEngine.load_weights`.
        """
        self.engine.load_weights(weights, version)
        for name, running in self._running.items():
            running.spans.append((len(self.engine.partial_completion(name).token_ids) if running.started else 0, version))


def _add_versions(completion: Completion, spans: list[tuple[int, int]], finish: Finish) -> Generated:
    """Return the tokens, each with the version of the last span that starts at or before it."""
    versions: list[int] = []
    ends = [start for start, _ in spans[1:]] + [len(completion.token_ids)]
    for (_, version), end in zip(spans, ends):
        versions += [version] * (end - len(versions))
    return Generated(tuple(completion.token_ids), tuple(completion.log_probs), tuple(versions), finish, completion.routing)
