"""A rollout server's engine and service, in whichever process they are to live.

Importing this imports vLLM, so `adaptors.apply("rollout")` must have run.
"""

from __future__ import annotations

import os

from mindspeed_rl import adaptors
from mindspeed_rl.adaptors import vllm_async
from mindspeed_rl.config.placement import rollout_layout
from mindspeed_rl.rollout.arguments import engine_arguments
from mindspeed_rl.rollout.shape import CacheShape
from mindspeed_rl.serving.async_engine import AsyncEngine
from mindspeed_rl.serving.engine_extension import OWNER_VARIABLE, PLATFORM_VARIABLE, owner_of_engines
from mindspeed_rl.serving.server_process import ServerSettings
from mindspeed_rl.serving.service import RolloutService

_EXTENSION = "mindspeed_rl.serving.engine_extension.EngineExtension"


def open_engine(settings: ServerSettings) -> AsyncEngine:
    """The engine of a server; its processes end with this one, however it ends."""
    os.environ[OWNER_VARIABLE], os.environ[PLATFORM_VARIABLE] = owner_of_engines(), settings.platform
    generate = settings.generate
    changes = {
        "distributed_executor_backend": "mp" if generate.infer_tensor_parallel_size > 1 else "uni",
        "worker_extension_cls": _EXTENSION,
        # nobody else is on the devices, so nothing is to be given back
        "enable_sleep_mode": False,
    }
    if settings.with_tokenizer:
        changes["skip_tokenizer_init"] = False
    if settings.load_weights:
        changes["load_format"] = "auto"
    engine = AsyncEngine(
        engine_arguments(
            settings.hf_folder,
            generate,
            adaptors.engine_hooks(),
            rollout_layout(generate, generate.infer_tensor_parallel_size),
            whole_distribution=settings.whole_distribution,
            kv_bytes_per_token=CacheShape.of(settings.hf_folder).bytes_per_token(2 if generate.dtype == "bfloat16" else 4),
            changes=changes,
        )
    )
    vllm_async.unlink_segments(vllm_async.COMMUNICATOR)
    if settings.load_weights:
        engine.version = 0
    return engine


def open_service(settings: ServerSettings, engine: AsyncEngine | None = None) -> RolloutService:
    """The service of a server.

    Args:
        engine: that it shares with other interfaces; None for one of its own.
    """
    generate = settings.generate
    facts = {
        "num_workers": generate.infer_tensor_parallel_size,
        "dtype": generate.dtype,
        "max_model_len": generate.max_model_len,
        "whole_distribution": settings.whole_distribution,
    }
    return RolloutService(engine or open_engine(settings), facts)
