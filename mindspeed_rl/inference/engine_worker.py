"""One device's worker of vLLM engines."""

from __future__ import annotations

import os

import torch.distributed as dist

from mindspeed_rl import platform
from mindspeed_rl.data.tokenizer import load_tokenizer
from mindspeed_rl.inference.engine import InferenceEngine
from mindspeed_rl.inference.engine_settings import EngineSettings
from mindspeed_rl.inference.model_files import open_model
from mindspeed_rl.inference.replica_worker import ReplicaWorker


class InferenceWorker(ReplicaWorker):
    """One rank's share of a vLLM engine."""

    def __init__(self, settings: EngineSettings, run_id: str, *, rank: int) -> None:
        """Joins the others, builds the engine and loads its weights; collective over all workers."""
        device = platform.current()
        device.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group(device.collective_backend)
        tokenizer = load_tokenizer(settings.tokenizer, trust_remote_code=settings.trust_remote_code)
        super().__init__(InferenceEngine(settings, open_model(settings.model), tokenizer, run_id=run_id), settings, rank)
