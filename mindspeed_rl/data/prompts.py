"""Prompts for RL: from preprocessed files, or straight from raw data with the chat template applied at load."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

import numpy as np

from mindspeed_rl.data import handler_class
from mindspeed_rl.data.conversation import DroppedRowError, MalformedRowError
from mindspeed_rl.data.handlers.base import HandlerSettings
from mindspeed_rl.data.handlers.prompt import LABELS, PromptHandler, as_text
from mindspeed_rl.data.indexed import IGNORE_INDEX, IndexedColumns, list_packed_columns
from mindspeed_rl.data.sources import Source, open_hub, open_source, read_chunk
from mindspeed_rl.data.summary import MALFORMED
from mindspeed_rl.data.templates import PLAIN_TEMPLATE, Thinking, load_template
from mindspeed_rl.data.tokenizer import set_eos_token

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_SLICE = re.compile(r"(.+?)(?:\[(\d*):(\d*)\]|#(\d+))")
#: prefix of names of datasets at the Hugging Face hub
HUB = "hf://"

# Default columns of raw rows with a text column `prompt` and no `instruction`.
_PLAIN_COLUMNS = {"prompt": "prompt", "query": "", "response": "labels", "system": ""}


class PromptItem(TypedDict):
    """One prompt: token ids, the reference answer (None where the data has none), further columns by name."""

    prompt_ids: list[int]
    label: str | None
    columns: dict[str, Any]


@dataclass(frozen=True)
class PromptSettings:
    """Settings of raw prompts; names are those of `actor_config`, which has true, false or nothing for enable_thinking.

    map_keys None reads the columns prompt and labels where the first row has a text `prompt`, else the handler's own columns.
    handler_name None takes Math17kAlpacaStyleInstructionHandler where the prompt column holds chat messages, else
    R1AlpacaStyleInstructionHandler, or PPOAlpacaStyleInstructionHandler where `labels` is not asked for.
    system_prompt stands before every prompt whose row brings none. tools are function schemas that every prompt tells of, where
    its template can write them; a row's own come first.
    """

    prompt_type: str | None = None
    prompt_type_path: str | None = None
    map_keys: Mapping[str, Any] | None = None
    handler_name: str | None = None
    enable_thinking: Thinking = "none"
    on_bad_row: str = "error"
    system_prompt: str | None = None
    tools: tuple[Mapping[str, Any], ...] = ()


class PromptDataset:
    """Prompts shorter than `max_prompt_length`, with their labels and additional columns.

    Build it with `open_prompts`. `num_read` counts the rows there were, `num_too_long` those filtered out for their length,
    `dropped` those left out for another reason (malformed, empty ...).
    """

    def __init__(
        self,
        rows: _IndexedPrompts | _RawPrompts,
        lengths: np.ndarray,
        *,
        max_prompt_length: int,
        dropped: Mapping[str, int],
        first: int = 0,
    ) -> None:
        """`first` is the row that `lengths` begins with."""
        self._rows = rows
        # strictly below, as upstream filters
        self._row_indices = np.flatnonzero(lengths < max_prompt_length)
        self.lengths = lengths[self._row_indices]
        self._first = first
        self.dropped = dict(dropped)
        self.num_too_long = len(lengths) - len(self._row_indices)
        self.num_read = len(lengths) + sum(dropped.values())
        if len(self._row_indices) == 0:
            raise ValueError(
                f"no prompt is left: {self.num_too_long} of {self.num_read} rows have max_prompt_length={max_prompt_length}"
                " tokens or more"
            )

    def __len__(self) -> int:
        return len(self._row_indices)

    def __getitem__(self, index: int) -> PromptItem:
        return self._rows[int(self._row_indices[index]) + self._first]

    def where(self, index: int) -> str:
        """File and row of a prompt, for messages."""
        return self._rows.where(int(self._row_indices[index]) + self._first)

    def part(self, first: float, end: float) -> PromptDataset:
        """The prompts from one share of them to another, in their order; parts that share a bound have no prompt in common.

        Raises:
            ValueError: there is none between them.
        """
        start, stop = (round(len(self) * share) for share in (first, end))
        if start == stop:
            raise ValueError(f"split: the share from {first:g} to {end:g} of {len(self)} prompts is none")
        part = copy.copy(self)
        part._row_indices, part.lengths = self._row_indices[start:stop], self.lengths[start:stop]
        return part

    def describe(self) -> str:
        """One line for the log: how many prompts there are and why others are not."""
        reasons = "".join(f", {count} {reason}" for reason, count in sorted(self.dropped.items()))
        return f"{len(self)} prompts of {self.num_read} rows ({self.num_too_long} too long{reasons})"


class _IndexedPrompts:
    """Prompts in `<prefix>_packed_*` files; the other columns hold tokens and are decoded to text."""

    def __init__(self, prefix: str, tokenizer: PreTrainedTokenizerBase, additional_keys: Sequence[str] | None) -> None:
        keys = additional_keys or ()
        self.rows = IndexedColumns(prefix, ["input_ids", *keys])
        self._prefix = prefix
        self._tokenizer = tokenizer
        self._extra = [key for key in keys if key != LABELS]
        # An SFT dataset has labels too, but as a mask over input_ids.
        has_labels = LABELS in self.rows.columns
        self._has_label = has_labels and IGNORE_INDEX not in self.rows.row(0, LABELS)
        if LABELS in keys and not self._has_label:
            raise ValueError(f"{prefix}_packed_labels_document holds the labels of supervised tuning, not reference answers")

    def where(self, index: int) -> str:
        return f"{self._prefix}, row {index}"

    def _text(self, index: int, column: str) -> str:
        text = self._tokenizer.decode(self.rows.row(index, column).tolist(), skip_special_tokens=True)
        assert isinstance(text, str)  # a list for a batch
        return text

    def __getitem__(self, index: int) -> PromptItem:
        return PromptItem(
            prompt_ids=self.rows.row(index, "input_ids").tolist(),
            label=self._text(index, LABELS) if self._has_label else None,
            columns={name: self._text(index, name) for name in self._extra},
        )


class _RawPrompts:
    """Prompts tokenized at load; 4 bytes a token are kept, plus the rows' labels and additional columns."""

    def __init__(self) -> None:
        self._tokens: list[np.ndarray] = []
        self._labels: list[str | None] = []
        self._columns: list[dict[str, Any]] = []
        self._origins: list[tuple[str, int]] = []  # file and row

    def append(self, tokens: Sequence[int], values: Mapping[str, Any], origin: tuple[str, int]) -> None:
        self._tokens.append(np.array(tokens, dtype=np.int32))
        self._origins.append(origin)
        self._labels.append(as_text(values[LABELS]) if LABELS in values else None)
        self._columns.append({name: value for name, value in values.items() if name != LABELS})

    def where(self, index: int) -> str:
        path, number = self._origins[index]
        return f"{path}, row {number}"

    def lengths(self) -> np.ndarray:
        return np.array([len(tokens) for tokens in self._tokens], dtype=np.int32)

    def __getitem__(self, index: int) -> PromptItem:
        return PromptItem(prompt_ids=self._tokens[index].tolist(), label=self._labels[index], columns=self._columns[index])


def open_prompts(
    data_path: str | Path,
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_prompt_length: int,
    dataset_additional_keys: Sequence[str] | None = (LABELS,),
    settings: PromptSettings | None = None,
) -> PromptDataset:
    """Open the prompts at `data_path`: an indexed dataset's prefix, a raw file or folder, or a dataset of the hub.

    Args:
        data_path: a folder may be one of `save_to_disk`; a dataset of the hub is written hf://owner/name. With [start:stop] or
            #count behind it only these rows are read; rows count from 0, and before any is left out.
        max_prompt_length: prompts with this many tokens or more are filtered out, and counted.
        dataset_additional_keys: columns to keep; `labels` is the reference answer. None keeps `labels` where the data has them
            (raw data: where the first row has the column).
        settings: how raw data is read. A template that replaces the end token also sets it in `tokenizer`.

    Raises:
        ValueError: nothing usable is there, a column is missing, or a row is malformed while on_bad_row is "error".
    """
    settings = settings or PromptSettings()
    check_prompt_files(data_path)
    data_path, start, stop = split_slice(str(data_path))
    if list_packed_columns(data_path):
        indexed = _IndexedPrompts(data_path, tokenizer, dataset_additional_keys)
        lengths = indexed.rows.lengths("input_ids")[start:stop]
        return PromptDataset(indexed, lengths, max_prompt_length=max_prompt_length, dropped={}, first=start)
    opened = open_hub(data_path.removeprefix(HUB)) if data_path.startswith(HUB) else open_source(data_path)
    source = replace(opened, max_rows=stop)
    return _load_raw(source, start, tokenizer, max_prompt_length, dataset_additional_keys, settings)


def check_prompt_files(data_path: str | Path) -> None:
    """Check that data exists at `data_path`; see `open_prompts`.

    Raises:
        ValueError: it does not exist.
    """
    path, _, _ = split_slice(str(data_path))
    if not list_packed_columns(path) and not path.startswith(HUB) and not Path(path).expanduser().exists():
        raise ValueError(
            f"data_path={path!r} is neither a raw file or folder, nor a prefix of files named"
            f" {path}_packed_input_ids_document.bin; give the --output-prefix of preprocessing, raw data, or hf://owner/name"
        )


def split_slice(data_path: str) -> tuple[str, int, int | None]:
    """Return path, first row and the row after the last (None: to the end) of "path[start:stop]" or "path#count".

    An existing path is taken as it is written.

    Raises:
        ValueError: no row is left.
    """
    match = _SLICE.fullmatch(data_path)
    if match is None or Path(data_path).expanduser().exists():
        return data_path, 0, None
    path, first, last, count = match.groups()
    start, end = int(first or 0), count or last
    stop = int(end) if end else None
    if stop is not None and stop <= start:
        raise ValueError(f"data_path={data_path!r} asks for the rows from {start} to before {stop}: there is none")
    return path, start, stop


def _load_raw(
    source: Source,
    start: int,
    tokenizer: PreTrainedTokenizerBase,
    max_prompt_length: int,
    keys: Sequence[str] | None,
    settings: PromptSettings,
) -> PromptDataset:
    template = load_template(settings.prompt_type or PLAIN_TEMPLATE, tokenizer, path=settings.prompt_type_path)
    if template.eos_token is not None:
        set_eos_token(tokenizer, template.eos_token)
    if settings.enable_thinking == "true" and not template.can_think:
        raise ValueError(f"enable_thinking=true has no meaning for prompt_type={template.name!r}")
    rows = _RawPrompts()
    dropped: dict[str, int] = {}
    handler: PromptHandler | None = None
    to_skip = start
    for chunk in source.chunks():
        # by their numbers: empty lines are counted, as by `_limit_rows`, but are not among the rows
        numbered = [(number, row) for number, row in read_chunk(chunk) if number - chunk.first_row >= to_skip]
        to_skip = max(0, to_skip - chunk.num_rows)
        if not numbered:
            continue
        if handler is None:
            # one row decides how all are read: a data set has one layout
            first = next((row for _, row in numbered if isinstance(row, Mapping)), {})
            if settings.map_keys is None and isinstance(first.get("prompt"), str) and "instruction" not in first:
                settings = replace(settings, map_keys=_PLAIN_COLUMNS)
            if keys is None:
                keys = (LABELS,) if _has_answer(first, settings) else ()
            kind = handler_class(settings.handler_name or _handler_for(first, keys, settings.map_keys))
            reader = kind(
                HandlerSettings(
                    tokenizer=tokenizer,
                    template=template,
                    map_keys=settings.map_keys,
                    dataset_additional_keys=keys,
                    enable_thinking=settings.enable_thinking,
                    system_prompt=settings.system_prompt,
                    tools=settings.tools,
                )
            )
            if not isinstance(reader, PromptHandler):
                raise ValueError(
                    f"handler_name={settings.handler_name!r} reads no prompts; use PPO-, R1-, Math17kAlpaca... or R1Sharegpt..."
                )
            handler = reader
        drafts = []
        bad: list[tuple[int, MalformedRowError]] = []
        for number, row in numbered:
            try:
                if isinstance(row, MalformedRowError):
                    raise row
                draft = handler.render(row)
                drafts.append((number, draft.renderings[0], draft.note))
            except MalformedRowError as error:
                bad.append((number, error))
            except DroppedRowError as drop:
                dropped[drop.reason] = dropped.get(drop.reason, 0) + 1
        encoded = handler.encoder.encode_renderings([rendering for _, rendering, _ in drafts])
        path = str(chunk.path)
        for turns, (number, _, values) in zip(encoded, drafts, strict=True):
            if isinstance(turns, MalformedRowError):
                bad.append((number, turns))
            else:
                tokens = [token for source_ids, target_ids in turns for token in (*source_ids, *target_ids)]
                rows.append(tokens, values, (path, number))
        if bad and settings.on_bad_row == "error":
            # rows that cannot be encoded come after all that cannot be rendered
            number, error = min(bad, key=lambda entry: entry[0])
            raise ValueError(f"{chunk.path}, row {number}: {error} (on_bad_row=skip leaves such rows out)") from error
        if bad:
            dropped[MALFORMED] = dropped.get(MALFORMED, 0) + len(bad)
    return PromptDataset(rows, rows.lengths(), max_prompt_length=max_prompt_length, dropped=dropped)


def _has_answer(row: Mapping[str, Any], settings: PromptSettings) -> bool:
    kind = handler_class(settings.handler_name or _handler_for(row, (LABELS,), settings.map_keys))
    return {**kind.default_map, **(settings.map_keys or {})}.get("response") in row


def _handler_for(row: Mapping[str, Any], keys: Sequence[str], map_keys: Mapping[str, Any] | None) -> str:
    column = (map_keys or {}).get("prompt", "prompt")
    if isinstance(row.get(column), (list, tuple)):
        return "Math17kAlpacaStyleInstructionHandler"
    return "R1AlpacaStyleInstructionHandler" if LABELS in keys else "PPOAlpacaStyleInstructionHandler"
