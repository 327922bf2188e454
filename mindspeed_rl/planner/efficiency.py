"""Efficiencies of a run: fractions of a device's figures and seconds of host work, by device and training engine.

NPUs' are read from constants.json, which `benchmarks/fit_planner.py` writes: it fits them to the published runs of
`benchmarks/results/published_runs.json`. assumptions.py has the source of each number.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import get_args

from mindspeed_rl.config.keys.megatron import EngineName
from mindspeed_rl.files import read_json

#: the fitted constants of NPUs, by training engine
CONSTANTS = Path(__file__).with_name("constants.json")


@dataclass(frozen=True)
class PhaseError:
    """Error of the predictions of a phase, each by the fit to all other published runs.

    Attributes:
        spread: the seconds of a further run are within this factor of the prediction, either way, in two of three cases.
        median: median of the relative errors.
        figures: number of published figures behind it.
    """

    spread: float
    median: float
    figures: int


@dataclass(frozen=True)
class PlannedGib:
    """Error of planned memory.

    Attributes:
        largest: the largest relative error.
        figures: number of published figures behind it.
    """

    largest: float
    figures: int

    def __str__(self) -> str:
        return f"the plans of {self.figures} measured runs are within {self.largest:.0%}"


@dataclass(frozen=True)
class Efficiency:
    """Fractions of a device's figures, and times of work on the host.

    Attributes:
        train: fraction of the operations a second in updates and log-prob passes.
        prefill: the same in the engine's prefill.
        bandwidth: fraction of the memory's bytes a second while tokens are generated.
        layer_s, graph_layer_s: seconds of host work that a layer costs in each step of the engine, without and with captured
            graphs (`enforce_eager`).
        graph_reduce_s: latency of an all-reduce in a captured graph; a layer has two where the engine has tensor ranks.
        response_s: seconds of host work for each response in a step of the engine: its scheduler, sampler and text.
        pass_s: seconds of host work that a micro-batch costs in a layer of a pass of the trainer.
        expert_pass_s: what each expert of a rank costs there in addition.
        phase_s: seconds of a phase of the trainer besides its passes: rows come and go.
        collective_s: latency of a collective in a layer of a pass.
        collective: fraction of the links in the collectives of tensor, context, expert and data parallelism.
        logit_bytes: bytes that a logit moves through the memory until its softmax and entropy are known.
        push: fraction of the link in a weight sync.
        push_tensor_s: seconds of host work that each tensor costs there.
        push_s: seconds of a weight sync besides these: releasing and waking up the engine's memory.
        host: fraction of the host link when training state is moved.
        host_adamw: bytes of optimizer states that the processors of a device's host update in a second.
        attention_s: seconds of a head of a sequence in a pass, for each 32 of its tokens, by torch's kernel of attention on the
            CPU; kernels of NPUs take all sequences of a micro-batch at once.
        errors: error of the predictions by phase, by timer or "all" for an iteration.
    """

    train: float
    prefill: float
    bandwidth: float
    layer_s: float
    graph_layer_s: float
    graph_reduce_s: float
    response_s: float
    pass_s: float
    expert_pass_s: float
    phase_s: float
    collective_s: float
    collective: float
    logit_bytes: float
    push: float
    push_tensor_s: float
    push_s: float
    host: float
    host_adamw: float
    attention_s: float = 0.0
    errors: Mapping[str, PhaseError] = field(default_factory=dict)

    def find_error(self, phase: str = "all") -> PhaseError:
        """Return the error of a phase, or of an iteration where no published run has the phase."""
        return self.errors.get(phase, self.errors["all"])

    @property
    def spread(self) -> float:
        """Factor within which the seconds of two of three iterations are, either way."""
        return self.find_error().spread


def _read_constants() -> dict[EngineName, Efficiency]:
    record = read_json(CONSTANTS)
    errors = {name: PhaseError(**error) for name, error in record["errors"].items()}
    return {engine: Efficiency(**record["engines"][engine], errors=errors) for engine in get_args(EngineName)}


_GIB_ERROR = PlannedGib(**read_json(CONSTANTS)["gib"])
#: error where no published run is like the planned one: of another device kind, or of a supervised stage
UNSEEN = {"all": PhaseError(spread=2.2, median=0.45, figures=0)}
#: engine -> efficiency on an NPU
NPU = _read_constants()
_ANNOUNCED = {engine: replace(efficiency, errors=UNSEEN) for engine, efficiency in NPU.items()}
#: for one worker on one core, by three small runs of docs/planner.md; `--calibrate` corrects it for another machine
_CPU = Efficiency(
    train=0.6,
    prefill=0.4,
    bandwidth=0.5,
    layer_s=4e-4,
    graph_layer_s=4e-4,
    graph_reduce_s=0.0,
    response_s=0.0,
    pass_s=4e-3,
    expert_pass_s=0.0,
    phase_s=0.0,
    collective_s=0.0,
    collective=0.5,
    logit_bytes=0.0,
    push=0.1,
    push_tensor_s=0.0,
    push_s=0.0,
    host=0.5,
    host_adamw=8e9,
    attention_s=3.6e-5,
    errors={"all": PhaseError(spread=2.0, median=0.4, figures=7)},
)
#: device kind -> error of planned memory, where runs on it were published
GIB_ERRORS: dict[str, PlannedGib] = dict.fromkeys(("A2", "A3"), _GIB_ERROR)
EFFICIENCIES: dict[str, Mapping[EngineName, Efficiency]] = {
    **dict.fromkeys(("A2", "A3"), NPU),
    **dict.fromkeys(("950PR", "950DT"), _ANNOUNCED),
    "cpu": {"megatron": _CPU, "fsdp": _CPU},
}
