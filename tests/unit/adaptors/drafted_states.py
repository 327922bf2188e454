# ruff: noqa: E402  (vLLM must be imported after the adaptors)
"""Samples the same requests of a model with gated delta nets without drafts and with each kind of them; prints what differs."""

from __future__ import annotations

import itertools
import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import torch

from mindspeed_rl import adaptors, platform

platform.select("cpu")
os.environ.update(platform.current().worker_env())
adaptors.apply("rollout")  # before vLLM is imported

from safetensors.torch import load_file

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parents[1]), str(HERE.parents[1] / "dist")]
from staggered_requests import sample_all
from tiny_prediction import Predicting

from mindspeed_rl.adaptors import vllm_drafts
from mindspeed_rl.config import GenerateConfig
from mindspeed_rl.rollout.requests import Sampling
from mindspeed_rl.rollout.vllm_engine import VllmEngine

family, folder = sys.argv[1], Path(sys.argv[2])
reference = Predicting.build(family)
reference.save(folder)
weights = {name: value.bfloat16() for name, value in load_file(folder / "model.safetensors").items()}
settings = GenerateConfig(
    infer_tensor_parallel_size=1, max_model_len=160, max_num_seqs=12, max_num_batched_tokens=32, dtype="bfloat16"
)
DRAFTS: dict[str, dict[str, object] | None] = {
    "none": None,
    # some requests have drafts in a step, and others have none
    "ngram": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1},
    "suffix": {"method": "suffix", "num_speculative_tokens": 5},
    "mtp": {"method": "mtp", "num_speculative_tokens": 1},
}
#: one is longer than a step, and its last token is computed alone
PROMPTS = [torch.randint(8, 64, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (5, 1, 33, 70)]
SHAPES = ({}, {"top_k": 5}, {"top_p": 0.8}, {"repetition_penalty": 1.2}, {"stop_token_ids": (7, 9)})
REQUESTS = [
    (PROMPTS[number % len(PROMPTS)], Sampling(temperature, 60, **{"stop_token_ids": (), **shape}))
    for number, (temperature, shape) in enumerate(itertools.product((0.0, 0.3, 0.7, 1.0), SHAPES))
]


def record_drafts(engine: VllmEngine) -> list[int]:
    """The draft tokens of later steps of one request: each step makes one, for the token after its last."""
    (drafter,), drafts = engine._llm.collective_rpc(lambda worker: worker.model_runner.drafter), []
    propose = drafter.propose

    def record(*arguments: object, **named: object) -> object:
        tokens = propose(*arguments, **named)
        drafts.append(int(tokens[0, 0]))
        return tokens

    drafter.propose = record
    return drafts


def count_wrong(drafts: list[int], token_ids: list[int]) -> list[int]:
    """How many drafts are not the most likely token by transformers' layers, and how many there are."""
    if not drafts:
        return []
    with torch.no_grad():
        _, (predicted,) = reference.logits(torch.tensor(token_ids))
    likely, place, wrong = predicted.argmax(-1).tolist(), 1, 0  # the place of a step's last token
    for number, draft in enumerate(drafts):
        if place + 1 >= len(token_ids):
            return [wrong, number]
        wrong += draft != likely[place - 1]
        place += 1 + (token_ids[place + 1] == draft)
    return [wrong, len(drafts)]


result, plain, engines = {}, {}, []  # an engine that is collected would end the process groups of the others
for kind in sys.argv[3:]:
    engine = VllmEngine(
        folder, replace(settings, speculative_config=DRAFTS[kind]), Sampling(1.0, 8, ()), run_id=kind, kv_bytes_per_token=4096
    )
    engines.append(engine)
    engine.syncs_drafts = kind == "mtp"
    given = [item for item in weights.items() if kind == "mtp" or not item[0].startswith("mtp.")]
    engine.load_weights(lambda model, given=given: model.load_weights(given), 0)
    vllm_drafts.counts.take()
    sampled = sample_all(engine, REQUESTS)
    proposed, accepted, _ = vllm_drafts.counts.take()
    drafts = record_drafts(engine) if kind == "mtp" else []
    engine.add_request("alone", PROMPTS[1], Sampling(1.0, 60, ()), seed=3)  # a step with one token
    while engine._ids:
        sampled.update((name, (output.token_ids, output.log_probs)) for name, output in engine.step())
    plain = plain or sampled
    result[kind] = {
        "different": [name for name in plain if sampled[name] != plain[name]],
        "tokens": sum(len(tokens) for tokens, _ in sampled.values()),
        "proposed": proposed,
        "accepted": accepted,
        "wrong": count_wrong(drafts, PROMPTS[1] + sampled["alone"][0]),
    }
print(json.dumps(result))
