"""From rendered text to token ids, many texts a call, and from turns to (input_ids, labels)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from mindspeed_rl.data.indexed import IGNORE_INDEX
from mindspeed_rl.data.templates import Piece, Rendering, Token

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TurnIds = tuple[list[int], list[int]]
ENCODE_BATCH = 128


class TextEncoder:
    """Encodes texts, without special tokens unless asked for; a fast tokenizer is driven without the Python layer around it."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, add_special_tokens: bool = False) -> None:
        self.tokenizer = tokenizer
        self._add_special_tokens = add_special_tokens
        self.eos_id: int = tokenizer.eos_token_id
        self._special: dict[str, int] = {}
        self._backend: Any = None
        if tokenizer.is_fast:
            self._backend = tokenizer.backend_tokenizer
            self._backend.no_truncation()
            self._backend.no_padding()

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of every text."""
        if not texts:
            return []
        if self._backend is None:
            return self.tokenizer(list(texts), add_special_tokens=self._add_special_tokens)["input_ids"]
        # Small batches: the encodings are read while they are in the cache, and few of them exist at a time.
        ids: list[list[int]] = []
        for start in range(0, len(texts), ENCODE_BATCH):
            batch = texts[start : start + ENCODE_BATCH]
            encodings = self._backend.encode_batch_fast(batch, add_special_tokens=self._add_special_tokens)
            ids.extend(encoding.ids for encoding in encodings)
        return ids

    def special_id(self, token: Token) -> int:
        """Id of a special token.

        Raises:
            ValueError: the vocabulary does not hold it as one entry.
        """
        if token.name not in self._special:
            tokenizer = self.tokenizer
            text = {"bos_token": tokenizer.bos_token, "eos_token": tokenizer.eos_token}.get(token.name, token.name)
            if text is None:
                raise ValueError(f"the chat template needs a {token.name}, which the tokenizer does not have")
            number: Any = tokenizer.convert_tokens_to_ids(text)  # of one token: its number, or None
            if number is None or (number == tokenizer.unk_token_id and text != tokenizer.unk_token):
                raise ValueError(f"the chat template needs the token {text!r}, which the tokenizer does not have")
            self._special[token.name] = number
        return self._special[token.name]

    def encode_renderings(self, renderings: Sequence[Rendering]) -> list[list[TurnIds]]:
        """(source ids, target ids) of every turn of every rendering, in one pass over the tokenizer."""
        sides = [side for rendering in renderings for turn in rendering.turns for side in (turn.source, turn.target)]
        texts = [piece for side in sides for piece in side if isinstance(piece, str)]
        encoded = iter(self.encode(texts))

        def ids(side: tuple[Piece, ...]) -> list[int]:
            if len(side) == 1 and isinstance(side[0], str):
                return next(encoded)
            out: list[int] = []
            for piece in side:
                if isinstance(piece, str):
                    out.extend(next(encoded))
                else:
                    out.append(self.special_id(piece))
            return out

        results = []
        for rendering in renderings:
            turns = []
            for turn in rendering.turns:
                source = ids(turn.source)
                turns.append((source, ids(turn.target)))
            results.append(turns)
        return results


def fit_lengths(source: int, target: int, budget: int, *, keeps_fitting_half: bool) -> tuple[int, int]:
    """Return how many tokens of source and target to keep within `budget`.

    Plain rule: both shrink in proportion, the target to no less than one token. With `keeps_fitting_half`: a half that is
    shorter than half the budget stays whole and the other one is cut; only if both are longer do they shrink in proportion.
    """
    if source + target <= budget:
        return source, target
    share = int(budget * target / (source + target))
    if not keeps_fitting_half:
        kept_target = min(max(share, 1), target)
    elif target * 2 < budget:
        kept_target = target
    elif source * 2 < budget:
        kept_target = min(budget - source, target)
    else:
        kept_target = min(share, target)
    return max(min(budget - kept_target, source), 0), kept_target


def join_turns(
    turns: Sequence[TurnIds], *, eos_id: int, efficient_eos: bool, budget: int, keeps_fitting_half: bool
) -> tuple[np.ndarray, np.ndarray, bool]:
    """Return (input_ids, labels, truncated), [tokens] int32. Labels are unshifted, IGNORE_INDEX on every source token.

    Turns are cut by `fit_lengths`, first turns first; turns past the budget are left out. With `efficient_eos` the label of a
    later turn's first token is the end token, and one end token closes the sample.
    """
    remaining = budget - 1 if efficient_eos else budget
    tokens: list[int] = []
    sources: list[tuple[int, int]] = []
    truncated = False
    for source, target in turns:
        if remaining <= 0:
            truncated = True
            break
        kept_source, kept_target = fit_lengths(len(source), len(target), remaining, keeps_fitting_half=keeps_fitting_half)
        if kept_source < len(source) or kept_target < len(target):
            truncated = True
            source, target = source[:kept_source], target[:kept_target]
        sources.append((len(tokens), len(tokens) + len(source)))
        tokens += source
        tokens += target
        remaining -= len(source) + len(target)
    if efficient_eos:
        tokens.append(eos_id)
    input_ids = np.array(tokens, dtype=np.int32)
    labels = input_ids.copy()
    for number, (start, stop) in enumerate(sources):
        labels[start:stop] = IGNORE_INDEX
        if number and efficient_eos and start < stop:
            labels[start] = eos_id
    return input_ids, labels, truncated
