"""Full weights of a training service in this process, compared with transformers and torch's AdamW in float64.

usage: service_full_program.py MODEL_FOLDER WORK_FOLDER
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
from service_program import run_tree, supervised

from mindspeed_rl.config import RunConfig, build_run_config
from mindspeed_rl.config.errors import ConfigError
from mindspeed_rl.service.backend import AdamParams, AdapterSpec, CallError, Datum, LossCall, SampleCall
from mindspeed_rl.service.local_backend import LocalBackend

CE, STEPS = LossCall("cross_entropy"), 3
ADAM = AdamParams(3e-3, beta1=0.8, beta2=0.9, eps=1e-8, weight_decay=0.1)
PROMPT = [5, 6, 7, 8]


def batches(step: int) -> list[list[Datum]]:
    """Two passes of a step, whose gradients add up."""
    return [[supervised(10 * step, 9), supervised(10 * step + 1, 6, [0.5, -2, 0, 3, 1, 1])], [supervised(10 * step + 2, 5)]]


def by_transformers(folder: Path, data: list[Datum]) -> tuple[list[Any], Any]:
    """Log-probs of data after each step of torch's AdamW, in float64."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager")
    optimizer = torch.optim.AdamW(model.parameters(), ADAM.learning_rate, (ADAM.beta1, ADAM.beta2), ADAM.eps, ADAM.weight_decay)

    def log_probs(datum: Datum) -> Any:
        rows = model(torch.tensor([datum.tokens])).logits[0].log_softmax(-1)
        return rows.gather(1, torch.tensor(np.asarray(datum.inputs["target_tokens"]))[:, None])[:, 0]

    seen = []
    for step in range(STEPS):
        for datum in (datum for part in batches(step) for datum in part):
            (-(log_probs(datum) * torch.tensor(np.asarray(datum.inputs["weights"], np.float64))).sum()).backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            seen.append([log_probs(datum).numpy() for datum in data])
    return seen, model


async def train(backend: LocalBackend, name: str, steps: range, data: list[Datum]) -> list[Any]:
    seen = []
    for step in steps:
        for part in batches(step):
            await backend.forward_backward(name, part, CE, forward_only=False)
        await backend.optim_step(name, ADAM)
        result = await backend.forward_backward(name, data, CE, forward_only=True)
        seen.append([output["logprobs"] for output in result.outputs])
    return seen


async def refusals(backend: LocalBackend) -> list[str]:
    errors = []
    for function in (
        lambda: backend.create_model("adapter", AdapterSpec(4)),
        lambda: backend.create_model("second", None),
    ):
        try:
            await function()
            errors.append("nothing")
        except CallError as error:
            errors.append(str(error))
    return errors


def gap(first: Any, second: Any) -> float:
    return max(float(np.abs(a - b).max()) for a, b in zip(first, second, strict=True))


async def check(backend: LocalBackend, folder: Path, work: Path) -> dict[str, Any]:
    from transformers import AutoModelForCausalLM

    data = [supervised(90, 8), supervised(91, 5)]
    expected, _ = by_transformers(folder, data)
    base = await backend.make_sampler(None)
    call = SampleCall(PROMPT, max_tokens=5, seed=1, num_samples=2, ends_at_eos=False, prompt_log_probs=True)
    of_base = await backend.sample(base, call)
    await backend.create_model("m", None)
    seen = await train(backend, "m", range(1), data)
    first = await backend.make_sampler("m")
    await backend.save_state("m", work / "one", with_optimizer=True)
    seen += await train(backend, "m", range(1, STEPS), data)
    last = await backend.make_sampler("m")
    # calls of three sets of weights wait together, in an order that would serve no two of them at once
    results = await asyncio.gather(*(backend.sample(name, call) for name in (last, base, first, base, last, first)))
    again = [await backend.sample(name, call) for name in (first, last)]
    after = await backend.forward_backward("m", data, CE, forward_only=True)
    # the samples' log-probs are those of a pass of the weights that they came from
    result = results[0].samples[0]
    tokens = [*PROMPT, *result.tokens]
    datum = Datum(tokens[:-1], {"target_tokens": np.array(tokens[1:]), "weights": np.ones(len(tokens) - 1, np.float32)})
    passed = (await backend.forward_backward("m", [datum], CE, forward_only=True)).outputs[0]["logprobs"]
    await backend.export_adapter("m", work / "hf")
    exported = AutoModelForCausalLM.from_pretrained(work / "hf")
    import torch

    with torch.no_grad():
        rows = exported(torch.tensor([data[0].tokens])).logits[0].log_softmax(-1)
    by_export = rows.gather(1, torch.tensor(np.asarray(data[0].inputs["target_tokens"]))[:, None])[:, 0].numpy()
    errors = await refusals(backend)
    await backend.unload("m")
    await backend.load_state("back", work / "one", with_optimizer=True)
    resumed = await train(backend, "back", range(1, STEPS), data)
    of_folder = await backend.sample(await backend.make_sampler(work / "one"), call)
    return {
        "steps": [gap(a, b) for a, b in zip(seen, expected, strict=True)],
        "moved": gap(expected[0], expected[-1]),
        "resumes": all(np.array_equal(a, b) for x, y in zip(resumed, seen[1:], strict=True) for a, b in zip(x, y, strict=True)),
        "in_turn": [
            results[0] == results[4] == again[1],
            results[1] == results[3] == of_base,
            results[2] == results[5] == again[0],
        ],
        "differ": results[0] != results[1] and results[0] != results[2] and results[1] != results[2],
        "of_folder": of_folder == results[2],
        "unmoved": all(np.array_equal(a["logprobs"], b) for a, b in zip(after.outputs, seen[-1], strict=True)),
        "sampled": float(np.abs(passed[len(PROMPT) - 1 :] - np.array(result.log_probs, np.float32)).max()),
        "exported": float(np.abs(by_export - seen[-1][0]).max()),
        "errors": errors,
    }


def full_config(folder: str, **serve: object) -> RunConfig:
    """The run file of `service_program` without adapters."""
    tree = run_tree(folder)
    tree["actor_config"] = {key: value for key, value in tree["actor_config"].items() if not key.startswith("lora_")}
    tree["serve_config"] = tree["serve_config"] | {"num_models": 1} | serve
    return build_run_config(tree)


def main(folder: Path, work: Path) -> None:
    try:
        LocalBackend.open(full_config(str(folder), max_tokens_per_pass=10**8))
        refused = "nothing"
    except ConfigError as error:
        refused = str(error)
    backend = LocalBackend.open(full_config(str(folder)))
    result = asyncio.run(check(backend, folder, work))
    print(json.dumps(result | {"refused": refused}))
    sys.stdout.flush()
    os._exit(0)  # vLLM's engine does not end cleanly inside a training process


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
