"""Pretraining: whole documents, each one array per text column; documents with images have the columns of samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import numpy as np

from mindspeed_rl.data.conversation import Conversation, DroppedRowError, DropReason, MalformedRowError, Row, user
from mindspeed_rl.data.encoding import TurnIds
from mindspeed_rl.data.handlers.base import Draft, EncodedRow, Handler, HandlerSettings, join_lines
from mindspeed_rl.data.images import build_image_columns
from mindspeed_rl.data.indexed import DOCUMENTS, IGNORE_INDEX
from mindspeed_rl.data.templates import Rendering, Turn


class DocumentHandler(Handler):
    """Base of the pretraining handlers: a subclass names its columns and gives the text of each.

    The tokenizer's own special tokens are added (a Llama tokenizer begins each document with BOS, Qwen adds none). With
    append_eod the end token closes each document; with pad_to_multiple_of N, padding fills it up to a multiple of N.
    """

    packed = False
    can_append_eod = True
    needs_template = False
    text_stands_alone = True
    add_special_tokens = True

    def __init__(self, settings: HandlerSettings) -> None:
        super().__init__(settings)
        self.columns = tuple(settings.json_keys)
        self.length_column = self.columns[0]

    def texts(self, row: Row) -> list[str]:
        """One text per column.

        Raises:
            MalformedRowError: a column is missing or is not text.
        """
        raise NotImplementedError

    def render(self, row: Row) -> Draft:
        texts = self.texts(row)
        if not all(texts):
            raise DroppedRowError(DropReason.EMPTY_TEXT)
        return Draft(tuple(Rendering((Turn((text,), ()),)) for text in texts))

    def assemble(self, draft: Draft, encoded: Sequence[list[TurnIds]]) -> EncodedRow:
        columns: dict[str, list[int]] = {}
        for name, turns in zip(self.columns, encoded, strict=True):
            tokens = turns[0][0]
            # some tokenizers append it on their own
            if self.settings.append_eod and tokens[-1:] != [self.encoder.eos_id]:
                tokens.append(self.encoder.eos_id)
            tokens.extend([self.settings.tokenizer.pad_token_id] * (-len(tokens) % self.settings.pad_to_multiple_of))
            columns[name] = tokens
        return EncodedRow(columns)

    def count_tokens(self, columns: Mapping[str, np.ndarray]) -> tuple[int, int]:
        total = sum(len(tokens) for tokens in columns.values())
        return total, total


class GeneralPretrainHandler(DocumentHandler):
    """The `--json-keys` columns as they are; map_keys may say which column of the data a key stands for."""

    def known_columns(self, settings: HandlerSettings) -> Mapping[str, object]:
        return {name: name for name in settings.json_keys}

    def texts(self, row: Row) -> list[str]:
        texts = []
        for name in (self.map[key] for key in self.columns):
            if name not in row:
                raise MalformedRowError(
                    f"has no column {name!r}; it has {', '.join(map(str, row))}; use json_keys to name yours"
                )
            if not isinstance(row[name], str):
                raise MalformedRowError(f"column {name!r} must be text, not {type(row[name]).__name__}")
            texts.append(row[name])
        return texts


class ImageTextPretrainHandler(DocumentHandler):
    """Documents of text with `<image>` and `<video>`: every token of their text trains, and none of an image or a video.

    A document is a row of its own: one with images that is longer than seq_length is left out, one of text is cut.
    """

    packed = True
    can_read_images = True
    default_map: ClassVar = {"text": "text", "images": "images", "videos": "videos"}

    def __init__(self, settings: HandlerSettings) -> None:
        Handler.__init__(self, settings)
        self.columns = (*self.columns, DOCUMENTS)
        if self.images is None:
            raise ValueError("ImageTextPretrainHandler needs a model that reads images; GeneralPretrainHandler reads text")

    def render(self, row: Row) -> Draft:
        row, references = self.take_images(row)
        document = self.place_images(Conversation([user(self.text_column(row, "text", required=True))]), references)
        (text,) = document.messages[0].contents
        if not text:
            raise DroppedRowError(DropReason.EMPTY_TEXT)
        return Draft((Rendering((Turn((text,), ()),)),), images=document.images)

    def assemble(self, draft: Draft, encoded: Sequence[list[TurnIds]]) -> EncodedRow:
        assert self.images is not None and self.images.rules is not None
        rules, ids = self.images.rules, encoded[0][0][0]
        frame = {*rules.frame, rules.token_id} | (set() if rules.video is None else {rules.video.token_id})
        # a turn for each token shows which tokens take its place
        turns, images = self.expand_images(draft, [([token], []) for token in ids])
        tokens = [token for turn, _ in turns for token in turn]
        labels = [IGNORE_INDEX if one in frame else token for one, (turn, _) in zip(ids, turns) for token in turn]
        if self.settings.append_eod and tokens[-1:] != [self.encoder.eos_id]:
            tokens.append(self.encoder.eos_id)
            labels.append(self.encoder.eos_id)
        limit = self.settings.seq_length or len(tokens)
        if images and len(tokens) > limit:
            raise DroppedRowError(DropReason.TOO_LONG)
        columns: dict[str, np.ndarray] = {
            "input_ids": np.array(tokens[:limit], np.int32),
            "attention_mask": np.ones(min(limit, len(tokens)), np.int32),
            "labels": np.array(labels[:limit], np.int32),
            DOCUMENTS: np.ones(1, np.int32),
        }
        if not (columns["labels"][1:] != IGNORE_INDEX).any():  # no token predicts the first one
            raise DroppedRowError(DropReason.EMPTY_TEXT)
        return EncodedRow(columns | build_image_columns(images), truncated=len(tokens) > limit)

    def count_tokens(self, columns: Mapping[str, np.ndarray]) -> tuple[int, int]:
        return Handler.count_tokens(self, columns)


class SingleTextHandler(DocumentHandler):
    """Base of the handlers that make one text of several columns and write it as `text`."""

    def __init__(self, settings: HandlerSettings) -> None:
        super().__init__(settings)
        self.columns = ("text",)
        self.length_column = "text"


class AlpacaPretrainHandler(SingleTextHandler):
    """instruction (+ input) and output, written as one `USER: ... ASSISTANT: ...` text."""

    default_map: ClassVar = {"prompt": "instruction", "query": "input", "response": "output"}
    opening: ClassVar[str] = (
        "A chat between a curious user and an artificial intelligence assistant. "
        "The assistant gives helpful, detailed, and polite answers to the user's questions."
    )

    def texts(self, row: Row) -> list[str]:
        question = join_lines(self.text_column(row, "prompt", required=True), self.text_column(row, "query"))
        answer = self.text_column(row, "response", required=True)
        if not question or not answer:
            raise DroppedRowError(DropReason.EMPTY_TEXT)
        return [f"{self.opening} USER: {question} ASSISTANT: {answer}"]


class SharegptPretrainHandler(SingleTextHandler):
    """The turns of a conversation ({from, value} or {role, content}), one under the other."""

    default_map: ClassVar = {"messages": "conversations"}

    def texts(self, row: Row) -> list[str]:
        turns = self.column(row, "messages", required=True)
        if not isinstance(turns, (list, tuple)) or not all(isinstance(turn, Mapping) for turn in turns):
            raise MalformedRowError(f"column {self.map['messages']!r} must be a list of turns")
        contents = [turn.get("value", turn.get("content")) for turn in turns]
        if not all(isinstance(content, str) for content in contents):
            raise MalformedRowError("every turn needs a text under 'value' or 'content'")
        return ["\n".join(content for content in contents if content)]
