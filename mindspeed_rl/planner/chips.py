"""What a device can do at most; how much of it a run gets is in efficiency.py."""

from __future__ import annotations

from dataclasses import dataclass, replace

from mindspeed_rl.config.run import RunConfig

GIB = 1 << 30


@dataclass(frozen=True)
class Chip:
    """One die, which is what a run file calls an NPU; an A3 card has two.

    Attributes:
        memory: bytes of device memory, as it is sold.
        driver: bytes of it that the driver keeps, which no process ever sees.
        flops: dense operations a second in the training format.
        bandwidth: bytes a second from device memory.
        link: bytes a second to another die of the same node (or super node), one way.
        network: bytes a second to a die of another node.
        host: bytes a second to host memory.
        devices_per_node: dies that `link` reaches.
        runtime: bytes that a process takes before it allocates anything: its context and its libraries.
        sleeps: the rollout engine gives its memory back while the model trains.
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

    @property
    def visible(self) -> int:
        """Bytes that a process sees, of which `gpu_memory_utilization` is a share."""
        return self.memory - self.driver


# assumptions.py has where each number comes from
CHIPS: dict[str, Chip] = {
    "A2": Chip(
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
    "A3": Chip(
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
    # a core of a server: the numbers stand for one worker on one core, and `--calibrate` is what makes them yours
    "cpu": Chip(
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
    ),
}


def chip_of(cfg: RunConfig, name: str | None = None, memory_gib: float | None = None) -> Chip:
    """Return the chip a run is planned for: the one named, else cpu for such runs, A2 if the run file's name has it, else A3.

    Raises:
        ValueError: there is no such chip, none is known for the run's platform, or the memory is not above 0.
    """
    if name is None:
        if cfg.platform == "cuda":
            raise ValueError(f"platform: the planner has no figures of cuda devices; give --chip {' or '.join(CHIPS)}.")
        name = "cpu" if cfg.platform == "cpu" else "A2" if "A2" in cfg.config_name else "A3"
    return chip_named(name, memory_gib)


def chip_named(name: str, memory_gib: float | None = None) -> Chip:
    """Return a chip, with another memory where one is given.

    Raises:
        ValueError: there is no such chip, or the memory is not above 0.
    """
    if name not in CHIPS:
        raise ValueError(f"--chip: {name!r} is not one of {', '.join(CHIPS)}.")
    if memory_gib is None:
        return CHIPS[name]
    if not memory_gib > 0:
        raise ValueError(f"--memory-gib: {memory_gib:g} must be above 0.")
    return replace(CHIPS[name], memory=int(memory_gib * GIB))
