"""Speed of this machine in a short trial: the first plan of a run on the CPU, before any run was measured here.

The constants of the CPU are of one core of another machine. A trial of half a second corrects them where no earlier run does
(calibration.py): products of the model's sizes stand for passes, copies for reading weights, small operations for the host's
work in a layer.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import statistics
import subprocess
import sys
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from mindspeed_rl.config.threads import WAITING, count_cores, decide_threads
from mindspeed_rl.planner.devices import Device
from mindspeed_rl.planner.efficiency import EFFICIENCIES
from mindspeed_rl.planner.run_shape import read_shape
from mindspeed_rl.planner.samples import SampleMeans
from mindspeed_rl.planner.seconds import TimePlan, calibrate, plan_time
from mindspeed_rl.run import Run

_PROGRAM = Path(__file__).with_name("trial_process.py")
_TOKENS, _TIMEOUT_S = 2048, 20.0
#: seconds of a run from which a trial is worth its 0.5 s
_WORTH_S = 20.0
#: seconds of a small operation on the machine that the constants come from
_CALL_S = 3.3e-7
#: fraction of the products' operations a second in passes, which do more than products
_OF_PRODUCTS = 0.6


@dataclass(frozen=True)
class MachineSpeed:
    """Figures of a worker on this machine.

    Attributes:
        flops: operations a second in products.
        bandwidth: bytes a second that a copy reads and writes.
        call_s: seconds of a small operation.
    """

    flops: float
    bandwidth: float
    call_s: float


@lru_cache(maxsize=16)
def measure_machine(hidden: int, ffn: int, threads: int, workers: int) -> MachineSpeed | None:
    """Measure products of these sizes; None where the trial does not run.

    Args:
        threads: threads of a worker.
        workers: trials at the same time, which share the machine as the run's workers do; the result is their mean.
    """
    variables = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), str(threads))
    command = [sys.executable, "-I", str(_PROGRAM), *map(str, (_TOKENS, hidden, ffn))]
    environment = {**os.environ, **WAITING, **variables}
    with contextlib.ExitStack() as stack:
        try:
            pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
            trials = [stack.enter_context(subprocess.Popen(command, env=environment, **pipes)) for _ in range(workers)]
            for trial in trials:
                stack.callback(trial.kill)  # no effect on one that has ended
            measured = [MachineSpeed(**json.loads(trial.communicate(timeout=_TIMEOUT_S)[0])) for trial in trials]
        except (OSError, subprocess.SubprocessError, ValueError, TypeError):
            return None
    return MachineSpeed(*(statistics.fmean(figures) for figures in zip(*map(dataclasses.astuple, measured))))


def plan_by_trial(plan: TimePlan, run: Run, device: Device, samples: SampleMeans | None) -> TimePlan:
    """Return a plan with the speed of this machine, where its devices are the machine's cores; else the plan itself.

    A run that takes less than `_WORTH_S` by the plan is not worth a trial.
    """
    config = run.config.actor_config
    if device.sleeps or config.train_epochs is None and (config.train_iters or 0) * plan.total < _WORTH_S:
        return plan
    workers = max(1, run.placement.num_devices)
    threads = decide_threads(config.threads_per_worker, workers, os.environ).count
    speed = measure_machine(*_find_sizes(run, device), threads, max(1, min(workers, count_cores() // threads)))
    return plan if speed is None else correct_by_speed(plan, run, device, samples, speed)


def _find_sizes(run: Run, device: Device) -> tuple[int, int]:
    """Return the hidden size of the run's model and the width of its MLP, or of an expert."""
    model_config = read_shape(run, device).actor.plan.model_config
    return model_config.hidden_size, model_config.moe_ffn_hidden_size or model_config.ffn_hidden_size


def correct_by_speed(plan: TimePlan, run: Run, device: Device, samples: SampleMeans | None, speed: MachineSpeed) -> TimePlan:
    """Return a plan each of whose phases takes as many times as long as it would with the measured figures."""
    efficiency = EFFICIENCIES[device.name][run.config.actor_config.engine]
    slower = speed.call_s / _CALL_S
    measured = dataclasses.replace(
        efficiency,
        train=_OF_PRODUCTS,
        prefill=_OF_PRODUCTS * efficiency.prefill / efficiency.train,
        layer_s=slower * efficiency.layer_s,
        graph_layer_s=slower * efficiency.graph_layer_s,
        pass_s=slower * efficiency.pass_s,
        attention_s=slower * efficiency.attention_s,
    )
    here = dataclasses.replace(device, flops=speed.flops, bandwidth=speed.bandwidth)
    made = plan_time(run, here, samples=samples, efficiency=measured)
    hidden, ffn = _find_sizes(run, device)
    note = (
        f"the speed of this machine as measured now: {speed.flops / 1e9:.3g} Gflop/s of a worker in products of "
        f"{hidden} x {ffn}, {speed.bandwidth / 1e9:.2g} GB/s of copies, {speed.call_s * 1e6:.2g} us of a small operation"
    )
    factors = {name: made.phases[name] / seconds for name, seconds in plan.phases.items() if seconds}
    return dataclasses.replace(calibrate(plan, factors), notes=(*plan.notes, note))
