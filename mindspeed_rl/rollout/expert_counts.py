"""How many tokens each expert was sent in rollouts, for whoever shares experts out to devices (`expert_map_path`).

Called by `RolloutReplica`, of which the rank that hands responses out counts; writes the file of observability/expert_load.py,
which grows from run to run. A token counts once for each expert that computed it, in every sequence it stands in, also where
its keys and values came from the cache of prefixes.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from mindspeed_rl.models.model_config import ModelConfig
from mindspeed_rl.observability.expert_load import counts_file, find_counts_files, read_counts, write_counts
from mindspeed_rl.observability.metrics import Metrics
from mindspeed_rl.rollout.trajectory import Trajectory

_KEY = "generate_config.eplb_token_save_path"


class ExpertCounts:
    """The counts of one rank."""

    def __init__(self, folder: Path, rank: int, layers: Sequence[int], num_experts: int) -> None:
        """
        Args:
            layers: numbers, from 0, of the layers with experts.

        Raises:
            ValueError: the file of an earlier run holds another model's counts, or cannot be read.
        """
        self._path = counts_file(folder, rank)
        self._layers = list(layers)
        self._total = np.zeros((len(layers), num_experts), dtype=np.int64)
        if self._path.exists():
            self._total += _held(self._path, self._total.shape)
        self._since = np.zeros_like(self._total)

    def add(self, trajectories: Iterable[Trajectory]) -> None:
        """Counts the tokens of these.

        Raises:
            RuntimeError: the engine did not say the experts.
        """
        width = self._total.shape[1]
        for sequence in (one for trajectory in trajectories for one in trajectory.sequences):
            routing = sequence.routing
            if routing is None:
                if sequence.is_sampled:
                    raise RuntimeError(
                        "generate_config.eplb_token_collects: the rollout engine did not say the experts of tokens."
                    )
                continue
            for place, layer in enumerate(self._layers):
                self._since[place] += np.bincount(routing[:, layer].reshape(-1), minlength=width)

    def finish(self, metrics: Metrics) -> None:
        """The rollout has ended: the file holds its counts, too.

        `rollout/expert_load_max` is the most that an expert was sent in it, in means over the experts of its layer; of the
        layer where that is most.
        """
        means = self._since.mean(axis=1)
        if means.any():
            metrics.add_max("rollout/expert_load_max", float((self._since.max(axis=1) / np.maximum(means, 1e-9)).max()))
        self._total += self._since
        self._since[:] = 0
        write_counts(self._path, self._total.tolist())


def check_folder(folder: Path, model_config: ModelConfig) -> None:
    """What workers would find out later.

    Raises:
        ValueError: the folder cannot be written, or holds another model's counts.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"{_KEY}: {folder} cannot be made ({error.strerror}).") from None
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ValueError(f"{_KEY}: nothing can be written in {folder}.")
    for path in find_counts_files(folder):
        _held(path, (len(model_config.moe_layers), model_config.num_moe_experts or 0))


def _held(path: Path, shape: tuple[int, ...]) -> np.ndarray:
    held = np.array(read_counts(path), dtype=np.int64)
    if held.shape != shape:
        raise ValueError(
            f"{_KEY}: {path} has counts of {held.shape[0]} layers with {held.shape[1]} experts, and this model has {shape[0]} "
            f"with {shape[1]}; name another folder, or remove the file."
        )
    return held
