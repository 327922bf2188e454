"""Token counts per expert in rollouts, from which a load balancer places experts on devices (`expert_map_path`).

`RolloutReplica` calls it on the rank that returns responses. The file of a rank grows from run to run: it holds {layer:
{expert: tokens}}, both counted from 0, where layers are those with experts, the format of MindSpeed-RL, which its generator of
expert maps and `mindspeed-rl plan experts` read. A token counts once for each expert that computed it, in every sequence that
contains it, also where its keys and values came from the prefix cache.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from mindspeed_rl.files import read_json_value, write_file
from mindspeed_rl.models.model_config import ModelConfig
from mindspeed_rl.observability.metrics import Metrics
from mindspeed_rl.rollout.trajectory import Trajectory

_KEY = "generate_config.eplb_token_save_path"
#: file of a rank
_NAME = "eplb_token_collects_{}.json"
#: [layers][experts] tokens
_Counts = list[list[int]]


class ExpertCounts:
    """Counts of one rank."""

    def __init__(self, folder: Path, rank: int, layers: Sequence[int], num_experts: int) -> None:
        """Load the counts of earlier runs.

        Args:
            layers: indexes, from 0, of the layers with experts.

        Raises:
            ValueError: the file of an earlier run has another model's counts, or cannot be read.
        """
        self._path = folder / _NAME.format(rank)
        self._layers = list(layers)
        self._total = np.zeros((len(layers), num_experts), dtype=np.int64)
        if self._path.exists():
            self._total += _load_counts(self._path, self._total.shape)
        self._since = np.zeros_like(self._total)

    @staticmethod
    def check_folder(folder: Path, model_config: ModelConfig) -> None:
        """Check the folder before workers start.

        Raises:
            ValueError: the folder cannot be written, or has another model's counts.
        """
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(f"{_KEY}: {folder} cannot be made ({error.strerror}).") from None
        if not os.access(folder, os.W_OK | os.X_OK):
            raise ValueError(f"{_KEY}: nothing can be written in {folder}.")
        for path in sorted(folder.glob(_NAME.format("*"))):
            _load_counts(path, (len(model_config.moe_layers), model_config.num_moe_experts or 0))

    def add(self, trajectories: Iterable[Trajectory]) -> None:
        """Count the tokens of these trajectories.

        Raises:
            RuntimeError: the engine did not report the experts.
        """
        width = self._total.shape[1]
        for sequence in (part for trajectory in trajectories for part in trajectory.sequences):
            routing = sequence.routing
            if routing is None:
                if sequence.is_sampled:
                    raise RuntimeError(
                        "generate_config.eplb_token_collects: the rollout engine did not report the experts of tokens."
                    )
                continue
            for index, layer in enumerate(self._layers):
                self._since[index] += np.bincount(routing[:, layer].reshape(-1), minlength=width)

    def finish(self, metrics: Metrics) -> None:
        """Add the counts of a finished rollout to the file.

        `rollout/expert_load_max` is the largest count of an expert in the rollout over the mean of its layer, for the layer
        where that is largest.
        """
        means = self._since.mean(axis=1)
        if means.any():
            metrics.add_max("rollout/expert_load_max", float((self._since.max(axis=1) / np.maximum(means, 1e-9)).max()))
        self._total += self._since
        self._since[:] = 0
        fields = {layer: dict(enumerate(row)) for layer, row in enumerate(self._total.tolist())}
        write_file(self._path, json.dumps(fields), makes_folder=True)


def _load_counts(path: Path, shape: tuple[int, ...]) -> np.ndarray:
    counts = np.array(_read_counts(path), dtype=np.int64)
    if counts.shape != shape:
        raise ValueError(
            f"{_KEY}: {path} has counts of {counts.shape[0]} layers with {counts.shape[1]} experts, and this model has "
            f"{shape[0]} with {shape[1]}; name another folder, or remove the file."
        )
    return counts


def _read_counts(path: Path) -> _Counts:
    """Read a file.

    Raises:
        ValueError: it holds something else.
    """
    problem = f"{path} holds no counts of tokens, which are {{layer: {{expert: tokens}}}}, both counted from 0"
    try:
        fields = read_json_value(path)
        width = len(fields["0"])
        rows = [[fields[str(layer)][str(expert)] for expert in range(width)] for layer in range(len(fields))]
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read ({error}).") from None
    except (KeyError, TypeError) as error:
        raise ValueError(f"{problem} ({type(error).__name__}: {error}).") from None
    counts = [count for row in rows for count in row]
    # type, because a bool is an int
    if not counts or any(type(count) is not int or not 0 <= count < 2**53 for count in counts):
        raise ValueError(f"{problem}.")
    return rows


def sum_counts(folder: Path) -> _Counts:
    """Return the sum over all files of a folder.

    Raises:
        ValueError: there are none, or they are of several models.
    """
    paths = sorted(folder.glob(_NAME.format("*")))
    if not paths:
        raise ValueError(
            f"{folder} holds no {_NAME.format('<rank>')}; a run writes them with generate_config.eplb_token_collects: true."
        )
    counts_by_rank = [_read_counts(path) for path in paths]
    first = counts_by_rank[0]
    for path, counts in zip(paths, counts_by_rank):
        if (len(counts), len(counts[0])) != (len(first), len(first[0])):
            raise ValueError(
                f"{path} has counts of {len(counts)} layers with {len(counts[0])} experts, {paths[0].name} of {len(first)} "
                f"with {len(first[0])}: they are of several models."
            )
    return [[sum(counts) for counts in zip(*rows)] for rows in zip(*counts_by_rank)]
