"""Every number that a plan takes as given: what it is, where it comes from, and whether anybody has looked on an NPU.

The values stand where they are used; here they are read, so that none is written twice. `plan memory` and `plan time` print
those that a plan rests on, and docs/planner.md has the table of all (`python benchmarks/planner.py assumptions`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from mindspeed_rl.config.run import RunConfig
from mindspeed_rl.planner.activations import EXPERT_IMBALANCE, MEAN_EXPERT_IMBALANCE
from mindspeed_rl.planner.chips import GIB, Chip
from mindspeed_rl.planner.communicators import HCCL_BUFFERS, hccl_buffer_mib
from mindspeed_rl.planner.efficiency import Efficiency
from mindspeed_rl.planner.lengths import SIGMA
from mindspeed_rl.planner.memory import FRAGMENTATION, MODEL_ERROR
from mindspeed_rl.planner.seconds import TimePlan

#: what is said of a number that no run on a device has confirmed
UNVERIFIED = "not verified on NPU"


@dataclass(frozen=True)
class Assumption:
    """Attributes:
    source: where the value comes from.
    is_unverified: no run on an NPU has confirmed it.
    """

    name: str
    value: str
    source: str
    is_unverified: bool = True

    def __str__(self) -> str:
        return f"{self.name} {self.value}: {self.source}{f'; {UNVERIFIED}' if self.is_unverified else ''}"


def of_memory(cfg: RunConfig, chip: Chip) -> Iterator[Assumption]:
    """What the modelled bytes of a run rest on."""
    yield from _of_device(chip, _gib(chip.memory))
    if chip.sleeps:
        yield Assumption(
            "HCCL buffers",
            f"{HCCL_BUFFERS} x {hccl_buffer_mib(cfg)} MiB a communicator",
            "CANN's page of HCCL_BUFFSIZE; a communicator for each group of several ranks of Megatron and of the engine that "
            "exchanges tensors on devices",
        )
    on_npu = chip.sleeps
    yield Assumption("activations", f"within {MODEL_ERROR:.0%}", "the terms of arXiv:2205.05198; CPU runs", on_npu)
    if cfg.actor_config.num_experts:
        value = f"{EXPERT_IMBALANCE:g} x an even share in a layer, {MEAN_EXPERT_IMBALANCE:g} x over a stage"
        yield Assumption("busiest expert rank", value, "a guess", on_npu)
    yield Assumption("fragmentation", f"{FRAGMENTATION:.0%} of what comes and goes", "a guess", on_npu)
    if cfg.generate_config is not None and not cfg.is_supervised:
        yield Assumption(
            "engine step", f"within {MODEL_ERROR:.0%}", "inputs and outputs of a layer, the sampler's rows", on_npu
        )


def _of_device(chip: Chip, memory: str) -> Iterator[Assumption]:
    if chip.sleeps:
        seen = {"A2": "60.97 of 64 GiB (vllm-ascend#1987, #1127)", "A3": "61.27 of 64 GiB (sglang#29838)"}[chip.name]
        yield Assumption("memory of a die", memory, "npu-smi in reports of users; --memory-gib says another", False)
        yield Assumption("driver", _gib(chip.driver), f"torch there counts {seen}", False)
        yield Assumption("runtime", _gib(chip.runtime), "what was neither free nor torch's in a full die (vllm-ascend#1987)")
    else:
        yield Assumption("memory of a worker", memory, "a guess; --memory-gib says another", False)
        yield Assumption("runtime", _gib(chip.runtime), "resident memory of a worker with torch, Megatron and vLLM", False)


def of_time(cfg: RunConfig, chip: Chip, plan: TimePlan) -> Iterator[Assumption]:
    """What the seconds of a plan rest on."""
    yield from _of_chip(chip)
    yield from _of_efficiency(plan.efficiency, fitted=chip.sleeps)
    if cfg.generate_config is not None and not cfg.is_supervised:
        yield Assumption("lengths", f"lognormal, spread {SIGMA:g} of the logarithm", "a guess; --mean-response", False)


def _of_chip(chip: Chip) -> Iterator[Assumption]:
    if not chip.sleeps:
        figures = f"{chip.flops / 1e9:g} Gflop/s, {chip.bandwidth / 1e9:g} GB/s"
        yield Assumption("a core", figures, "two cores of one shared machine; --calibrate makes it yours", False)
        return
    yield Assumption("operations", f"{chip.flops / 1e12:g} T/s a die in bf16", "verl's flops_counter.py")
    yield Assumption("memory bandwidth", f"{chip.bandwidth / 1e12:g} TB/s", "what is published of its HBM2e")
    yield Assumption(
        "link", f"{chip.link / 1e9:g} GB/s one way to {chip.devices_per_node} dies", "what the vendor publishes of HCCS"
    )
    yield Assumption("network", f"{chip.network / 1e9:g} GB/s one way beyond them", "what the vendor publishes of RoCE")
    yield Assumption("host link", f"{chip.host / 1e9:g} GB/s", "a guess, from PCIe of its generation")


def _of_efficiency(efficiency: Efficiency, *, fitted: bool) -> Iterator[Assumption]:
    fit = "fit to the published figures" if fitted else "three CPU runs"
    guess = "a guess" if fitted else "three CPU runs"
    meanings = {
        "train": ("of the operations, in passes of the trainer", fit),
        "prefill": ("of the operations, in prefill", fit),
        "layer_s": ("s of host work for a layer in a step of the engine", fit),
        "graph_layer_s": ("s of the same with captured graphs", fit),
        "bandwidth": ("of the memory's bandwidth while tokens are generated", guess),
        "pass_s": ("s of host work for a layer in a micro-batch", guess),
        "collective": ("of the links in collectives", guess),
        "push": ("of the link in a weight push", guess),
        "host": ("of the host link when training state moves", guess),
        "spread": (
            "x either way, two times of three",
            "each published figure against the fit to the others" if fitted else guess,
        ),
    }
    for name, (unit, source) in meanings.items():
        yield Assumption(name, f"{getattr(efficiency, name):g} {unit}", source, fitted and source == "a guess")


def _gib(count: float) -> str:
    return f"{count / GIB:.3g} GiB"
