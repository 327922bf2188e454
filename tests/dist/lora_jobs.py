"""A job of two ranks: the same LoRA training under many layouts; rank 0 writes losses, norms and merged weights."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from safetensors.torch import save_file

from mindspeed_rl.algorithms.interfaces import LossInputs, LossOutput
from mindspeed_rl.checkpoint.hf import HfFolder
from mindspeed_rl.checkpoint.lora import MergedSource, open_peft
from mindspeed_rl.config import MegatronConfig
from mindspeed_rl.engine import parallel
from mindspeed_rl.engine.batching import MicroBatching, Rows
from mindspeed_rl.engine.build import batch_shape, build_model
from mindspeed_rl.engine.checkpoint import CheckpointSaver, load_checkpoint
from mindspeed_rl.engine.lora import load_peft, save_peft
from mindspeed_rl.engine.lora_layers import LoraSettings
from mindspeed_rl.engine.train_engine import TrainEngine
from mindspeed_rl.engine.weights import load_weights
from mindspeed_rl.models import specs
from mindspeed_rl.models.plan import plan_model
from mindspeed_rl.resharding.transfer import WeightStream

TP = {"tensor_model_parallel_size": 2}
SP = {**TP, "sequence_parallel": True}
LAYOUTS: dict[str, dict[str, dict[str, Any]]] = {
    "dense": {
        "dp2": {},
        "tp2": TP,
        "tp2-sp": SP,
        "tp2-sp-recompute": {
            **SP,
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
        },
        "pp2": {"pipeline_model_parallel_size": 2},
        "dp2-distributed": {"use_distributed_optimizer": True},
    },
    "moe": {
        "dp2": {},
        "ep2": {"expert_model_parallel_size": 2},
        "ep2-grouped": {"expert_model_parallel_size": 2, "moe_grouped_gemm": True},
        "tp2-etp2": {**SP, "expert_tensor_parallel_size": 2},
        "tp2-etp2-grouped": {**SP, "expert_tensor_parallel_size": 2, "moe_grouped_gemm": True},
        "tp2-ep2": {**SP, "expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1},
    },
}
if specs.GROUPED_EXPERTS is None:
    LAYOUTS["moe"] = {name: keys for name, keys in LAYOUTS["moe"].items() if not name.endswith("-grouped")}
#: one saves, the next loads what it saved
SAVED = {"dense": ("tp2-sp", "pp2"), "moe": ("tp2-etp2" if specs.GROUPED_EXPERTS is None else "tp2-etp2-grouped", "ep2")}
BATCH = [torch.arange(2, 9), torch.arange(11, 22), torch.arange(30, 36), torch.arange(1, 13)]
PROMPTS = [3, 2, 1, 4]


def negative_log_prob(inputs: LossInputs) -> LossOutput:
    return LossOutput(-(inputs.outputs[0] * inputs.mask).sum(), inputs.mask.sum())


def make_engine(folder: Path, **keys: Any) -> TrainEngine:
    settings = {
        "bf16": False,
        "lr": 1e-2,
        "train_iters": 10,
        "lr_decay_style": "constant",
        "lora_target_modules": ["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"],
        "lora_r": 4,
        "clip_grad": 0.5,
        "weight_decay": 0.1,
    }
    config = MegatronConfig(**{**settings, **keys})
    parallel_state.destroy_model_parallel()
    plan = plan_model(config, folder)
    parallel._init_model_parallel(config, plan.layout.vpp, 120)
    parallel._seed_all(1)
    model = build_model(config, plan, trainable=True)
    load_weights(model, HfFolder(folder))
    engine = TrainEngine(config, model, batch_shape(config, packed=True, pad_id=0))
    engine.start_training(1)
    return engine


def my_rows() -> Rows:
    """This data-parallel rank's share of the batch."""
    size, rank = parallel_state.get_data_parallel_world_size(), parallel_state.get_data_parallel_rank()
    return Rows(BATCH[rank::size], PROMPTS[rank::size])


def train_every_layout(folder: Path) -> None:
    """The folder has the models `dense` and `moe`, and gets the files."""
    rank = int(os.environ["RANK"])
    parallel.init_process_group(parallel.RankInfo(rank, 2, rank), 120)
    for kind, layouts in LAYOUTS.items():
        saver, loader = SAVED[kind]
        for layout, keys in layouts.items():
            engine = make_engine(folder / kind, **keys)
            norms = [engine.train_step(my_rows(), MicroBatching(1), negative_log_prob).grad_norm for _ in range(4)]
            results = dict(WeightStream(engine.model).named_tensors())
            if rank == 0:
                save_file({**results, "norms": torch.tensor(norms)}, folder / f"{kind}-{layout}.safetensors")
            if layout == saver:
                settings = LoraSettings.from_config(engine.config)
                save_peft(engine.model, settings, folder / f"{kind}-adapter", str(folder / kind))
                for name, filtered in (("whole", False), ("adapters", True)):
                    engine.config = dataclasses.replace(engine.config, lora_ckpt_filter=filtered)
                    CheckpointSaver(engine, folder / f"{kind}-{name}").save(4, {})
        for name in ("whole", "adapters"):
            engine = make_engine(folder / kind, no_load_optim=True, **layouts[loader])
            load_checkpoint(engine, folder / f"{kind}-{name}")
            results = dict(WeightStream(engine.model).named_tensors())
            if rank == 0:
                save_file(results, folder / f"{kind}-{name}-loaded.safetensors")
        for name in ("trained", "merged"):
            engine = make_engine(folder / kind, **layouts[loader])
            base, settings = HfFolder(folder / kind), LoraSettings.from_config(engine.config)
            plan = engine.model.plan
            adapter = open_peft(folder / f"{kind}-adapter", plan.architecture.weight_ops(plan.model_config))
            if name == "trained":
                load_peft(engine.model, settings, adapter)
            else:
                load_weights(engine.model, MergedSource(base, adapter))
            results = dict(WeightStream(engine.model).named_tensors())
            if rank == 0:
                save_file(results, folder / f"{kind}-{name}-loaded.safetensors")
