"""The faults of the suite: process, phase and kind of each, and the expected result."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

#: goes on: nothing ends; recovers: all workers are ended and the same command goes on from its last checkpoint; ends: the
#: command ends with a code that is not 0; refused: it ends before Ray starts
End = Literal["goes on", "recovers", "ends", "refused"]


@dataclass(frozen=True)
class Fault:
    """One row of the table.

    Attributes:
        id: unique.
        role, phase, how: columns of the table.
        end: expected result.
        within_s: maximum seconds.
        said: a regular expression; a line of the console that names the failed process.
        arm: what the injector takes (site/sitecustomize.py); empty for faults that a test makes itself.
    """

    id: str
    role: str
    phase: str
    how: str
    end: End
    within_s: float
    said: str
    arm: dict[str, Any] = field(default_factory=dict)


def _worker(phase: str, how: str, said: str, within_s: float = 240.0, rank: int = 1) -> Fault:
    words = {"kill": "SIGKILL", "stop": "SIGSTOP", "raise": "exception", "hang": "sleeps forever"}[how]
    arm = {"place": f"worker.{phase}", "rank": rank, "how": how}
    return Fault(f"worker-{how}-{phase}", "worker", phase, words, "recovers", within_s, said, arm)


_DIED = r"worker {rank} failed in {phase}: its process died"
_STOPPED = r"worker 1 failed in {phase}: .*worker 1 \(process \d+\) is stopped"
_RAISED = r"worker 1 failed in {phase}: ValueError: a fault on demand"

#: each in a run of two workers that tolerates faults; its figures equal an undisturbed run's
RECOVERED = [
    _worker("generate", "kill", _DIED.format(rank=1, phase="generate")),
    Fault(
        "data-plane-kill",
        "data plane",
        "generate",
        "SIGKILL",
        "recovers",
        240.0,
        r"^error: .*data plane's process died",
        {"place": "data_plane.put", "how": "kill"},
    ),
    *(
        _worker(phase, "kill", _DIED.format(rank=1, phase=phase))
        for phase in ("update_actor", "push_weights", "save", "finish_rollout")
    ),
    *(_worker(phase, "stop", _STOPPED.format(phase=phase)) for phase in ("generate", "update_actor", "push_weights", "save")),
    *(
        _worker(phase, "raise", _RAISED.format(phase=phase))
        for phase in ("generate", "compute_log_probs", "update_actor", "save")
    ),
    _worker("compute_log_probs", "hang", r"did not end within \d+ s \(rl_config.deadlines.log_probs\).*worker 1"),
    Fault(
        "bucket-corrupt",
        "worker",
        "push_weights",
        "a corrupted bucket",
        "recovers",
        240.0,
        r"worker \d failed in push_weights: .*",
        {"place": "push.bucket", "how": "corrupt"},
    ),
    Fault(
        "bucket-drop",
        "worker",
        "push_weights",
        "a dropped bucket",
        "recovers",
        240.0,
        r"worker \d failed in push_weights: .*",
        {"place": "push.bucket", "how": "drop"},
    ),
    Fault(
        "gradient-nan",
        "worker",
        "update_actor",
        "NaN in a gradient",
        "recovers",
        240.0,
        r"worker \d failed in update_actor: NonFiniteError",
        {"place": "engine.gradient", "how": "nan"},
    ),
    _worker("compute_log_probs", "kill", _DIED.format(rank=1, phase="compute_log_probs")),
    Fault(
        "data-plane-stop",
        "data plane",
        "generate",
        "SIGSTOP",
        "recovers",
        200.0,
        r"^error: .*the data plane has not answered",
        {"place": "data_plane.put", "how": "stop"},
    ),
    Fault(
        "worker-kill-start",
        "worker",
        "set_up",
        "SIGKILL",
        "recovers",
        240.0,
        r"worker 0 failed in set_up: its process died",
        {"place": "worker.start", "rank": 0, "how": "kill"},
    ),
    Fault(
        "disk-hang",
        "disk",
        "save",
        "does not respond any more",
        "recovers",
        240.0,
        r"worker \d failed in save: save did not end within \d+ s \(rl_config.deadlines.save\)",
        {"place": "disk.write", "how": "hang"},
    ),
]

#: of a run of two workers in a cluster of several nodes
LOST_NODE = Fault(
    "node-lost",
    "node",
    "any",
    "SIGKILL of all its processes",
    "recovers",
    240.0,
    r"^error: (worker \d|reward worker|data plane) failed in \w+: .*its (process died|node \S+ has died)",
)

#: in a cluster whose other node is in a mount namespace of its own
OTHER_DISK = Fault(
    "disk-not-shared",
    "node",
    "start",
    "has a different model folder",
    "ends",
    200.0,
    r"^error: machines do not see the same files: .*model has another config.json on ",
)

#: in one run of one worker that nothing may end
SURVIVED = [
    Fault("reward-hang", "reward process", "score", "sleeps forever", "goes on", 60.0, "", {"place": "reward", "how": "hang"}),
    Fault("reward-kill", "reward process", "score", "SIGKILL", "goes on", 60.0, "", {"place": "reward", "how": "kill"}),
    Fault("reward-stop", "reward process", "score", "SIGSTOP", "goes on", 60.0, "", {"place": "reward", "how": "stop"}),
    Fault(
        "reward-exit", "reward process", "score", "ends its process", "goes on", 60.0, "", {"place": "reward", "how": "exit"}
    ),
    Fault("reward-raise", "reward process", "score", "exception", "goes on", 60.0, "", {"place": "reward", "how": "raise"}),
    Fault("reward-fork", "reward process", "score", "forks 20 times", "goes on", 60.0, "", {"place": "reward", "how": "fork"}),
    Fault(
        "reward-memory",
        "reward process",
        "score",
        "uses too much memory",
        "goes on",
        90.0,
        "",
        {"place": "reward", "how": "memory"},
    ),
    Fault(
        "reward-nan", "reward process", "score", "a score that is NaN", "goes on", 60.0, "", {"place": "reward", "how": "nan"}
    ),
    Fault(
        "reward-worker-kill",
        "reward worker",
        "score",
        "SIGKILL",
        "goes on",
        90.0,
        "reward worker 0 was lost and is replaced",
        {"place": "reward_worker.score", "how": "kill"},
    ),
    Fault(
        "reward-worker-stop",
        "reward worker",
        "score",
        "SIGSTOP",
        "goes on",
        120.0,
        "reward worker 0 was lost and is replaced",
        {"place": "reward_worker.score", "how": "stop"},
    ),
    Fault(
        "bucket-repeat",
        "worker",
        "push_weights",
        "a repeated bucket",
        "goes on",
        60.0,
        "",
        {"place": "push.bucket", "how": "repeat"},
    ),
    Fault(
        "tracker-down",
        "tracker",
        "log",
        "raises on every call",
        "goes on",
        60.0,
        "ConnectionError: the tracker is down",
        {"place": "tracker", "how": "raise"},
    ),
    Fault(
        "disk-slow",
        "disk",
        "save",
        "is 8 s slower",
        "goes on",
        60.0,
        "",
        {"place": "disk.write", "how": "slow", "seconds": 8},
    ),
    Fault(
        "worker-pause",
        "worker",
        "update_actor",
        "SIGSTOP, SIGCONT after 3 s",
        "goes on",
        60.0,
        "",
        {"place": "worker.update_actor", "how": "stop"},
    ),
]

#: in one run of one worker and two rollout servers
SERVED = [
    Fault(
        "server-slow",
        "rollout server",
        "generate",
        "does not respond for 8 s",
        "goes on",
        60.0,
        "",
        {"place": "server.news", "rank": 1, "how": "slow", "seconds": 8},
    ),
    Fault(
        "server-kill",
        "rollout server",
        "generate",
        "SIGKILL",
        "goes on",
        180.0,
        "rollout server 1 was taken out: ",
        {"place": "server.submit", "rank": 1, "how": "kill"},
    ),
    Fault(
        "server-stop",
        "rollout server",
        "generate",
        "SIGSTOP",
        "goes on",
        240.0,
        "rollout server 0 was taken out: ",
        {"place": "server.submit", "rank": 0, "how": "stop"},
    ),
]

#: in one run with two servers that a user has started, in this order
STANDALONE = [
    Fault(
        "standalone-kill",
        "standalone server",
        "generate",
        "SIGKILL",
        "goes on",
        180.0,
        r"rollout server 127.0.0.1:\d+ was taken out: ",
    ),
    Fault(
        "standalone-other-weights",
        "standalone server",
        "generate",
        "is started again, with its first weights",
        "goes on",
        300.0,
        r"rollout server 127.0.0.1:\d+ is back",
    ),
    Fault(
        "standalone-stop",
        "standalone server",
        "generate",
        "SIGSTOP, SIGCONT after it is taken out",
        "goes on",
        180.0,
        r"rollout server 127.0.0.1:\d+ was taken out: did not ",
    ),
    Fault(
        "standalone-all",
        "standalone server",
        "generate",
        "SIGKILL of both",
        "ends",
        120.0,
        r"^error: .*no rollout server is left: ",
    ),
]

#: each in a run of its own, without tolerance
ENDED = [
    Fault(
        "end-worker-kill",
        "worker",
        "update_actor",
        "SIGKILL",
        "ends",
        40.0,
        "worker 0 failed in update_actor: its process died",
        {"place": "worker.update_actor", "how": "kill"},
    ),
    Fault(
        "end-worker-stop",
        "worker",
        "generate",
        "SIGSTOP",
        "ends",
        60.0,
        r"worker 0 failed in generate: generate did not end within \d+ s .*worker 0 \(process \d+\) is stopped",
        {"place": "worker.generate", "how": "stop"},
    ),
    Fault(
        "end-weight-nan",
        "worker",
        "update_actor",
        "NaN in a weight",
        "ends",
        60.0,
        r"worker 0 failed in \w+: ",
        {"place": "engine.train_step", "how": "nan weight"},
    ),
    Fault("end-sigint", "driver", "update_actor", "SIGINT", "ends", 40.0, "interrupted", {}),
    Fault("end-sigint-twice", "driver", "update_actor", "SIGINT twice", "ends", 40.0, "interrupted", {}),
    Fault("end-sigterm", "driver", "update_actor", "SIGTERM", "ends", 60.0, "to resume after iteration", {}),
    Fault(
        "end-sigterm-twice",
        "driver",
        "update_actor",
        "SIGTERM twice",
        "ends",
        40.0,
        "SIGTERM: (all workers were ended|the run ended)",
        {},
    ),
    Fault("end-sigterm-start", "driver", "set_up", "SIGTERM", "ends", 40.0, "SIGTERM: all workers were ended", {}),
    Fault("end-driver-kill", "driver", "update_actor", "SIGKILL", "ends", 40.0, "", {}),
    Fault(
        "end-full-disk",
        "worker",
        "save",
        "file size limit (RLIMIT_FSIZE)",
        "ends",
        60.0,
        r"save: .* could not be written: ",
        {},
    ),
    Fault(
        "end-full-tmpfs",
        "worker",
        "save",
        "a tmpfs that is full",
        "ends",
        120.0,
        r"save: .*iter_\d+ could not be written: .*No space",
        {},
    ),
    Fault("end-full-run-folder", "run folder", "any", "a tmpfs that is full", "ends", 120.0, r"No space left on device", {}),
    Fault(
        "end-port-taken",
        "worker",
        "set_up",
        "the port of the rendezvous is taken",
        "ends",
        120.0,
        r"worker 0 failed in set_up: .*(EADDRINUSE|in use)",
        {"place": "worker.address", "rank": 0, "how": "take"},
    ),
    Fault(
        "end-head-kill",
        "Ray's control service",
        "generate",
        "SIGKILL",
        "ends",
        60.0,
        r"Ray's control service \(gcs_server\) failed in \w+: its process died",
        {},
    ),
    Fault(
        "end-node-service-kill",
        "Ray's node service",
        "any",
        "SIGKILL",
        "ends",
        60.0,
        r"Ray's node service \(raylet\) failed in \w+: its process died",
        {},
    ),
    Fault(
        "end-node-service-stop",
        "Ray's node service",
        "any",
        "SIGSTOP",
        "ends",
        150.0,
        r"Ray's node service \(raylet\), pid \d+ failed in \w+: a signal has stopped it",
        {},
    ),
]

#: each in a run that saves rarely: the iteration is saved before the command ends; stage of the run, signal, what is signalled
SIGNALLED: dict[str, tuple[str, str, Literal["driver", "group", "all"]]] = {
    "signal-group": ("grpo", "SIGTERM", "group"),
    "signal-all": ("grpo", "SIGTERM", "all"),
    "signal-hangup": ("grpo", "SIGHUP", "driver"),
    "signal-interrupt": ("grpo", "SIGINT", "group"),
    "signal-ppo": ("ppo", "SIGTERM", "all"),
    "signal-sft": ("sft", "SIGTERM", "all"),
    "signal-dpo": ("dpo", "SIGTERM", "group"),
}
_SIGNALLED = {"driver": "", "group": " to the process group, twice", "all": " to every process"}
SIGNALS = [
    Fault(name, "driver", f"{stage.upper()}, any", f"{signum}{_SIGNALLED[of]}", "ends", 90.0, "to resume after iteration")
    for name, (stage, signum, of) in SIGNALLED.items()
]
START_INTERRUPT = Fault("start-interrupt", "driver", "import", "SIGINT after 0.5 s", "ends", 30.0, "^interrupted: no worker")

#: strikes that one run of one worker, which tolerates faults, does not notice; the last two stay until its end
UNNOTICED = [
    Fault("driver-stop", "driver", "any", "SIGSTOP, SIGCONT after 20 s", "goes on", 60.0, ""),
    Fault("clock-forward", "all", "any", "the clock jumps a day forward", "goes on", 60.0, ""),
    Fault("clock-back", "all", "any", "the clock jumps two days back", "goes on", 60.0, ""),
    Fault("node-service-stop", "Ray's node service", "any", "SIGSTOP for 10 s", "goes on", 60.0, ""),
    Fault("head-stop", "Ray's control service", "any", "SIGSTOP for 10 s", "goes on", 60.0, ""),
    Fault(
        "head-stop-long",
        "Ray's control service",
        "any",
        "SIGSTOP",
        "recovers",
        120.0,
        r"Ray's control service \(gcs_server\), pid \d+ failed in \w+: a signal has stopped it",
    ),
]

#: each around a run of its own
AROUND = [
    Fault("output-closed", "reader of the output", "start", "ends, as `head -3` does", "goes on", 240.0, ""),
    Fault("other-cluster", "another Ray cluster", "any", "on Ray's default ports of this machine", "goes on", 240.0, ""),
]

#: of stages other than GRPO: "ppo" recovers with the figures of an undisturbed run
PPO_WORKER = Fault(
    "ppo-worker-kill",
    "worker",
    "update_critic (PPO)",
    "SIGKILL",
    "recovers",
    240.0,
    r"worker 0 failed in update_critic: its process died",
    {"place": "worker.update_critic", "how": "kill"},
)
DPO_WORKER = Fault(
    "dpo-worker-kill",
    "worker",
    "train (DPO)",
    "SIGKILL",
    "ends",
    60.0,
    r"worker 0 failed in train: its process died",
    {"place": "worker.train", "how": "kill"},
)

#: found before anything starts
REFUSED = [
    Fault(
        "checkpoint-no-tracker",
        "checkpoint",
        "start",
        "the file with the newest iteration is missing",
        "refused",
        30.0,
        "latest_checkpointed_iteration.txt: missing",
    ),
    Fault(
        "checkpoint-absent-iteration",
        "checkpoint",
        "start",
        "this file names a missing iteration",
        "refused",
        30.0,
        "names iteration 99",
    ),
    Fault(
        "checkpoint-garbage-tracker", "checkpoint", "start", "this file is invalid", "refused", 30.0, "not an iteration number"
    ),
    Fault("checkpoint-truncated", "checkpoint", "start", "a file is truncated", "refused", 30.0, r"__0_0.distcp"),
    Fault("checkpoint-missing-file", "checkpoint", "start", "a file is missing", "refused", 30.0, r"__0_0.distcp"),
    Fault("checkpoint-record", "checkpoint", "start", "run_state.json is not JSON", "refused", 30.0, "run_state.json"),
    Fault("checkpoint-code", "checkpoint", "start", "the index would run code", "refused", 30.0, "metadata: refusing to load"),
    Fault(
        "checkpoint-inverted",
        "checkpoint",
        "start",
        "64 bytes inverted (load_previous)",
        "refused",
        30.0,
        "no checkpoint in .* is sound",
    ),
    Fault(
        "checkpoints-in-use",
        "checkpoint",
        "start",
        "another command writes there",
        "refused",
        30.0,
        r"actor_config.save: .* is in use by process \d+ on",
    ),
    Fault("run-folder-read-only", "run folder", "start", "read-only", "refused", 30.0, "run_dir: .* cannot be written to"),
    Fault("reward-unknown", "reward", "start", "an unknown reward function", "refused", 30.0, "unknown reward function"),
]

FAULTS = [*RECOVERED, LOST_NODE, *SURVIVED, *SERVED, *ENDED, OTHER_DISK, *REFUSED]
FAULTS += [*SIGNALS, START_INTERRUPT, *UNNOTICED, *AROUND, PPO_WORKER, DPO_WORKER]
FAULTS += STANDALONE
