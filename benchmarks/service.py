"""Steps and samples of a training service: through its backend and in the same process, and of 1, 2 and 4 models at once.

usage: python benchmarks/service.py [--size tiny|135m] [--rounds N] [--tokens N] [--exact] [--profile]

One process makes all of it, in turns: a step (`forward_backward` of 8 sequences and `optim_step`) by calls of the object that
trains, the same by the backend that a server calls, steps of several models in joint passes (with --exact) and each in passes
of its own, and samples of several models at the same time. Seconds are those of the processor: others may use the machine.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import transformers

from mindspeed_rl.config import RunConfig, build_run_config
from mindspeed_rl.service.backend import AdamParams, AdapterSpec, Datum, LossCall, PassCall, SampleCall
from mindspeed_rl.service.local_backend import LocalBackend

SIZES = {
    "tiny": {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4, "num_attention_heads": 4},
    "135m": {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9},
}
SEQUENCES = 8


def make_model(folder: Path, size: str) -> None:
    """A random model with a tokenizer of one token a character."""
    from tokenizers import Tokenizer, models

    words = ["<pad>", "<eos>", "<unk>", *(chr(code) for code in range(32, 127))]
    tokenizer = Tokenizer(models.BPE(vocab={word: index for index, word in enumerate(words)}, merges=[], unk_token="<unk>"))
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    ).save_pretrained(folder)
    config = transformers.Qwen2Config(
        vocab_size=32768, num_key_value_heads=SIZES[size]["num_attention_heads"], max_position_embeddings=2048, **SIZES[size]
    )
    transformers.Qwen2ForCausalLM(config).save_pretrained(folder)


def run_config(folder: Path, tokens: int, exact: bool) -> RunConfig:
    path = str(folder)
    return build_run_config(
        {
            "platform": "cpu",
            "megatron_training": {"bf16": False, "tokenizer_name_or_path": path, "reset_attention_mask": True},
            "actor_config": {
                "finetune": True,
                "load": path,
                "lora_target_modules": ["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"],
                "lora_r": 32,
                "lora_alpha": 32,
            },
            "rl_config": {"actor_resource": {"num_npus": 1}, "exact_log_probs": exact},
            "generate_config": {
                "infer_tensor_parallel_size": 1,
                "max_num_seqs": 64,
                "max_model_len": 2 * tokens,
                "dtype": "float32",
                "kv_cache_memory_gib": 1.0,
            },
            "serve_config": {"num_models": 4, "max_tokens_per_pass": 4 * SEQUENCES * tokens},
        }
    )


def make_data(tokens: int, seed: int) -> list[Datum]:
    rng = np.random.default_rng(seed)
    rows = [rng.integers(3, 90, tokens + 1) for _ in range(SEQUENCES)]
    return [Datum(row[:-1].tolist(), {"target_tokens": row[1:], "weights": np.ones(tokens, np.float32)}) for row in rows]


async def _median(rounds: int, function: Callable[[int], Awaitable[object]]) -> float:
    seconds = []
    for index in range(rounds + 1):
        started = time.process_time()
        await function(index)
        seconds.append(time.process_time() - started)
    return statistics.median(seconds[1:])  # the first one warms up


async def measure(backend: LocalBackend, rounds: int, tokens: int) -> None:
    ce, adam, names = LossCall("cross_entropy"), AdamParams(1e-4), "abcd"
    for index, name in enumerate(names):
        await backend.create_model(name, AdapterSpec(32, seed=index))

    async def in_process(index: int) -> None:
        data = make_data(tokens, index)

        def step(tenants: Any) -> None:
            tenants.forward_backward("a", data, ce)
            tenants.optim_step("a", adam)

        await asyncio.wrap_future(backend.submit(step))

    async def step(name: str, index: int) -> None:
        await backend.forward_backward(name, make_data(tokens, index), ce, forward_only=False)
        await backend.optim_step(name, adam)

    alone = await _median(rounds, in_process)
    called = await _median(rounds, lambda index: step("a", index))
    size = f"{SEQUENCES} x {tokens} tokens"
    print(f"a step of {size}: {alone:.3f} s in process, {called:.3f} s by the backend ({called / alone:.2f})", flush=True)
    samplers = [await backend.make_sampler(name) for name in names]
    call = SampleCall(range(5, 13), max_tokens=tokens, num_samples=4, seed=1, ends_at_eos=False)
    joins = await asyncio.wrap_future(backend.submit(lambda tenants: tenants._joins_passes))

    async def train(count: int, joined: bool) -> float:
        await asyncio.wrap_future(backend.submit(lambda tenants: setattr(tenants, "_joins_passes", joined)))
        return await _median(rounds, lambda index: asyncio.gather(*(step(name, index) for name in names[:count])))

    for count in (1, 2, 4):
        trained = {"in joint passes": await train(count, True)} if joins and count > 1 else {}
        trained["each in passes of its own"] = await train(count, False)
        rates = ", ".join(f"{count * SEQUENCES * tokens / seconds:,.1f} {how}" for how, seconds in trained.items())
        sampled = await _median(
            rounds, lambda index, n=count: asyncio.gather(*(backend.sample(name, call) for name in samplers[:n]))
        )
        sampled_rate = f"{count * 4 * tokens / sampled:,.1f} sampled tokens/s (4 samples per model)"
        print(f"{count} models: trained tokens/s {rates}; {sampled_rate}", flush=True)


def profile(backend: LocalBackend, tokens: int) -> None:
    """Print the operations of a pass of four models, joint and not."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as recording

    calls = [PassCall(name, make_data(tokens, index), LossCall("cross_entropy")) for index, name in enumerate("abcd")]

    def record(tenants: Any) -> None:
        for joined in (False, tenants._joins_passes):
            tenants._joins_passes = joined
            with recording(activities=[ProfilerActivity.CPU]) as recorded:
                tenants.run_passes(calls)
            print("joint" if joined else "one model after the other")
            averages = recorded.key_averages()
            print(averages.table(sort_by="self_cpu_time_total", row_limit=12, max_name_column_width=40), flush=True)

    backend.submit(lambda tenants: setattr(tenants, "_joins_passes", tenants._can_join_passes())).result()
    backend.submit(record).result()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="tiny")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--exact", action="store_true", help="rl_config.exact_log_probs: samples independent of others by bits")
    parser.add_argument("--profile", action="store_true", help="show the operations of a pass of four models too")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder), arguments.size)
        backend = LocalBackend.open(run_config(Path(folder), arguments.tokens, arguments.exact))
        asyncio.run(measure(backend, arguments.rounds, arguments.tokens))
        if arguments.profile:
            profile(backend, arguments.tokens)
    sys.stdout.flush()
    os._exit(0)  # vLLM's engine does not end cleanly inside a training process


if __name__ == "__main__":
    main()
