"""Senders and exchanges equal the choices of plain loops."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest

from mindspeed_rl.resharding import transfer_plan as plan_module
from mindspeed_rl.resharding.transfer_plan import _Choices, _MessageBuilder, _MessageList


def naive_senders(senders: list[tuple[int, ...]], sizes: list[int]) -> list[int]:
    """Large messages first to the lightest of their senders, then from heavy to light ones while that makes them more even."""
    load: Counter[int] = Counter()
    source = [ranks[0] for ranks in senders]
    free = [number for number, ranks in enumerate(senders) if len(ranks) > 1]
    for number in sorted(set(range(len(senders))) - set(free)):
        load[source[number]] += sizes[number]
    for number in sorted(free, key=lambda number: -sizes[number]):
        source[number] = min(senders[number], key=lambda rank: load[rank])
        load[source[number]] += sizes[number]
    changed = True
    while changed:
        changed = False
        for number in free:
            other = min(senders[number], key=lambda rank: load[rank])
            if load[source[number]] - load[other] > sizes[number]:
                load[source[number]] -= sizes[number]
                load[other] += sizes[number]
                source[number], changed = other, True
    return source


def naive_buckets(source: list[int], target: list[int], sizes: list[int], room: int, max_bytes: int) -> list[int]:
    """The first bucket with room on both ranks, from where both still take a message of the usual size."""
    load: Counter[tuple[int, int]] = Counter()
    first_open: Counter[int] = Counter()
    results = []
    for *ends, size in zip(source, target, sizes):
        bucket = max(first_open[rank] for rank in ends)
        while any(load[rank, bucket] + size > max(room, size) for rank in ends):
            bucket += 1
        for rank in ends:
            load[rank, bucket] += size
            while load[rank, first_open[rank]] and load[rank, first_open[rank]] + max_bytes > room:
                first_open[rank] += 1
        results.append(bucket)
    return results


def make_messages(seed: int) -> tuple[_MessageList, list[tuple[int, ...]], list[int], list[int]]:
    """Messages of chunks in one to three parts, for ranks 4 to 7 from some of ranks 0 to 3."""
    dice = random.Random(seed)
    chunks = [[dice.randint(1, 40) for _ in range(dice.randint(1, 3))] for _ in range(40)]
    builder = _MessageBuilder(lambda chunk: chunks[chunk])
    senders, targets, sizes = [], [], []
    for chunk, parts in enumerate(chunks):
        ranks = tuple(sorted(dice.sample(range(4), dice.randint(1, 4))))
        for target in sorted(dice.sample(range(4, 8), dice.randint(1, 4))):
            builder.add(chunk, _Choices([], np.array([target]), np.array([builder.group(ranks)])))
            senders += [ranks] * len(parts)
            targets += [target] * len(parts)
            sizes += parts
    return builder.messages(lambda chunk, part: part), senders, targets, sizes


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("uncompiled", [0, 1_000_000])
def test_messages_are_sent_as_the_plain_loops_say(seed: int, uncompiled: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_module, "_UNCOMPILED", uncompiled)
    messages, senders, targets, sizes = make_messages(seed)
    assert messages.target.tolist() == targets and messages.size.tolist() == sizes
    source = messages.choose_senders()
    assert source.tolist() == naive_senders(senders, sizes)
    nothing_before, in_turn = np.full(len(source), -1), np.arange(len(source))
    # a room that takes four, and one that holds less than the largest message
    for room, max_bytes in ((160, 40), (30, 7)):
        result = messages.fill_buckets(source, nothing_before, in_turn, room, max_bytes)
        assert result.tolist() == naive_buckets(source.tolist(), targets, sizes, room, max_bytes)


def test_no_messages_need_nothing() -> None:
    messages = _MessageBuilder(lambda chunk: []).messages(lambda chunk, part: 1)
    none = messages.chunk
    assert messages.choose_senders().tolist() == [] and messages.fill_buckets(none, none, none, 10, 2).tolist() == []
