"""Near duplicates by MinHash: 128 hashes of the three-word shingles of a text, in 16 bands of 8 (Broder 1997, LSH).

A pair is found where a band of both agrees, and kept where at least `threshold` of the hashes do, an estimate of the share of
their shingles (Jaccard) with a standard deviation of 0.035 at 0.8. Of pairs with a share of 0.8 bands find 95 %, with 0.9 all
but 1 in 10,000: 1 - (1 - J^8)^16. Texts whose numbers differ are other problems with the same story, and no pair.

Why not a library (benchmarks/near_duplicates.py): datasketch 2.0.0 keeps 3.6 KB of a row in memory, 6.5 GB for 1 GB of
GSM8K's rows, and takes 0.7 ms for it. Here a row has 144 bytes in memory and 512 in a file.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from mindspeed_rl.audit.texts import find_numbers, hash_n_grams, hash_text

_NUM_HASHES, _NUM_BANDS, _SHINGLE = 128, 16, 3
_ROWS_PER_BAND = _NUM_HASHES // _NUM_BANDS
#: pairs whose signatures are compared at a time, and texts whose shingles are hashed at a time
_PAIRS, _SHINGLES = 1 << 14, 1 << 12
_FIRST = 1 << 12


class NearDuplicates:
    """Signatures of texts, one after another, and the pairs among them.

    Args:
        folder: folder of the file with the signatures, which is removed with it.
        threshold: share of equal hashes from which two texts are near duplicates.
    """

    def __init__(self, folder: Path, threshold: float = 0.8) -> None:
        self._threshold = threshold
        self._file = (folder / "signatures").open("w+b")
        self._bands = np.zeros((_FIRST, _NUM_BANDS), np.uint64)
        self._count = 0
        random = np.random.default_rng(7)
        # multiply-shift hashing: odd factors, the upper 32 bits of the product
        self._factors = random.integers(0, 1 << 63, _NUM_HASHES, np.uint64) * np.uint64(2) + np.uint64(1)
        self._terms = random.integers(0, 1 << 63, _NUM_HASHES, np.uint64)
        self._mix = random.integers(0, 1 << 63, _ROWS_PER_BAND, np.uint64) * np.uint64(2) + np.uint64(1)

    def add(self, text: str, words: np.ndarray) -> None:
        """Add the next text, normalised, with the hashes of its words."""
        signature = self.sign(words)
        self._file.write(signature.tobytes())
        if self._count == len(self._bands):
            grown = np.zeros((2 * len(self._bands), _NUM_BANDS), np.uint64)
            grown[: self._count] = self._bands
            self._bands = grown
        bands = (signature.reshape(_NUM_BANDS, _ROWS_PER_BAND).astype(np.uint64) * self._mix).sum(1, dtype=np.uint64)
        self._bands[self._count] = bands ^ np.uint64(hash_text(find_numbers(text)))
        self._count += 1

    def sign(self, words: np.ndarray) -> np.ndarray:
        """Return the signature of a text with these hashes of words, [hashes] uint32; all ones of one without a word."""
        shingles = hash_n_grams(words, _SHINGLE)
        signature = np.full(_NUM_HASHES, np.iinfo(np.uint32).max, np.uint32)
        for start in range(0, len(shingles), _SHINGLES):
            part = shingles[start : start + _SHINGLES, None] * self._factors + self._terms
            signature = np.minimum(signature, (part.min(0) >> np.uint64(32)).astype(np.uint32))
        return signature

    def find_originals(self) -> np.ndarray:
        """Return for each text the index of the first one that it is a near duplicate of, itself where there is none.

        Equal texts are near duplicates too. A text is compared with the first and the previous one of its bands.
        """
        count = self._count
        originals = np.arange(count)
        if count < 2:
            return originals
        self._file.flush()
        for first, second in self._list_pairs():
            for start in range(0, len(first), _PAIRS):
                one, other = first[start : start + _PAIRS], second[start : start + _PAIRS]
                is_open = originals[one] != originals[other]
                one, other = one[is_open], other[is_open]
                equal = (self._read(one) == self._read(other)).mean(1) >= self._threshold
                np.minimum.at(originals, other[equal], one[equal])
        # an original may be a duplicate of an earlier one
        while (again := originals[originals]).tobytes() != originals.tobytes():
            originals = again
        return originals

    def _read(self, texts: np.ndarray) -> np.ndarray:
        """Return the signatures of some texts, [texts, hashes] uint32; a mapped file would bring all of it to memory."""
        signatures = np.empty((len(texts), _NUM_HASHES), np.uint32)
        for text, signature in zip(texts.tolist(), signatures):
            if os.preadv(self._file.fileno(), [signature.data], text * signature.nbytes) != signature.nbytes:
                raise OSError(f"{self._file.name} ends before signature {text}: another program has cut it off")
        return signatures

    def _list_pairs(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield pairs (earlier, later) of texts with an equal band: the first of a bucket, and the previous one."""
        for band in range(_NUM_BANDS):
            values = self._bands[: self._count, band]
            order = np.argsort(values, kind="stable")
            ordered = values[order]
            is_first = np.concatenate(([True], ordered[1:] != ordered[:-1]))
            starts = np.maximum.accumulate(np.where(is_first, np.arange(len(order)), 0))
            later = np.flatnonzero(~is_first)
            yield order[starts[later]], order[later]
            third = later[starts[later] < later - 1]
            yield order[third - 1], order[third]

    def close(self) -> None:
        """Close the file of the signatures."""
        self._file.close()
