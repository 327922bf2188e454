"""Micro-batches: each response token is predicted once, from the token before it, whatever the layout."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from tiny_vision import NoiseImage

from mindspeed_rl.engine.batching import (
    BatchShape,
    MicroBatch,
    MicroBatching,
    Rows,
    _count_common,
    _split_micro_batches,
    build_micro_batch,
    measure_size,
    split_rows,
)
from mindspeed_rl.engine.passes import build_filler

CPU = torch.device("cpu")


def random_rows(seed: int, count: int = 6) -> Rows:
    source = random.Random(seed)
    prompts = [source.randint(1, 5) for _ in range(count)]
    responses = [source.choice([0, 1, 2, source.randint(1, 9)]) for _ in range(count)]
    ids = [torch.tensor([source.randint(1, 999) for _ in range(p + r)]) for p, r in zip(prompts, responses)]
    return Rows(
        input_ids=ids,
        prompt_lengths=prompts,
        columns={
            "weights": [torch.arange(1.0, r + 1) + 100 * i for i, r in enumerate(responses)],
            "score": [torch.tensor(float(i)) for i in range(count)],
        },
    )


def predictions(micro_batch: MicroBatch) -> Iterator[tuple[int, int, int, int]]:
    """(slot, token that is looked at, its position, token to be predicted), as the model would meet them."""
    if micro_batch.packed is None:
        ids, positions = micro_batch.input_ids.t().flatten(), micro_batch.position_ids.t().flatten()
    else:
        ids, positions = micro_batch.input_ids[0], micro_batch.position_ids[0]
    index = micro_batch.hidden_index
    return zip(micro_batch.slots.tolist(), ids[index].tolist(), positions[index].tolist(), micro_batch.labels.tolist())


def shapes(packed: bool) -> Iterator[list[BatchShape]]:
    """One shape a context-parallel rank, for several settings."""
    for cp_size, total_multiple in ((1, 1), (1, 2), (2, 1), (2, 4), (3, 2)):
        multiple = 2 * cp_size if cp_size > 1 else 1
        yield [BatchShape(packed, cp_size, rank, multiple, total_multiple, pad_id=7) for rank in range(cp_size)]


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("seed", range(8))
def test_every_response_token_is_predicted_once_from_the_token_before_it(packed: bool, seed: int) -> None:
    rows = random_rows(seed)
    indexes = [4, 0, 5, 2]
    chosen = rows.select(indexes)
    width = max(1, *chosen.response_lengths)
    expected = []
    for row, (ids, prompt) in enumerate(zip(chosen.input_ids, chosen.prompt_lengths)):
        for t in range(len(ids) - prompt):
            expected.append((row * width + t, int(ids[prompt + t - 1]), prompt + t - 1, int(ids[prompt + t])))
    for ranks in shapes(packed):
        results: list[tuple[int, int, int, int]] = []
        for shape in ranks:
            micro_batch = build_micro_batch(rows, indexes, shape, CPU)
            assert (micro_batch.rows, micro_batch.width) == (4, width)
            assert micro_batch.indexes == (4, 0, 5, 2)
            assert micro_batch.num_tokens == sum(chosen.lengths)
            results += predictions(micro_batch)
        assert sorted(results) == sorted(expected)


@pytest.mark.parametrize("packed", [True, False])
def test_columns_lie_under_their_tokens_and_the_mask_marks_real_ones(packed: bool) -> None:
    rows = random_rows(1)
    micro_batch = build_micro_batch(rows, [3, 1], BatchShape(packed), CPU)
    for row, index in enumerate([3, 1]):
        length = rows.response_lengths[index]
        assert micro_batch.columns["weights"][row, :length].tolist() == rows.columns["weights"][index].tolist()
        assert not micro_batch.columns["weights"][row, length:].any()
        assert micro_batch.predicted_mask[row].tolist() == [t < length for t in range(micro_batch.width)]
    assert micro_batch.columns["score"].tolist() == [3.0, 1.0]


def rows_of_sequences(seed: int) -> Rows:
    """Rows of one to three sequences."""
    source = random.Random(seed)
    sequences = [
        [(source.randint(1, 5), source.choice([0, 1, source.randint(1, 9)])) for _ in range(source.randint(1, 3))]
        for _ in range(6)
    ]
    lengths = [sum(sum(part) for part in parts) for parts in sequences]
    ids = [torch.tensor([source.randint(1, 999) for _ in range(length)]) for length in lengths]
    weights = [torch.arange(1.0, sum(r for _, r in parts) + 1) + 100 * i for i, parts in enumerate(sequences)]
    return Rows(ids, [parts[0][0] for parts in sequences], {"weights": weights}, sequences=sequences)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("seed", range(8))
def test_each_sequence_of_a_row_is_separate_and_predicts_into_the_rows_columns(packed: bool, seed: int) -> None:
    rows = rows_of_sequences(seed)
    indexes = [4, 0, 5, 2]
    assert rows.sequences is not None
    expected, width = [], max(1, *(sum(r for _, r in rows.sequences[index]) for index in indexes))
    for row, index in enumerate(indexes):
        start = place = 0
        for prompt, response in rows.sequences[index]:
            ids = rows.input_ids[index][start : start + prompt + response].tolist()
            for t in range(response):
                # (slot, token that is looked at, its position in the sequence, token to be predicted)
                expected.append((row * width + place, ids[prompt + t - 1], prompt + t - 1, ids[prompt + t]))
                place += 1
            start += prompt + response
    for ranks in shapes(packed):
        results: list[tuple[int, int, int, int]] = []
        for shape in ranks:
            micro_batch = build_micro_batch(rows, indexes, shape, CPU)
            assert (micro_batch.rows, micro_batch.width) == (4, width)
            assert micro_batch.num_tokens == sum(rows.lengths[index] for index in indexes)
            results += predictions(micro_batch)
            for row, index in enumerate(indexes):
                length = rows.response_lengths[index]
                assert micro_batch.columns["weights"][row, :length].tolist() == rows.columns["weights"][index].tolist()
        assert sorted(results) == sorted(expected)


@pytest.mark.parametrize("packed", [True, False])
def test_all_sequences_of_a_row_are_in_one_micro_batch(packed: bool) -> None:
    rows = rows_of_sequences(3)
    shape = BatchShape(packed)
    for batching in (MicroBatching(2), MicroBatching(1, 60)):
        parts = split_rows(rows, shape, batching)
        assert sorted(row for part in parts for row in part) == list(range(6))
        for part in parts:
            tokens = [length for row in part for length in rows.sequence_lengths[row]]
            used = sum(tokens) if packed else len(tokens) * max(tokens)
            assert len(part) <= 2 if batching.token_budget is None else used <= 60


def test_every_size_is_the_multiple_that_the_layout_needs() -> None:
    rows = random_rows(2)
    for packed in (True, False):
        for ranks in shapes(packed):
            for shape in ranks:
                micro_batch = build_micro_batch(rows, range(6), shape, CPU)
                held = micro_batch.input_ids.size(1)
                assert held % shape.total_multiple == 0  # sequence parallelism cuts a rank's slice again
                if packed:
                    assert all(length % shape.sequence_multiple == 0 for length in micro_batch.packed.lengths)
                    assert sum(micro_batch.packed.lengths) == held * shape.cp_size


def test_the_tail_that_fills_a_packed_micro_batch_is_a_separate_sequence() -> None:
    rows = Rows([torch.tensor([5, 6, 8])], [1])
    micro_batch = build_micro_batch(rows, [0], BatchShape(True, total_multiple=4, pad_id=7), CPU)
    assert micro_batch.input_ids.tolist() == [[5, 6, 8, 7]]
    assert micro_batch.position_ids.tolist() == [[0, 1, 2, 0]]
    assert micro_batch.packed.lengths == (3, 1)


def test_a_padded_micro_batch_can_have_a_fixed_width() -> None:
    rows = Rows([torch.tensor([5, 6]), torch.tensor([8, 9, 10])], [1, 1])
    micro_batch = build_micro_batch(rows, [0, 1], BatchShape(False, fixed_width=5, pad_id=0), CPU)
    assert micro_batch.input_ids.tolist() == [[5, 6, 0, 0, 0], [8, 9, 10, 0, 0]]


def test_micro_batches_without_a_budget_are_consecutive_rows() -> None:
    shape = BatchShape(packed=True)
    assert _split_micro_batches([3] * 5, shape, MicroBatching(2, None)) == [[0, 1], [2, 3], [4]]


def test_the_budget_counts_the_padding_of_context_parallelism() -> None:
    shape = BatchShape(packed=True, cp_size=2, sequence_multiple=4)
    parts = _split_micro_batches([5, 5, 5], shape, MicroBatching(1, 16))
    assert sorted(map(len, parts)) == [1, 2]  # 8 tokens each with padding: two fit, three would have without it
    with pytest.raises(ValueError, match="sample 0 has 8 tokens"):
        _split_micro_batches([5], shape, MicroBatching(1, 7))


@pytest.mark.parametrize("total_multiple", [1, 2, 4])
def test_a_built_micro_batch_stays_within_the_budget_with_all_its_padding(total_multiple: int) -> None:
    for seed in range(10):
        rows = random_rows(seed)
        for cp_size in (1, 2):
            shape = BatchShape(True, cp_size, 0, 2 * cp_size if cp_size > 1 else 1, total_multiple)
            for part in _split_micro_batches(rows.lengths, shape, MicroBatching(1, 27)):
                micro_batch = build_micro_batch(rows, part, shape, CPU)
                assert micro_batch.input_ids.size(1) * cp_size <= 27


@pytest.mark.parametrize("total_multiple", [1, 2, 4])
def test_a_padded_micro_batch_stays_within_the_budget_too(total_multiple: int) -> None:
    for seed in range(10):
        rows = random_rows(seed)
        shape = BatchShape(False, total_multiple=total_multiple)
        parts = _split_micro_batches(rows.lengths, shape, MicroBatching(1, 32))
        assert sorted(sum(parts, [])) == list(range(6))
        assert all(build_micro_batch(rows, part, shape, CPU).input_ids.numel() <= 32 for part in parts)
    with pytest.raises(ValueError, match="sample 1 has 9 tokens"):
        _split_micro_batches([3, 9], BatchShape(False), MicroBatching(1, 8))


def rows_of_prompts(seed: int) -> Rows:
    """Nine rows of three prompts, mixed, the first two of which begin alike."""
    source = random.Random(seed)

    def sample(count: int) -> list[int]:
        return [source.randint(1, 999) for _ in range(count)]

    first = sample(4)
    prompts = [first, [*first, *sample(2)], sample(1)]
    chosen = [prompts[number % 3] for number in range(9)]
    return Rows([torch.tensor(prompt + sample(source.randint(0, 6))) for prompt in chosen], [len(prompt) for prompt in chosen])


def test_a_prompt_in_common_is_computed_once_but_for_its_last_token() -> None:
    rows = Rows([torch.tensor([5, 6, 7, 11, 12]), torch.tensor([5, 6, 7, 13]), torch.tensor([5, 6, 8, 14])], [3, 3, 3])
    micro_batch = build_micro_batch(rows, [0, 1, 2], BatchShape(True, total_multiple=4, pad_id=1, shares_prefixes=True), CPU)
    # all that predict stand on their own, what comes before them is the same: 5 6, though two prompts end otherwise
    assert micro_batch.input_ids.tolist() == [[5, 6, 7, 11, 12, 7, 13, 8, 14, 1, 1, 1]]
    assert micro_batch.position_ids.tolist() == [[0, 1, 2, 3, 4, 2, 3, 2, 3, 0, 1, 2]]
    assert micro_batch.tokens.tolist() == [0, 1, 2, 3, 4, 7, 8, 11, 12, -1, -1, -1]
    assert micro_batch.hidden_index.tolist() == [2, 3, 5, 7]
    assert micro_batch.labels.tolist() == [11, 12, 13, 14]
    assert micro_batch.packed.lengths == (5, 4, 4, 3)
    assert micro_batch.num_tokens == 9
    whole = micro_batch.packed.shared.expand(micro_batch.input_ids[0])
    assert whole.tolist() == [5, 6, 7, 11, 12, 5, 6, 7, 13, 5, 6, 8, 14, 1, 1, 1]
    assert micro_batch.packed.shared.lengths == (5, 2, 2, 3)


@pytest.mark.parametrize("seed", range(8))
def test_a_micro_batch_with_prefix_sharing_predicts_the_same_as_one_of_full_rows(seed: int) -> None:
    rows = rows_of_prompts(seed)
    for total_multiple in (1, 2, 4):
        plain = build_micro_batch(rows, range(9), BatchShape(True, total_multiple=total_multiple, pad_id=7), CPU)
        shape = BatchShape(True, total_multiple=total_multiple, pad_id=7, shares_prefixes=True)
        shared = build_micro_batch(rows, range(9), shape, CPU)
        assert sorted(predictions(shared)) == sorted(predictions(plain))
        assert shared.input_ids.size(1) == measure_size(rows, range(9), shape)[1] < plain.input_ids.size(1)
        assert shared.input_ids.size(1) % total_multiple == 0


@pytest.mark.parametrize("seed", range(8))
def test_rows_of_one_prompt_are_in_one_micro_batch_within_the_budget(seed: int) -> None:
    rows, shape = rows_of_prompts(seed), BatchShape(True, total_multiple=2, shares_prefixes=True)
    parts = split_rows(rows, shape, MicroBatching(1, 31))
    assert sorted(sum(parts, [])) == list(range(9))
    assert all(build_micro_batch(rows, part, shape, CPU).input_ids.size(1) <= 31 for part in parts)
    assert sum(len({row % 3 for row in part}) for part in parts) <= 3 + len(parts) - 1  # a cut splits one prompt's rows at most


def test_sequences_of_one_row_share_prefixes_too() -> None:
    rows = rows_of_sequences(3)
    shape = BatchShape(True, shares_prefixes=True)
    plain, shared = (build_micro_batch(rows, range(6), batch_shape, CPU) for batch_shape in (BatchShape(True), shape))
    assert sorted(predictions(shared)) == sorted(predictions(plain))
    twice = Rows([torch.tensor([5, 6, 7, 8, 5, 6, 9])], [2], sequences=[[(2, 2), (2, 1)]])
    assert build_micro_batch(twice, [0], shape, CPU).input_ids.tolist() == [[5, 6, 7, 8, 6, 9]]


def tree_of_turns(seed: int, count: int) -> list[tuple[list[int], int]]:
    """Sequences, each with its tokens of context; most of them branch off an earlier one."""
    source = random.Random(seed)
    made: list[tuple[list[int], int]] = []
    for _ in range(count):
        context = source.choice(made)[0] if made and source.random() < 0.8 else []
        context = context[: source.randint(0, len(context))] + [source.randint(1, 9) for _ in range(source.randint(1, 30))]
        made.append((context + [source.randint(1, 9) for _ in range(source.randint(0, 30))], len(context)))
    return made


@pytest.mark.parametrize("seed", range(6))
def test_branches_of_branches_are_computed_once(seed: int) -> None:
    tree = tree_of_turns(seed, 14)
    rows = Rows([torch.tensor(ids) for ids, _ in tree], [prompt for _, prompt in tree])
    plain = build_micro_batch(rows, range(14), BatchShape(True, pad_id=7), CPU)
    shape = BatchShape(True, pad_id=7, shares_prefixes=True)
    shared = build_micro_batch(rows, range(14), shape, CPU)
    assert sorted(predictions(shared)) == sorted(predictions(plain))
    assert shared.packed is not None and shared.packed.shared is not None
    whole = shared.packed.shared.expand(shared.input_ids[0]).tolist()
    assert whole[: sum(len(ids) for ids, _ in tree)] == [token for ids, _ in tree for token in ids]
    # a naive search: what each sequence has in common with those before it, as far as its own tokens are not predicted
    for index, (ids, prompt) in enumerate(tree):
        common = [len(os.path.commonprefix([ids[: prompt - 1], other])) for other, _ in tree[:index]]
        computed = len(ids) - shared.packed.shared.lengths[index]
        longest = max(common, default=0)
        assert computed <= longest and (computed > longest - 16 if longest >= 16 else computed in (0, prompt - 1))


def test_an_image_that_differs_ends_what_sequences_share() -> None:
    ids = [3] * 20 + [9]
    rows = Rows([torch.tensor(ids), torch.tensor(ids)], [20, 20])
    pictures = [([2, 17], [Picture("a"), Picture(key)]) for key in ("b", "c")]
    arrays = [token_id.numpy() for token_id in rows.input_ids]
    assert _count_common(*arrays, *pictures) == 17
    assert _count_common(*arrays, pictures[0], pictures[0]) == 21


@dataclass
class Picture:
    """An image with the key that prefix sharing compares."""

    key: str


@pytest.mark.parametrize("shares_prefixes", [False, True])
@pytest.mark.parametrize("batching", [MicroBatching(2), MicroBatching(2, 31)])
def test_a_rank_without_rows_has_a_filler_with_the_columns_of_others(batching: MicroBatching, shares_prefixes: bool) -> None:
    others = Rows([torch.arange(5)], [2], {"weights": [torch.ones(3)], "top": [torch.ones(3, 4)], "row": [torch.tensor(7)]})
    rows = others.select([])
    shape = BatchShape(packed=True, shares_prefixes=shares_prefixes)
    assert len(rows) == 0 and split_rows(rows, shape, batching) == [] and rows.select([]).pattern is others
    filler = build_filler(rows, shape, torch.device("cpu"))
    assert filler.is_filler and filler.num_tokens == 0 and not filler.predicted_mask.any() and len(filler.labels) == 0
    assert {name: column.shape[0] for name, column in filler.columns.items()} == {"weights": 1, "top": 1, "row": 1}


def test_images_of_a_model_without_a_tower_are_refused() -> None:
    rows = Rows([torch.arange(1, 6)], [3], images=[(NoiseImage(1, 2, 2),)])
    with pytest.raises(ValueError, match="row 0 of the micro-batch has 1 images, and the model has no vision tower"):
        build_micro_batch(rows, [0], BatchShape(packed=True), CPU)
