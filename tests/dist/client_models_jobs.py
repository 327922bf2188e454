"""Jobs on models of clients without a rollout engine: several ranks, and passes of several models at once."""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from mindspeed_rl import adaptors
from mindspeed_rl.checkpoint.hf import HfFolder
from mindspeed_rl.config import MegatronConfig
from mindspeed_rl.engine import parallel
from mindspeed_rl.engine.batching import MicroBatching
from mindspeed_rl.engine.build import batch_shape, build_model
from mindspeed_rl.engine.train_engine import TrainEngine
from mindspeed_rl.engine.weights import load_weights
from mindspeed_rl.models.plan import plan_model
from mindspeed_rl.platform.environment import EXACT_VARIABLE
from mindspeed_rl.service.backend import AdamParams, AdapterSpec, CallError, Capabilities, Datum, LossCall, PassCall
from mindspeed_rl.service.client_models import ClientModels

SPECS = {
    "a": AdapterSpec(8, seed=1),
    "b": AdapterSpec(5, seed=2, train_unembed=False),
    "c": AdapterSpec(1, seed=3, train_mlp=False),
    "d": AdapterSpec(3, seed=4, train_attn=False),
}


@contextlib.contextmanager
def models_of(folder: Path, budget: int, **keys: Any) -> Iterator[ClientModels]:
    """Models in a world of its own; collective."""
    targets = ["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"]
    config = MegatronConfig(**{"bf16": False, "lora_target_modules": targets, "lora_r": 8, "lora_alpha": 32, **keys})
    parallel.init_process_group(parallel.RankInfo.from_env(), 60)
    try:
        plan = plan_model(config, folder)
        parallel._init_model_parallel(config, plan.layout.vpp, 60)
        parallel._seed_all(1)
        model = build_model(config, plan, trainable=False)
        load_weights(model, HfFolder(folder))
        engine = TrainEngine(config, model, batch_shape(config, packed=True, pad_id=0))
        offered = Capabilities("tiny", folder, plan.model_config.vocab_size, 512, 0, 4, True, False)
        yield ClientModels(engine, config, MicroBatching(1, budget), offered)
        dist.barrier()
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
        gc.collect()


def draw(seed: int, count: int, longest: int, loss: str) -> list[Datum]:
    rng, data = np.random.default_rng(seed), []
    for _ in range(count):
        size = int(rng.integers(2, longest + 1))
        tokens = rng.integers(0, 60, size + 1)
        inputs: dict[str, Any] = {"target_tokens": tokens[1:]}
        if loss == "cross_entropy":
            inputs["weights"] = rng.normal(size=size).astype(np.float32)
        else:
            inputs["logprobs"] = -4 * rng.random(size).astype(np.float32)
            inputs["advantages"] = rng.normal(size=size).astype(np.float32)
        data.append(Datum(tokens[:-1].tolist(), inputs))
    return data


def train(folder: Path, out: Path, **keys: Any) -> dict[str, Any]:
    """Two steps of two models with three calls each, one with fewer rows than ranks, and the folders of the first."""
    seen: dict[str, Any] = {"numbers": [], "norms": []}
    with models_of(folder, 64, **keys) as models:
        for name in "ab":
            models.create_model(name, SPECS[name])
        for step in range(2):
            for part, (count, loss) in enumerate(((5, "ppo"), (1, "cross_entropy"), (4, "gspo"))):
                calls = [PassCall(name, draw(ord(name) + 10 * step + part, count, 20, loss), LossCall(loss)) for name in "ab"]
                for result in models.run_passes(calls):
                    assert not isinstance(result, CallError), result
                    seen["numbers"] += [float(value) for row in result.outputs for value in row["logprobs"].flatten()]
                    seen["numbers"].append(result.metrics["loss:sum"])
            for name in "ab":
                seen["norms"].append(models.optim_step(name, AdamParams(1e-3, grad_clip_norm=1.0))["grad_norm:mean"])
        many = draw(7, 3, 9, "cross_entropy")
        wide = [
            Datum(datum.tokens, {name: np.stack([values, values[::-1]], 1) for name, values in datum.inputs.items()})
            for datum in many
        ]
        (result,) = models.run_passes([PassCall("a", wide, LossCall("cross_entropy"), forward_only=True)])
        assert not isinstance(result, CallError), result
        seen["numbers"] += [float(value) for row in result.outputs for value in row["logprobs"].flatten()]
        models.save_state("a", out, with_optimizer=True)
        for wrong in (
            lambda: models.save_state("a", out, with_optimizer=True),
            lambda: models.load_state("z", out / "z", with_optimizer=True),
        ):
            try:
                wrong()
            except CallError as error:
                seen.setdefault("errors", []).append(str(error))
        seen["weights"] = {
            f"{name}/{key}": value.detach().numpy().copy()
            for name in "ab"
            for key, value in models._models[name].matrices.items()
        }
    return seen


def resume(folder: Path, saved: Path, **keys: Any) -> list[float]:
    """A step of a model from the folder of another layout."""
    with models_of(folder, 64, **keys) as models:
        models.load_state("other", saved, with_optimizer=True)
        (result,) = models.run_passes([PassCall("other", draw(99, 5, 20, "ppo"), LossCall("ppo"))])
        assert not isinstance(result, CallError), result
        norm = models.optim_step("other", AdamParams(1e-3))["grad_norm:mean"]
        return [result.metrics["loss:sum"], norm]


def compare_company(folder: Path, budget: int, orders: Sequence[str]) -> dict[str, Any]:
    """Models whose bits differ between passes of their own and joint ones, with how many passes were joint."""
    os.environ[EXACT_VARIABLE] = "1"
    adaptors.apply("train")
    losses = dict(zip("abcd", ("cross_entropy", "ppo", "gspo", "dro")))
    with models_of(folder, budget) as models:
        for index, (name, spec) in enumerate(SPECS.items()):
            models.create_model(name, spec)
            generator = torch.Generator().manual_seed(index)
            for matrix in models._models[name].matrices.values():
                matrix.data.copy_(0.05 * torch.randn(matrix.shape, generator=generator))
        # one has two tokens: products of so few rows are added up in another order where nothing prevents it
        sizes = {"a": (7, 61), "b": (7, 61), "c": (1, 2), "d": (5, 33)}
        calls = {name: PassCall(name, draw(ord(name), *sizes[name], loss), LossCall(loss)) for name, loss in losses.items()}
        broken = PassCall("d", draw(5, 3, 30, "ppo"), LossCall("ppo"))
        broken.data[1].inputs["logprobs"][:] = -3e4

        def read(name: str, result: Any) -> list[Any]:
            matrices = models._models[name].matrices.values()
            bits = [None if matrix.grad is None else matrix.grad.numpy().tobytes() for matrix in matrices]
            for matrix in matrices:
                matrix.grad = None
            return [str(result)] if isinstance(result, CallError) else [
                bits, [value.tobytes() for row in result.outputs for value in row.values()], dict(result.metrics)
            ]  # fmt: skip

        alone = {name: read(name, models.run_passes([call])[0]) for name, call in calls.items()}
        assert models.num_joined_passes == 0
        differing = []
        for order in orders:
            results = models.run_passes([calls[name] for name in order])
            differing += [f"{name} in {order}" for name, result in zip(order, results) if read(name, result) != alone[name]]
        *others, refused = models.run_passes([calls["a"], calls["c"], broken])
        differing += [f"{name} with a broken one" for name, result in zip("ac", others) if read(name, result) != alone[name]]
        joined, compute = models.num_joined_passes, models._engine.compute_requests

        def fail_together(requests: Any, *arguments: Any, **keywords: Any) -> Any:
            computed = compute(requests, *arguments, **keywords)
            if len(requests) > 1:
                raise RuntimeError("for the test, with all gradients computed")
            return computed

        models._engine.compute_requests = fail_together  # type: ignore[method-assign]
        results = models.run_passes([calls["a"], calls["c"]])
        differing += [f"{name} after a failure" for name, result in zip("ac", results) if read(name, result) != alone[name]]
        return {"differing": differing, "joined": joined, "refused": read("d", refused)}
