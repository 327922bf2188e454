"""A limit is torch's clamp, in value and gradient, with fewer operators."""

from __future__ import annotations

import math

import pytest
import torch

from mindspeed_rl.algorithms.limits import limit

LOW, HIGH = -1.5, 2.0
POINTS = [-math.inf, -3.0, LOW, math.nextafter(LOW, 0), -0.0, 0.0, 1.0, HIGH, math.nextafter(HIGH, 3), 7.0, math.inf, math.nan]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_value_and_gradient_are_those_of_clamp_at_and_beyond_the_bounds(dtype: torch.dtype) -> None:
    results = []
    for function in (limit, torch.clamp):
        x = torch.tensor(POINTS, dtype=dtype, requires_grad=True)
        value = function(x, LOW, HIGH)
        value.backward(torch.arange(1.0, len(POINTS) + 1).to(dtype))
        results.append((value.detach(), x.grad))
    (value, gradient), (expected, slope) = results
    assert torch.equal(value.nan_to_num(99.0), expected.nan_to_num(99.0)) and value.isnan().sum() == 1
    assert torch.equal(gradient, slope)


def test_without_a_gradient_it_is_one_operator() -> None:
    assert not limit(torch.tensor(POINTS), LOW, HIGH).requires_grad
