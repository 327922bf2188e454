"""What one device's worker of an inference engine does, whatever the engine; `launch.InferenceGroup` calls its methods."""

from __future__ import annotations

import itertools
from collections.abc import Generator, Sequence
from typing import Protocol

from mindspeed_rl.inference.engine_settings import EngineSettings
from mindspeed_rl.inference.requests import Piece, Request
from mindspeed_rl.rollout.requests import Sampling


class RankEngine(Protocol):
    """One rank's share of an `Engine`."""

    def stream(
        self, requests: Sequence[Request], sampling: Sampling, stop_strings: Sequence[str] = ()
    ) -> Generator[Piece, None, None]: ...

    def next_tokens(self, prompts: Sequence[list[int]], count: int) -> list[list[tuple[int, float]]]: ...

    def score(self, sequences: Sequence[list[int]], starts: Sequence[int]) -> list[list[tuple[float, bool]]]: ...


class ReplicaWorker:
    """One rank's share of an engine. Methods are collective over the ranks of the engine.

    Ranks count through tensor parallel ones first, then engines, then pipeline stages.
    """

    def __init__(self, engine: RankEngine, settings: EngineSettings, rank: int) -> None:
        tp, engines = settings.tensor_parallel_size, settings.data_parallel_size
        self._engine = engine
        self._replica, self._num_replicas = rank // tp % engines, engines
        # the first pipeline stage has the results as well: every stage is given the logits
        self._is_output = rank % tp == 0 and rank < tp * engines
        self._pieces: Generator[Piece, None, None] = (piece for piece in ())

    def begin(self, requests: Sequence[Request], sampling: Sampling, stop_strings: Sequence[str]) -> None:
        """This replica's requests (every n-th from its number on) are under way."""
        self._pieces = self._engine.stream(requests[self._replica :: self._num_replicas], sampling, stop_strings)

    def take(self, count: int) -> list[Piece]:
        """The next pieces; fewer than `count` when all answers are through, none on ranks that do not hand results out.

        All ranks of a replica see the same pieces, so taking a fixed number keeps their engines in step.
        """
        pieces = list(itertools.islice(self._pieces, count))
        return pieces if self._is_output else []

    def cancel(self) -> None:
        """No request is under way any more."""
        self._pieces.close()

    def next_tokens(self, prompts: Sequence[list[int]], count: int) -> list[list[tuple[int, float]]]:
        """See `Engine.next_tokens`; every replica answers all."""
        return self._engine.next_tokens(prompts, count)

    def score(self, sequences: Sequence[list[int]], starts: Sequence[int]) -> list[list[tuple[float, bool]]]:
        """See `Engine.score`; every replica answers all."""
        return self._engine.score(sequences, starts)
