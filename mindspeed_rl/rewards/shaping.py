"""Scorers that shape rewards by length and repetition. All lengths are tokens of the response."""

from __future__ import annotations

import math
import re

from mindspeed_rl.rewards.math_scores import accuracy
from mindspeed_rl.rewards.samples import RewardSettings

# Scripts without blanks between words, where each character counts as a word: Thai to Lao, Burmese, Khmer, kana and CJK with
# its extensions, full width forms.
_UNSPACED = (
    r"\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3000-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\uff00-\uffef"
    r"\U00020000-\U0003ffff"
)
_WORD = re.compile(rf"[{_UNSPACED}]|[^\s{_UNSPACED}]+")


def cosine(response: str, solution: object, response_ids: list[int], settings: RewardSettings, prompt: str = "") -> float:
    """Interpolate by length: long right answers are worth less than short ones, long wrong answers more.

    v_max + (v_min - v_max) / 2 * (1 + cos(pi * min(n, N) / N)), arXiv:2502.03373; N is `cosine_max_len`, by default the
    generation limit. Longer responses count as N (the plain formula would rise again).
    """
    limit = settings.cosine_max_len or settings.max_tokens
    if accuracy(response, solution, prompt) >= 1.0:
        value_at_0, value_at_n = settings.cosine_min_len_value_correct, settings.cosine_max_len_value_correct
    else:
        value_at_0, value_at_n = settings.cosine_min_len_value_wrong, settings.cosine_max_len_value_wrong
    fraction = min(len(response_ids), limit) / limit
    return value_at_n + (value_at_0 - value_at_n) / 2 * (1 + math.cos(math.pi * fraction))


def repetition(response: str, settings: RewardSettings) -> float:
    """Return `repetition_max_penalty` times the fraction of n-grams that occurred before; 0.0 below n words.

    Words are runs without blanks, lower case; in scripts without blanks (Chinese, Japanese, Thai) characters. arXiv:2502.03373.
    """
    size = settings.repetition_n_grams
    words = _WORD.findall(response.lower())
    grams = [tuple(words[start : start + size]) for start in range(len(words) - size + 1)]
    if not grams:
        return 0.0
    return settings.repetition_max_penalty * (1 - len(set(grams)) / len(grams))


def soft_overlong(response_ids: list[int], settings: RewardSettings) -> float:
    """Return 0 up to L - C tokens, then linear to -1 at L, and -1 beyond: DAPO eq. 13, arXiv:2503.14476.

    L is `soft_max_length`, by default the generation limit; C is `soft_cache_length`.
    """
    if settings.soft_cache_length is None:
        raise ValueError("soft_overlong needs soft_cache_length, the number of tokens over which the penalty grows")
    limit = settings.soft_max_length or settings.max_tokens
    exceed = len(response_ids) - (limit - settings.soft_cache_length)
    return max(-1.0, min(0.0, -exceed / settings.soft_cache_length))


def length(response_ids: list[int], settings: RewardSettings) -> float:
    """Return 1.0 for an empty response, linear to 0.0 at the generation limit; a negative weight rewards length."""
    return 1.0 - min(len(response_ids), settings.max_tokens) / settings.max_tokens
