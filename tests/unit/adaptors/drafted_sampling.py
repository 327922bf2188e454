# ruff: noqa: E402  (vLLM must be imported after the adaptors)
"""Samples 200,000 drafted tokens of a tiny vocabulary with vLLM's sampler; prints chi-square statistics as JSON."""

from __future__ import annotations

import json
import os
from collections import Counter

import torch

from mindspeed_rl import adaptors, platform

platform.select("cpu")
os.environ.update(platform.current().worker_env())
adaptors.apply("rollout")  # before vLLM is imported

from vllm.utils import cpu_triton_utils
from vllm.v1.sample import rejection_sampler
from vllm.v1.sample.logits_processor import LogitsProcessors
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.sampler import Sampler
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

BATCH, SAMPLES = 2000, 50_000
LOGITS = torch.tensor([2.0, 0.5, -1.0, 0.0, -3.0])
VOCAB = len(LOGITS)
#: drafts of two tokens: likely ones, unlikely ones, and none
DRAFTS = ([0, 0], [4, 2], [1], [])

sampler = rejection_sampler.RejectionSampler(Sampler("raw_logprobs"))


def sample(temperature: float, first_seed: int, top_k: int | None) -> tuple[list[list[int]], torch.Tensor]:
    """Tokens of a batch of requests that all have the same logits at every position, and their log-probs."""
    drafts = [DRAFTS[row % len(DRAFTS)] for row in range(BATCH)]
    counts = torch.tensor([len(draft) for draft in drafts])
    starts = (counts + 1).cumsum(0) - (counts + 1)
    rows = [start + offset for start, draft in zip(starts.tolist(), drafts) for offset in range(len(draft))]
    metadata = SpecDecodeMetadata.make_dummy(drafts, torch.device("cpu"))
    metadata.target_logits_indices = torch.tensor(rows, dtype=torch.int32)
    metadata.bonus_logits_indices = (starts + counts).to(torch.int32)
    settings = SamplingMetadata(
        temperature=None if temperature == 0 else torch.full((BATCH,), temperature),
        all_greedy=temperature == 0,
        all_random=temperature != 0,
        top_p=None,
        top_k=None if top_k is None else torch.full((BATCH,), top_k),
        generators={row: torch.Generator().manual_seed(first_seed + row) for row in range(BATCH)},
        max_num_logprobs=0,
        no_penalties=True,
        prompt_token_ids=None,
        frequency_penalties=torch.empty(0),
        presence_penalties=torch.empty(0),
        repetition_penalties=torch.empty(0),
        output_token_ids=[],
        allowed_token_ids_mask=None,
        bad_words_token_ids={},
        logitsprocs=LogitsProcessors(),
    )
    output = sampler(metadata, None, LOGITS.repeat(len(rows) + BATCH, 1), settings)
    tokens, log_probs = rejection_sampler.RejectionSampler.parse_output(
        output.sampled_token_ids, VOCAB, (), output.logprobs_tensors
    )
    return tokens, torch.tensor(log_probs.logprobs)[:, 0]


def chi_square(counts: Counter, expected: dict, total: int) -> float:
    assert set(counts) <= set(expected), set(counts) - set(expected)
    return sum((counts[key] - total * share) ** 2 / (total * share) for key, share in expected.items())


results = {}
for temperature, top_k in ((0.5, None), (1.0, None), (1.5, None), (1.0, 2)):
    scaled = LOGITS / temperature
    if top_k is not None:
        scaled = scaled.masked_fill(scaled < scaled.sort(descending=True).values[top_k - 1], float("-inf"))
    probs = {token: value for token, value in enumerate(scaled.softmax(-1).tolist()) if value}
    firsts, pairs, after, error = Counter(), Counter(), Counter(), 0.0
    for first_seed in range(0, SAMPLES, BATCH):
        tokens, log_probs = sample(temperature, first_seed + 7, top_k)
        exact = (LOGITS / temperature).log_softmax(-1)[torch.tensor([token for row in tokens for token in row])]
        error = max(error, float((log_probs - exact).abs().max()))
        firsts.update(row[0] for row in tokens)
        # of drafts that begin with 0: whether it is kept, and what follows
        pairs.update(tuple(row[:2]) if row[0] == 0 else (row[0],) for row in tokens[:: len(DRAFTS)])
        after.update(row[1] for row in tokens[2 :: len(DRAFTS)] if len(row) > 1)
    joint = {(0, token): probs[0] * value for token, value in probs.items()} | {(t,): p for t, p in probs.items() if t}
    results[f"{temperature} {top_k}"] = {
        "first": [chi_square(firsts, probs, firsts.total()), len(probs) - 1],
        "pairs": [chi_square(pairs, joint, pairs.total()), len(joint) - 1],
        "after": [chi_square(after, probs, after.total()), len(probs) - 1],
        "error": error,
    }
greedy, _ = sample(0.0, 0, None)
# what vLLM's own kernel makes of the temperature of two requests with a draft token each
filled = torch.full((2,), 9.0)
cpu_triton_utils._expand_kernel_impl(filled, torch.tensor([0.7, 0.7]), torch.tensor([1, 2]), 0, 1)
print(
    json.dumps(
        {
            "samples": results,
            "greedy": [greedy[row] for row in range(len(DRAFTS))],
            "unadapted temperature": filled.tolist(),
        }
    )
)
