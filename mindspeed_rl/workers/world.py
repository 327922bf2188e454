"""How a worker process becomes a rank of the training world."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mindspeed_rl import adaptors, platform
from mindspeed_rl.config import MegatronConfig, RunConfig

if TYPE_CHECKING:
    from mindspeed_rl.engine.build import ModelPlan

#: seconds that ranks wait for each other in collectives before the run is given up
_COLLECTIVE_TIMEOUT_S = 1800.0


def prepare_process(cfg: RunConfig, role: MegatronConfig | None = None) -> None:
    """Platform and adaptors are in place; call it before anything imports Megatron.

    Args:
        role: keys of the model that the process holds; the actor's without.
    """
    platform.select(cfg.platform)
    adaptors.apply("train")
    adaptors.configure(role or cfg.actor_config)


def join_world(config: MegatronConfig, model_plan: ModelPlan) -> None:
    """Device, process groups and random generators are set up; collective over all workers.

    Reads RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT.
    """
    from mindspeed_rl.engine import parallel

    info = parallel.RankInfo.from_env()
    platform.current().set_device(info.local_rank)
    platform.current().set_deterministic(config.deterministic or config.npu_deterministic)
    parallel.init_process_group(info, _COLLECTIVE_TIMEOUT_S)
    parallel.init_model_parallel(config, model_plan.layout.vpp, _COLLECTIVE_TIMEOUT_S)
    parallel.seed_all(config.seed)
