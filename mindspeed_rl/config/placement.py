"""How the rollout engines lie over the devices: replicas, and the groups of them that share a model's experts.

This is the one place that knows; the engine's arguments and environment, the groups of the weight push's proof and what
`explain` shows are read from it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mindspeed_rl.config.keys.generate import GenerateConfig


@dataclass(frozen=True)
class RolloutLayout:
    """Ranks 0 .. world_size - 1 in the engine's own order: expert groups, in each the replicas, in each the tensor ranks.

    Attributes:
        world_size: devices of all engines.
        tensor: devices of one replica.
        sharing: replicas that share the experts of a model; 1 where each replica has all of them.
        expert_parallel: experts stay whole and are spread over the `sharing * tensor` ranks of an expert group; without, each
            expert is cut over the tensor ranks.
    """

    world_size: int
    tensor: int
    sharing: int = 1
    expert_parallel: bool = False

    @property
    def num_replicas(self) -> int:
        """Engines that answer prompts of their own."""
        return self.world_size // self.tensor

    @property
    def expert_ranks(self) -> int:
        """Ranks that hold an expert of a layer between them, each its own ones; 1 without expert parallelism."""
        return self.tensor * self.sharing if self.expert_parallel else 1

    @property
    def in_step(self) -> bool:
        """True where replicas exchange tokens in every expert layer: each of a group must make every generation step."""
        return self.sharing > 1

    def replica(self, rank: int) -> int:
        """Number of the replica that a rank belongs to."""
        return rank // self.tensor

    def replica_groups(self) -> list[list[int]]:
        """The ranks of each replica."""
        return self._groups(self.tensor)

    def expert_groups(self) -> list[list[int]]:
        """The ranks that share experts, of each group; equal to the replicas where each holds a whole model."""
        return self._groups(self.tensor * self.sharing)

    def _groups(self, size: int) -> list[list[int]]:
        return [list(range(first, first + size)) for first in range(0, self.world_size, size)]

    def engine_arguments(self) -> dict[str, Any]:
        """What vLLM's `LLM` is told of the layout; a platform may replace the backend."""
        # every rank of the run's world runs the same code: no executor may start processes of its own
        backend = "external_launcher" if self.tensor * self.sharing > 1 else "uni"
        arguments: dict[str, Any] = {"tensor_parallel_size": self.tensor, "distributed_executor_backend": backend}
        return arguments | ({"enable_expert_parallel": True} if self.expert_parallel else {})

    def engine_environment(self, rank: int, master: tuple[str, str]) -> dict[str, str]:
        """Variables by which vLLM learns its place; to be set before the engine is built, whatever they were before.

        vLLM's `data_parallel_size` argument would do for a single expert group only: with it a replica's place is
        RANK // tensor, which leaves the group from its second one on.

        Args:
            master: address and port at which the run's ranks have met.
        """
        return {
            "VLLM_DP_SIZE": str(self.sharing),
            "VLLM_DP_RANK": str(self.replica(rank) % self.sharing),
            # the run's own world is used: vLLM asks for both, but opens no port
            "VLLM_DP_MASTER_IP": master[0],
            "VLLM_DP_MASTER_PORT": master[1],
        }


#: matrices of at least so many elements are kept a second time by the CPU's engine, packed for its kernel, while it generates
PACKED_ELEMENTS = 1 << 13

#: ranks of adapters that vLLM has room for
_ADAPTER_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)


def engine_adapter_rank(rank: int) -> int:
    """The rank of adapters that an engine is built for, where those of this rank are pushed (`lora_push: adapter`)."""
    return next(size for size in _ADAPTER_RANKS if size >= rank)


def rollout_layout(generate: GenerateConfig, world_size: int) -> RolloutLayout:
    """The layout of a run's engines on this many devices."""
    shared = generate.enable_expert_parallel
    return RolloutLayout(
        world_size,
        generate.infer_tensor_parallel_size,
        generate.infer_expert_parallel_size if shared else 1,
        shared,
    )
