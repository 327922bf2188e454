"""The interface between a supervised stage and the worker that trains it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

from mindspeed_rl import registry
from mindspeed_rl.algorithms.interfaces import LossInputs, LossOutput
from mindspeed_rl.config import BatchPlan, MegatronConfig
from mindspeed_rl.config.keys.megatron import split_shares
from mindspeed_rl.data.samplers import BatchSampler
from mindspeed_rl.engine.batching import Rows
from mindspeed_rl.workers.stages import STAGES
from mindspeed_rl.workers.update_plan import split_rows

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Dataset(Protocol):
    """Items by number."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Any: ...


class Part:
    """The items `first` ... `end` - 1 of a dataset."""

    def __init__(self, dataset: Dataset, first: int, end: int) -> None:
        self._dataset, self._first, self._end = dataset, first, end

    def __len__(self) -> int:
        return self._end - self._first

    def __getitem__(self, index: int) -> Any:
        if not 0 <= index < len(self):
            raise IndexError(index)
        return self._dataset[self._first + index]


def parts(dataset: Dataset, split: str | None) -> tuple[Part, Part]:
    """The items for training and for evaluation: consecutive parts with the first two shares of `split`, such as "95,5,0".

    Raises:
        ValueError: the shares are not up to three numbers that are not negative.
    """
    shares = split_shares(split)
    # sums are rounded, not shares: no item is lost between two parts
    ends = [round(len(dataset) * sum(shares[: number + 1])) for number in range(2)]
    return Part(dataset, 0, ends[0]), Part(dataset, ends[0], ends[1])


class Stage(ABC):
    """What is special about a stage.

    Attributes:
        head: what the model ends in.
        unit: what an item of the dataset is, for messages.
        needs_reference: True when rows need the log-probs of a reference model.
        packed: True when samples must lie in one micro-batch without padding.
        choices: token ids the head's distribution is restricted to; None for the whole vocabulary.
        num_too_long: items left out of the data that was opened because they exceed seq_length.
    """

    head: ClassVar[Literal["lm", "reward"]] = "lm"
    unit: ClassVar[str] = "samples"
    needs_reference: ClassVar[bool] = False
    packed: bool = False
    choices: tuple[int, ...] | None = None

    def __init__(self, config: MegatronConfig, tokenizer: PreTrainedTokenizerBase) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self.num_too_long = 0

    @abstractmethod
    def open(self, prefix: str | Path) -> Dataset:
        """The dataset with this prefix."""

    @abstractmethod
    def rows(self, items: Sequence[Any]) -> Rows:
        """What the engine computes for these items."""

    @abstractmethod
    def loss(self, inputs: LossInputs) -> LossOutput:
        """The loss of a micro-batch."""

    def num_tokens(self, item: Any) -> int:
        """Tokens that the engine computes for an item."""
        return sum(self.rows([item]).lengths)

    def datasets(self, plan: BatchPlan) -> tuple[Dataset, Dataset | None]:
        """The items to train on and those to evaluate on, if any. Collective over the workers."""
        if not isinstance(self.config.data_path, str):
            raise ValueError(f"data_path: {self.config.data_path!r} must be one prefix; only stage pretrain blends datasets.")
        train, held_out = parts(self.open(self.config.data_path), self.config.split)
        if self.config.eval_data_path is not None:
            held_out = self.open(self.config.eval_data_path)
        return train, held_out if len(held_out) else None

    def order(self, num_items: int, plan: BatchPlan, start: int) -> Iterator[list[int]]:
        """Global batches of item numbers for ever, starting after `start` consumed items."""
        config, epochs = self.config, 1
        if config.full_shuffle_instruction_dataset:
            epochs = max(1, -(-(plan.train_iters or 0) * plan.num_samples // num_items))
        sampler = BatchSampler(num_items * epochs, seed=config.seed, shuffle=not config.no_shuffle)
        for batch in sampler.batches(start, plan.num_samples):
            yield [number % num_items for number in batch]


def make_stage(config: MegatronConfig, tokenizer: PreTrainedTokenizerBase) -> Stage:
    """The stage that the run file names."""
    assert config.stage is not None  # a run file that trains without rollouts names one
    return registry.load(STAGES[config.stage], f"stage {config.stage}")(config, tokenizer)


def shares(
    batches: Iterator[list[int]],
    dataset: Dataset,
    num_ranks: int,
    rank: int,
    num_tokens: Callable[[Any], int] | None = None,
) -> Iterator[list[Any]]:
    """This data-parallel rank's items of each global batch.

    Args:
        num_tokens: of an item; ranks then get equally many items with about the same tokens, and read the whole batch for it.
    """
    for batch in batches:
        if num_tokens is None or num_ranks == 1:
            yield [dataset[number] for number in split_rows(batch, num_ranks, rank)]
        else:
            items = [dataset[number] for number in batch]
            mine = split_rows(range(len(items)), num_ranks, rank, [num_tokens(item) for item in items])
            yield [items[position] for position in mine]
