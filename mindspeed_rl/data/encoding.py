"""From rendered text to token ids, many texts a call, and from turns to (input_ids, labels)."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from mindspeed_rl.data.conversation import MalformedRowError
from mindspeed_rl.data.indexed import IGNORE_INDEX
from mindspeed_rl.data.templates import Piece, Rendering, Token

if TYPE_CHECKING:
    from tokenizers import Tokenizer
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
        self._added_ids = frozenset(tokenizer.added_tokens_decoder)
        self._cutter: Tokenizer | None = None
        self._byte_lengths: np.ndarray | None = None
        self._backend: Any = None
        if tokenizer.is_fast:
            self._backend = tokenizer.backend_tokenizer
            # a tokenizer.json may bring a truncation and a padding of its own
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

    def encode_plain(self, text: str) -> list[int]:
        """Token ids of a text whose special tokens are read as any other characters."""
        if self._backend is None:
            return self.tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
        self._backend.encode_special_tokens = True
        try:
            return self._backend.encode(text, add_special_tokens=False).ids
        finally:
            self._backend.encode_special_tokens = False

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
            # a token that is not there is answered with the number of the unknown one
            if number is None or (number == tokenizer.unk_token_id and text != tokenizer.unk_token):
                raise ValueError(f"the chat template needs the token {text!r}, which the tokenizer does not have")
            self._special[token.name] = number
        return self._special[token.name]

    def encode_renderings(self, renderings: Sequence[Rendering]) -> list[list[TurnIds] | MalformedRowError]:
        """(source ids, target ids) of every turn of every rendering, in one pass over the tokenizer.

        A rendering `as_one_text` gives a MalformedRowError where an answer shares all its tokens with what stands before or after it.
        """
        sides = [
            side for rendering in renderings if not rendering.as_one_text for turn in rendering.turns
            for side in (turn.source, turn.target)
        ]  # fmt: skip
        texts = [piece for side in sides for piece in side if isinstance(piece, str)]
        encoded = iter(self.encode(texts))
        cut = iter(self._encode_whole([rendering for rendering in renderings if rendering.as_one_text]))

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

        results: list[list[TurnIds] | MalformedRowError] = []
        for rendering in renderings:
            if rendering.as_one_text:
                results.append(next(cut))
                continue
            turns = []
            for turn in rendering.turns:
                source = ids(turn.source)
                turns.append((source, ids(turn.target)))
            results.append(turns)
        return results

    def _encode_whole(self, renderings: Sequence[Rendering]) -> list[list[TurnIds] | MalformedRowError]:
        """Tokenize each rendering as one text, and cut the ids where its turns' sides meet.

        The ids together are those of the whole text, so that a model reads in training what it reads when it is served. A token
        across the end of a source belongs to the source: the prompt is over only after it. One across the end of an answer
        belongs to the next source, whose text must not be learned; but a special token that swallows blanks ends the answer.
        """
        sides = [[_text(side) for turn in rendering.turns for side in (turn.source, turn.target)] for rendering in renderings]
        texts = ["".join(parts) for parts in sides]
        if self._backend is None:
            return [self._cut_slowly(parts, ids) for parts, ids in zip(sides, self.encode(texts), strict=True)]
        return [self._cut(parts, *placed) for parts, placed in zip(sides, self._encode_with_places(texts), strict=True)]

    def _cut_slowly(self, parts: list[str], ids: list[int]) -> list[TurnIds] | MalformedRowError:
        """For a tokenizer written in Python, which has no places: each part on its own, if that gives the same tokens."""
        pieces = self.encode(parts)
        if [token for piece in pieces for token in piece] != ids:
            return MalformedRowError(
                "the chat template's text has other tokens than its turns one by one, and this tokenizer cannot tell the"
                " tokens' places; use a fast tokenizer, or prompt_type"
            )
        return list(zip(pieces[::2], pieces[1::2], strict=True))

    def _cut(self, parts: list[str], ids: list[int], places: _Places) -> list[TurnIds] | MalformedRowError:
        turns: list[TurnIds] = []
        source: list[int] = []
        border = first = 0
        for number, part in enumerate(parts):
            border += len(part) if places.in_characters else len(part.encode())
            stop = len(ids)
            if number < len(parts) - 1:
                stop = max(int(places.stops.searchsorted(border, side="right")), first)
                across = stop < len(ids) and places.starts[stop] < border
                if across and (number % 2 == 0 or ids[stop] in self._added_ids):
                    stop += 1
            piece = ids[first:stop]
            first = stop
            if number % 2 == 0:
                source = piece
            elif part and not piece:
                return MalformedRowError(f"the answer {part[:60]!r} has no token of its own; the text around it shares them")
            else:
                turns.append((source, piece))
        return turns

    def _encode_with_places(self, texts: list[str]) -> Iterator[tuple[list[int], _Places]]:
        """Token ids of each text, and where the tokens stand in it.

        In a byte-level vocabulary a token says itself how many bytes it has. Where they add up to the text, that is the answer,
        without the offsets of `tokenizers`, which cost a sixth of the tokenization.
        """
        if self._byte_lengths is None:
            self._byte_lengths = self._count_bytes()
        if not len(self._byte_lengths):
            yield from self._encode_with_offsets(texts)
            return
        for text, ids in zip(texts, self.encode(texts), strict=True):
            lengths = self._byte_lengths.take(ids)
            stops = lengths.cumsum()
            in_characters = text.isascii()
            size = len(text) if in_characters else len(text.encode())
            same_text = in_characters or unicodedata.is_normalized("NFC", text)
            if same_text and len(ids) and stops[-1] == size:
                yield ids, _Places(stops - lengths, stops, in_characters)
            else:
                yield from self._encode_with_offsets([text])

    def _encode_with_offsets(self, texts: list[str]) -> Iterator[tuple[list[int], _Places]]:
        if self._cutter is None:
            from tokenizers import Tokenizer

            assert self._backend is not None
            # Post-processors move the places of tokens that begin with a blank, so this copy has none.
            self._cutter = Tokenizer.from_str(self._backend.to_str())
            self._cutter.post_processor = None
        for start in range(0, len(texts), ENCODE_BATCH):
            for encoding in self._cutter.encode_batch(texts[start : start + ENCODE_BATCH], add_special_tokens=False):
                offsets = np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2)
                yield encoding.ids, _Places(offsets[:, 0], offsets[:, 1], in_characters=True)

    def _count_bytes(self) -> np.ndarray:
        """Bytes of every token, [vocabulary] int64; empty where the vocabulary is not byte-level or the text may be changed."""
        from tokenizers import normalizers

        assert self._backend is not None
        before = self._backend.pre_tokenizer
        state = json.loads(before.__getstate__()) if before is not None else {}
        steps = state.get("pretokenizers", [state])
        byte_level = any(step.get("type") == "ByteLevel" and not step["add_prefix_space"] for step in steps)
        known = all(step.get("type") in ("ByteLevel", "Split", "Digits") for step in steps)
        if not (byte_level and known and isinstance(self._backend.normalizer, (normalizers.NFC, type(None)))):
            return np.empty(0, dtype=np.int64)
        vocabulary = self._backend.get_vocab(with_added_tokens=True)
        lengths = np.zeros(max(vocabulary.values()) + 1, dtype=np.int64)
        for token, number in vocabulary.items():
            # In a byte-level vocabulary each character stands for one byte; added tokens are plain text.
            lengths[number] = len(token.encode()) if number in self._added_ids else len(token)
        return lengths


@dataclass(frozen=True)
class _Places:
    """Begin and end of every token, [tokens] int64, in characters or in bytes of the text."""

    starts: np.ndarray
    stops: np.ndarray
    in_characters: bool


def _text(side: tuple[Piece, ...]) -> str:
    assert all(isinstance(piece, str) for piece in side), side
    return "".join(piece for piece in side if isinstance(piece, str))


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


def ends_with(turns: Sequence[TurnIds], token: int) -> bool:
    """True when `token` is the last one of all turns."""
    last = next((side for turn in reversed(turns) for side in reversed(turn) if side), [])
    return last[-1:] == [token]


def join_turns(
    turns: Sequence[TurnIds],
    *,
    eos_id: int,
    efficient_eos: bool,
    budget: int,
    keeps_fitting_half: bool,
    append_eod: bool = False,
) -> tuple[np.ndarray, np.ndarray, bool]:
    """Return (input_ids, labels, truncated), [tokens] int32. Labels are unshifted, IGNORE_INDEX on every source token.

    Turns are cut by `fit_lengths`, first turns first; turns past the budget are left out. With `efficient_eos` the label of a
    later turn's first token is the end token, and one end token closes the sample. With `append_eod` one closes it in any case;
    a sample that ends with it already gets no second one.
    """
    closes = efficient_eos or (append_eod and not ends_with(turns, eos_id))
    remaining = budget - 1 if closes else budget
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
    if closes:
        tokens.append(eos_id)
    input_ids = np.array(tokens, dtype=np.int32)
    labels = input_ids.copy()
    for number, (start, stop) in enumerate(sources):
        labels[start:stop] = IGNORE_INDEX
        if number and efficient_eos and start < stop:
            labels[start] = eos_id
    return input_ids, labels, truncated
