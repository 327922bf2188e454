"""Rollouts with drafts against rollouts without, in one process: tokens a second, tokens a step, kept draft tokens.

    python benchmarks/speculative.py --shape 30M --rounds 3

A model with random weights generates groups of responses to a few prompts: greedily, which soon repeats itself and is the
repetitive text, at a low temperature and at temperature 1, where it hardly does, so that the table shows what drafts cost where
few are kept. Speeds are by the clock and, behind a slash, by the processor's time, which other work moves less. Each round runs
every engine once, in turn, with the same seeds; the table has the median of the rounds. The responses of all engines must be
equal.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import transformers
from tiny_run import SHAPE, SHAPES

from mindspeed_rl import adaptors, platform

#: engine -> speculative_config
ENGINES: dict[str, dict[str, object] | None] = {
    "no drafts": None,
    "ngram": {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 2, "prompt_lookup_max": 4},
    "suffix": {"method": "suffix", "num_speculative_tokens": 8, "suffix_decoding_max_spec_factor": 2.0},
    "suffix, alone": {
        **{"method": "suffix", "num_speculative_tokens": 8, "suffix_decoding_max_spec_factor": 2.0},
        "suffix_decoding_max_cached_requests": 0,
    },
}
TEXTS = {"repetitive (greedy)": 0.0, "temperature 0.3": 0.3, "temperature 1": 1.0}
PROMPT_TOKENS, GROUP = 32, 8


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="30M")
    parser.add_argument("--responses", type=int, nargs="+", default=[8, 32], help="responses at once")
    parser.add_argument("--tokens", type=int, default=192, help="tokens of a response")
    parser.add_argument("--texts", nargs="+", choices=list(TEXTS), default=list(TEXTS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--engines", choices=list(ENGINES)[1:], nargs="+", default=list(ENGINES)[1:], help="kinds of drafts")
    parser.add_argument("--spread", type=float, default=0.05, help="standard deviation of the weights")
    args = parser.parse_args()

    platform.select("cpu")
    os.environ.update(platform.current().worker_env())
    adaptors.apply("rollout")  # before vLLM is imported
    from mindspeed_rl.adaptors import vllm_drafts
    from mindspeed_rl.config import GenerateConfig
    from mindspeed_rl.rollout.requests import Sampling
    from mindspeed_rl.rollout.vllm_engine import GenerationRequest, VllmEngine

    sizes = {"num_key_value_heads": 2, **SHAPE, **SHAPES[args.shape], "vocab_size": 512}
    config = transformers.Qwen2Config(**sizes, max_position_embeddings=1024, initializer_range=args.spread)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).float()
    head_size = sizes["hidden_size"] // sizes["num_attention_heads"]
    kv_bytes = 2 * sizes["num_hidden_layers"] * sizes["num_key_value_heads"] * head_size * 4
    longest = PROMPT_TOKENS + args.tokens
    with TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        engines = {}
        for name in ("no drafts", *args.engines):
            drafts = ENGINES[name]
            keys = GenerateConfig(
                **{"infer_tensor_parallel_size": 1, "max_model_len": longest, "max_num_batched_tokens": 4096},
                max_num_seqs=max(args.responses),
                dtype="float32",
                speculative_config=drafts,
            )
            engines[name] = VllmEngine(Path(folder), keys, Sampling(1.0, 1, ()), run_id=name, kv_bytes_per_token=kv_bytes)
            engines[name].load_weights(model.state_dict().items(), 0)
    print("| text, responses at once | engine | tokens/s | times no drafts | tokens a step | drafts kept |")
    print("|---|---|---|---|---|---|")
    for (text, temperature), count in itertools.product(((name, TEXTS[name]) for name in args.texts), args.responses):
        seconds: dict[str, list[float]] = {name: [] for name in engines}
        cpu_s: dict[str, list[float]] = {name: [] for name in engines}
        drafts_of: dict[str, list[int]] = {name: [0, 0, 0] for name in engines}
        for index in range(args.rounds):
            generator = torch.Generator().manual_seed(index)
            prompts = [torch.randint(512, (PROMPT_TOKENS,), generator=generator).tolist() for _ in range(-(-count // GROUP))]
            requests = [GenerationRequest(prompts[number // GROUP], 1000 * index + number) for number in range(count)]
            sampling, found = Sampling(temperature, args.tokens, ()), []
            for name, engine in engines.items():
                vllm_drafts.counts.take()
                start_s, cpu_start_s = time.perf_counter(), time.process_time()
                found.append([one.token_ids for one in engine.generate(requests, sampling)])
                seconds[name].append(time.perf_counter() - start_s)
                cpu_s[name].append(time.process_time() - cpu_start_s)
                drafts_of[name] = [old + new for old, new in zip(drafts_of[name], vllm_drafts.counts.take(), strict=True)]
            assert all(other == found[0] for other in found), "drafts have changed a response"
        base_s, base_cpu_s = (statistics.median(times["no drafts"]) for times in (seconds, cpu_s))
        for name in engines:
            median_s, (proposed, accepted, steps) = statistics.median(seconds[name]), drafts_of[name]
            counted = f"{(accepted + steps) / steps:.2f} | {accepted / max(proposed, 1):.0%}" if steps else "1.00 | -"
            speed = f"{base_s / median_s:.2f} / {base_cpu_s / statistics.median(cpu_s[name]):.2f}"
            print(f"| {text}, {count} | {name} | {count * args.tokens / median_s:.0f} | {speed} | {counted} |", flush=True)


if __name__ == "__main__":
    main()
