"""Okapi BM25 over a list of texts: an inverted index in arrays, made once, asked by any number of threads."""

from __future__ import annotations

import re
from array import array
from collections import Counter
from collections.abc import Sequence

import numpy as np

# a word, or one character of a script that has no blanks between words
_WORD = re.compile(r"[぀-ヿ㐀-鿿가-힯]|[^\W_぀-ヿ㐀-鿿가-힯]+")


def words(text: str) -> list[str]:
    """The words of a text in small letters; each Chinese, Japanese or Korean character, and each pair of neighbours, is one."""
    found = []
    end, last = -1, ""
    for match in _WORD.finditer(text.lower()):
        word = match.group()
        found.append(word)
        spaceless = len(word) == 1 and word >= "぀"
        if spaceless and last and match.start() == end:
            found.append(last + word)
        end, last = match.end(), word if spaceless else ""
    return found


class Bm25Index:
    """score(q, d) = sum over words w of q of idf(w) f (k1 + 1) / (f + k1 (1 - b + b |d| / mean |d|)), f = count of w in d;
    idf(w) = ln(1 + (N - n + 0.5) / (n + 0.5)), n = documents with w. Robertson and Zaragoza 2009, Lucene's idf.

    Args:
        texts: the documents.
    """

    def __init__(self, texts: Sequence[str], k1: float = 1.2, b: float = 0.75) -> None:
        counts: dict[str, tuple[array[int], array[int]]] = {}
        lengths = np.zeros(len(texts), dtype=np.float32)
        for number, text in enumerate(texts):
            frequencies = Counter(words(text))
            lengths[number] = sum(frequencies.values())
            for word, count in frequencies.items():
                documents, times = counts.setdefault(word, (array("i"), array("i")))
                documents.append(number)
                times.append(count)
        self._size = len(texts)
        norms = k1 * (1 - b + b * lengths / max(float(lengths.mean()) if len(texts) else 0.0, 1e-9))
        self._postings: dict[str, tuple[np.ndarray, np.ndarray]] = {}
        for word in list(counts):
            documents, times = counts.pop(word)  # one form at a time in memory
            rows, f = np.frombuffer(documents, dtype=np.intc), np.frombuffer(times, dtype=np.intc).astype(np.float32)
            idf = np.log1p((self._size - len(rows) + 0.5) / (len(rows) + 0.5))
            self._postings[word] = (rows, (idf * f * (k1 + 1) / (f + norms[rows])).astype(np.float32))

    def best(self, query: str, count: int) -> list[tuple[int, float]]:
        """Numbers and scores of the documents that fit best, best first, the earlier of equals; none that do not fit at all."""
        scores = np.zeros(self._size, dtype=np.float32)
        for word, times in Counter(words(query)).items():
            if word in self._postings:
                rows, weights = self._postings[word]
                scores[rows] += times * weights
        order = np.argsort(-scores, kind="stable")[:count]
        return [(int(row), float(scores[row])) for row in order if scores[row] > 0]
