"""Base of the handlers: settings, column lookup, and the batch encoding loop."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from mindspeed_rl import registry
from mindspeed_rl.data.content_marks import ContentMarks
from mindspeed_rl.data.conversation import (
    Conversation,
    DroppedRowError,
    JsonObject,
    MalformedRowError,
    Row,
    parse_tools,
)
from mindspeed_rl.data.encoding import TextEncoder, TurnIds
from mindspeed_rl.data.images import ImageReader, StoredImage, StoredVideo, find_media, find_media_column
from mindspeed_rl.data.indexed import IGNORE_INDEX, IMAGE_BYTES, IMAGE_SIZES
from mindspeed_rl.data.preprocess_config import PreprocessConfig
from mindspeed_rl.data.sources import ArrowRow, RowSource, TaggedRow, drop_nulls
from mindspeed_rl.data.templates import HfTemplate, Rendering, Template, Thinking

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


#: names in a ShareGPT conversation; map_keys.tags replaces some
DEFAULT_TAGS = {
    "role_tag": "from",
    "content_tag": "value",
    "user_tag": "human",
    "assistant_tag": "gpt",
    "observation_tag": "observation",
    "function_tag": "function_call",
    "system_tag": "system",
}


#: columns of conversations in published data, and their keys of map_keys; a row's value is written, or the row is refused
_CONVERSATION_COLUMNS = {
    "system": "system",
    "tools": "tools",
    "history": "history",
    "system_prompt": "system",
    "functions": "tools",
}
#: columns of weights of a row, of which every stage has the weight 1
_WEIGHT_COLUMNS = ("loss_weight", "loss_scale", "sample_weight")


#: hint of an error
_IMAGE_READERS = "instruction data, pairs, prompts and documents of ImageTextPretrainHandler may"


@dataclass(frozen=True)
class HandlerSettings:
    """Settings of a handler, named as on the command line."""

    tokenizer: PreTrainedTokenizerBase
    template: Template | HfTemplate | None = None
    map_keys: Mapping[str, object] | None = None
    json_keys: Sequence[str] = ("text",)
    dataset_additional_keys: Sequence[str] = ()
    seq_length: int | None = None
    enable_thinking: Thinking = "none"
    reasoning_effort: str | None = None
    drop_thinking: bool | None = None
    system_prompt: str | None = None
    tools: Sequence[Mapping[str, object]] = ()
    append_eod: bool = False
    pad_to_multiple_of: int = 1
    neat_pack: bool = False
    placeholder_token: str = "ки"
    reward_tokens: Sequence[str] = ()
    images: ImageReader | None = None
    language_model_only: bool = False
    is_text_only: bool = False


@dataclass(frozen=True)
class Draft:
    """A row after rendering.

    Attributes:
        renderings: texts to encode.
        note: note of the handler about the row.
        images: references of the images.
        earlier: rows of their own, of answers that cannot train in this one.
    """

    renderings: tuple[Rendering, ...]
    note: Any = None
    images: tuple[str, ...] = ()
    earlier: tuple[Draft, ...] = ()


@dataclass
class EncodedRow:
    """Arrays of one row; `truncated`: tokens were cut off."""

    columns: Mapping[str, np.ndarray | list[int]]
    truncated: bool = False


@dataclass
class _EncodedBatch:
    """Encoded rows in order, how many of them earlier answers have added, and the reasons of the dropped ones."""

    rows: list[EncodedRow] = field(default_factory=list)
    added: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    bad: list[tuple[int, str]] = field(default_factory=list)


class Handler(ABC):
    """Base of the handlers, which turn rows into token arrays.

    A subclass names the columns it writes, renders a row, and assembles the encoded texts.

    Args:
        settings: see HandlerSettings.

    Raises:
        ValueError: map_keys holds a name this handler does not know, or a setting it needs is missing.
    """

    columns: tuple[str, ...] = ("input_ids", "attention_mask", "labels")
    packed: ClassVar[bool] = True
    needs_template: ClassVar[bool] = True
    forced_template: ClassVar[str | None] = None
    default_template: ClassVar[str | None] = None
    add_special_tokens: ClassVar[bool] = False
    can_pack: ClassVar[bool] = False
    can_append_eod: ClassVar[bool] = False
    can_read_images: ClassVar[bool] = False
    #: a text is whole without the images beside it, unlike a conversation about them
    text_stands_alone: ClassVar[bool] = False
    length_column: str = "input_ids"
    default_map: ClassVar[Mapping[str, Any]] = {}

    def __init__(self, settings: HandlerSettings) -> None:
        self.settings = settings
        # MindSpeed-LLM's cutoff without seq_length
        self.max_tokens = settings.seq_length or 100_000
        self.encoder = TextEncoder(settings.tokenizer, add_special_tokens=self.add_special_tokens)
        self.images = settings.images if self.can_read_images else None
        self._refuses_images = settings.language_model_only or settings.images is not None and not self.can_read_images
        if self.images is not None:
            self.columns = (*self.columns, IMAGE_BYTES, IMAGE_SIZES)
        known = self.known_columns(settings)
        self.map: dict[str, Any] = dict(known)
        self._explicit: frozenset[str] = frozenset()
        if settings.map_keys:
            unknown = [key for key in settings.map_keys if key not in known]
            if unknown:
                hint = registry.did_you_mean(unknown[0], known)
                raise ValueError(
                    f"map_keys has {unknown[0]!r}, which {type(self).__name__} does not read"
                    f" (it reads {', '.join(known) or 'none'}){hint}"
                )
            self.map.update(settings.map_keys)
            self._explicit = frozenset(settings.map_keys)
        if settings.append_eod and not self.can_append_eod:
            raise ValueError(
                f"append_eod has no meaning for {type(self).__name__}; it closes documents of pretraining and samples of"
                " supervised and preference tuning"
            )
        if self.needs_template and settings.template is None:
            raise ValueError(f"{type(self).__name__} needs a prompt_type")
        if "tags" in self.default_map:
            tags = self.map["tags"] or {}
            unknown = sorted(set(tags) - set(DEFAULT_TAGS))
            if unknown:
                raise ValueError(f"map_keys.tags has {unknown[0]!r}; the tags are {', '.join(DEFAULT_TAGS)}")
            self.tags: dict[str, str] = {**DEFAULT_TAGS, **tags}

    def known_columns(self, settings: HandlerSettings) -> Mapping[str, object]:
        """Return the names that map_keys may hold, with the columns they stand for."""
        return self.default_map

    def open_source(self, config: PreprocessConfig) -> RowSource | None:
        """Open the rows where the handler itself looks them up; None means the files or dataset at `config.input`."""
        return None

    def count_tokens(self, columns: Mapping[str, np.ndarray]) -> tuple[int, int]:
        """Count (tokens, tokens with a label) of some rows; `columns` holds their concatenated tokens."""
        total = trained = 0
        for name in self.columns:
            if name.endswith("input_ids"):
                total += len(columns[name])
                labels = name.replace("input_ids", "labels")
                if labels in columns:
                    trained += int(np.count_nonzero(columns[labels] != IGNORE_INDEX))
        return total, trained

    @property
    def template(self) -> Template | HfTemplate:
        assert self.settings.template is not None
        return self.settings.template

    @cached_property
    def _content_marks(self) -> ContentMarks:
        image, video = ("", "") if self.images is None else (self.images.marker, self.images.video_marker)
        names, tokenizer = self.encoder.names, self.settings.tokenizer
        return ContentMarks.of_template(self.template, names, tokenizer, image_marker=image, video_marker=video)

    def column(self, row: Row, key: str, *, required: bool = False) -> Any:
        """Return the value of the dataset column that stands for `key`; None for an optional column that is off or absent.

        Raises:
            MalformedRowError: the column is in map_keys or required, and the row lacks it.
        """
        name = self.map[key]
        if not name:
            if required:
                raise MalformedRowError(f"map_keys switches {key!r} off, but {type(self).__name__} needs it")
            return None
        if name in row:
            return self.value(row, name)
        if required or key in self._explicit:
            raise MalformedRowError(
                f"has no column {name!r} (for {key!r}); it has {', '.join(map(str, row))}; use map_keys to name yours"
            )
        return None

    @staticmethod
    def value(row: Row, name: str) -> Any:
        """Return the value of a column that the row has, without the keys that Arrow adds."""
        return drop_nulls(row[name]) if isinstance(row, ArrowRow) else row[name]

    def text_column(self, row: Row, key: str, *, required: bool = False) -> str:
        """Return the text of a column; "" where it is off, absent or null.

        Raises:
            MalformedRowError: the value is not text.
        """
        value = self.column(row, key, required=required)
        if value is None:
            return ""
        # answers such as 42 are numbers in many files
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            if not math.isfinite(value):
                raise MalformedRowError(f"column {self.map[key]!r} must be text, not {value}")
            return str(value)
        if not isinstance(value, str):
            raise MalformedRowError(f"column {self.map[key]!r} must be text, not {type(value).__name__}")
        return value

    def check_columns(self, row: Row) -> None:
        """Check that the row has no part of a conversation that this handler does not read.

        Raises:
            MalformedRowError: it has, in a column that map_keys does not switch off; or the row is not an object.
        """
        if not isinstance(row, Mapping):
            raise MalformedRowError(f"is a {type(row).__name__}, not an object with columns: {str(row)[:80]}")
        read = {name for name in self.map.values() if isinstance(name, str)}
        for name, key in _CONVERSATION_COLUMNS.items():
            is_kept = name != key and name in self.settings.dataset_additional_keys
            if name in read or key in self._explicit or is_kept or not row.get(name):
                continue
            hint = f': map_keys may name it, {{"{key}": "{name}"}}, or switch it off with an empty text'
            raise MalformedRowError(
                f"has a column {name!r}, which {type(self).__name__} does not read{hint if key in self.map else ''}"
            )
        for name in _WEIGHT_COLUMNS:
            if row.get(name) not in (None, 1) and name not in self.settings.dataset_additional_keys:
                raise MalformedRowError(
                    f"has {name}={row[name]!r}, but all rows have the same weight here; leave the column out"
                )

    def check_images(self, row: object) -> None:
        """Check that a row has no images or videos where they would be left out.

        Raises:
            MalformedRowError: it has, but the handler reads none, or the model has no tower or is used without it.
        """
        where = find_media(row) if self._refuses_images and isinstance(row, Mapping) else ""
        if where and self.settings.language_model_only:
            raise MalformedRowError(
                f"has images or videos ({where}), which a model without its tower does not see (language_model_only: true);"
                " leave such rows out, or the key"
            )
        if where:
            raise MalformedRowError(f"has images, which {type(self).__name__} does not read; {_IMAGE_READERS}")
        if not self.settings.is_text_only or self.text_stands_alone or not isinstance(row, Mapping):
            return
        # a conversation about what the model does not see; parts of messages are refused where they are read
        read = [name for name in self.map.values() if isinstance(name, str)]
        if column := find_media_column(row, but=(*read, *self.settings.dataset_additional_keys)):
            raise MalformedRowError(
                f"has images or videos (column {column}), which a model of text does not see; leave such rows out"
                " (on_bad_row: skip), or name the column in dataset_additional_keys if the text does not need it"
            )

    def read_system(self, row: Row, system: str | None = None) -> str | None:
        """Read the column of the system prompt; the value of the conversation's own system message where there is none.

        Raises:
            MalformedRowError: the row has two different system prompts.
        """
        column = self.text_column(row, "system") if "system" in self.map else ""
        if column and system is not None and column != system:
            raise MalformedRowError(
                f"has two system prompts: {column[:60]!r} in column {self.map['system']!r}, and {system[:60]!r} as a message;"
                ' leave one out, for example the column with map_keys {"system": ""}'
            )
        return column or system

    def read_tools(self, row: Row) -> tuple[JsonObject, ...]:
        """Read the schemas in the column of tools.

        Raises:
            MalformedRowError: they have another form.
        """
        return parse_tools(self.column(row, "tools")) if "tools" in self.map else ()

    def conversation(self, row: Row) -> Conversation:
        """Read the conversation of a row, where the handler has rows with one.

        Raises:
            MalformedRowError: the row's structure is wrong.
        """
        raise NotImplementedError

    def read_conversation(self, row: Row) -> Conversation:
        """Read the conversation of a row with its images, a marker in the place of each.

        Raises:
            MalformedRowError: the row's structure is wrong, or an image cannot be read.
        """
        self.check_columns(row)
        row, references = self.take_images(row)
        return self.place_images(self.conversation(row), references)

    def take_images(self, row: Row) -> tuple[Row, tuple[str, ...]]:
        """Return the row with a marker in the place of each image, and the references of its images.

        Raises:
            MalformedRowError: an image has a form that is not supported.
        """
        return (row, ()) if self.images is None else self.images.take(row, self.map.values())

    def place_images(self, conversation: Conversation, references: tuple[str, ...]) -> Conversation:
        """Return the conversation with the images of its row.

        Raises:
            MalformedRowError: the text has places for another number of images, or one cannot be read.
        """
        return conversation if self.images is None else self.images.place(conversation, references)

    def expand_images(self, draft: Draft, turns: list[TurnIds]) -> tuple[list[TurnIds], tuple[StoredImage | StoredVideo, ...]]:
        """Return the turns with all tokens of their images, and the images.

        Raises:
            MalformedRowError: the text has another number of image tokens.
        """
        return (turns, ()) if self.images is None else self.images.expand(turns, draft.images)

    def render_conversation(self, conversation: Conversation) -> Rendering:
        """Render the conversation in the template, and with the thinking settings and the system prompt of this run."""
        if conversation.system is None and self.settings.system_prompt:
            conversation = replace(conversation, system=self.settings.system_prompt)
        thinking, effort = self.settings.enable_thinking, self.settings.reasoning_effort
        return self._content_marks.render(self.template, conversation, thinking, effort=effort)

    @abstractmethod
    def render(self, row: Any) -> Draft:
        """Return the texts of a row: a mapping from column names, or a TaggedRow of a mixture.

        Raises:
            MalformedRowError: the row's structure is wrong.
            DroppedRowError: the row is sound but unusable.
        """

    @abstractmethod
    def assemble(self, draft: Draft, encoded: Sequence[list[TurnIds]]) -> EncodedRow:
        """Return the arrays of a row from its encoded renderings; may raise DroppedRowError."""

    def encode(self, rows: Sequence[tuple[int, object]]) -> _EncodedBatch:
        """Encode rows, given with their numbers, in one call of the tokenizer; a MalformedRowError marks a bad row."""
        batch = _EncodedBatch()
        drafts: list[tuple[int, tuple[Draft, ...]]] = []
        for number, row in rows:
            try:
                if isinstance(row, MalformedRowError):
                    raise row
                if not isinstance(row, (Mapping, TaggedRow)):
                    raise MalformedRowError(f"must be an object with named columns, not {type(row).__name__}")
                self.check_images(row.row if isinstance(row, TaggedRow) else row)
                draft = self.render(row)
                drafts.append((number, (*draft.earlier, draft)))
            except MalformedRowError as error:
                batch.bad.append((number, str(error)))
            except DroppedRowError as drop:
                batch.dropped[drop.reason] += 1
        encoded = iter(self.encoder.encode_renderings([r for _, own in drafts for draft in own for r in draft.renderings]))
        for number, own in drafts:
            # taken even if the row is dropped, or the next one would get its texts
            turns = [[next(encoded) for _ in draft.renderings] for draft in own]
            kept: list[EncodedRow] = []
            dropped: Counter[str] = Counter()
            try:
                for draft, turns_of_draft in zip(own, turns, strict=True):
                    try:
                        kept.append(self.assemble(draft, raise_encoding_errors(turns_of_draft)))
                    except DroppedRowError as drop:
                        dropped[drop.reason] += 1
            except MalformedRowError as error:  # all of the row is left out
                batch.bad.append((number, str(error)))
                continue
            batch.rows += kept
            batch.dropped += dropped
            batch.added += len(own) - 1
        # rows that cannot be rendered come before rows that cannot be encoded; a run stops at the first of the file
        batch.bad.sort()
        return batch


def raise_encoding_errors(encoded: Sequence[list[TurnIds] | MalformedRowError]) -> list[list[TurnIds]]:
    """Return the encoded renderings of a row.

    Raises:
        MalformedRowError: one of them could not be encoded.
    """
    turns = []
    for entry in encoded:
        if isinstance(entry, MalformedRowError):
            raise entry
        turns.append(entry)
    return turns


def join_lines(first: str, second: str) -> str:
    """Join `first` and `second` on separate lines, without an empty line where one is missing."""
    return f"{first}\n{second}" if first and second else first or second
