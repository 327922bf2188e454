"""The order in which samples are drawn: a function of (seed, epoch) alone, so a run resumes by counting samples."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np


def epoch_order(num_samples: int, *, seed: int, epoch: int, shuffle: bool) -> np.ndarray:
    """[num_samples] int64: dataset indices in the order of this epoch; the same on every machine and numpy version."""
    if not shuffle:
        return np.arange(num_samples)
    # RandomState, because numpy promises never to change its stream.
    bits = np.random.MT19937(np.random.SeedSequence([seed, epoch]))
    return np.random.RandomState(bits).permutation(num_samples)


class BatchSampler:
    """Endless batches of dataset indices, the same on every rank; each rank takes its slice.

    Epochs follow each other, each in its own order and seen whole: a batch at the end of one is filled from the next.

    Raises:
        ValueError: the dataset is empty.
    """

    def __init__(self, num_samples: int, *, seed: int = 1234, shuffle: bool = True) -> None:
        if num_samples < 1:
            raise ValueError("the dataset holds no samples (were all of them filtered out?)")
        self.num_samples = num_samples
        self.seed = seed
        self.shuffle = shuffle

    def batches(self, start_sample: int, batch_size: int) -> Iterator[list[int]]:
        """Yields batches for ever, starting after `start_sample` consumed samples (counted over all epochs).

        A resumed run yields what the uninterrupted one would have: batches(k * b, b) continues batches(0, b) after k batches.
        """
        if batch_size < 1:
            raise ValueError(f"batch size must be at least 1, not {batch_size}")
        if start_sample < 0:
            raise ValueError(f"consumed samples must not be negative, not {start_sample}")
        epoch, position = divmod(start_sample, self.num_samples)
        order = epoch_order(self.num_samples, seed=self.seed, epoch=epoch, shuffle=self.shuffle)
        while True:
            batch: list[int] = []
            # a batch may span several epochs where the dataset is smaller than it
            while len(batch) < batch_size:
                if position == self.num_samples:
                    epoch, position = epoch + 1, 0
                    order = epoch_order(self.num_samples, seed=self.seed, epoch=epoch, shuffle=self.shuffle)
                take = order[position : position + batch_size - len(batch)]
                batch.extend(take.tolist())
                position += len(take)
            yield batch
