"""The trainer's float32 products, by torch and by oneDNN (`adaptors/onednn_matmul.py`), in turn on one thread.

    python benchmarks/products.py [--rounds 30]

Where torch is no longer slower on processors that are not Intel's, the adaptor has nothing left to do.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from headline import Headline
from torch import Tensor

from mindspeed_rl.adaptors.onednn_matmul import is_used, matmul

#: rows, length of the sum, columns: what a layer of 768 numbers and its weight gradient multiply
SHAPES = {"activations": (1024, 768, 2048), "weight gradient": (768, 4096, 2048), "small": (512, 64, 192)}


def seconds(multiply: Callable[[Tensor, Tensor], Tensor], a: Tensor, b: Tensor) -> float:
    start = time.perf_counter()
    multiply(a, b)
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    if not is_used():
        print("not used on this processor: torch's own products are fast here")
    for name, (m, k, n) in SHAPES.items():
        a, b = torch.randn(m, k), torch.randn(k, n)
        matmul(a, b)  # oneDNN compiles its kernel
        pairs = [(seconds(matmul, a, b), seconds(torch.mm, a, b)) for _ in range(rounds)]
        ours, torchs = (2 * m * k * n / statistics.median(times) / 1e9 for times in zip(*pairs))
        what = f"product of {m} x {k} and {k} x {n} ({name}), GFLOP/s a core"
        Headline(what, f"{ours:.0f}", "torch.mm", f"{torchs:.0f}", ours / torchs).say()


if __name__ == "__main__":
    main()
