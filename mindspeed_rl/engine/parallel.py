"""The process groups of a run and where this process stands in them."""

from __future__ import annotations

import datetime
import os
import random
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

from mindspeed_rl import platform
from mindspeed_rl.config import MegatronConfig
from mindspeed_rl.models.plan import expert_sizes
from mindspeed_rl.platform.rendezvous import meeting_store

#: seconds that ranks wait for each other in collectives before the run is given up, where the environment does not say
_COLLECTIVE_TIMEOUT_S = 1800.0


@dataclass(frozen=True)
class RankInfo:
    """This process among all processes of the training world.

    Attributes:
        timeout_s: longest wait for each other in a collective.
    """

    rank: int
    world_size: int
    local_rank: int
    timeout_s: float = _COLLECTIVE_TIMEOUT_S

    @classmethod
    def from_env(cls) -> RankInfo:
        """From the variables that torchrun and our launcher set.

        Raises:
            ValueError: a variable is missing.
        """
        try:
            return cls(
                int(os.environ["RANK"]),
                int(os.environ["WORLD_SIZE"]),
                int(os.environ.get("LOCAL_RANK", "0")),
                float(os.environ.get("MINDSPEED_RL_COLLECTIVE_TIMEOUT_S", _COLLECTIVE_TIMEOUT_S)),
            )
        except KeyError as error:
            raise ValueError(
                f"environment: {error} is not set; start ranks through `mindspeed-rl train` or torchrun."
            ) from None


def init_distributed(config: MegatronConfig, num_chunks: int) -> None:
    """Sets up device, process groups and random generators of this rank; collective over the training world.

    Reads RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT and MINDSPEED_RL_COLLECTIVE_TIMEOUT_S.

    Args:
        num_chunks: model chunks a pipeline stage holds, from the layout of the model's plan.

    Raises:
        ValueError: a variable is missing, or the world cannot hold the layout.
    """
    info = RankInfo.from_env()
    # before the process group, whose communicators belong to the current device
    platform.current().set_device(info.local_rank)
    platform.current().set_deterministic(config.deterministic or config.npu_deterministic)
    init_process_group(info, info.timeout_s)
    init_model_parallel(config, num_chunks, info.timeout_s)
    seed_all(config.seed)


def init_process_group(info: RankInfo, timeout_s: float) -> None:
    """Joins the training world at MASTER_ADDR:MASTER_PORT; collective over all its ranks."""
    if not dist.is_initialized():
        master = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        dist.init_process_group(
            platform.current().collective_backend,
            store=meeting_store(*master, info.world_size, serves=info.rank == 0, timeout_s=timeout_s),
            rank=info.rank,
            world_size=info.world_size,
            timeout=datetime.timedelta(seconds=timeout_s),
        )


def init_model_parallel(config: MegatronConfig, num_chunks: int, timeout_s: float) -> None:
    """Creates Megatron's process groups for this layout; collective. Does nothing when they exist.

    Args:
        num_chunks: model chunks a pipeline stage holds, from the layout of the model's plan.

    Raises:
        ValueError: the world cannot hold the layout.
    """
    model_size = config.tensor_model_parallel_size * config.pipeline_model_parallel_size * config.context_parallel_size
    if dist.get_world_size() % model_size:
        raise ValueError(
            f"world size {dist.get_world_size()} is not a multiple of tensor ({config.tensor_model_parallel_size}) x pipeline "
            f"({config.pipeline_model_parallel_size}) x context ({config.context_parallel_size}) parallel size."
        )
    if parallel_state.model_parallel_is_initialized():
        return
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=config.tensor_model_parallel_size,
        pipeline_model_parallel_size=config.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=num_chunks if num_chunks > 1 else None,
        context_parallel_size=config.context_parallel_size,
        expert_model_parallel_size=expert_sizes(config)[0],
        expert_tensor_parallel_size=expert_sizes(config)[1],
        order=rank_order(config),
        # Megatron takes whole minutes
        distributed_timeout_minutes=max(1, int(timeout_s // 60)),
    )


def rank_order(config: MegatronConfig) -> str:
    """In which order ranks count through the parallel dimensions, fastest first, in Megatron's words."""
    return "tp-cp-ep-pp-dp" if config.use_tp_pp_dp_mapping else "tp-cp-ep-dp-pp"


def seed_all(seed: int) -> None:
    """Seeds Python, NumPy, torch and Megatron's tensor-parallel generators, per pipeline stage as Megatron does."""
    seed = seed + 100 * parallel_state.get_pipeline_model_parallel_rank()
    random.seed(seed)
    # NumPy takes 32 bits
    np.random.seed(seed % (1 << 32))
    torch.manual_seed(seed)
    tensor_parallel.model_parallel_cuda_manual_seed(seed)


def rng_tracker() -> CudaRNGStatesTracker:
    """Megatron's named generators, as `seed_all` has set them."""
    return cast(CudaRNGStatesTracker, tensor_parallel.get_cuda_rng_tracker())  # Megatron's global is declared None


def is_data_source() -> bool:
    """True on the one rank of each model replica that fetches its rows (first TP, PP and CP rank)."""
    return (
        parallel_state.get_tensor_model_parallel_rank() == 0
        and parallel_state.get_context_parallel_rank() == 0
        and parallel_state.is_pipeline_first_stage(ignore_virtual=True)
    )


def is_stage_source() -> bool:
    """True on the first TP and CP rank of each pipeline stage of a model replica."""
    return parallel_state.get_tensor_model_parallel_rank() == 0 and parallel_state.get_context_parallel_rank() == 0


def is_output_source() -> bool:
    """True on the one rank of each model replica that hands results out (first TP and CP rank of the last stage)."""
    return (
        parallel_state.get_tensor_model_parallel_rank() == 0
        and parallel_state.get_context_parallel_rank() == 0
        and parallel_state.is_pipeline_last_stage(ignore_virtual=True)
    )


class ControlGroup:
    """Small Python objects between the ranks of one model replica, over gloo whatever the device backend is."""

    def __init__(self, *, of_stage: bool = False) -> None:
        """Collective over the world: every rank takes part in creating every group.

        Args:
            of_stage: between the ranks of one pipeline stage of the replica alone, from its first TP and CP rank.
        """
        replicas: dict[tuple[int, int], list[int]] = {}
        stage = parallel_state.get_pipeline_model_parallel_rank() if of_stage else 0
        mine = parallel_state.get_data_parallel_rank(), stage
        ranks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(ranks, (mine, is_stage_source() if of_stage else is_data_source()))
        for rank, (replica, _) in enumerate(ranks):
            replicas.setdefault(replica, []).append(rank)
        self.source = next(rank for rank, (replica, source) in enumerate(ranks) if replica == mine and source)
        # sorted: every rank must create all groups, in the same order
        for replica, members in sorted(replicas.items()):
            group = dist.new_group(members, backend="gloo")
            if replica == mine:
                assert isinstance(group, dist.ProcessGroup)  # an int stands for the groups of other ranks
                self.group, self.size = group, len(members)

    def broadcast(self, value: Any) -> Any:
        """The object that the source of the group passed; collective over the group."""
        if self.size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=self.source, group=self.group)
        return box[0]
