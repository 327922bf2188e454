"""The rollout engine on the device that trains: this worker steps vLLM's engine, and the ranks of its replica step along."""

from __future__ import annotations

import asyncio
import itertools
import pickle
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mindspeed_rl import platform
from mindspeed_rl.rollout.protocol import Continuation, Finish, Generated, PauseMode, continuation
from mindspeed_rl.rollout.requests import Completion, Sampling

if TYPE_CHECKING:
    from mindspeed_rl.rollout.vllm_engine import VllmEngine

Answer = TypeVar("Answer")

#: turns of the event loop before a step: what was asked for at once, by coroutines that start coroutines, enters the same step
_TURNS = 4
#: what the ranks of a replica do behind the commands
_NOTHING, _STEP, _END = 0, 1, 2


@dataclass
class _Running:
    """A request in the engine.

    Attributes:
        spans: (number of its first token, version of the weights) from there on.
    """

    answer: asyncio.Future[Generated]
    spans: list[tuple[int, int]]
    begun: bool = False


@dataclass(frozen=True)
class _Begin:
    number: str
    request: Continuation


@dataclass(frozen=True)
class _Drop:
    numbers: tuple[str, ...]


@dataclass(frozen=True)
class _Call:
    """A method of the engine, without arguments."""

    method: str


Command = _Begin | _Drop | _Call


@dataclass
class InProcessEngine:
    """A `RolloutEngine` on the vLLM engine of this rank; see there for what the coroutines do.

    What asks for responses runs on the first rank of the replica, inside `run`, which all its ranks call. Each step the first
    rank tells the others which requests have come and gone, by one broadcast, so all schedule alike. Requests that are frozen
    when `run` ends go on in the next one.

    Attributes:
        engine: this rank's.
        group: the ranks of the replica; None where it is the only one.
        first: global number of the replica's first rank.
    """

    engine: VllmEngine
    group: dist.ProcessGroup | None = None
    first: int = 0
    _running: dict[str, _Running] = field(default_factory=dict, init=False)
    _commands: list[Command] = field(default_factory=list, init=False)
    _numbers: Iterable[int] = field(default_factory=itertools.count, init=False)
    _frozen: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._open = asyncio.Event()  # requests are taken
        self._open.set()
        self._changed = asyncio.Event()  # there may be something to step, or nothing left

    # ------------------------------------------------------------------ the ranks of a replica together

    def run(self, work: Callable[[], Coroutine[Any, Any, Answer]]) -> Answer | None:
        """What `work` returns on the first rank of the replica, None on the others. Collective over the replica.

        No generator is drawn from but the requests' own.
        """
        with platform.current().kept_rng_state():  # vLLM draws a seed for every token, also where the request has its own
            if self._peers and dist.get_rank() != self.first:
                self._follow()
                return None
            return self._loop.run_until_complete(self._lead(work()))

    def aside(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """`work` is done on the first rank of the replica; the engine makes no step for it. Not collective."""
        if self.group is None or dist.get_rank() == self.first:
            self._loop.run_until_complete(work())

    def close(self) -> None:
        """Nothing can be asked any more."""
        self._loop.close()

    @property
    def _peers(self) -> bool:
        return self.group is not None and self.group.size() > 1

    async def _lead(self, work: Coroutine[Any, Any, Answer]) -> Answer:
        """Steps the engine while `work` wants something of it."""
        task = asyncio.ensure_future(work)
        task.add_done_callback(lambda _: self._changed.set())
        try:
            while True:
                for _ in range(_TURNS):
                    await asyncio.sleep(0)
                if self.engine.layout.in_step:
                    if not self.engine.anyone_works(busy=not task.done()):
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
            self._tell(_END)
        return task.result()

    def _step(self) -> None:
        self._tell(_STEP)
        for number, completion in self.engine.step():
            running = self._running.pop(number)
            if not running.answer.done():
                finish: Finish = "length" if completion.truncated else "stop"
                running.answer.set_result(_with_versions(completion, running.spans, finish))
        self._changed.set()

    def _tell(self, then: int = _NOTHING) -> None:
        """The commands that came in are done, here and on the other ranks of the replica, who go on with `then`."""
        commands, self._commands = self._commands, []
        if self._peers:
            content = pickle.dumps(commands) if commands else b""
            # the others must know the size; without commands, as in most steps, this is the only message
            header = torch.tensor([len(content), then])
            dist.broadcast(header, src=self.first, group=self.group)
            if content:
                dist.broadcast(torch.frombuffer(bytearray(content), dtype=torch.uint8), src=self.first, group=self.group)
        self._do(commands)

    def _follow(self) -> None:
        """Steps as the first rank does, until it is through."""
        while True:
            header = torch.zeros(2, dtype=torch.int64)
            dist.broadcast(header, src=self.first, group=self.group)
            size, then = header.tolist()
            if size:
                content = torch.empty(size, dtype=torch.uint8)
                dist.broadcast(content, src=self.first, group=self.group)
                self._do(pickle.loads(content.numpy().tobytes()))  # by a process of this very run
            if then == _END:
                return
            if then == _STEP:
                self.engine.step()

    def _do(self, commands: Iterable[Command]) -> None:
        for command in commands:
            match command:
                case _Begin(number, request):
                    self.engine.begin(number, request.prompt_ids, request.sampling, request.seed)
                case _Drop(numbers):
                    self.engine.drop(numbers)
                case _Call(method):
                    getattr(self.engine, method)()
            if isinstance(command, _Begin) and command.number in self._running:
                self._running[command.number].begun = True

    # ------------------------------------------------------------------ the protocol

    async def generate(
        self, prompt_ids: tuple[int, ...], sampling: Sampling, seed: int, begun: Generated | None = None
    ) -> Generated:
        request = continuation(prompt_ids, sampling, seed, begun)
        if request is None:
            assert begun is not None
            return replace(begun, finish="length")
        self.engine.check(len(request.prompt_ids))
        # before the version is read: a pause ends with other weights
        await self._open.wait()
        number = str(next(iter(self._numbers)))
        running = _Running(asyncio.get_running_loop().create_future(), [(0, self.engine.weight_version)])
        self._running[number] = running
        self._commands.append(_Begin(number, request))
        self._changed.set()
        try:
            piece = await running.answer
        except asyncio.CancelledError:
            if self._running.pop(number, None) is not None:
                self._commands.append(_Drop((number,)))
            raise
        return piece if begun is None else begun.followed_by(piece)

    async def pause(self, mode: PauseMode) -> None:
        self._open.clear()
        if mode == "keep":
            self.engine.check_freezable()
            self._frozen = True
        elif mode == "abort":
            self._abort()
        while self._running and mode == "wait":
            await asyncio.wait([running.answer for running in self._running.values()], return_when=asyncio.FIRST_COMPLETED)

    def _abort(self) -> None:
        """Everybody who waits has what there is."""
        nothing = Completion([], [], truncated=False)
        for number, running in self._running.items():
            # the command that begins it may not have been done yet
            completion = self.engine.progress(number) if running.begun else nothing
            if not running.answer.done():
                running.answer.set_result(_with_versions(completion, running.spans, "aborted"))
        self._commands.append(_Drop(tuple(self._running)))
        self._running.clear()

    async def resume(self) -> None:
        self._frozen = False
        self._open.set()
        self._changed.set()

    async def update_weights(self, version: int, named: Iterable[tuple[str, Tensor]] | None = None) -> None:
        if self._peers or named is None:
            raise RuntimeError("ranks that share a rollout engine take weights together, by `load`, and from the trainer alone")
        self.load(named, version)

    async def release(self) -> None:
        self._commands.append(_Call("release_memory"))
        # at once: no step follows that would carry it
        self._tell()

    async def restore(self) -> None:
        self._commands += [_Call("restore_weights"), _Call("restore_cache")]
        self._tell()

    # ------------------------------------------------------------------ weights, on every rank of the replica

    def load(self, named: Iterable[tuple[str, Tensor]], version: int) -> None:
        """The engine holds these weights, and what it works on goes on with them.

        Between two `run`s; inside one only where this rank is alone.
        """
        self.engine.load_weights(named, version)
        self._go_on_with(version)

    def write(self, write: Callable[[nn.Module], None], version: int) -> None:
        """As `load`, by a function that fills the engine's model in place; see `VllmEngine.write_weights`."""
        self.engine.write_weights(write, version)
        self._go_on_with(version)

    def _go_on_with(self, version: int) -> None:
        for number, running in self._running.items():
            running.spans.append((len(self.engine.progress(number).token_ids) if running.begun else 0, version))


def _with_versions(completion: Completion, spans: list[tuple[int, int]], finish: Finish) -> Generated:
    """The tokens with the version of the last span that begins at or before each."""
    versions: list[int] = []
    ends = [start for start, _ in spans[1:]] + [len(completion.token_ids)]
    for (_, version), end in zip(spans, ends):
        versions += [version] * (end - len(versions))
    return Generated(tuple(completion.token_ids), tuple(completion.log_probs), tuple(versions), finish, completion.routing)
