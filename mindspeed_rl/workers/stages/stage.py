"""The interface between a supervised stage and the worker that trains it."""

from __future__ import annotations

import pickle
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Generic, Literal, TypeVar, cast

import numpy as np
import torch
from torch.utils import data

from mindspeed_rl.algorithms.interfaces import LossInputs, LossOutput
from mindspeed_rl.config import MegatronConfig
from mindspeed_rl.config.keys.megatron import read_split
from mindspeed_rl.data.datasets import BatchSampler
from mindspeed_rl.data.images import ImageRules
from mindspeed_rl.engine.batching import Rows
from mindspeed_rl.engine.head_outputs import HeadOutputs
from mindspeed_rl.run.batch_sizes import BatchPlan
from mindspeed_rl.workers.update_plan import split_rows

if TYPE_CHECKING:
    from _typeshed import SupportsLenAndGetItem
    from transformers import PreTrainedTokenizerBase

_Item = TypeVar("_Item")


class Stage(ABC, Generic[_Item]):
    """The data, the rows and the loss of a stage.

    Attributes:
        head: last layer of the model.
        unit: an item of the dataset, for messages.
        needs_ref: True when rows need the log-probs of a reference model.
        packed: True when samples must be in one micro-batch without padding.
        num_too_long: items that were left out of the opened data because they exceed seq_length.
        image_rules: image rules of a model with images; set before the data are opened.
        outputs: results of the head that the loss gets.
    """

    head: ClassVar[Literal["lm", "reward"]] = "lm"
    unit: ClassVar[str] = "samples"
    needs_ref: ClassVar[bool] = False
    packed: bool = False
    image_rules: ImageRules | None = None
    outputs = HeadOutputs()

    def __init__(self, config: MegatronConfig, tokenizer: PreTrainedTokenizerBase) -> None:
        self.config, self.tokenizer = config, tokenizer
        self.num_too_long = 0

    def open(self, prefix: str | Path) -> SupportsLenAndGetItem[_Item]:
        """Open the dataset with this prefix; called only by `datasets`."""
        raise NotImplementedError

    @abstractmethod
    def rows(self, items: Sequence[_Item]) -> Rows:
        """Return the rows that the engine computes for these items."""

    def loss(self, inputs: LossInputs) -> LossOutput:
        """Return the loss of a micro-batch: unless a stage has another, -log p summed over the tokens of `loss_mask`.

        With `sft_loss_type: dft` each token is weighted by sg[p] (dynamic fine-tuning, arXiv:2508.05629): this gives the
        gradient of p, not of log p.
        """
        mask = inputs.columns["loss_mask"] & inputs.mask
        log_probs = torch.where(mask, inputs.outputs[0], 0.0)
        losses = -log_probs if self.config.sft_loss_type == "nll" else -log_probs.detach().exp() * log_probs
        return LossOutput(losses.sum(), mask.sum())

    def mismatched_rows(self, items: Sequence[_Item]) -> Rows | None:
        """Return prompts with answers to other prompts, whose log-ratios to the reference are the loss's KL; None without."""
        return None

    def num_tokens(self, item: _Item) -> int:
        """Return the tokens that the engine computes for an item."""
        return sum(self.rows([item]).lengths)

    def datasets(self, plan: BatchPlan) -> tuple[SupportsLenAndGetItem[_Item], SupportsLenAndGetItem[_Item] | None]:
        """Open the items for training and those for evaluation, if any; collective over the workers.

        Both are consecutive slices with the first two shares of `split`, such as "95,5,0", where evaluation has no data of its
        own.

        Raises:
            ValueError: data_path is not one prefix, or the shares are not up to three numbers that are not negative.
        """
        config = self.config
        if not isinstance(config.data_path, str):
            raise ValueError(f"data_path: {config.data_path!r} must be one prefix; only stage pretrain blends datasets.")
        dataset, shares = self.open(config.data_path), read_split(config.split)
        # sums are rounded, not shares: no item is lost between two slices
        first, second = (round(len(dataset) * sum(shares[:count])) for count in (1, 2))
        # a dataset by its methods, not by its class
        items = cast("data.Dataset[_Item]", dataset)
        held_out: SupportsLenAndGetItem[_Item] = data.Subset(items, range(first, second))
        if config.eval_data_path is not None:
            held_out = self.open(config.eval_data_path)
        return data.Subset(items, range(first)), held_out if len(held_out) else None

    def count_cut(self, items: SupportsLenAndGetItem[_Item]) -> tuple[int, int]:
        """Return the number of items that seq_length cuts, and of those without any label left."""
        return 0, 0

    def describe_order(self, items: SupportsLenAndGetItem[_Item], plan: BatchPlan) -> list[int]:
        """Return numbers that differ for other items or another order: size of a pass, a sum over some, seed, shuffling."""
        some = [items[int(index)] for index in np.linspace(0, len(items) - 1, min(16, len(items)))]
        size = len(items) * self._epochs_of_pass(len(items), plan)
        return [size, zlib.crc32(pickle.dumps(some)), self.config.seed, int(self.config.no_shuffle)]

    def _epochs_of_pass(self, num_items: int, plan: BatchPlan) -> int:
        if not self.config.full_shuffle_instruction_dataset:
            return 1
        return max(1, -(-(plan.train_iters or 0) * plan.num_samples // num_items))

    def order(self, num_items: int, plan: BatchPlan, start: int) -> Iterator[list[int]]:
        """Yield global batches of item indexes without end, after `start` consumed items."""
        size = num_items * self._epochs_of_pass(num_items, plan)
        sampler = BatchSampler(size, seed=self.config.seed, shuffle=not self.config.no_shuffle)
        for batch in sampler.batches(start, plan.num_samples):
            yield [index % num_items for index in batch]


def split_batches(
    batches: Iterator[list[int]],
    dataset: SupportsLenAndGetItem[_Item],
    num_ranks: int,
    rank: int,
    num_tokens: Callable[[_Item], int] | None = None,
) -> Iterator[list[_Item]]:
    """Yield this data-parallel rank's items of each global batch.

    Args:
        batches: indexes of the items.
        dataset: dataset of the items.
        num_ranks: data-parallel ranks.
        rank: index of this one.
        num_tokens: number of tokens of an item; ranks then get equally many items with about the same tokens, and read all of
            the batch for it.
    """
    for batch in batches:
        if num_tokens is None or num_ranks == 1:
            yield [dataset[index] for index in split_rows(batch, num_ranks, rank)]
        else:
            items = [dataset[index] for index in batch]
            mine = split_rows(range(len(items)), num_ranks, rank, [num_tokens(item) for item in items])
            yield [items[position] for position in mine]
