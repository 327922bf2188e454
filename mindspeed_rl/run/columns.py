"""Columns of the data plane, by the phase that puts them."""

from __future__ import annotations

from mindspeed_rl.config.run import RunConfig
from mindspeed_rl.run.phases import ALL_PHASES, Phases

#: mode of router replay -> phase that puts the experts of tokens
_ROUTING_FROM = {"R2": Phases.ACTOR_LOG_PROBS, "R3": Phases.GENERATE}
#: tokens of each sequence of a row whose experts are known: the first ones
ROUTED_LENGTHS = "routed_lengths"
#: adapter of each sequence of a row, as its index in `adapter_names`
SEQUENCE_ADAPTERS = "sequence_adapters"


def name_routed_column(stage: int) -> str:
    """Return the column with the experts of a row's tokens in a pipeline stage: no stage reads another's."""
    return f"routed_experts_{stage}"


def list_worker_columns(cfg: RunConfig | None = None, *, images: bool = False) -> dict[str, tuple[str, ...]]:
    """Return the columns that workers put into the data plane, by phase as a consumer; phases that only read put none.

    Args:
        cfg: adds the columns of its router replay and of its roles' adapters; None for the columns of every run.
        images: adds the column of a model of images.
    """
    columns = {phase.consumer: phase.columns for phase in ALL_PHASES if phase.consumer}
    if images:
        columns[Phases.GENERATE.consumer] += ("images",)
    if cfg is not None and cfg.rl_config is not None:
        if cfg.rl_config.adapter_names:
            columns[Phases.GENERATE.consumer] += (SEQUENCE_ADAPTERS,)
        source = _ROUTING_FROM.get(cfg.rl_config.router_replay.mode)
        if source is not None:
            stages = range(cfg.actor_config.pipeline_model_parallel_size)
            columns[source.consumer] += (ROUTED_LENGTHS, *(name_routed_column(stage) for stage in stages))
    return columns
