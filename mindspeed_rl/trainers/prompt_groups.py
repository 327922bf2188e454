"""A prompt with its responses on their way to training: as rows of the data plane, in a checkpoint, in the run's record."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from mindspeed_rl.data.prompts import PromptItem
from mindspeed_rl.observability.metrics import Metrics
from mindspeed_rl.rewards.samples import RewardResult
from mindspeed_rl.rollout.trajectory import Segment, TokenSequence, Trajectory
from mindspeed_rl.workers.responses import response_columns, response_metrics

_FORMAT = "mindspeed_rl.in_flight"


@dataclass
class PromptGroup:
    """A prompt and its samples.

    Attributes:
        number: of the prompt, counted from the beginning of the run.
        item: the prompt.
        version: of the weights when it was started.
        samples: a trajectory each; None where there is none yet, or where it begins anew if it is interrupted.
        results: what the reward functions said; None before.
    """

    number: int
    item: PromptItem
    version: int
    samples: list[Trajectory | None]
    results: list[RewardResult] | None = None

    @property
    def is_complete(self) -> bool:
        """True when every sample has ended."""
        return all(sample is not None and sample.finish != "aborted" for sample in self.samples)

    @property
    def oldest_version(self) -> int:
        """Of the weights that any of its tokens comes from, or may."""
        drawn = (sample.sampled_versions for sample in self.samples if sample)
        return min([self.version, *(min(versions) for versions in drawn if versions)])

    @property
    def trajectories(self) -> list[Trajectory]:
        """The samples of a group that is complete."""
        found = [sample for sample in self.samples if sample is not None]
        assert len(found) == len(self.samples), self.number
        return found


def prompt_rows(items: Iterable[PromptItem], repeat: int) -> dict[str, list[Any]]:
    """Columns of the data plane of prompts, each in `repeat` rows."""
    rows = [item for item in items for _ in range(repeat)]
    return {
        "prompt_ids": [torch.tensor(item["prompt_ids"], dtype=torch.int64) for item in rows],
        "labels": [item["label"] for item in rows],
        "extra": [item["columns"] for item in rows],
    }


def response_rows(groups: Sequence[PromptGroup]) -> dict[str, list[Any]]:
    """Columns of the data plane of complete groups: what the rollout puts, and the scores where they are there."""
    columns = response_columns([trajectory for group in groups for trajectory in group.trajectories])
    if all(group.results is not None for group in groups):
        results = [result for group in groups for result in group.results or ()]
        columns["rewards"] = totals_of(results)
        columns["reward_results"] = results
    return columns


def totals_of(results: Sequence[RewardResult]) -> list[float]:
    """The column `rewards`: NaN where there is no score."""
    return [math.nan if result.total is None else result.total for result in results]


def group_metrics(groups: Sequence[PromptGroup]) -> Metrics:
    """Lengths, how many were cut off, and what the trajectories have counted."""
    return response_metrics([trajectory for group in groups for trajectory in group.trajectories])


def spans(versions: Sequence[int]) -> list[tuple[int, int]]:
    """(version, number of tokens) of each run of equal versions."""
    return [(version, len(list(same))) for version, same in itertools.groupby(versions)]


def write_record(path: Path, iteration: int, version: int, groups: Sequence[PromptGroup]) -> None:
    """Adds a line: what this iteration trains on, in its order.

    Args:
        iteration: the first is 1, as in the metrics.
        version: of the weights that train.
    """
    line = {
        "iteration": iteration,
        "version": version,
        "prompts": [
            {
                "prompt": group.number,
                "samples": [{"versions": spans(one.sampled_versions), "finish": one.finish} for one in group.trajectories],
            }
            for group in groups
        ],
    }
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


# --- in a checkpoint --------------------------------------------------------------------------------------------------------


def save_groups(path: Path, groups: Sequence[PromptGroup]) -> None:
    """Writes all that is known of the groups but their prompts, which the data set has."""
    samples = [sample for group in groups for sample in group.samples]
    segments = [segment for sample in samples if sample is not None for segment in sample.segments]
    prompts = [sequence.prompt_ids for sample in samples if sample is not None for sequence in sample.sequences]
    described = [
        {
            "number": group.number,
            "version": group.version,
            "samples": [None if sample is None else _described(sample) for sample in group.samples],
            "results": None if group.results is None else [dataclasses.asdict(result) for result in group.results],
        }
        for group in groups
    ]
    tensors = {
        "prompt_ids": torch.tensor([token for prompt in prompts for token in prompt], dtype=torch.int64),
        "token_ids": torch.tensor([token for segment in segments for token in segment.token_ids], dtype=torch.int64),
        # as Python's own floats, so that a resumed run has the same bits
        "log_probs": torch.tensor([value for segment in segments for value in segment.log_probs], dtype=torch.float64),
        "versions": torch.tensor([version for segment in segments for version in segment.versions], dtype=torch.int64),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    # lengths as text and tokens as tensors: as text the tokens would take several times the room
    save_file(tensors, partial, {"format": _FORMAT, "groups": json.dumps(described)})
    # a kill before this leaves no half file under the name
    partial.replace(path)


def load_groups(path: Path, items: Any) -> list[PromptGroup]:
    """The groups that `save_groups` wrote.

    Args:
        items: (number of a prompt) -> the prompt.

    Raises:
        ValueError: there is no such file, or it is another.
    """
    if not path.is_file():
        raise ValueError(f"{path}: responses that were on their way when the checkpoint was written are not there.")
    with safe_open(path, "pt") as file:
        meaning = file.metadata() or {}
        if meaning.get("format") != _FORMAT:
            raise ValueError(f"{path}: is no file of responses in flight.")
        columns = {name: file.get_tensor(name).tolist() for name in file.keys()}
    prompts, tokens = _Pieces(columns, ("prompt_ids",)), _Pieces(columns, ("token_ids", "log_probs", "versions"))
    groups = []
    for found in json.loads(meaning["groups"]):
        results = found["results"]
        groups.append(
            PromptGroup(
                found["number"],
                items(found["number"]),
                found["version"],
                [None if sample is None else _trajectory(sample, prompts, tokens) for sample in found["samples"]],
                None if results is None else [RewardResult(**result) for result in results],
            )
        )
    return groups


def _described(sample: Trajectory) -> dict[str, Any]:
    """All of a trajectory but its tokens; of a sequence: length of the prompt, then length and origin of each segment."""
    return {
        "sequences": [
            [len(one.prompt_ids), [[len(segment.token_ids), segment.sampled] for segment in one.segments]]
            for one in sample.sequences
        ],
        "finish": sample.finish,
        "turn_rewards": list(sample.turn_rewards),
        "final_reward": sample.final_reward,
        "metrics": dict(sample.metrics),
        "failure": sample.failure,
    }


class _Pieces:
    """Columns that are read from their beginning, a piece at a time."""

    def __init__(self, columns: Mapping[str, list[Any]], names: Sequence[str]) -> None:
        self._iterators = [iter(columns[name]) for name in names]

    def take(self, length: int) -> list[tuple[Any, ...]]:
        """The next values of each column."""
        return [tuple(itertools.islice(values, length)) for values in self._iterators]


def _trajectory(found: Mapping[str, Any], prompts: _Pieces, tokens: _Pieces) -> Trajectory:
    sequences = []
    for prompt_length, segments in found["sequences"]:
        (prompt_ids,) = prompts.take(prompt_length)
        read = [(tokens.take(length), sampled) for length, sampled in segments]
        sequences.append(TokenSequence(prompt_ids, tuple(Segment(*columns, sampled=sampled) for columns, sampled in read)))
    others = {name: found[name] for name in ("finish", "final_reward", "metrics", "failure")}
    return Trajectory(tuple(sequences), turn_rewards=tuple(found["turn_rewards"]), **others)
