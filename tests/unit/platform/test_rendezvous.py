"""The store of a group listens where its address says, and nowhere else; a wait for members ends when one is not coming."""

from __future__ import annotations

import psutil
import pytest
import torch.distributed as dist
from patience import patient
from ports import find_free_port

from mindspeed_rl.platform.rendezvous import give_up, meet, open_store, reach


def addresses(port: int) -> set[str]:
    return {
        c.laddr.ip for c in psutil.Process().net_connections("inet") if c.laddr.port == port and c.status == psutil.CONN_LISTEN
    }


def test_a_store_on_loopback_is_out_of_reach_of_other_machines() -> None:
    port = find_free_port()
    first = open_store("127.0.0.1", port, 2, serves=True, timeout_s=patient(10))
    second = open_store("127.0.0.1", port, 2, serves=False, timeout_s=patient(10))
    first.set("said", "by the first")
    assert second.get("said") == b"by the first"
    assert addresses(port) == {"127.0.0.1"}


def test_a_store_for_several_machines_is_in_reach() -> None:
    port = find_free_port()
    store = open_store("0.0.0.0", port, 1, serves=True, timeout_s=patient(10))
    store.set("said", "")
    assert addresses(port) & {"0.0.0.0", "::"}


def test_a_taken_port_is_an_error_at_once() -> None:
    port = find_free_port()
    store = open_store("127.0.0.1", port, 1, serves=True, timeout_s=patient(10))
    with pytest.raises(OSError, match="in use"):
        open_store("127.0.0.1", port, 1, serves=True, timeout_s=patient(10))
    del store


def test_a_member_that_finds_no_way_to_the_store_says_where_it_looked() -> None:
    port = find_free_port()
    with pytest.raises(ConnectionError, match=f"found no way to 127.0.0.1:{port}, where trainers wait, in 0.2 s"):
        reach("127.0.0.1", port, 0.2)


def test_a_wait_for_members_ends_with_the_reason_of_who_gave_up_or_with_the_ranks_that_are_missing() -> None:
    port = find_free_port()
    store = dist.PrefixStore("first", open_store("127.0.0.1", port, 3, serves=True, timeout_s=patient(10)))
    with pytest.raises(RuntimeError, match="rendezvous given up: ranks 1, 2 of 3 did not come within 0.2 s"):
        meet(store, 0, 3, 0.2)
    give_up("127.0.0.1", port, "first", "server 1 has died")
    with pytest.raises(RuntimeError, match="rendezvous given up: server 1 has died"):
        meet(store, 0, 3, 60.0)
    give_up("127.0.0.1", find_free_port(), "first", "no store listens here")
