# ruff: noqa: E402  (vLLM must be imported after the adaptors)
"""Draws responses on a rollout server's engine; prints, as JSON, how long its pieces are and how far its log-probs are off."""

from __future__ import annotations

import asyncio
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

from mindspeed_rl.config import GenerateConfig
from mindspeed_rl.rollout.requests import Sampling
from mindspeed_rl.serving.async_engine import build_engine
from mindspeed_rl.serving.server_process import ServerSettings

LENGTHS = (1, 2, 17, 40, 100)


async def collect_chunks(engine, number: int) -> list:
    """Of one response."""
    sampling = Sampling(0.7, LENGTHS[number % len(LENGTHS)], (), top_k=20, top_p=0.95)
    return [chunk async for chunk in engine.stream((9, 10, 11 + number), sampling, seed=100 + number)]


async def responses(settings: ServerSettings) -> tuple[list, list]:
    """Pieces of responses that are drawn at the same time, and of one that is frozen on its way."""
    engine = build_engine(settings)
    try:
        result = await asyncio.gather(*(collect_chunks(engine, number) for number in range(8)))
        late = asyncio.create_task(collect_chunks(engine, 4))
        await asyncio.sleep(0.02)
        await engine.pause("keep")
        await engine.resume()
        return result, await late
    finally:
        engine.close()


def main(folder: Path) -> None:
    """See the module."""
    config = transformers.Qwen2Config(
        **{"num_hidden_layers": 2, "hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "vocab_size": 64},
        **{"num_key_value_heads": 2, "max_position_embeddings": 256, "tie_word_embeddings": True},
        initializer_range=0.15,  # distributions that are far from even: a wrong position or token shows
    )
    torch.manual_seed(0)
    reference = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    reference.save_pretrained(folder)
    words = {"infer_tensor_parallel_size": 1, "max_model_len": 128, "max_num_seqs": 8, "max_num_batched_tokens": 256}
    generate = GenerateConfig(**words, dtype="float32")
    result, late = asyncio.run(responses(ServerSettings(str(folder), generate, "cpu", None, load_weights=True)))
    gaps = []
    for number, chunks in enumerate(result):
        tokens = [token for chunk in chunks for token in chunk.token_ids]
        given = [value for chunk in chunks for value in chunk.log_probs]
        with torch.no_grad():
            logits = reference(torch.tensor([[9, 10, 11 + number, *tokens]])).logits[0, 2:-1]
        exact = (logits / 0.7).log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0].tolist()
        gaps += [abs(a - b) for a, b in zip(exact, given, strict=True)]
    lengths = [[len(chunk.token_ids) for chunk in chunks] for chunks in result]
    same = [token for chunk in late for token in chunk.token_ids] == [token for chunk in result[4] for token in chunk.token_ids]
    wanted = [LENGTHS[number % len(LENGTHS)] for number in range(8)]
    print(json.dumps({"lengths": lengths, "wanted": wanted, "gap": max(gaps), "frozen": same}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
