"""Saved generators draw again what they drew."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import torch
from megatron.core import tensor_parallel
from safetensors.torch import load_file, save_file

from mindspeed_rl.engine import parallel


def sample() -> list[object]:
    """Some numbers of every generator, among them the second of a normal pair, which is kept back between calls."""
    with tensor_parallel.get_cuda_rng_tracker().fork():
        inside = torch.rand(3).tolist()
    return [
        *(random.gauss(0, 1), random.random(), random.getrandbits(40)),
        *(np.random.normal(), np.random.randint(1 << 30)),
        *(torch.rand(3).tolist(), torch.randn(2).tolist(), inside),
    ]


def test_all_generators_continue_where_they_were_saved(training_world: None, tmp_path: Path) -> None:
    parallel._seed_all(5)
    random.gauss(0, 1)
    np.random.normal()
    save_file(parallel.capture_rng_state(), tmp_path / "random.safetensors")
    first, second = sample(), sample()
    assert first != second
    parallel._seed_all(99)
    parallel.restore_rng_state(load_file(tmp_path / "random.safetensors"))
    assert [sample(), sample()] == [first, second]


def test_capturing_samples_nothing(training_world: None) -> None:
    parallel._seed_all(5)
    expected = sample()
    parallel._seed_all(5)
    parallel.capture_rng_state()
    assert sample() == expected
