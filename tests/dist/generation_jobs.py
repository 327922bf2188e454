"""Jobs that generate with the Megatron model itself."""

from __future__ import annotations

import gc
from dataclasses import replace
from pathlib import Path
from typing import Any

from training_jobs import KEYS  # noqa: F401  (its module applies the adaptor, before Megatron is imported)

from mindspeed_rl.inference.engine_interface import Request, collect
from mindspeed_rl.inference.megatron_engine import MegatronEngine
from mindspeed_rl.inference.model_files import EngineSettings, ModelSettings, open_model
from mindspeed_rl.rollout.requests import Sampling

PROMPTS = [[5, 9, 40, 17, 22], [61, 3, 77], [30, 31, 32, 33, 34, 35, 36, 37, 38], [8]]
NUM_NEW = 12
PENALTIES: dict[str, Any] = {"repetition_penalty": 1.7, "presence_penalty": 0.3, "frequency_penalty": 0.2, "min_tokens": 6}


class Letters:
    """A tokenizer whose tokens are letters."""

    def decode(self, token_ids: list[int], skip_special_tokens: bool) -> str:
        return "".join(chr(ord("a") + token % 26) for token in token_ids)


def generate(folder: str, tensor: int = 1, pipeline: int = 1, temperature: float = 0.0, rows: int = 8) -> dict[str, Any]:
    """Answers with their log-probs, the three most likely next tokens of each prompt, and what else was asked for."""
    model = ModelSettings(load=Path(folder))
    settings = EngineSettings(
        model, "", 64, "float32", rows, kind="megatron", tensor_parallel_size=tensor, pipeline_parallel_size=pipeline
    )
    tokenizer: Any = Letters()
    engine = MegatronEngine(settings, open_model(model), tokenizer)
    try:
        sampling = Sampling(temperature, NUM_NEW, ())
        requests = [Request(prompt, seed) for seed, prompt in enumerate(PROMPTS)]
        answers = collect(engine.stream(requests, sampling), len(PROMPTS))
        first = answers[0].token_ids
        stops = Sampling(temperature, NUM_NEW, (first[2],))
        text = Letters().decode(first[1:3], skip_special_tokens=True)
        whole = [prompt + answer.token_ids for prompt, answer in zip(PROMPTS, answers)]
        each: list[list[float]] = [[] for _ in PROMPTS]
        for delta in engine.stream(requests, sampling):
            each[delta.index] += delta.log_probs
        return {
            "scores": engine.score(whole, [len(prompt) for prompt in PROMPTS]),
            "each": each,
            "tokens": [answer.token_ids for answer in answers],
            "log_probs": [answer.log_prob for answer in answers],
            "next": engine.next_tokens(PROMPTS, 3),
            "stopped": collect(engine.stream(requests[:1], stops), 1)[0],
            "at_text": collect(engine.stream(requests[:1], sampling, [text]), 1)[0].token_ids,
            "penalized": collect(engine.stream(requests[:1], replace(stops, **PENALTIES)), 1)[0].token_ids,
            "allowed": collect(engine.stream([Request(PROMPTS[0], 0, (7, 8), 2)], sampling), 1)[0].token_ids,
        }
    finally:
        engine.close()
        gc.collect()
