"""Datasets of supervised, preference and process reward training, read by memory map, and the order of their samples."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TypedDict, TypeVar

import numpy as np

from mindspeed_rl.data.images import ImageRules, StoredImage, StoredImages, VideoPart, read_image
from mindspeed_rl.data.indexed import IGNORE_INDEX, SAMPLE_LENGTHS, UNPAIRED_COLUMNS, IndexedColumns, is_paired
from mindspeed_rl.files import read_json


class _WithImages(TypedDict, total=False):
    images: tuple[StoredImage | VideoPart, ...]


_Sample = TypeVar("_Sample", bound=_WithImages)


def _with_images(sample: _Sample, images: _WithImages) -> _Sample:
    """Return a sample with the images of its row, where the model reads them."""
    if "images" in images:
        sample["images"] = images["images"]
    return sample


class StoredLogProbs:
    """Most probable tokens of a teacher for supervised data: `<prefix>_teacher.bin` and, written last, `<prefix>_teacher.json`.

    For each row all predicted tokens, each with k ids (int32) and then k log-probs (float32), in falling order.

    Attributes:
        metadata: metadata about the teacher and the data, as written.
    """

    def __init__(self, prefix: str | Path) -> None:
        """Map the file.

        Raises:
            ValueError: it does not exist or is not complete.
        """
        self._prefix, (data, index) = str(prefix), self.files(prefix)
        if not index.is_file():
            raise ValueError(
                f"sft_loss_type: there are no log-probs of a teacher for {prefix} ({index.name}); write them with "
                "`mindspeed-rl teacher-log-probs`"
            )
        self.metadata: dict[str, Any] = read_json(index)
        lengths, k = self.metadata.get("lengths", [None]), self.metadata.get("topk", 0)
        counts = [*lengths, k] if isinstance(lengths, list) else [None]
        if any(type(count) is not int or not 0 <= count < 1 << 31 for count in counts):
            raise ValueError(f"sft_loss_type: {index} has no 'lengths' and 'topk' that are numbers of tokens; write it again")
        self._offsets = np.cumsum([0, *lengths])
        if data.stat().st_size != self._offsets[-1] * self.record(k).itemsize:
            raise ValueError(f"sft_loss_type: {data} has another size than {index.name} says; write it again")
        self._records = np.memmap(data, dtype=self.record(k), mode="r") if self._offsets[-1] else np.empty(0, self.record(k))

    @property
    def num_rows(self) -> int:
        """Rows that it has."""
        return len(self._offsets) - 1

    @staticmethod
    def files(prefix: str | Path) -> tuple[Path, Path]:
        """Return the paths of data and index."""
        start = Path(prefix).expanduser()
        return start.with_name(f"{start.name}_teacher.bin"), start.with_name(f"{start.name}_teacher.json")

    @staticmethod
    def record(k: int) -> np.dtype[Any]:
        """Return the type of one token."""
        return np.dtype([("ids", "<i4", (k,)), ("log_probs", "<f4", (k,))])

    def row(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Return ids [tokens, k] int64 and log-probs [tokens, k] float32 of a row."""
        records = self._records[self._offsets[index] : self._offsets[index + 1]]
        return records["ids"].astype(np.int64), records["log_probs"].astype(np.float32)


class _WithTeacher(TypedDict, total=False):
    teacher: tuple[np.ndarray, np.ndarray]


class InstructionSample(_WithImages, _WithTeacher):
    """One row of supervised tuning.

    input_ids, labels: [tokens] int64, padding cut off; labels are unshifted, IGNORE_INDEX where nothing is learnt.
    sample_lengths: [samples] int64, the lengths of the samples in a pack; they add up to `tokens`. One entry for a plain row.
    images: images of all samples, in the order of their tokens; for a model of images.
    teacher: ids and log-probs of `StoredLogProbs`, where the loss reads them.
    """

    input_ids: np.ndarray
    labels: np.ndarray
    sample_lengths: np.ndarray


class InstructionDataset:
    """Rows of `<prefix>_packed_{input_ids,attention_mask,labels}_document`.

    The ends of a pack's samples are read from the attention mask of a neat pack (1,1,2,2,...,0); the ends in a plain pack, with
    `splits_packs`, from its column `sample_lengths`. A row that is not a pack is one sample either way.

    Args:
        prefix: the --output-prefix of preprocessing.
        seq_length: rows longer than this are cut at the end when read; None reads full rows.
        splits_packs: keep the samples of a plain pack separate; `check_sample_lengths` has passed.
        pad_id: trailing tokens of this id without a label are padding and cut off; None keeps them.
        image_rules: image rules of the model; None for a model of text.
        teacher: log-probs that rows get.

    Raises:
        ValueError: see `IndexedColumns`.
    """

    def __init__(
        self,
        prefix: str | Path,
        *,
        seq_length: int | None = None,
        pad_id: int | None = None,
        splits_packs: bool = False,
        image_rules: ImageRules | None = None,
        teacher: StoredLogProbs | None = None,
    ) -> None:
        self._teacher = teacher
        columns = ("input_ids", "attention_mask", "labels")
        self._rows = IndexedColumns(prefix, columns, same_length=[columns])
        self._seq_length = seq_length
        self._pad_id = pad_id
        self._splits_packs = splits_packs
        self._images = None if image_rules is None else StoredImages.open(prefix, image_rules, self._rows)
        #: [rows] int32: stored tokens per row, padding included, without reading the rows
        self.lengths = self._rows.lengths("input_ids")

    def __len__(self) -> int:
        return len(self._rows)

    def count_cut(self, indexes: Iterable[int]) -> tuple[int, int]:
        """Count the rows that seq_length cuts, and the ones of these that have no label left.

        Args:
            indexes: indexes of the rows.
        """
        num_cut = num_without_label = 0
        limit = np.iinfo(np.int64).max if self._seq_length is None else self._seq_length
        for index in indexes:
            if self.lengths[index] > limit:
                _, labels, _, end = self._read(index)
                num_cut += end > limit  # what is cut may be padding
                num_without_label += end > limit and not (labels[1:limit] != IGNORE_INDEX).any()
        return num_cut, num_without_label

    def _read(self, index: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:
        """Return input_ids, labels and attention mask of a row, and the end of what is not padding."""
        input_ids = self._rows.row(index, "input_ids").astype(np.int64)
        labels = self._rows.row(index, "labels").astype(np.int64)
        mask = self._rows.row(index, "attention_mask")
        is_used = mask != 0
        if mask[-1] == 1:
            is_used &= (labels != IGNORE_INDEX) | (input_ids != self._pad_id)
        used = np.flatnonzero(is_used)
        return input_ids, labels, mask, int(used[-1]) + 1 if len(used) else 0

    def __getitem__(self, index: int) -> InstructionSample:
        input_ids, labels, mask, end = self._read(index)
        # a neat pack ends in padding (0) or in the index of its last sample; one sample that fills the row is not a pack at all
        is_neat = mask[-1] != 1
        if self._seq_length is not None:
            end = min(end, self._seq_length)
        input_ids, labels, mask = input_ids[:end], labels[:end], mask[:end]
        if is_neat:
            ends = np.append(np.flatnonzero(np.diff(mask)) + 1, end)
        elif self._splits_packs and SAMPLE_LENGTHS in self._rows.columns:
            ends = np.cumsum(self._rows.row(index, SAMPLE_LENGTHS))
            ends = np.append(ends[ends < end], end)
        else:
            ends = np.array([end])
        sample_lengths = np.diff(ends, prepend=0).astype(np.int64)
        sample = InstructionSample(input_ids=input_ids, labels=labels, sample_lengths=sample_lengths)
        if self._images is not None:
            sample["images"] = self._images.parts(index)
        if self._teacher is not None:
            sample["teacher"] = self._teacher.row(index)
        return sample


class PreferencePair(_WithImages):
    """One pair; each array is [tokens] int64. Labels are unshifted and hold IGNORE_INDEX on the full prompt.

    images: images of the prompt, in the order of their tokens; for a model of images.
    """

    chosen_input_ids: np.ndarray
    chosen_labels: np.ndarray
    rejected_input_ids: np.ndarray
    rejected_labels: np.ndarray


class _ShortRows:
    """Rows with at most `seq_length` tokens; None keeps all. `num_too_long` counts the others."""

    def __init__(
        self, rows: IndexedColumns, lengths: np.ndarray, seq_length: int | None, images: StoredImages | None = None
    ) -> None:
        self._rows, self._images = rows, images
        limit = np.iinfo(np.int32).max if seq_length is None else seq_length
        self._row_indices = np.flatnonzero(lengths <= limit)
        self.num_too_long = len(lengths) - len(self._row_indices)

    def __len__(self) -> int:
        return len(self._row_indices)

    def column(self, index: int, name: str) -> np.ndarray:
        """Return a column of a row that is left, [tokens] int64."""
        return self._rows.row(int(self._row_indices[index]), name).astype(np.int64)

    def images(self, index: int) -> _WithImages:
        """Return the images of a row that is left, by the key of a sample; empty for a model of text."""
        return {} if self._images is None else {"images": self._images.parts(int(self._row_indices[index]))}


class PreferenceDataset(_ShortRows):
    """Rows of `<prefix>_packed_{chosen,rejected}_{input_ids,labels}_document`.

    Args:
        prefix: the --output-prefix of preprocessing.
        seq_length: pairs with a longer sample are left out; `num_too_long` counts them. None keeps all.
        image_rules: image rules of the model; None for a model of text.
    """

    def __init__(self, prefix: str | Path, *, seq_length: int | None = None, image_rules: ImageRules | None = None) -> None:
        sides = [(f"{side}_input_ids", f"{side}_labels") for side in ("chosen", "rejected")]
        rows = IndexedColumns(prefix, [name for pair in sides for name in pair], same_length=sides)
        images = None if image_rules is None else StoredImages.open(prefix, image_rules, rows)
        lengths = np.maximum(rows.lengths("chosen_input_ids"), rows.lengths("rejected_input_ids"))
        super().__init__(rows, lengths, seq_length, images)

    def __getitem__(self, index: int) -> PreferencePair:
        pair = PreferencePair(
            chosen_input_ids=self.column(index, "chosen_input_ids"),
            chosen_labels=self.column(index, "chosen_labels"),
            rejected_input_ids=self.column(index, "rejected_input_ids"),
            rejected_labels=self.column(index, "rejected_labels"),
        )
        return _with_images(pair, self.images(index))


class JudgedAnswer(_WithImages):
    """One answer, judged by itself; arrays are [tokens] int64, labels and images as in `PreferencePair`.

    desirable: bool.
    mismatched_input_ids, mismatched_labels: the same prompt with the answer to another one, cut at seq_length.
    """

    input_ids: np.ndarray
    labels: np.ndarray
    desirable: bool
    mismatched_input_ids: np.ndarray
    mismatched_labels: np.ndarray


class UnpairedDataset:
    """Rows of `<prefix>_packed_{input_ids,labels,desirable}_document`, or both answers of each pair of a preference dataset.

    Args:
        prefix: the --output-prefix of preprocessing.
        seq_length: longer answers (of pairs: pairs with one) are left out; `num_too_long` counts them. None keeps all.
        seed: seed for the order in which answers are lent to other prompts.
        image_rules: image rules of the model; None for a model of text.
    """

    def __init__(
        self,
        prefix: str | Path,
        *,
        seq_length: int | None = None,
        seed: int = 1234,
        image_rules: ImageRules | None = None,
    ) -> None:
        self._pairs: PreferenceDataset | None = None
        self._seq_length = seq_length
        if is_paired(prefix):
            self._pairs = PreferenceDataset(prefix, seq_length=seq_length, image_rules=image_rules)
            self.num_too_long, size = 2 * self._pairs.num_too_long, 2 * len(self._pairs)
        else:
            rows = IndexedColumns(prefix, UNPAIRED_COLUMNS, same_length=[UNPAIRED_COLUMNS[:2]])
            images = None if image_rules is None else StoredImages.open(prefix, image_rules, rows)
            self._singles = _ShortRows(rows, rows.lengths("input_ids"), seq_length, images)
            self.num_too_long, size = self._singles.num_too_long, len(self._singles)
        self._order = BatchSampler(size, seed=seed).permute(0) if size else np.empty(0, np.int64)
        self._places = np.argsort(self._order)

    def __len__(self) -> int:
        return len(self._order)

    def _read(self, index: int) -> tuple[np.ndarray, np.ndarray, bool, int]:
        """Return input_ids, labels, the judgement, and the number of tokens of the prompt."""
        if self._pairs is not None:
            pair = self._pairs[index // 2]
            ids, labels, is_desirable = pair["chosen_input_ids"], pair["chosen_labels"], True
            if index % 2:
                ids, labels, is_desirable = pair["rejected_input_ids"], pair["rejected_labels"], False
        else:
            ids, labels, judgement = (self._singles.column(index, name) for name in UNPAIRED_COLUMNS)
            is_desirable = bool(judgement[0])
        return ids, labels, is_desirable, int((labels != IGNORE_INDEX).argmax())

    def _read_images(self, index: int) -> _WithImages:
        return self._singles.images(index) if self._pairs is None else self._pairs.images(index // 2)

    def __getitem__(self, index: int) -> JudgedAnswer:
        ids, labels, is_desirable, first = self._read(index)
        images, place = self._read_images(index), int(self._places[index])
        # answers to the same prompt, such as the other one of a pair, are not a mismatch
        for step in range(1, len(self)):
            other = int(self._order[place - step])
            other_ids, other_labels, _, start = self._read(other)
            if not np.array_equal(other_ids[:start], ids[:first]) or not _are_equal(self._read_images(other), images):
                break
        else:
            raise ValueError("data_path: stage kto lends answers to other prompts, but all prompts of the data are equal.")
        answer = JudgedAnswer(
            input_ids=ids,
            labels=labels,
            desirable=is_desirable,
            mismatched_input_ids=np.concatenate([ids[:first], other_ids[start:]])[: self._seq_length],
            mismatched_labels=np.concatenate([labels[:first], other_labels[start:]])[: self._seq_length],
        )
        return _with_images(answer, images)


def _are_equal(first: _WithImages, second: _WithImages) -> bool:
    """Return True for equal images, which each row stores for itself."""
    pairs = [[image.reference for image in side.get("images", ())] for side in (first, second)]
    return [read_image(key) for key in pairs[0]] == [read_image(key) for key in pairs[1]]


class ProcessRewardSample(TypedDict):
    """One solution.

    input_ids, labels: [tokens] int64; the label at each placeholder is its reward token, IGNORE_INDEX elsewhere. The model's
    output at the placeholder itself is compared with it: unlike in language modelling, nothing is shifted.
    step_positions: [steps] int64, the positions of the placeholders.
    """

    input_ids: np.ndarray
    labels: np.ndarray
    step_positions: np.ndarray


class ProcessRewardDataset(_ShortRows):
    """Rows of `<prefix>_packed_{input_ids,labels}_document` that AlpacaStyleProcessRewardHandler wrote.

    Args:
        prefix: the --output-prefix of preprocessing.
        seq_length: longer samples are left out; `num_too_long` counts them. None keeps all.
    """

    def __init__(self, prefix: str | Path, *, seq_length: int | None = None) -> None:
        rows = IndexedColumns(prefix, ("input_ids", "labels"), same_length=[("input_ids", "labels")])
        super().__init__(rows, rows.lengths("input_ids"), seq_length)

    def __getitem__(self, index: int) -> ProcessRewardSample:
        labels = self.column(index, "labels")
        return ProcessRewardSample(
            input_ids=self.column(index, "input_ids"), labels=labels, step_positions=np.flatnonzero(labels != IGNORE_INDEX)
        )


class BatchSampler:
    """Endless batches of dataset indices, the same on every rank; each rank takes its slice.

    The order depends only on (seed, epoch), so a run resumes by counting samples. Every epoch has its own order and
    uses every sample: a batch at the end of one is filled from the next.

    Raises:
        ValueError: the dataset is empty.
    """

    def __init__(self, num_samples: int, *, seed: int = 1234, shuffle: bool = True) -> None:
        if num_samples < 1:
            raise ValueError("the dataset holds no samples (were all of them filtered out?)")
        self.num_samples = num_samples
        self.seed = seed
        self.shuffle = shuffle

    def permute(self, epoch: int) -> np.ndarray:
        """Return the dataset indices in the order of this epoch, [num_samples] int64; the same on every machine."""
        if not self.shuffle:
            return np.arange(self.num_samples)
        # RandomState, because numpy promises never to change its stream
        bits = np.random.MT19937(np.random.SeedSequence([self.seed, epoch]))
        return np.random.RandomState(bits).permutation(self.num_samples)

    def batches(self, start_sample: int, batch_size: int) -> Iterator[list[int]]:
        """Yield endless batches, starting after `start_sample` consumed samples (counted over all epochs).

        A resumed run yields what the uninterrupted one would have: batches(k * b, b) continues batches(0, b) after k batches.
        """
        if batch_size < 1:
            raise ValueError(f"batch size must be at least 1, not {batch_size}")
        if start_sample < 0:
            raise ValueError(f"consumed samples must not be negative, not {start_sample}")
        epoch, position = divmod(start_sample, self.num_samples)
        order = self.permute(epoch)
        while True:
            batch: list[int] = []
            # a batch may span several epochs where the dataset is smaller than it
            while len(batch) < batch_size:
                if position == self.num_samples:
                    epoch, position = epoch + 1, 0
                    order = self.permute(epoch)
                indices = order[position : position + batch_size - len(batch)]
                batch.extend(indices.tolist())
                position += len(indices)
            yield batch
