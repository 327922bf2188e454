"""Products of adapters in vLLM's CPU build: each row with its own adapter, rows without one with none."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mindspeed_rl.adaptors.vllm_cpu_adapters import _by_sequence, _expand, _expand_slice, _shrink

SLOTS, RANK, INPUTS, OUTPUTS = 3, 4, 6, 5
INDICES = torch.tensor([2, -1, 0, 2])


def _tensors() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(4, INPUTS, generator=generator)
    a = torch.randn(SLOTS, 1, RANK, INPUTS, generator=generator)
    return rows, a, torch.randn(SLOTS, 1, OUTPUTS, RANK, generator=generator)


def test_each_row_has_the_product_of_its_adapter_and_none_without_one() -> None:
    rows, a, b = _tensors()
    hidden, outputs = torch.zeros(4, RANK), torch.ones(4, OUTPUTS)
    _shrink(rows, a, hidden, INDICES, 0.5)
    _expand(hidden, b, outputs, INDICES)
    for row, index in enumerate(INDICES.tolist()):
        product = b[index, 0] @ (0.5 * (a[index, 0] @ rows[row])) if index >= 0 else torch.zeros(OUTPUTS)
        torch.testing.assert_close(outputs[row], 1 + product)


def test_slices_and_sequences_are_the_same_products() -> None:
    rows, a, b = _tensors()
    whole, part = torch.zeros(4, OUTPUTS), torch.ones(4, OUTPUTS + 3)
    hidden, of_sequences = torch.zeros(4, RANK), torch.zeros(4, RANK)
    _shrink(rows, a, hidden, INDICES)
    # two sequences of three rows and one, the second without an adapter
    lengths = torch.tensor([3, 1])
    _by_sequence(_shrink)(rows, a, of_sequences, torch.tensor([0, 3]), lengths, torch.tensor([1, -1]), 2, 3, 4, 1.0)
    torch.testing.assert_close(of_sequences[:3], rows[:3] @ a[1, 0].t())
    assert not of_sequences[3].any()
    _expand(hidden, b, whole, INDICES)
    _expand_slice(hidden, b, part, INDICES, 2, OUTPUTS, add_inputs=False)
    assert torch.equal(part[:, 2:7], whole) and torch.equal(part[:, :2], torch.ones(4, 2)) and part[:, 7].eq(1).all()


def test_vllm_gives_a_row_without_an_adapter_the_last_one() -> None:
    lora_ops: Any = pytest.importorskip("vllm.lora.ops.torch_ops.lora_ops")
    rows, a, _ = _tensors()
    hidden = torch.zeros(4, RANK)
    lora_ops.bgmv_shrink(rows, a, hidden, INDICES)
    torch.testing.assert_close(hidden[1], a[-1, 0] @ rows[1])
