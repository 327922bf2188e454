"""Memory of a server of training (`mindspeed-rl serve`): what each client model takes, and how many of them fit."""

from __future__ import annotations

from dataclasses import dataclass, replace

from mindspeed_rl.config.errors import ConfigError
from mindspeed_rl.planner.devices import GIB, Device
from mindspeed_rl.planner.memory import MemoryPlan, plan_memory
from mindspeed_rl.run import Run

_MIB = 1 << 20
#: verdicts with which a server starts
_VERDICTS = ("fits", "tight")


@dataclass(frozen=True)
class ServerPlan:
    """Bytes of a server.

    Attributes:
        memory: bytes of all its models.
        num_models: models that the run file has.
        max_models: models that fit, as many as `num_models` at most; 0 where not even one does.
        model_bytes: what one more model takes: matrices, gradient and AdamW's moments, and its room in the rollout engine.
    """

    memory: MemoryPlan
    num_models: int
    max_models: int
    model_bytes: int

    @property
    def fits(self) -> bool:
        """True where the server can start."""
        return self.memory.verdict in _VERDICTS

    def describe(self) -> str:
        """Return the memory in a sentence, and what would fit where it does not."""
        total, model = self.memory.fullest.peak.total, self.model_bytes / _MIB
        text = (
            f"{self.memory.verdict}: {total / GIB:.1f} GiB of {self.memory.capacity / GIB:.1f} GiB of a device of "
            f"{self.memory.device}, with serve_config.num_models {self.num_models}; {model:.1f} MiB for each model"
        )
        if self.fits:
            return text
        if not self.max_models:
            rest = (total - self.num_models * self.model_bytes) / GIB
            return f"{text}. Not even one fits: base and engine take {rest:.1f} GiB; lower max_tokens_per_pass or the lengths"
        return f"{text}. {self.max_models} would fit"

    def encode(self) -> dict[str, object]:
        """Return it as a JSON object."""
        counts = {"models": self.num_models, "max_models": self.max_models, "model_bytes": self.model_bytes}
        return {"verdict": self.memory.verdict, **counts}

    def check(self) -> None:
        """Raise ConfigError where the server would run out of memory."""
        if not self.fits:
            raise ConfigError([f"memory: {self.describe()}"])


def plan_server(run: Run, device: Device) -> ServerPlan:
    """Plan the memory of a run file with `serve_config`.

    Raises:
        ValueError: its model's shape is not known, or does not fit its layout.
    """
    serve = run.config.serve_config
    assert serve is not None

    def plan(count: int) -> MemoryPlan:
        return plan_memory(replace(run, config=replace(run.config, serve_config=replace(serve, num_models=count))), device)

    memory = plan(serve.num_models)
    model_bytes = plan(serve.num_models + 1).fullest.peak.total - memory.fullest.peak.total
    low, high = (serve.num_models, serve.num_models + 1) if memory.verdict in _VERDICTS else (0, serve.num_models)
    while high - low > 1:  # `low` fits, `high` does not: bytes rise with the count
        middle = (low + high) // 2
        low, high = (middle, high) if plan(middle).verdict in _VERDICTS else (low, middle)
    return ServerPlan(memory, serve.num_models, low, model_bytes)
