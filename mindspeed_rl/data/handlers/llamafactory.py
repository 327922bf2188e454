"""Datasets of a LlamaFactory `dataset_info.json`: one, or a mixture of several."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from mindspeed_rl import registry
from mindspeed_rl.data.conversation import JsonObject, MalformedRowError
from mindspeed_rl.data.encoding import TurnIds
from mindspeed_rl.data.handlers.base import Draft, EncodedRow, Handler, HandlerSettings
from mindspeed_rl.data.handlers.instruction import (
    AlpacaStyleInstructionHandler,
    InstructionHandler,
    OpenAIInstructionHandler,
    SharegptStyleInstructionHandler,
)
from mindspeed_rl.data.preprocess_config import PreprocessConfig
from mindspeed_rl.data.sources import DEFAULT_CHUNK_SIZE, Chunk, Source, TaggedRow, open_source, read_rows
from mindspeed_rl.files import read_json

_INFO_FILE = "dataset_info.json"
# dataset_info.json writes OpenAI data as sharegpt with these tags.
_OPENAI_TAGS = {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"}
#: columns without which a row is sound
_OPTIONAL_COLUMNS = ("query", "system", "history", "tools")


@dataclass(frozen=True)
class _DatasetEntry:
    """An entry of dataset_info.json that the run reads."""

    name: str
    handler: type[InstructionHandler]
    map_keys: dict[str, object]
    source: Source


def _dataset_entries(
    names: str, dataset_dir: str | None, *, cache_dir: str | None = None, max_rows: int | None = None
) -> list[_DatasetEntry]:
    """Find the comma-separated names in `<dataset_dir>/dataset_info.json`; `max_rows` limits each of them.

    Raises:
        ValueError: the file or a name is missing, or an entry has a form that is not supported.
    """
    if not dataset_dir:
        raise ValueError("LlamaFactoryInstructionHandler needs dataset_dir, the folder of dataset_info.json")
    path = Path(dataset_dir).expanduser() / _INFO_FILE
    try:
        info = read_json(path)
    except ValueError as error:
        raise ValueError(f"dataset_dir={dataset_dir!r}: {path} cannot be read: {error}") from error
    entries = []
    for name in (part.strip() for part in names.split(",")):
        if name not in info:
            hint = registry.did_you_mean(name, info)
            raise ValueError(f"input={name!r} is not in {path} (there: {', '.join(info)}){hint}")
        value = info[name]
        limits = [limit for limit in (max_rows, value.get("num_samples")) if limit is not None]
        entry = _entry(name, value, path.parent, cache_dir)
        entries.append(replace(entry, source=replace(entry.source, max_rows=min(limits, default=None))))
    return entries


def _entry(name: str, value: JsonObject, folder: Path, cache_dir: str | None) -> _DatasetEntry:
    if value.get("ranking"):
        raise ValueError(f"dataset {name!r} is a ranking dataset; use a pairwise handler on its file")
    if "file_name" in value:
        source = open_source(str(folder / value["file_name"]))
    elif "hf_hub_url" in value:
        options = {"name": value["subset"]} if value.get("subset") else {}
        if "split" in value:
            options["split"] = value["split"]
        source = open_source(value["hf_hub_url"], cache_dir=cache_dir, dataset_options=options)
    else:
        raise ValueError(f"dataset {name!r} needs file_name or hf_hub_url in {_INFO_FILE}")
    formatting = value.get("formatting", "alpaca")
    columns = {key: column for key, column in value.get("columns", {}).items() if column}
    if (images := columns.pop("images", "images")) not in ("images", "image"):
        raise ValueError(f"dataset {name!r}: the column of images is {images!r}, but must be images or image; rename it")
    tags = value.get("tags")
    has_openai_tags = tags is not None and all(tags.get(key) == tag for key, tag in _OPENAI_TAGS.items())
    kind: type[InstructionHandler]
    if formatting == "alpaca":
        kind, map_keys = AlpacaStyleInstructionHandler, columns
    elif formatting == "openai" or (formatting == "sharegpt" and has_openai_tags):
        kind, map_keys = OpenAIInstructionHandler, columns
    elif formatting == "sharegpt":
        kind, map_keys = SharegptStyleInstructionHandler, {**columns, **({"tags": tags} if tags else {})}
    else:
        raise ValueError(f"dataset {name!r}: formatting={formatting!r} is unknown; allowed: alpaca, sharegpt, openai")
    if columns:
        # LLaMA-Factory does not read a column that `columns` leaves out, such as an Alpaca row's input
        map_keys = {**{key: "" for key in _OPTIONAL_COLUMNS if key in kind.default_map and key not in columns}, **map_keys}
    return _DatasetEntry(name, kind, map_keys, source)


class _MixedSource:
    """A mixture of datasets as one stream of rows, each tagged with its dataset.

    concat: one after the other. interleave_under: a row of each in turn until a dataset is used up. interleave_over: until
    each has been used up once; short ones start again. With probabilities, the dataset of each row is sampled.
    """

    ignored: tuple[str, ...] = ()
    note: str | None = None

    def __init__(
        self, sources: Sequence[Source], *, strategy: str, probabilities: Sequence[float] = (), seed: int = 1234
    ) -> None:
        if probabilities and strategy == "concat":
            raise ValueError("interleave_probs have no meaning for mix_strategy='concat'")
        self.note = "\n".join(source.note for source in sources if source.note) or None
        if probabilities and (len(probabilities) != len(sources) or min(probabilities) <= 0):
            raise ValueError(f"interleave_probs must hold a positive value for each of the {len(sources)} datasets")
        self._sources = list(sources)
        self._strategy = strategy
        self._probabilities = list(probabilities)
        self._seed = seed

    def total_weight(self) -> int | None:
        """Return the sum over the datasets; None for interleaving, where it is unknown."""
        weights = [source.total_weight() for source in self._sources]
        if self._strategy != "concat" or any(weight is None for weight in weights):
            return None
        return sum(weight for weight in weights if weight is not None)

    def fingerprint(self) -> list[object]:
        """Return the fingerprints of all datasets."""
        return [source.fingerprint() for source in self._sources]

    def chunks(self) -> Iterator[Chunk]:
        """Yield the rows as TaggedRow."""
        if self._strategy == "concat":
            for tag, source in enumerate(self._sources):
                yield from (replace(chunk, tag=tag) for chunk in source.chunks())
            return
        rows: list[TaggedRow] = []
        first = 1
        for row in self._interleaved():
            rows.append(row)
            if len(rows) == DEFAULT_CHUNK_SIZE.num_rows:
                # without weight: the number of rows of a mixture is known only at its end
                yield Chunk("mixture", "rows", first, len(rows), 0, payload=rows)
                first, rows = first + len(rows), []
        yield Chunk("mixture", "rows", first, len(rows), 0, payload=rows)

    def _interleaved(self) -> Iterator[TaggedRow]:
        streams = [read_rows(source) for source in self._sources]
        upcoming = [next(stream, None) for stream in streams]
        if any(row is None for row in upcoming):
            raise ValueError(f"mix_strategy={self._strategy!r} needs rows in every dataset, but one is empty")
        used_up = [False] * len(streams)
        random = np.random.RandomState(self._seed)
        fractions = np.array(self._probabilities) / sum(self._probabilities) if self._probabilities else None
        turn = 0
        while True:
            tag = turn % len(streams) if fractions is None else int(random.choice(len(streams), p=fractions))
            turn += 1
            row = upcoming[tag]
            assert row is not None  # used-up streams start again, or the mixture has ended
            path, number, values = row
            yield TaggedRow(tag, values, f"{path}, row {number}")
            upcoming[tag] = next(streams[tag], None)
            if upcoming[tag] is None:
                used_up[tag] = True
                streams[tag] = read_rows(self._sources[tag])
                upcoming[tag] = next(streams[tag])
            if all(used_up) if self._strategy == "interleave_over" else any(used_up):
                return


class LlamaFactoryInstructionHandler(Handler):
    """Reader of the entries of dataset_info.json that `--input` names, separated by commas."""

    can_pack = True
    can_append_eod = True
    can_read_images = True
    default_map: ClassVar = {}

    def __init__(self, settings: HandlerSettings) -> None:
        super().__init__(settings)
        self._handlers: list[InstructionHandler] = []

    def open_source(self, config: PreprocessConfig) -> _MixedSource:
        """Open the datasets and return their mixture.

        Raises:
            ValueError: an unknown dataset name, a missing file, or wrong probabilities.
        """
        entries = _dataset_entries(config.input, config.dataset_dir, cache_dir=config.cache_dir, max_rows=config.max_samples)
        self._handlers = []
        for entry in entries:
            try:
                self._handlers.append(entry.handler(replace(self.settings, map_keys=entry.map_keys)))
            except ValueError as error:
                raise ValueError(f"dataset {entry.name!r}: {error}") from error
        sources = [entry.source for entry in entries]
        return _MixedSource(sources, strategy=config.mix_strategy, probabilities=config.interleave_probs, seed=config.seed)

    def render(self, row: Any) -> Draft:
        assert isinstance(row, TaggedRow)
        try:
            if isinstance(row.row, MalformedRowError):
                raise row.row
            if not isinstance(row.row, Mapping):
                raise MalformedRowError(f"must be an object with named columns, not {type(row.row).__name__}")
            return self._handlers[row.tag].render(row.row)
        except MalformedRowError as error:
            raise MalformedRowError(f"{row.origin}: {error}" if row.origin else str(error)) from error

    def assemble(self, draft: Draft, encoded: Sequence[list[TurnIds]]) -> EncodedRow:
        # any of them: they read rows differently and assemble tokens alike
        return self._handlers[0].assemble(draft, encoded)
