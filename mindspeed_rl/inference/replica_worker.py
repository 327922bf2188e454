"""The workers of inference engines, one per device; `engine_group.running_engine_group` calls their methods."""

from __future__ import annotations

import itertools
from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING

from mindspeed_rl import platform
from mindspeed_rl.data.tokenizer import load_tokenizer
from mindspeed_rl.engine.parallel import RankInfo, init_process_group
from mindspeed_rl.inference.engine_interface import Delta, Request
from mindspeed_rl.inference.model_files import EngineSettings, open_model
from mindspeed_rl.rollout.requests import Sampling

if TYPE_CHECKING:
    from mindspeed_rl.inference.megatron_engine import MegatronEngine
    from mindspeed_rl.inference.vllm_text_engine import VllmTextEngine


class _ReplicaWorker:
    """One rank's part of an engine. Methods are collective over the ranks of the engine.

    Ranks count through tensor parallel ones first, then engines, then pipeline stages.
    """

    def __init__(self, engine: VllmTextEngine | MegatronEngine, settings: EngineSettings, rank: int) -> None:
        tp, engines = settings.tensor_parallel_size, settings.data_parallel_size
        self._engine = engine
        self._replica, self._num_replicas = rank // tp % engines, engines
        # the first pipeline stage has the results as well: every stage gets the logits
        self._is_output = rank % tp == 0 and rank < tp * engines
        self._deltas: Generator[Delta, None, None] = (delta for delta in ())

    def add_requests(self, requests: Sequence[Request], sampling: Sampling, stop_strings: Sequence[str]) -> None:
        """Start this replica's requests: every n-th from its index on."""
        self._deltas = self._engine.stream(requests[self._replica :: self._num_replicas], sampling, stop_strings)

    def take_tokens(self, count: int) -> list[Delta]:
        """Return the next deltas; fewer than `count` when all answers are complete, none on ranks without output.

        All ranks of a replica see the same deltas, so taking a fixed count keeps their engines in step.
        """
        deltas = list(itertools.islice(self._deltas, count))
        return deltas if self._is_output else []

    def cancel(self) -> None:
        """Cancel all requests."""
        self._deltas.close()

    def next_tokens(self, prompts: Sequence[list[int]], count: int) -> list[list[tuple[int, float]]]:
        """See `Engine.next_tokens`; every replica computes all."""
        return self._engine.next_tokens(prompts, count)

    def score(self, sequences: Sequence[list[int]], starts: Sequence[int]) -> list[list[tuple[float, bool]]]:
        """See `Engine.score`; every replica computes all."""
        return self._engine.score(sequences, starts)


class MegatronInferenceWorker(_ReplicaWorker):
    """One rank's part of a Megatron model."""

    def __init__(self, settings: EngineSettings, run_id: str, *, rank: int) -> None:
        """Join the process group, build the model and load its weights; collective over all workers.

        Args:
            settings: settings of the engines.
            run_id: unused; vLLM's workers need one.
            rank: rank of this worker.
        """
        # imports Megatron, which a worker of vLLM does not need
        from mindspeed_rl.inference.megatron_engine import MegatronEngine

        tokenizer = load_tokenizer(settings.tokenizer, trust_remote_code=settings.trust_remote_code)
        super().__init__(MegatronEngine(settings, open_model(settings.model, verified=True), tokenizer), settings, rank)


class InferenceWorker(_ReplicaWorker):
    """One rank's part of a vLLM engine."""

    def __init__(self, settings: EngineSettings, run_id: str, *, rank: int) -> None:
        """Join the process group, build the engine and load its weights; collective over all workers."""
        # imports vLLM, which a worker of Megatron does not need
        from mindspeed_rl.inference.vllm_text_engine import VllmTextEngine

        info = RankInfo.from_env()
        platform.current().set_device(info.local_rank)
        init_process_group(info, info.timeout_s)
        tokenizer = load_tokenizer(settings.tokenizer, trust_remote_code=settings.trust_remote_code)
        super().__init__(
            VllmTextEngine(settings, open_model(settings.model, verified=True), tokenizer, run_id=run_id), settings, rank
        )
