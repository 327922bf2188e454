"""Maximum waits of a run, and its recovery when a process does not answer: `rl_config.deadlines` and `fault_tolerance`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from mindspeed_rl.catalogue.records import Bounds
from mindspeed_rl.config.keys.schema import Range, key

#: a deadline that the run file does not set is at least this many times the longest wait so far
_GROWTH = 5.0

#: seconds that a wait may take where neither run file nor measurement gives more
DEFAULTS: Mapping[str, float] = {
    "placement": 120.0,
    "start": 1800.0,
    "generate": 1800.0,
    "rewards": 1800.0,
    "log_probs": 1800.0,
    "update": 1800.0,
    "weights": 1800.0,
    "evaluate": 1800.0,
    "save": 3600.0,
    "rows": 1800.0,
    "data_plane": 120.0,
    "collective": 1800.0,
    "server": 120.0,
    "tool": 30.0,
}


#: `fault_tolerance` written as one word -> its keys
TOLERANCE_FORMS: Mapping[str, Mapping[str, object]] = {"shrink": {"enabled": True, "shrink": True}}


# fmt: off
@dataclass(frozen=True, kw_only=True)
class DeadlineKeys:
    """Maximum waits in seconds, one for each kind. A value that is set stays; one that is not grows with the measured waits."""

    placement: float | None = key(None, "placement of the processes by Ray; 120 when unset",
        "Ray 为各进程找到位置；不设时为 120", range=Range.WAIT_S, on_resume="exact")
    start: float | None = key(None, "processes start and models are built; 1800 when unset",
        "进程启动、模型建好；不设时为 1800", range=Range.WAIT_S, on_resume="exact")
    generate: float | None = key(None, "a rollout, or the responses of an evaluation", "一次推理，或一次评测的回答",
        range=Range.WAIT_S, on_resume="exact")
    rewards: float | None = key(None, "scores of a batch by reward functions or a reward model",
        "一批数据由奖励函数或奖励模型打分", range=Range.WAIT_S, on_resume="exact")
    log_probs: float | None = key(None, "log-probabilities or values of a batch", "一批数据的对数概率或价值",
        range=Range.WAIT_S, on_resume="exact")
    update: float | None = key(None, "all optimizer steps of an iteration", "一次迭代的全部优化器步", range=Range.WAIT_S,
        on_resume="exact")
    weights: float | None = key(None, "a weight sync to the rollout engine", "把权重推给推理引擎", range=Range.WAIT_S,
        on_resume="exact")
    evaluate: float | None = key(None, "the loss on held-out items of a supervised stage", "监督阶段在留出数据上的损失",
        range=Range.WAIT_S, on_resume="exact")
    save: float | None = key(None, "a checkpoint, also one that is written in the background; 3600 when unset",
        "一个检查点，包括后台写入的；不设时为 3600", range=Range.WAIT_S, on_resume="exact")
    rows: float | None = key(None, "rows of the data plane that are not ready; wait_timeout_s when unset",
        "等待数据面中尚未就绪的行；不设时为 wait_timeout_s", range=Range.WAIT_S, on_resume="exact")
    data_plane: float | None = key(None, "a reply of the data plane, without the wait for rows; 120 when unset",
        "数据面的答复，不计等待行的时间；不设时为 120", range=Range.WAIT_S, on_resume="exact")
    collective: float | None = key(None, "ranks wait for each other in a collective; fixed when they start; 1800 when unset",
        "各 rank 在集合通信中互相等待；启动时即固定；不设时为 1800", range=Range.WAIT_S, on_resume="exact")
    server: float | None = key(None, "silence of a rollout server; vllm_server_timeout when unset",
        "推理服务器的沉默；不设时为 vllm_server_timeout", range=Range.WAIT_S, on_resume="exact")
    tool: float | None = key(None, "a call of a tool whose tool file sets no timeout; 30 when unset", "一次工具调用",
        range=Range.WAIT_S, on_resume="exact")


@dataclass(frozen=True, kw_only=True)
class FaultTolerance:
    """Recovery of a run whose worker dies or hangs."""

    enabled: bool = key(False, "a dead or hung worker ends all workers, and the run resumes from its last checkpoint",
        "有 worker 死亡或卡住时结束全部 worker，运行自行从最后一个检查点继续", on_resume="exact")
    max_restarts: int = key(3, "maximum restarts in a run", "一次运行中最多几次", range=Range.RESTARTS, on_resume="exact")
    heartbeat_interval_s: float = key(5.0, "seconds between two heartbeats; a process that is stopped for six of them is hung",
        "两次心跳之间的秒数；停住达六次之久即视为卡住", range=Bounds(0.1, 3600), on_resume="exact")
    shrink: bool = key(False, "after a node of a cluster is lost, the run resumes on the devices that are left, with the "
        "layout that the planner chooses, and on all of them once it is back", "集群丢失节点后，按规划器选出的布局在剩余设备上"
        "续训，节点恢复后再用回全部设备", on_resume="exact")
    shrink_wait_s: float = key(60.0, "seconds that lost devices have to come back before the run resumes without them",
        "放弃丢失的设备、用剩余设备续训之前最多等待的秒数", range=Range.WAIT_S, needs=("shrink", (True,)), on_resume="exact")

# fmt: on


@dataclass(frozen=True)
class Deadlines:
    """Maximum waits of a run.

    Attributes:
        seconds: by the names of `DEFAULTS`.
        fixed: names whose value the run file sets; the others grow.
    """

    seconds: Mapping[str, float] = field(default_factory=lambda: DEFAULTS)
    fixed: frozenset[str] = frozenset()

    @property
    def rows_s(self) -> float:
        """Maximum wait for rows of the data plane that are not ready."""
        return self.seconds["rows"]

    def limit(self, name: str, max_s: float = 0.0) -> float:
        """Return the seconds that this wait may take now.

        Args:
            max_s: the longest time that it has taken so far.
        """
        return self.seconds[name] if name in self.fixed else max(self.seconds[name], _GROWTH * max_s)
