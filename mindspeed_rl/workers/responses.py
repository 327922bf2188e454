"""Sampling of training responses, and the columns and metrics of responses, on whatever engine they were generated."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from mindspeed_rl.config import SamplingConfig
from mindspeed_rl.data.images import IMAGES, ImageRules
from mindspeed_rl.data.media_limits import MediaLimits
from mindspeed_rl.files import read_json
from mindspeed_rl.models.plan import RoleModel
from mindspeed_rl.observability.metrics import Metrics
from mindspeed_rl.rollout.requests import Sampling
from mindspeed_rl.rollout.trajectory import Trajectory
from mindspeed_rl.run import Run

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

#: names of metrics of trajectories in one rollout
_MAX_NAMES = 500


def read_image_rules(model: RoleModel) -> ImageRules | None:
    """Return the rules of a model of images, with the limits of its keys; None for a model of text."""
    return ImageRules.read(model.source.hf_folder, MediaLimits.from_keys(model.config))


def build_response_columns(trajectories: Sequence[Trajectory], *, with_images: bool = False) -> dict[str, list[Any]]:
    """Return the data plane's columns of complete trajectories, a row each; with the columns of a model of images.

    `responses` and the columns aligned to it are all tokens after the prompts; `response_mask` is True on those that the actor
    sampled, and is made nowhere else.
    """
    images = {IMAGES: [trajectory.images for trajectory in trajectories]} if with_images else {}
    return images | {
        "responses": [torch.tensor(trajectory.token_ids, dtype=torch.int64) for trajectory in trajectories],
        "response_mask": [torch.tensor(trajectory.sampled, dtype=torch.bool) for trajectory in trajectories],
        "rollout_log_probs": [torch.tensor(trajectory.log_probs, dtype=torch.float32) for trajectory in trajectories],
        "weight_versions": [torch.tensor(trajectory.versions, dtype=torch.int64) for trajectory in trajectories],
        "input_ids": [torch.tensor(trajectory.input_ids, dtype=torch.int64) for trajectory in trajectories],
        "sequence_lengths": [torch.tensor(trajectory.sequence_lengths, dtype=torch.int64) for trajectory in trajectories],
        "truncated": [trajectory.finish == "length" for trajectory in trajectories],
        "trajectories": [trajectory.reward_columns() for trajectory in trajectories],
    }


def compute_response_metrics(trajectories: Sequence[Trajectory]) -> Metrics:
    """Return lengths, the fraction of truncated responses, and the trajectories' own metrics, of which there are some names."""
    metrics = Metrics()
    metrics.add_spread("response_length", [len(trajectory.token_ids) for trajectory in trajectories])
    metrics.add_spread("prompt_length", [trajectory.sequence_lengths[0] for trajectory in trajectories])
    truncated = sum(trajectory.finish == "length" for trajectory in trajectories)
    metrics.add_mean("rollout/truncated_fraction", truncated, len(trajectories))
    metrics.add_sum("rollout/tokens", sum(len(trajectory.sampled_versions) for trajectory in trajectories))
    names = list(dict.fromkeys(name for trajectory in trajectories for name in trajectory.metrics))
    if len(names) > _MAX_NAMES:  # programs may give each sample other ones, which no page could draw
        metrics.add_sum("rollout/metrics_left_out", len(names) - _MAX_NAMES)
    for name in names[:_MAX_NAMES]:
        values = [trajectory.metrics[name] for trajectory in trajectories if name in trajectory.metrics]
        if "/" in name:
            metrics.add_sum(name, sum(values))
        else:
            metrics.add_spread(name, values)
    if any(trajectory.reward_columns() for trajectory in trajectories):
        metrics.add_mean(
            "rollout/failed_trajectories", sum(bool(trajectory.failure) for trajectory in trajectories), len(trajectories)
        )
        metrics.add_mean(
            "rollout/sequences_mean", sum(len(trajectory.sequences) for trajectory in trajectories), len(trajectories)
        )
    return metrics


def build_sampling(keys: SamplingConfig, folder: Path, tokenizer: PreTrainedTokenizerBase) -> Sampling:
    """Return the sampling of responses by the model in a Hugging Face folder."""
    eos_id = tokenizer.eos_token_id
    assert isinstance(eos_id, int), eos_id  # tokenizers without one are refused when prompts are read
    # generation_config.json may name more end tokens than the tokenizer's one
    path = folder / "generation_config.json"
    named = read_json(path).get("eos_token_id") if path.is_file() else None
    stops = named if isinstance(named, list) else [] if named is None else [named]
    return Sampling(
        temperature=keys.temperature,
        max_tokens=keys.max_tokens,
        stop_token_ids=tuple(sorted({*keys.stop_token_ids, *([] if keys.ignore_eos else [eos_id, *stops])})),
        top_p=keys.top_p,
        top_k=keys.top_k,
        min_p=keys.min_p,
        repetition_penalty=keys.repetition_penalty,
        presence_penalty=keys.presence_penalty,
        frequency_penalty=keys.frequency_penalty,
        stop=tuple(keys.stop),
        structured_output=json.dumps(keys.structured_output) if keys.structured_output else "",
    )


def get_sampling_seed(run: Run) -> int:
    """Return the number that the seeds of all samples are derived from."""
    base = run.generate.sampling_config.seed
    return run.config.actor_config.seed if base is None else base
