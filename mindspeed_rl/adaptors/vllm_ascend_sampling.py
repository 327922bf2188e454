"""Noise of vllm-ascend's sampler for all requests at once, each from its own seed; penalties without CUDA's kernel.

| patch | symbol | why |
|---|---|---|
| noise | vllm_ascend.sample.sampler.random_sample | a kernel for each request that has a seed, and here every request has one |
| penalties | vllm._custom_ops.apply_repetition_penalties | without Triton, vllm-ascend leaves them to vLLM, which calls \
CUDA's kernel for tensors that are CUDA's; MindSpeed says so of those of an NPU (`transfer_to_npu`) |

A token is argmax p / q with exponential q (the Gumbel trick), as before. q of token v is a hash of v and of a 64-bit key,
which is a hash of the request's seed and of its generator's position. So a request's tokens depend on nothing but its seed,
in any batch, and what vLLM does with a generator (it goes back where a sample is discarded) does the same to its keys. A
batch with requests without a seed is left to vllm-ascend. vLLM's kernel for the CPU does the same with a seed for each
token (`vllm_cpu_steps`).

The first can go when vllm-ascend samples requests with seeds in one kernel, the second when vLLM asks the platform which kernel
it has. Not verified on NPU hardware.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mindspeed_rl import platform

#: an odd factor of 30 bits, so that low bits reach the high ones
_FACTOR = 0x2C1B3C6D
#: between the integers that are hashed: 2^64 over the golden ratio
_STRIDE = np.uint64(0x9E3779B97F4A7C15)
#: a generator's position moves by this much, as for four numbers of 32 bits
_STEP = 4
#: floats of 31 bits become -u within (-1, 0): neither is an end, where the noise would be 0 or infinite
_SCALE, _ABOVE_0 = 2.0**-31 * (1.0 - 2.0**-23), 2.0**-33


def apply() -> None:
    """Patch the sampler of the installed vllm-ascend, and what it calls of vLLM. Idempotent."""
    sampler: Any = importlib.import_module("vllm_ascend.sample.sampler")
    if sampler.random_sample.__module__ != __name__:
        sampler.random_sample = _build_sampling(sampler.random_sample)
    operators: Any = importlib.import_module("vllm._custom_ops")
    operators.apply_repetition_penalties = operators.apply_repetition_penalties_torch


def _build_sampling(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    tables: dict[tuple[torch.device, int], Tensor] = {}

    def random_sample(probs: Tensor, generators: Mapping[int, torch.Generator]) -> Tensor:
        if len(generators) != len(probs) or not len(probs):
            return original(probs, generators)
        ordered = [generators[index] for index in range(len(probs))]
        positions = [generator.get_offset() for generator in ordered]
        for generator, position in zip(ordered, positions):
            generator.set_offset(position + _STEP)
        keys = hash_seeds([generator.initial_seed() for generator in ordered], positions)
        where = probs.device, probs.size(1)
        if where not in tables:
            (tables[where],) = platform.current().to_device([hash_tokens(probs.size(1))], probs.device)
        (keys,) = platform.current().to_device([keys], probs.device)
        return sample_tokens(probs, tables[where], keys)

    return random_sample


def _mix(values: np.ndarray) -> np.ndarray:
    """Return 64-bit hashes of 64-bit integers (the finalizer of SplitMix64)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def hash_seeds(seeds: Sequence[int], positions: Sequence[int]) -> Tensor:
    """Return [requests, 2] int32 keys: an addend, and an odd factor."""
    both = _mix(np.array(seeds, np.uint64)) + np.array(positions, np.uint64) * _STRIDE
    keys = torch.from_numpy(_mix(both).view(np.int32).reshape(-1, 2).copy())
    keys[:, 1] |= 1
    return keys


def hash_tokens(count: int) -> Tensor:
    """Return [count] int32, a hash of each token id."""
    tokens = np.arange(1, count + 1, dtype=np.uint64) * _STRIDE
    return torch.from_numpy(_mix(tokens).astype(np.uint32).view(np.int32))


def sample_tokens(probs: Tensor, table: Tensor, keys: Tensor) -> Tensor:
    """Return [requests] token ids; overwrites the probabilities.

    Args:
        probs: [requests, tokens] float32, 0 for a token that must not be sampled.
        table: [tokens], of `hash_tokens`.
        keys: [requests, 2], of `hash_seeds`.
    """
    bits = torch.addcmul(keys[:, :1], table, keys[:, 1:])
    bits.bitwise_xor_(bits >> 15)
    noise = bits.mul_(_FACTOR).bitwise_and_(0x7FFFFFFF).float()
    # log(1 - u) = -q: its digits are best near 0, where the smallest noise wins; and it turns the maximum into a minimum
    noise = torch.rsub(noise, -_ABOVE_0, alpha=_SCALE).log1p_()
    return probs.div_(noise).argmin(dim=-1).view(-1)
