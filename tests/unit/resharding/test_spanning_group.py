"""Every tensor reaches every member of a group with its name, type, shape and bits, whatever the bucket holds."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from ports import free_port

from mindspeed_rl import platform
from mindspeed_rl.resharding.spanning import Meeting, SpanningGroup, receive, send

TENSORS = {
    "a": torch.arange(7, dtype=torch.float32) / 3,
    "b": torch.randn(3, 5, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16),
    "scalar": torch.tensor(2.5),
    "empty": torch.empty(0, 4),
    "count": torch.tensor([1 << 40, -3]),
    "slice": torch.arange(24, dtype=torch.float32).view(4, 6)[:, 1:3],
}


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    platform.select("cpu")


@pytest.mark.parametrize("bucket_bytes", [1, 64, 1 << 20])
def test_every_member_receives_what_was_sent(bucket_bytes: int) -> None:
    meeting = Meeting.from_json(Meeting("127.0.0.1", free_port(), "meeting", 3, 30.0).to_json())

    def member(rank: int) -> dict[str, torch.Tensor]:
        group = SpanningGroup(meeting, rank)
        try:
            if rank == 0:
                send(group, TENSORS.items(), bucket_bytes=bucket_bytes)
                send(group, {"second": torch.ones(2)}.items())
                return {}
            found = {name: tensor.clone() for name, tensor in receive(group)}
            assert [name for name, _ in receive(group)] == ["second"]
            return found
        finally:
            group.close()

    with ThreadPoolExecutor(3) as threads:
        found = list(threads.map(member, range(3)))
    for received in found[1:]:
        assert list(received) == list(TENSORS)
        for name, tensor in TENSORS.items():
            assert received[name].dtype == tensor.dtype and torch.equal(received[name], tensor), name


def test_a_member_that_leaves_ends_the_push_of_the_others() -> None:
    meeting = Meeting("127.0.0.1", free_port(), "meeting", 2, 30.0)

    def member(rank: int) -> str:
        group = SpanningGroup(meeting, rank)
        if rank == 1:
            group.close()
            return ""
        with pytest.raises(RuntimeError) as error:
            send(group, (("a", torch.zeros(1 << 20)) for _ in range(100)), bucket_bytes=1 << 20)
        group.close()
        return str(error.value)

    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(member, range(2)))[0]
