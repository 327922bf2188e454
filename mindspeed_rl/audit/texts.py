"""Texts as an audit compares them: normalised, in words of any script, with their numbers apart."""

from __future__ import annotations

import os
import re
import unicodedata
from collections.abc import Sequence
from hashlib import blake2b
from zlib import crc32

import numpy as np

#: scripts that write no spaces between words
_NO_SPACES = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
#: a run of letters and digits; each character of a script without spaces, and each operator, is a word
_WORD = re.compile(rf"[{_NO_SPACES}]|[-+*/^%=<>\u00b1\u00d7\u00f7\u2212\u221a]|[^\W_{_NO_SPACES}]+")
_NUMBER = re.compile(r"\d+(?:[.,/]\d+)*")
#: odd multiplier of the polynomial over words
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
#: characters of a script, and its name
_SCRIPTS: dict[str, re.Pattern[str]] = {
    name: re.compile(f"[{characters}]+")
    for name, characters in {
        "Latin letters": "A-Za-z\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u024f",
        "Greek": "\u0370-\u03ff",
        "Cyrillic letters": "\u0400-\u052f",
        "Hebrew": "\u0590-\u05ff",
        "Arabic letters": "\u0600-\u06ff",
        "Devanagari": "\u0900-\u097f",
        "Thai": "\u0e00-\u0e7f",
        "Japanese": "\u3040-\u30ff",
        "Chinese": "\u3400-\u4dbf\u4e00-\u9fff",
        "Korean": "\uac00-\ud7af",
    }.items()
}
#: characters of a text that its language is read from
_READ = 2000
#: texts below which a common beginning may be chance, and that are compared at most
_FEWEST, FRAME_TEXTS = 8, 256


def normalise(text: str) -> str:
    """Return a text in Unicode's compatibility form, without case, with single spaces."""
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


def hash_text(text: str) -> int:
    """Return 64 bits of a text, the same in every process."""
    return int.from_bytes(blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "little")


def find_numbers(text: str) -> str:
    """Return the numbers of a text in their order."""
    return " ".join(_NUMBER.findall(text))


def hash_words(text: str) -> np.ndarray:
    """Return a hash of each word of a normalised text, [words] uint64."""
    return np.array([crc32(word.encode("utf-8", "surrogatepass")) for word in _WORD.findall(text)], dtype=np.uint64)


def hash_n_grams(words: np.ndarray, size: int) -> np.ndarray:
    """Return a hash of each run of `size` words, [n-grams] uint64, in order; the whole of a shorter text is one.

    Args:
        words: [words] uint64, of `hash_words`.
    """
    count = len(words)
    if not count:
        return np.zeros(0, np.uint64)
    size = min(size, count)
    total = np.full(count - size + 1, size, np.uint64)
    for offset in range(size):  # arithmetic modulo 2^64
        total = total * _MULTIPLIER + words[offset : offset + len(total)]
    total ^= total >> np.uint64(29)
    return total * _MULTIPLIER


def find_language(text: str) -> str:
    """Return the script that most letters of a text are written in; kana make a text Japanese."""
    read = text[:_READ]
    if read.isascii():
        return "Latin letters" if _SCRIPTS["Latin letters"].search(read) else "no letters"
    counts = {name: sum(map(len, script.findall(read))) for name, script in _SCRIPTS.items()}
    total, kana = sum(counts.values()), counts["Japanese"]
    if kana and kana + counts["Chinese"] >= total / 2:
        return "Japanese"
    return max(counts, key=lambda name: counts[name]) if total else "no letters"


def find_frame(texts: Sequence[str]) -> tuple[int, int]:
    """Return the lengths of what all texts have in common at their beginning and end: a template, not a question.

    It ends between words, and leaves some of every text. Few texts may be alike by chance, and have none.
    """
    some = list(dict.fromkeys(texts))[:FRAME_TEXTS]
    if len(some) < _FEWEST:
        return 0, 0
    first = os.path.commonprefix(some)
    while first and first[-1].isalnum():
        first = first[:-1]
    last = os.path.commonprefix([text[len(first) :][::-1] for text in some])
    while last and last[-1].isalnum():
        last = last[:-1]
    return len(first), len(last)


def strip_frame(text: str, frame: tuple[int, int]) -> str:
    """Return a text without the frame of `find_frame`."""
    return text[frame[0] : len(text) - frame[1]] or text
