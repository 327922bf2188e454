"""Measure the rollout of a 135M model beside transformers' `generate` and beside the products that it cannot do without.

    python benchmarks/rollout_limit.py [--precision bfloat16] [--responses 64] [--tokens 32 128] [--rounds 3] [--profile]

Random weights in the shapes of SmolLM2-135M; each response samples exactly so many tokens after a prompt of 49, eight to a
prompt, at temperature 1. Ours is the engine of a run, with the log-prob of each token as runs ask for it; transformers samples
with its dynamic cache, without log-probs. The limit is torch's own products of the layers and the head for one token of each
response, in each step, on weights that are read from memory. Seconds of the processor, one thread, in turn; medians count.
--profile prints the operators and the functions of one rollout of ours.
"""

from __future__ import annotations

import argparse
import cProfile
import os
import pstats
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import transformers
from headline import Headline
from torch_as_it_comes import torch_as_it_comes
from update_limit import HEAD, HIDDEN, KV_HEADS, LAYER_PRODUCTS, LAYERS, VOCAB, make_model

from mindspeed_rl import adaptors, platform

PROMPT, GROUP, SHOWN = 49, 8, 25


def measure(steps: dict[str, Callable[[], None]], rounds: int) -> dict[str, float]:
    """Processor seconds of each, in turn, after one round that warms up."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(rounds + 1):
        for name, step in steps.items():
            before = time.process_time()
            step()
            if number:
                seconds[name].append(time.process_time() - before)
    return {name: statistics.median(values) for name, values in seconds.items()}


def main() -> None:
    """Says a headline for each length."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--precision", choices=["float32", "bfloat16"], default="bfloat16")
    parser.add_argument("--responses", type=int, default=64)
    parser.add_argument("--tokens", type=int, nargs="+", default=[32, 128])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--profile", action="store_true")
    options = parser.parse_args()
    platform.select("cpu")
    os.environ.update(platform.current().worker_env())
    adaptors.apply("rollout")  # before vLLM is imported
    from mindspeed_rl.config import GenerateConfig
    from mindspeed_rl.rollout.requests import Sampling
    from mindspeed_rl.rollout.vllm_engine import GenerationRequest, VllmEngine

    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    dtype = getattr(torch, options.precision)
    with TemporaryDirectory() as name:
        folder = Path(name)
        make_model(folder)
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
        keys = GenerateConfig(
            **{"infer_tensor_parallel_size": 1, "max_model_len": PROMPT + max(options.tokens), "max_num_batched_tokens": 8192},
            max_num_seqs=options.responses,
            dtype=options.precision,
        )
        kv_bytes = 2 * LAYERS * KV_HEADS * HEAD * dtype.itemsize
        engine = VllmEngine(folder, keys, Sampling(1.0, 1, ()), run_id="limit", kv_bytes_per_token=kv_bytes)
        engine.load_weights(model.state_dict().items(), 0)
    drawn = torch.randint(2, VOCAB, (options.responses // GROUP, PROMPT), generator=torch.Generator().manual_seed(0))
    prompts = drawn.repeat_interleave(GROUP, 0)
    requests = [GenerationRequest(prompt, number) for number, prompt in enumerate(prompts.tolist())]
    weights = [(LAYERS if len(s) == 2 and s[0] != VOCAB else 1, s) for s in (*LAYER_PRODUCTS, (VOCAB, HIDDEN))]
    products = [
        (torch.randn(options.responses, inputs).to(dtype), torch.randn(outputs, inputs).to(dtype))
        for times, (outputs, inputs) in weights
        for _ in range(times)
    ]

    def ours(tokens: int) -> None:
        counts = {len(one.token_ids) for one in engine.generate(requests, Sampling(1.0, tokens, ()))}
        assert counts == {tokens}, counts

    @torch_as_it_comes()
    @torch.no_grad()
    def theirs(tokens: int) -> None:
        kept = model.generate(
            prompts,
            **{"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0},
            **{"min_new_tokens": tokens, "max_new_tokens": tokens, "pad_token_id": 0},
        )
        assert kept.size(1) == PROMPT + tokens

    def limit(tokens: int) -> None:
        for _ in range(tokens):
            for rows, weight in products:
                torch.mm(rows, weight.t())

    for tokens in options.tokens:
        sides = {"ours": partial(ours, tokens), "transformers": partial(theirs, tokens), "products": partial(limit, tokens)}
        found = measure(sides, options.rounds)
        what = f"a rollout of 135M parameters, {options.precision}, {options.responses} x {tokens} tokens, processor seconds"
        Headline(
            what, f"{found['ours']:.2f}", "transformers", f"{found['transformers']:.2f}", found["transformers"] / found["ours"]
        ).say()
        Headline(what, f"{found['ours']:.2f}", "products", f"{found['products']:.2f}", found["products"] / found["ours"]).say()
        if options.profile:
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as operators:
                ours(tokens)
            print(operators.key_averages().table(sort_by="self_cpu_time_total", row_limit=SHOWN, max_name_column_width=60))
            with cProfile.Profile() as functions:
                ours(tokens)
            pstats.Stats(functions).sort_stats("tottime").print_stats(SHOWN)


if __name__ == "__main__":
    main()
