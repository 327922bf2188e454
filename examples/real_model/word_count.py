"""The reward of the example: the sentence has as many words as asked for. Imported by the run and by compare.py."""

from __future__ import annotations

from mindspeed_rl.rewards import register


@register("word_count")
def word_count(response: str, label: str) -> float:
    """Return 1.0 for a sentence of `label` words with a full stop, else 0.5 less 0.1 a word too many or too few."""
    text = response.strip()
    distance = abs(len(text.split()) - int(label))
    return 1.0 if distance == 0 and text.endswith(".") else max(0.0, 0.5 - 0.1 * distance)
