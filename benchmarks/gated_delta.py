"""Time and memory of the gated delta rule against transformers' torch fallback: forward and backward, one sequence, float32.

python benchmarks/gated_delta.py [PLATFORM] [TOKENS ...]; PLATFORM is cpu if left out. Each line is the best of a few rounds in
which both take turns. They are one tensor-parallel rank's heads: 4 key heads, 8 value heads of 128.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor

from mindspeed_rl import adaptors, platform

_WORDS = sys.argv[1:] if sys.argv[1:2] and not sys.argv[1].isdigit() else ["cpu", *sys.argv[1:]]
platform.select(_WORDS[0])
adaptors.apply("train")

from transformers.models.qwen3_5 import modeling_qwen3_5  # noqa: E402  (Megatron must be imported after the adaptor)

from mindspeed_rl.engine import gated_delta  # noqa: E402
from mindspeed_rl.engine.sequence_layout import ChunkPlan  # noqa: E402

KEY_HEADS, RATIO, SIZE, ROUNDS = 4, 2, 128, 4


def ours(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """The chunks of this project; planning them is part of the time."""
    plan = ChunkPlan.build([q.size(0)], 4, q.device)
    q, k = gated_delta.normalize_head(q) * SIZE**-0.5, gated_delta.normalize_head(k)
    return gated_delta.gated_delta_rule(q, k, v, g, beta, plan)


def theirs(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """Run the rule as transformers does without flash-linear-attention."""
    q, k = (one.repeat_interleave(RATIO, 1)[None] for one in (q, k))
    return modeling_qwen3_5.torch_chunk_gated_delta_rule(q, k, v[None], g[None], beta[None], use_qk_l2norm_in_kernel=True)[0][0]


def measure(rule: Callable[..., Tensor], inputs: list[Tensor]) -> tuple[float, int]:
    """Return the seconds of forward and backward, and the bytes that backward needs."""
    saved: dict[int, int] = {}

    def pack(one: Tensor) -> Tensor:
        saved[one.untyped_storage().data_ptr()] = one.untyped_storage().nbytes()
        return one

    leaves = [one.clone().requires_grad_() for one in inputs]
    synchronize = platform.current().synchronize
    synchronize()
    start = time.perf_counter()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda one: one):
        output = rule(*leaves)
    output.sum().backward()
    synchronize()
    return time.perf_counter() - start, sum(saved.values())


def main() -> None:
    torch.set_num_threads(1)
    for tokens in [int(word) for word in _WORDS[1:]] or [1024, 2048, 4096, 8192]:
        torch.manual_seed(0)
        values = KEY_HEADS * RATIO
        inputs = [torch.randn(tokens, KEY_HEADS, SIZE) for _ in range(2)] + [torch.randn(tokens, values, SIZE)]
        inputs += [-0.3 * torch.rand(tokens, values), torch.rand(tokens, values)]
        inputs = [one.to(platform.current().current_device()) for one in inputs]
        rounds = [(measure(ours, inputs), measure(theirs, inputs)) for _ in range(ROUNDS)]
        (mine, mine_bytes), (other, other_bytes) = (min(side) for side in zip(*rounds))
        print(
            f"{tokens:6} tokens: {mine:6.2f} s and {mine_bytes >> 20:5} MiB; transformers {other:6.2f} s and "
            f"{other_bytes >> 20:5} MiB; {other / mine:.1f} times as fast",
            flush=True,
        )


if __name__ == "__main__":
    main()
