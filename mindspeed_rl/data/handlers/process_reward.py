"""Process reward data: a solution whose steps end in a placeholder token, and a verdict for each step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from mindspeed_rl.data.conversation import DroppedRowError, DropReason, MalformedRowError, Row
from mindspeed_rl.data.encoding import TurnIds
from mindspeed_rl.data.handlers.base import (
    Draft,
    EncodedRow,
    Handler,
    HandlerSettings,
)
from mindspeed_rl.data.indexed import IGNORE_INDEX
from mindspeed_rl.data.templates import Rendering, Turn


class AlpacaStyleProcessRewardHandler(Handler):
    """`input`: text with placeholders; `value`: a reward token for each. Labels are the reward tokens at the placeholders.

    Raises:
        ValueError: the placeholder or a reward token is more than one token in this tokenizer.
    """

    needs_template = False
    default_map: ClassVar = {"prompt": "input", "response": "value"}

    def __init__(self, settings: HandlerSettings) -> None:
        super().__init__(settings)
        self.placeholder_id = self._single("placeholder_token", settings.placeholder_token)
        self._rewards = {token: self._single("reward_tokens", token) for token in settings.reward_tokens}

    def _single(self, setting: str, token: str) -> int:
        (ids,) = self.encoder.encode([token])
        if len(ids) != 1:
            raise ValueError(f"{setting}: {token!r} is {len(ids)} tokens in this tokenizer, but must be one")
        return ids[0]

    def _reward_id(self, value: object) -> int:
        if not isinstance(value, str):
            raise MalformedRowError(
                f"column {self.map['response']!r} must hold reward tokens (texts), not {type(value).__name__}"
            )
        if value not in self._rewards:
            if self.settings.reward_tokens:
                raise MalformedRowError(f"reward {value!r} is none of reward_tokens ({', '.join(self.settings.reward_tokens)})")
            try:
                self._rewards[value] = self._single("reward", value)
            except ValueError as error:
                raise MalformedRowError(str(error)) from error
        return self._rewards[value]

    def render(self, row: Row) -> Draft:
        text = self.text_column(row, "prompt", required=True)
        values = self.column(row, "response", required=True)
        if not isinstance(values, (list, tuple)) or not values:
            raise MalformedRowError(f"column {self.map['response']!r} must be a list of reward tokens")
        if not text.strip():
            raise DroppedRowError(DropReason.EMPTY_PROMPT)
        return Draft((Rendering((Turn((text,), ()),)),), note=[self._reward_id(value) for value in values])

    def assemble(self, draft: Draft, encoded: Sequence[list[TurnIds]]) -> EncodedRow:
        input_ids = np.array(encoded[0][0][0], dtype=np.int32)
        places = np.flatnonzero(input_ids == self.placeholder_id)
        if len(places) != len(draft.note):
            raise MalformedRowError(
                f"has {len(places)} placeholders {self.settings.placeholder_token!r}, but {len(draft.note)} rewards"
            )
        if len(input_ids) >= self.max_tokens:
            raise DroppedRowError(DropReason.TOO_LONG)
        labels = np.full_like(input_ids, IGNORE_INDEX)
        labels[places] = draft.note
        return EncodedRow({"input_ids": input_ids, "attention_mask": np.ones_like(input_ids), "labels": labels})
