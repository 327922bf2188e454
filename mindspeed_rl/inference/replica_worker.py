"""What one device's worker of an inference engine does, whatever the engine; `launch.InferenceGroup` calls its methods."""

from __future__ import annotations

import itertools
from collections.abc import Generator, Sequence
from typing import Protocol

from mindspeed_rl import platform
from mindspeed_rl.data.tokenizer import load_tokenizer
from mindspeed_rl.engine.parallel import RankInfo, init_process_group
from mindspeed_rl.inference.engine_interface import Piece, Request
from mindspeed_rl.inference.model_files import EngineSettings, open_model
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


class MegatronInferenceWorker(ReplicaWorker):
    """One rank's share of a Megatron model."""

    def __init__(self, settings: EngineSettings, run_id: str, *, rank: int) -> None:
        """Joins the others, builds the model and loads its weights; collective over all workers.

        Args:
            run_id: of no use here; vLLM's workers need one.
        """
        # with Megatron, which a worker of vLLM does without
        from mindspeed_rl.inference.megatron_engine import MegatronEngine

        tokenizer = load_tokenizer(settings.tokenizer, trust_remote_code=settings.trust_remote_code)
        super().__init__(MegatronEngine(settings, open_model(settings.model, verified=True), tokenizer), settings, rank)


class InferenceWorker(ReplicaWorker):
    """One rank's share of a vLLM engine."""

    def __init__(self, settings: EngineSettings, run_id: str, *, rank: int) -> None:
        """Joins the others, builds the engine and loads its weights; collective over all workers."""
        # with vLLM, which a worker of Megatron does without
        from mindspeed_rl.inference.vllm_text_engine import VllmTextEngine

        info = RankInfo.from_env()
        platform.current().set_device(info.local_rank)
        init_process_group(info, info.timeout_s)
        tokenizer = load_tokenizer(settings.tokenizer, trust_remote_code=settings.trust_remote_code)
        super().__init__(
            VllmTextEngine(settings, open_model(settings.model, verified=True), tokenizer, run_id=run_id), settings, rank
        )
