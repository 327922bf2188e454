"""Jobs that dump an update of the engine."""

from __future__ import annotations

from pathlib import Path

from training_jobs import Setting, all_rows, engine_of, my_rows, weighted_loss

from mindspeed_rl.dumps.record import Record
from mindspeed_rl.engine.probe import ModelProbe
from mindspeed_rl.workers.dumping import _get_coordinates


def dump_update(setting: Setting, folder: str, task: str = "tensor", scale: float = 1.0) -> None:
    """One step of training with a dump.

    Args:
        scale: the weight of the second layer's down projection is multiplied by it first.
    """
    with engine_of(setting) as engine:
        for name, parameter in engine.model.models[0].named_parameters():
            if name.endswith("layers.1.mlp.linear_fc2.weight"):
                parameter.data.mul_(scale)
        record = Record(Path(folder), 0, "actor", "update", *_get_coordinates(), task == "tensor", 1 << 26)
        with ModelProbe(engine, record).recording() as probe:
            engine.train_step(my_rows(all_rows()), setting.batching, probe.loss(probe.inputs(weighted_loss)))
        record.write()
