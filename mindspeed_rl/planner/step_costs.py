"""Costs of a step on a rank, counted ones and their lower bounds, as text for a terminal and as JSON.

A lower bound has one kernel for each part of the model and moves each byte once, for a model without pipeline stages. A layer's
kernels are its norms, matrix products, rotary embeddings, attention, gated activation and residual sums; backward has two
products for each of forward's. Not modelled: casts, biases, the sums of gradients over micro-batches.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from mindspeed_rl.config import MegatronConfig
from mindspeed_rl.models.model_config import ModelConfig
from mindspeed_rl.models.plan import ModelPlan
from mindspeed_rl.planner.memory import compute_layer_bytes
from mindspeed_rl.planner.shapes import count_stage_elements

_MIB = float(1 << 20)
#: a rank's counts as `CostLedger.record` returns them
_Record = Mapping[str, Any]
_COLUMNS = ("kernels", "waits", "copies", "collective_mib", "peak_mib")
_MAX_OPERATORS = 12


@dataclass(frozen=True)
class LowerBound:
    """The least that a phase could cost.

    Attributes:
        kernels: number of kernels of a phase; phases are named as in `CostLedger`.
        waits: number of waits of the host.
        copies: between host and device.
        collective_bytes: bytes of the larger side of every collective call, over the ranks of groups of several ranks.
        peak_bytes: allocated at a time; 0 where it is not modelled.
    """

    kernels: int = 0
    waits: int = 0
    copies: int = 0
    collective_bytes: int = 0
    peak_bytes: int = 0


def compute_lower_bounds(
    plan: ModelPlan, config: MegatronConfig, *, rows: list[int], tokens: int, replicas: int
) -> dict[str, LowerBound]:
    """Compute the lower bound of each phase on a rank of a model without pipeline stages.

    Args:
        plan: plan of the model.
        config: keys of its role.
        rows: number of rows of each micro-batch.
        tokens: number of tokens of a row.
        replicas: data-parallel ranks.
    """
    model_config, count = plan.model_config, len(rows)
    experts = [layer in model_config.moe_layers for layer in range(model_config.num_layers)]
    kernels = [count_kernels(model_config, has_experts) for has_experts in experts]
    # two more: the embedding, the last norm
    forward, backward = (sum(layer[index] for layer in kernels) + 2 for index in (0, 1))
    tp, itemsize = config.tensor_model_parallel_size, 2 if config.bf16 else 4
    # two exchanges of activations a layer, one after the embedding and one before the head
    exchanges = 2 * model_config.num_layers + 2
    if config.sequence_parallel:
        exchanges *= 2  # a gather before each product, a reduce-scatter after it
    activations = sum(rows) * tokens * model_config.hidden_size * itemsize * exchanges if tp > 1 else 0
    parameters = count_stage_elements(plan, config)[0].parameters
    reduced = parameters * (4 + itemsize) if replicas > 1 else 0  # gradients in float32, weights
    optimizer = parameters * 12 // (replicas if config.use_distributed_optimizer else 1)
    saved = sum(
        compute_layer_bytes(config, model_config, max(rows) * tokens, layer).saved for layer in range(model_config.num_layers)
    )
    weights = parameters * itemsize
    resident = weights + parameters * 4 + optimizer
    update = count * (forward + backward + 5) + 2
    return {
        "log-probs": LowerBound(count * (forward + 2), 1, 2 * count, activations, resident),
        "update": LowerBound(update, 1, count + 1, 2 * activations + reduced, resident + round(saved)),
        "update / forward": LowerBound(count * forward, 0, 0, activations),
        "update / backward": LowerBound(count * backward, 0, 0, activations),
        "update / head": LowerBound(count * 2),  # the product, and all of the loss
        "update / head, backward": LowerBound(count * 3),
        "update / optimizer": LowerBound(2, 1, 0, parameters * itemsize if replicas > 1 else 0),
        "update / gradients": LowerBound(0, 0, 0, parameters * 4 if replicas > 1 else 0),
        "update / micro-batches": LowerBound(0, 0, count),
        "offload": LowerBound(0, 1, 2),
        "onload": LowerBound(0, 0, 2),
    }


def count_kernels(model_config: ModelConfig, has_experts: bool) -> tuple[int, int]:
    """Count the kernels of a layer in forward and in backward."""
    if model_config.multi_latent_attention:
        norms, products = 3, 5 if model_config.q_lora_rank else 4
    else:
        norms, products = 3 if model_config.qk_layernorm else 1, 2
    # rotary embedding of query and key, attention, two residual sums, the norm before the MLP
    others = 2 + 1 + 2 + 1
    # with experts: the router, its choice, tokens to their experts and back
    return norms + products + others + (7 if has_experts else 3), norms + 2 * products + others + (10 if has_experts else 5)


def _group_by_phase(record: _Record) -> dict[str, dict[str, float]]:
    """Sum the counts of each phase; an outer phase includes the phases inside it."""
    phases: defaultdict[str, defaultdict[str, float]] = defaultdict(lambda: defaultdict(float))

    def add(phase: str, name: str, amount: float) -> None:
        for owner in dict.fromkeys((phase.split(" / ")[0], phase)):
            phases[owner][name] += amount

    for phase, _, count in record["kernels"]:
        add(phase, "kernels", count)
    for phase, _, _, count in record["waits"]:
        add(phase, "waits", count)
    for phase, _, count, _ in record["copies"]:
        add(phase, "copies", count)
    for phase, _, _, _, size in record["collectives"]:
        add(phase, "collective_mib", size / _MIB)
    for phase, size in record["peak_bytes"].items():
        phases[phase]["peak_mib"] = size / _MIB
    phases.pop("outside", None)
    order = ("log-probs", "update", "push", "offload", "onload")

    def rank(phase: str) -> tuple[int, str]:
        first = phase.split(" / ")[0]
        return (order.index(first) if first in order else len(order), phase)

    return {phase: {name: phases[phase][name] for name in _COLUMNS} for phase in sorted(phases, key=rank)}


def encode_costs(
    ours: _Record, plain: _Record | None, bounds: Mapping[str, LowerBound], settings: Mapping[str, object]
) -> dict[str, object]:
    """Return all counts, and the sums of the phases, of both trainers."""
    trainers = {"ours": ours} if plain is None else {"ours": ours, "plain": plain}
    return {
        **settings,
        "phases": {name: _group_by_phase(record) for name, record in trainers.items()},
        "least": {phase: asdict(value) for phase, value in bounds.items()},
        "counted": trainers,
    }


def format_costs(ours: _Record, plain: _Record | None, bounds: Mapping[str, LowerBound], settings: Mapping[str, object]) -> str:
    """Return the tables of `mindspeed-rl npu-cost`."""
    lines = [f"{name}: {value}" for name, value in settings.items()]
    mine, theirs = _group_by_phase(ours), {} if plain is None else _group_by_phase(plain)
    formats: dict[str, Callable[[float], str]] = {
        "kernels": "{:.0f}".format,
        "waits": "{:.0f}".format,
        "copies": "{:.0f}".format,
        "collective_mib": "{:.2f}".format,
        "peak_mib": "{:.1f}".format,
    }
    least = {phase: _list_least(bound) for phase, bound in bounds.items()}
    lines += ["", "ours / plain Megatron + MindSpeed / least; - is not counted or not modelled"]
    rows = [["", "kernels", "waits", "copies", "collectives MiB", "peak MiB"]]
    for phase in mine:
        cells = []
        for name, text in formats.items():
            values = (mine.get(phase), theirs.get(phase), least.get(phase))
            cells.append(" / ".join("-" if value is None or name not in value else text(value[name]) for value in values))
        outer, _, inner = phase.rpartition(" / ")
        rows.append([f"  {inner}" if outer else phase, *cells])
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines += ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]
    lines += _format_record("ours", ours)
    if plain is not None:
        lines += _format_record("plain", plain)
    return "\n".join(lines)


def _list_least(bound: LowerBound) -> dict[str, float]:
    least = {
        "kernels": bound.kernels,
        "waits": bound.waits,
        "copies": bound.copies,
        "collective_mib": bound.collective_bytes / _MIB,
    }
    return least | {"peak_mib": bound.peak_bytes / _MIB} if bound.peak_bytes else least


def _format_record(name: str, record: _Record) -> list[str]:
    """Return the lines about each wait, copy and collective, and about the most frequent kernels."""
    lines = ["", f"{name}: waits of the host"]
    lines += [f"  {count:4d}  {phase}: {reason}, {line}" for phase, reason, line, count in sorted(record["waits"])]
    lines += [f"{name}: copies"]
    lines += [f"  {count:4d}  {phase}: {kind}, {size} bytes" for phase, kind, count, size in sorted(record["copies"])]
    lines += [f"{name}: collectives"]
    lines += [
        f"  {count:4d}  {phase}: {operation} over {group}, {size} bytes"
        for phase, operation, group, count, size in sorted(record["collectives"])
    ]
    operators: Counter[tuple[str, str]] = Counter()
    for phase, operator, count in record["kernels"]:
        operators[phase.split(" / ")[0], operator] += count
    lines += [f"{name}: the most frequent kernels"]
    lines += [f"  {count:4d}  {phase}: {operator}" for (phase, operator), count in operators.most_common(_MAX_OPERATORS)]
    return lines
