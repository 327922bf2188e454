"""The server continues only while all ranks of a service have done the same."""

from __future__ import annotations

from typing import Any

import pytest

from mindspeed_rl.service.rank_group import _are_in_step

MEMORY = "OutOfMemoryError: tried to allocate 2 GiB on device"


@pytest.mark.parametrize(
    ("outcomes", "expected"),
    [
        ([("done", 3), ("done", None)], True),
        ([("refused", "model a exists already."), ("refused", "model a exists already.")], True),
        ([("failed", f"{MEMORY} 0"), ("failed", f"{MEMORY} 1")], True),
        ([("done", 3), ("failed", MEMORY)], False),
        ([("refused", "x"), ("failed", MEMORY)], False),
        # one lacked memory, and the other waited for it in a collective
        ([("failed", MEMORY), ("failed", "DistBackendError: NCCL error")], False),
        ([("failed", "RuntimeError: x"), ("failed", "RuntimeError: Connection closed by peer [127.0.0.1]:1")], False),
        ([("failed", "RuntimeError: Timed out waiting 1800000ms for recv operation")] * 2, False),
    ],
)
def test_ranks_are_in_step_where_all_have_ended_alike_and_none_waited_in_vain(
    outcomes: list[tuple[str, Any]], expected: bool
) -> None:
    assert _are_in_step(outcomes) is expected
