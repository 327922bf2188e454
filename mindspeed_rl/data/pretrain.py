"""Pretraining: megatron-core's GPTDataset and its blending over `<prefix>_<key>_document` files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from mindspeed_rl.data.indexed import megatron_import, read_index

if TYPE_CHECKING:
    from megatron.core.datasets.gpt_dataset import GPTDataset
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class PretrainData:
    """Settings of the datasets, named as in Megatron.

    data_path: one prefix, or prefixes, or weights and prefixes in turn (`0.3 a_text_document 0.7 b_text_document`).
    split: shares of train, valid and test, such as "99,1,0".
    eod_mask_loss, reset_position_ids, reset_attention_mask: effect of an end token on the loss, positions and mask after it.
    marks_documents: an item also holds `document_lengths`, the tokens of each document in it; they add up to [seq_length].
    """

    data_path: Sequence[str]
    seq_length: int
    split: str = "100,0,0"
    seed: int = 1234
    reset_position_ids: bool = False
    reset_attention_mask: bool = False
    eod_mask_loss: bool = False
    create_attention_mask: bool = False
    cache_dir: str | None = None
    marks_documents: bool = False


class _TokenizerAdapter:
    """Attributes of a tokenizer that GPTDataset reads. Without a vocab_size it reads the token type from the index."""

    vocab_size: int | None = None

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.eod: int = tokenizer.eos_token_id
        # GPTDataset trains no label that equals it, so it must be no token of a document: with the tokenizer's padding, which
        # is often the end token, no model would ever learn to end.
        self.pad: int = -1
        self.unique_identifiers = {"class": type(tokenizer).__name__, "path": tokenizer.name_or_path}


def blend(data_path: Sequence[str]) -> tuple[list[str], list[float] | None]:
    """Split `data_path` into (prefixes, weights); weights are None where none are given.

    Raises:
        ValueError: weights for some prefixes only, a weight that is not positive, or a prefix without files.
    """
    items = [str(item) for item in data_path]
    if not items:
        raise ValueError("data_path is empty; give <output-prefix>_text_document of preprocessing")

    def number(text: str) -> float | None:
        try:
            return float(text)
        except ValueError:
            return None

    weights: list[float] | None = None
    prefixes = items
    if number(items[0]) is not None:
        if len(items) % 2:
            raise ValueError(f"data_path={' '.join(items)!r} must give a weight before every prefix")
        weights_or_none = [number(text) for text in items[::2]]
        if any(weight is None or weight <= 0 for weight in weights_or_none):
            raise ValueError(f"data_path={' '.join(items)!r} must give a positive weight before every prefix")
        weights, prefixes = [weight for weight in weights_or_none if weight is not None], items[1::2]
    for prefix in prefixes:
        try:
            read_index(prefix)
        except ValueError as error:
            raise ValueError(f"data_path: {error}; for pretraining give the full prefix, with _text_document") from error
    return prefixes, weights


def build_pretrain_datasets(
    data: PretrainData,
    tokenizer: PreTrainedTokenizerBase,
    num_samples: tuple[int, int, int],
) -> tuple[GPTDataset | Any | None, ...]:
    """Return the (train, valid, test) datasets; a split without documents or samples is None.

    An item holds tokens, labels (shifted by one), loss_mask and position_ids, each [seq_length]. With torch.distributed
    running, every rank must call this: rank 0 builds the index files first.

    Args:
        num_samples: samples of train, valid and test; epochs repeat as often as needed.
    """
    prefixes, weights = blend(data.data_path)
    import torch

    with megatron_import():
        from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
        from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
    if len(prefixes) > 1 and data.cache_dir is not None and not torch.distributed.is_initialized():
        raise ValueError("a blend with a cache_dir needs torch.distributed to run (megatron-core asks for the rank)")

    class MarkedDataset(GPTDataset):
        """Megatron's dataset, with the lengths of the documents in an item, which it knows but does not return."""

        def __getitem__(self, idx: int | None) -> dict[str, torch.Tensor]:
            item = super().__getitem__(idx)
            place = self.shuffle_index[idx or 0]
            (first, offset), (last, end) = self.sample_index[place], self.sample_index[place + 1]
            # declared as an iterable of numbers
            documents: Any = self.dataset
            sizes = documents.sequence_lengths[self.document_index[first:last]].tolist()
            ends = np.cumsum([*sizes, int(end) + 1]) - int(offset)
            # the extra token is only a label
            ends = np.unique(ends[(ends > 0) & (ends < data.seq_length)])
            return item | {"document_lengths": torch.from_numpy(np.diff(ends, prepend=0, append=data.seq_length))}

    config = GPTDatasetConfig(
        random_seed=data.seed,
        sequence_length=data.seq_length,
        blend=(prefixes, weights),
        split=data.split,
        path_to_cache=data.cache_dir,
        tokenizer=_TokenizerAdapter(tokenizer),  # pyrefly: ignore[bad-argument-type]  (GPTDataset reads no other attribute)
        reset_position_ids=data.reset_position_ids,
        reset_attention_mask=data.reset_attention_mask,
        eod_mask_loss=data.eod_mask_loss,
        create_attention_mask=data.create_attention_mask,
    )
    kind = MarkedDataset if data.marks_documents else GPTDataset
    builder = BlendedMegatronDatasetBuilder(kind, list(num_samples), lambda: True, config)
    return tuple(builder.build())
