"""The trainer's products and attention on the CPU beside torch's, in turn on one thread.

    python benchmarks/products.py [--rounds 30]

Products are torch's own with what `adaptors/cpu_products.py` (float32) and `adaptors/cpu_halves.py` (bfloat16) set and
without it, attention is `adaptors/cpu_attention.py` with these settings and torch's without them, there and back. Where torch
is no longer slower on processors that are not Intel's or have no AVX-512, these adaptors have nothing left to do.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from headline import Headline
from torch import Tensor
from torch_as_it_comes import torch_as_it_comes

from mindspeed_rl.adaptors import cpu_attention, cpu_halves, cpu_products, torch_attention

#: rows, length of the sum, columns: what a layer of 768 numbers and its weight gradient multiply
SHAPES = {"activations": (1024, 768, 2048), "weight gradient": (768, 4096, 2048), "small": (512, 64, 192)}
#: sequences, tokens of each, heads, heads of keys, numbers of a head
SEQUENCES = (
    *((32, 76, 4, 2, 32), (16, 76, 8, 4, 64), (9, 268, 4, 2, 32)),
    *((4, 268, 12, 6, 64), (2, 512, 8, 4, 64), (1, 2048, 8, 4, 64)),
)


def seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def in_turn(ours: Callable[[], object], torchs: Callable[[], object], rounds: int) -> tuple[float, float]:
    """Medians in seconds; ours with this suite's setting, torch's without."""
    ours()  # oneDNN compiles its kernels
    pairs = []
    for _ in range(rounds):
        mine = seconds(ours)
        with torch_as_it_comes():
            pairs.append((mine, seconds(torchs)))
    of_ours, of_torch = zip(*pairs)
    return statistics.median(of_ours), statistics.median(of_torch)


def say_product(name: str, m: int, k: int, n: int, dtype: torch.dtype, rounds: int) -> None:
    a, b = torch.randn(m, k).to(dtype), torch.randn(k, n).to(dtype)
    ours, torchs = (2 * m * k * n / each / 1e9 for each in in_turn(lambda: a @ b, lambda: a @ b, rounds))
    kind = "" if dtype == torch.float32 else ", bfloat16"
    what = f"product of {m} x {k} and {k} x {n} ({name}{kind}), GFLOP/s a core"
    Headline(what, f"{ours:.3g}", "torch as it comes", f"{torchs:.3g}", ours / torchs).say()


def say_attention(b: int, s: int, n: int, g: int, d: int, rounds: int) -> None:
    qkv = [torch.randn(b, s, heads, d, requires_grad=True) for heads in (n, g, g)]
    direction = torch.randn(b, s, n, d)

    def there_and_back(attention: Callable[..., Tensor]) -> Callable[[], object]:
        return lambda: torch.autograd.grad(attention(*qkv, d**-0.5), qkv, direction)

    pair = in_turn(there_and_back(cpu_attention.causal_attention), there_and_back(torch_attention), rounds)
    ours, torchs = (each * 1e3 for each in pair)
    what = f"attention and its gradient, {b} x {s} tokens, {n} heads of {d} with {g} of keys, ms on one core"
    Headline(what, f"{ours:.1f}", "torch as it comes", f"{torchs:.1f}", torchs / ours).say()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    cpu_products.apply()
    cpu_halves.apply()
    for needed, dtype in ((cpu_products.is_worthwhile(), torch.float32), (cpu_halves.is_worthwhile(), torch.bfloat16)):
        if not needed:
            print(f"no setting for {dtype} on this processor: torch's own products are fast here")
            continue
        for name, shape in SHAPES.items():
            say_product(name, *shape, dtype, rounds)
    for shape in SEQUENCES:
        say_attention(*shape, rounds)


if __name__ == "__main__":
    main()
