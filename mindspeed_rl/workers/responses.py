"""The rows and figures that responses become, whoever generated them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from mindspeed_rl.config import Run, SamplingConfig
from mindspeed_rl.models.plan import ModelSource
from mindspeed_rl.observability.metrics import Metrics
from mindspeed_rl.rollout.requests import Sampling
from mindspeed_rl.rollout.trajectory import Trajectory

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def response_columns(trajectories: Sequence[Trajectory]) -> dict[str, list[Any]]:
    """What the data plane holds of trajectories that have ended, a row each.

    `responses` and what is aligned to it are all tokens behind the prompts; `response_mask` says which of them the actor drew,
    and nobody else decides that.
    """
    return {
        "responses": [torch.tensor(one.token_ids, dtype=torch.int64) for one in trajectories],
        "response_mask": [torch.tensor(one.sampled, dtype=torch.bool) for one in trajectories],
        "rollout_log_probs": [torch.tensor(one.log_probs, dtype=torch.float32) for one in trajectories],
        "weight_versions": [torch.tensor(one.versions, dtype=torch.int64) for one in trajectories],
        "input_ids": [torch.tensor(one.input_ids, dtype=torch.int64) for one in trajectories],
        "sequence_lengths": [torch.tensor(one.sequence_lengths, dtype=torch.int64) for one in trajectories],
        "truncated": [one.finish == "length" for one in trajectories],
        "trajectories": [one.reward_columns() for one in trajectories],
    }


def response_metrics(trajectories: Sequence[Trajectory]) -> Metrics:
    """Lengths, how many were cut off, and what the trajectories have counted."""
    metrics = Metrics()
    metrics.add_spread("response_length", [len(one.token_ids) for one in trajectories])
    metrics.add_spread("prompt_length", [one.sequence_lengths[0] for one in trajectories])
    truncated = sum(one.finish == "length" for one in trajectories)
    metrics.add_mean("rollout/truncated_fraction", truncated, len(trajectories))
    metrics.add_sum("rollout/tokens", sum(len(one.sampled_versions) for one in trajectories))
    for name in dict.fromkeys(name for one in trajectories for name in one.metrics):
        values = [one.metrics[name] for one in trajectories if name in one.metrics]
        if "/" in name:
            metrics.add_sum(name, sum(values))
        else:
            metrics.add_spread(name, values)
    if any(one.reward_columns() for one in trajectories):
        metrics.add_mean("rollout/failed_trajectories", sum(bool(one.failure) for one in trajectories), len(trajectories))
        metrics.add_mean("rollout/sequences_mean", sum(len(one.sequences) for one in trajectories), len(trajectories))
    return metrics


def training_sampling(keys: SamplingConfig, source: ModelSource, tokenizer: PreTrainedTokenizerBase) -> Sampling:
    """How training responses are drawn."""
    eos_id = tokenizer.eos_token_id
    assert isinstance(eos_id, int), eos_id  # tokenizers without one are refused when prompts are read
    return Sampling(
        temperature=keys.temperature,
        max_tokens=keys.max_tokens,
        # generation_config.json may name end tokens besides the tokenizer's one
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
