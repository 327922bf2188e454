"""The dock as a plain object: rows, readiness, consumption, order, waiting."""

import asyncio
import contextlib
from random import Random

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


class PlainDock:
    """The rules in their shortest form: every cell is looked at for every request."""

    def __init__(self, num_rows: int, group_size: int) -> None:
        self.num_rows, self.group_size = num_rows, group_size
        self.ready: set[tuple[str, int]] = set()
        self.consumed: set[tuple[str, int]] = set()

    def get(self, consumer: str, columns: tuple[str, ...], count: int, indexes: list[int] | None) -> list[int] | None:
        def is_ready(row: int) -> bool:
            return all((name, row) in self.ready for name in columns)

        if indexes is not None:
            rows = indexes if all(map(is_ready, indexes)) else None
        else:
            unit = 1 if count % self.group_size else self.group_size
            free = [is_ready(row) and (consumer, row) not in self.consumed for row in range(self.num_rows)]
            starts = [start for start in range(0, self.num_rows, unit) if all(free[start : start + unit])]
            rows = [row for start in starts for row in range(start, start + unit)][:count]
            rows = rows if len(rows) == count else None
        self.consumed.update((consumer, row) for row in rows or ())
        return rows


@pytest.mark.parametrize("seed", range(30))
def test_random_puts_and_requests_are_served_by_the_rules(seed: int) -> None:
    random = Random(seed)
    group_size, num_prompts = random.choice([1, 2, 3, 4]), random.choice([2, 4, 6])
    num_rows, names = num_prompts * group_size, ["a", "b", "c"]
    dock = TransferDock(num_prompts, group_size, {"one": ["a", "b"], "two": ["c"], "three": []})
    plain = PlainDock(num_rows, group_size)
    for _ in range(150):
        if random.random() < 0.4:
            name, rows = random.choice(names), random.sample(range(num_rows), random.randint(1, num_rows))
            overwrite = random.random() < 0.3
            new = [row for row in rows if (name, row) not in plain.ready]
            rows = rows if overwrite else new
            if rows:
                dock.put({name: [torch.tensor([row]) for row in rows]}, rows, overwrite=overwrite)
                plain.ready.update((name, row) for row in rows)
        else:
            consumer, columns = random.choice(["one", "two", "three"]), tuple(random.sample(names, random.randint(1, 3)))
            count = random.choice([count for count in range(1, num_rows + 1) if num_rows % count == 0])
            indexes = random.sample(range(num_rows), random.randint(1, num_rows)) if random.random() < 0.2 else None
            batch, rows = dock.get(consumer, columns, None if indexes else count, indexes)
            assert rows == plain.get(consumer, columns, count, indexes)
            if batch is not None:
                assert all([int(value) for value in batch[name]] == rows for name in columns)
        if random.random() < 0.02:
            dock.clear(num_prompts)
            plain = PlainDock(num_rows, group_size)


@pytest.mark.parametrize("seed", range(10))
def test_requests_that_wait_get_all_rows_whatever_the_order_and_whoever_gives_up(seed: int) -> None:
    random = Random(seed)

    async def play() -> list[int]:
        dock = TransferDock(24, 4, {"actor": ["a", "b"], "other": []})
        served: list[int] = []

        async def take(count: int) -> None:
            _, rows = await dock.wait("actor", ["a", "b"], count, timeout_s=60.0)
            served.extend(rows)

        async def give_up() -> None:
            with contextlib.suppress(TimeoutError):
                await dock.wait("other", ["b"], 8, timeout_s=random.random() / 50)

        counts = random.choice([[4] * 24, [8] * 12, [1] * 96, [12] * 4 + [4] * 12])
        tasks = [asyncio.create_task(take(count)) for count in random.sample(counts, len(counts))]
        lost = [asyncio.create_task(take(8)) for _ in range(3)]
        beside = [asyncio.create_task(give_up()) for _ in range(5)]
        exact = asyncio.create_task(dock.wait("other", ["b", "a"], indexes=[95, 3, 40], timeout_s=60.0))
        await asyncio.sleep(0)
        for task in lost:
            task.cancel()
        cells = [(name, row) for name in "ab" for row in range(96)]
        random.shuffle(cells)
        while cells:
            name, row = cells.pop()
            dock.put({name: [torch.tensor([row])]}, [row])
            if random.random() < 0.3:
                await asyncio.sleep(0)
        await asyncio.wait_for(asyncio.gather(*tasks, *beside), 30)
        _, rows = await exact
        assert rows == [95, 3, 40]
        return served

    assert sorted(asyncio.run(play())) == list(range(96))


def test_a_request_that_gives_up_as_it_is_woken_wakes_the_next() -> None:
    async def play() -> list[int]:
        dock = TransferDock(1, 4, {"actor": ["a"]})
        first = asyncio.create_task(dock.wait("actor", ["a"], 4, timeout_s=60.0))
        second = asyncio.create_task(dock.wait("actor", ["a"], 4, timeout_s=60.0))
        for _ in range(2):  # both wait
            await asyncio.sleep(0)
        first.cancel()  # the task sees it after the put
        dock.put({"a": [torch.tensor([row]) for row in range(4)]}, list(range(4)))
        return (await asyncio.wait_for(second, 5))[1]

    assert asyncio.run(play()) == [0, 1, 2, 3]
