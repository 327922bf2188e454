"""Raw data of supervised stages as an indexed dataset, made once per content: the cache next to the run folders."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from mindspeed_rl.data import handler_class
from mindspeed_rl.data.cache_folders import (
    choose_workers,
    digest_code,
    digest_files,
    digest_source,
    digest_tokenizer,
    make_folder,
    name_folder,
    read_record,
)
from mindspeed_rl.data.images import ImageRules
from mindspeed_rl.data.preprocess import run
from mindspeed_rl.data.preprocess_config import PreprocessConfig
from mindspeed_rl.data.sources import Source
from mindspeed_rl.folders import remove_folder

#: settings on which no token depends
_IRRELEVANT = ("input", "output_prefix", "workers", "n_subs", "log_interval", "cache_dir", "tokenizer_name_or_path")
_RECORD = "prepared.json"
_KEYS = ("rows_read", "rows_added", "dropped")


@dataclass(frozen=True)
class Prepared:
    """An indexed dataset in the cache.

    Attributes:
        prefix: its --output-prefix.
        is_new: it was written by this call.
        rows_read: rows of the raw data.
        rows_added: rows that earlier answers of conversations have added.
        dropped: rows that were left out, by reason.
    """

    prefix: Path
    is_new: bool
    rows_read: int
    rows_added: int = 0
    dropped: Mapping[str, int] = field(default_factory=dict)


def prepare(config: PreprocessConfig, source: Source, cache: Path, tokenizer_folder: Path) -> Prepared:
    """Return the indexed dataset of raw rows, from the cache where it is there.

    Args:
        config: settings; output_prefix is not read.
        source: rows of `config.input`.
        cache: folder of the cache, which need not exist.
        tokenizer_folder: folder with the files of the tokenizer.

    Raises:
        ValueError: see `preprocess.run`.
        OSError: the cache cannot be written.
    """
    folder = cache / name_folder(config.input, _list_parts(config, source, tokenizer_folder))
    # rows name files of images, whose contents are not among what was digested
    may_reuse = ImageRules.read(tokenizer_folder) is None
    if may_reuse and (record := read_record(folder, _RECORD, _KEYS)) is not None:
        return _from_record(folder, record, is_new=False)
    made: dict[str, object] = {"input": config.input}
    with make_folder(folder, _RECORD, made) as built:
        settings = dataclasses.replace(config, output_prefix=str(built / "data"), workers=choose_workers(source))
        counts = run(settings, source=source).counts
        dropped = {reason: count for reason, count in counts.dropped.items() if count}
        made |= {"rows_read": counts.rows_read, "rows_added": counts.rows_added, "dropped": dropped}
        if not may_reuse:
            remove_folder(folder)
    return _from_record(folder, made, is_new=True)


def _from_record(folder: Path, record: Mapping[str, object], *, is_new: bool) -> Prepared:
    rows_read, rows_added, dropped = record["rows_read"], record["rows_added"], record["dropped"]
    assert isinstance(rows_read, int) and isinstance(rows_added, int) and isinstance(dropped, Mapping)
    return Prepared(folder.absolute() / "data", is_new, rows_read, rows_added, dict(dropped))


def _list_parts(config: PreprocessConfig, source: Source, tokenizer_folder: Path) -> list[object]:
    """Return all that the tokens depend on."""
    settings = {key: value for key, value in dataclasses.asdict(config).items() if key not in _IRRELEVANT}
    code = digest_code(handler_class(config.handler_name))
    parts: list[object] = [settings, digest_source(source), digest_tokenizer(tokenizer_folder), code]
    return parts + [digest_files([Path(config.prompt_type_path)])] if config.prompt_type_path else parts
