"""The groups `profiler_config.integrated` and `msprobe_config`: what is recorded about a run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mindspeed_rl.config.keys.schema import key

PROFILER_STAGES = (
    "all",
    "actor_generate",
    "actor_compute_log_prob",
    "actor_update",
    "reference_compute_log_prob",
    "critic_compute_values",
    "critic_update",
    "actor_image_embeds",
)


@dataclass(kw_only=True)
class ProfilerConfig:
    """When and how the device profiler records; one group, `integrated`, for the workers that share a device."""

    profile: bool = key(False, "record at all")
    mstx: bool = key(False, "only light marks instead of a full trace", only_on=("npu",))
    stage: str | list[str] = key("all", f"phases that are recorded: {', '.join(PROFILER_STAGES)}")
    profile_save_path: str = key("", "folder of the traces; the run folder when empty")
    profile_export_type: Literal["text", "db"] = key("text", "file kind of the parsed trace", only_on=("npu",))
    profile_level: Literal["level_none", "level0", "level1", "level2"] = key(
        "level0", "depth of device counters", only_on=("npu",)
    )
    profile_with_memory: bool = key(False, "record allocations")
    profile_record_shapes: bool = key(False, "record operator input shapes")
    profile_with_cpu: bool = key(True, "record host activity")
    profile_with_npu: bool = key(True, "record device activity")
    profile_with_module: bool = key(False, "record Python call stacks")
    profile_step_start: int = key(1, "first run of a phase that is recorded, counted from 1 at the start of the process")
    profile_step_end: int = key(2, "run of a phase before which recording ends")
    profile_analysis: bool = key(False, "parse the trace as soon as it is written", only_on=("npu",))
    profile_ranks: Literal["all"] | list[int] = key("all", "ranks that record")


@dataclass(kw_only=True)
class ProfilerGroups:
    """The YAML group `profiler_config`."""

    integrated: ProfilerConfig = key(ProfilerConfig, "profiler of the workers that share a device")


@dataclass(kw_only=True)
class MsprobeConfig:
    """Accuracy dumps: tensors of a run that `mindspeed-rl diff-dump` compares with those of another one."""

    msprobe: bool = key(False, "dump at all")
    dump_path: str = key("./msprobe_dump", "folder of the dumps")
    task: Literal["statistics", "tensor"] = key(
        "statistics", "statistics: shape, least, largest, mean and norm of each tensor; tensor: the tensor too"
    )
    max_dump_gib: float = key(
        1.0,
        "most GiB of tensors of a rank, phase and iteration; the rest has statistics",
        needs=("task", ("tensor",)),
    )
    key_data_dump: bool = key(False, "dump prompts, responses, rewards, advantages, loss inputs and losses")
    configurations_dump: bool = key(False, "dump the configuration and the environment")
    actor_train_dump: bool = key(False, "dump activations and gradients of the actor's update")
    actor_infer_dump: bool = key(False, "dump activations of the rollout engine")
    reference_dump: bool = key(False, "dump activations of the reference pass")
    critic_train_dump: bool = key(False, "dump activations and gradients of the critic's update")
    token_range_start: int = key(
        0, "first forward step of a rollout that is dumped, counted from 0, the prompts'", needs=("actor_infer_dump", (True,))
    )
    token_range_end: int = key(0, "last forward step of a rollout that is dumped", needs=("actor_infer_dump", (True,)))
    step_start: int = key(0, "first iteration that is dumped, counted from 0")
    step_end: int = key(0, "last iteration that is dumped")
