"""Layouts that pilots of a run try, and the fastest of them as a run file with the table of what was tried.

`cli/tune.py` runs the pilots: two iterations each in the run's own workers, of which the second one counts.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from mindspeed_rl.config.errors import ConfigError
from mindspeed_rl.config.keys import ROLE_GROUPS
from mindspeed_rl.config.loader import build_run_config
from mindspeed_rl.config.run import RunConfig
from mindspeed_rl.config.run_files import apply_values
from mindspeed_rl.planner.devices import Device
from mindspeed_rl.planner.fit import fit_run
from mindspeed_rl.planner.memory import plan_memory
from mindspeed_rl.planner.run_files import format_groups
from mindspeed_rl.planner.samples import SampleMeans
from mindspeed_rl.planner.seconds import plan_time
from mindspeed_rl.run import Run
from mindspeed_rl.run.draft import draft
from mindspeed_rl.run.rules.validation import unavailable, validate
from mindspeed_rl.run.rules.violation import format_value

#: iterations of a pilot; the last one counts, as the first has one-time work
ITERATIONS = 2
#: most combinations of values that a user lists
MAX_COMBINATIONS = 256

#: groups that a pilot does without: they write traces and dumps, into folders of their own
_DROPPED_GROUPS = ("msprobe_config", "profiler_config")
#: keys of roles by which a run saves and evaluates
_DROPPED_ROLE_KEYS = frozenset(("save", "save_interval", "save_hf", "keep_last", "async_save"))
#: keys of rl_config and generate_config by which a run writes elsewhere than into its folder, or starts anew after a fault
_DROPPED_KEYS = frozenset(("report_to", "fault_tolerance", "eplb_token_save_path"))
_TRACKERS = ("tensorboard", "wandb", "swanlab", "mlflow", "trackio", "otlp")
_DROPPED_PREFIXES = ("eval_", *(text for name in _TRACKERS for text in (f"use_{name}", f"{name}_")))

Outcome = Literal["measured", "out of memory", "failed", "took too long", "not run", "refused"]


@dataclass(frozen=True)
class Layout:
    """A run file that a pilot may try.

    Attributes:
        tree: the run file.
        values: keys whose values differ from the user's run file, by dotted name; empty for that itself.
        verdict: verdict of its planned memory; empty where it cannot be planned.
        planned_s: planned seconds of an iteration; infinite where it cannot be planned.
        problem: the rule that it breaks; empty for one that runs.
    """

    tree: Mapping[str, Any] = field(repr=False)
    values: Mapping[str, object]
    verdict: str = ""
    planned_s: float = float("inf")
    problem: str = ""

    def __str__(self) -> str:
        return " ".join(f"{name}={format_value(value)}" for name, value in self.values.items()) or "as written"


@dataclass(frozen=True)
class Pilot:
    """What became of a layout.

    Attributes:
        seconds: durations of each iteration that it finished.
        detail: why it was not measured, in a line.
    """

    layout: Layout
    outcome: Outcome
    seconds: tuple[float, ...] = ()
    detail: str = ""

    @property
    def iteration_s(self) -> float:
        """Seconds that count; infinite for a pilot that was not measured."""
        return self.seconds[-1] if self.outcome == "measured" else float("inf")

    def encode(self) -> dict[str, Any]:
        """Return the pilot as a JSON object."""
        layout, planned = self.layout, self.layout.planned_s
        return {
            "values": dict(layout.values),
            "verdict": layout.verdict,
            "planned_s": planned if planned < float("inf") else None,
            "outcome": self.outcome,
            "seconds": list(self.seconds),
            "detail": self.detail,
        }


def parse_variations(words: Sequence[str]) -> dict[str, list[object]]:
    """Read values that a user lists, as KEY=V1,V2.

    Raises:
        ValueError: one is of another form, a key comes twice, or there are too many combinations.
    """
    import yaml  # here, as in run_files: help needs no YAML

    variations: dict[str, list[object]] = {}
    count = 1
    for word in words:
        key, equals, listed = word.partition("=")
        if not equals or "." not in key or not all(part.strip() for part in listed.split(",")):
            raise ValueError(f"--vary: {word!r} is not of the form group.key=VALUE,VALUE.")
        if key in variations:
            raise ValueError(f"--vary: {key} comes twice; list all its values once.")
        try:
            values = [yaml.safe_load(part) for part in listed.split(",")]
        except yaml.YAMLError as error:
            raise ValueError(f"--vary: {word!r} cannot be read: {str(error).splitlines()[0]}") from None
        variations[key] = list(dict.fromkeys(map(_make_hashable, values)))
        count *= len(variations[key])
    if count > MAX_COMBINATIONS:
        raise ValueError(f"--vary: {count} combinations are more than {MAX_COMBINATIONS}; list fewer values.")
    return variations


def _make_hashable(value: object) -> object:
    if isinstance(value, (list, dict)):
        raise ValueError(f"--vary: {json.dumps(value)} is a list or a group; single values can be compared.")
    return value


def list_layouts(
    tree: Mapping[str, Any],
    run: Run,
    device: Device,
    *,
    variations: Mapping[str, Sequence[object]],
    samples: SampleMeans | None = None,
) -> list[Layout]:
    """Return the layouts that pilots may try: the run file as it is, then others, the fastest by plan first.

    Args:
        tree: the run file as `compose` gives it.
        run: its draft.
        variations: values of keys, of which all combinations are tried; empty: the layouts of `plan fit`.

    Raises:
        ValueError: the run cannot be planned, or a varied key does not exist.
    """
    first = _plan_layout(tree, {}, run, device, samples)
    if variations:
        combinations = itertools.product(*variations.values())
        trees = [apply_values(tree, dict(zip(variations, values))) for values in combinations]
    else:
        trees = [result.tree for result in fit_run(tree, run, device, samples=samples)]
    others: list[Layout] = []
    seen: list[Mapping[str, object]] = [{}]
    for other in trees:
        values = compare_configs(run.config, _read_config(other, run))
        if values not in seen:
            seen.append(values)
            others.append(_plan_layout(other, values, run, device, samples))
    return [first, *sorted(others, key=lambda layout: (bool(layout.problem), layout.planned_s))]


def _read_config(tree: Mapping[str, Any], run: Run) -> RunConfig:
    """Return a run file as the draft of a run has it."""
    cfg = build_run_config(tree, config_name=run.config.config_name, config_dir=run.config.config_dir)
    return draft(cfg, run.num_nodes).config


def compare_configs(before: RunConfig, after: RunConfig) -> dict[str, object]:
    """Return the keys that have other values, by dotted name."""
    changed: dict[str, object] = {}
    for group in ("actor_config", "critic_config", "rl_config", "generate_config"):
        old, new = getattr(before, group), getattr(after, group)
        if old is None or new is None:
            continue
        for item in dataclasses.fields(new):
            name, value = item.name, getattr(new, item.name)
            if value == getattr(old, name):
                continue
            # roles on the actor's devices have its layout
            if group != "critic_config" or changed.get(f"actor_config.{name}", not value) != value:
                changed[f"{group}.{name}"] = value
    return changed


def _plan_layout(
    tree: Mapping[str, Any], values: Mapping[str, object], run: Run, device: Device, samples: SampleMeans | None
) -> Layout:
    cfg = build_run_config(tree, config_name=run.config.config_name, config_dir=run.config.config_dir)
    other = draft(cfg, run.num_nodes)
    if broken := [*map(str, validate(other)), *unavailable(other)]:
        return Layout(tree, values, problem=broken[0])
    try:
        memory, time = plan_memory(other, device), plan_time(other, device, samples=samples)
    except ValueError:
        return Layout(tree, values)
    return Layout(tree, values, memory.verdict, time.total)


def build_pilot_tree(tree: Mapping[str, Any], folder: str) -> dict[str, Any]:
    """Return the run file of a pilot: the same iterations, and nothing is written outside of its folder.

    It neither saves nor evaluates, has no tracker, and is not started anew after a fault.

    Args:
        tree: the run file to try.
        folder: folder of the run.
    """
    pilot = apply_values(tree, {"run_dir": folder})
    for name in _DROPPED_GROUPS:
        pilot.pop(name, None)
    for group in ("megatron_training", *ROLE_GROUPS, "rl_config", "generate_config"):
        keys = pilot.get(group)
        if isinstance(keys, Mapping):
            dropped = _DROPPED_KEYS if group in ("rl_config", "generate_config") else _DROPPED_ROLE_KEYS
            pilot[group] = {
                name: value for name, value in keys.items() if name not in dropped and not name.startswith(_DROPPED_PREFIXES)
            }
    # Ctrl-C ends it at once, and every iteration of a supervised stage is a line
    return apply_values(pilot, {"megatron_training.sigterm_grace_s": 0.0, "megatron_training.log_interval": 1})


def choose(pilots: Sequence[Pilot]) -> Pilot | None:
    """Return the fastest pilot that was measured; None where none was."""
    fastest = min(pilots, key=lambda pilot: pilot.iteration_s, default=None)
    return fastest if fastest is not None and fastest.outcome == "measured" else None


def format_table(pilots: Sequence[Pilot]) -> Iterator[str]:
    """Yield the table of what was tried, the fastest first."""
    chosen = choose(pilots)
    yield f"  {'s':>8}  {'planned':>8}  layout"
    for pilot in sorted(pilots, key=lambda pilot: pilot.iteration_s):
        planned = f"{pilot.layout.planned_s:.3g}" if pilot.layout.planned_s < float("inf") else "-"
        measured = f"{pilot.iteration_s:.3g}" if pilot.outcome == "measured" else "-"
        reason = "" if pilot.outcome == "measured" else f" ({pilot.outcome}{f': {pilot.detail}' if pilot.detail else ''})"
        yield f"{'*' if pilot is chosen else ' '} {measured:>8}  {planned:>8}  {pilot.layout}{reason}"


def format_tuned_file(name: str, pilots: Sequence[Pilot], chosen: Pilot) -> str:
    """Return the run file of the fastest pilot, with the table of what was tried.

    Args:
        name: the user's run file.
    """
    lines = [f"{name}: the fastest of the pilots of `mindspeed-rl plan tune`, by the seconds of an iteration.", ""]
    return format_tree([*lines, *format_table(pilots)], chosen.layout.tree)


def format_tree(comments: Sequence[str], tree: Mapping[str, Any]) -> str:
    """Return a composed run file as text below comments.

    Raises:
        ConfigError: the text would be another run file, as it has a value that is a reference in a run file.
    """
    text = "\n".join([*(f"# {line}".rstrip() for line in comments), *format_groups(tree)]) + "\n"
    if "${" in text:
        raise ConfigError(["the run file has a text with ${, which a written run file would replace"])
    return text
