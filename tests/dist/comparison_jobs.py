# ruff: noqa: E402  (Megatron and vLLM must be imported after the adaptors)
"""Jobs that compare trainer and rollout engine, whole or after one of them was tampered with."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from training_jobs import parallel_state  # applies the adaptor of Megatron

from mindspeed_rl import adaptors

adaptors.apply("rollout")

# isort: split
import torch
import torch.distributed as dist
from tokenizers import Tokenizer
from tokenizers import models as token_models
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast

from mindspeed_rl.config import load_run_config
from mindspeed_rl.diagnostics.comparison_worker import ComparisonWorker
from mindspeed_rl.diagnostics.train_vs_rollout import Comparison
from mindspeed_rl.dumps.causes import EngineOutputs, Evidence, TrainerOutputs
from mindspeed_rl.models.plan import plan_model
from mindspeed_rl.run.models import plan_models
from mindspeed_rl.run.phases import Phase
from mindspeed_rl.run.resolve import resolve

PROMPTS = [[5, 9, 40, 17, 22], [61, 3, 77], [30, 31, 32, 33, 34, 35, 36, 37, 38]]
Tamper = Callable[["Sides"], None]


class Sides:
    """The one rank of a world, and what is done to it.

    Attributes:
        pushed: called with the engine's model and the number of the push, behind each.
        prompt: what the engine is given for a prompt.
    """

    def __init__(self, worker: ComparisonWorker) -> None:
        self.worker = worker
        self.pushed: Callable[[nn.Module, int], None] = lambda model, number: None
        self.prompt: Callable[[Sequence[int]], Sequence[int]] = lambda ids: ids
        plain = worker._push

        def push(version: int) -> None:
            plain(version)
            self.pushed(worker.rollout.engine.get_model(), version)

        worker._push = push

    def call(self, phase: Phase, *arguments: Any) -> list[Any]:
        return getattr(self, phase.name)(*arguments)

    def push_twice(self) -> list[None]:
        self.worker.notes.clear()
        return [self.worker.push_twice()]

    def check_weights(self) -> list[Any]:
        return [self.worker.check_weights()]

    def generate(self, prompt_ids: Sequence[int], num_tokens: int, number: int) -> list[EngineOutputs | None]:
        return [self.worker.generate(self.prompt(prompt_ids), num_tokens, number)]

    def forward(self, prompt_ids: Sequence[int], response_ids: Sequence[int]) -> list[TrainerOutputs]:
        return [self.worker.forward(prompt_ids, response_ids)]

    def temperatures(self) -> list[tuple[float, float]]:
        return [self.worker.temperatures()]


def _experts(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: value for name, value in model.named_parameters() if ".experts." in name}


def _transposed(sides: Sides) -> None:
    def swap(model: nn.Module, number: int) -> None:
        for name, value in _experts(model).items():
            if name.endswith("w2_weight"):
                value.data.copy_(value.data.transpose(1, 2).reshape(value.shape))

    sides.pushed = swap


def _stale(sides: Sides) -> None:
    kept: dict[str, Tensor] = {}

    def keep(model: nn.Module, number: int) -> None:
        for name, value in _experts(model).items():
            if number == 0:
                kept[name] = value.data.clone()
            else:
                value.data.copy_(kept[name])

    sides.pushed = keep


def _changed(end: str) -> Tamper:
    def tamper(sides: Sides) -> None:
        def change(model: nn.Module, number: int) -> None:
            (value,) = [value for name, value in model.named_parameters() if name.endswith(end)]
            value.data.mul_(1.25)

        sides.pushed = change

    return tamper


def _rows_swapped(sides: Sides) -> None:
    """The trainer's query, key and value lie in another order than its weight map says, and nothing but a forward shows it."""
    layer = sides.worker.role.model.models[0].decoder.layers[1]
    weight = layer.self_attention.linear_qkv.weight
    plain = layer.self_attention.linear_qkv.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        out, bias = plain(*args, **kwargs)
        half = weight.size(0) // 2
        return torch.cat([out[..., half:], out[..., :half]], -1), bias

    layer.self_attention.linear_qkv.forward = forward


def _temperature(sides: Sides) -> None:
    sides.worker.role.engine.temperature *= 1.3


def _template(sides: Sides) -> None:
    sides.prompt = lambda ids: [*ids[:-1], ids[-1] + 1]


def _router(sides: Sides) -> None:
    for model in sides.worker.role.model.models:
        for layer in model.decoder.layers:
            layer.mlp.router.topk = 1


TAMPER: dict[str, Tamper] = {
    "none": lambda sides: None,
    "transposed": _transposed,
    "stale": _stale,
    "norm": _changed("layers.1.post_attention_layernorm.weight"),
    "gate": _changed("layers.0.mlp.gate.weight"),
    "conversion": _rows_swapped,
    "temperature": _temperature,
    "template": _template,
    "router": _router,
}


def compare(
    folder: str, work: str, tampers: Sequence[str], engine_type: str | None = None, keys: Sequence[str] = ()
) -> dict[str, tuple[str, Evidence]]:
    """By what was done: the cause that is named, with its sentence, and what it was named by.

    Args:
        folder: of the model.
        work: takes a tokenizer.
        engine_type: what the engine computes in, where it is not the trainer's type.
        keys: further ones, as KEY=VALUE.
    """
    vocabulary = {"<pad>": 0, "<eos>": 1, "<unk>": 2} | {chr(code): code for code in range(32, 127)}
    tokenizer = Tokenizer(token_models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>").save_pretrained(work)
    settings = {
        "actor_config.load": folder,
        "megatron_training.tokenizer_name_or_path": work,
        "actor_config.tensor_model_parallel_size": 1,
        "rl_config.actor_resource.num_npus": 1,
        "actor_config.save": "null",
        "model.tiny_qwen25.num_layers": "null",
        "model.tiny_qwen25.padded_vocab_size": "null",
        "generate_config.kv_cache_memory_gib": 0.03,
        "generate_config.sampling_config.temperature": 0.8,
    }
    cfg = load_run_config(
        "grpo_tiny_cpu",
        None,
        [
            *(f"{name}={value}" for name, value in settings.items()),
            *keys,
        ],
    )
    run = plan_models(resolve(cfg, platform="cpu"))
    if engine_type is not None:  # run files may not say so: the two would disagree
        generate = dataclasses.replace(run.generate, dtype=engine_type)
        run = dataclasses.replace(run, config=dataclasses.replace(run.config, generate_config=generate))
    moe_layers = plan_model(cfg.actor_config, Path(folder)).model_config.moe_layers
    results: dict[str, tuple[str, Evidence]] = {}
    worker = ComparisonWorker(run, f"comparison{dist.__name__}", rank=0)
    try:
        for name in tampers:
            sides = Sides(worker)
            layers = [layer for model in worker.role.model.models for layer in model.decoder.layers]
            state = {
                "temperature": worker.role.engine.temperature,
                "topk": [getattr(getattr(layer.mlp, "router", None), "topk", None) for layer in layers],
                "push": ComparisonWorker._push.__get__(worker),
                "forward": [layer.self_attention.linear_qkv.__dict__.get("forward") for layer in layers],
            }
            TAMPER[name](sides)
            evidence = Comparison(sides).gather_evidence(run, PROMPTS, 8, moe_layers)
            cause = evidence.name_cause()
            results[name] = ("" if cause is None else str(cause), evidence)
            worker.role.engine.temperature, worker._push = state["temperature"], state["push"]
            for layer, topk in zip(layers, state["topk"]):
                layer.self_attention.linear_qkv.__dict__.pop("forward", None)
                if topk is not None:
                    layer.mlp.router.topk = topk
            worker.rollout.engine.restore_memory("cache")
        return results
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
        del worker
        gc.collect()
