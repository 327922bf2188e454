"""`mindspeed-rl recipe`: complete runs with planned figures, data by one command, and the curve that is expected."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from mindspeed_rl.cli.options import Parser, print_status
from mindspeed_rl.cli.recipe.record import CPU, MACHINES, PLANNED, Recipe, find_recipes, list_recipes, load_recipe
from mindspeed_rl.config.loader import load_run_config
from mindspeed_rl.config.run import RunConfig
from mindspeed_rl.config.run_files import find_project_configs
from mindspeed_rl.files import write_file
from mindspeed_rl.observability.expected_curve import EXPECTED
from mindspeed_rl.observability.process_status import read_statuses
from mindspeed_rl.observability.run_files import read_run
from mindspeed_rl.planner.devices import GIB, find_device
from mindspeed_rl.planner.memory import plan_memory
from mindspeed_rl.planner.seconds import plan_time
from mindspeed_rl.run.draft import draft

_WIDTH = 100
#: folder of the working directory in which the CPU twins train
_TWINS = Path("runs/recipes")
_PYTHON = (sys.executable,)
_COMMAND = (sys.executable, "-m", "mindspeed_rl.cli.main")
_FORWARDED = (signal.SIGTERM, signal.SIGHUP)


def main(argv: list[str]) -> int:
    """List, show or run recipes; return 0, 2 for a wrong option, or the exit code of the training."""
    parser = Parser(prog="mindspeed-rl recipe", description="Complete runs: run files, data, planned figures, expected curve.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="list | show | data | run | plan")
    commands.add_parser("list", help="all recipes")
    _add_name(commands.add_parser("show", help="what a recipe is, its run files and figures, and the expected curve"))
    data = commands.add_parser("data", help="write the data of a recipe, or model and data of its CPU twin")
    run = commands.add_parser("run", help="train; the report says whether the curve is inside its band")
    for each in (data, run):
        _add_name(each)
        each.add_argument("--on", choices=MACHINES, default=CPU, help="machine; default: cpu, the small twin of the recipe")
    run.add_argument("--nodes", type=int, default=1, help="machines the devices are spread over")
    run.add_argument("overrides", nargs="*", metavar="key=value", help="overrides, as for training; for every stage")
    plan = commands.add_parser("plan", help="compute the planned figures of recipes and write them next to their run files")
    plan.add_argument("names", nargs="*", metavar="NAME", help="default: all recipes")
    try:
        # argparse intermixes no subcommands: overrides may be between the flags
        arguments, rest = parser.parse_known_args(argv)
        if wrong := [word for word in rest if arguments.command != "run" or word.startswith("-") or "=" not in word]:
            parser.error(f"unrecognized arguments: {' '.join(wrong)}")
        if arguments.command == "run":
            arguments.overrides += rest
        return _COMMANDS[arguments.command](arguments)
    except (ValueError, OSError) as error:
        print_status(f"error: {error}")
        return 2


def _add_name(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", help="name of a recipe, or its folder")


def _list(arguments: argparse.Namespace) -> int:
    recipes = list_recipes()
    if not recipes:
        raise ValueError(f"there are no recipes in {find_recipes()}: they are part of a clone of the repository")
    width = max(len(recipe.name) for recipe in recipes)
    for recipe in recipes:
        print(f"{recipe.name:<{width}}  {', '.join(recipe.machines):<21}  {recipe.title}")
    print("\nmindspeed-rl recipe show NAME describes one; mindspeed-rl recipe run NAME trains its small twin on this CPU.")
    return 0


def _show(arguments: argparse.Namespace) -> int:
    recipe = load_recipe(arguments.name)
    planned = recipe.read_planned()
    print(f"{recipe.name}: {recipe.title}\n")
    _print_text(recipe.about)
    print("\nRun files, planned with half of the longest response:")
    for machine in recipe.machines:
        for path in recipe.list_run_files(machine):
            figures = "the small twin of the others" if machine == CPU else _format_planned(planned.get(path.stem))
            print(f"  {_shorten(path)}\n      {figures}")
    print("\nData:")
    print("\n".join(f"  {name}" for name in recipe.data) or "  the run files name data sets of a hub, which train fetches")
    print("\nPublished on NPUs:")
    _print_text(recipe.published, "  ")
    for machine, where in (("", "NPUs, in the last stage"), (CPU, "the CPU")):
        curve = recipe.find_curve(machine)
        if curve is None:
            continue
        print(f"\nExpected on {where}: {curve.metric}")
        for window in curve.windows:
            print(f"  {window}: {window.low:.3g} to {window.high:.3g}")
        _print_text(f"source: {curve.source}", "  ")
    for title, text in _describe_runs(recipe):
        print(f"\n{title}:")
        _print_text(text, "  ")
    print(f"\nTrain:  mindspeed-rl recipe run {recipe.name}            # the CPU twin, in {_TWINS / recipe.name}")
    for machine in recipe.machines[:1]:
        print(f"        mindspeed-rl recipe run {recipe.name} --on {machine}")
    return 0


def _describe_runs(recipe: Recipe) -> Iterator[tuple[str, str]]:
    """Yield a title and a sentence per run of the last stage, below the working directory, as its run files name them."""
    for machine in recipe.machines:
        path = recipe.list_run_files(machine)[-1]
        try:
            run_dir = load_run_config(str(path)).run_dir
        except (ValueError, OSError) as error:
            yield _shorten(path), f"cannot be read: {error}"
            continue
        folder = (_TWINS / recipe.name if machine == CPU else Path()) / (run_dir or "")
        if run_dir is None or not (folder / "metrics.jsonl").is_file():
            continue
        try:
            text = _judge(folder)
        except (ValueError, OSError) as error:
            text = f"cannot be read: {error}"
        goes = any(status.state == "works" for status in read_statuses(folder))
        yield f"Last run, {folder}{', is running now' if goes else ''}", text


def _judge(folder: Path) -> str:
    """Return whether a run is inside its band, and at which iteration it left it."""
    run = read_run(folder)
    return "no band is known for it" if run.expected is None else str(run.expected.judge(run.history))


def _print_text(text: str, indent: str = "") -> None:
    print(textwrap.fill(text, _WIDTH, initial_indent=indent, subsequent_indent=indent))


def _shorten(path: Path) -> str:
    """Return a path from the working directory where it is below it."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


def _format_planned(figures: dict[str, Any] | None) -> str:
    if figures is None:
        return "not planned yet: mindspeed-rl recipe plan"
    low, high = figures["seconds"]
    return (
        f"{figures['devices']} devices; {figures['verdict']}: {figures['peak_gib']:g} of {figures['capacity_gib']:g} GiB in"
        f" {figures['phase']}; {low:g} to {high:g} s an iteration"
    )


def _require_run_files(recipe: Recipe, machine: str) -> tuple[Path, ...]:
    if machine not in recipe.machines:
        raise ValueError(f"recipe {recipe.name} has no run file for {machine}; it has {', '.join(recipe.machines)}")
    return recipe.list_run_files(machine)


def _data(arguments: argparse.Namespace) -> int:
    recipe = load_recipe(arguments.name)
    _require_run_files(recipe, arguments.on)
    if arguments.on == CPU:
        print(f"model and data: {make_twin(recipe)}")
        return 0
    for path in recipe.write_data():
        print(f"wrote {path}")
    if not recipe.data:
        print("the run files name data sets of a hub, which train fetches; for a machine without a network:")
        for path in recipe.list_run_files(arguments.on):
            data = load_run_config(str(path)).actor_config.data_path
            print(f"  mindspeed-rl download {str(data).removeprefix('hf://').partition(':')[0]} --dataset")
    return 0


def _build_environment() -> dict[str, str]:
    """Return the environment of a program that imports this package, whatever its working directory."""
    paths = (str(find_project_configs().parent), os.environ.get("PYTHONPATH", ""))
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}


def make_twin(recipe: Recipe) -> Path:
    """Make model and data of the CPU twin below the working directory, where they are not there yet; return their folder.

    Raises:
        ValueError: the command that makes them fails.
    """
    folder = (_TWINS / recipe.name).absolute()
    if folder.exists():
        return folder
    program, *words = recipe.split_twin(folder)
    command = {"mindspeed-rl": _COMMAND, "python": _PYTHON}.get(program, [program])
    folder.parent.mkdir(parents=True, exist_ok=True)
    # shipped recipes name scripts from the clone
    place = find_recipes().parent if recipe.folder.parent == find_recipes() else Path.cwd()
    done = subprocess.run([*command, *words], cwd=place, env=_build_environment(), capture_output=True, text=True, check=False)
    if done.returncode:
        lines = (done.stderr or done.stdout).strip().splitlines() or ["it ended without a message"]
        raise ValueError(f"recipe {recipe.name}: {recipe.twin} failed: {lines[-1]}")
    return folder


def _run(arguments: argparse.Namespace) -> int:
    recipe = load_recipe(arguments.name)
    paths = _require_run_files(recipe, arguments.on)
    if arguments.on == CPU:
        os.chdir(make_twin(recipe))  # its run files name model and data from there
    else:
        recipe.write_data()
    # of all stages, before the first trains
    configs = [load_run_config(str(path), None, arguments.overrides) for path in paths]
    for path, cfg in zip(paths, configs):
        if path == paths[-1]:
            _write_curve(recipe, arguments.on, cfg)
        print_status(f"recipe {recipe.name}: train --config-name {path}")
        words = ["train", "--config-name", str(path), "--nodes", str(arguments.nodes), *arguments.overrides]
        if code := _run_command(words):
            return code
    if (folder := configs[-1].run_dir) is not None:
        print(f"curve: {_judge(Path(folder))}")
    return 0


def _write_curve(recipe: Recipe, machine: str, cfg: RunConfig) -> None:
    """Write the curve that is expected of a run into its folder, where the reports look for it."""
    curve = recipe.find_curve(machine)
    if curve is not None and cfg.run_dir is not None:
        write_file(Path(cfg.run_dir) / EXPECTED, json.dumps(curve.encode(), indent=2) + "\n", makes_folder=True)


def _run_command(words: Sequence[str]) -> int:
    """Run a command of this package in a process of its own, which gets the signals of this one; return its exit code."""
    with subprocess.Popen([*_COMMAND, *words], env=_build_environment()) as process:
        before = {number: signal.signal(number, lambda number, _: process.send_signal(number)) for number in _FORWARDED}
        # Ctrl-C of a terminal reaches both: the command ends in its own way
        before[signal.SIGINT] = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            return process.wait()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def compute_planned(path: Path) -> dict[str, Any]:
    """Return the planned figures of a run file.

    Raises:
        ValueError: the run file has a mistake, or the run cannot be planned.
    """
    run = draft(load_run_config(str(path)))
    device = find_device(run)
    memory, time = plan_memory(run, device), plan_time(run, device)
    peak = memory.fullest.peak
    return {
        "chip": memory.device,
        "devices": time.devices,
        "verdict": memory.verdict,
        "peak_gib": round(peak.total / GIB, 1),
        "capacity_gib": round(memory.capacity / GIB),
        "phase": peak.name,
        "seconds": [float(f"{bound:.2g}") for bound in time.bounds(time.total)],
    }


def _plan(arguments: argparse.Namespace) -> int:
    recipes: Sequence[Recipe] = [load_recipe(name) for name in arguments.names] or list_recipes()
    for recipe in recipes:
        machines = [machine for machine in recipe.machines if machine != CPU]
        figures = {path.stem: compute_planned(path) for machine in machines for path in recipe.list_run_files(machine)}
        write_file(recipe.folder / PLANNED, json.dumps(figures, indent=2) + "\n")
        for name, each in figures.items():
            print(f"{recipe.name}/{name}: {_format_planned(each)}")
    return 0


_COMMANDS = {"list": _list, "show": _show, "data": _data, "run": _run, "plan": _plan}
