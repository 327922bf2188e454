"""One device's worker of an inference engine; `launch.InferenceGroup` calls its methods."""

from __future__ import annotations

import itertools
from collections.abc import Generator, Sequence

from mindspeed_rl import platform
from mindspeed_rl.data.tokenizer import load_tokenizer
from mindspeed_rl.engine.parallel import RankInfo, init_process_group
from mindspeed_rl.inference.engine import InferenceEngine
from mindspeed_rl.inference.engine_settings import EngineSettings
from mindspeed_rl.inference.model_files import open_model
from mindspeed_rl.inference.requests import Piece, Request
from mindspeed_rl.rollout.requests import Sampling


class InferenceWorker:
    """One rank's share of an engine. Methods are collective over the ranks of the engine."""

    def __init__(self, settings: EngineSettings, run_id: str, *, rank: int) -> None:
        """Joins the others, builds the engine and loads its weights; collective over all workers."""
        info = RankInfo.from_env()
        platform.current().set_device(info.local_rank)
        init_process_group(info, info.timeout_s)
        tokenizer = load_tokenizer(settings.tokenizer, trust_remote_code=settings.trust_remote_code)
        self._engine = InferenceEngine(settings, open_model(settings.model), tokenizer, run_id=run_id)
        self._replica, self._replica_rank = divmod(rank, settings.tensor_parallel_size)
        self._num_replicas = settings.data_parallel_size
        self._pieces: Generator[Piece, None, None] = (piece for piece in ())

    def begin(self, requests: Sequence[Request], sampling: Sampling, stop_strings: Sequence[str]) -> None:
        """This replica's requests (every n-th from its number on) are under way."""
        self._pieces = self._engine.stream(requests[self._replica :: self._num_replicas], sampling, stop_strings)

    def take(self, count: int) -> list[Piece]:
        """The next pieces; fewer than `count` when all answers are through, none on ranks that do not hand results out.

        All ranks of a replica see the same pieces, so taking a fixed number keeps their engines in step.
        """
        pieces = list(itertools.islice(self._pieces, count))
        return pieces if self._replica_rank == 0 else []

    def cancel(self) -> None:
        """No request is under way any more."""
        self._pieces.close()

    def next_tokens(self, prompts: Sequence[list[int]], count: int) -> list[list[tuple[int, float]]]:
        """See `Engine.next_tokens`; every replica answers all."""
        return self._engine.next_tokens(prompts, count)
