"""Models and data sets by name: owner/name or hf://owner/name (Hugging Face), ms://owner/name (ModelScope), with @revision.

They are fetched by the hubs' own clients into their own caches, which resume a broken download and serve a second use offline.
HF_ENDPOINT, HF_HUB_OFFLINE, HF_TOKEN, MODELSCOPE_ENDPOINT and MODELSCOPE_API_TOKEN are the clients' and obeyed by them.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit
from urllib.request import getproxies

from mindspeed_rl.files import describe_missing, read_json

#: longest wait for a connection
_CONNECT_S = 5.0
_PORTS = {"http": 80, "https": 443}
HF, MS = "hf://", "ms://"
_NAME = re.compile(r"(hf://|ms://)?([\w.-]+/[\w.-]+|(?<=//)[\w.-]+)(?:@([\w.-]+))?")
#: files of a model that are used: neither other frameworks' weights nor a second copy
_MODEL_FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", "*.tiktoken", "*.py"]
_TOKENIZER_FILES = ["*.json", "*.model", "*.txt", "*.jinja", "*.tiktoken", "*.py"]
_INDEX = "model.safetensors.index.json"
_ALL_WEIGHTS = "the weights"
#: one of these makes a folder that of a model, or of an adapter
_MARKS = ("config.json", "adapter_config.json")
Kind = Literal["model", "tokenizer", "dataset"]


class NotFetchedError(ValueError):
    """The model or data set is not on this machine, or not all of it, and downloading it is not allowed.

    Attributes:
        name: the name on its hub.
        key: where the user wrote it.
    """

    def __init__(self, name: HubName, key: str, kind: Kind, missing: str = "") -> None:
        """Name what is missing of it, such as "the weights"; "" for everything."""
        what, pronoun = (f"{missing} of '{name}' are", "them") if missing else (f"'{name}' is", "it")
        words = {"model": "", "tokenizer": " --without-weights", "dataset": " --dataset"}[kind]
        super().__init__(f"{key}: {what} not in the cache; train fetches {pronoun}, or mindspeed-rl download {name}{words}")
        self.name, self.key, self._kind = name, key, kind

    def check_hub(self) -> None:
        """Raise ValueError where the hub cannot be reached or has no such weights, so that `train` could not fetch it."""
        if reason := _find_obstacle(self.name, find_network_problem):
            raise ValueError(_describe_unreachable(self.name, self.key, reason))
        if self._kind == "model" and self.name.hub == HF:
            _check_weights_hf(self.name, self.key)


@dataclass(frozen=True)
class HubName:
    """A name on a hub; `revision` is a branch, tag or commit, None for the default."""

    hub: Literal["hf://", "ms://"]
    name: str
    revision: str | None = None

    def __str__(self) -> str:
        return f"{self.hub if self.hub == MS else ''}{self.name}{f'@{self.revision}' if self.revision else ''}"

    @property
    def endpoint(self) -> str:
        """The address of the hub."""
        if self.hub == MS:
            return os.environ.get("MODELSCOPE_ENDPOINT", "https://www.modelscope.cn")
        return os.environ.get("HF_ENDPOINT", "https://huggingface.co")


def parse_hub_name(text: object) -> HubName | None:
    """Return the name on a hub that a text is; None for a path, which a plain `owner/name` is too where it or `owner` exists.

    Raises:
        ValueError: it begins as a name on a hub, but is none.
    """
    if not isinstance(text, str):
        return None
    match = _NAME.fullmatch(text)
    if match is None:
        if text.startswith((HF, MS)):
            raise ValueError(f"'{text}' is not a name on a hub; write {text[:5]}owner/name, or {text[:5]}owner/name@revision")
        return None
    if match[1] is None and (text.startswith(".") or Path(text).exists() or Path(text).parent.exists()):
        return None
    return HubName(MS if match[1] == MS else HF, match[2], match[3])


def find_network_problem(endpoint: str) -> str | None:
    """Return why nothing takes a connection at the address of a hub; None where something does, or a proxy is used."""
    address = urlsplit(endpoint)
    if {"http", "https", "all"} & getproxies().keys() or not address.hostname:  # NO_PROXY alone is none
        return None
    port = address.port or _PORTS.get(address.scheme, 443)
    try:
        with socket.create_connection((address.hostname, port), timeout=_CONNECT_S):
            return None
    except OSError as error:
        return error.strerror or str(error)


def fetch(
    name: HubName,
    key: str,
    kind: Kind = "model",
    *,
    downloads: bool = True,
    probe: Callable[[str], str | None] = find_network_problem,
) -> Path:
    """Return the folder with what is named, in the cache of its hub; what is not there yet is downloaded.

    Args:
        name: name of a model or data set.
        key: where the user wrote it, for messages.
        kind: selection of files: of a model all files that are used here, or all but the weights ("tokenizer", with
            config.json); all files of a data set.
        downloads: False takes only what is in the cache.
        probe: address of a hub -> why it cannot be reached, None where it can.

    Raises:
        NotFetchedError: it is not in the cache, or its weights are not, and `downloads` is False.
        ValueError: the hub has nothing of this name or no weights of it, does not allow access, or cannot be reached; the
            message says what to do.
    """
    patterns = {"model": _MODEL_FILES, "tokenizer": _TOKENIZER_FILES, "dataset": None}[kind]
    if name.hub == HF:
        folder = Path(_fetch_hf(name, key, kind, patterns, downloads, probe))
    else:
        folder = Path(_fetch_ms(name, key, kind, patterns, downloads))
    if kind == "model" and (missing := _find_missing_weights(folder)):
        if not downloads:
            raise NotFetchedError(name, key, kind, missing)
        if reason := _find_obstacle(name, probe):
            raise ValueError(_describe_unreachable(name, key, reason))
        raise ValueError(_describe_no_weights(name, key, missing))
    return folder


def _find_obstacle(name: HubName, probe: Callable[[str], str | None]) -> str | None:
    """Return why nothing can be downloaded from a hub; None where it can."""
    return "HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE is set" if name.hub == HF and _is_offline() else probe(name.endpoint)


def _describe_no_weights(name: HubName, key: str, missing: str = "") -> str:
    """Return the sentence for a model without the weights that are read here; `missing` as `_find_missing_weights` says it."""
    what = "*.safetensors" if missing in ("", _ALL_WEIGHTS) else missing.rstrip(",")
    return f"{key}: {name.endpoint} has no {what} of '{name}', and no other format of weights is read from a hub"


def _find_missing_weights(folder: Path) -> str:
    """Return which weights a folder in a cache lacks; "" where it has all."""
    shards = sorted(set(_read_shard_names(folder)))
    missing = [shard for shard in shards if not (folder / shard).is_file()]
    if missing:
        return f"{len(missing)} of {len(shards)} weight files, such as {missing[0]},"
    return "" if any(folder.glob("*.safetensors")) else _ALL_WEIGHTS


def _read_shard_names(folder: Path) -> list[str]:
    """Return the weight files in the index of a folder; empty without one, and for an invalid one, which loading reports."""
    try:
        weight_map = read_json(folder / _INDEX)["weight_map"]
        return [str(shard) for shard in weight_map.values()]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return []


def find_cached(text: str | Path | None) -> Path | None:
    """Return the folder in a hub's cache of the model that a text names; None for a path, and for what is not in the cache.

    Only the cache is read; the folder may have no weights, and has config.json or the settings of an adapter.
    """
    try:
        name = parse_hub_name(None if text is None else str(text))
        folder = None if name is None else fetch(name, "", "tokenizer", downloads=False)
    except ValueError:  # it is reported where the model is fetched
        return None
    return folder if folder is not None and any((folder / mark).is_file() for mark in _MARKS) else None


def find_folder(text: str | Path) -> Path:
    """Return the folder that a text names, as a path or as a name on a hub; it need not exist."""
    return find_cached(text) or Path(text).expanduser()


def fetch_config(name: HubName, key: str) -> Path:
    """Return the folder with the config.json of a model in the cache of its hub.

    Raises:
        NotFetchedError: it is not there.
    """
    folder = fetch(name, key, "tokenizer", downloads=False)
    if not (folder / _MARKS[0]).is_file():
        raise NotFetchedError(name, key, "tokenizer", "the settings (config.json)")
    return folder


def _is_offline() -> bool:
    """Return whether Hugging Face's client downloads nothing; it reads HF_HUB_OFFLINE and TRANSFORMERS_OFFLINE once."""
    from huggingface_hub import constants

    return constants.HF_HUB_OFFLINE


def _describe_missing(name: HubName, key: str, is_dataset: bool) -> str:
    what, local = ("data set", "file or folder") if is_dataset else ("model", "folder")
    where = "" if name.hub == MS else f"is not a {local} here, and "
    revision = f" with the revision '{name.revision}'" if name.revision else ""
    token = "HF_TOKEN" if name.hub == HF else "MODELSCOPE_API_TOKEN"
    return (
        f"{key}: '{name}' {where}{name.endpoint} has no {what} of this name{revision}; check the spelling (a private one needs "
        f"{token})"
    )


def _describe_unreachable(name: HubName, key: str, reason: object) -> str:
    other = (
        f"ms://{name.name} takes it from ModelScope, HF_ENDPOINT=https://hf-mirror.com from a mirror"
        if name.hub == HF
        else f"hf://{name.name} takes it from Hugging Face"
    )
    text = (str(reason).strip() or type(reason).__name__).splitlines()[0][:200]
    return (
        f"{key}: {_describe_folder(name)}'{name}' is not complete in the cache, and {name.endpoint} cannot be reached ({text})."
        f" Where it is one, fetch it where there is a network (mindspeed-rl download {name}) and copy the folder; {other}"
    )


def _describe_folder(name: HubName) -> str:
    """Return a clause about the folder that a plain owner/name could also be; nothing for another name."""
    return "" if name.hub == MS or name.revision else f"{describe_missing(name.name)}; as a name on a hub, "


def _fetch_hf(
    name: HubName,
    key: str,
    kind: Kind,
    patterns: list[str] | None,
    downloads: bool,
    probe: Callable[[str], str | None],
) -> str:
    from huggingface_hub import errors, snapshot_download

    if downloads and not _is_offline() and (reason := probe(name.endpoint)):
        try:  # at once from the cache, or not at all: the client tries again for many seconds
            return _fetch_hf(name, key, kind, patterns, False, probe)
        except NotFetchedError:
            raise ValueError(_describe_unreachable(name, key, reason)) from None
    try:
        return snapshot_download(
            name.name,
            repo_type="dataset" if kind == "dataset" else "model",
            revision=name.revision,
            allow_patterns=patterns,
            local_files_only=not downloads,
            endpoint=name.endpoint,
        )
    except errors.GatedRepoError as error:
        raise ValueError(
            f"{key}: '{name}' needs its license accepted at {name.endpoint}/{name.name}, and HF_TOKEN of that account"
        ) from error
    except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError, errors.HFValidationError) as error:
        raise ValueError(_describe_missing(name, key, kind == "dataset")) from error
    except errors.LocalEntryNotFoundError as error:
        if not downloads:
            raise NotFetchedError(name, key, kind) from None
        raise ValueError(_describe_unreachable(name, key, error.__cause__ or error)) from error
    except (OSError, RuntimeError) as error:  # of the network, in the middle; the next attempt goes on from there
        raise ValueError(_describe_unreachable(name, key, error)) from error


def _check_weights_hf(name: HubName, key: str) -> None:
    """Raise ValueError where the hub has no safetensors of a model; what else its client finds, `fetch` reports."""
    from huggingface_hub import HfApi, errors

    with contextlib.suppress(errors.HfHubHTTPError, errors.HFValidationError, OSError, RuntimeError):
        files = HfApi(endpoint=name.endpoint).model_info(name.name, revision=name.revision).siblings
        if files and not any(file.rfilename.endswith(".safetensors") for file in files):
            raise ValueError(_describe_no_weights(name, key))


def _is_in_ms_cache(name: HubName, kind: Kind) -> bool:
    """Return whether ModelScope's cache has a folder of this name; its client makes folders where it looks for one."""
    from modelscope_hub import get_default_config

    cache, group = get_default_config().cache_dir, "datasets" if kind == "dataset" else "models"
    owner, _, repo = name.name.partition("/")
    # the second form is of clients before 1.38
    forms = (f"{group}/{owner}--{repo}", f"{group}/{owner}/{repo.replace('.', '___')}")
    return any((cache / start / form).is_dir() for start in ("", "hub") for form in forms)


def _fetch_ms(name: HubName, key: str, kind: Kind, patterns: list[str] | None, downloads: bool) -> str:
    if find_spec("modelscope_hub") is None:
        raise ValueError(f"{key}: '{name}' needs the client of ModelScope: pip install modelscope-hub")
    # an optional package, which only names with ms:// need
    from modelscope_hub import compat, errors

    if not downloads and not _is_in_ms_cache(name, kind):
        raise NotFetchedError(name, key, kind)
    load = partial(
        compat.dataset_snapshot_download if kind == "dataset" else compat.snapshot_download,
        name.name,
        revision=name.revision,
        allow_patterns=patterns,
        endpoint=name.endpoint,
    )
    try:
        folder = load(local_files_only=not downloads)
        # the client names the folder also where there is none
        if not downloads and not (Path(folder).is_dir() and any(Path(folder).iterdir())):
            raise NotFetchedError(name, key, kind)
        return folder
    except NotFetchedError:
        raise
    except (errors.HubError, OSError, ValueError) as error:
        if not downloads:
            raise NotFetchedError(name, key, kind) from None
        # the client raises errors of its own, or errors of requests
        status = getattr(error, "status_code", None) or getattr(getattr(error, "response", None), "status_code", None)
        if status in (401, 403):
            raise ValueError(f"{key}: '{name}' is not open to this account; set MODELSCOPE_API_TOKEN") from error
        if status in (400, 404):
            raise ValueError(_describe_missing(name, key, kind == "dataset")) from error
        # offline: the hub's other client does the same with what an earlier use has left
        with contextlib.suppress(errors.HubError, OSError, ValueError):
            return _fetch_ms(name, key, kind, patterns, downloads=False)
        raise ValueError(_describe_unreachable(name, key, error)) from error
