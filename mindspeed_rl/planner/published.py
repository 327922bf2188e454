"""Published runs, and the efficiencies that fit them.

`python benchmarks/fit_planner.py` reads benchmarks/results/published_runs.json, prints the error of each figure against the fit
to all others (leave one out), and with `--write` writes constants.json, which the planner reads. Runs whose lengths were not
published are listed, not fitted: half the limit is assumed as their mean response. Throughput of a card counts tokens as
MindSpeed-RL does: the maximum response and prompt for GRPO and PPO, mean ones for DAPO.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from mindspeed_rl.config.keys.megatron import EngineName
from mindspeed_rl.config.loader import build_run_config
from mindspeed_rl.config.run_files import apply_values, compose, find_project_configs
from mindspeed_rl.files import read_json
from mindspeed_rl.planner.devices import DEVICES, GIB
from mindspeed_rl.planner.efficiency import Efficiency, PhaseError, PlannedGib
from mindspeed_rl.planner.fit import FitRequest, build_grpo_tree
from mindspeed_rl.planner.memory import Phase, plan_memory
from mindspeed_rl.planner.run_files import read_block
from mindspeed_rl.planner.run_shape import RunShape, read_shape
from mindspeed_rl.planner.samples import SampleMeans
from mindspeed_rl.planner.seconds import TimePlan, plan_time
from mindspeed_rl.run.draft import draft
from mindspeed_rl.run.phases import Phases

#: longest prompt of a mathematical data set, as the throughput of MindSpeed-RL's tables counts it
_MAX_PROMPT = 500.0
#: start of the fit, and the values that it keeps where no figure says otherwise
PRIOR = Efficiency(
    train=0.35,
    prefill=0.23,
    bandwidth=0.6,
    layer_s=3.6e-3,
    graph_layer_s=4e-4,
    graph_reduce_s=6e-5,
    response_s=5e-5,
    pass_s=3.6e-3,
    expert_pass_s=3e-4,
    phase_s=1.0,
    collective_s=5e-4,
    collective=0.4,
    logit_bytes=100.0,
    push=0.01,
    push_tensor_s=1e-3,
    push_s=2.0,
    host=0.5,
    host_adamw=5e9,
    errors={"all": PhaseError(2.0, 0.3, 0)},
)
#: bytes that verl takes for a logit of a micro-batch: bf16, and a part in float32
_LOGIT_BYTES = 5
#: figures of a phase from which it has an error of its own, and the smallest factor that is promised
_MIN_FIGURES, _MIN_SPREAD = 3, 1.1
#: constants of the device, of the rollout engine, of the host and of the links, which are the same with both training engines
_SHARED = (
    "train",
    "bandwidth",
    "layer_s",
    "graph_layer_s",
    "graph_reduce_s",
    "response_s",
    "phase_s",
    "collective_s",
    "logit_bytes",
    "push",
    "push_tensor_s",
    "push_s",
    "host",
    "host_adamw",
)
#: constants of a training engine
_TRAINING = ("pass_s", "expert_pass_s")
#: largest fractions of the data sheet's figures that kernels reach
_LARGEST = {"train": 0.8, "bandwidth": 0.85}
#: weight of a constant's distance to its prior, as a fraction of the weight of a figure's error
_PRIOR_WEIGHT = 0.1


@dataclass(frozen=True)
class PublishedRun:
    """A published run.

    Attributes:
        record: its entry in the table.
        shape: its models on its devices.
        seconds: published seconds by phase, or of the iteration as {"all": ...}.
    """

    record: Mapping[str, Any]
    shape: RunShape
    seconds: Mapping[str, float]

    @property
    def engine(self) -> EngineName:
        """The training engine."""
        return self.record["engine"]

    @property
    def is_fitted(self) -> bool:
        """True where the lengths of its samples were published."""
        return self.record["lengths"] == "published"

    def plan(self, efficiency: Efficiency) -> TimePlan:
        """Predict its seconds with an efficiency."""
        means = SampleMeans(self.record["response_tokens"], self.record["prompt_tokens"])
        return plan_time(self.shape.run, self.shape.device, samples=means, efficiency=efficiency, shape=self.shape)

    def predict(self, efficiency: Efficiency) -> dict[str, float]:
        """Predict the seconds that were published."""
        plan = self.plan(efficiency)
        return {name: plan.total if name == "all" else plan.phases[name] for name in self.seconds}

    def plan_gib(self) -> float:
        """Return the GiB that torch allocates at most in the actor's process: while it starts, or while it computes."""
        plan, actor = plan_memory(self.shape.run, self.shape.device), self.shape.actor
        phases = [phase for group in plan.groups for phase in group.phases if phase.name == Phases.UPDATE_ACTOR.memory]
        # the other program divides the gradients of each micro-batch over the ranks, and makes the logits of all tokens, which
        # are there before it reduces any
        weights = dict.fromkeys((*Phase.FIXED, "logits", "gradients of all ranks", "reduced gradients"), 0.0)
        if self.record.get("state") == "bf16":  # weights that train, and their state, are not float32
            weights |= dict.fromkeys(("weights", "gradients", "optimizer"), 0.5)
        tokens = self.shape.tokens("update") / actor.config.context_parallel_size
        head = _LOGIT_BYTES * actor.plan.model_config.padded_vocab_size / actor.plan.layout.tp * tokens
        owned = (sum(count * weights.get(owner, 1.0) for owner, count in phase.owners.items()) for phase in phases)
        # Megatron copies the weights into its buffers, where the other program has both, and the gradients' buffer
        starts = [2 * actor.weights(stage) + actor.full_gradients(stage) for stage in actor.elements]
        return max(max(owned) + head, 0 if actor.holding.is_sharded else max(starts)) / GIB


def read_published_runs(path: Path, *, only_fitted: bool = False) -> list[PublishedRun]:
    """Read the table of published runs.

    Args:
        only_fitted: leave out the runs whose lengths were not published.

    Raises:
        ValueError: the file is not such a table, or a run cannot be planned; the message names it.
    """
    runs, table = [], read_json(path)
    for record in table["runs"]:
        if only_fitted and record.get("lengths") != "published":
            continue
        try:
            shape = _read_shape(json.dumps(record | {"keys": table.get("keys", {}) | record["keys"]}))
            runs.append(PublishedRun(record, shape, _find_seconds(record, shape)))
        except (KeyError, ValueError) as error:
            raise ValueError(f"{path}: {record.get('name')}: {error}") from error
    return runs


@lru_cache(maxsize=64)
def _read_shape(text: str) -> RunShape:
    record = json.loads(text)
    if "config" in record:
        tree = compose(find_project_configs(), record["config"], [])
    else:
        sizes = (record[name] for name in ("npus", "prompt_limit", "response_limit", "prompts", "samples"))
        tree = build_grpo_tree(FitRequest(record["model"], read_block(record["model"], None), *sizes))
        tree["megatron_training"]["engine"] = record["engine"]
        if record["keys"].get("megatron_training.stage") == "ray_ppo":
            tree["critic_config"] = dict(tree["actor_config"])
    cfg = build_run_config(apply_values(tree, record["keys"]), config_name=record["name"])
    return read_shape(draft(cfg), DEVICES[record["device"]])


def _find_seconds(record: Mapping[str, Any], shape: RunShape) -> dict[str, float]:
    """Return the published seconds; for an iteration computed from the throughput of a card where only this is published."""
    if "seconds" in record:
        return record["seconds"]
    generate = shape.generate
    assert generate is not None
    tokens = generate.sampling_config.max_tokens + _MAX_PROMPT
    if not record["counts_maximum"]:
        tokens = generate.sampling_config.max_tokens / 2 + record["prompt_tokens"]
    cards = shape.placement.num_devices / record["devices_per_card"]
    return {"all": tokens * shape.sizes.rollout_samples / cards / record["tokens_per_s_card"]}


# ---------------------------------------------------------------------- fit


def _compute_loss(runs: Sequence[PublishedRun], constants: Mapping[EngineName, Efficiency]) -> float:
    """Return the errors of logarithms (half as long is as wrong as twice as long); each figure counts once.

    Errors count as they are where they are large and squared where they are small, so that one run that its source describes
    badly does not bend all others.
    """
    total = 0.0
    for run in runs:
        predicted = run.predict(constants[run.engine])
        errors = (abs(math.log(predicted[name] / seconds)) for name, seconds in run.seconds.items())
        total += sum(math.sqrt(0.01 + error**2) - 0.1 for error in errors)
    for index, efficiency in enumerate(constants.values()):
        for name in (*_TRAINING, *(() if index else _SHARED)):
            total += _PRIOR_WEIGHT * math.log(getattr(efficiency, name) / getattr(PRIOR, name)) ** 2
    return total


def fit_constants(
    runs: Sequence[PublishedRun], start: Mapping[EngineName, Efficiency] | None = None
) -> dict[EngineName, Efficiency]:
    """Fit the constants of the rollout engine and of both training engines to these runs."""
    best: dict[EngineName, Efficiency] = dict(start or {"megatron": PRIOR, "fsdp": PRIOR})
    loss, step = _compute_loss(runs, best), 1.6 if start is None else 1.25
    while step > 1.03:
        improved = False
        for engines, name in _list_constants():
            for factor in (step, 1 / step):
                candidate = dict(best)
                for engine in engines:
                    value: Any = min(getattr(best[engine], name) * factor, _LARGEST.get(name, math.inf))
                    candidate[engine] = replace(best[engine], **{name: value})
                changed = _compute_loss(runs, candidate)
                if changed < loss - 1e-9:
                    loss, best, improved = changed, candidate, True
                    break
        if not improved:
            step = math.sqrt(step)
    return best


def _list_constants() -> Iterator[tuple[tuple[EngineName, ...], str]]:
    for name in _SHARED:
        yield ("megatron", "fsdp"), name
    for name in _TRAINING:
        yield ("megatron",), name
        yield ("fsdp",), name


@dataclass(frozen=True)
class LeftOut:
    """A run and its prediction by the fit to all others.

    Attributes:
        published, predicted: seconds by phase, or of the iteration as "all".
    """

    run: PublishedRun
    published: Mapping[str, float]
    predicted: Mapping[str, float]

    def list_errors(self) -> Iterator[tuple[str, float]]:
        """Yield (phase, logarithm of predicted over published seconds)."""
        for name, seconds in self.published.items():
            yield name, math.log(self.predicted[name] / seconds)


def leave_one_out(runs: Sequence[PublishedRun]) -> Iterator[LeftOut]:
    """Yield each fitted run with the prediction by the fit to all others."""
    fitted = [run for run in runs if run.is_fitted]
    start = fit_constants(fitted)
    for run in fitted:
        constants = fit_constants([other for other in fitted if other is not run], start)
        yield LeftOut(run, run.seconds, run.predict(constants[run.engine]))


def summarize_errors(left_out: Sequence[LeftOut]) -> dict[str, PhaseError]:
    """Return the error of each phase, over both engines; the error of iterations is "all".

    A run with phases only counts for "all" by their sum.
    """
    errors: dict[str, list[float]] = {}
    for one in left_out:
        if "all" not in one.published:
            total = sum(one.predicted.values()) / sum(one.published.values())
            errors.setdefault("all", []).append(math.log(total))
        for name, error in one.list_errors():
            errors.setdefault(name, []).append(error)
    return {name: _summarize(values) for name, values in errors.items()}


def _summarize(errors: Sequence[float]) -> PhaseError:
    """Return the factor that a further run keeps in two of three cases, and the median of the relative errors.

    Of n exchangeable errors the one of rank (n + 1) * 2/3 bounds the next in two of three cases (split conformal prediction,
    arXiv:2107.07511); of few it is the largest.
    """
    ordered = sorted(map(abs, errors))
    rank = min(len(ordered), math.ceil((len(ordered) + 1) * 2 / 3))
    median = statistics.median(abs(math.expm1(error)) for error in errors)
    return PhaseError(round(max(math.exp(ordered[rank - 1]), _MIN_SPREAD), 2), round(median, 3), len(ordered))


def summarize_memory(runs: Sequence[PublishedRun]) -> PlannedGib:
    """Return the error of the planned GiB of the runs that have published ones."""
    errors = [abs(run.plan_gib() / run.record["gib"] - 1.0) for run in runs if run.record.get("gib") is not None]
    return PlannedGib(largest=math.ceil(100 * max(errors)) / 100, figures=len(errors))


def encode_constants(
    constants: Mapping[EngineName, Efficiency], left_out: Sequence[LeftOut], gib: PlannedGib
) -> dict[str, Any]:
    """Return the content of constants.json; a phase of fewer than three figures has the error of an iteration."""
    engines = {}
    for engine, efficiency in constants.items():
        # one constant is a matter of the CPU
        record = {name: value for name, value in asdict(efficiency).items() if name not in ("errors", "attention_s")}
        engines[engine] = {name: float(f"{value:.3g}") for name, value in record.items()}
    errors = ((name, error) for name, error in sorted(summarize_errors(left_out).items()) if error.figures >= _MIN_FIGURES)
    return {
        "written_by": "python benchmarks/fit_planner.py --write",
        "engines": engines,
        "errors": {name: asdict(error) for name, error in errors},
        "gib": asdict(gib),
    }
