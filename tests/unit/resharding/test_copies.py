"""Copies that wait and are made together give what copies one by one give."""

from __future__ import annotations

import torch

from mindspeed_rl.resharding.copies import Copies


def test_copies_of_any_layout_and_type_are_all_made() -> None:
    generator = torch.Generator().manual_seed(0)
    sources = [torch.randn(shape, generator=generator) for shape in ((3, 4), (4,), (5, 4), (0, 4), (6, 4), (2, 8))]
    sources += [sources[0].to(torch.bfloat16), sources[4].t(), sources[5][:, 2:6], sources[1].double()]
    targets = [torch.zeros(source.shape, dtype=source.dtype) for source in sources]
    # a part of the columns of a matrix, a transposed one, another type
    wide, tall, rounded = torch.zeros(5, 9), torch.zeros(4, 5), torch.zeros(3, 4, dtype=torch.bfloat16)
    targets += [wide[:, 3:7], tall.t(), rounded]
    sources += [sources[2], sources[2], sources[0]]
    copies = Copies()
    for target, source in zip(targets, sources):
        copies.add(target, source)
    copies.make()
    assert all(torch.equal(target, source.to(target.dtype)) for target, source in zip(targets, sources))
    assert torch.equal(wide[:, 3:7], sources[2]) and not wide[:, :3].any() and not wide[:, 7:].any()
    # nothing waits any more
    sources[0].zero_()
    copies.make()
    assert bool(targets[0].any())
