"""Host memory of a run against this machine's, phase by phase."""

from __future__ import annotations

from collections.abc import Sequence

from mindspeed_rl.cli.doctor.checks import Finding
from mindspeed_rl.planner.devices import GIB
from mindspeed_rl.planner.host_memory import HostPhase
from mindspeed_rl.planner.machine_memory import MachineMemory

#: last words of an owner of host memory -> what makes it smaller; of other owners the number of devices
_FIXES = {
    "optimizer": "actor_config.optimizer_offload_path keeps the optimizer's states in a file, or a smaller "
    "optimizer_offload_fraction on the devices",
    "gradients": "offload_gradients: false keeps them on the devices",
    "tensors of the save": "async_save: false saves one model after the other; no_save_optim: true leaves the states out",
    "export": "save_hf: false, and `mindspeed-rl convert` later",
    "average of the weights": "rl_config.ema_decay: 0 keeps no average",
    "weights in place of the average": "rl_config.ema_decay: 0 keeps no average",
}
_FEWER = "more devices on more machines: each machine then has fewer and smaller copies"


def check_host_memory(phases: Sequence[HostPhase], devices: int, machine: MachineMemory) -> list[Finding]:
    """Compare each phase of a plan with the memory of this machine, and name the phases that do not fit.

    A phase above all of the memory fails; one above what is available now is warned about.

    Args:
        phases: bytes of a device.
        devices: devices of the run on a machine.
        machine: memory of this machine.
    """
    findings = [_check_phase(phase, devices, machine) for phase in phases if phase.total]
    if not findings:
        text = "nothing of the devices is copied to the host"
        findings.append(Finding("host memory of the run", "all phases", "ok", text))
    return findings


def _check_phase(phase: HostPhase, devices: int, machine: MachineMemory) -> Finding:
    total = devices * phase.total
    owners = sorted(phase.owners.items(), key=lambda item: -item[1])
    named = ", ".join(f"{owner} {devices * count / GIB:.1f}" for owner, count in owners)
    text = f"{total / GIB:.1f} GiB of {devices} device{'s' * (devices > 1)} ({named})"
    name = f"in {phase.name}"
    largest = owners[0][0]
    fix = next((words for end, words in _FIXES.items() if largest.endswith(end)), _FEWER)
    if total > machine.total:
        text += f"; this machine has {machine.total / GIB:.1f} GiB ({machine.source})"
        return Finding("host memory of the run", name, "fail", text, fix)
    if total > machine.available:
        text += f"; {machine.available / GIB:.1f} of {machine.total / GIB:.1f} GiB are available now"
        return Finding("host memory of the run", name, "warn", text, f"end other programs first; or {fix}")
    return Finding("host memory of the run", name, "ok", f"{text}; {machine.available / GIB:.1f} GiB are available")
