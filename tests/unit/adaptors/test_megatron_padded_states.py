"""States of an optimizer are read by where parameters lie in a buffer of several buckets, padding included."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mindspeed_rl.adaptors import megatron_padded_states as adaptor

#: elements without padding of each bucket, which ends at a multiple of 128
BUCKETS = (100, 256, 7)
OFFSETS = (0, 128, 384)


@pytest.fixture
def group() -> Iterator[dist.ProcessGroup]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def build_optimizer(group: dist.ProcessGroup, offsets: tuple[int, ...] = OFFSETS) -> Any:
    buckets = [SimpleNamespace(offset=offset, numel_unpadded=size) for offset, size in zip(offsets, BUCKETS)]
    buffer = SimpleNamespace(buckets=buckets, numel_unpadded=sum(BUCKETS), numel=512)
    key = (torch.bfloat16, torch.float32)
    return SimpleNamespace(
        buffers=[buffer], gbuf_ranges=[{key: [None] * len(buckets)}], data_parallel_group=group, data_parallel_group_gloo=group
    )


def test_megatron_joins_buckets_without_the_padding_between_them(group: dist.ProcessGroup) -> None:
    owner = importlib.import_module(adaptor._MODULE).DistributedOptimizer
    gather = getattr(owner, adaptor._METHOD)
    gather = getattr(gather, "__wrapped__", gather)
    (tensors,) = gather(build_optimizer(group), empty_data=True, return_on_all_ranks=True)[0].values()
    assert tensors["exp_avg"].shape == (sum(BUCKETS),)


@pytest.mark.parametrize("index", range(3))
def test_a_parameter_has_the_elements_of_its_bucket(group: dist.ProcessGroup, index: int) -> None:
    optimizer = build_optimizer(group)
    joined = torch.cat([1000.0 * bucket + torch.arange(size) for bucket, size in enumerate(BUCKETS)])
    state = {0: {"float32": {"exp_avg": joined, "numel_unpadded": sum(BUCKETS)}}}
    (tensors,) = adaptor._build_gather(lambda self, **kwargs: state)(optimizer, empty_data=False)[0].values()
    start, size = OFFSETS[index], BUCKETS[index]
    assert torch.equal(tensors["exp_avg"][start : start + size], 1000.0 * index + torch.arange(size))
    assert torch.equal(tensors["exp_avg"][start + 3 : start + 5], 1000.0 * index + torch.tensor([3.0, 4.0]))
    assert tensors["numel_unpadded"] == sum(BUCKETS)


def test_buckets_without_padding_are_left_as_they_are(group: dist.ProcessGroup) -> None:
    joined = torch.zeros(sum(BUCKETS))
    gather = adaptor._build_gather(lambda self: {0: {"float32": {"exp_avg": joined}}})
    assert gather(build_optimizer(group, (0, 100, 356)))[0]["float32"]["exp_avg"] is joined
    assert adaptor._build_gather(lambda self: None)(build_optimizer(group)) is None


def test_a_second_call_changes_nothing() -> None:
    owner = importlib.import_module(adaptor._MODULE).DistributedOptimizer
    adaptor.apply()
    first = getattr(owner, adaptor._METHOD)
    adaptor.apply()
    assert getattr(owner, adaptor._METHOD) is first and first.__module__ == adaptor.__name__
