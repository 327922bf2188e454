"""Encode rendered text to token ids, many texts a call, join turns to (input_ids, labels), and decode responses."""

from __future__ import annotations

import json
import re
import secrets
import unicodedata
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from mindspeed_rl.data.content_marks import HIDDEN, TokenNames, has_hidden
from mindspeed_rl.data.conversation import MalformedRowError
from mindspeed_rl.data.indexed import IGNORE_INDEX
from mindspeed_rl.data.templates import Rendering, TextOrToken, Token, join_text

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase

TurnIds = tuple[list[int], list[int]]
_ENCODE_BATCH = 128


class TextDecoder:
    """Decoder without special tokens, except those in `keep`: in some tokenizers thought marks are special.

    Args:
        keep: names of tokens.
        cleans_up: spaces before punctuation are removed; None: as the tokenizer is configured.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, keep: Collection[str] = (), *, cleans_up: bool | None = False
    ) -> None:
        self._tokenizer, self._cleans_up = tokenizer, cleans_up
        added = tokenizer.added_tokens_decoder
        self._marks_by_id = {index: token.content for index, token in added.items() if token.special and token.content in keep}

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text."""
        parts: list[str] = []
        start = 0
        for index, token in enumerate(token_ids):
            if token in self._marks_by_id:
                parts += [self._decode_plain(token_ids[start:index]), self._marks_by_id[token]]
                start = index + 1
        return "".join([*parts, self._decode_plain(token_ids[start:])])

    def _decode_plain(self, token_ids: Sequence[int]) -> str:
        text = self._tokenizer.decode(list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=self._cleans_up)
        assert isinstance(text, str)  # a list for a batch
        return text


class TextEncoder:
    """Encoder of texts, by default without special tokens; a fast tokenizer is called without its Python layer."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, add_special_tokens: bool = False) -> None:
        self.tokenizer = tokenizer
        self._add_special_tokens = add_special_tokens
        self.eos_id: int = tokenizer.eos_token_id
        self._special: dict[str, int] = {}
        self._added_ids = frozenset(tokenizer.added_tokens_decoder)
        self._offset_tokenizer: Tokenizer | None = None
        self._byte_lengths: np.ndarray | None = None
        self._backend: Any = None
        if tokenizer.is_fast:
            self._backend = tokenizer.backend_tokenizer
            # a tokenizer.json may set truncation and padding
            self._backend.no_truncation()
            self._backend.no_padding()

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the token ids of every text."""
        if not texts:
            return []
        if self._backend is None:
            return self.tokenizer(list(texts), add_special_tokens=self._add_special_tokens)["input_ids"]
        # Small batches: the encodings are read while they are in the cache, and only a few exist at a time.
        ids: list[list[int]] = []
        for start in range(0, len(texts), _ENCODE_BATCH):
            batch = texts[start : start + _ENCODE_BATCH]
            encodings = self._backend.encode_batch_fast(batch, add_special_tokens=self._add_special_tokens)
            ids.extend(encoding.ids for encoding in encodings)
        return ids

    @cached_property
    def names(self) -> TokenNames:
        """Names of the tokenizer's added tokens, of which contents may have some as text."""
        return TokenNames(self.tokenizer)

    @cached_property
    def _hidden_names(self) -> _HiddenNames:
        return _HiddenNames(self.tokenizer, self.names)

    def encode_hidden(self, text: str) -> list[int]:
        """Return the token ids of a text in which names of tokens may be hidden: they are encoded as plain characters."""
        return self._hidden_names.encode(text) if has_hidden(text) else self.encode([text])[0]

    def special_id(self, token: Token) -> int:
        """Return the id of a special token.

        Raises:
            ValueError: it is not one entry of the vocabulary.
        """
        if token.name not in self._special:
            tokenizer = self.tokenizer
            text = {"bos_token": tokenizer.bos_token, "eos_token": tokenizer.eos_token}.get(token.name, token.name)
            if text is None:
                raise ValueError(f"the chat template needs a {token.name}, which the tokenizer does not have")
            token_id: Any = tokenizer.convert_tokens_to_ids(text)  # of one token: its id, or None
            # a missing token has the id of the unknown token
            if token_id is None or (token_id == tokenizer.unk_token_id and text != tokenizer.unk_token):
                raise ValueError(f"the chat template needs the token {text!r}, which the tokenizer does not have")
            self._special[token.name] = token_id
        return self._special[token.name]

    def encode_renderings(self, renderings: Sequence[Rendering]) -> list[list[TurnIds] | MalformedRowError]:
        """Return (source ids, target ids) of every turn of every rendering, with one call of the tokenizer.

        A rendering `as_one_text` gives a MalformedRowError if an answer shares all its tokens with the text around it.
        """
        sides = [
            side for rendering in renderings if not (rendering.as_one_text or rendering.has_hidden) for turn in rendering.turns
            for side in (turn.source, turn.target)
        ]  # fmt: skip
        encoded = iter(self.encode([part for side in sides for part in side if isinstance(part, str)]))
        plain = [rendering for rendering in renderings if rendering.as_one_text and not rendering.has_hidden]
        split = iter(self._encode_as_one_text(plain))

        def take_ids(side: tuple[TextOrToken, ...], *, has_hidden: bool) -> list[int]:
            if len(side) == 1 and isinstance(side[0], str) and not has_hidden:
                return next(encoded)
            out: list[int] = []
            for part in side:
                if isinstance(part, str):
                    out.extend(self.encode_hidden(part) if has_hidden else next(encoded))
                else:
                    out.append(self.special_id(part))
            return out

        results: list[list[TurnIds] | MalformedRowError] = []
        for rendering in renderings:
            if rendering.as_one_text:
                turns = self._encode_as_one_hidden_text(rendering) if rendering.has_hidden else next(split)
            else:
                hides = rendering.has_hidden
                turns = [
                    (take_ids(turn.source, has_hidden=hides), take_ids(turn.target, has_hidden=hides))
                    for turn in rendering.turns
                ]
            if not isinstance(turns, MalformedRowError):
                # an answer that is not trained is a part of the source
                turns = [
                    (source, target) if turn.trains else ([*source, *target], [])
                    for turn, (source, target) in zip(rendering.turns, turns, strict=True)
                ]
            results.append(turns)
        return results

    def _encode_as_one_text(self, renderings: Sequence[Rendering]) -> list[list[TurnIds] | MalformedRowError]:
        """Tokenize each rendering as one text, and split the ids at the borders of sources and targets.

        Together the ids are the full text's, so a model reads in training the tokens that it reads in serving. A token
        across the end of a source belongs to the source: the prompt ends after it. One across the end of an answer belongs
        to the next source, whose text must not be learned; but a special token that includes blanks ends the answer.
        """
        sides = [
            [join_text(side) for turn in rendering.turns for side in (turn.source, turn.target)] for rendering in renderings
        ]
        texts = ["".join(parts) for parts in sides]
        if self._backend is None:
            return [self._split_by_parts(parts, ids) for parts, ids in zip(sides, self.encode(texts), strict=True)]
        return [
            self._split(parts, *positioned) for parts, positioned in zip(sides, self._encode_with_positions(texts), strict=True)
        ]

    def _encode_as_one_hidden_text(self, rendering: Rendering) -> list[TurnIds] | MalformedRowError:
        """Do what `_encode_as_one_text` does, for a text in which names of tokens are hidden."""
        sides = [join_text(side) for turn in rendering.turns for side in (turn.source, turn.target)]
        if self._backend is None:
            parts = [self.encode_hidden(side) for side in sides]
            return list(zip(parts[::2], parts[1::2], strict=True))
        return self._split(*self._hidden_names.encode_with_positions(sides))

    def _split_by_parts(self, parts: list[str], ids: list[int]) -> list[TurnIds] | MalformedRowError:
        """Encode each part by itself, for a Python tokenizer, which has no positions; the tokens must be the same."""
        encoded = self.encode(parts)
        if [token for part in encoded for token in part] != ids:
            return MalformedRowError(
                "the chat template's text has other tokens than its turns one by one, and this tokenizer has no positions of"
                " tokens; use a fast tokenizer, or prompt_type"
            )
        return list(zip(encoded[::2], encoded[1::2], strict=True))

    def _split(self, parts: list[str], ids: list[int], positions: _Positions) -> list[TurnIds] | MalformedRowError:
        turns: list[TurnIds] = []
        source: list[int] = []
        border = first = 0
        for index, part in enumerate(parts):
            border += len(part) if positions.in_characters else len(part.encode())
            stop = len(ids)
            if index < len(parts) - 1:
                stop = max(int(positions.stops.searchsorted(border, side="right")), first)
                across = stop < len(ids) and positions.starts[stop] < border
                if across and (index % 2 == 0 or ids[stop] in self._added_ids):
                    stop += 1
            part_ids = ids[first:stop]
            first = stop
            if index % 2 == 0:
                source = part_ids
            elif part and not part_ids:
                return MalformedRowError(
                    f"the answer {part[:60]!r} has no separate token; it shares its tokens with the text around it"
                )
            else:
                turns.append((source, part_ids))
        return turns

    def _encode_with_positions(self, texts: list[str]) -> Iterator[tuple[list[int], _Positions]]:
        """Yield the token ids of each text, and the positions of the tokens in it.

        In a byte-level vocabulary a token has a known number of bytes. If they add up to the text, no offsets of `tokenizers`
        are needed, which take a sixth of the tokenization.
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
                yield ids, _Positions(stops - lengths, stops, in_characters)
            else:
                yield from self._encode_with_offsets([text])

    def _encode_with_offsets(self, texts: list[str]) -> Iterator[tuple[list[int], _Positions]]:
        if self._offset_tokenizer is None:
            from tokenizers import Tokenizer

            assert self._backend is not None
            # Post-processors move the positions of tokens that start with a blank, so this copy has none.
            self._offset_tokenizer = Tokenizer.from_str(self._backend.to_str())
            self._offset_tokenizer.post_processor = None
        for start in range(0, len(texts), _ENCODE_BATCH):
            for encoding in self._offset_tokenizer.encode_batch(texts[start : start + _ENCODE_BATCH], add_special_tokens=False):
                offsets = np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2)
                yield encoding.ids, _Positions(offsets[:, 0], offsets[:, 1], in_characters=True)

    def _count_bytes(self) -> np.ndarray:
        """Count the bytes of every token, [vocabulary] int64; empty if it is not byte-level or text may change."""
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
        for token, token_id in vocabulary.items():
            # In a byte-level vocabulary each character stands for one byte; added tokens are plain text.
            lengths[token_id] = len(token.encode()) if token_id in self._added_ids else len(token)
        return lengths


class _HiddenNames:
    """Encoder of texts in which names of tokens are hidden (`content_marks.py`): these are plain characters.

    It is a copy of the tokenizer in which each added token has another name. The text of the template gets these names, so
    that names in contents are not names of tokens, and all else is what the tokenizer makes of the whole text.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, names: TokenNames) -> None:
        self._tokenizer, self._names = tokenizer, names
        #: a hidden name, with its index as the first group, or one of the template
        self._pattern = re.compile(f"{HIDDEN.pattern}|({names.pattern.pattern})")
        if not tokenizer.is_fast:
            return
        from tokenizers import Tokenizer

        secret = secrets.token_hex(8)  # a content cannot have them
        self._renamed = {name: f"\ue002{secret}.{index}\ue003" for index, name in enumerate(names.names)}
        backend: Any = tokenizer.backend_tokenizer
        state = json.loads(backend.to_str())
        for token in state["added_tokens"]:
            token["content"] = self._renamed.get(token["content"], token["content"])
        _rename_vocabulary(state["model"], self._renamed)
        state["post_processor"] = state["truncation"] = state["padding"] = None
        self._backend = Tokenizer.from_str(json.dumps(state))
        ids = {self._backend.token_to_id(new): backend.token_to_id(name) for name, new in self._renamed.items()}
        self._ids = {new: old for new, old in ids.items() if new != old}

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text."""
        if self._tokenizer.is_fast:
            return self.encode_with_positions([text])[1]
        ids: list[Any] = []
        start = 0
        for match in self._pattern.finditer(text):
            if match.lastindex == 1:  # hidden
                continue
            ids += [*self._encode_plain(text[start : match.start()]), self._tokenizer.convert_tokens_to_ids(match[0])]
            start = match.end()
        return [*ids, *self._encode_plain(text[start:])]

    def _encode_plain(self, text: str) -> list[int]:
        tokens = self._tokenizer.tokenize(self._names.reveal(text), split_special_tokens=True)
        ids: Any = self._tokenizer.convert_tokens_to_ids(tokens)
        return ids

    def encode_with_positions(self, parts: Sequence[str]) -> tuple[list[str], list[int], _Positions]:
        """Return parts of a text as they are encoded, the token ids of the whole text, and the positions of the tokens."""

        def write(match: re.Match[str]) -> str:
            return self._names.reveal(match[0]) if match.lastindex == 1 else self._renamed[match[0]]

        written = [self._pattern.sub(write, part) for part in parts]
        encoding = self._backend.encode("".join(written), add_special_tokens=False)
        offsets = np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2)
        ids = [self._ids.get(token, token) for token in encoding.ids]
        return written, ids, _Positions(offsets[:, 0], offsets[:, 1], in_characters=True)


def _rename_vocabulary(model: dict[str, Any], renamed: Mapping[str, str]) -> None:
    """Rename tokens in the vocabulary of a tokenizer's model, which must not find them in a text either."""
    vocabulary = model["vocab"]
    if isinstance(vocabulary, list):  # of Unigram: pairs of a token and its score
        model["vocab"] = [[renamed.get(token, token), score] for token, score in vocabulary]
        return
    merged = {"".join(merge if isinstance(merge, list) else merge.split(" ")) for merge in model.get("merges", ())}
    own = {name: new for name, new in renamed.items() if name not in merged}
    model["vocab"] = {own.get(token, token): index for token, index in vocabulary.items()}
    if model.get("unk_token") in own:
        model["unk_token"] = own[model["unk_token"]]


@dataclass(frozen=True)
class _Positions:
    """Start and end of every token, [tokens] int64, in characters or in bytes of the text."""

    starts: np.ndarray
    stops: np.ndarray
    in_characters: bool


def _fit_lengths(source: int, target: int, budget: int, *, keeps_fitting_half: bool) -> tuple[int, int]:
    """Return how many tokens of source and target to keep within `budget`.

    Default rule: both shrink in proportion, the target to at least one token. With `keeps_fitting_half`: a half that is
    shorter than half the budget is kept and the other one is cut; both shrink in proportion only if both are longer.
    """
    if source + target <= budget:
        return source, target
    proportional = int(budget * target / (source + target))
    if not keeps_fitting_half:
        kept_target = min(max(proportional, 1), target)
    elif target * 2 < budget:
        kept_target = target
    elif source * 2 < budget:
        kept_target = min(budget - source, target)
    else:
        kept_target = min(proportional, target)
    return max(min(budget - kept_target, source), 0), kept_target


def ends_with(turns: Sequence[TurnIds], token: int) -> bool:
    """Return True when `token` is the last one of all turns."""
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

    Turns are cut by `_fit_lengths`, first turns first; turns past the budget are left out. With `efficient_eos` the label of a
    later turn's first token is the end token, and one end token closes the sample. `append_eod` adds one to every sample.
    """
    adds_end = efficient_eos or (append_eod and not ends_with(turns, eos_id))
    remaining = budget - 1 if adds_end else budget
    tokens: list[int] = []
    sources: list[tuple[int, int]] = []
    truncated = False
    for source, target in turns:
        if remaining <= 0:
            truncated = True
            break
        kept_source, kept_target = _fit_lengths(len(source), len(target), remaining, keeps_fitting_half=keeps_fitting_half)
        if kept_source < len(source) or kept_target < len(target):
            truncated = True
            source, target = source[:kept_source], target[:kept_target]
        sources.append((len(tokens), len(tokens) + len(source)))
        tokens += source
        tokens += target
        remaining -= len(source) + len(target)
    if adds_end:
        tokens.append(eos_id)
    input_ids = np.array(tokens, dtype=np.int32)
    labels = input_ids.copy()
    for index, (start, stop) in enumerate(sources):
        labels[start:stop] = IGNORE_INDEX
        if index and efficient_eos and start < stop and turns[index - 1][1]:
            labels[start] = eos_id
    if efficient_eos and sources and not turns[len(sources) - 1][1]:
        labels[-1] = IGNORE_INDEX  # the end of an answer that is not trained
    return input_ids, labels, truncated
