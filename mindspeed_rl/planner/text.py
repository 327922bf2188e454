"""Plans as text for a terminal, and as JSON objects."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass

from mindspeed_rl.planner.advice import Change
from mindspeed_rl.planner.assumptions import Assumption
from mindspeed_rl.planner.devices import GIB, Device
from mindspeed_rl.planner.efficiency import GIB_ERRORS
from mindspeed_rl.planner.fit import FitRequest, FitResult
from mindspeed_rl.planner.host_memory import HostMemory, HostPhase
from mindspeed_rl.planner.memory import DeviceGroup, MemoryPlan, Phase
from mindspeed_rl.planner.seconds import ModeTime, TimePlan, format_number
from mindspeed_rl.planner.server import ServerPlan
from mindspeed_rl.planner.smallest import StageMachines, list_costs
from mindspeed_rl.run.rules.violation import format_value

_JsonObject = dict[str, object]

_MEANING = {
    "tight": "It fits as it is computed, and not if all modelled bytes are at the upper end of their range.",
    "over": "It does not fit as it is computed, and might if all modelled bytes are at the lower end of their range.",
}


@dataclass(frozen=True)
class MemoryReport:
    """The output of `mindspeed-rl plan memory`."""

    plan: MemoryPlan
    changes: Sequence[Change]
    assumed: Sequence[Assumption]
    server: ServerPlan | None = None

    def format(self) -> str:
        """Return the plan as text."""
        plan = self.plan
        fullest = plan.fullest
        peak = fullest.peak
        low, high = (bound / GIB for bound in peak.range)
        lines = [
            f"{plan.verdict}: the peak is {_gib(peak.total)} GiB ({low:.0f} to {high:.0f}) of the "
            f"{plan.capacity / GIB:.0f} GiB of a device of {plan.device}, in phase {peak.name}, on {fullest.name} "
            f"(devices {fullest.ranks})",
            *([_MEANING[plan.verdict]] if plan.verdict in _MEANING else []),
            *([f"Peaks: {GIB_ERRORS[plan.device]}."] if plan.device in GIB_ERRORS else []),
            "",
            f"GiB of a device by owner and phase; * is modelled and may be off by {Phase.MODEL_ERROR:.0%}, "
            "the others are counted",
        ]
        emptiest = min(plan.groups, key=lambda group: group.peak.total)
        for group in [fullest] if emptiest.peak.total == peak.total else [fullest, emptiest]:
            lines += ["", f"{group.name}, devices {group.ranks}", *_format_table(group)]
        if plan.cache is not None:
            cache = plan.cache
            sequences = cache.room // cache.sequence if cache.sequence else 0
            lines += [
                "",
                f"KV cache of a rank: {cache.bytes_per_token / 1024:.0f} KiB a token; room for {sequences} sequences of the "
                f"maximum length, {cache.sequences} may run at once and would take {_gib(cache.needed)} GiB",
            ]
        if plan.host is not None and (plan.host.total or plan.host.disk or plan.host.checkpoint):
            lines += ["", *_format_host(plan.host)]
        lines += [f"  - {problem}" for problem in plan.problems]
        if self.server is not None:
            lines += ["", f"Server: {self.server.describe()}"]
        if self.changes:
            enough = self.changes[0].plan.verdict == "fits"
            lines += ["", "Changes after which it fits, nearest first" if enough else "Nearest to fitting"]
            for change in self.changes:
                keys = " ".join(f"{name}={format_value(value)}" for name, value in change.values.items())
                reached = change.plan.fullest.peak
                lines.append(f"  {keys}\n      then {_gib(reached.total)} GiB in {reached.name}; costs: {change.costs}")
        elif plan.verdict == "does not fit":
            lines += ["", "No change of the layout, of offloading or of recomputation was found after which it fits."]
        return "\n".join([*lines, "", "Assumed:", *(f"  {assumption}" for assumption in self.assumed)])

    def encode(self) -> _JsonObject:
        """Return the plan as a JSON object, with numbers of bytes."""
        plan = self.plan
        peak = plan.fullest.peak
        return {
            "verdict": plan.verdict,
            "chip": plan.device,
            "capacity": plan.capacity,
            "peak": {
                "bytes": peak.total,
                "range": list(peak.range),
                "measured_runs": GIB_ERRORS[plan.device].figures if plan.device in GIB_ERRORS else 0,
                "phase": peak.name,
                "dies": plan.fullest.ranks,
                "group": plan.fullest.name,
            },
            "dies": [
                {
                    "name": group.name,
                    "ranks": group.ranks,
                    "count": group.count,
                    "phases": [{"phase": phase.name, "bytes": phase.total, "owners": phase.owners} for phase in group.phases],
                }
                for group in plan.groups
            ],
            "kv_cache": None if plan.cache is None else vars(plan.cache),
            "host": None if plan.host is None else _encode_host(plan.host),
            "problems": list(plan.problems),
            "server": None if self.server is None else self.server.encode(),
            "modelled_may_be_off_by": Phase.MODEL_ERROR,
            "assumed": [vars(assumption) for assumption in self.assumed],
            "changes": [
                {
                    "values": change.values,
                    "costs": change.costs,
                    "verdict": change.plan.verdict,
                    "bytes": change.plan.fullest.peak.total,
                }
                for change in self.changes
            ],
        }


def _format_host(host: HostMemory) -> list[str]:
    """Return host memory by owner and phase, and the sentences about it and about disks."""
    table = _format_owners(host.phases, lambda owner: owner) if host.total else []
    title = [f"GiB of host memory for each of {host.devices} devices of a machine, by owner and phase"] if table else []
    return [*title, *table, *([""] if table else []), *host.list_lines()]


def _encode_host(host: HostMemory) -> _JsonObject:
    return {
        "phases": [{"phase": phase.name, "bytes": phase.total, "owners": phase.owners} for phase in host.phases],
        "owners": host.owners,
        "devices": host.devices,
        "bytes": host.total,
        "disk": host.disk,
        "checkpoint": host.checkpoint,
    }


def _format_table(group: DeviceGroup) -> list[str]:
    return _format_owners(group.phases, lambda owner: owner if owner in Phase.EXACT else f"{owner} *")


def _format_owners(phases: Sequence[Phase] | Sequence[HostPhase], title: Callable[[str], str]) -> list[str]:
    """Return a table with a row for each owner and a column for each phase."""
    owners = list(dict.fromkeys(owner for phase in phases for owner in phase.owners))
    names = [title(owner) for owner in owners]
    first = max(len(name) for name in [*names, "together"])
    widths = [max(7, len(phase.name)) for phase in phases]
    lines = [" " * (first + 2) + "  ".join(f"{phase.name:>7}" for phase in phases)]
    for owner, name in zip(owners, names):
        counts = [phase.owners.get(owner) for phase in phases]
        cells = [f"{'' if count is None else _gib(count):>{width}}" for count, width in zip(counts, widths)]
        lines.append(f"  {name:<{first}}" + "  ".join(cells))
    totals = [f"{_gib(phase.total):>{width}}" for phase, width in zip(phases, widths)]
    return [*lines, f"  {'together':<{first}}" + "  ".join(totals)]


def _gib(count: float) -> str:
    return f"{count / GIB:.2f}" if 0 < count < GIB else f"{count / GIB:.1f}"


# ---------------------------------------------------------------------- time


@dataclass(frozen=True)
class TimeReport:
    """The output of `mindspeed-rl plan time`."""

    plan: TimePlan
    modes: Mapping[str, ModeTime]
    assumed: Sequence[Assumption]

    def format(self) -> str:
        """Return the plan as text, every number with its range."""
        plan = self.plan
        tokens = sorted(plan.tokens / plan.devices / bound for bound in plan.bounds(plan.total))
        lines = [
            f"{plan.format_bounds(plan.total)} s an iteration, {format_number(tokens[0])} to {format_number(tokens[1])} "
            f"tokens/s a device, on {plan.devices} x {plan.device}; two of three runs are within a range",
            "",
            f"  {'phase':<22}{'seconds':>18}{'by runs':>9}   made of",
        ]
        for name, seconds in plan.phases.items():
            total = sum(plan.parts[name].values())
            fractions = {part: value / total for part, value in plan.parts[name].items() if total and value / total >= 0.01}
            parts = ", ".join(f"{part} {value:.0%}" for part, value in sorted(fractions.items(), key=lambda item: -item[1]))
            runs = plan.efficiency.find_error(name).figures
            lines.append(f"  {name:<22}{plan.format_bounds(seconds, name):>18}{runs:>9}   {parts}")
        if self.modes:
            lines += ["", f"  {'trainer_mode':<22}{'s an iteration':>18}   devices that generate, time that each side waits"]
        for name, mode in self.modes.items():
            devices = "all, in turn" if mode.rollout_fraction == 1.0 else f"{mode.rollout_fraction * 8:.0f} of 8"
            waits = f"trainer {mode.trainer_idle:.0%}, engine {mode.engine_idle:.0%}"
            lines.append(f"  {name:<22}{plan.format_bounds(mode.seconds):>18}   {devices}; {waits}")
        lines += ["", "By runs: number of published runs behind a range; python benchmarks/fit_planner.py prints their errors"]
        if plan.factors:
            factors = ", ".join(f"{name} x {factor:.2g}" for name, factor in plan.factors.items())
            lines += ["", f"Calibrated, measured over predicted: {factors}"]
        return "\n".join([*lines, "", "Assumed:", *(f"  {note}" for note in (*plan.notes, *self.assumed))])

    def encode(self) -> _JsonObject:
        """Return the plan as a JSON object."""
        plan = self.plan
        return {
            "chip": plan.device,
            "devices": plan.devices,
            "tokens": plan.tokens,
            "seconds": _encode_bounds(plan, plan.total),
            "phases": {
                name: {
                    **_encode_bounds(plan, seconds, name),
                    "runs": plan.efficiency.find_error(name).figures,
                    "parts": plan.parts[name],
                }
                for name, seconds in plan.phases.items()
            },
            "modes": {
                name: {**_encode_bounds(plan, mode.seconds), "share": mode.rollout_fraction}
                for name, mode in self.modes.items()
            },
            "efficiencies": asdict(plan.efficiency),
            "factors": plan.factors,
            "notes": list(plan.notes),
            "assumed": [vars(assumption) for assumption in self.assumed],
        }


def _encode_bounds(plan: TimePlan, seconds: float, phase: str = "all") -> dict[str, float]:
    low, high = plan.bounds(seconds, phase)
    return {"low": low, "middle": seconds, "high": high}


# ---------------------------------------------------------------------- layouts

_COLUMNS = {
    "train on": "trainers",
    "TP": "actor_config.tensor_model_parallel_size",
    "PP": "actor_config.pipeline_model_parallel_size",
    "VPP layers": "actor_config.num_layers_per_virtual_pipeline_stage",
    "CP": "actor_config.context_parallel_size",
    "EP": "actor_config.expert_model_parallel_size",
    "recompute": "actor_config.recompute_granularity",
    "swap": "actor_config.swap_optimizer",
    "optimizer on host": "actor_config.optimizer_offload_fraction",
    "gradients on host": "actor_config.offload_gradients",
    "fp32 gradients": "actor_config.grad_reduce_in_fp32",
    "streamed ref": "actor_config.stream_ref_weights",
    "optimizer offloaded": "generate_config.offload_train_optimizer",
    "weights offloaded": "generate_config.offload_train_param",
    "tokens": "rl_config.max_packing_token_size",
    "rollout TP": "generate_config.infer_tensor_parallel_size",
    "sharing": "generate_config.infer_expert_parallel_size",
    "memory share": "generate_config.gpu_memory_utilization",
    "sequences": "generate_config.max_num_seqs",
}


def _align(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the rows of a table as lines with columns of equal width."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths)).rstrip() for row in rows]


def _format_cell(value: object) -> str:
    """Return the text of a key's value in a table; "-" for its default."""
    return {None: "-", True: "yes", False: "no"}[value] if value is None or isinstance(value, bool) else str(value)


@dataclass(frozen=True)
class FitReport:
    """The output of `mindspeed-rl plan fit`."""

    request: FitRequest
    device: Device
    results: Sequence[FitResult]

    def format(self) -> str:
        """Return the table of the layouts."""
        request = self.request
        chosen = [result.values | {"trainers": result.trainers} for result in self.results]
        columns = {name: key for name, key in _COLUMNS.items() if any(values.get(key) is not None for values in chosen)}
        rows = [["", *columns, "GiB", "in phase", "s an iteration"]]
        for result, values in zip(self.results, chosen):
            peak, time = result.memory.fullest.peak, result.time
            cells = [values.get(key) for key in columns.values()]
            texts = [_format_cell(value) for value in cells]
            rows.append([result.memory.verdict, *texts, f"{peak.total / GIB:.0f}", peak.name, time.format_bounds(time.total)])
        lines = [
            f"{request.model} on {request.npus} x {self.device.name}, prompts to {request.prompt} and responses to "
            f"{request.response} tokens, {request.prompts} x {request.samples} an iteration",
            "",
        ]
        return "\n".join([*lines, *_align(rows)])

    def encode(self) -> _JsonObject:
        """Return the layouts as a JSON object."""
        return {
            "layouts": [
                {
                    "values": result.values,
                    "trainers": result.trainers,
                    "verdict": result.memory.verdict,
                    "bytes": result.memory.fullest.peak.total,
                    "phase": result.memory.fullest.peak.name,
                    "seconds": _encode_bounds(result.time, result.time.total),
                }
                for result in self.results
            ]
        }


@dataclass(frozen=True)
class SmallestReport:
    """The output of `mindspeed-rl plan smallest`."""

    request: FitRequest
    device: Device
    stages: Sequence[StageMachines]

    def format(self) -> str:
        """Return a table with the machines of each stage, the smallest first."""
        request = self.request
        rows = [["stage", "devices", "verdict", "GiB", "in phase", "host GiB", "s an iteration", "more than on twice as many"]]
        for stage in self.stages:
            costs = [f"{format_number(more)} s, {ratio:.1f} x" for more, ratio in list_costs(stage.layouts)]
            for index, (count, result) in enumerate(stage.layouts):
                memory, peak = result.memory, result.memory.fullest.peak
                host = "" if memory.host is None else f"{memory.host.total / GIB:.0f}"
                numbers = [f"{peak.total / GIB:.0f}", peak.name, host, result.time.format_bounds(result.time.total)]
                cost = costs[index] if index < len(costs) else ""
                rows.append(["" if index else stage.stage, str(count), memory.verdict, *numbers, cost])
            if not stage.layouts:
                rows.append([stage.stage, "none", "", "", "", "", "", ""])
        lines = [
            f"{request.model} on {self.device.name}, prompts to {request.prompt} and responses to {request.response} tokens, "
            f"{request.prompts} x {request.samples} an iteration; host GiB are of one machine",
            "",
            *_align(rows),
        ]
        return "\n".join([*lines, *self._list_reasons()])

    def _list_reasons(self) -> list[str]:
        """Return why fewer devices are too few, stage by stage."""
        reasons = [f"  {stage.stage}: {stage.reason.removeprefix('--npus: ')}" for stage in self.stages if stage.reason]
        return ["", "Fewer devices are too few:", *reasons] if reasons else []

    def encode(self) -> _JsonObject:
        """Return the machines as a JSON object."""
        return {
            "chip": self.device.name,
            "stages": {
                stage.stage: {
                    "machines": [
                        {
                            "devices": count,
                            "values": result.values,
                            "verdict": result.memory.verdict,
                            "bytes": result.memory.fullest.peak.total,
                            "phase": result.memory.fullest.peak.name,
                            "host_bytes": None if result.memory.host is None else result.memory.host.total,
                            "seconds": _encode_bounds(result.time, result.time.total),
                        }
                        for count, result in stage.layouts
                    ],
                    "costs": [{"seconds": more, "ratio": ratio} for more, ratio in list_costs(stage.layouts)],
                    "reason": stage.reason,
                }
                for stage in self.stages
            },
        }
