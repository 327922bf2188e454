"""Sums over bits leave the memory they read as it was."""

from __future__ import annotations

import torch

from mindspeed_rl.resharding.bit_sums import MASK, bit_sum


def test_a_storage_that_was_summed_may_still_be_emptied_and_filled() -> None:
    for tensor in (torch.arange(6.0), torch.arange(12.0).view(3, 4)[:, :2], torch.arange(12.0).view(3, 4).T):
        bits = [int(value) for value in tensor.contiguous().view(torch.int32).flatten()]
        assert bit_sum(tensor) == sum(x * (x + 0x9E3779B97F4A7C15) for x in bits) & MASK
        storage = tensor.untyped_storage()
        storage.resize_(0)
        storage.resize_(48)


def test_nothing_sums_to_nothing() -> None:
    assert bit_sum(torch.zeros(0)) == bit_sum(torch.zeros(0, 3)) == 0
