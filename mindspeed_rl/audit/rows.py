"""The prompts of a run as a stream: each row of its data as the run would read it, or the reason why it would not."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mindspeed_rl.audit.cheats import Case
from mindspeed_rl.audit.texts import FRAME_TEXTS, find_frame, strip_frame
from mindspeed_rl.config.keys.megatron import MegatronConfig, read_split
from mindspeed_rl.data.conversation import Row
from mindspeed_rl.data.handlers.prompt import LABELS, as_text
from mindspeed_rl.data.indexed import list_packed_columns
from mindspeed_rl.data.prompts import (
    PromptSettings,
    check_prompt_files,
    fits_limit,
    open_prompts,
    open_rows,
    read_prompt_chunks,
    split_slice,
)
from mindspeed_rl.data.sources import read_chunk
from mindspeed_rl.run import Run

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

#: rows of preprocessed data that are read at a time
_CHUNK_ROWS = 512
#: longest prompt in tokens that is read: none is left out for its length here
_NO_LIMIT = 1 << 30


@dataclass(frozen=True)
class AuditRow:
    """A row of a data set.

    Attributes:
        path, number: file and row of raw data, which counts from 1; prefix and row of preprocessed data, which counts from 0.
        text: the prompt as the model gets it; empty for a row that is left out.
        tokens: its token ids.
        label: the reference answer; None where the data has none.
        columns: additional columns.
        left_out: reason why the row is not a prompt; empty for a prompt.
        detail: what is wrong with it.
    """

    path: str
    number: int
    text: str = ""
    tokens: Sequence[int] = ()
    label: str | None = None
    columns: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    left_out: str = ""
    detail: str = ""

    @property
    def where(self) -> str:
        """Name of the file, and row, for messages."""
        return f"{Path(self.path).name}, row {self.number}"


def list_row_files(data_path: str) -> list[Path]:
    """Return the files of raw rows."""
    return [Path(path) for path in open_rows(data_path).paths]


@dataclass(frozen=True)
class RowStream:
    """The rows of one data set of a run, as often as they are asked for.

    Attributes:
        key: name of the key with its path.
        data_path: value of the key.
        settings: how raw rows are read.
        additional_keys: columns that are kept; None for `labels` where the data has them.
    """

    key: str
    data_path: str
    tokenizer: PreTrainedTokenizerBase
    settings: PromptSettings
    additional_keys: Sequence[str] | None

    @classmethod
    def open(
        cls, run: Run, key: str, data_path: object, tokenizer: PreTrainedTokenizerBase, tools: Sequence[Mapping[str, Any]]
    ) -> RowStream:
        """Open the data set at `data_path`, the value of a key of the run file.

        Raises:
            ValueError: nothing is there.
        """
        if not isinstance(data_path, str):
            raise ValueError(f"megatron_training.{key}: {data_path!r} must be one prefix or file of prompts.")
        check_prompt_files(data_path, f"megatron_training.{key}")
        actor = run.config.actor_config
        settings = dataclasses.replace(PromptSettings.from_config(actor), tools=tuple(tools))
        return cls(key, data_path, tokenizer, settings, actor.dataset_additional_keys or None)

    @cached_property
    def is_raw(self) -> bool:
        """False for the files of `mindspeed-rl preprocess`."""
        return not list_packed_columns(split_slice(self.data_path)[0])

    def list_files(self) -> list[Path]:
        """Return the files of raw data; none of preprocessed data."""
        return list_row_files(self.data_path) if self.is_raw else []

    def __iter__(self) -> Iterator[AuditRow]:
        return self._read_raw() if self.is_raw else self._read_indexed()

    def _read_raw(self) -> Iterator[AuditRow]:
        for chunk in read_prompt_chunks(open_rows(self.data_path), self.tokenizer, self.additional_keys, self.settings):
            rows = [
                AuditRow(chunk.path, row.number, left_out=row.reason, detail="" if row.error is None else str(row.error))
                for row in chunk.left_out
            ]
            for prompt in chunk.prompts:
                label = as_text(prompt.values[LABELS]) if LABELS in prompt.values else None
                columns = {name: value for name, value in prompt.values.items() if name != LABELS}
                rows.append(AuditRow(chunk.path, prompt.number, prompt.text, prompt.tokens, label, columns))
            yield from sorted(rows, key=lambda row: row.number)

    def _read_indexed(self) -> Iterator[AuditRow]:
        prompts = open_prompts(
            self.data_path,
            self.tokenizer,
            max_prompt_length=_NO_LIMIT,
            dataset_additional_keys=self.additional_keys,
            settings=self.settings,
        )
        prefix, start, _ = split_slice(self.data_path)
        for index in range(len(prompts)):
            item = prompts[index]
            text = self.tokenizer.decode(item["prompt_ids"], skip_special_tokens=False)
            assert isinstance(text, str)  # a list for a batch
            yield AuditRow(prefix, index + start, text, item["prompt_ids"], item["label"], item["columns"])

    def read_source_rows(self) -> Iterator[tuple[str, int, Row | Exception]]:
        """Yield (file, row number, row) of raw data, in the order of the stream."""
        for chunk in open_rows(self.data_path).chunks():
            for number, row in read_chunk(chunk):
                yield chunk.path, number, row


@dataclass(frozen=True)
class RowPart:
    """The rows of a data set whose prompts have these indexes, among all prompts that the run reads there.

    Rows that are not prompts belong to the first part.
    """

    stream: RowStream
    run: Run
    prompts: range

    def __iter__(self) -> Iterator[tuple[int, AuditRow]]:
        """Yield each row with its index among all rows of the data set."""
        num_prompts = 0
        for index, row in enumerate(self.stream):
            is_one = is_prompt(row, self.run)
            if num_prompts in self.prompts if is_one else self.prompts.start == 0:
                yield index, row
            num_prompts += is_one


def find_tokenizer_folder(actor: MegatronConfig) -> str:
    """Return the folder of the tokenizer of a run.

    Raises:
        ValueError: the run file names none.
    """
    if actor.tokenizer_name_or_path is not None:
        return actor.tokenizer_name_or_path
    if actor.load is not None and (Path(actor.load).expanduser() / "tokenizer_config.json").is_file():
        return actor.load
    raise ValueError(
        "megatron_training.tokenizer_name_or_path: not set, and actor_config.load is not a folder with a tokenizer, which the"
        " audit counts the tokens of prompts with"
    )


def open_run_data(
    run: Run, tokenizer: PreTrainedTokenizerBase, tools: Sequence[Mapping[str, Any]] = ()
) -> tuple[RowPart, dict[str, RowPart]]:
    """Open the prompts that a run of reinforcement learning trains on, and its evaluation sets by name.

    Args:
        tools: schemas that raw prompts have.

    Raises:
        ValueError: a file is missing, or the run has no prompts, or prompts with images.
    """
    actor = run.config.actor_config
    if run.config.reads_images:
        folder = run.config.model_metadata["actor_config"].folder
        raise ValueError(f"actor_config.load: {folder} has a model of images; the audit compares texts, and reads no images.")
    train = RowStream.open(run, "data_path", actor.data_path, tokenizer, tools)
    first, second, _ = read_split(actor.split)
    # counted only where it is needed, which is a pass over the data
    count = _NO_LIMIT if first == 1 else sum(is_prompt(row, run) for row in train)
    border, end = round(count * first), round(count * (first + second))
    held_out = {}
    if actor.eval_data_path is not None:
        stream = RowStream.open(run, "eval_data_path", actor.eval_data_path, tokenizer, tools)
        held_out[actor.eval_data_path] = RowPart(stream, run, range(_NO_LIMIT))
    elif end > border:
        held_out[f"split {actor.split}"] = RowPart(train, run, range(border, end))
    for name, path in (actor.eval_sets or {}).items():
        stream = RowStream.open(run, f"eval_sets.{name}", str(path), tokenizer, tools)
        held_out[f"{name} ({path})"] = RowPart(stream, run, range(_NO_LIMIT))
    return RowPart(train, run, range(border)), held_out


def is_prompt(row: AuditRow, run: Run) -> bool:
    """Return True for a row that the run reads as a prompt, perhaps cut."""
    return not row.left_out and (run.rl.long_prompts == "cut_left" or fits(row, run))


def fits(row: AuditRow, run: Run) -> bool:
    """Return True for a prompt that is neither left out nor cut for its length."""
    lengths = np.array([len(row.tokens)])
    return bool(fits_limit(lengths, run.rl.max_prompt_length, run.rl.long_prompts)[0])


def read_cases(part: RowPart) -> Iterator[Case]:
    """Yield the prompts of a part as rows to attack; the first ones tell what the template adds to all.

    Raises:
        ValueError: it has none.
    """
    left_out = list[AuditRow]()  # the first one

    def read_prompts() -> Iterator[AuditRow]:
        for _, row in part:
            if is_prompt(row, part.run):
                yield row
            elif not left_out:
                left_out.append(row)

    rows = read_prompts()
    first = list(islice(rows, FRAME_TEXTS))
    if not first:
        reasons = [row.detail or row.left_out or "rl_config.max_prompt_length leaves it out" for row in left_out]
        example = "".join(f"; {row.where}: {reason}" for row, reason in zip(left_out, reasons))
        raise ValueError(f"megatron_training.{part.stream.key}: {part.stream.data_path} has no prompt{example}")
    frame = find_frame([row.text for row in first])
    for row in chain(first, rows):
        question = strip_frame(row.text, frame)
        yield Case(row.where, row.text, question, list(row.tokens), row.label, row.columns)
