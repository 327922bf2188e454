"""Jobs on the engine of transformers' modules, beside the same jobs of `training_jobs` on Megatron's."""

from __future__ import annotations

import contextlib
import gc
import importlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import prefix_jobs
import replay_jobs
import torch
import torch.distributed as dist
import training_jobs as jobs
import vision_jobs
from megatron.core import parallel_state
from training_jobs import KEYS, TEMPERATURE, Setting, all_rows, my_rows, summary, weighted_loss

from mindspeed_rl.checkpoint.hf import HfFolder
from mindspeed_rl.checkpoint.lora import open_peft
from mindspeed_rl.config import MegatronConfig, build_run_config
from mindspeed_rl.diagnostics import engine_parity
from mindspeed_rl.engine import parallel
from mindspeed_rl.engine.checkpoint import CheckpointSaver, MegatronFiles, iteration_folder, load_checkpoint
from mindspeed_rl.engine.fsdp.engine import FsdpEngine
from mindspeed_rl.engine.fsdp.optimizer import list_states
from mindspeed_rl.engine.interface import Engine, SavedState
from mindspeed_rl.engine.lora import adapters_disabled, list_adapters, save_peft
from mindspeed_rl.engine.lora_layers import AdaptedModule, LoraSettings
from mindspeed_rl.engine.optimizer import reload_main_weights
from mindspeed_rl.engine.router_replay import ExpertReplay
from mindspeed_rl.engine.saved_states import AVERAGE, WEIGHTS, open_saved_state
from mindspeed_rl.engine.weight_average import WeightAverage
from mindspeed_rl.files import read_json
from mindspeed_rl.models.plan import plan_model
from mindspeed_rl.models.weights import TensorSource
from mindspeed_rl.resharding.transfer import WeightStream
from mindspeed_rl.workers.engines import BuiltEngine, PassSettings, build_engine, read_buffers


@contextlib.contextmanager
def engine_of(setting: Setting) -> Iterator[tuple[FsdpEngine, BuiltEngine]]:
    """An engine in training, in a world of its own; collective."""
    config = MegatronConfig(**KEYS | {"engine": "fsdp"} | setting.keys)
    parallel.init_process_group(parallel.RankInfo.from_env(), 60)
    try:
        plan = plan_model(config, setting.folder)
        parallel._init_model_parallel(config, 1, 60)
        parallel._seed_all(1)
        passes = PassSettings(setting.packed, 0, TEMPERATURE, shares_prefixes=setting.shares_prefixes)
        built = build_engine(config, plan, Path(setting.folder), passes, trains=True)
        built.engine.load(HfFolder(setting.folder))
        built.engine.start_training(1)
        yield cast(FsdpEngine, built.engine), built
        dist.barrier()
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
        gc.collect()


def train(setting: Setting, steps: int = 5, trees: bool | None = None) -> dict[str, Any]:
    """Trains as `training_jobs.train`, or with `trees` as `prefix_jobs.train`; reports the gradients of the first step too."""
    gradients: dict[str, Any] = {}
    with engine_of(setting) as (engine, built):
        rows = my_rows(all_rows() if trees is None else prefix_jobs.tree_rows() if trees else prefix_jobs.grouped_rows())

        def keep() -> None:
            read = built.read_gradients()
            gradients.update({name: gradients.get(name, gradient.numpy()) for name, gradient in read.items()})

        engine.on_gradients.append(keep)
        results = [engine.train_step(rows, setting.batching, weighted_loss) for _ in range(steps)]
        weights = {name: tensor.clone() for name, tensor in built.build_stream().named_tensors()}
        return summary(results, weights) | {"gradients": gradients}


def _list_mine(count: int = 8) -> range:
    """Indexes of `my_rows`, of so many rows."""
    return range(parallel_state.get_data_parallel_rank(), count, parallel_state.get_data_parallel_world_size())


def forward(setting: Setting) -> dict[int, tuple[Any, Any]]:
    """Log-probs and entropies by row, of this rank's rows."""
    with engine_of(setting) as (engine, _):
        mine = _list_mine()
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


def read_states(setting: Setting, steps: int) -> dict[str, Any]:
    """The gradients of each step, and after the last one the moments of the optimizer and their format, in a world of one."""
    gradients: list[dict[str, Any]] = []
    with engine_of(setting) as (engine, built):
        engine.on_gradients.append(
            lambda: gradients.append({name: value.numpy() for name, value in built.read_gradients().items()})
        )
        results = [engine.train_step(my_rows(all_rows()), setting.batching, weighted_loss) for _ in range(steps)]
        assert engine.optimizer is not None
        states = list_states(engine.optimizer)
        named = {name: states[parameter] for name, parameter in engine.model.list_trained().items()}
        moments = {
            f"{moment} {name}": (str(value.dtype), value.to_local().float().numpy().copy())
            for name, values in named.items()
            for moment, value in values.items()
        }
        resident = engine.offloader.resident_bytes()["optimizer"]
        norms = [result.grad_norm for result in results]
        weights = {name: tensor.numpy().copy() for name, tensor in built.build_stream().named_tensors()}
        return {"gradients": gradients, "moments": moments, "resident": resident, "norms": norms, "weights": weights}


def resume(setting: Setting, folder: str, more: int) -> dict[str, Any]:
    """Trains on from a checkpoint."""
    with engine_of(setting) as (engine, built):
        loaded = load_checkpoint(engine, folder, files=built.files)
        results = [engine.train_step(my_rows(all_rows()), setting.batching, weighted_loss) for _ in range(more)]
        weights = {name: tensor.clone() for name, tensor in built.build_stream().named_tensors()}
        return summary(results, weights) | {"loaded": loaded}


def save_averaged(setting: Setting, folder: str, steps: int, source: str) -> dict[str, Any]:
    """Trains with a moving average of the weights on Megatron's engine, saves, and reports the average.

    Args:
        source: the module that has the rows.
    """
    with jobs.engine_of(setting) as engine:
        rows = my_rows(importlib.import_module(source).all_rows())
        engine.average = WeightAverage(engine.list_trained, 0.9)
        for _ in range(steps):
            engine.train_step(rows, setting.batching, weighted_loss)
        CheckpointSaver(engine, folder).save(steps, {})
        with engine.average.in_place():
            return {name: tensor.clone() for name, tensor in WeightStream(engine.model).named_tensors()}


def read_average(setting: Setting, folder: str) -> dict[str, Any]:
    """The moving average of a checkpoint by HF name, taken by the engine, and whether it is another one than the weights."""
    with engine_of(setting) as (engine, built):
        engine.average = WeightAverage(engine.list_trained, 0.9)
        load_checkpoint(engine, folder, files=built.files)
        weights = {name: tensor.clone() for name, tensor in built.build_stream().named_tensors()}
        with engine.average.in_place():
            average = {name: tensor.clone() for name, tensor in built.build_stream().named_tensors()}
        return {"average": average, "differs": any(not torch.equal(average[name], weights[name]) for name in average)}


def pass_on(setting: Setting, folder: str, out: str, averages: bool = False) -> dict[str, Any]:
    """Takes a checkpoint and saves it again, without a step between them."""
    with engine_of(setting) as (engine, built):
        if averages:
            engine.average = WeightAverage(engine.list_trained, 0.9)
        loaded = load_checkpoint(engine, folder, files=built.files)
        CheckpointSaver(engine, out, built.files).save(loaded["iteration"], loaded["run_state"])
        return loaded


def pass_on_megatron(setting: Setting, folder: str, out: str, averages: bool = False) -> dict[str, Any]:
    """The same on Megatron's engine."""
    with jobs.engine_of(setting) as engine:
        if averages:
            engine.average = WeightAverage(engine.list_trained, 0.9)
        loaded = load_checkpoint(engine, folder)
        CheckpointSaver(engine, out).save(loaded["iteration"], loaded["run_state"])
        return loaded


def refuse(setting: Setting, folder: str) -> str:
    """Returns what a load raises."""
    with engine_of(setting) as (engine, built):
        try:
            load_checkpoint(engine, folder, files=built.files)
        except ValueError as error:
            return str(error)
        return ""


class _OneRankLacks:
    """The state of a checkpoint whose optimizer states the first rank cannot read."""

    def __init__(self, saved: SavedState) -> None:
        self._saved = saved

    def open(self, state: str) -> TensorSource:
        if state not in (WEIGHTS, AVERAGE) and dist.get_rank() == 0:
            raise ValueError(f"the checkpoint has no {state}")
        return self._saved.open(state)

    def open_weights(self) -> TensorSource:
        return self._saved.open_weights()


def adopt_what_one_rank_lacks(setting: Setting, folder: str, iteration: int) -> str:
    """What each rank says where the first one cannot read a state of the other engine's checkpoint."""
    with jobs.engine_of(setting) as engine:
        path = iteration_folder(folder, iteration)
        saved = open_saved_state("fsdp", path, engine.plan, has_score_head=False)
        record = read_json(path / "run_state.json")
        try:
            MegatronFiles(engine).adopt(_OneRankLacks(saved), record, with_optimizer=True, with_average=False)
        except ValueError as error:
            return str(error)
        return "nothing"


def refuse_megatron(setting: Setting, folder: str) -> str:
    """Returns what a load by Megatron's engine raises."""
    with jobs.engine_of(setting) as engine:
        try:
            load_checkpoint(engine, folder)
        except ValueError as error:
            return str(error)
        return ""


def _break_weight(engine: FsdpEngine) -> None:
    engine.model.read_rows("model.layers.0.mlp.up_proj.weight")[0][0] *= 1.01


def _break_group(engine: FsdpEngine, name: str, change: Callable[[Any], Any]) -> None:
    for group in engine.optimizer.param_groups:
        group[name] = change(group[name])


def _skip_tensor(engine: FsdpEngine) -> None:
    """Leave one tensor out of the optimizer."""
    left_out = engine.model.names["model.layers.0.input_layernorm.weight"]
    for group in engine.optimizer.param_groups:
        group["params"] = [parameter for parameter in group["params"] if parameter is not left_out]


def _break_betas(engine: FsdpEngine, factors: tuple[float, float]) -> None:
    _break_group(engine, "betas", lambda betas: tuple(beta * factor for beta, factor in zip(betas, factors)))


#: what is wrong in one of two engines
_FAULTS: dict[str, Callable[[FsdpEngine], None]] = {
    "": lambda engine: None,
    "weight": _break_weight,
    "decay of biases": lambda engine: _break_group(engine, "weight_decay", lambda _: 0.01),
    "rate": lambda engine: _break_group(engine, "lr", lambda rate: 1.001 * rate),
    "update of a tensor": _skip_tensor,
    "beta1": lambda engine: _break_betas(engine, (0.99, 1.0)),
    "beta2": lambda engine: _break_betas(engine, (1.0, 0.99)),
    "clip": lambda engine: setattr(engine, "config", replace(engine.config, clip_grad=0.0)),
    "eps": lambda engine: _break_group(engine, "eps", lambda eps: 1e3 * eps),
}


def compare(folder: str, fault: str = "", **keys: Any) -> list[tuple[str, float, str]]:
    """Differences between the engines on one step from a folder, one of which may have a fault."""
    cfg = build_run_config({"megatron_training": {"stage": "sft", "load": folder, "lr": 1e-6, **keys}})
    inner = FsdpEngine.start_training

    def start_training(self: FsdpEngine, steps_per_iteration: int) -> None:
        inner(self, steps_per_iteration)
        _FAULTS[fault](self)

    FsdpEngine.start_training = start_training
    try:
        differences = engine_parity.compare_engines(cfg, ["megatron", "fsdp"], 4, 24)
    finally:
        FsdpEngine.start_training = inner
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


ADAPTED = {"lora_target_modules": ["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"], "lora_r": 3, "lora_alpha": 7}


def _report_adapters(engine: Any, stream: Any, disabled: Any, steps: int, setting: Setting) -> dict[str, Any]:
    """Log-probs with and without adapters, and what some steps make of them."""
    rows, mine = my_rows(all_rows()), _list_mine()
    with_adapters = engine.forward(rows, setting.batching)[0]
    with disabled:
        without = engine.forward(rows, setting.batching)[0]
    results = [engine.train_step(rows, setting.batching, weighted_loss) for _ in range(steps)]
    weights = {name: tensor.clone() for name, tensor in stream().named_tensors()}
    return summary(results, weights) | {
        "log_probs": {row: values.numpy() for row, values in zip(mine, with_adapters)},
        "base": {row: values.numpy() for row, values in zip(mine, without)},
    }


def megatron_adapters(setting: Setting, folder: str, steps: int = 3) -> dict[str, Any]:
    """Trains adapters that have an effect on Megatron's engine, and writes those of the start to a PEFT folder."""
    generator, gradients = torch.Generator().manual_seed(11), dict[str, Any]()
    with jobs.engine_of(setting) as engine:
        settings = LoraSettings.from_config(engine.config)
        assert settings is not None
        for _, adapter in list_adapters(engine.model):
            adapter.b.copy_(0.1 * torch.randn(adapter.b.shape, generator=generator))
        reload_main_weights(engine.optimizer)
        save_peft(engine.model, settings, folder, setting.folder)
        modules = [module for chunk in engine.model.models for module in chunk.modules() if isinstance(module, AdaptedModule)]

        def keep() -> None:
            for (op, _), module in zip(list_adapters(engine.model), modules, strict=True):
                # Megatron's mark on a parameter: its gradient in the flat buffer
                of_a, of_b = module.lora_a.main_grad, module.lora_b.main_grad
                for tensor, rows in (op.shards_to_hf([of_b]) if op.splits[0].dim == 0 else {op.hf[0]: of_b}).items():
                    gradients.setdefault(f"{tensor}.A", of_a.numpy().copy())
                    gradients.setdefault(f"{tensor}.B", rows.numpy().copy())

        engine.on_gradients.append(keep)
        report = _report_adapters(engine, lambda: WeightStream(engine.model), adapters_disabled(engine.model), steps, setting)
        return report | {"gradients": gradients}


def fsdp_adapters(setting: Setting, folder: str, steps: int = 3, saved: str = "") -> dict[str, Any]:
    """Trains the adapters of a PEFT folder, and writes those of the end to another one."""
    gradients: dict[str, Any] = {}
    with engine_of(setting) as (engine, built):
        assert built.adapters is not None
        plan = engine.plan
        built.adapters.load(open_peft(Path(folder), plan.architecture.weight_ops(plan.model_config)))

        def keep() -> None:
            read = built.read_gradients()
            for tensor, pair in engine.model.pairs.items():
                gradients.setdefault(f"{tensor}.A", read[pair.a].numpy())
                gradients.setdefault(f"{tensor}.B", read[pair.b].numpy())

        engine.on_gradients.append(keep)
        report = _report_adapters(engine, built.build_stream, built.adapters.disabled(), steps, setting)
        if saved:
            built.adapters.save(saved, setting.folder)
        return report | {"gradients": gradients}


def fresh_adapters(setting: Setting) -> dict[str, Any]:
    """The first values of A, by HF tensor, and of all weights with the adapters merged."""
    with engine_of(setting) as (engine, built):
        matrices = {tensor: engine.model.gather(pair.a).numpy() for tensor, pair in engine.model.pairs.items()}
        return {"matrices": matrices, "trained": sorted(engine.model.list_trained())}


def megatron_fresh_adapters(setting: Setting) -> dict[str, Any]:
    """The first values of A by HF tensor, on Megatron's engine."""
    with jobs.engine_of(setting) as engine:
        return {tensor: adapter.a.numpy().copy() for op, adapter in list_adapters(engine.model) for tensor in op.hf}


def _report_replay(
    engine: Engine, layers: ExpertReplay, read: Callable[[], dict[str, Any]], stream: Any, setting: Setting, grouped: bool
) -> dict[str, Any]:
    """Log-probs with given experts, the gradients of a step with them by name, and what three steps make of the weights."""
    gradients: dict[str, Any] = {}
    every = prefix_jobs.grouped_rows() if grouped else all_rows()
    rows, mine = my_rows(replace(every, routing=replay_jobs.draw_routing(engine.plan, every))), _list_mine(len(every))
    output = engine.forward(rows, setting.batching)
    assert output is not None
    log_probs = {row: values.numpy() for row, values in zip(mine, output[0])}
    layers.take_agreement()

    def keep() -> None:
        gradients.update({name: gradients.get(name, gradient.numpy()) for name, gradient in read().items()})

    engine.on_gradients.append(keep)
    results = [engine.train_step(rows, setting.batching, weighted_loss) for _ in range(3)]
    agreement = layers.take_agreement()
    with layers.recording() as recording:
        engine.forward(my_rows(every), setting.batching)
    chosen = layers.gather_recording(recording, rows)
    weights = {name: tensor.clone() for name, tensor in stream().named_tensors()}
    return summary(results, weights) | {
        "log_probs": log_probs,
        "gradients": gradients,
        "agreement": agreement,
        "chosen": {row: replay_jobs.sorted_experts(experts) for row, experts in zip(mine, chosen)},
    }


def replay_megatron(setting: Setting, grouped: bool = False) -> dict[str, Any]:
    """Trains with given experts on Megatron's engine, on one rank."""
    with jobs.engine_of(setting) as engine:
        layers = replay_jobs.add_routed(engine)
        return _report_replay(
            engine, layers, lambda: read_buffers(engine.model), lambda: WeightStream(engine.model), setting, grouped
        )


def replay_fsdp(setting: Setting, grouped: bool = False) -> dict[str, Any]:
    """Trains with given experts on the engine."""
    with engine_of(setting) as (engine, built):
        return _report_replay(
            engine, built.replay_experts(), built.read_gradients, built.build_stream, setting, grouped
        )


def images(setting: Setting, steps: int = 3) -> dict[str, Any]:
    """Log-probs of rows with images, and what training on them makes of the weights; on the engine."""
    with engine_of(setting) as (engine, built):
        return _report_images(engine, built.build_stream, built.read_gradients, setting, steps)


def megatron_images(setting: Setting, steps: int = 3) -> dict[str, Any]:
    """The same on Megatron's engine, on one rank."""
    with jobs.engine_of(setting) as engine:
        return _report_images(
            engine, lambda: WeightStream(engine.model), lambda: read_buffers(engine.model), setting, steps
        )


def _report_images(
    engine: Engine, stream: Any, read: Callable[[], dict[str, Any]], setting: Setting, steps: int
) -> dict[str, Any]:
    gradients: dict[str, Any] = {}
    rows, mine = my_rows(vision_jobs.all_rows()), _list_mine()
    output = engine.forward(rows, setting.batching)
    assert output is not None
    log_probs = {row: values.numpy() for row, values in zip(mine, output[0])}

    def keep() -> None:
        gradients.update({name: gradients.get(name, gradient.numpy()) for name, gradient in read().items()})

    engine.on_gradients.append(keep)
    results = [engine.train_step(rows, setting.batching, weighted_loss) for _ in range(steps)]
    weights = {name: tensor.clone() for name, tensor in stream().named_tensors()}
    return summary(results, weights) | {"log_probs": log_probs, "gradients": gradients}
