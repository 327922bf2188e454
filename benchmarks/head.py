"""Cost of logits in float32 for a bfloat16 head: only products, and log-probs with their gradients.

    python benchmarks/head.py [--platform cpu] [--hidden 3584] [--vocab 152064]

Both forms are timed in turn, in one run. `float32_product_cost` of a platform is the ratio of the products; errors are of
log-probs against float64.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
from torch import Tensor

from mindspeed_rl import platform
from mindspeed_rl.engine.vocab import VocabHead, compute_vocab_log_probs

_ROUNDS = 7


def _time(functions: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Return the median seconds of each, one after the other in every round."""
    device, seconds = platform.current(), {name: [] for name in functions}
    for _ in range(_ROUNDS + 1):
        for name, function in functions.items():
            device.synchronize()
            start = time.perf_counter()
            function()
            device.synchronize()
            seconds[name].append(time.perf_counter() - start)
    return {name: sorted(values[1:])[_ROUNDS // 2] for name, values in seconds.items()}


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--platform", default="auto")
    parser.add_argument("--hidden", type=int, default=3584)
    parser.add_argument("--vocab", type=int, default=152064)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 64, 8])
    arguments = parser.parse_args()
    current = platform.select(arguments.platform)
    device = current.device(0)
    torch.manual_seed(0)
    weight = torch.randn(arguments.vocab, arguments.hidden, device=device).bfloat16()
    for tokens in arguments.tokens:
        # logits of about 20 at most
        hidden = (torch.randn(tokens, arguments.hidden, device=device) * 4 / arguments.hidden**0.5).bfloat16()
        labels = torch.randint(0, arguments.vocab, (tokens,), device=device)

        def log_probs(in_float32: bool, hidden: Tensor = hidden, labels: Tensor = labels) -> Tensor:
            leaf = hidden.clone().requires_grad_()
            found, _ = compute_vocab_log_probs(leaf, weight, labels, VocabHead(in_float32=in_float32))
            found.sum().backward()
            return found.detach()

        seconds = _time(
            {
                "bfloat16 product": lambda hidden=hidden: hidden @ weight.t(),
                "float32 product": lambda hidden=hidden: current.float32_product(hidden, weight),
                "bfloat16 log-probs": lambda: log_probs(False),
                "float32 log-probs": lambda: log_probs(True),
            }
        )
        few = min(tokens, 8)
        right = (hidden[:few].double() @ weight.double().t()).log_softmax(-1).gather(1, labels[:few, None])[:, 0]
        errors = [float((log_probs(wide)[:few] - right).abs().max()) for wide in (False, True)]
        text = ", ".join(f"{name} {value * 1e3:.2f} ms" for name, value in seconds.items())
        products = seconds["float32 product"] / seconds["bfloat16 product"]
        print(f"{current.name}, {tokens} tokens: {text}; products x{products:.2f}; errors {errors[0]:.1e}, {errors[1]:.1e}")


if __name__ == "__main__":
    main()
