"""Assumed numbers of a plan: value, source, and whether a run on an NPU has confirmed it.

The values are defined where they are used; here they are read, so that none is written twice. `plan memory` and `plan time`
print the assumptions of a plan, and docs/planner.md has the table of all (`python benchmarks/planner.py assumptions`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from mindspeed_rl.config.run import RunConfig
from mindspeed_rl.planner.devices import GIB, Device
from mindspeed_rl.planner.memory import (
    EXPERT_IMBALANCE,
    FRAGMENTATION,
    HCCL_BUFFERS,
    MEAN_EXPERT_IMBALANCE,
    Phase,
    find_judge_folder,
    hccl_buffer_mib,
)
from mindspeed_rl.planner.samples import Lengths
from mindspeed_rl.planner.seconds import DISK, TimePlan

#: device -> memory that torch counts there
_COUNTED = {"A2": "60.97 of 64 GiB (vllm-ascend#1987, #1127)", "A3": "61.27 of 64 GiB (sglang#29838)"}
#: devices of which nothing but announced figures is known
_ANNOUNCED = ("950PR", "950DT")
#: label of a number that no run on an NPU has confirmed
_UNVERIFIED = "not verified on NPU"


@dataclass(frozen=True)
class Assumption:
    """A number that a plan takes as given.

    Attributes:
        source: source of the value.
        is_unverified: no run on an NPU has confirmed it.
    """

    name: str
    value: str
    source: str
    is_unverified: bool = True

    def __str__(self) -> str:
        return f"{self.name} {self.value}: {self.source}{f'; {_UNVERIFIED}' if self.is_unverified else ''}"


def list_memory_assumptions(cfg: RunConfig, device: Device) -> Iterator[Assumption]:
    """Yield the assumptions of the modelled bytes of a run."""
    memory, runtime = (f"{count / GIB:.3g} GiB" for count in (device.memory, device.runtime))
    if device.sleeps:
        announced = device.name in _ANNOUNCED
        source = "the announcement of September 2025" if announced else "npu-smi in reports of users"
        yield Assumption("memory of a device", memory, f"{source}; --memory-gib sets another", announced)
        reserved = "as on an A2, a guess" if announced else f"torch there counts {_COUNTED[device.name]}"
        yield Assumption("driver", f"{device.driver / GIB:.3g} GiB", reserved, announced)
        full = "what was neither free nor torch's in a full device (vllm-ascend#1987)"
        yield Assumption("runtime", runtime, full)
        yield Assumption(
            "HCCL buffers",
            f"{HCCL_BUFFERS} x {hccl_buffer_mib(cfg)} MiB a communicator",
            "CANN's page of HCCL_BUFFSIZE; a communicator for each group of several ranks of Megatron and of the engine that "
            "exchanges tensors on devices",
        )
    else:
        yield Assumption("memory of a worker", memory, "a guess; --memory-gib sets another", False)
        yield Assumption("runtime", runtime, "resident memory of a worker with torch, Megatron and vLLM", False)
    on_npu = device.sleeps
    yield Assumption("activations", f"within {Phase.MODEL_ERROR:.0%}", "the terms of arXiv:2205.05198; CPU runs", on_npu)
    if cfg.actor_config.num_experts:
        value = f"{EXPERT_IMBALANCE:g} x an even share in a layer, {MEAN_EXPERT_IMBALANCE:g} x over a stage"
        yield Assumption("busiest expert rank", value, "a guess", on_npu)
    yield Assumption("fragmentation", f"{FRAGMENTATION:.0%} of what comes and goes", "a guess", on_npu)
    if cfg.generate_config is not None and not cfg.is_supervised:
        yield Assumption(
            "engine step", f"within {Phase.MODEL_ERROR:.0%}", "inputs and outputs of a layer, the sampler's rows", on_npu
        )
        judge = None if cfg.rl_config is None else cfg.rl_config.served_judge
        if judge is not None and find_judge_folder(cfg) is None:
            yield Assumption("judge", "no bytes", f"{judge} is not on this machine, or not all of it", False)


def list_time_assumptions(cfg: RunConfig, device: Device, plan: TimePlan) -> Iterator[Assumption]:
    """Yield the assumptions of the seconds of a plan."""
    if device.sleeps:
        announced = device.name in _ANNOUNCED
        peak = "half of the 1 P/s announced for FP8; bf16 is not published" if announced else "verl's flops_counter.py"
        yield Assumption("operations", f"{device.flops / 1e12:g} T/s a device in bf16", peak)
        memory = "the announcement of September 2025" if announced else "what is published of its HBM2e"
        yield Assumption("memory bandwidth", f"{device.bandwidth / 1e12:g} TB/s", memory)
        link = f"{device.link / 1e9:g} GB/s one way to {device.devices_per_node} devices"
        links = "half of the announced 2 TB/s" if announced else "what the vendor publishes of HCCS"
        yield Assumption("link", link, links)
        yield Assumption("network", f"{device.network / 1e9:g} GB/s one way beyond them", "what the vendor publishes of RoCE")
        yield Assumption("host link", f"{device.host / 1e9:g} GB/s", "a guess, from PCIe of its generation")
    else:
        figures = f"{device.flops / 1e9:g} Gflop/s, {device.bandwidth / 1e9:g} GB/s"
        yield Assumption("a core", figures, "two cores of one shared machine; --calibrate corrects it for yours", False)
    actor = cfg.actor_config
    if actor.optimizer_offload_fraction:
        updated = f"{plan.efficiency.host_adamw / 1e9:g} GB/s of optimizer states for a device"
        source = "fit to the published runs" if device.sleeps else "a core of one shared machine has 4.7 GB/s"
        yield Assumption("AdamW on the host", updated, source, False)
    if actor.optimizer_offload_fraction and actor.optimizer_offload_path is not None:
        yield Assumption("disk", f"{DISK / 1e9:g} GB/s for a machine", "a guess, an NVMe disk")
    fit = "fit to the published runs" if device.sleeps else "three CPU runs"
    guess = "a guess" if device.sleeps else "three CPU runs"
    is_seen = device.sleeps and plan.efficiency.find_error().figures > 0
    meanings = {
        "train": ("of the operations, in passes of the trainer", fit),
        "prefill": ("of the operations, in prefill", guess),
        "layer_s": ("s of host work for a layer in a step of the engine", fit),
        "graph_layer_s": ("s of a layer with captured graphs", fit),
        "graph_reduce_s": ("s of latency of each of a layer's two all-reduces in a captured graph", fit),
        "response_s": ("s of host work for a response in a step of the engine", fit),
        "bandwidth": ("of the memory's bandwidth while tokens are generated", fit),
        "pass_s": ("s of host work for a layer in a micro-batch", fit),
        "expert_pass_s": ("s of the same for each expert of a rank", fit),
        "phase_s": ("s of a phase of the trainer besides its passes", fit),
        "collective_s": ("s of latency of a collective in a layer of a pass", fit),
        "collective": ("of the links in collectives", guess),
        "logit_bytes": ("bytes that a logit moves through the memory, in forward and again in backward", fit),
        "push": ("of the link in a weight push", fit),
        "push_tensor_s": ("s of host work for a tensor there", fit),
        "push_s": ("s of a weight push besides these", fit),
        "host": ("of the host link when training state moves", fit),
        "spread": (
            "x either way, two times of three",
            "each published run against the fit to the others" if is_seen else guess,
        ),
    }
    if plan.efficiency.attention_s:
        unit = "s of a head for each 32 tokens of a sequence, where a trial at the start of a run chooses torch's attention"
        meanings["attention_s"] = (unit, fit)
    for name, (unit, source) in meanings.items():
        value = f"{getattr(plan.efficiency, name):g} {unit}"
        yield Assumption(name, value, source, device.sleeps and source == "a guess")
    if cfg.generate_config is not None and not cfg.is_supervised:
        yield Assumption("lengths", f"lognormal, spread {Lengths.SIGMA:g} of the logarithm", "a guess; --mean-response", False)
