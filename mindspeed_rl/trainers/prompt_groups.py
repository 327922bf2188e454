"""A prompt with its responses on their way to training: as rows of the data plane, in a checkpoint, in the run's record."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from mindspeed_rl.data.prompts import PromptItem
from mindspeed_rl.files import replace_file
from mindspeed_rl.rewards.samples import RewardResult
from mindspeed_rl.rollout.trajectory import Segment, TokenSequence, Trajectory

_FORMAT = "mindspeed_rl.in_flight"


@dataclass
class PromptGroup:
    """A prompt and its samples.

    Attributes:
        index: index of the prompt, counted from the start of the run.
        item: the prompt.
        version: version of the weights when it was started.
        samples: a trajectory each; None where there is none yet, or where it starts again if it is interrupted.
        results: results of the reward functions; None before.
        needed: samples that train, the first ones that end; None: all of them.
        part: 1 for the second group of a prompt (`split`), 0 for any other.
        ids: index of each sample in its prompt, which its seed follows from.
    """

    index: int
    item: PromptItem
    version: int
    samples: list[Trajectory | None]
    results: list[RewardResult] | None = None
    needed: int | None = None
    part: int = 0
    ids: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Give the samples indexes where there are none."""
        size = len(self.samples)
        self.ids = self.ids or list(range(self.part * size, self.part * size + size))

    @property
    def order(self) -> int:
        """Its place among all groups of a run: its prompt's, and the second group of a prompt after the first."""
        return 2 * self.index + self.part

    @property
    def num_trained(self) -> int:
        """Samples that train."""
        return len(self.samples) if self.needed is None else self.needed

    @property
    def num_missing(self) -> int:
        """Samples that have to end before the group is complete."""
        return max(0, self.num_trained - len(self.samples) + len(self.unfinished))

    @property
    def unfinished(self) -> list[int]:
        """Indexes (`ids`) of the samples that have not ended."""
        samples = zip(self.ids, self.samples, strict=True)
        return [index for index, sample in samples if sample is None or sample.finish == "aborted"]

    @property
    def is_complete(self) -> bool:
        """True when as many samples have ended as train."""
        return self.num_missing == 0

    @property
    def has_spare(self) -> bool:
        """True while it has more samples than train."""
        return len(self.samples) > self.num_trained

    def split(self) -> PromptGroup:
        """Take the samples of a complete group that train out of it, in their order, and return them as a group.

        This one becomes the second group of the prompt: the others, as far as they are, and new ones that make up the number.
        """
        ids, samples, unfinished = self.ids, self.samples, self.unfinished
        taken = [slot for slot, index in enumerate(ids) if index not in unfinished][: self.needed]
        rest = [slot for slot in range(len(samples)) if slot not in taken]
        complete = replace(self, samples=[samples[slot] for slot in taken], ids=[ids[slot] for slot in taken])
        num_new = max(0, len(taken) - len(rest))
        self.part, self.samples = 1, [*(samples[slot] for slot in rest), *[None] * num_new]
        self.ids = [*(ids[slot] for slot in rest), *range(len(samples), len(samples) + num_new)]
        return complete

    @property
    def oldest_version(self) -> int:
        """The oldest version of the weights that any of its tokens comes from, or may."""
        sampled = (sample.sampled_versions for sample in self.samples if sample)
        return min([self.version, *(min(versions) for versions in sampled if versions)])

    @property
    def trajectories(self) -> list[Trajectory]:
        """The samples of a group that is complete."""
        ended = [sample for sample in self.samples if sample is not None]
        assert len(ended) == len(self.samples), self.index
        return ended


# ---------------------------------------------------------------------- in a checkpoint


def save_groups(path: Path, groups: Sequence[PromptGroup]) -> None:
    """Write the groups without their prompts, which the dataset has."""
    samples = [sample for group in groups for sample in group.samples if sample is not None]
    segments = [segment for sample in samples for segment in sample.segments]
    prompts = [sequence.prompt_ids for sample in samples for sequence in sample.sequences]
    described = [
        {
            "number": group.index,
            "version": group.version,
            "samples": [None if sample is None else _describe(sample) for sample in group.samples],
            "needed": group.needed,
            "part": group.part,
            "ids": group.ids,
            "results": None if group.results is None else [dataclasses.asdict(result) for result in group.results],
        }
        for group in groups
    ]
    tensors = {
        "prompt_ids": _join(prompts, torch.int64),
        "token_ids": _join((segment.token_ids for segment in segments), torch.int64),
        # Python's float is float64: a resumed run has the same bits
        "log_probs": _join((segment.log_probs for segment in segments), torch.float64),
        "versions": _join((segment.versions for segment in segments), torch.int64),
    }
    # lengths as text and tokens as tensors: as text the tokens would take several times the space
    with replace_file(path, makes_folder=True) as partial:
        save_file(tensors, partial, {"format": _FORMAT, "groups": json.dumps(described)})


def _join(parts: Iterable[Iterable[float]], dtype: torch.dtype) -> torch.Tensor:
    """Return the numbers of all parts, one after the other."""
    return torch.tensor([*itertools.chain.from_iterable(parts)], dtype=dtype)


def _describe(sample: Trajectory) -> dict[str, object]:
    """Return a trajectory without its tokens; of a sequence: length of the prompt, length and origin of segments, images."""
    return {
        "sequences": [
            [
                len(sequence.prompt_ids),
                [[len(segment.token_ids), segment.sampled] for segment in sequence.segments],
                *([list(sequence.images)] if sequence.images else []),
            ]
            for sequence in sample.sequences
        ],
        "finish": sample.finish,
        "turn_rewards": list(sample.turn_rewards),
        "final_reward": sample.final_reward,
        "metrics": dict(sample.metrics),
        "failure": sample.failure,
    }


def load_groups(path: Path, load_item: Callable[[int], PromptItem]) -> list[PromptGroup]:
    """Return the groups that `save_groups` wrote.

    Args:
        load_item: (index of a prompt) -> the prompt.

    Raises:
        ValueError: the file does not exist, or it is another.
    """
    if not path.is_file():
        raise ValueError(f"{path}: responses that were on their way when the checkpoint was written are not there.")
    try:
        return _read_groups(path, load_item)
    except (SafetensorError, AttributeError, LookupError, StopIteration, TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{path}: is not a file of responses in flight, or damaged: {error}") from error


def _read_groups(path: Path, load_item: Callable[[int], PromptItem]) -> list[PromptGroup]:
    with safe_open(path, "pt") as file:
        metadata = file.metadata() or {}
        if metadata.get("format") != _FORMAT:
            raise ValueError(f"its format is {metadata.get('format')!r}")
        columns = {name: iter(file.get_tensor(name).tolist()) for name in file.keys()}
    groups = []
    for group in json.loads(metadata["groups"]):
        results = group["results"]
        groups.append(
            PromptGroup(
                group["number"],
                load_item(group["number"]),
                group["version"],
                [None if sample is None else _read_trajectory(sample, columns) for sample in group["samples"]],
                None if results is None else [RewardResult(**result) for result in results],
                group.get("needed"),
                group.get("part", 0),
                group.get("ids", []),
            )
        )
    return groups


def _read_trajectory(described: Mapping[str, Any], columns: Mapping[str, Iterator[Any]]) -> Trajectory:
    """Return the next trajectory of the columns, which are read from their beginning."""
    sequences = []
    for prompt_length, lengths, *images in described["sequences"]:
        prompt_ids = tuple(itertools.islice(columns["prompt_ids"], prompt_length))
        segments = []
        for length, sampled in lengths:
            values = (tuple(itertools.islice(columns[name], length)) for name in ("token_ids", "log_probs", "versions"))
            segments.append(Segment(*values, sampled=sampled))
        sequences.append(TokenSequence(prompt_ids, tuple(segments), tuple(images[0]) if images else ()))
    fields = {name: described[name] for name in ("finish", "final_reward", "metrics", "failure")}
    return Trajectory(tuple(sequences), turn_rewards=tuple(described["turn_rewards"]), **fields)
