"""Stage pretrain: the mean negative log-prob of every next token, over samples cut from blended documents."""

from __future__ import annotations

import pickle
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from mindspeed_rl.config import MegatronConfig
from mindspeed_rl.data.pretrain import PretrainData, build_pretrain_datasets
from mindspeed_rl.engine.batching import Rows
from mindspeed_rl.run.batch_sizes import BatchPlan
from mindspeed_rl.workers.stages.instruction import check_resets
from mindspeed_rl.workers.stages.stage import Stage

if TYPE_CHECKING:
    from _typeshed import SupportsLenAndGetItem
    from transformers import PreTrainedTokenizerBase

    _Samples = SupportsLenAndGetItem[Mapping[str, Tensor]]


class Pretraining(Stage[Mapping[str, Tensor]]):
    """Next-token prediction. With `reset_attention_mask` the documents of a sample see only themselves.

    The samples and their order depend on data_path, split, seq_length, seed, train_iters and global_batch_size.
    """

    def __init__(self, config: MegatronConfig, tokenizer: PreTrainedTokenizerBase) -> None:
        super().__init__(config, tokenizer)
        self.packed = config.reset_attention_mask
        check_resets(config.reset_position_ids, config.reset_attention_mask)
        if config.seq_length is None:
            raise ValueError("seq_length: not set; stage pretrain cuts documents into samples of this many tokens.")
        self._seq_length = config.seq_length

    def datasets(self, plan: BatchPlan) -> tuple[_Samples, _Samples | None]:
        config = self.config
        if config.data_path is None:
            raise ValueError("data_path: not set; give a prefix, or weights and prefixes in turn.")
        num_train = (plan.train_iters or 0) * plan.num_samples
        num_evaluated = config.eval_iters * plan.num_samples
        paths = config.data_path if isinstance(config.data_path, list) else [config.data_path]
        if config.eval_data_path is None:
            train, held_out, _ = self._build(paths, config.split or "100,0,0", (num_train, num_evaluated, 0))
        else:
            train = self._build(paths, "100,0,0", (num_train, 0, 0))[0]
            held_out = self._build([config.eval_data_path], "100,0,0", (num_evaluated, 0, 0))[0]
        if train is None or not len(train):
            raise ValueError(f"data_path: {' '.join(map(str, paths))} gives no sample of {config.seq_length} tokens.")
        return train, held_out

    def _build(self, paths: Sequence[str | float], split: str, counts: tuple[int, int, int]) -> tuple[_Samples | None, ...]:
        prefixes, marks = [str(path) for path in paths], self.config.reset_attention_mask
        data = PretrainData(prefixes, self._seq_length, split, seed=self.config.seed, marks_documents=marks)
        return build_pretrain_datasets(data, self.tokenizer, counts)

    def describe_order(self, items: _Samples, plan: BatchPlan) -> list[int]:
        """See `Stage`; the first samples stand for all, since a longer run may only add some after the others."""
        return [zlib.crc32(pickle.dumps([items[index] for index in range(min(16, len(items)))]))]

    def order(self, num_items: int, plan: BatchPlan, start: int) -> Iterator[list[int]]:
        """Yield samples in the dataset's own order, which is shuffled already."""
        while True:
            yield [index % num_items for index in range(start, start + plan.num_samples)]
            start += plan.num_samples

    def rows(self, items: Sequence[Mapping[str, Tensor]]) -> Rows:
        input_ids, targets, masks, group_sizes = [], [], [], []
        for item in items:
            tokens, labels, mask = (item[name].to(torch.int64) for name in ("tokens", "labels", "loss_mask"))
            # a document may contain end tokens, or have none: what counts is where it was stored
            lengths = item["document_lengths"].tolist() if self.config.reset_attention_mask else [len(tokens)]
            ends = np.cumsum(lengths).tolist()
            for first, end in zip([0, *ends], ends):
                input_ids.append(tokens[first:end])
                targets.append(labels[first:end])
                masks.append(mask[first:end].bool())
            group_sizes.append(len(ends))
        return Rows(input_ids, [1] * len(input_ids), {"loss_mask": masks}, targets, group_sizes)
