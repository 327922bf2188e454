"""The groups `profiler_config.integrated` and `msprobe_config`: records of a run for diagnosis."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mindspeed_rl.catalogue.records import Bounds
from mindspeed_rl.config.keys.schema import Range, key

#: values of `stage`: those between the first and the last are the `profiler_stage` of a phase
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

# fmt: off


@dataclass(frozen=True, kw_only=True)
class ProfilerConfig:
    """Device profiler: phases, steps and content of traces; one group, `integrated`, for the workers that share a device."""

    profile: bool = key(False, "record a trace", "是否记录", on_resume="exact")
    mstx: bool = key(False, "only light marks instead of a full trace", "只打轻量标记，不做完整 trace", only_on="npu",
        on_resume="exact")
    stage: str | list[str] = key("all", f"phases that are recorded: {', '.join(PROFILER_STAGES)}",
        f"要记录的阶段：{', '.join(PROFILER_STAGES)}", on_resume="exact")
    profile_save_path: str = key("", "folder of the traces; the run folder when empty", "trace 的文件夹；为空时为运行文件夹",
        on_resume="exact")
    profile_export_type: Literal["text", "db"] = key("text", "file kind of the parsed trace", "解析后 trace 的文件种类",
        only_on="npu", on_resume="exact")
    profile_level: Literal["level_none", "level0", "level1", "level2"] = key("level0", "depth of device counters",
        "设备计数器的深度", only_on="npu", on_resume="exact")
    profile_aic_metrics: Literal[
        "AiCoreNone", "PipeUtilization", "ArithmeticUtilization", "Memory", "MemoryL0", "MemoryUB", "ResourceConflictRatio",
        "L2Cache", "MemoryAccess",
    ] = key("PipeUtilization", "counters of the AI cores, from level1 on", "AI Core 计数器，level1 起有效", only_on="npu",
        elsewhere="aic_metrics", on_resume="exact")
    profile_l2_cache: bool = key(False, "count hits of the L2 cache", "统计 L2 缓存命中", only_on="npu", elsewhere="l2_cache",
        on_resume="exact")
    profile_memory_snapshot: bool = key(False,
        "write allocations of the recorded runs with their call stacks for the memory viewer of torch; without `profile` too",
        "把所记录各次执行的每次内存分配连同调用栈写成快照，供 torch 的内存查看器使用；不开 `profile` 也可用",
        only_on="npu cuda", on_resume="exact")
    profile_with_memory: bool = key(False, "record allocations", "记录内存分配", on_resume="exact")
    profile_record_shapes: bool = key(False, "record operator input shapes", "记录算子输入的形状", on_resume="exact")
    profile_with_cpu: bool = key(True, "record host activity", "记录主机活动", on_resume="exact")
    profile_with_npu: bool = key(True, "record device activity", "记录设备活动", on_resume="exact")
    profile_with_module: bool = key(False, "record Python call stacks", "记录 Python 调用栈", on_resume="exact")
    profile_step_start: int = key(1, "first run of a phase that is recorded, counted from 1 at the start of the process",
        "某阶段第几次执行开始记录，从进程启动起由 1 计", range=Range.ITERATIONS_FROM_0, on_resume="exact")
    profile_warmup_steps: int = key(0, "runs just before the first recorded one that are profiled and thrown away",
        "首次记录之前，照样做 profile 但丢弃结果的执行次数", range=Range.ITERATIONS_FROM_0, on_resume="exact")
    profile_step_end: int = key(2, "run of a phase before which recording ends", "到第几次执行之前停止记录",
        range=Range.ITERATIONS_FROM_0, on_resume="exact")
    profile_analysis: bool = key(False, "parse the trace as soon as it is written", "trace 一写完就解析", only_on="npu",
        on_resume="exact")
    profile_ranks: Literal["all"] | list[int] = key("all", "ranks that record", "记录的 rank", range=Range.ITERATIONS_FROM_0,
        on_resume="exact")


@dataclass(frozen=True, kw_only=True)
class ProfilerGroups:
    """The YAML group `profiler_config`."""

    integrated: ProfilerConfig = key(ProfilerConfig, "profiler of the workers that share a device",
        "共用设备的工作进程的 profiler", on_resume="exact")


@dataclass(frozen=True, kw_only=True)
class MsprobeConfig:
    """Accuracy dumps: tensors of a run that `mindspeed-rl diff-dump` compares with another run's."""

    msprobe: bool = key(False, "write dumps", "是否导出", on_resume="exact")
    dump_path: str = key("./msprobe_dump", "folder of the dumps", "导出的文件夹", on_resume="exact")
    task: Literal["statistics", "tensor"] = key("statistics",
        "statistics: shape, least, largest, mean and norm of each tensor; tensor: the tensor too",
        "statistics：每个张量的形状、最小值、最大值、均值与范数；tensor：还有张量本身", on_resume="exact")
    dump_format: Literal["safetensors", "msprobe"] = key("safetensors",
        "files of a dump: safetensors, which diff-dump compares; msprobe: as MindStudio's msprobe writes and compares them",
        "文件格式：safetensors，由 diff-dump 比较；msprobe：MindStudio msprobe 的格式", on_resume="exact")
    max_dump_gib: float = key(1.0, "maximum GiB of tensors of a rank, phase and iteration; beyond it statistics only",
        "每个 rank、阶段与迭代最多保留多少 GiB 张量；其余只有统计量", range=Bounds(0, 1e6), needs=("task", ("tensor",)),
        on_resume="exact")
    key_data_dump: bool = key(False, "dump prompts, responses, rewards, advantages, loss inputs and losses",
        "导出 prompt、回答、奖励、优势、损失的输入与损失", on_resume="exact")
    configurations_dump: bool = key(False, "dump the configuration and the environment", "导出配置与环境", on_resume="exact")
    actor_train_dump: bool = key(False, "dump activations and gradients of the actor's update", "导出 actor 更新时的激活与梯度",
        on_resume="exact")
    actor_infer_dump: bool = key(False, "dump activations of the rollout engine", "导出推理引擎的激活", on_resume="exact")
    reference_dump: bool = key(False, "dump activations of the reference pass", "导出参考模型前向的激活", on_resume="exact")
    critic_train_dump: bool = key(False, "dump activations and gradients of the critic's update",
        "导出 critic 更新时的激活与梯度", on_resume="exact")
    token_range_start: int = key(0, "first forward step of a rollout that is dumped, counted from 0, the prompts'",
        "rollout 中导出的第一个前向步，从 0 数起，第 0 步是 prompt", range=Range.TOKENS_FROM_0,
        needs=("actor_infer_dump", (True,)), on_resume="exact")
    token_range_end: int = key(0, "last forward step of a rollout that is dumped", "rollout 中导出的最后一个前向步",
        range=Range.TOKENS_FROM_0, needs=("actor_infer_dump", (True,)), on_resume="exact")
    step_start: int = key(0, "first iteration that is dumped, counted from 0", "导出的第一次迭代，从 0 数起",
        range=Range.ITERATIONS_FROM_0, on_resume="exact")
    step_end: int = key(0, "last iteration that is dumped", "导出的最后一次迭代", range=Range.ITERATIONS_FROM_0,
        on_resume="exact")
