import naive_algorithms as naive
import numpy as np
import pytest
import torch

from mindspeed_rl.algorithms.policy_losses import value_loss
from mindspeed_rl.observability.metrics import merge


def naive_value_loss(values, old, returns, mask, clip):
    total, count = 0.0, 0
    for i, t in zip(*np.nonzero(mask)):
        error = (values[i, t] - returns[i, t]) ** 2
        if clip is not None:
            near = min(max(values[i, t], old[i, t] - clip), old[i, t] + clip)
            error = max(error, (near - returns[i, t]) ** 2)
        total, count = total + error / 2, count + 1
    return total / count


@pytest.mark.parametrize("clip", [None, 0.2])
def test_value_loss_and_gradient_equal_the_naive_loops(clip):
    rng = np.random.default_rng(0)
    values, old, returns = rng.normal(size=(3, 4, 5))
    mask = rng.random((4, 5)) < 0.6
    tensor = torch.tensor(np.where(mask, values, np.nan)).requires_grad_()
    output = value_loss(
        tensor,
        torch.tensor(np.where(mask, returns, np.nan)),
        torch.tensor(mask),
        old_values=torch.tensor(np.where(mask, old, np.nan)),
        clip_range=clip,
    )
    loss = output.loss_sum / output.count
    loss.backward()
    assert loss.item() == pytest.approx(naive_value_loss(values, old, returns, mask, clip))
    expected = naive.gradient(lambda moved: naive_value_loss(moved, old, returns, mask, clip), values)
    np.testing.assert_allclose(tensor.grad.numpy(), expected, rtol=1e-6, atol=1e-9)


def test_value_loss_by_hand():
    values = torch.tensor([[2.0, 0.5]], requires_grad=True)
    output = value_loss(
        values, torch.tensor([[1.0, 1.0]]), torch.ones(1, 2, dtype=torch.bool), old_values=torch.zeros(1, 2), clip_range=0.25
    )
    # (2 - 1)^2 stands against (0.25 - 1)^2; (0.5 - 1)^2 loses against (0.25 - 1)^2
    assert output.loss_sum.item() == pytest.approx((1.0 + 0.5625) / 2)
    output.loss_sum.backward()
    assert values.grad.tolist() == [[1.0, 0.0]]
    assert output.metrics["critic/vf_clipfrac"].result() == 0.5
    assert output.metrics["critic/values/max"].result() == 2.0


def test_values_within_the_range_are_not_counted_as_clipped():
    generator = torch.Generator().manual_seed(0)
    old = torch.randn(1, 1000, generator=generator)
    values, mask = old + 0.1 * torch.rand(1, 1000, generator=generator), torch.ones(1, 1000, dtype=torch.bool)
    output = value_loss(values, torch.randn(1, 1000, generator=generator), mask, old_values=old, clip_range=0.3)
    assert output.metrics["critic/vf_clipfrac"].result() == 0.0


def test_value_loss_does_not_depend_on_the_cut():
    generator = torch.Generator().manual_seed(0)
    values, old, returns = torch.randn(3, 6, 4, generator=generator, dtype=torch.float64)
    mask = torch.rand(6, 4, generator=generator) < 0.5

    def part(rows):
        return value_loss(values[rows], returns[rows], mask[rows], old_values=old[rows], clip_range=0.1)

    whole, parts = part(slice(None)), [part([0]), part([1, 2, 5]), part([3, 4])]
    assert sum(p.loss_sum for p in parts).item() == pytest.approx(whole.loss_sum.item())
    assert sum(p.count for p in parts) == whole.count
    assert merge([p.metrics for p in parts]).results() == pytest.approx(merge([whole.metrics]).results())


def test_clipping_without_old_values_is_an_error():
    ones = torch.ones(1, 1)
    with pytest.raises(ValueError, match="cliprange_value needs old_values"):
        value_loss(ones, ones, ones.bool(), clip_range=0.1)
    with pytest.raises(ValueError, match="must not be negative"):
        value_loss(ones, ones, ones.bool(), old_values=ones, clip_range=-0.1)


def test_a_micro_batch_without_rows_adds_nothing():
    empty = torch.zeros(0, 3)
    output = value_loss(empty, empty, empty.bool(), old_values=empty, clip_range=0.1)
    assert (output.loss_sum.item(), output.count.item(), output.metrics) == (0.0, 0, {})
