"""Process groups of a run, the rank of this process in them, and random generators."""

from __future__ import annotations

import datetime
import os
import random
from dataclasses import dataclass
from typing import TypeVar, cast

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
from torch import Tensor

from mindspeed_rl import platform
from mindspeed_rl.config import MegatronConfig
from mindspeed_rl.engine.sequence_layout import ContextSlice, PackedLayout
from mindspeed_rl.platform.environment import STORE_VARIABLE
from mindspeed_rl.platform.rendezvous import naming_strangers, open_store

#: seconds that ranks wait for each other in a collective before the run fails, unless the environment sets another value
_COLLECTIVE_TIMEOUT_S = 1800.0
_Value = TypeVar("_Value")

#: prefix of the states of Megatron's generators
_TRACKER = "tracker."


@dataclass(frozen=True)
class RankInfo:
    """This process among all processes of the training world.

    Attributes:
        timeout_s: maximum wait for each other in a collective.
    """

    rank: int
    world_size: int
    local_rank: int
    timeout_s: float = _COLLECTIVE_TIMEOUT_S

    @classmethod
    def from_env(cls) -> RankInfo:
        """Read the variables that torchrun and our launcher set.

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
    """Set up device, process groups and random generators of this rank; collective over the training world.

    Reads RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT, MINDSPEED_RL_STORE and MINDSPEED_RL_COLLECTIVE_TIMEOUT_S.

    Args:
        num_chunks: model chunks of a pipeline stage, from the layout of the model's plan.

    Raises:
        ValueError: a variable is missing, or the layout does not fit the world.
    """
    info = RankInfo.from_env()
    # before the process group: its communicators belong to the current device
    platform.current().set_device(info.local_rank)
    platform.current().set_deterministic(config.deterministic or config.npu_deterministic)
    with naming_strangers():
        init_process_group(info, info.timeout_s)
        _init_model_parallel(config, num_chunks, info.timeout_s)
    _seed_all(config.seed)


def init_process_group(info: RankInfo, timeout_s: float) -> None:
    """Join the training world at MINDSPEED_RL_STORE, a file, else at MASTER_ADDR:MASTER_PORT; collective over all its ranks."""
    if not dist.is_initialized():
        file = os.environ.get(STORE_VARIABLE)
        master = (file, 0) if file else (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
        dist.init_process_group(
            platform.current().collective_backend,
            store=open_store(*master, info.world_size, serves=info.rank == 0, timeout_s=timeout_s),
            rank=info.rank,
            world_size=info.world_size,
            timeout=datetime.timedelta(seconds=timeout_s),
        )


def _init_model_parallel(config: MegatronConfig, num_chunks: int, timeout_s: float) -> None:
    """Create Megatron's process groups for this layout; collective. Does nothing when they exist.

    Args:
        num_chunks: model chunks of a pipeline stage, from the layout of the model's plan.

    Raises:
        ValueError: the layout does not fit the world.
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
        expert_model_parallel_size=config.expert_sizes[0],
        expert_tensor_parallel_size=config.expert_sizes[1],
        order=_get_rank_order(config),
        # Megatron takes whole minutes
        distributed_timeout_minutes=max(1, int(timeout_s // 60)),
    )


def _get_rank_order(config: MegatronConfig) -> str:
    """Return the order of ranks in the parallel dimensions, fastest first, in Megatron's words."""
    return "tp-cp-ep-pp-dp" if config.use_tp_pp_dp_mapping else "tp-cp-ep-dp-pp"


def _seed_all(seed: int) -> None:
    """Seed Python, NumPy, torch and Megatron's tensor-parallel generators, per pipeline stage as Megatron does."""
    seed = seed + 100 * parallel_state.get_pipeline_model_parallel_rank()
    random.seed(seed)
    # NumPy takes 32 bits
    np.random.seed(seed % (1 << 32))
    torch.manual_seed(seed)
    tensor_parallel.model_parallel_cuda_manual_seed(seed)


def get_rng_tracker() -> CudaRNGStatesTracker:
    """Return Megatron's named generators, which `_seed_all` has seeded."""
    return cast(CudaRNGStatesTracker, tensor_parallel.get_cuda_rng_tracker())  # Megatron's global is declared None


def capture_rng_state() -> dict[str, Tensor]:
    """Return the state of Python's, NumPy's, torch's, the device's and Megatron's generators, to save without pickling."""
    version, internal, gauss = random.getstate()
    numpy_state = np.random.get_state()
    assert isinstance(numpy_state, tuple)  # a dict would be of another generator than the Mersenne twister
    name, keys, position, has_gauss, cached = numpy_state
    assert version == 3 and name == "MT19937"
    states = {
        "python": torch.tensor(internal, dtype=torch.int64),
        "python_gauss": torch.tensor([] if gauss is None else [gauss], dtype=torch.float64),
        "numpy_keys": torch.from_numpy(keys.astype(np.int64)),
        "numpy_rest": torch.tensor([position, has_gauss], dtype=torch.int64),
        "numpy_gauss": torch.tensor([cached], dtype=torch.float64),
        "torch": torch.get_rng_state(),
        "device": platform.current().rng_module.get_rng_state().cpu(),
    }
    tracker = get_rng_tracker().get_states()
    return states | {_TRACKER + key: state.cpu() for key, state in tracker.items()}


def restore_rng_state(states: dict[str, Tensor]) -> None:
    """Put all generators back into a state that `capture_rng_state` returned."""
    gauss = states["python_gauss"].tolist()
    random.setstate((3, tuple(states["python"].tolist()), gauss[0] if gauss else None))
    position, has_gauss = states["numpy_rest"].tolist()
    keys = states["numpy_keys"].numpy().astype(np.uint32)
    np.random.set_state(("MT19937", keys, position, has_gauss, states["numpy_gauss"].item()))
    torch.set_rng_state(states["torch"])
    platform.current().rng_module.set_rng_state(states["device"])
    tracker = {key.removeprefix(_TRACKER): state for key, state in states.items() if key.startswith(_TRACKER)}
    get_rng_tracker().set_states(tracker)


def find_context(cp_size: int, layout: PackedSeqParams | None) -> ContextSlice:
    """Return the ranks that divide the sequences of a micro-batch.

    Args:
        cp_size: context-parallel size of the run.
        layout: layout of the micro-batch where it is packed.
    """
    if isinstance(layout, PackedLayout) and layout.context is not None:
        return layout.context
    if cp_size == 1:  # also without process groups
        return ContextSlice(1, 0, None)
    return ContextSlice(cp_size, parallel_state.get_context_parallel_rank(), parallel_state.get_context_parallel_group())


def is_data_source() -> bool:
    """Return True on the one rank of each model replica that fetches its rows (first TP, PP and CP rank)."""
    return (
        parallel_state.get_tensor_model_parallel_rank() == 0
        and parallel_state.get_context_parallel_rank() == 0
        and parallel_state.is_pipeline_first_stage(ignore_virtual=True)
    )


def is_stage_source() -> bool:
    """Return True on the first TP and CP rank of each pipeline stage of a model replica."""
    return parallel_state.get_tensor_model_parallel_rank() == 0 and parallel_state.get_context_parallel_rank() == 0


def is_output_stage() -> bool:
    """Return True on the first TP rank of the last stage, of every CP rank."""
    return parallel_state.get_tensor_model_parallel_rank() == 0 and parallel_state.is_pipeline_last_stage(ignore_virtual=True)


def is_output_source() -> bool:
    """Return True on the one rank of each model replica that returns results (first TP and CP rank of the last stage)."""
    return is_output_stage() and parallel_state.get_context_parallel_rank() == 0


class ControlGroup:
    """Group of the ranks of one model replica that exchange small Python objects, over gloo with every device backend."""

    def __init__(self, *, of_stage: bool = False) -> None:
        """Create the group; collective over the world, as every rank takes part in creating every group.

        Args:
            of_stage: only between the ranks of one pipeline stage of the replica, from its first TP and CP rank.
        """
        replicas: dict[tuple[int, int], list[int]] = {}
        stage = parallel_state.get_pipeline_model_parallel_rank() if of_stage else 0
        mine = parallel_state.get_data_parallel_rank(), stage
        is_source = is_stage_source() if of_stage else is_data_source()
        ranks: list[tuple[tuple[int, int], bool]] = [(mine, is_source)] * dist.get_world_size()
        dist.all_gather_object(ranks, (mine, is_source))
        for rank, (replica, _) in enumerate(ranks):
            replicas.setdefault(replica, []).append(rank)
        self.source = next(rank for rank, (replica, source) in enumerate(ranks) if replica == mine and source)
        # sorted: every rank must create all groups, in the same order
        for replica, members in sorted(replicas.items()):
            group = dist.new_group(members, backend="gloo")
            if replica == mine:
                assert isinstance(group, dist.ProcessGroup)  # groups of other ranks are ints
                self.group, self.size = group, len(members)

    def broadcast(self, value: _Value) -> _Value:
        """Return the object that the source of the group passed; collective over the group."""
        if self.size == 1:
            return value
        values = [value]
        dist.broadcast_object_list(values, src=self.source, group=self.group)
        return values[0]

    def gather(self, value: _Value) -> list[_Value]:
        """Return the objects of all ranks of the group, in their order; collective over the group."""
        values = [value] * self.size
        if self.size > 1:
            dist.all_gather_object(values, value, group=self.group)
        return values
