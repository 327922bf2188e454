"""Putting several samples into one row of a fixed length."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from mindspeed_rl.data.indexed import IGNORE_INDEX


def greedy_packs(lengths: Sequence[int] | np.ndarray, capacity: int) -> list[list[int]]:
    """Returns packs of sample indices: each pack takes the longest sample that still fits, again and again.

    Samples of one length go in order of their index. Time is close to linear in the number of samples.

    Raises:
        ValueError: a sample is longer than the capacity.
    """
    waiting: dict[int, list[int]] = defaultdict(list)
    for index, length in enumerate(np.asarray(lengths).tolist()):
        if length > capacity:
            raise ValueError(f"sample {index} has {length} tokens, more than the capacity {capacity}")
        waiting[length].append(index)
    for indices in waiting.values():
        # samples are popped from the end, which so is the lowest index
        indices.reverse()

    # largest[n]: the greatest length <= n that still has samples, by path halving; 0 when there is none.
    largest = list(range(capacity + 1))
    for length in range(1, capacity + 1):
        if length not in waiting:
            largest[length] = length - 1

    def find(length: int) -> int:
        while largest[length] != length:
            largest[length] = largest[largest[length]]
            length = largest[length]
        return length

    # empty samples get packs of their own, because length 0 means below that nothing is left
    packs: list[list[int]] = [[index] for index in reversed(waiting.pop(0, []))]
    while True:
        length = find(capacity)
        if length == 0:
            return packs
        pack = []
        room = capacity
        while length:
            pack.append(waiting[length].pop())
            if not waiting[length]:
                largest[length] = length - 1
            room -= length
            length = find(room)
        packs.append(pack)


def pack_row(
    samples: Sequence[tuple[np.ndarray, np.ndarray]], seq_length: int, *, pad_id: int, neat: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns ([seq_length] input_ids, attention_mask, labels), int32.

    The attention mask of a neat pack holds 1 on the first sample, 2 on the second ... and 0 on padding; otherwise 1 everywhere.
    """
    input_ids = np.full(seq_length, pad_id, dtype=np.int32)
    labels = np.full(seq_length, IGNORE_INDEX, dtype=np.int32)
    attention_mask = np.zeros(seq_length, dtype=np.int32) if neat else np.ones(seq_length, dtype=np.int32)
    at = 0
    for number, (sample_ids, sample_labels) in enumerate(samples, start=1):
        end = at + len(sample_ids)
        input_ids[at:end] = sample_ids
        labels[at:end] = sample_labels
        if neat:
            attention_mask[at:end] = number
        at = end
    return input_ids, attention_mask, labels
