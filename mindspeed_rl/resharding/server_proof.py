"""Proof that a rollout server holds exactly the trained weights: the server's side of it, and the comparison.

The sums are those of `resharding/proof.py`: x (x + C) modulo 2^64 over the elements' bit patterns, which add up over pieces and
do not depend on their order. It stands alone, because vLLM's workers import it and have no use for Megatron.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from torch import nn

from mindspeed_rl.adaptors.engine_hooks import DERIVED
from mindspeed_rl.resharding.bit_sums import MASK, bit_sum


class ServerDeliveryError(RuntimeError):
    """A rollout server does not hold the weights that were trained."""


@dataclass(frozen=True)
class EngineSums:
    """What one worker of a server holds, as it travels to whoever compares.

    Attributes:
        parameters: bit sum of each parameter.
        packed_names: fused modules and the tensors that go into them, as the engine's model says.
    """

    parameters: dict[str, int]
    packed_names: dict[str, list[str]]

    @classmethod
    def of(cls, engine_model: nn.Module) -> EngineSums:
        """Those of vLLM's model in this process."""
        packed: Mapping[str, Sequence[str]] = getattr(engine_model, "packed_modules_mapping", {})
        parameters = {name: bit_sum(value) for name, value in engine_model.named_parameters() if not name.endswith(DERIVED)}
        return cls(parameters, {name: list(parts) for name, parts in packed.items()})

    def to_json(self) -> str:
        """As they travel."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> EngineSums:
        """What `to_json` wrote."""
        return cls(**json.loads(text))


def compare_sums(everyone: Sequence[EngineSums], trained: Mapping[str, int], *, kv_heads: int) -> int:
    """How many parameters of a server hold what was trained: all of them.

    Args:
        everyone: of each worker of the server, in order.
        trained: the bit sum of every HF tensor.
        kv_heads: key/value heads of the model; fewer heads than workers are repeated.

    Raises:
        ServerDeliveryError: naming the first parameter that differs, or tensors no parameter accounts for.
    """
    infer_tp_size = len(everyone)
    remaining = dict(trained)
    wrong: list[str] = []
    for name in everyone[0].parameters:
        sources = _sources(name, everyone[0].packed_names, remaining)
        if not sources:
            wrong.append(f"{name} (no trained tensor has this name)")
            continue
        values = [part.parameters[name] for part in everyone]
        repeat = max(1, infer_tp_size // kv_heads) if kv_heads < infer_tp_size else 1
        split = sum((repeat if _is_key_or_value(source) else 1) * trained[source] for source in sources) & MASK
        replicated = sum(trained[source] for source in sources) & MASK
        # a parameter is either cut over the workers or held whole by each of them
        if sum(values) & MASK != split and any(value != replicated for value in values):
            wrong.append(name)
        for source in sources:
            remaining.pop(source, None)
    if wrong:
        raise ServerDeliveryError(
            f"weight push: {len(wrong)} parameters of the server differ from those trained: {', '.join(wrong[:5])}"
        )
    if remaining:
        raise ServerDeliveryError(
            f"weight push: the server has no parameter for {len(remaining)} tensors, for example {min(remaining)}"
        )
    return len(everyone[0].parameters)


def _is_key_or_value(name: str) -> bool:
    return ".k_proj." in name or ".v_proj." in name


def _sources(name: str, packed_names: Mapping[str, Sequence[str]], trained: Mapping[str, int]) -> list[str]:
    """The trained tensors that an engine parameter is made of."""
    if name in trained:
        return [name]
    prefix, _, rest = name.rpartition(".experts.")
    if prefix and rest in _EXPERT_SOURCES:
        wanted = _EXPERT_SOURCES[rest]
        start = f"{prefix}.experts."
        return [key for key in trained if key.startswith(start) and key.removeprefix(start).partition(".")[2] in wanted]
    for fused, parts in packed_names.items():
        marker = f".{fused}."
        if marker in name:
            found = [name.replace(marker, f".{part}.") for part in parts]
            return [key for key in found if key in trained]
    return []


#: vLLM's stacked expert weights and the HF tensors of one expert in them
_EXPERT_SOURCES = {
    "w13_weight": ("gate_proj.weight", "up_proj.weight", "w1.weight", "w3.weight"),
    "w2_weight": ("down_proj.weight", "w2.weight"),
    "routed_experts.w13_weight": ("gate_proj.weight", "up_proj.weight", "w1.weight", "w3.weight"),
    "routed_experts.w2_weight": ("down_proj.weight", "w2.weight"),
}
