"""Jobs on the engine of transformers' modules, beside the same jobs of `training_jobs` on Megatron's."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import torch.distributed as dist
import training_jobs as jobs
from megatron.core import parallel_state
from training_jobs import KEYS, TEMPERATURE, Setting, all_rows, my_rows, summary, weighted_loss

from mindspeed_rl.checkpoint.hf import HfFolder
from mindspeed_rl.config import MegatronConfig, build_run_config
from mindspeed_rl.diagnostics import engine_parity
from mindspeed_rl.engine import parallel
from mindspeed_rl.engine.checkpoint import CheckpointSaver, load_checkpoint
from mindspeed_rl.engine.fsdp.engine import FsdpEngine
from mindspeed_rl.models.plan import plan_model
from mindspeed_rl.workers.engines import BuiltEngine, PassSettings, build_engine


@contextlib.contextmanager
def engine_of(setting: Setting) -> Iterator[tuple[FsdpEngine, BuiltEngine]]:
    """An engine in training, in a world of its own; collective."""
    config = MegatronConfig(**KEYS | {"engine": "fsdp"} | setting.keys)
    parallel.init_process_group(parallel.RankInfo.from_env(), 60)
    try:
        plan = plan_model(config, setting.folder)
        parallel._init_model_parallel(config, 1, 60)
        parallel._seed_all(1)
        passes = PassSettings(packed=setting.packed, pad_id=0, temperature=TEMPERATURE)
        built = build_engine(config, plan, Path(setting.folder), passes, trains=True)
        built.engine.load(HfFolder(setting.folder))
        built.engine.start_training(1)
        yield cast(FsdpEngine, built.engine), built
        dist.barrier()
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
        gc.collect()


def train(setting: Setting, steps: int = 5) -> dict[str, Any]:
    """Trains as `training_jobs.train`, and reports the gradients of the first step too."""
    gradients: dict[str, Any] = {}
    with engine_of(setting) as (engine, built):
        rows = my_rows(all_rows())

        def keep() -> None:
            read = built.read_gradients()
            gradients.update({name: gradients.get(name, gradient.numpy()) for name, gradient in read.items()})

        engine.on_gradients.append(keep)
        results = [engine.train_step(rows, setting.batching, weighted_loss) for _ in range(steps)]
        weights = {name: tensor.clone() for name, tensor in built.build_stream().named_tensors()}
        return summary(results, weights) | {"gradients": gradients}


def forward(setting: Setting) -> dict[int, tuple[Any, Any]]:
    """Log-probs and entropies by row, of this rank's rows."""
    with engine_of(setting) as (engine, _):
        mine = range(dist.get_rank(), 8, dist.get_world_size())
        output = engine.forward(my_rows(all_rows()), setting.batching)
        return {row: (a.numpy(), b.numpy()) for row, a, b in zip(mine, *output)}


def save(setting: Setting, folder: str, steps: int, more: int) -> dict[str, Any]:
    """Trains, saves, and trains on."""
    with engine_of(setting) as (engine, built):
        rows = my_rows(all_rows())
        for _ in range(steps):
            engine.train_step(rows, setting.batching, weighted_loss)
        CheckpointSaver(engine, folder, built.files).save(steps, {"reached": steps})
        results = [engine.train_step(rows, setting.batching, weighted_loss) for _ in range(more)]
        return summary(results, {name: tensor.clone() for name, tensor in built.build_stream().named_tensors()})


def resume(setting: Setting, folder: str, more: int) -> dict[str, Any]:
    """Trains on from a checkpoint."""
    with engine_of(setting) as (engine, built):
        loaded = load_checkpoint(engine, folder, files=built.files)
        results = [engine.train_step(my_rows(all_rows()), setting.batching, weighted_loss) for _ in range(more)]
        weights = {name: tensor.clone() for name, tensor in built.build_stream().named_tensors()}
        return summary(results, weights) | {"loaded": loaded}


def load_megatron(setting: Setting, folder: str) -> str:
    """Returns what a load of the checkpoint by Megatron's engine raises."""
    with jobs.engine_of(setting) as engine:
        try:
            load_checkpoint(engine, folder)
        except ValueError as error:
            return str(error)
        return ""


def compare(folder: str, break_weight: bool) -> list[tuple[str, float, str]]:
    """Differences between the engines on one step from a folder; `break_weight` changes a weight of one of them."""
    cfg = build_run_config({"megatron_training": {"stage": "sft", "load": folder, "lr": 1e-3}})
    inner = FsdpEngine.load

    def load(self: FsdpEngine, source: Any) -> None:
        inner(self, source)
        self.model.read_rows("model.layers.0.mlp.up_proj.weight")[0][0] *= 1.01

    if break_weight:
        FsdpEngine.load = load
    try:
        differences = engine_parity.compare_engines(cfg, ["megatron", "fsdp"], 4, 24)
    finally:
        FsdpEngine.load = inner
    return [(difference.quantity, difference.value, difference.place) for difference in differences]


def read_frequencies(setting: Setting) -> tuple[str, Any]:
    """Format and values of the rotary frequencies of a model that does not train, as a reference is built."""
    config = MegatronConfig(**KEYS | {"engine": "fsdp", "bf16": True} | setting.keys)
    parallel.init_process_group(parallel.RankInfo.from_env(), 60)
    try:
        plan = plan_model(config, setting.folder)
        parallel._init_model_parallel(config, 1, 60)
        passes = PassSettings(packed=True, pad_id=0, temperature=TEMPERATURE)
        built = build_engine(config, plan, Path(setting.folder), passes, trains=False)
        values = dict(cast(FsdpEngine, built.engine).model.module.named_buffers())["model.model.rotary_emb.inv_freq"]
        return str(values.dtype), values.float().numpy()
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
        gc.collect()
