"""One device's worker of vLLM engines."""

from __future__ import annotations

from mindspeed_rl import platform
from mindspeed_rl.data.tokenizer import load_tokenizer
from mindspeed_rl.engine.parallel import RankInfo, init_process_group
from mindspeed_rl.inference.engine import InferenceEngine
from mindspeed_rl.inference.engine_settings import EngineSettings
from mindspeed_rl.inference.model_files import open_model
from mindspeed_rl.inference.replica_worker import ReplicaWorker


class InferenceWorker(ReplicaWorker):
    """One rank's share of a vLLM engine."""

    def __init__(self, settings: EngineSettings, run_id: str, *, rank: int) -> None:
        """Joins the others, builds the engine and loads its weights; collective over all workers."""
        info = RankInfo.from_env()
        platform.current().set_device(info.local_rank)
        init_process_group(info, info.timeout_s)
        tokenizer = load_tokenizer(settings.tokenizer, trust_remote_code=settings.trust_remote_code)
        super().__init__(
            InferenceEngine(settings, open_model(settings.model, verified=True), tokenizer, run_id=run_id), settings, rank
        )
