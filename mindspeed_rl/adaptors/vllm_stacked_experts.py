"""vLLM's gpt-oss takes the separate experts of a weight sync (GptOssForCausalLM.load_weights; vLLM 0.18 to 0.32).

Its loader takes a layer's experts as one tensor, as checkpoints have them, and a weight sync sends each expert by itself.
So separate experts are put together before the loader sees them; under expert parallelism this rank's experts, with zeros
for the others, of which the loader takes nothing. It can go when the loader takes ``experts.0.gate_proj.weight`` and the like,
as it does for other families; `tests/unit/adaptors` fails then.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

_EXPERT = re.compile(r"^(.+\.mlp\.experts)\.(\d+)\.(gate|up|down)_proj\.(weight|bias)$")
_applied = False


def find_stack(name: str) -> tuple[str, int, str] | None:
    """Return the tensor of all experts that has a matrix of one expert, its index there, and gate, up or down; else None."""
    match = _EXPERT.match(name)
    if match is None:
        return None
    block, expert, part, kind = match.groups()
    return f"{block}.{'down' if part == 'down' else 'gate_up'}_proj{'_bias' if kind == 'bias' else ''}", int(expert), part


def join_parts(parts: Mapping[str, Tensor], *, alternate: bool = True) -> Tensor:
    """Return one expert's matrix as a stack has it: inputs before outputs, gate and up in alternate columns or as halves."""
    if "down" in parts:
        return parts["down"].t()
    if not alternate:
        return torch.cat([parts["gate"], parts["up"]]).t()
    return torch.stack([parts["gate"].t(), parts["up"].t()], dim=-1).flatten(-2)


def join_experts(
    named: Iterable[tuple[str, Tensor]], num_experts: int, *, alternate: bool = True, local: Collection[int] = ()
) -> Iterator[tuple[str, Tensor]]:
    """Yield the same tensors with the experts of a layer stacked, once all of them have come; see `join_parts`.

    Args:
        local: experts to wait for, where not for all; others are left out, and zeros in the stack.

    Raises:
        RuntimeError: a stack is not complete at the end.
    """
    awaited = set(local or range(num_experts))
    waiting: dict[str, dict[int, dict[str, Tensor]]] = {}
    for name, tensor in named:
        place = find_stack(name)
        if place is None:
            yield name, tensor
            continue
        stack, expert, part = place
        if expert not in awaited:
            continue
        experts = waiting.setdefault(stack, {})
        # the giver may use its memory for the next one
        experts.setdefault(expert, {})[part] = tensor.clone()
        if sum(map(len, experts.values())) == len(awaited) * (1 if part == "down" else 2):
            del waiting[stack]
            joined = {index: join_parts(parts, alternate=alternate) for index, parts in experts.items()}
            yield stack, torch.stack([joined.get(index, torch.zeros_like(joined[expert])) for index in range(num_experts)])
    if waiting:
        raise RuntimeError(f"weight push: {min(waiting)} came without some of its {len(awaited)} experts.")


def apply() -> None:
    """Let gpt-oss of vLLM take separate experts. Imports its module; idempotent."""
    global _applied
    if _applied:
        return
    from vllm.distributed.parallel_state import get_ep_group
    from vllm.model_executor.models import gpt_oss

    model_class: Any = gpt_oss.GptOssForCausalLM
    load = model_class.load_weights

    def load_weights(self: Any, weights: Iterable[tuple[str, Tensor]]) -> object:
        count, local = self.config.num_local_experts, range(0)
        if self.model.parallel_config.enable_expert_parallel:
            group = get_ep_group()
            size = count // group.world_size
            local = range(group.rank_in_group * size, (group.rank_in_group + 1) * size)
        return load(self, join_experts(weights, count, local=local))

    model_class.load_weights = load_weights
    _applied = True
