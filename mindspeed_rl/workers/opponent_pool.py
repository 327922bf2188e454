"""Snapshots of the actor's adapter on this rank, which opponents play with, and their copies beside the checkpoints."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch

from mindspeed_rl.checkpoint.newest import iterations
from mindspeed_rl.config.keys.rl import OpponentKeys
from mindspeed_rl.resharding.adapters import AdapterFolder, spread_folder
from mindspeed_rl.resharding.exchange import Exchange
from mindspeed_rl.rollout.opponents import list_snapshots, name_snapshot
from mindspeed_rl.scratch import make_owned_folder

#: folder beside the checkpoints
_FOLDER = "opponents"


class OpponentPool:
    """The snapshots that exist at the present version of the weights; methods are collective over the training world.

    Attributes:
        folders: version -> folder on this rank, from the oldest on.
    """

    def __init__(self, keys: OpponentKeys, save: str | None, device: torch.device, *, adapter: str = "") -> None:
        """Start without a snapshot.

        Args:
            keys: when there is one, and how many are kept.
            save: folder of the checkpoints; None where there are none.
            device: device of the messages between ranks.
            adapter: name of the adapter where roles have their own; "" for the actor's only one.
        """
        self._keys, self._device = keys, device
        self._below = Path(_FOLDER, adapter)
        self._run_folder = None if save is None else Path(save)
        self._save = None if save is None else Path(save, self._below)
        self._home, _ = make_owned_folder(self, "mindspeed-rl-opponents-")
        self.folders: Mapping[int, Path] = {}

    @property
    def versions(self) -> tuple[int, ...]:
        """The versions, from the oldest on."""
        return tuple(self.folders)

    def restore(self, weights: Path, iteration: int) -> None:
        """Read the snapshots that the run had after this iteration.

        Raises:
            ValueError: on every rank, where one is missing.
        """
        exchange = Exchange.from_world()
        versions = list_snapshots(iteration, self._keys)
        sources = {version: Path(weights, self._below, name_snapshot(version)) for version in versions}
        mine = None if exchange.rank else json.dumps([str(path) for path in sources.values() if not path.is_dir()]).encode()
        if missing := json.loads(exchange.broadcast(mine, self._device)):
            raise ValueError(
                f"rl_config.opponents: {missing[0]} is missing, and the run resumes after iteration {iteration} "
                f"with the snapshots {', '.join(map(str, versions))}; resume with the keys that the run was started with, or "
                "start a new run from the weights: finetune: true"
            )
        for version, source in sources.items():
            self._add(exchange, version, source)

    def take(self, version: int, adapter: AdapterFolder) -> None:
        """Add a snapshot where these weights are to be one, and forget those that are too old."""
        kept = list_snapshots(version, self._keys)
        if version in kept and version not in self.folders:
            self._add(Exchange.from_world(), version, adapter.path)
        for old in set(self.folders) - set(kept):
            shutil.rmtree(self.folders[old])
        self.folders = {kept_version: self.folders[kept_version] for kept_version in sorted(set(self.folders) & set(kept))}

    def _add(self, exchange: Exchange, version: int, source: Path) -> None:
        folder = self._home / name_snapshot(version)
        spread_folder(exchange, self._device, source, folder)
        self.folders = {**self.folders, version: folder}
        if self._save is not None and not exchange.rank:
            self._persist(folder, version)

    def _persist(self, folder: Path, version: int) -> None:
        """Copy a snapshot to the checkpoints, completely or not at all, and remove those that no checkpoint needs."""
        assert self._save is not None and self._run_folder is not None
        final = self._save / folder.name
        partial = final.with_name(f"{final.name}.partial")
        try:
            shutil.rmtree(partial, ignore_errors=True)
            shutil.copytree(folder, partial)
            shutil.rmtree(final, ignore_errors=True)
            os.replace(partial, final)
        except OSError as error:
            raise ValueError(f"save: {final} could not be written: {error}") from error
        needed = {version, *self.folders}.union(*(list_snapshots(each, self._keys) for each in iterations(self._run_folder)))
        for other in self._save.iterdir():
            if other.name not in map(name_snapshot, needed):
                shutil.rmtree(other, ignore_errors=True)
