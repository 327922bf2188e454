# ruff: noqa: E402  (vLLM must be imported after the adaptors)
"""Draws the same responses with steps ahead and without, on one engine; prints, as JSON, what differs and the turns it took."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
import transformers

from mindspeed_rl import adaptors, platform

platform.select("cpu")
os.environ.update(platform.current().worker_env())
adaptors.apply("rollout")  # before vLLM is imported

from safetensors.torch import load_file
from vllm import SamplingParams

from mindspeed_rl.adaptors import vllm_cpu_steps
from mindspeed_rl.config import GenerateConfig
from mindspeed_rl.rollout.requests import Sampling
from mindspeed_rl.rollout.vllm_engine import VllmEngine

LONGEST, STOP, STEPS = 160, 7, vllm_cpu_steps._STEPS
folder, caching = Path(sys.argv[1]), sys.argv[2] == "caching"
config = transformers.Qwen2Config(
    **{"num_hidden_layers": 2, "hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "vocab_size": 64},
    **{"num_key_value_heads": 2, "max_position_embeddings": 256, "tie_word_embeddings": True},
    initializer_range=0.15,  # distributions that are far from even: a wrong position or token shows
)
torch.manual_seed(0)
reference = transformers.AutoModelForCausalLM.from_config(config).float().eval()
reference.save_pretrained(folder)
weights = load_file(folder / "model.safetensors")

settings = GenerateConfig(
    infer_tensor_parallel_size=1,
    max_model_len=LONGEST,
    max_num_seqs=12,
    max_num_batched_tokens=256,
    dtype="float32",
    enable_prefix_caching=caching,
    kv_cache_memory_gib=None if caching else 0.001,  # the second has seven blocks of 128 tokens: requests wait, or are put back
)
# of two layers with two heads of 32 numbers
engine = VllmEngine(folder, settings, Sampling(1.0, 8, ()), run_id="steps", kv_bytes_per_token=2 * 2 * 2 * 32 * 4)
engine.load_weights(weights.items(), 0)
core = engine._llm.llm_engine.engine_core.engine_core
runner = core.model_executor.driver_worker.worker.model_runner

#: name -> (prompt, sampling): lengths from 1 token to what the model takes, stops, a cut-off, a single request that is greedy
generator = torch.Generator().manual_seed(1)
REQUESTS = {}
for number in range(20):
    prompt = torch.randint(8, 64, (3 + number % 5,), generator=generator).tolist()
    tokens = [1, 2, 17, 40, LONGEST][number % 5]
    sampling = Sampling(0.7 if number % 3 else 1.0, tokens, (STOP,) if number % 2 else (), top_k=9 if number == 8 else -1)
    REQUESTS[str(number)] = prompt, Sampling(0.0, 30, ()) if number == 11 else sampling


def run(ahead: bool) -> tuple[dict, int, list]:
    """Responses by name, turns, and what a request that was given up had until then."""
    vllm_cpu_steps._STEPS = STEPS if ahead else 1
    results, turns, dropped = {}, 0, []
    waiting = list(REQUESTS.items())
    while waiting or engine._ids:
        # a few at a time: requests come while others are at work
        for name, (prompt, sampling) in waiting[:6] if turns % 3 == 0 else ():
            engine.add_request(name, prompt, sampling, seed=int(name) + 100)
        waiting = waiting[6:] if turns % 3 == 0 else waiting
        results.update(engine.step())
        turns += 1
        if turns == 5:
            dropped = engine.partial_completion("4").token_ids
            engine.abort(["4"])
    return results, turns, dropped


def prefix(first: list, other: list) -> bool:
    return first[: len(other)] == other or other[: len(first)] == first


def exact(name: str, token_ids: list) -> list:
    """Log-probs of plain transformers, with the temperature."""
    prompt, sampling = REQUESTS[name]
    with torch.no_grad():
        logits = reference(torch.tensor([prompt + token_ids])).logits[0, len(prompt) - 1 : -1]
    log_probs = (logits / (sampling.temperature or 1.0)).log_softmax(-1)
    return log_probs.gather(1, torch.tensor(token_ids)[:, None])[:, 0].tolist()


#: what others than rollouts ask of a server, and whether its turns stay single
ASKED = {
    "repetition_penalty": ({"repetition_penalty": 1.5}, True),
    "presence_penalty": ({"presence_penalty": 1.0}, True),
    "min_tokens": ({"min_tokens": 20, "stop_token_ids": list(range(30))}, True),
    "log-probs of others": ({"logprobs": 3}, False),
    "no log-probs": ({"logprobs": None}, False),
}


def alone(ahead: bool, asked: dict) -> tuple[list, list, int]:
    """Tokens of such a request, their log-probs with others', and turns."""
    vllm_cpu_steps._STEPS = STEPS if ahead else 1
    words = {"logprobs": 0, "max_tokens": 40, "ignore_eos": True, "seed": 5, "detokenize": False} | asked
    engine._llm.llm_engine.add_request("alone", {"prompt_token_ids": [9, 10, 11]}, SamplingParams(**words))
    results, turns = [], 0
    while not (results and results[0].finished):
        results, turns = engine._llm.llm_engine.step(), turns + 1
    sample = results[0].outputs[0]
    places = [
        sorted((token, logprob.logprob, logprob.rank) for token, logprob in place.items()) for place in sample.logprobs or ()
    ]
    return list(sample.token_ids), places, turns


def alike(first: list, other: list) -> bool:
    """Log-probs of the same tokens, but for rounding."""
    return len(first) == len(other) and all(
        [(token, rank) for token, _, rank in a] == [(token, rank) for token, _, rank in b]
        and max(abs(x[1] - y[1]) for x, y in zip(a, b)) < 1e-5
        for a, b in zip(first, other)
    )


single, single_turns, single_dropped = run(ahead=False)
ahead, ahead_turns, ahead_dropped = run(ahead=True)
asked = {}
for kind, (words, stays_single) in ASKED.items():
    (tokens, places, turns), (tokens_ahead, places_ahead, turns_ahead) = alone(False, words), alone(True, words)
    is_single = turns_ahead == turns
    asked[kind] = tokens == tokens_ahead and alike(places, places_ahead) and is_single == stays_single and turns >= 20
print(
    json.dumps(
        {
            "names": sorted(single, key=int) == sorted(ahead, key=int),
            "tokens": all(ahead[name].token_ids == single[name].token_ids for name in single),
            "ends": all(ahead[name].truncated == single[name].truncated for name in single),
            "lengths": {name: len(output.token_ids) for name, output in ahead.items()},
            "stopped": sum(output.token_ids[-1] == STOP for output in ahead.values()),
            "log-probs": max(abs(a - b) for n in single for a, b in zip(single[n].log_probs, ahead[n].log_probs, strict=True)),
            "exact": max(abs(a - b) for n in single for a, b in zip(exact(n, ahead[n].token_ids), ahead[n].log_probs)),
            "dropped": bool(ahead_dropped) and prefix(single_dropped, ahead_dropped),
            "turns": [single_turns, ahead_turns],
            "asked": asked,
            "steps": STEPS,
            "free blocks": core.scheduler.kv_cache_manager.block_pool.get_num_free_blocks(),
            "blocks": core.scheduler.kv_cache_manager.block_pool.num_gpu_blocks - 1,  # one is nobody's
        }
    )
)
