"""Lengths of GSM8K's training problems, which benchmarks draw their rows by."""

from __future__ import annotations

#: tokens of question and answer in GSM8K's 7,473 training problems: every 5 % of the distribution, then its last percents.
#: Words, digits and runs of punctuation count as tokens, which is close to what the Qwen2.5 tokenizer makes of them.
FIVE_PERCENTS = (64, 98, 110, 119, 128, 136, 143, 151, 158, 167, 175, 184, 193, 204, 216, 228, 242, 260, 287, 323)
QUANTILES = {number / 20: length for number, length in enumerate(FIVE_PERCENTS)} | {0.98: 369, 0.99: 406, 1.0: 566}
#: the answer's median share of those tokens
ANSWER_SHARE = 0.68


def length_at(place: float) -> int:
    """Tokens of the problem that this share of all problems is not longer than; linear between the known quantiles."""
    points = sorted(QUANTILES.items())
    for (low, first), (high, last) in zip(points, points[1:]):
        if place <= high:
            return round(first + (last - first) * (place - low) / (high - low))
    raise AssertionError(place)
