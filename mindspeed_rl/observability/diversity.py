"""Diversity of responses: different sentences and n-grams, and the pattern that fits prompts of any kind."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

#: scripts that write no spaces between words
_NO_SPACES = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff"
_WORD = re.compile(rf"[{_NO_SPACES}]|[^\W_{_NO_SPACES}]+")
_END = re.compile(r"(?<=[.!?])\s+|(?<=[\u3002\uff01\uff1f])|\n+")
#: words below which a sentence is an answer, which many prompts may share
_FEWEST_WORDS = 4
#: prompts that share a word make it one of the task
_SHARED = 0.5
#: share of the responses from which their pattern is worth a line
ONE_PATTERN = 0.5
#: stands for a word that a sentence has from its prompt
_HOLE = "_"


@dataclass(frozen=True)
class Diversity:
    """Shares from 0 (all equal) to 1 (all different).

    Attributes:
        per_prompt: different sentences of the responses to a prompt, of all their sentences; mean over prompts.
        sentences: the same over all prompts at once.
        bigrams, trigrams: different runs of two and three words, of all of them (distinct-n, arXiv:1510.03055).
        pattern: the most frequent pattern of whole responses: words that only this prompt has are holes.
        pattern_share: fraction of the prompts that have a response of this pattern, times their share of its responses.
    """

    per_prompt: float
    sentences: float
    bigrams: float
    trigrams: float
    pattern: str
    pattern_share: float


def measure_diversity(groups: Sequence[tuple[str, Sequence[str]]], labels: Sequence[str | None] = ()) -> Diversity:
    """Measure the diversity of responses.

    A response fits prompts of any kind where its pattern has many prompts: one sentence of four words or more, in which words
    that only its prompt has are left open ("A kitchen with 5 words." and "A boat with 7 words." are "a _ with _ words"). Words
    of a label of several words are not left open: an answer that the prompt has word for word is one.

    Args:
        groups: prompts with their responses.
        labels: labels of the prompts; empty where there are none.
    """
    asked = [set(_list_words(prompt)) for prompt, _ in groups]
    counts = Counter(word for words in asked for word in words)
    # a number of the prompt is left open, however many prompts have it
    common = {word for word, count in counts.items() if count > _SHARED * len(groups) and not word.isdecimal()}
    per_prompt, everything = [], Counter[str]()
    n_grams: dict[int, Counter[tuple[str, ...]]] = {2: Counter(), 3: Counter()}
    patterns: dict[str, float] = {}
    for index, (_, responses) in enumerate(groups):
        mine, shapes = Counter[str](), Counter[str]()
        kept = _list_words(labels[index] or "") if labels else []
        holes = asked[index] - common - (set(kept) if len(kept) > 1 else set())
        for response in responses:
            words = _list_words(response)
            mine.update(" ".join(sentence) for part in _END.split(response) if (sentence := _list_words(part)))
            for size, found in n_grams.items():
                found.update(zip(*(words[offset:] for offset in range(size))))
            if len(words) >= _FEWEST_WORDS:
                shapes[" ".join(_HOLE if word in holes else word for word in words)] += 1
        everything += mine
        if mine:
            per_prompt.append(len(mine) / mine.total())
        for shape, count in shapes.items():
            patterns[shape] = patterns.get(shape, 0.0) + count / len(responses)
    pattern = max(patterns, key=lambda shape: (patterns[shape], shape), default="")
    return Diversity(
        sum(per_prompt) / len(per_prompt) if per_prompt else 1.0,
        _compute_share(everything),
        _compute_share(n_grams[2]),
        _compute_share(n_grams[3]),
        pattern,
        # a single prompt has no pattern in common with others
        patterns[pattern] / len(groups) if len(groups) > 1 and pattern else 0.0,
    )


def _list_words(text: str) -> list[str]:
    """Return the words of a text in lower case; each character of a script without spaces is one."""
    return _WORD.findall(text.lower())


def _compute_share(counts: Counter[str] | Counter[tuple[str, ...]]) -> float:
    """Return the fraction of different items; 1 for none."""
    return len(counts) / total if (total := counts.total()) else 1.0


def select_groups(num_groups: int, group_size: int, limit: int) -> Iterable[int]:
    """Return indexes of groups at equal distances whose responses are at most so many; at least two groups, if there are."""
    count = min(num_groups, max(2, limit // group_size))
    return [index * num_groups // count for index in range(count)]
