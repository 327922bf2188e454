"""Calls of a training service on engines of this process, compared with transformers, peft and with themselves.

usage: service_program.py MODEL_FOLDER WORK_FOLDER
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np

from mindspeed_rl.config import RunConfig, build_run_config
from mindspeed_rl.service.backend import (
    AdamParams,
    AdapterSpec,
    CallError,
    Datum,
    LossCall,
    SampleCall,
    SampleResult,
)
from mindspeed_rl.service.local_backend import LocalBackend

ADAM = AdamParams(1e-2, grad_clip_norm=1.0)
SPECS = {
    "a": AdapterSpec(4, seed=1),
    "b": AdapterSpec(8, seed=2, train_unembed=False),
    "c": AdapterSpec(1, seed=3, train_mlp=False),
    "d": AdapterSpec(2, seed=4, train_attn=False, train_unembed=False),
}


def run_tree(
    folder: str, platform: str = "cpu", lora_r: int = 8, serve: dict[str, Any] | None = None, **generate: Any
) -> dict[str, Any]:
    """A run file of a service; `serve` and `generate` are further keys of their groups. Only the CPU has exact log-probs."""
    return {
        "platform": platform,
        "megatron_training": {"bf16": False, "tokenizer_name_or_path": folder, "reset_attention_mask": True},
        "actor_config": {
            "finetune": True,
            "load": folder,
            "lora_target_modules": ["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"],
            "lora_r": lora_r,
            "lora_alpha": 32,
        },
        "rl_config": {"actor_resource": {"num_npus": 1}, "use_remove_padding": True, "exact_log_probs": platform == "cpu"},
        "generate_config": {
            "infer_tensor_parallel_size": 1,
            "max_num_seqs": 16,
            "max_model_len": 64,
            "max_num_batched_tokens": 256,
            "dtype": "float32",
            **(generate or {"kv_cache_memory_gib": 0.1}),
        },
        "serve_config": {"model_name": "tiny", "num_models": 4, **(serve or {})},
    }


def run_config(folder: str, *args: Any, **keys: Any) -> RunConfig:
    return build_run_config(run_tree(folder, *args, **keys))


def draw(seed: int, length: int, **inputs: Any) -> Datum:
    """A datum of random tokens with the inputs of a loss of sampled tokens."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(3, 90, length + 1)
    drawn = {
        "target_tokens": tokens[1:],
        "logprobs": -4 * rng.random(length).astype(np.float32),
        "advantages": rng.normal(size=length).astype(np.float32),
    }
    return Datum(tokens[:-1].tolist(), inputs or drawn)


def supervised(seed: int, length: int, weights: Sequence[float] | None = None) -> Datum:
    datum = draw(seed, length)
    given = np.ones(length, np.float32) if weights is None else np.asarray(weights, np.float32)
    return Datum(datum.tokens, {"target_tokens": datum.inputs["target_tokens"], "weights": given})


def matrices_of(tenants: Any, name: str) -> dict[str, Any]:
    return tenants._models[name].matrices


class Log:
    """What a model's client saw, as bits."""

    def __init__(self, backend: LocalBackend, name: str) -> None:
        self.backend, self.name, self.seen = backend, name, list[Any]()

    async def train(self, step: int) -> None:
        for part in range(2):
            seed = ord(self.name) * 100 + 2 * step + part
            data = [draw(seed, 9), draw(seed + 50, 5)]
            result = await self.backend.forward_backward(self.name, data, LossCall("ppo"), forward_only=False)
            self.seen += [output["logprobs"].tobytes() for output in result.outputs] + [dict(result.metrics)]
        self.seen.append(dict(await self.backend.optim_step(self.name, ADAM)))

    async def sample(self) -> None:
        sampler = await self.backend.make_sampler(self.name)
        calls = [
            SampleCall(
                range(5, 9 + 3 * k), max_tokens=12, seed=5 + k, num_samples=2, prompt_log_probs=True, top_log_probs=3
            )
            for k in range(3)
        ]
        self.seen.append(repr(await asyncio.gather(*(self.backend.sample(sampler, call) for call in calls))))
        await self.backend.drop_sampler(sampler)

    async def finish(self) -> None:
        bits = self.backend.submit(
            lambda tenants: {key: value.detach().numpy().tobytes() for key, value in matrices_of(tenants, self.name).items()}
        )
        self.seen.append(await asyncio.wrap_future(bits))
        await self.backend.unload(self.name)


async def follow(backend: LocalBackend, names: Sequence[str], turned: int) -> dict[str, list[Any]]:
    """Logs of models that train and sample at the same time; `turned` moves the order of each step."""
    logs = {name: Log(backend, name) for name in names}
    for name in names:
        await backend.create_model(name, SPECS[name])
    for step in range(2):
        order = [names[(index + turned * step) % len(names)] for index in range(len(names))]
        await asyncio.gather(*(logs[name].train(step) for name in order))
    base = await backend.make_sampler(None)
    others = [backend.sample(base, SampleCall([9, 8, 7], max_tokens=9, seed=1))] if len(names) > 1 else []
    await asyncio.gather(*(logs[name].sample() for name in names), *others)
    await asyncio.gather(*(log.finish() for log in logs.values()))
    await backend.drop_sampler(base)
    return {name: log.seen for name, log in logs.items()}


async def count_joined(backend: LocalBackend) -> int:
    return await asyncio.wrap_future(backend.submit(lambda tenants: tenants.num_joined_passes))


async def check_company(backend: LocalBackend) -> dict[str, Any]:
    """Models whose bits depend on the others, and passes with rows of several models: of models alone, and together."""
    alone: dict[str, list[Any]] = {}
    before = await count_joined(backend)
    for name in SPECS:
        alone |= await follow(backend, [name], 0)
    joined = [await count_joined(backend) - before]
    differing = []
    for names, turned in ((list("abcd"), 0), (list("dbca"), 1)):
        together = await follow(backend, names, turned)
        differing += [f"{name} in {names}" for name in names if together[name] != alone[name]]
    return {"differing": differing, "joined": [*joined, await count_joined(backend) - before]}


def reference_gradients(
    folder: Path, adapter: Path, data: Sequence[Datum], loss: Callable[[Any, Datum], Any]
) -> dict[str, Any]:
    """Gradients of the matrices in a PEFT folder, by transformers and peft in float64."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager")
    model = PeftModel.from_pretrained(model, adapter, is_trainable=True).to(torch.float64)
    outputs, total = [], torch.zeros((), dtype=torch.float64)
    for datum in data:
        logits = model(torch.tensor([datum.tokens])).logits[0]
        targets = torch.tensor(np.asarray(datum.inputs["target_tokens"]))
        targets = targets[:, None] if targets.dim() == 1 else targets
        log_probs = logits.log_softmax(-1).gather(1, targets)
        outputs.append(log_probs.detach().numpy())
        total = total + loss(log_probs, datum)
    total.backward()
    gradients = {
        name.replace(".default", ""): parameter.grad.numpy()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    return {"log_probs": outputs, "loss": float(total.detach()), "gradients": gradients}


async def check_numbers(backend: LocalBackend, folder: Path, work: Path) -> dict[str, Any]:
    """Gaps of log-probs, losses and gradients to transformers with peft, and of gradients of two calls to one call's."""
    import torch

    await backend.create_model("numbers", AdapterSpec(4, seed=7))
    first = [supervised(1, 9), supervised(2, 6, [0.5, -2, 0, 3, 1, 1])]
    wide = draw(3, 5)
    many = {
        "target_tokens": np.stack([wide.inputs["target_tokens"], np.full(5, 11), np.full(5, 12)], 1),
        "weights": np.random.default_rng(0).normal(size=(5, 3)).astype(np.float32),
    }
    second = [Datum(wide.tokens, many)]
    ce = LossCall("cross_entropy")
    await backend.forward_backward("numbers", first, ce, forward_only=False)
    await backend.optim_step("numbers", AdamParams(1e-2))  # B is no longer 0
    adapter = work / "numbers"
    await backend.export_adapter("numbers", adapter)
    seen = [await backend.forward_backward("numbers", data, ce, forward_only=False) for data in (first, second)]
    again = await backend.forward_backward("numbers", first, ce, forward_only=True)

    def ce_loss(log_probs: Any, datum: Datum) -> Any:
        weights = torch.tensor(np.asarray(datum.inputs["weights"], np.float64))
        return -(log_probs * (weights[:, None] if weights.dim() == 1 else weights)).sum()

    expected = reference_gradients(folder, adapter, [*first, *second], ce_loss)
    ours = await asyncio.wrap_future(
        backend.submit(lambda tenants: {k: v.grad.cpu().clone().numpy() for k, v in matrices_of(tenants, "numbers").items()})
    )
    outputs = [output["logprobs"] for result in seen for output in result.outputs]
    log_probs = [values if values.ndim == 2 else values[:, None] for values in outputs]
    peft = expected["gradients"]
    gaps: dict[str, float] = {}
    for name, own in ours.items():
        layer = "lm_head" if name.startswith("lm_head") else name.split("layers.")[1].split(".")[0]
        parts = {"linear_qkv": "qkv", "linear_proj": "o", "linear_fc1": ("gate", "up"), "linear_fc2": ("down",)}
        if layer == "lm_head":
            keys = [key for key in peft if "lm_head" in key and name[-6:] in key]
        else:
            kind = next(kind for kind in parts if kind in name)
            keys = [key for key in peft if f"layers.{layer}." in key and name[-6:] in key
                    and any(f"{part}_proj" in key for part in parts[kind])]  # fmt: skip
        # a fused layer's modules share A, whose gradients add up; B is in the layer's own order of rows, so its sum of squares
        if name.endswith("A"):
            gap = np.abs(sum(peft[key] for key in keys) - own).max()
        else:
            gap = abs(sum(float((peft[key] ** 2).sum()) for key in keys) - float((own.astype(np.float64) ** 2).sum()))
        size = max(float(np.abs(own).max()), 1e-6) ** (1 if name.endswith("A") else 2)
        gaps[name] = float(gap) / size
    result = {
        "log_probs": max(float(np.abs(a - b).max()) for a, b in zip(log_probs, expected["log_probs"])),
        "loss": abs(sum(result.metrics["loss:sum"] for result in seen) - expected["loss"]),
        "gradients": max(gaps.values()),
        "forward_only": float(np.abs(again.outputs[0]["logprobs"] - seen[0].outputs[0]["logprobs"]).max()),
    }
    await backend.unload("numbers")
    return result


async def check_state(backend: LocalBackend, work: Path) -> dict[str, Any]:
    """Whether a model that was saved and loaded goes on as the one that was not, with and without AdamW's state."""

    async def train(name: str, steps: Sequence[int]) -> list[Any]:
        seen = []
        for step in steps:
            data = [supervised(step, 8)]
            result = await backend.forward_backward(name, data, LossCall("cross_entropy"), forward_only=False)
            seen += [result.metrics["loss:sum"], (await backend.optim_step(name, ADAM))["grad_norm:mean"]]
        return seen

    await backend.create_model("saved", AdapterSpec(3, seed=5))
    await train("saved", range(3))
    await backend.save_state("saved", work / "full", with_optimizer=True)
    await backend.save_state("saved", work / "weights", with_optimizer=False)
    went_on = await train("saved", range(3, 6))
    await backend.load_state("loaded", work / "full", with_optimizer=True)
    resumed = await train("loaded", range(3, 6))
    await backend.load_state("loaded", work / "full", with_optimizer=False)
    fresh = await train("loaded", range(3, 6))
    errors = []
    for function in (
        lambda: backend.save_state("saved", work / "full", with_optimizer=True),
        lambda: backend.load_state("other", work / "weights", with_optimizer=True),
        lambda: backend.load_state("other", work / "nothing", with_optimizer=False),
        lambda: backend.create_model("saved", AdapterSpec(3)),
        lambda: backend.create_model("large", AdapterSpec(backend.capabilities().max_rank + 1)),
        lambda: backend.optim_step("nobody", ADAM),
        lambda: backend.sample("nobody", SampleCall([5])),
        lambda: backend.forward_backward(
            "saved", [draw(1, 4, target_tokens=np.full(4, 5), logprobs=np.full(4, -3e4), advantages=np.ones(4))],
            LossCall("ppo"), forward_only=False,
        ),
    ):  # fmt: skip
        try:
            await function()
            errors.append("nothing")
        except CallError as error:
            errors.append(str(error))
    after = await train("saved", [9])
    sampler = await backend.make_sampler(work / "full")
    prompt = SampleCall([5, 6, 7], max_tokens=4, seed=1)
    await backend.unload("saved")
    await backend.unload("loaded")
    sampled = await backend.sample(sampler, prompt)
    await backend.load_state("back", work / "full", with_optimizer=False)
    of_model = await backend.sample(await backend.make_sampler("back"), prompt)
    await backend.unload("back")
    return {
        "resumes": resumed == went_on,
        "is_fresh": fresh[0] == went_on[0] and fresh[2] != went_on[2],
        "errors": errors,
        "lives": np.isfinite(after).all().item(),
        "samples": sampled == of_model,
        "files": sorted(str(path.relative_to(work)) for path in (work / "full").rglob("*")),
        "refused_leaves_nothing": sorted(path.name for path in work.iterdir()),
    }


def sample_beside_a_refused_call(tenants: Any, sampler: str) -> list[Any]:
    """What a call gets whose parameters only vLLM refuses, and the tokens of one that waited with it."""
    good = tenants.start_sampling(sampler, SampleCall([5, 6, 7, 8], max_tokens=10, seed=3, ends_at_eos=False))
    tenants._turns.start("bad", SampleCall([5], num_samples=2, top_p=1.5), None, "base")
    results = dict[str, Any]()
    while tenants.is_sampling:
        results.update(tenants.step_sampling())
    return [type(results["bad"]).__name__, str(results["bad"]), len(results[good].samples[0].tokens)]


async def check_sampling(backend: LocalBackend) -> dict[str, Any]:
    """Stops, limits, seeds, greedy tokens, log-probs of other tokens, and an aborted call."""
    sampler = await backend.make_sampler(None)

    async def sample(**settings: Any) -> SampleResult:
        return await backend.sample(sampler, SampleCall([5, 6, 7, 8], **settings))

    free = await sample(max_tokens=10, seed=3, ends_at_eos=False)
    tokens = free.samples[0].tokens
    stopped = await sample(max_tokens=10, seed=3, ends_at_eos=False, stop_tokens=(tokens[4],))
    text = chr(32 + tokens[2] - 3)
    by_text = await sample(max_tokens=10, seed=3, ends_at_eos=False, stop_strings=(text,))
    two = await sample(max_tokens=10, seed=3, ends_at_eos=False, num_samples=2)
    greedy = await sample(max_tokens=3, temperature=0.0, top_log_probs=4, ends_at_eos=False)
    cold = await sample(max_tokens=1, temperature=0.5, top_k=1, ends_at_eos=False)
    targets = np.array([[6, 20], [7, -1], [8, 30]])
    prompt = await sample(max_tokens=0, prompt_log_probs=True, top_prompt_log_probs=3, target_log_probs=targets)
    long = asyncio.ensure_future(sample(num_samples=8, ends_at_eos=False))
    await asyncio.sleep(0.05)
    long.cancel()
    cancelled = (await asyncio.gather(long, return_exceptions=True))[0]
    after = await sample(max_tokens=10, seed=3, ends_at_eos=False)
    beside = await asyncio.wrap_future(backend.submit(lambda tenants: sample_beside_a_refused_call(tenants, sampler)))
    await backend.drop_sampler(sampler)
    assert prompt.target_log_probs is not None and prompt.prompt_log_probs is not None
    assert prompt.top_prompt_log_probs is not None and greedy.samples[0].top_log_probs is not None
    return {
        "length": [len(tokens), free.samples[0].stop_reason],
        "stopped": [stopped.samples[0].tokens == tokens[: tokens.index(tokens[4]) + 1], stopped.samples[0].stop_reason],
        "by_text": [by_text.samples[0].tokens == tokens[: tokens.index(tokens[2]) + 1], by_text.samples[0].stop_reason],
        "first_of_two": two.samples[0] == free.samples[0] and two.samples[1] != free.samples[0],
        "first_tokens_of_two": two.samples[0].tokens == free.samples[0].tokens != two.samples[1].tokens,
        "greedy": all(top[0][0] == token for top, token in zip(greedy.samples[0].top_log_probs, greedy.samples[0].tokens)),
        "untempered": abs(cold.samples[0].log_probs[0] - greedy.samples[0].log_probs[0]),
        "prompt": [
            list(prompt.samples[0].tokens),
            prompt.prompt_log_probs[0],
            float(np.abs(prompt.target_log_probs[:, 0] - np.array(prompt.prompt_log_probs[1:], float)).max()),
            float(prompt.target_log_probs[1, 1]),
            [len(top or ()) for top in prompt.top_prompt_log_probs],
        ],
        "cancelled": isinstance(cancelled, asyncio.CancelledError),
        "after": after == free,
        "beside": beside,
    }


async def check(backend: LocalBackend, folder: Path, work: Path) -> dict[str, Any]:
    return {
        "offered": repr(backend.capabilities()),
        "sampling": await check_sampling(backend),
        "numbers": await check_numbers(backend, folder, work / "peft"),
        "state": await check_state(backend, work / "states"),
        "company": await check_company(backend),
    }


def main(folder: str, work: Path) -> None:
    started = time.monotonic()
    for name in ("peft", "states"):
        (work / name).mkdir(parents=True)
    backend = LocalBackend.open(run_config(folder))
    result = asyncio.run(check(backend, Path(folder), work))
    late: Future[None] = backend.submit(lambda tenants: None)
    late.result()
    backend.stop()
    print(json.dumps(result | {"seconds": time.monotonic() - started}))
    sys.stdout.flush()
    os._exit(0)  # vLLM's engine does not end cleanly inside a training process


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
