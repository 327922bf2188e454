"""Efficiencies of a run: fractions of a device's figures, by name; assumptions.py has the source of each number."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Efficiency:
    """Fractions of a device's figures, and times of work on the host.

    Attributes:
        train: fraction of the operations a second in updates and log-prob passes.
        prefill: the same in the engine's prefill.
        bandwidth: fraction of the memory's bytes a second while tokens are generated.
        layer_s, graph_layer_s: seconds of host work that a layer costs in each step of the engine, without and with captured
            graphs (`enforce_eager`).
        pass_s: seconds of host work that a micro-batch costs in a layer of a pass of the trainer.
        collective: fraction of the links in the collectives of tensor, context, expert and data parallelism.
        push: fraction of the link in a weight sync.
        host: fraction of the host link when training state is moved.
        spread: a prediction is within this factor either way, two times of three.
    """

    train: float
    prefill: float
    bandwidth: float
    layer_s: float
    graph_layer_s: float
    pass_s: float
    collective: float
    push: float
    host: float
    spread: float


#: train and the seconds of a layer as `planner.published.fit_efficiency` fits them to all published figures, and the error of
#: the fit; the others are assumptions
NPU = Efficiency(
    train=0.16,
    prefill=0.23,
    bandwidth=0.6,
    layer_s=3.6e-3,
    graph_layer_s=7.4e-4,
    pass_s=2e-4,
    collective=0.4,
    push=0.01,
    host=0.1,
    spread=2.2,
)
#: for one worker on one core, by three small runs of docs/planner.md; `--calibrate` corrects it for another machine
_CPU = Efficiency(
    train=0.6,
    prefill=0.4,
    bandwidth=0.5,
    layer_s=4e-4,
    graph_layer_s=4e-4,
    pass_s=4e-3,
    collective=0.5,
    push=0.1,
    host=0.5,
    spread=2.0,
)
EFFICIENCIES: dict[str, Efficiency] = {"A2": NPU, "A3": NPU, "950PR": NPU, "950DT": NPU, "cpu": _CPU}
