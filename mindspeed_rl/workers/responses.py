"""The rows and figures that responses become, whoever generated them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch

from mindspeed_rl.config import Run, SamplingConfig
from mindspeed_rl.observability.metrics import Metrics
from mindspeed_rl.rollout.engine import Generated
from mindspeed_rl.rollout.requests import Sampling
from mindspeed_rl.workers.model_source import ModelSource


def response_columns(prompts: Sequence[torch.Tensor], responses: Sequence[Generated]) -> dict[str, list[Any]]:
    """What the data plane holds of responses that have ended.

    Args:
        prompts: [length] int64 each.
    """
    tokens = [torch.tensor(response.token_ids, dtype=torch.int64) for response in responses]
    return {
        "responses": tokens,
        "rollout_log_probs": [torch.tensor(response.log_probs, dtype=torch.float32) for response in responses],
        "response_length": [len(response) for response in tokens],
        "input_ids": [torch.cat([prompt, response]) for prompt, response in zip(prompts, tokens)],
        "prompt_length": [len(prompt) for prompt in prompts],
        "truncated": [response.finish == "length" for response in responses],
        "weight_versions": [torch.tensor(response.versions, dtype=torch.int64) for response in responses],
    }


def response_metrics(prompts: Sequence[torch.Tensor], responses: Sequence[Generated]) -> Metrics:
    """Lengths, and how many were cut off."""
    metrics = Metrics()
    lengths = [len(response.token_ids) for response in responses]
    metrics.add_spread("response_length", lengths)
    metrics.add_spread("prompt_length", [len(prompt) for prompt in prompts])
    truncated = sum(response.finish == "length" for response in responses)
    metrics.add_mean("rollout/truncated_fraction", truncated, len(responses))
    metrics.add_sum("rollout/tokens", sum(lengths))
    return metrics


def training_sampling(keys: SamplingConfig, source: ModelSource, eos_id: int) -> Sampling:
    """How training responses are drawn."""
    return Sampling(
        temperature=keys.temperature,
        max_tokens=keys.max_tokens,
        stop_token_ids=() if keys.ignore_eos else tuple(sorted({eos_id, *_generation_stops(source)})),
        top_p=keys.top_p,
        top_k=keys.top_k,
        min_p=keys.min_p,
    )


def sampling_seed(run: Run) -> int:
    """What the seeds of all samples begin with."""
    base = run.generate.sampling_config.seed
    return run.config.actor_config.seed if base is None else base


def _generation_stops(source: ModelSource) -> list[int]:
    """End tokens that generation_config.json names."""
    path = source.hf_folder / "generation_config.json"
    stops = json.loads(path.read_text()).get("eos_token_id") if path.is_file() else None
    return [] if stops is None else stops if isinstance(stops, list) else [stops]
