"""Checkpoints of tenants: names to folders of the server's, limits, times of expiry.

No name of a client is part of a path on the disk: folders have random names, and a path of the API is looked up in a table.
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mindspeed_rl.folders import remove_folder
from mindspeed_rl.service.backend import AdapterSpec, CallError
from mindspeed_rl.service.journal import Record
from mindspeed_rl.service.ledger import Ledger
from mindspeed_rl.service.replies import RefusedError
from mindspeed_rl.service.store import Checkpoint, CheckpointKind, Model, make_path

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")
#: seconds until a checkpoint expires: an hour to ten years
_TTL_S = range(3600, 10 * 366 * 86400)
#: weights without a name that are kept of each model, for its sampling sessions
_MAX_EPHEMERAL = 16


def measure_folder(folder: Path) -> int:
    """Return the bytes of all files of a folder."""
    return sum((Path(parent) / name).lstat().st_size for parent, _, names in os.walk(folder) for name in names)


class Checkpoints:
    """The checkpoints of all tenants, below one folder.

    Args:
        folder: folder of the folders.
        ledger: tables and limits.
    """

    def __init__(self, folder: Path, ledger: Ledger) -> None:
        self._folder, self._ledger = folder, ledger
        self._table = ledger.store.checkpoints
        #: folders that no checkpoint has any more
        self._stale: list[Path] = []
        folder.mkdir(parents=True, exist_ok=True)

    def new_folder(self) -> Path:
        """Return a folder that does not exist."""
        return self._folder / secrets.token_hex(16)

    def get_folder(self, checkpoint: Checkpoint) -> Path:
        """Return the folder of a checkpoint."""
        return self.get_folder_by_name(checkpoint.folder)

    def get_folder_by_name(self, name: str) -> Path:
        """Return a folder by a name that the server has made."""
        return self._folder / name

    def remove_orphans(self) -> None:
        """Remove folders that no table names: of operations that a kill has interrupted."""
        models = self._ledger.store.models.values()
        known = {row.folder for row in self._table.values()} | {model.snapshot for model in models}
        for folder in self._folder.iterdir():
            if folder.name not in known:
                remove_folder(folder)

    def remove_stale_folders(self) -> None:
        """Remove the folders of checkpoints that were removed or replaced; the change is on the disk."""
        while self._stale:
            remove_folder(self._stale.pop())

    def find(self, tenant: str, path: str, kinds: Iterable[CheckpointKind] = ("training", "sampler", "external")) -> Checkpoint:
        """Return a checkpoint of a tenant.

        Raises:
            RefusedError: there is none of these kinds.
        """
        row = self._table.get(path)
        if row is None or row.tenant != tenant or row.kind == "ephemeral" or self._is_expired(row):
            raise RefusedError(404, f"there is no checkpoint '{path[:500]}' of this API key")
        if row.kind not in kinds:
            raise RefusedError(400, f"'{path}' is a {row.kind} checkpoint; expected one of {', '.join(kinds)}")
        return row

    def list_of(self, tenant: str, model_id: str | None = None) -> list[Checkpoint]:
        """Return the checkpoints of a tenant, or of one model, newest first."""
        rows = (row for row in self._table.values() if row.tenant == tenant and row.kind != "ephemeral")
        rows = (row for row in rows if model_id in (None, row.model_id) and not self._is_expired(row))
        return sorted(rows, key=lambda row: row.created_s, reverse=True)

    def check_new(
        self, tenant: str, model_id: str, kind: CheckpointKind, name: str, ttl_s: int | None, *, overwrite: bool = False
    ) -> str:
        """Return the path of a new checkpoint.

        Raises:
            CallError: its name or time is wrong, or the key has too many.
        """
        if not _NAME.fullmatch(name):
            raise CallError(f"path: {name[:200]!r} is no name of 1 to 128 letters, digits, '_', '-' and '.', which has no '/'.")
        check_ttl(ttl_s)
        path = make_path(model_id, kind, name)
        row = self._table.get(path)
        if row is not None and not overwrite and not self._is_expired(row):
            raise CallError(f"path: '{path}' exists; take another name, or delete it first.")
        rows, limits = [row for row in self.list_of(tenant) if row.id != path], self._ledger.limits
        if len(rows) >= limits.max_checkpoints:
            raise CallError(f"this API key has {len(rows)} checkpoints, its limit; delete some first.")
        self._check_bytes(sum(row.num_bytes for row in rows))
        return path

    def _check_bytes(self, used: int) -> None:
        limit = self._ledger.limits.max_checkpoint_bytes
        if used >= limit:
            raise CallError(f"the checkpoints of this API key have {used} bytes; its limit is {limit}. Delete some first.")

    def add(
        self,
        model: Model,
        path: str,
        kind: CheckpointKind,
        folder: Path,
        *,
        ttl_s: int | None = None,
        user_metadata: dict[str, object] | None = None,
    ) -> list[Record]:
        """Add a checkpoint whose folder is written; return the changes. One of the same path is replaced."""
        now_s = self._ledger.now_s()
        changes = [self.drop(self._table[path])] if path in self._table else []
        values = {
            "tenant": model.tenant,
            "model_id": model.id,
            "kind": kind,
            "name": path.rpartition("/")[2],
            "folder": folder.name,
            "created_s": now_s,
            "expires_s": None if ttl_s is None else now_s + ttl_s,
            "num_bytes": measure_folder(folder),
            "spec": model.spec,
            "user_metadata": user_metadata,
        }
        return [*changes, self._table.put(path, **values)]

    def drop(self, checkpoint: Checkpoint) -> Record:
        """Remove a checkpoint; return the change. `remove_stale_folders` removes its folder."""
        self._stale.append(self.get_folder(checkpoint))
        return self._table.drop(checkpoint.id)

    def set_ttl(self, checkpoint: Checkpoint, ttl_s: int | None) -> Record:
        """Set the time after which a checkpoint expires, from now; return the change."""
        check_ttl(ttl_s)
        return self._table.put(checkpoint.id, expires_s=None if ttl_s is None else self._ledger.now_s() + ttl_s)

    def list_stale(self) -> list[Checkpoint]:
        """Return checkpoints that have expired, and weights without a name that nobody can ask for any more."""
        rows = list(self._table.values())
        stale = [row for row in rows if self._is_expired(row)]
        by_model: dict[str, list[Checkpoint]] = {}
        for row in rows:
            if row.kind == "ephemeral":
                by_model.setdefault(row.model_id, []).append(row)
        for model_id, ephemeral in by_model.items():
            model = self._ledger.store.models[model_id]
            is_open = not self._ledger.store.sessions[model.session_id].ended
            ephemeral.sort(key=lambda row: row.created_s, reverse=True)
            stale += [row for row in ephemeral[_MAX_EPHEMERAL if is_open else 0 :] if row.id != model.inflight or not is_open]
        return stale

    def _is_expired(self, row: Checkpoint) -> bool:
        return row.expires_s is not None and row.expires_s <= self._ledger.now_s()


def check_ttl(ttl_s: int | None) -> None:
    """Raise CallError for a time to live that the API does not have."""
    if ttl_s is not None and ttl_s not in _TTL_S:
        raise CallError(f"ttl_seconds: {ttl_s} is not from {_TTL_S.start} (an hour) to {_TTL_S.stop - 1} (ten years).")


def read_spec(values: dict[str, Any] | None) -> AdapterSpec | None:
    """Return the adapter of a table."""
    return None if values is None else AdapterSpec(**values)


def write_spec(spec: AdapterSpec | None) -> dict[str, Any] | None:
    """Return the adapter as a table has it."""
    return None if spec is None else asdict(spec)
