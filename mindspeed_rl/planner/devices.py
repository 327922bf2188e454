"""Peak figures of the device kinds; efficiency.py has the fraction that a run reaches."""

from __future__ import annotations

from dataclasses import dataclass, replace

from mindspeed_rl import registry
from mindspeed_rl.config.quantized_formats import QUANTIZED_FORMATS, find_format
from mindspeed_rl.config.run import RunConfig
from mindspeed_rl.models.plan import ModelPlan
from mindspeed_rl.models.quantized_names import explain_divided_blocks
from mindspeed_rl.planner.machine_memory import read_machine_memory
from mindspeed_rl.run import Run
from mindspeed_rl.run.rules.engine_limits import explain_drafts, read_engine_shape
from mindspeed_rl.run.rules.quantized_models import explain_unquantized
from mindspeed_rl.run.rules.rollout_rules import explain_quantization, explain_sent_experts

GIB = 1 << 30
#: fraction of a machine's memory at which Ray begins to end workers
_USABLE = 0.95


@dataclass(frozen=True)
class Device:
    """One device: what a run file counts as an NPU (an A3 card has two), or a core.

    Attributes:
        memory: bytes of device memory, by the data sheet.
        driver: bytes of it that the driver reserves.
        flops: dense operations a second in the training format.
        bandwidth: bytes a second from device memory.
        link: bytes a second to another device of the same node (or super node), one way.
        network: bytes a second to a device of another node.
        host: bytes a second to host memory.
        devices_per_node: devices that `link` reaches.
        runtime: bytes of a process before it allocates anything: its context and its libraries.
        sleeps: the rollout engine releases its memory while the model trains.
        overlaps: the host launches kernels while the device computes.
    """

    name: str
    memory: int
    driver: int
    runtime: int
    flops: float
    bandwidth: float
    link: float
    network: float
    host: float
    devices_per_node: int
    sleeps: bool = True
    overlaps: bool = True

    @property
    def kind(self) -> str:
        """Device kind, as a run file's `platform`."""
        return "cpu" if self.name == "cpu" else "npu"

    @property
    def visible(self) -> int:
        """Bytes that a process can use, of which `gpu_memory_utilization` is a fraction."""
        return self.memory - self.driver


# assumptions.py has where each number comes from

#: announced figures; bf16 is taken as half of what is announced for FP8
_950PR = Device(
    "950PR",
    memory=128 * GIB,
    driver=int(3.03 * GIB),
    runtime=int(0.36 * GIB),
    flops=500e12,
    bandwidth=1.6e12,
    link=1e12,
    network=25e9,
    host=48e9,
    devices_per_node=8,
)

DEVICES: dict[str, Device] = {
    "A2": Device(
        "A2",
        memory=64 * GIB,
        driver=int(3.03 * GIB),
        runtime=int(0.36 * GIB),
        flops=354e12,
        bandwidth=1.6e12,
        link=196e9,
        network=25e9,
        host=24e9,
        devices_per_node=8,
    ),
    "A3": Device(
        "A3",
        memory=64 * GIB,
        driver=int(2.73 * GIB),
        runtime=int(0.36 * GIB),
        flops=354e12,
        bandwidth=1.6e12,
        link=196e9,
        network=98e9,
        host=48e9,
        devices_per_node=384,
    ),
    "950PR": _950PR,
    "950DT": replace(_950PR, name="950DT", memory=144 * GIB, bandwidth=4e12),
    # one worker on one core of a server; `--calibrate` corrects the figures for your machine
    "cpu": Device(
        "cpu",
        memory=8 * GIB,
        driver=0,
        runtime=int(0.85 * GIB),
        flops=80e9,
        bandwidth=8e9,
        link=2e9,
        network=1e9,
        host=8e9,
        devices_per_node=64,
        sleeps=False,
        overlaps=False,
    ),
}


def find_device(run: Run, name: str | None = None, memory_gib: float | None = None) -> Device:
    """Return the device of a plan: the named one, else cpu for CPU runs, the run file name's, A3 if it has none.

    A worker of a CPU run whose files are here has its share of this machine's memory.

    Raises:
        ValueError: the device is not known, none is known for the run's platform, or the memory is not above 0.
    """
    if name is None:
        cfg = run.config
        if cfg.platform == "cuda":
            raise ValueError(f"platform: the planner has no figures of cuda devices; give --chip {' or '.join(DEVICES)}.")
        name = "cpu" if cfg.platform == "cpu" else _find_named(cfg) or "A3"
        if name == "cpu" and memory_gib is None and cfg.has_files_here:
            workers = max(1, run.placement.num_devices)
            return replace(DEVICES[name], memory=int(_USABLE * read_machine_memory().total / workers))
    return get_device(name, memory_gib)


def _find_named(cfg: RunConfig) -> str | None:
    """Return the device in the name of a run file, as in grpo_qwen25_7b_A3."""
    return next((device for device in DEVICES if f"_{device}" in f"_{cfg.config_name}"), None)


def list_device_obstacles(run: Run, device: Device, plan: ModelPlan | None = None) -> list[str]:
    """Return a sentence for each reason why a device does not have the format or the drafts of the run's engines.

    Rules know its kind where the run file sets `platform`, the model where its files are here, and never which NPU it is.

    Args:
        plan: the actor's model, where it is known.
    """
    cfg, generate = run.config, run.config.generate_config
    if cfg.is_supervised or generate is None or generate.engine == "transformers":
        return []
    if cfg.platform not in ("auto", device.kind):
        return []
    obstacles = []
    if cfg.platform == "auto" and (reason := explain_drafts(read_engine_shape(cfg), generate.draft_method, device.kind)):
        obstacles = [f"generate_config.speculative_config {reason}"]
    return [*obstacles, *_explain_format(run, device, plan)]


def _explain_format(run: Run, device: Device, plan: ModelPlan | None) -> list[str]:
    """Return a sentence for each reason why a device does not have `quantization`."""
    cfg, generate, kind = run.config, run.generate, device.kind
    if generate.quantization is None:
        return []
    key = f"generate_config.quantization ({generate.quantization}) is not available"
    sizes, reasons = QUANTIZED_FORMATS[find_format(generate.quantization, kind)], []
    if cfg.platform == "auto":
        reasons = [reason for _, reason in explain_quantization(run, kind)]
    if device.name in sizes.absent_npus:
        reasons.insert(0, f"on {device.name}: {sizes.npu_devices} has the operators; set int8")
    if plan is not None:
        reasons.append(explain_unquantized(plan.architecture.name, plan.model_config, generate.quantization, kind))
        reasons.append(explain_divided_blocks(plan.architecture, plan.model_config, plan.layout, generate, kind))
        if kind == "npu" and plan.model_config.moe_layers:
            reasons.append(explain_sent_experts(generate))
    return [f"{key} {reason}" for reason in dict.fromkeys(reasons) if reason]


def choose_platform(cfg: RunConfig) -> RunConfig:
    """Return a run file with `platform: cpu` in place of `auto` where it trains here, on a machine without other devices.

    It trains here where files that it names are here, unless its name has the device of another machine.
    """
    if cfg.platform != "auto" or _find_named(cfg) is not None or not cfg.has_files_here:
        return cfg
    try:
        # by name: imports torch, which other plans do without
        name = registry.load("mindspeed_rl.platform:resolve_name", "platform")("auto")
    except ValueError:
        return cfg
    return replace(cfg, platform=name) if name == "cpu" else cfg


def get_device(name: str, memory_gib: float | None = None) -> Device:
    """Return a device, with another size of memory where one is given.

    Raises:
        ValueError: the device is not known, or the memory is not above 0.
    """
    if name not in DEVICES:
        raise ValueError(f"--chip: {name!r} is not one of {', '.join(DEVICES)}.")
    if memory_gib is None:
        return DEVICES[name]
    if not memory_gib > 0:
        raise ValueError(f"--memory-gib: {memory_gib:g} must be above 0.")
    return replace(DEVICES[name], memory=int(memory_gib * GIB))
