"""The store of a group listens where its address says, and nowhere else."""

from __future__ import annotations

import psutil
import pytest
from ports import find_free_port

from mindspeed_rl.platform.rendezvous import open_store


def addresses(port: int) -> set[str]:
    return {
        c.laddr.ip for c in psutil.Process().net_connections("inet") if c.laddr.port == port and c.status == psutil.CONN_LISTEN
    }


def test_a_store_on_loopback_is_out_of_reach_of_other_machines() -> None:
    port = find_free_port()
    first = open_store("127.0.0.1", port, 2, serves=True, timeout_s=10)
    second = open_store("127.0.0.1", port, 2, serves=False, timeout_s=10)
    first.set("said", "by the first")
    assert second.get("said") == b"by the first"
    assert addresses(port) == {"127.0.0.1"}


def test_a_store_for_several_machines_is_in_reach() -> None:
    port = find_free_port()
    store = open_store("0.0.0.0", port, 1, serves=True, timeout_s=10)
    store.set("said", "")
    assert addresses(port) & {"0.0.0.0", "::"}


def test_a_taken_port_is_an_error_at_once() -> None:
    port = find_free_port()
    store = open_store("127.0.0.1", port, 1, serves=True, timeout_s=10)
    with pytest.raises(OSError, match="in use"):
        open_store("127.0.0.1", port, 1, serves=True, timeout_s=10)
    del store
