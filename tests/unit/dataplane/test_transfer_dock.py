"""The dock as a plain object: rows, readiness, consumption, order, waiting."""

import asyncio

import pytest
import torch

from mindspeed_rl.dataplane.transfer_dock import DataPlaneAbortedError, TransferDock

USERS = {"trainer": ("prompts",), "rollout": ("responses", "texts"), "scorer": ("rewards",), "train": (), "score": ()}


def dock(num_prompts: int = 4, n: int = 2) -> TransferDock:
    return TransferDock(num_prompts, n, USERS)


def rows_of(lengths: list[int], start: int = 0) -> list[torch.Tensor]:
    return [torch.arange(start + i, start + i + length) for i, length in enumerate(lengths)]


def put_responses(d: TransferDock, rows: list[int]) -> None:
    d.put({"responses": [torch.full((row + 1,), row) for row in rows]}, rows)


def test_a_row_comes_back_as_it_was_put():
    d = dock(2, 2)
    d.put({"responses": rows_of([3, 1, 0, 2]), "rewards": [0.5, 1.0, 0.0, -1.0], "texts": ["a", "b", "c", "d"]}, range(4))
    batch, indexes = d.get("train", ["responses", "rewards", "texts"], 4)
    assert indexes == [0, 1, 2, 3]
    assert [row.tolist() for row in batch["responses"]] == [[0, 1, 2], [1], [], [3, 4]]
    assert batch["rewards"].tensor().tolist() == [0.5, 1.0, 0.0, -1.0]
    assert batch["texts"] == ["a", "b", "c", "d"]


def test_rows_put_out_of_order_and_in_parts_are_served_lowest_first():
    d = dock(2, 2)
    put_responses(d, [3, 0])
    put_responses(d, [2, 1])
    batch, indexes = d.get("train", ["responses"], 2)
    assert indexes == [0, 1]
    assert [row.tolist() for row in batch["responses"]] == [[0], [1, 1]]
    batch, indexes = d.get("train", ["responses"], 2)
    assert [row.tolist() for row in batch["responses"]] == [[2, 2, 2], [3, 3, 3, 3]]


def test_a_row_waits_until_all_its_columns_are_ready():
    d = dock(1, 2)
    put_responses(d, [0, 1])
    assert d.get("train", ["responses", "rewards"], 2) == (None, None)
    d.put({"rewards": [1.0, 0.0]}, [0, 1])
    assert d.get("train", ["responses", "rewards"], 2)[1] == [0, 1]


def test_incomplete_groups_wait():
    d = dock(2, 2)
    put_responses(d, [0, 2, 3])
    assert d.get("train", ["responses"], 2)[1] == [2, 3]
    assert d.get("train", ["responses"], 2) == (None, None)


def test_each_consumer_gets_every_row_once():
    d = dock(2, 1)
    put_responses(d, [0, 1])
    assert d.get("train", ["responses"], 1)[1] == [0]
    assert d.get("train", ["responses"], 1)[1] == [1]
    assert d.get("train", ["responses"], 1) == (None, None)
    assert d.get("score", ["responses"], 2)[1] == [0, 1]


def test_indexes_are_served_in_their_order_again_and_again():
    d = dock(2, 2)
    put_responses(d, [0, 1, 3])
    for _ in range(2):
        batch, indexes = d.get("train", ["responses"], indexes=[3, 0])
        assert indexes == [3, 0] and [len(row) for row in batch["responses"]] == [4, 1]
    assert d.get("train", ["responses"], indexes=[2, 3]) == (None, None)


def test_clear_empties_the_dock_and_may_resize_it():
    d = dock(2, 1)
    put_responses(d, [0, 1])
    d.get("train", ["responses"], 2)
    d.clear(num_prompts=3)
    assert d.capacity == 3 and d.get("train", ["responses"], 3) == (None, None)
    put_responses(d, [0, 1, 2])
    assert d.get("train", ["responses"], 3)[1] == [0, 1, 2]


@pytest.mark.parametrize(
    "call, words",
    [
        (lambda d: d.put({"response": [1]}, [0]), ["'response'", "'responses'"]),
        (lambda d: d.put({"responses": rows_of([1])}, []), ["indexes"]),
        (lambda d: d.put({"responses": rows_of([1])}, [8]), ["Index 8", "8 rows"]),
        (lambda d: d.put({"responses": rows_of([1])}, [0, 1]), ["1 entries for 2 indexes"]),
        (lambda d: d.put({"responses": rows_of([1, 1])}, [1, 1]), ["differ"]),
        (lambda d: d.get("training", ["responses"], 2), ["'training'", "'train'"]),
        (lambda d: d.get("train", ["reward"], 2), ["'reward'", "'rewards'"]),
        (lambda d: d.get("train", ["rewards"], 6), ["8 rows", "count=6"]),
        (lambda d: d.get("train", ["rewards"]), ["count=None"]),
        (lambda d: TransferDock(0, 2, USERS), ["num_prompts=0"]),
        (lambda d: TransferDock(1, 2, {**USERS, "judge": ("rewards",)}), ["'rewards'", "'scorer'", "'judge'"]),
    ],
)
def test_a_wrong_call_is_refused_with_the_right_names(call, words):
    with pytest.raises(ValueError) as error:
        call(dock())
    assert all(word in str(error.value) for word in words), str(error.value)


def test_a_request_for_parts_of_groups_is_served_rows_one_by_one():
    d = dock(3, 2)
    put_responses(d, [0, 1, 2, 5])
    assert [d.get("train", ["responses"], 3)[1] for _ in range(2)] == [[0, 1, 2], None]
    put_responses(d, [4, 3])
    assert d.get("train", ["responses"], 3)[1] == [3, 4, 5]


def test_a_refused_put_writes_nothing():
    d = dock(1, 2)
    with pytest.raises(ValueError, match="'rewards' has 1 entries"):
        d.put({"responses": rows_of([1, 1]), "rewards": [1.0]}, [0, 1])
    assert d.get("train", ["responses"], 2) == (None, None)


def test_writing_a_cell_twice_needs_overwrite():
    d = dock(1, 2)
    put_responses(d, [0, 1])
    with pytest.raises(ValueError, match="'responses' of row 1 was put before"):
        put_responses(d, [1])
    d.put({"responses": [torch.tensor([9])]}, [1], overwrite=True)
    batch, _ = d.get("train", ["responses"], 2)
    assert [row.tolist() for row in batch["responses"]] == [[0], [9]]


def test_a_column_keeps_one_kind_of_row():
    d = dock(2, 1)
    d.put({"rewards": [0.5]}, [0])
    with pytest.raises(ValueError, match="'rewards' holds scalars of torch.float32; objects"):
        d.put({"rewards": ["high"]}, [1])


def test_a_waiting_request_goes_on_as_soon_as_the_rows_are_ready():
    d = dock(1, 2)

    async def scenario():
        waiting = asyncio.create_task(d.wait("train", ["responses"], 2, timeout_s=30))
        await asyncio.sleep(0)
        put_responses(d, [0])
        await asyncio.sleep(0)
        assert not waiting.done()
        put_responses(d, [1])
        return await waiting

    assert asyncio.run(scenario())[1] == [0, 1]


def test_a_deadline_says_who_waits_for_what_and_who_was_to_produce_it():
    d = dock(4, 2)
    put_responses(d, [0, 1, 2, 5])
    with pytest.raises(TimeoutError) as error:
        asyncio.run(d.wait("train", ["responses", "rewards"], 8, timeout_s=0.01))
    assert str(error.value) == (
        "'train' waited 0.01 s in vain. "
        "Column 'responses', to be put by 'rollout', is missing in rows 3-4, 6-7 (4 of 8). "
        "Column 'rewards', to be put by 'scorer', is missing in rows 0-7 (8 of 8)."
    )
    d.clear(4)  # which is refused while somebody waits


def test_a_deadline_on_rows_already_consumed_says_so():
    d = dock(1, 2)
    put_responses(d, [0, 1])
    d.get("train", ["responses"], 2)
    with pytest.raises(TimeoutError, match="2 of 2 were consumed before"):
        asyncio.run(d.wait("train", ["responses"], 2, timeout_s=0.01))


def test_abort_reaches_those_who_wait_and_those_who_come():
    d = dock(1, 2)

    async def scenario():
        waiting = asyncio.create_task(d.wait("train", ["responses"], 2, timeout_s=30))
        await asyncio.sleep(0)
        d.abort("worker 1 died")
        await waiting

    with pytest.raises(DataPlaneAbortedError, match="worker 1 died"):
        asyncio.run(scenario())
    with pytest.raises(DataPlaneAbortedError, match="worker 1 died"):
        d.get("train", ["responses"], 2)


def test_clear_is_refused_while_somebody_waits():
    d = dock(1, 2)

    async def scenario():
        waiting = asyncio.create_task(d.wait("train", ["responses"], 2, timeout_s=30))
        await asyncio.sleep(0)
        try:
            with pytest.raises(RuntimeError, match="1 request"):
                d.clear(1)
        finally:
            waiting.cancel()

    asyncio.run(scenario())
