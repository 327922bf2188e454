"""One device's worker of Megatron models that generate."""

from __future__ import annotations

from mindspeed_rl.data.tokenizer import load_tokenizer
from mindspeed_rl.inference.engine_settings import EngineSettings
from mindspeed_rl.inference.megatron_engine import MegatronEngine
from mindspeed_rl.inference.model_files import open_model
from mindspeed_rl.inference.replica_worker import ReplicaWorker


class MegatronInferenceWorker(ReplicaWorker):
    """One rank's share of a Megatron model."""

    def __init__(self, settings: EngineSettings, run_id: str, *, rank: int) -> None:
        """Joins the others, builds the model and loads its weights; collective over all workers.

        Args:
            run_id: of no use here; vLLM's workers need one.
        """
        tokenizer = load_tokenizer(settings.tokenizer, trust_remote_code=settings.trust_remote_code)
        super().__init__(MegatronEngine(settings, open_model(settings.model, verified=True), tokenizer), settings, rank)
