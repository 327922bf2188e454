"""How long a run waits for what, and what it does when something does not come: `rl_config.deadlines` and `fault_tolerance`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING

from mindspeed_rl.config.keys.schema import key

if TYPE_CHECKING:
    from mindspeed_rl.config.run import RunConfig

#: a deadline that the run file leaves open is at least this many times the longest that its wait has taken so far
GROWTH = 5.0

#: seconds that a wait may take where neither run file nor measurement says more
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


@dataclass(kw_only=True)
class DeadlineKeys:
    """Seconds, by what is waited for. What is set is kept; what is not grows with what is measured."""

    placement: float | None = key(None, "Ray finds room for the processes; 120 when unset")
    start: float | None = key(None, "processes start and models are built; 1800 when unset")
    generate: float | None = key(None, "a rollout, or the answers of an evaluation")
    rewards: float | None = key(None, "scores of a batch by reward functions or a reward model")
    log_probs: float | None = key(None, "log-probabilities or values of a batch")
    update: float | None = key(None, "all optimizer steps of an iteration")
    weights: float | None = key(None, "a push of the weights to the rollout engine")
    evaluate: float | None = key(None, "the loss on held-out items of a supervised stage")
    save: float | None = key(None, "a checkpoint, also one that is written in the background; 3600 when unset")
    rows: float | None = key(None, "rows of the data plane that are not there yet; wait_timeout_s when unset")
    data_plane: float | None = key(None, "the data plane's answer, beside what rows may take; 120 when unset")
    collective: float | None = key(None, "ranks wait for each other in a collective; fixed when they start; 1800 when unset")
    server: float | None = key(None, "silence of a rollout server; vllm_server_timeout when unset")
    tool: float | None = key(None, "a call of a tool whose tool file says nothing of it; 30 when unset")


@dataclass(kw_only=True)
class FaultTolerance:
    """What becomes of a run whose worker dies or hangs."""

    enabled: bool = key(False, "a dead or hung worker ends all workers, and the run goes on from its last checkpoint by itself")
    max_restarts: int = key(3, "how often in a run")
    heartbeat_interval_s: float = key(5.0, "seconds between two signs of life; who is stopped for six is hung")


@dataclass(frozen=True)
class Deadlines:
    """The longest waits of a run.

    Attributes:
        seconds: by the names of `DEFAULTS`.
        fixed: names whose value the run file sets; the others grow.
    """

    seconds: Mapping[str, float] = field(default_factory=lambda: DEFAULTS)
    fixed: frozenset[str] = frozenset()

    @property
    def rows_s(self) -> float:
        """Longest wait for rows of the data plane that are not there yet."""
        return self.seconds["rows"]

    def limit(self, name: str, longest_s: float = 0.0) -> float:
        """Seconds that this wait may take now.

        Args:
            longest_s: what it has taken at most so far.
        """
        return self.seconds[name] if name in self.fixed else max(self.seconds[name], GROWTH * longest_s)


def resolve_deadlines(cfg: RunConfig) -> Deadlines:
    """What the run file says, over the defaults and over the two older keys that say the same."""
    rl, generate = cfg.rl_config, cfg.generate_config
    keys = DeadlineKeys() if rl is None else rl.deadlines
    written = {item.name: value for item in fields(keys) if (value := getattr(keys, item.name)) is not None}
    older = {} if rl is None else {"rows": rl.wait_timeout_s}
    if generate is not None:
        older["server"] = generate.vllm_server_timeout
    return Deadlines({**DEFAULTS, **older, **written}, frozenset(older) | frozenset(written))
