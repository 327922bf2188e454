"""The dock as a plain object: rows, readiness, consumption, order, waiting."""

import asyncio

import pytest
import torch

from mindspeed_rl.dataplane.records import ColumnSpec, DataPlaneAborted
from mindspeed_rl.dataplane.transfer_dock import TransferDock

COLUMNS = {
    "prompts": ColumnSpec("trainer"),
    "responses": ColumnSpec("rollout"),
    "rewards": ColumnSpec("scorer"),
    "texts": ColumnSpec("rollout"),
}


def dock(num_prompts: int = 4, n: int = 2) -> TransferDock:
    return TransferDock(num_prompts, n, COLUMNS, ("train", "score"))


def rows_of(lengths: list[int], start: int = 0) -> list[torch.Tensor]:
    return [torch.arange(start + i, start + i + length) for i, length in enumerate(lengths)]


def put_responses(d: TransferDock, rows: list[int]) -> None:
    d.put_experience({"responses": [torch.full((row + 1,), row) for row in rows]}, rows)


def test_a_row_comes_back_as_it_was_put():
    d = dock(2, 2)
    d.put_experience(
        {"responses": rows_of([3, 1, 0, 2]), "rewards": [0.5, 1.0, 0.0, -1.0], "texts": ["a", "b", "c", "d"]}, range(4)
    )
    batch, indexes = d.get_experience("train", ["responses", "rewards", "texts"], 4)
    assert indexes == [0, 1, 2, 3]
    assert [row.tolist() for row in batch["responses"]] == [[0, 1, 2], [1], [], [3, 4]]
    assert batch["rewards"].tensor().tolist() == [0.5, 1.0, 0.0, -1.0]
    assert batch["texts"] == ["a", "b", "c", "d"]


def test_rows_put_out_of_order_and_in_parts_are_served_lowest_first():
    d = dock(2, 2)
    put_responses(d, [3, 0])
    put_responses(d, [2, 1])
    batch, indexes = d.get_experience("train", ["responses"], 2)
    assert indexes == [0, 1]
    assert [row.tolist() for row in batch["responses"]] == [[0], [1, 1]]
    batch, indexes = d.get_experience("train", ["responses"], 2)
    assert [row.tolist() for row in batch["responses"]] == [[2, 2, 2], [3, 3, 3, 3]]


def test_a_prompt_fills_all_rows_of_its_group():
    d = dock(3, 2)
    d.put_experience({"prompts": rows_of([1, 2], start=7)}, [2, 0], is_prompt=True)
    batch, indexes = d.get_experience("score", ["prompts"], 2)
    assert indexes == [0, 1] and [row.tolist() for row in batch["prompts"]] == [[8, 9], [8, 9]]
    batch, indexes = d.get_experience("score", ["prompts"], 2)
    assert indexes == [4, 5] and [row.tolist() for row in batch["prompts"]] == [[7], [7]]


def test_a_row_waits_until_all_its_columns_are_ready():
    d = dock(1, 2)
    put_responses(d, [0, 1])
    assert d.get_experience("train", ["responses", "rewards"], 2) == (None, None)
    d.put_experience({"rewards": [1.0, 0.0]}, [0, 1])
    assert d.get_experience("train", ["responses", "rewards"], 2)[1] == [0, 1]


def test_incomplete_groups_wait_unless_single_rows_are_asked_for():
    d = dock(2, 2)
    put_responses(d, [0, 2, 3])
    assert d.get_experience("train", ["responses"], 2)[1] == [2, 3]
    assert d.get_experience("train", ["responses"], 2) == (None, None)
    assert d.get_experience("train", ["responses"], 1, get_n_samples=False)[1] == [0]


def test_each_consumer_gets_every_row_once():
    d = dock(2, 1)
    put_responses(d, [0, 1])
    assert d.get_experience("train", ["responses"], 1)[1] == [0]
    assert not d.all_consumed("train")
    assert d.get_experience("train", ["responses"], 1)[1] == [1]
    assert d.all_consumed("train") and not d.all_consumed("score")
    assert d.get_experience("train", ["responses"], 1) == (None, None)
    assert d.get_experience("score", ["responses"], 2)[1] == [0, 1]
    d.reset_consumed("train")
    assert d.get_experience("train", ["responses"], 2)[1] == [0, 1]


def test_indexes_are_served_in_their_order_again_and_again():
    d = dock(2, 2)
    put_responses(d, [0, 1, 3])
    for _ in range(2):
        batch, indexes = d.get_experience("train", ["responses"], indexes=[3, 0])
        assert indexes == [3, 0] and [len(row) for row in batch["responses"]] == [4, 1]
    assert d.get_experience("train", ["responses"], indexes=[2, 3]) == (None, None)


def test_reserved_rows_are_fetched_later():
    d = dock(2, 1)
    put_responses(d, [0, 1])
    assert d.prefetch_request_index("train", ["responses"], 1) == [0]
    assert d.get_experience("train", ["responses"], 1)[1] == [1]
    assert d.get_experience("train", ["responses"], indexes=[0])[1] == [0]


def test_a_seed_draws_groups_at_random_and_repeatably():
    draws = []
    for _ in range(2):
        d = dock(8, 2)
        put_responses(d, list(range(16)))
        draws.append([d.get_experience("train", ["responses"], 4, seed=seed)[1] for seed in range(4)])
    assert draws[0] == draws[1]
    assert sorted(sum(draws[0], [])) == list(range(16)) and sum(draws[0], []) != list(range(16))
    assert all(rows[0] % 2 == 0 and rows[1] == rows[0] + 1 for rows in draws[0])


def test_balanced_shares_have_equal_counts_and_even_lengths():
    d = dock(8, 1)
    d.put_experience({"responses": rows_of([10, 9, 8, 7, 6, 5, 4, 3])}, range(8))
    shares = [d.get_experience("train", ["responses"], 4, dp_size=2, use_batch_seqlen_balance=True)[1] for _ in range(2)]
    assert sorted(shares) == [[0, 3, 4, 7], [1, 2, 5, 6]]  # 26 tokens each
    assert d.all_consumed("train")


def test_optional_columns_are_empty_where_not_ready():
    d = dock(2, 1)
    d.put_experience({"prompts": rows_of([1, 1])}, [0, 1])
    put_responses(d, [1])
    batch, _ = d.get_experience("score", ["prompts"], 2, optional_columns=["responses"])
    assert batch["responses"][0] is None and batch["responses"][1].tolist() == [1, 1]


def test_clear_empties_the_dock_and_may_resize_it():
    d = dock(2, 1)
    put_responses(d, [0, 1])
    d.get_experience("train", ["responses"], 2)
    d.clear(num_prompts=3)
    assert d.status() == {"capacity": 3, "ready": {}, "consumed": {}, "waiting": 0}
    put_responses(d, [0, 1, 2])
    assert d.get_experience("train", ["responses"], 3)[1] == [0, 1, 2]


@pytest.mark.parametrize(
    "call, words",
    [
        (lambda d: d.put_experience({"response": [1]}, [0]), ["'response'", "'responses'"]),
        (lambda d: d.put_experience({"responses": rows_of([1])}, []), ["indexes"]),
        (lambda d: d.put_experience({"responses": rows_of([1])}, [8]), ["Index 8", "8 rows"]),
        (lambda d: d.put_experience({"prompts": rows_of([1])}, [4], is_prompt=True), ["Index 4", "4 prompts"]),
        (lambda d: d.put_experience({"responses": rows_of([1])}, [0, 1]), ["1 entries for 2 indexes"]),
        (lambda d: d.put_experience({"responses": rows_of([1, 1])}, [1, 1]), ["differ"]),
        (lambda d: d.get_experience("training", ["responses"], 2), ["'training'", "'train'"]),
        (lambda d: d.get_experience("train", ["reward"], 2), ["'reward'", "'rewards'"]),
        (lambda d: d.get_experience("train", ["rewards"], 6), ["8 rows", "count=6"]),
        (lambda d: d.get_experience("train", ["rewards"], 1), ["count=1", "n_samples_per_prompt=2"]),
        (lambda d: d.get_experience("train", ["rewards"]), ["count=None"]),
        (lambda d: d.all_consumed("trian"), ["'trian'"]),
        (lambda d: TransferDock(0, 2), ["num_prompts=0"]),
    ],
)
def test_a_wrong_call_is_refused_with_the_right_names(call, words):
    with pytest.raises(ValueError) as error:
        call(dock())
    assert all(word in str(error.value) for word in words), str(error.value)


def test_a_refused_put_writes_nothing():
    d = dock(1, 2)
    with pytest.raises(ValueError, match="'rewards' has 1 entries"):
        d.put_experience({"responses": rows_of([1, 1]), "rewards": [1.0]}, [0, 1])
    assert d.status()["ready"] == {}


def test_writing_a_cell_twice_needs_overwrite():
    d = dock(1, 2)
    put_responses(d, [0, 1])
    with pytest.raises(ValueError, match="'responses' of row 1 was put before"):
        put_responses(d, [1])
    d.put_experience({"responses": [torch.tensor([9])]}, [1], overwrite=True)
    batch, _ = d.get_experience("train", ["responses"], 2)
    assert [row.tolist() for row in batch["responses"]] == [[0], [9]]


def test_a_column_keeps_one_kind_of_row():
    d = dock(2, 1)
    d.put_experience({"rewards": [0.5]}, [0])
    with pytest.raises(ValueError, match="'rewards' holds scalars of torch.float32; objects"):
        d.put_experience({"rewards": ["high"]}, [1])


def test_a_waiting_request_goes_on_as_soon_as_the_rows_are_ready():
    d = dock(1, 2)

    async def scenario():
        waiting = asyncio.create_task(d.wait_experience("train", ["responses"], 2, timeout_s=30))
        await asyncio.sleep(0)
        put_responses(d, [0])
        await asyncio.sleep(0)
        assert not waiting.done() and d.status()["waiting"] == 1
        put_responses(d, [1])
        return await waiting

    assert asyncio.run(scenario())[1] == [0, 1]


def test_a_deadline_says_who_waits_for_what_and_who_was_to_produce_it():
    d = dock(4, 2)
    put_responses(d, [0, 1, 2, 5])
    with pytest.raises(TimeoutError) as error:
        asyncio.run(d.wait_experience("train", ["responses", "rewards"], 8, timeout_s=0.01))
    assert str(error.value) == (
        "'train' waited 0.01 s in vain. "
        "Column 'responses', to be put by 'rollout', is missing in rows 3-4, 6-7 (4 of 8). "
        "Column 'rewards', to be put by 'scorer', is missing in rows 0-7 (8 of 8)."
    )
    assert d.status()["waiting"] == 0


def test_a_deadline_on_rows_already_consumed_says_so():
    d = dock(1, 2)
    put_responses(d, [0, 1])
    d.get_experience("train", ["responses"], 2)
    with pytest.raises(TimeoutError, match="2 of 2 were consumed before"):
        asyncio.run(d.wait_experience("train", ["responses"], 2, timeout_s=0.01))


def test_abort_reaches_those_who_wait_and_those_who_come():
    d = dock(1, 2)

    async def scenario():
        waiting = asyncio.create_task(d.wait_experience("train", ["responses"], 2, timeout_s=30))
        await asyncio.sleep(0)
        d.abort("worker 1 died")
        await waiting

    with pytest.raises(DataPlaneAborted, match="worker 1 died"):
        asyncio.run(scenario())
    with pytest.raises(DataPlaneAborted, match="worker 1 died"):
        d.get_experience("train", ["responses"], 2)


def test_clear_is_refused_while_somebody_waits():
    d = dock(1, 2)

    async def scenario():
        waiting = asyncio.create_task(d.wait_experience("train", ["responses"], 2, timeout_s=30))
        await asyncio.sleep(0)
        try:
            with pytest.raises(RuntimeError, match="1 request"):
                d.clear()
        finally:
            waiting.cancel()

    asyncio.run(scenario())
