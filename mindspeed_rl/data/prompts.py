"""Prompts for RL: from preprocessed files, or straight from raw data with the chat template applied at load."""

from __future__ import annotations

import contextlib
import copy
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypedDict

import numpy as np

from mindspeed_rl import registry
from mindspeed_rl.config.keys.megatron import MegatronConfig
from mindspeed_rl.data import handler_class, prompt_cache
from mindspeed_rl.data.cache_folders import choose_workers, count_bytes, digest_files
from mindspeed_rl.data.chunk_workers import map_chunks
from mindspeed_rl.data.conversation import (
    Conversation,
    DroppedRowError,
    DropReason,
    MalformedRowError,
    Message,
    Row,
    assistant,
    user,
)
from mindspeed_rl.data.encoding import TurnIds
from mindspeed_rl.data.handlers.base import DEFAULT_TAGS, HandlerSettings, raise_encoding_errors
from mindspeed_rl.data.handlers.prompt import LABELS, Math17kAlpacaStyleInstructionHandler, PromptHandler
from mindspeed_rl.data.images import (
    IMAGES,
    ImageReader,
    ImageRules,
    References,
    StoredImages,
    is_embedded,
    is_video,
    read_image,
    read_references,
)
from mindspeed_rl.data.indexed import (
    IGNORE_INDEX,
    IMAGE_SIZES,
    TEXT_BYTES,
    IndexedColumns,
    check_text_only,
    list_packed_columns,
)
from mindspeed_rl.data.json_columns import OBJECT_COLUMNS, has_messages, read_object
from mindspeed_rl.data.messages import OPENAI, choose_form, parse_list, read_messages, sharegpt_form
from mindspeed_rl.data.prompt_cache import TokenizedRows
from mindspeed_rl.data.sources import Chunk, Source, has_files, open_data, read_chunk
from mindspeed_rl.data.templates import (
    PLAIN_TEMPLATE,
    HfTemplate,
    Template,
    Thinking,
    check_templates,
    choose_thinking,
    join_text,
    load_template,
)
from mindspeed_rl.data.tokenizer import set_eos_token
from mindspeed_rl.files import describe_missing
from mindspeed_rl.hub import HF, MS

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_SLICE = re.compile(r"(.+?)(?:\[(\d*):(\d*)\]|#(\d+))")
#: column of the tokens of the prompt that teachers read in place of the student's
TEACHER_PROMPT_IDS = "teacher_prompt_ids"
#: column of the tokens of the response that the data has
RESPONSE_IDS = "response_ids"
#: any question, in front of the response that is rendered: the tokens of the real one are there already
_QUESTION = "?"
#: names of an object that has all rows of a data set
_NAMES_OF_DATA = ("train", "test", "validation", "data", "rows", "examples", "instances", "items")
#: prefixes of names of data sets on a hub
HUBS = (HF, MS)

# Default columns of raw rows with a text column `prompt` and no `instruction`.
_PLAIN_COLUMNS = {"prompt": "prompt", "query": "", "response": "labels"}


#: prompts over the limit: left out from the limit itself on, left out above it, or kept with their last tokens
LongPrompts = Literal["drop", "drop_longer", "cut_left"]


def fits_limit(lengths: np.ndarray, max_prompt_length: int, long_prompts: LongPrompts) -> np.ndarray:
    """Return True for each length in tokens that is neither left out nor cut."""
    # strictly below, as upstream filters
    return lengths < max_prompt_length if long_prompts == "drop" else lengths <= max_prompt_length


class PromptItem(TypedDict):
    """One prompt: token ids, the reference answer (None where the data has none), further columns by name."""

    prompt_ids: list[int]
    label: str | None
    columns: dict[str, object]


@dataclass(frozen=True)
class PromptSettings:
    """Settings of raw prompts, named as in `actor_config`, where enable_thinking is true, false or unset.

    map_keys None reads the columns prompt and labels where the first row has a text `prompt`, else the handler's own columns.
    handler_name None takes Math17kAlpacaStyleInstructionHandler where the prompt column holds chat messages, else
    R1AlpacaStyleInstructionHandler, or PPOAlpacaStyleInstructionHandler where `labels` is not requested.
    system_prompt is the system prompt of every row that has none. tools are function schemas for every prompt whose template
    can write them; a row's own take their place. image_rules belong to a model of images, image_folder has the images of
    relative paths. is_text_only refuses rows with images, and language_model_only names the reason. vocab_size is the size of
    the model's vocabulary, which has every token of a prompt.
    """

    prompt_type: str | None = None
    prompt_type_path: str | None = None
    map_keys: Mapping[str, object] | None = None
    handler_name: str | None = None
    enable_thinking: Thinking = "none"
    on_bad_row: str = "error"
    system_prompt: str | None = None
    tools: tuple[Mapping[str, object], ...] = ()
    image_rules: ImageRules | None = None
    image_folder: str | None = None
    language_model_only: bool = False
    is_text_only: bool = False
    vocab_size: int | None = None
    chat_template_kwargs: Mapping[str, object] | None = None

    @classmethod
    def from_config(cls, actor: MegatronConfig) -> PromptSettings:
        """Return how the prompts of a run are read that were not preprocessed, without its tools and rules for images."""
        columns = None
        if actor.map_keys is not None:
            columns = {name: column for name, column in asdict(actor.map_keys).items() if column is not None}
        templates = actor.prompt_type_path
        if templates != type(actor).prompt_type_path:  # the default is upstream's, and need not be there
            check_templates(actor.prompt_type, templates)
        return cls(
            prompt_type=actor.prompt_type,
            # without such a file the built-in templates are read
            prompt_type_path=templates if templates and Path(templates).is_file() else None,
            map_keys=columns,
            handler_name=actor.handler_name,
            enable_thinking=choose_thinking(actor.enable_thinking, actor.chat_template_kwargs),
            chat_template_kwargs=actor.chat_template_kwargs,
            on_bad_row=actor.on_bad_row,
            system_prompt=actor.system_prompt,
            image_folder=actor.image_folder,
            language_model_only=actor.language_model_only,
        )

    def load_template(self, tokenizer: PreTrainedTokenizerBase) -> Template | HfTemplate:
        """Load the template of the prompts.

        Raises:
            ValueError: it does not exist, or does not read an argument.
        """
        name = self.prompt_type or PLAIN_TEMPLATE
        return load_template(name, tokenizer, path=self.prompt_type_path, arguments=self.chat_template_kwargs)


class PromptDataset:
    """Prompts that `max_prompt_length` and `long_prompts` allow, with their labels and additional columns.

    Build it with `open_prompts`. `num_read` counts all rows, `num_too_long` those filtered out for their length, `num_cut`
    those that keep only their last tokens, `dropped` those left out for another reason (malformed, empty ...).
    """

    def __init__(
        self,
        rows: _IndexedPrompts | _RawPrompts,
        lengths: np.ndarray,
        *,
        max_prompt_length: int,
        long_prompts: LongPrompts,
        dropped: Mapping[str, int],
        first: int = 0,
        note: str | None = None,
    ) -> None:
        """Select the rows; `first` is the row of `lengths[0]`, `note` is added to the description."""
        self._note = note
        self._added: dict[int, dict[str, object]] = {}  # columns, by index of the row
        self._rows = rows
        self._first, self._limit = first, max_prompt_length
        fits = fits_limit(lengths, max_prompt_length, long_prompts)
        is_cut = np.zeros(len(lengths), dtype=bool)
        if long_prompts == "cut_left":
            images = rows.num_images  # the tokens of an image stay together
            is_cut = ~fits if images is None else ~fits & (images.sum(0)[first : first + len(lengths)] == 0)
        self._row_indices = np.flatnonzero(fits | is_cut)
        self.lengths = np.minimum(lengths[self._row_indices], max_prompt_length)
        self.num_cut = int(is_cut.sum())
        self.dropped = dict(dropped)
        self.num_too_long = len(lengths) - len(self._row_indices)
        self.num_read = len(lengths) + sum(dropped.values())
        self.longest = int(lengths.max(initial=0))
        if self.num_read == 0:
            raise ValueError("no prompt is left: the data has no row at all, not one line with content")
        if len(lengths) == 0:
            reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(self.dropped.items()))
            raise ValueError(f"no prompt is left: all {self.num_read} rows are left out ({reasons})")
        if len(self._row_indices) == 0:
            extent = "tokens or more" if long_prompts == "drop" else "tokens and are longer"
            raise ValueError(
                f"no prompt is left: {self.num_too_long} of {self.num_read} rows have max_prompt_length={max_prompt_length}"
                f" {extent}: they have {lengths.min()} to {self.longest}, half of them {np.median(lengths):g} or more;"
                f" set rl_config.max_prompt_length to {self.longest + 1} for all, and generate_config.max_model_len to it"
                " plus the tokens of a response"
            )

    def __len__(self) -> int:
        return len(self._row_indices)

    def __getitem__(self, index: int) -> PromptItem:
        row = int(self._row_indices[index])
        item = self._rows[row + self._first]
        if len(item["prompt_ids"]) > self._limit:
            item = item.copy()
            item["prompt_ids"] = item["prompt_ids"][-self._limit :]
        if row in self._added:
            item = item.copy()
            item["columns"] = item["columns"] | self._added[row]
        return item

    def add_prompts(self, column: str, tokenizer: PreTrainedTokenizerBase, settings: PromptSettings) -> None:
        """Give each row the column TEACHER_PROMPT_IDS: the tokens of another column's text or messages as a prompt.

        Raises:
            ValueError: a row has no such prompt.
        """
        template = settings.load_template(tokenizer)
        columns = {"prompt": column, "query": "", "response": column, "system": "", "history": ""}
        handler = Math17kAlpacaStyleInstructionHandler(
            HandlerSettings(tokenizer=tokenizer, template=template, map_keys=columns, enable_thinking=settings.enable_thinking)
        )
        renderings, wheres = [], [self.where(index) for index in range(len(self))]
        for index, where in enumerate(wheres):
            value = self[index]["columns"].get(column)
            with contextlib.suppress(ValueError):  # files of `preprocess` have messages as text
                value = json.loads(value) if isinstance(value, str) and value.startswith("[") else value
            try:
                conversation = handler.conversation({column: value})
            except MalformedRowError as error:
                raise ValueError(f"{where}: column {column!r} is not a prompt of a teacher: {error}") from error
            if conversation.system is None and settings.system_prompt:
                conversation = replace(conversation, system=settings.system_prompt)
            renderings.append(handler.render_conversation(conversation.as_context()))
        for index, turns in enumerate(handler.encoder.encode_renderings(renderings)):
            if isinstance(turns, MalformedRowError):
                raise ValueError(f"{wheres[index]}: column {column!r} is not a prompt of a teacher: {turns}")
            self._add(index, TEACHER_PROMPT_IDS, _join_turns(turns))

    def add_responses(
        self, column: str, tokenizer: PreTrainedTokenizerBase, settings: PromptSettings, max_length: int
    ) -> None:
        """Give each row the column RESPONSE_IDS: the tokens that answer its prompt with another column's text, and end there.

        Args:
            column: has the text, or messages of which the last is the answer.
            max_length: bound of the tokens of prompt and response.

        Raises:
            ValueError: a row has no such response, or a longer one.
        """
        template = settings.load_template(tokenizer)
        handler = Math17kAlpacaStyleInstructionHandler(
            HandlerSettings(tokenizer=tokenizer, template=template, enable_thinking=settings.enable_thinking)
        )
        prompt = Conversation([user(_QUESTION)], settings.system_prompt)
        wheres = [f"{self.where(index)}: column {column!r} is not a response of the data" for index in range(len(self))]
        renderings = [handler.render_conversation(prompt.as_context())]
        for index, where in enumerate(wheres):
            item = self[index]
            try:
                answer = _read_answer(item["label"] if column == LABELS else item["columns"].get(column))
            except MalformedRowError as error:
                raise ValueError(f"{where}: {error}") from error
            renderings.append(handler.render_conversation(replace(prompt, messages=[*prompt.messages, answer])))
        opening, *encoded = handler.encoder.encode_renderings(renderings)
        assert not isinstance(opening, MalformedRowError)
        start = _join_turns(opening)
        ends = {handler.encoder.eos_id, *(token for token, one in tokenizer.added_tokens_decoder.items() if one.special)}
        for index, (where, turns) in enumerate(zip(wheres, encoded, strict=True)):
            if isinstance(turns, MalformedRowError):
                raise ValueError(f"{where}: {turns}")
            # what the template writes after the answer, in a turn of its own, is for further messages
            tokens = _join_turns(turns[:1])
            if tokens[: len(start)] != start:
                text = f"the chat template {template.name!r} opens an answer in another way than it does in a prompt"
                raise ValueError(f"{where}: {text}; give prompt_type a template that writes both alike")
            response = tokens[len(start) :]
            # a template may write a line break after its end token; without a template there is none
            response += [handler.encoder.eos_id] if ends.isdisjoint(response[-2:]) else []
            if (length := int(self.lengths[index]) + len(response)) > max_length:
                raise ValueError(
                    f"{where}: with its prompt it has {length} tokens, more than generate_config.max_model_len ({max_length});"
                    " raise it, or leave the row out"
                )
            self._add(index, RESPONSE_IDS, tuple(response))

    def _add(self, index: int, column: str, value: object) -> None:
        """Give a row a further column."""
        self._added.setdefault(int(self._row_indices[index]), {})[column] = value

    def count_images(self) -> np.ndarray:
        """Count the images and the videos of every prompt, [2, prompts] int64."""
        rows = self._rows.num_images
        return np.zeros((2, len(self)), np.int64) if rows is None else rows[:, self._row_indices + self._first]

    def store_images(self, path: Path) -> None:
        """Write images that are part of their rows to a file, of which the prompts keep references."""
        if isinstance(self._rows, _RawPrompts):
            self._rows.store_images(path)

    def where(self, index: int) -> str:
        """Return file and row of a prompt, for messages."""
        return self._rows.where(int(self._row_indices[index]) + self._first)

    def check_token_ids(self, vocab_size: int, key: str) -> None:
        """Raise ValueError if a prompt that was tokenized at load has a token that the model has not; `key` names the data."""
        if isinstance(self._rows, _IndexedPrompts):
            return  # see `indexed.check_columns`
        for index in range(len(self)):
            largest = int(self._rows.tokens[int(self._row_indices[index]) + self._first].max(initial=0))
            if largest >= vocab_size:
                raise ValueError(
                    f"{key}: {self.where(index)}: the tokenizer writes token {largest}, but the model's vocabulary has"
                    f" {vocab_size}; give the tokenizer of the model"
                )

    def part(self, first: float, end: float) -> PromptDataset:
        """Return the prompts between two fractions, in order; parts that meet at a bound have no common prompt.

        Raises:
            ValueError: no prompt is between them.
        """
        start, stop = (round(len(self) * fraction) for fraction in (first, end))
        if start == stop:
            raise ValueError(f"split: no prompt of {len(self)} is between the fractions {first:g} and {end:g}")
        part = copy.copy(self)
        part._row_indices, part.lengths = self._row_indices[start:stop], self.lengths[start:stop]
        return part

    def describe(self) -> str:
        """Return a line for the log: the number of prompts and of rows left out, by reason."""
        reasons = "".join(f", {count} {reason}" for reason, count in sorted(self.dropped.items()))
        cut = f", {self.num_cut} cut to their last {self._limit} tokens" if self.num_cut else ""
        note = f"; {self._note}" if self._note else ""
        return f"{len(self)} prompts of {self.num_read} rows ({self.num_too_long} too long{cut}{reasons}){note}"


def _join_turns(turns: Sequence[TurnIds]) -> list[int]:
    """Return all tokens of a rendering."""
    return [token for source_ids, target_ids in turns for token in (*source_ids, *target_ids)]


def _read_answer(value: object) -> Message:
    """Return the answer in a column: its text, or the last of its messages.

    Raises:
        MalformedRowError: it has none.
    """
    if isinstance(value, str) and value.startswith("[{"):  # files of `preprocess` have messages as text
        with contextlib.suppress(MalformedRowError):
            value = parse_list(value)
    if isinstance(value, (list, tuple)):
        _, messages = read_messages(value, choose_form(value, (OPENAI, sharegpt_form(DEFAULT_TAGS))))
        if not messages or messages[-1].role != "assistant":
            raise MalformedRowError("the last message is not from the assistant")
        return messages[-1]
    if not isinstance(value, str) or not value.strip():
        raise MalformedRowError("it is empty" if value in (None, "") or isinstance(value, str) else f"it is {value!r:.60}")
    return assistant(value)


class _IndexedPrompts:
    """Prompts in `<prefix>_packed_*` files; the other columns hold bytes of text, or (in older files) tokens to decode."""

    def __init__(
        self,
        prefix: str,
        tokenizer: PreTrainedTokenizerBase,
        additional_keys: Sequence[str] | None,
        image_rules: ImageRules | None,
    ) -> None:
        keys = [key for key in additional_keys or () if image_rules is None or key != IMAGES]
        self.rows = IndexedColumns(prefix, ["input_ids", *keys])
        self._prefix = prefix
        self._tokenizer = tokenizer
        self._extra = [key for key in keys if key != LABELS]
        self._has_images = image_rules is not None
        self._images = None if image_rules is None else StoredImages.open(prefix, image_rules, self.rows)
        # An SFT dataset has labels too, but as a mask over input_ids.
        has_labels = LABELS in self.rows.columns
        self._has_label = has_labels and IGNORE_INDEX not in self.rows.row(0, LABELS)
        if LABELS in keys and not self._has_label:
            raise ValueError(f"{prefix}_packed_labels_document holds the labels of supervised tuning, not reference answers")

    @property
    def num_images(self) -> np.ndarray | None:
        """Number of images and of videos of every row, [2, rows]; None where there are none."""
        if self._images is None:
            return None
        sizes = [self.rows.row(index, IMAGE_SIZES) for index in range(len(self.rows))]
        videos = np.array([np.count_nonzero(row[2::4] < 0) for row in sizes])  # their time is negative
        return np.stack([np.array([row[0] for row in sizes]) - videos, videos]).astype(np.int64)

    def where(self, index: int) -> str:
        return f"{self._prefix}, row {index}"

    def _text(self, index: int, column: str) -> str:
        if (name := column + TEXT_BYTES) in self.rows.columns:
            return bytes(self.rows.row(index, name).tolist()).decode("utf-8", "surrogatepass")
        text = self._tokenizer.decode(self.rows.row(index, column).tolist(), skip_special_tokens=True)
        assert isinstance(text, str)  # a list for a batch
        return text

    def _read_column(self, index: int, column: str) -> object:
        """Return the text of a column, or the object of which `preprocess` has stored the JSON text."""
        text = self._text(index, column)
        try:
            return read_object(text, column) if column in OBJECT_COLUMNS else text
        except MalformedRowError as error:
            raise ValueError(f"{self.where(index)}: {error}") from error

    def __getitem__(self, index: int) -> PromptItem:
        columns: dict[str, object] = {name: self._read_column(index, name) for name in self._extra}
        label = self._text(index, LABELS) if self._has_label else None
        if self._has_images:
            columns[IMAGES] = References(image.key for image in self._images.row(index)) if self._images else References()
        return PromptItem(prompt_ids=self.rows.row(index, "input_ids").tolist(), label=label, columns=columns)


class _RawPrompts:
    """Prompts tokenized at load, with the rows' labels and additional columns."""

    def __init__(self, rows: TokenizedRows) -> None:
        self.tokens, self._labels, self._columns, self._origins = rows.tokens, rows.labels, rows.columns, rows.origins

    @property
    def num_images(self) -> np.ndarray | None:
        """Number of images and of videos of every row, [2, rows]."""
        rows = [[is_video(one) for one in read_references(columns)] for columns in self._columns]
        return np.array([[row.count(False) for row in rows], [row.count(True) for row in rows]], np.int64)

    def store_images(self, path: Path) -> None:
        """Write images that are part of their rows to a file, each once."""
        stored: dict[str, str] = {}
        embedded = {one: None for columns in self._columns for one in read_references(columns) if is_embedded(one)}
        if not embedded:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "wb") as file:
            for reference in embedded:
                data = read_image(reference)
                stored[reference] = f"{path.absolute()}#{file.tell()}+{len(data)}"
                file.write(data)
        for columns in self._columns:
            if references := read_references(columns):
                columns[IMAGES] = References(stored.get(one, one) for one in references)

    def where(self, index: int) -> str:
        path, number = self._origins[index]
        return f"{path}, row {number}"

    def __getitem__(self, index: int) -> PromptItem:
        return PromptItem(prompt_ids=self.tokens[index].tolist(), label=self._labels[index], columns=self._columns[index])


def open_prompts(
    data_path: str | Path,
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_prompt_length: int,
    long_prompts: LongPrompts = "drop",
    dataset_additional_keys: Sequence[str] | None = (LABELS,),
    settings: PromptSettings | None = None,
    cache: Path | None = None,
) -> PromptDataset:
    """Open the prompts at `data_path`: an indexed dataset's prefix, a raw file or folder, or a dataset of the hub.

    Args:
        data_path: raw data may be all that `open_source` takes; a dataset of a hub is written hf://owner/name or
            ms://owner/name, with /CONFIG and :SPLIT after it where they are not the default and train. With [start:stop] or
            #count after it only these rows are read; rows count from 0, before any is left out.
        max_prompt_length: prompts with this many tokens or more are filtered out, and counted.
        long_prompts: what becomes of them, as `rl_config.long_prompts` says.
        dataset_additional_keys: columns to keep; `labels` is the reference answer, which raw data also keeps where map_keys
            names its column. None keeps `labels` where the data has them (raw data: where the first row has the column).
        settings: how raw data is read. A template that replaces the end token also sets it in `tokenizer`.
        cache: folder where the tokens of large raw data are kept for later calls, see `prompt_cache`; None keeps none.

    Raises:
        ValueError: no usable data is there, a column is missing, or a row is malformed while on_bad_row is "error".
    """
    settings = settings or PromptSettings()
    check_prompt_files(data_path)
    named, (data_path, start, stop) = str(data_path), split_slice(str(data_path))
    if list_packed_columns(data_path):
        if settings.is_text_only or settings.language_model_only:
            check_text_only(data_path, leaves_out_tower=settings.language_model_only)
        indexed = _IndexedPrompts(data_path, tokenizer, dataset_additional_keys, settings.image_rules)
        lengths = indexed.rows.lengths("input_ids")[start:stop]
        _check_slice(named, start, len(lengths))
        return PromptDataset(
            indexed, lengths, max_prompt_length=max_prompt_length, long_prompts=long_prompts, dropped={}, first=start
        )
    source = open_rows(named)
    rows = _load_cached(named, source, tokenizer, dataset_additional_keys, settings, cache)
    _check_slice(named, start, len(rows.tokens) + sum(rows.dropped.values()))
    lengths = np.array([len(tokens) for tokens in rows.tokens], dtype=np.int32)
    return PromptDataset(
        _RawPrompts(rows),
        lengths,
        max_prompt_length=max_prompt_length,
        long_prompts=long_prompts,
        dropped=rows.dropped,
        note=source.note,
    )


def check_prompt_files(data_path: str | Path, key: str = "data_path") -> None:
    """Check that data exists at `data_path`; see `open_prompts`.

    Args:
        key: where the user wrote it, for the message.

    Raises:
        ValueError: it does not exist.
    """
    path, _, _ = split_slice(str(data_path))
    if not list_packed_columns(path) and not path.startswith(HUBS) and not has_files(path):
        if reason := _describe_other(path):
            raise ValueError(f"{key}={path!r}: {reason}")
        raise ValueError(
            f"{key}={path!r} is neither a raw file or folder, nor a prefix of files named"
            f" {path}_packed_input_ids_document.bin: {describe_missing(path)}; give the --output-prefix of preprocessing, raw"
            " data (also data/*.jsonl, or a.jsonl,b.jsonl), hf://owner/name or ms://owner/name"
        )


def _describe_other(path: str) -> str | None:
    """Describe what is written in place of a path or a name on a hub; None where it is a path."""
    if path.startswith(("http://", "https://", "s3://", "oss://", "obs://")):
        return "addresses are not read: download the file, or name a data set of a hub (hf://owner/name, ms://owner/name)"
    if match := re.match(r"(hf|ms):/*(.*)", path):
        return f"a data set of a hub is written {match[1]}://owner/name; did you mean '{match[1]}://{match[2]}'?"
    if path.startswith("[") and path.endswith("]"):
        return f"several files are written with commas and without brackets: {path[1:-1].replace(', ', ',')}"
    parts = [part.strip() for part in path.split(",")]
    missing = [part for part in parts if part and not has_files(part)]
    if len(parts) > 1 and len(missing) < len(parts):
        return f"of the files with commas between them {describe_missing(missing[0])}"
    return None


def open_rows(data_path: str) -> Source:
    """Open raw data, perhaps of a hub or a slice (`split_slice`)."""
    path, start, stop = split_slice(data_path)
    return replace(open_data(path), max_rows=stop, skip_rows=start)


def split_slice(data_path: str) -> tuple[str, int, int | None]:
    """Return path, first row and the row after the last (None: to the end) of "path[start:stop]" or "path#count".

    An existing path is returned unchanged.

    Raises:
        ValueError: no row is left.
    """
    match = _SLICE.fullmatch(data_path)
    if match is None or os.path.exists(Path(data_path).expanduser()):
        return data_path, 0, None
    path, first, last, count = match.groups()
    start, end = int(first or 0), count or last
    stop = int(end) if end else None
    if stop is not None and stop <= start:
        raise ValueError(f"data_path={data_path!r} selects no row: {stop} is not after {start}")
    return path, start, stop


@dataclass(frozen=True)
class RawPrompt:
    """A row of raw data as a prompt.

    Attributes:
        number: row of its file, counted from 1.
        text: the rendered prompt.
        tokens: its token ids.
        values: label (LABELS) and additional columns, and the references of images where the model reads them.
    """

    number: int
    text: str
    tokens: list[int]
    values: Mapping[str, object]


@dataclass(frozen=True)
class LeftOutRow:
    """A row of raw data that is not a prompt.

    Attributes:
        number: row of its file, counted from 1.
        reason: name of its counter, see `DropReason`.
        error: what is wrong with a malformed row.
    """

    number: int
    reason: str
    error: MalformedRowError | None = None


@dataclass(frozen=True)
class PromptChunk:
    """A run of rows of one file; every row that was read is in one of the lists."""

    path: str
    prompts: list[RawPrompt]
    left_out: list[LeftOutRow]


def _check_slice(data_path: str, start: int, num_rows: int) -> None:
    """Raise ValueError where the data ends before the first row of its slice."""
    if start and not num_rows:
        raise ValueError(f"data_path={data_path!r} selects no row: the data ends before row {start}, counted from 0")


def _load_cached(
    data_path: str,
    source: Source,
    tokenizer: PreTrainedTokenizerBase,
    keys: Sequence[str] | None,
    settings: PromptSettings,
    cache: Path | None,
) -> TokenizedRows:
    """Return the rows from the cache, and write them to it where they are worth it."""
    handler, folder = _find_handler(source, tokenizer, keys, settings), None
    if handler is None:
        return TokenizedRows()
    # rows name files of images, whose contents are not among what is digested
    if cache is not None and settings.image_rules is None and count_bytes(source) >= prompt_cache.SMALL_BYTES:
        templates = [Path(settings.prompt_type_path)] if settings.prompt_type_path else []
        depends_on = [asdict(settings), keys, digest_files(templates)]
        folder = prompt_cache.find_folder(cache, data_path, source, tokenizer, handler, depends_on)
        if folder is not None and (rows := prompt_cache.read(folder)) is not None:
            return rows
    rows = _load_raw(source, handler, settings)
    if folder is not None:
        prompt_cache.write(folder, data_path, rows)
    return rows


def _load_raw(source: Source, handler: PromptHandler, settings: PromptSettings) -> TokenizedRows:
    """Return the rows, and the number of those that are left out by reason."""
    rows = TokenizedRows()
    for chunk in _map_prompts(source, handler):
        for prompt in chunk.prompts:
            if settings.vocab_size is not None and max(prompt.tokens, default=0) >= settings.vocab_size:
                # before lengths, which another tokenizer makes too long
                raise ValueError(
                    f"{chunk.path}, row {prompt.number}: the tokenizer writes token {max(prompt.tokens)}, but the model's"
                    f" vocabulary has {settings.vocab_size}; give the tokenizer of the model (tokenizer_name_or_path)"
                )
            rows.append(prompt.tokens, prompt.values, (chunk.path, prompt.number))
        for row in chunk.left_out:
            if row.error is not None and settings.on_bad_row == "error":
                raise ValueError(
                    f"{chunk.path}, row {row.number}: {row.error} (on_bad_row=skip leaves such rows out)"
                ) from row.error
            rows.dropped[row.reason] = rows.dropped.get(row.reason, 0) + 1
    return rows


def read_prompt_chunks(
    source: Source,
    tokenizer: PreTrainedTokenizerBase,
    keys: Sequence[str] | None,
    settings: PromptSettings,
) -> Iterator[PromptChunk]:
    """Yield raw rows as prompts, a chunk at a time; memory does not grow with the data. For arguments see `open_prompts`.

    Raises:
        ValueError: no row can be read with these settings; a malformed row is in its chunk instead.
    """
    handler = _find_handler(source, tokenizer, keys, settings)
    if handler is not None:
        yield from _map_prompts(source, handler)


def _map_prompts(source: Source, handler: PromptHandler) -> Iterator[PromptChunk]:
    """Yield raw rows as prompts; large data of text is rendered and tokenized by several processes."""
    workers = 1 if handler.images is not None else choose_workers(source)
    return map_chunks(partial(_read_prompts, handler), source.chunks(), workers=workers)


def _find_handler(
    source: Source, tokenizer: PreTrainedTokenizerBase, keys: Sequence[str] | None, settings: PromptSettings
) -> PromptHandler | None:
    """Return the handler of all rows; None where there are none. A template may set the end token of the tokenizer."""
    template = settings.load_template(tokenizer)
    if template.eos_token is not None:
        set_eos_token(tokenizer, template.eos_token)
    if settings.enable_thinking == "true" and not template.can_think:
        raise ValueError(f"enable_thinking=true has no meaning for prompt_type={template.name!r}")
    images = None if settings.image_rules is None else ImageReader.build(settings.image_rules, tokenizer, settings.image_folder)
    numbered = next(filter(None, map(read_chunk, source.chunks())), None)
    if numbered is None:
        return None
    # the first row decides for all: a data set has one layout
    first = next((row for _, row in numbered if isinstance(row, Mapping)), {})
    return _build_handler(first, tokenizer, template, keys, settings, images)


def _build_handler(
    first: Row,
    tokenizer: PreTrainedTokenizerBase,
    template: Template | HfTemplate,
    keys: Sequence[str] | None,
    settings: PromptSettings,
    images: ImageReader | None,
) -> PromptHandler:
    """Return the handler of data whose first row is `first`."""
    is_plain = isinstance(first.get("prompt"), str) and not has_messages(first["prompt"])
    if settings.map_keys is None and is_plain and "instruction" not in first:
        settings = replace(settings, map_keys=_PLAIN_COLUMNS)
    _check_layout(first)
    _check_label_column(first, settings.map_keys)
    if keys is None:
        guess = handler_class(settings.handler_name or _choose_handler(first, (LABELS,), settings.map_keys))
        has_answer = {**guess.default_map, **(settings.map_keys or {})}.get("response") in first
        keys = (LABELS,) if has_answer else ()
    if (settings.map_keys or {}).get("response") and LABELS not in keys and settings.map_keys is not _PLAIN_COLUMNS:
        keys = (LABELS, *keys)  # named as the answer, it is the label of rewards, agents and environments
    kind = handler_class(settings.handler_name or _choose_handler(first, keys, settings.map_keys))
    handler = kind(
        HandlerSettings(
            tokenizer=tokenizer,
            template=template,
            map_keys=settings.map_keys,
            dataset_additional_keys=keys,
            enable_thinking=settings.enable_thinking,
            system_prompt=settings.system_prompt,
            tools=settings.tools,
            images=images,
            language_model_only=settings.language_model_only,
            is_text_only=settings.is_text_only,
        )
    )
    if not isinstance(handler, PromptHandler):
        raise ValueError(
            f"handler_name={settings.handler_name!r} is not for prompts; use a PPO..., R1... or Math17k... handler"
        )
    if settings.on_bad_row == "error":
        _check_prompt_column(first, handler.map.get("prompt"))
    return handler


def _read_prompts(handler: PromptHandler, chunk: Chunk) -> PromptChunk:
    drafts = []
    left_out: list[LeftOutRow] = []
    for number, row in read_chunk(chunk):
        try:
            if isinstance(row, MalformedRowError):
                raise row
            handler.check_images(row)
            drafts.append((number, handler.render(row)))
        except MalformedRowError as error:
            left_out.append(LeftOutRow(number, DropReason.MALFORMED, error))
        except DroppedRowError as drop:
            left_out.append(LeftOutRow(number, drop.reason))
    encoded = handler.encoder.encode_renderings([draft.renderings[0] for _, draft in drafts])
    prompts = []
    for turns, (number, draft) in zip(encoded, drafts, strict=True):
        try:
            (turns,) = raise_encoding_errors([turns])
            turns, stored = handler.expand_images(draft, turns)
        except MalformedRowError as error:
            left_out.append(LeftOutRow(number, DropReason.MALFORMED, error))
            continue
        tokens = _join_turns(turns)
        text = "".join(join_text(side) for turn in draft.renderings[0].turns for side in (turn.source, turn.target))
        values = draft.note if handler.images is None else {**draft.note, IMAGES: References(one.key for one in stored)}
        prompts.append(RawPrompt(number, text, tokens, values))
    # rows that cannot be encoded come after all that cannot be rendered
    left_out.sort(key=lambda row: row.number)
    return PromptChunk(str(chunk.path), prompts, left_out)


def _check_layout(row: Row) -> None:
    """Raise ValueError where the first row is a whole data set, as in {"train": [{...}, {...}]}."""
    for name, value in row.items():
        rows = value if isinstance(value, list) else []
        if name in _NAMES_OF_DATA and rows and all(isinstance(item, Mapping) for item in rows):
            raise ValueError(
                f"the data has one row, whose column {name!r} has {len(rows)} objects: are these the rows? Write them one per"
                " line (.jsonl), or as one array without a name around it"
            )


def _check_prompt_column(row: Row, column: object) -> None:
    """Raise ValueError where the rows have no column of prompts, but chat messages in another one."""
    chat = next((name for name in ("messages", "conversations", "conversation") if has_messages(row.get(name))), None)
    if chat is not None and isinstance(column, str) and column and column not in row:
        raise ValueError(
            f"map_keys: the prompt is read from the column {column!r}, which the rows do not have; their column {chat!r} has"
            f" chat messages: write map_keys: {{prompt: {chat}}}, with messages up to the user's question"
        )


def _check_label_column(row: Row, map_keys: Mapping[str, object] | None) -> None:
    """Raise ValueError where map_keys names a column of labels that the rows do not have."""
    column = (map_keys or {}).get("response")
    if column and row and column not in row and map_keys is not _PLAIN_COLUMNS:
        hint = registry.did_you_mean(column, map(str, row))
        raise ValueError(
            f"map_keys: response names the column {column!r} for labels, which the rows do not have; they have"
            f" {', '.join(map(str, row))}{hint}; leave response out of map_keys for data without labels"
        )


def _choose_handler(row: Row, keys: Sequence[str], map_keys: Mapping[str, object] | None) -> str:
    column = (map_keys or {}).get("prompt", "prompt")
    if has_messages(row.get(str(column))):
        return "Math17kAlpacaStyleInstructionHandler"
    return "R1AlpacaStyleInstructionHandler" if LABELS in keys else "PPOAlpacaStyleInstructionHandler"
