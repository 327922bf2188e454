"""The checkpoint of another engine: which one wrote it, and whether a role can start from it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mindspeed_rl.checkpoint.mcore import iteration_folder
from mindspeed_rl.checkpoint.newest import EXPORTS
from mindspeed_rl.config import MegatronConfig
from mindspeed_rl.files import read_json
from mindspeed_rl.models.plan import ModelSource

#: engine of checkpoints whose record names none
_FIRST_ENGINE = "megatron"
_ENGINES = (_FIRST_ENGINE, "fsdp")


def read_engine(record: Mapping[str, Any]) -> str:
    """Return the engine that wrote a checkpoint with this record."""
    return record.get("engine", _FIRST_ENGINE)


def check_engine(config: MegatronConfig, record: Mapping[str, Any], folder: Path) -> None:
    """Check that a role can start from a checkpoint, also where another engine wrote it.

    Args:
        config: keys of the role.
        record: record of the checkpoint.
        folder: has the checkpoint.

    Raises:
        ValueError: it cannot.
    """
    engine = read_engine(record)
    if engine == config.engine:
        return
    if engine not in _ENGINES:
        raise ValueError(
            f"load: {folder} was saved by engine: {engine}, and this version has {' and '.join(_ENGINES)}; set load to "
            f"{folder / EXPORTS}/latest, which a run with save_hf: true writes."
        )
    start = f"load: {folder} was saved by engine: {engine}, and this role has engine: {config.engine}"
    if record["lora"] is not None:
        raise ValueError(
            f"{start}; adapters are not read from another engine's checkpoint: keep the engine, or set load to what a run with "
            f"save_hf: true writes to {folder / EXPORTS}/latest: merged weights, or with lora_ckpt_filter a PEFT folder."
        )
    if record.get("noop_layers") or config.noop_layers:
        raise ValueError(
            f"{start}; with noop_layers ({record.get('noop_layers') or config.noop_layers}) the layers of a checkpoint have "
            f"other numbers: keep the engine, or set load to {folder / EXPORTS}/latest, which a run with save_hf: true writes."
        )
    if config.mtp_num_layers:
        raise ValueError(
            f"{start}; it has no multi-token-prediction layers (mtp_num_layers: {config.mtp_num_layers}): set that to 0, or "
            "load the original model."
        )


def check_source(config: MegatronConfig, source: ModelSource) -> None:
    """Check the source of a role's weights as `check_engine` does; folders that are no training checkpoint pass.

    Raises:
        ValueError: the role cannot start from it.
    """
    if source.kind != "training":
        return
    path = iteration_folder(source.weights, source.iteration) / "run_state.json"
    try:
        record = read_json(path)
    except ValueError:  # named where all files are checked
        return
    if isinstance(record, dict) and "lora" in record:
        check_engine(config, record, source.weights)
