"""A fair queue between tenants, and the meter of what they use."""

import asyncio

import pytest

from mindspeed_rl.service.turns import FairQueue, Meter


async def _admit(queue, order, tenant, cost, width=1, pause_s=0.0):
    async with queue.turn(tenant, cost, width):
        order.append(tenant)
        await asyncio.sleep(pause_s)


def test_a_tenant_with_much_work_does_not_hold_up_one_with_little():
    async def work():
        queue, order = FairQueue(1), []
        many = [asyncio.create_task(_admit(queue, order, "many", 10)) for _ in range(50)]
        await asyncio.sleep(0)
        few = [asyncio.create_task(_admit(queue, order, "few", 10)) for _ in range(5)]
        await asyncio.gather(*many, *few)
        return order

    order = asyncio.run(work())
    assert "".join(name[0] for name in order[:12]).count("f") == 5, order


def test_turns_are_by_tokens_and_not_by_requests():
    async def work():
        queue, order = FairQueue(1), []
        holder = asyncio.create_task(_admit(queue, order, "first", 1, pause_s=0.01))
        await asyncio.sleep(0)
        tasks = [asyncio.create_task(_admit(queue, order, "long", 90)) for _ in range(10)]
        tasks += [asyncio.create_task(_admit(queue, order, "short", 30)) for _ in range(30)]
        await asyncio.gather(holder, *tasks)
        return order[1:21]

    order = asyncio.run(work())
    assert order.count("short") == 15 and order.count("long") == 5, order


def test_wide_work_is_not_overtaken_for_ever_and_nothing_is_lost_by_cancelling():
    async def work():
        queue, order = FairQueue(4), []
        narrow = [asyncio.create_task(_admit(queue, order, "a", 1, pause_s=0.01)) for _ in range(4)]
        await asyncio.sleep(0)
        wide = asyncio.create_task(_admit(queue, order, "b", 1, width=99))
        late = [asyncio.create_task(_admit(queue, order, "a", 1)) for _ in range(8)]
        await asyncio.sleep(0)
        late[3].cancel()
        await asyncio.gather(*narrow, wide, *late, return_exceptions=True)
        cancelled = asyncio.create_task(_admit(queue, order, "a", 1, width=4, pause_s=9))
        await asyncio.sleep(0)
        waiting = asyncio.create_task(_admit(queue, order, "b", 1, width=4))
        await asyncio.sleep(0)
        cancelled.cancel()
        await asyncio.wait_for(waiting, 5)
        return order

    order = asyncio.run(work())
    assert order.index("b") == 4 and order.count("a") == 12, order


def test_tenants_share_the_seconds_in_which_both_run():
    now = [0.0]
    meter = Meter(lambda: now[0])
    with meter.measure("a"):
        now[0] = 4.0
        with meter.measure("b"), meter.measure("b"):
            now[0] = 10.0
    now[0] = 100.0
    assert meter.take("a") == pytest.approx(4 + 6 / 3)
    assert meter.take("b") == pytest.approx(6 * 2 / 3)
    assert meter.take("a") == 0.0
