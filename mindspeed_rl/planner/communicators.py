"""Bytes of the process groups that exchange tensors on the devices."""

from __future__ import annotations

from mindspeed_rl.config.placement import RolloutLayout
from mindspeed_rl.config.process_groups import group_buffers
from mindspeed_rl.config.run import RunConfig
from mindspeed_rl.planner.run_shape import RunShape

MIB = 1 << 20
#: buffers of a communicator: one to send, one to receive
HCCL_BUFFERS = 2


def communicator_bytes(run: RunShape) -> int:
    """Return the bytes of a die's communicators; none where there is no HCCL.

    Raises:
        ValueError: hccl_group_buffer is none of Megatron's groups with its MiB.
    """
    if not run.chip.sleeps or run.sizes.actor.num_npus == 1:
        return 0
    size, own = hccl_buffer_mib(run.cfg), group_buffers(run.actor.config.hccl_group_buffer)
    return sum(HCCL_BUFFERS * own.get(name, size) * MIB for name, ranks in _groups(run).items() if ranks > 1)


def _groups(run: RunShape) -> dict[str, int]:
    """Ranks of each group that a die of the actor's is in."""
    config, lie = run.actor.config, run.sizes.actor
    expert, inner = config.expert_sizes
    groups = {
        "world": lie.num_npus,
        "tp": lie.tensor,
        "cp": lie.context,
        "pp": lie.pipeline,
        "dp_cp": run.actor.dp,
        "mp": lie.tensor * lie.pipeline,
    }
    if config.num_experts:
        groups |= {"ep": expert, "tp_ep_mp": expert * inner, "ep_dp": run.actor.expert_dp}
    if run.generate is not None and run.cfg.placement.disaggregated:
        groups["push"] = lie.num_npus + run.sizes.rollout.num_npus
    elif run.generate is not None:
        engines = RolloutLayout.from_config(run.generate, run.sizes.rollout.num_npus)
        groups |= {"rollout tp": engines.tensor, "rollout ep": engines.expert_ranks}
    return groups


def hccl_buffer_mib(cfg: RunConfig) -> int:
    """Return the size of a buffer of a communicator that has none of its own; HCCL's own where the run file cannot say it."""
    return 200 if cfg.rl_config is None else cfg.rl_config.hccl_buffersize
