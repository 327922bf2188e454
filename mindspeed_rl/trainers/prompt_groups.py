"""A prompt with its responses on their way to training: as rows of the data plane, in a checkpoint, in the run's record."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from mindspeed_rl.data.prompts import PromptItem
from mindspeed_rl.observability.metrics import Metrics
from mindspeed_rl.rewards.samples import RewardResult
from mindspeed_rl.rollout.engine import Finish, Generated
from mindspeed_rl.workers.responses import response_columns, response_metrics

_FORMAT = "mindspeed_rl.in_flight"
_FINISHES: tuple[Finish, ...] = ("stop", "length", "aborted")


@dataclass
class PromptGroup:
    """A prompt and its samples.

    Attributes:
        number: of the prompt, counted from the beginning of the run.
        item: the prompt.
        version: of the weights when it was started.
        samples: a response each; None where there is no token yet.
        results: what the reward functions said; None before.
    """

    number: int
    item: PromptItem
    version: int
    samples: list[Generated | None]
    results: list[RewardResult] | None = None

    @property
    def is_complete(self) -> bool:
        """True when every sample has ended."""
        return all(sample is not None and sample.finish != "aborted" for sample in self.samples)

    @property
    def oldest_version(self) -> int:
        """Of the weights that any of its tokens comes from, or may."""
        return min([self.version, *(min(sample.versions) for sample in self.samples if sample and sample.versions)])

    @property
    def responses(self) -> list[Generated]:
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
    responses = [response for group in groups for response in group.responses]
    columns = response_columns(_prompts(groups), responses)
    if all(group.results is not None for group in groups):
        results = [result for group in groups for result in group.results or ()]
        columns["rewards"] = totals_of(results)
        columns["reward_results"] = results
    return columns


def totals_of(results: Sequence[RewardResult]) -> list[float]:
    """The column `rewards`: NaN where there is no score."""
    return [math.nan if result.total is None else result.total for result in results]


def group_metrics(groups: Sequence[PromptGroup]) -> Metrics:
    """Lengths, and how many responses were cut off."""
    return response_metrics(_prompts(groups), [response for group in groups for response in group.responses])


def _prompts(groups: Sequence[PromptGroup]) -> list[torch.Tensor]:
    """Of each sample."""
    return [torch.tensor(group.item["prompt_ids"], dtype=torch.int64) for group in groups for _ in group.samples]


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
                "samples": [{"versions": spans(one.versions), "finish": one.finish} for one in group.responses],
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
    present = [sample for sample in samples if sample is not None]
    described = [
        {
            "number": group.number,
            "version": group.version,
            "num_samples": len(group.samples),
            "results": None if group.results is None else [dataclasses.asdict(result) for result in group.results],
        }
        for group in groups
    ]
    tensors = {
        "length": torch.tensor([-1 if sample is None else len(sample.token_ids) for sample in samples], dtype=torch.int64),
        "finish": torch.tensor([-1 if s is None else _FINISHES.index(s.finish) for s in samples], dtype=torch.int64),
        "token_ids": torch.tensor([token for sample in present for token in sample.token_ids], dtype=torch.int64),
        "log_probs": torch.tensor([value for sample in present for value in sample.log_probs], dtype=torch.float64),
        "versions": torch.tensor([version for sample in present for version in sample.versions], dtype=torch.int64),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    save_file(tensors, partial, {"format": _FORMAT, "groups": json.dumps(described)})
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
    samples, start = [], 0
    for length, finish in zip(columns["length"], columns["finish"]):
        if length < 0:
            samples.append(None)
            continue
        part = slice(start, start := start + length)
        tokens, log_probs, versions = (tuple(columns[name][part]) for name in ("token_ids", "log_probs", "versions"))
        samples.append(Generated(tokens, log_probs, versions, _FINISHES[finish]))
    groups, rest = [], iter(samples)
    for found in json.loads(meaning["groups"]):
        results = found["results"]
        groups.append(
            PromptGroup(
                found["number"],
                items(found["number"]),
                found["version"],
                list(itertools.islice(rest, found["num_samples"])),
                None if results is None else [RewardResult(**result) for result in results],
            )
        )
    return groups
