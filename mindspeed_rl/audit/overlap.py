"""Overlap of prompts with evaluation sets: shared runs of eight words, as Tülu 3 looks for them (arXiv:2411.15124).

A prompt overlaps with an evaluation prompt where half of the eight-word runs of either of the two are in the other. A run
that many evaluation prompts have is the task's wording, and counts for none. A text of fewer words is one run: it overlaps
with an equal one only.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from mindspeed_rl.audit.texts import hash_n_grams, hash_words

_SIZE, _SHARE = 8, 0.5
#: evaluation prompts from which a run is the task's wording: at least this many, and this share of them
_COMMON, _COMMON_SHARE = 3, 0.01
#: entries of the table of last bits per run, at least; with the next power of two 16 to 32 bytes
_SPARSE = 16


class OverlapIndex:
    """Eight-word runs of evaluation prompts.

    Args:
        texts: the evaluation prompts, normalised.
    """

    def __init__(self, texts: Iterable[str]) -> None:
        grams = [np.unique(hash_n_grams(hash_words(text), _SIZE)) for text in texts]
        rows = np.repeat(np.arange(len(grams)), [len(each) for each in grams])
        joined = np.concatenate([np.zeros(0, np.uint64), *grams])
        values, first, counts = np.unique(joined, return_index=True, return_counts=True)
        is_own = counts < max(_COMMON, _COMMON_SHARE * len(grams))
        self._values, self._rows = values[is_own], rows[first[is_own]]
        self._common = values[~is_own]
        # a run of two prompts is the first one's
        self._sizes = np.bincount(self._rows, minlength=len(grams))
        # a table of their last bits, by which most runs of a prompt need no search
        self._mask = np.uint64((1 << (_SPARSE * len(self._values)).bit_length()) - 1)
        self._has_bits = np.zeros(int(self._mask) + 1, bool)
        self._has_bits[self._values & self._mask] = True

    def find(self, words: np.ndarray) -> tuple[int, float] | None:
        """Return the index of the evaluation prompt that a prompt overlaps with, and the share; None for none.

        Args:
            words: hashes of the words of the prompt, normalised.
        """
        grams = hash_n_grams(words, _SIZE)
        if not len(self._find_places(grams[self._has_bits[grams & self._mask]])):  # of most prompts no run is there
            return None
        grams = np.unique(grams)
        grams = grams[~np.isin(grams, self._common, assume_unique=True)]
        places = self._find_places(grams)
        rows, counts = np.unique(self._rows[places], return_counts=True)
        shares = np.maximum(counts / self._sizes[rows], counts / len(grams))
        best = int(shares.argmax())
        return (int(rows[best]), float(shares[best])) if shares[best] >= _SHARE else None

    def _find_places(self, grams: np.ndarray) -> np.ndarray:
        """Return the places of those of some runs that evaluation prompts have."""
        places = np.searchsorted(self._values, grams)
        return places[self._values[np.minimum(places, len(self._values) - 1)] == grams]
