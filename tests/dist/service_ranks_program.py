"""Calls of a training service on one device or several: numbers, samples, folders, and a rank that is lost.

usage: service_ranks_program.py MODEL_FOLDER WORK_FOLDER TENSOR DATA [FOLDER_OF_ANOTHER_LAYOUT]
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import psutil
from service_program import ADAM, count_joined, draw, run_tree, supervised

from mindspeed_rl.config import build_run_config
from mindspeed_rl.service.backend import AdapterSpec, BrokenBackendError, CallError, LossCall, PassCall, SampleCall
from mindspeed_rl.service.local_backend import LocalBackend

SPECS = {"a": AdapterSpec(4, seed=1), "b": AdapterSpec(8, seed=2, train_unembed=False)}


def tree(folder: str, work: Path, tensor: int, data: int) -> dict[str, Any]:
    run = run_tree(folder, serve={"folder": str(work / "server")})
    run["rl_config"]["actor_resource"]["num_npus"] = tensor * data
    run["actor_config"]["tensor_model_parallel_size"] = tensor
    run["generate_config"]["infer_tensor_parallel_size"] = tensor
    return run


def make_model(folder: Path) -> None:
    """A tiny Qwen2 whose heads and tokens can be divided over two ranks."""
    import torch
    import transformers
    from test_lora_rl import save_model

    save_model(folder, 128)
    torch.manual_seed(0)
    config = transformers.AutoConfig.from_pretrained(folder)
    config.num_attention_heads, config.num_key_value_heads = 4, 2
    transformers.Qwen2ForCausalLM(config).float().save_pretrained(folder)


async def train(backend: LocalBackend, name: str, seed: int) -> list[Any]:
    """Three rows of a loss of samples and one of cross_entropy, so that data-parallel ranks have different numbers of rows."""
    seen: list[Any] = []
    for data, loss in (
        ([draw(seed, 9), draw(seed + 50, 5), draw(seed + 60, 12)], "ppo"),
        ([supervised(seed, 7)], "cross_entropy"),
    ):
        result = await backend.forward_backward(name, data, LossCall(loss), forward_only=False)
        seen += [result.metrics["loss:sum"], [row.tolist() for output in result.outputs for row in output.values()]]
    return [*seen, (await backend.optim_step(name, ADAM))["grad_norm:mean"]]


async def lose_a_rank(backend: LocalBackend) -> str:
    """Kill the last rank while a pass waits; what the owner is told."""
    told: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def watch(error: BrokenBackendError) -> None:
        told.get_loop().call_soon_threadsafe(told.set_result, str(error))

    backend.watch(watch)
    ranks = [child for child in psutil.Process().children(recursive=True) if "WorkerProcess" in " ".join(child.cmdline())]
    ranks[-1].send_signal(signal.SIGKILL)
    work = asyncio.ensure_future(train(backend, "a", 9))
    text = await asyncio.wait_for(told, 240)
    has_result = work.done()
    work.cancel()
    return text if not has_result else "the pass has a result"


async def find_changed_limits(backend: LocalBackend) -> list[str]:
    """Methods whose limits have changed by calls that did no work: refused on all ranks, and refused in a joint pass."""
    data = [supervised(3, 12)] * 50
    refused = PassCall("nobody", data, LossCall("cross_entropy"))

    def call(tenants: Any) -> list[str]:
        before = dict(tenants._limits._largest)
        (error,) = tenants.run_passes([refused])
        assert isinstance(error, CallError), error
        for method, arguments in (("forward_backward", (data, refused.loss)), ("optim_step", (ADAM,))):
            try:
                getattr(tenants, method)("nobody", *arguments)
            except CallError:
                continue
            raise AssertionError("it was not refused")
        after = tenants._limits._largest
        assert {"run_passes", "optim_step", "step_tenants"} <= before.keys()
        return [name for name in after if after[name] != before.get(name)]

    return await asyncio.wrap_future(backend.submit(call))


async def check(backend: LocalBackend, work: Path, other: Path | None, num_ranks: int) -> dict[str, Any]:
    for name, spec in SPECS.items():
        await backend.create_model(name, spec)
    result: dict[str, Any] = {"steps": []}
    for step in range(2):
        result["steps"] += await asyncio.gather(*(train(backend, name, 100 * ord(name) + step) for name in SPECS))
    result["joined"] = await count_joined(backend)
    await backend.save_state("a", work / "a", with_optimizer=True)
    await backend.export_merged("a", work / "merged")
    samplers = [await backend.make_sampler(source) for source in ("a", work / "a", None)]
    calls = [SampleCall(range(5, 9 + k), max_tokens=6, temperature=0.0, num_samples=2, ends_at_eos=False) for k in range(3)]
    results = await asyncio.gather(*(backend.sample(sampler, call) for sampler in samplers for call in calls))
    result["samples"] = [[(sample.tokens, sample.log_probs) for sample in each.samples] for each in results]
    for sampler in samplers:
        await backend.drop_sampler(sampler)
    errors = []
    for function in (
        lambda: backend.create_model("a", AdapterSpec(4)),
        lambda: backend.save_state("a", work / "a", with_optimizer=True),
        lambda: backend.load_state("c", work / "nothing", with_optimizer=True),
    ):
        try:
            await function()
        except CallError as error:
            errors.append(str(error))
    result["errors"] = errors
    if num_ranks > 1:
        result["changed_limits"] = await find_changed_limits(backend)
    if other is not None:
        await backend.load_state("other", other / "a", with_optimizer=True)
        result["of_other"] = await train(backend, "other", 5)
        await backend.unload("other")
    await backend.load_state("again", work / "a", with_optimizer=True)
    result["again"] = await train(backend, "again", 5)
    if num_ranks > 1:
        result["lost"] = await lose_a_rank(backend)
    return result


def main(folder: str, work: Path, tensor: int, data: int, other: Path | None) -> None:
    work.mkdir(parents=True)
    backend = LocalBackend.open(build_run_config(tree(folder, work, tensor, data)))
    result = asyncio.run(check(backend, work, other, tensor * data))
    backend.stop()
    print(json.dumps(result))
    sys.stdout.flush()
    os._exit(0)  # vLLM's engine does not end cleanly inside a training process


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), Path(sys.argv[5]) if len(sys.argv) > 5 else None)
