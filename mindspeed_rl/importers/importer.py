"""The run file that a command of another project becomes, with a note about each of its options."""

from __future__ import annotations

import errno
import re
from collections.abc import Mapping
from dataclasses import replace

from mindspeed_rl import registry
from mindspeed_rl.config.errors import ConfigError
from mindspeed_rl.config.loader import build_run_config
from mindspeed_rl.importers.options import UNSET, Option, SourceCommand, SourceProject
from mindspeed_rl.importers.python_source import is_program
from mindspeed_rl.importers.recipe import Recipe
from mindspeed_rl.importers.result import Import, ImportSettings
from mindspeed_rl.importers.rollout_formats import compare_folder_format
from mindspeed_rl.importers.shell import Command, is_switched_on, list_unknown, read_script, request_variables
from mindspeed_rl.importers.source_files import add_runtime_environment, list_absent_scripts, list_changed_files
from mindspeed_rl.importers.source_plan import PLAN_NUMBERS, find_differences, plan_run
from mindspeed_rl.importers.writer import write_recipe
from mindspeed_rl.planner.advice import find_changes_to_fit
from mindspeed_rl.planner.devices import GIB, find_device
from mindspeed_rl.planner.memory import plan_memory
from mindspeed_rl.run import Run
from mindspeed_rl.run.draft import draft
from mindspeed_rl.run.rules.validation import unavailable, validate
from mindspeed_rl.run.rules.violation import format_value

#: no option counts further, and no float holds much larger whole numbers
_LARGEST_WHOLE = 2**63
#: what stands for the value of a variable that a script does not set; see `make_mark`
_UNKNOWN = re.compile(r"\0(\w+)@\d+\0")
#: characters of a word that a message repeats
_SHOWN = 120


def import_command(project: SourceProject, text: str, settings: ImportSettings) -> Import:
    """Return the run file of a command or script; both have the same plan.

    Args:
        text: text of a script, or a command; nothing of it is executed.

    Raises:
        ConfigError: a value is not in the script, an option is unknown or needs a feature that is not available, the run file
            breaks a rule, or a number of the two plans differs and is not accepted.
    """
    try:
        return _import_command(project, text, settings)
    except ConfigError as error:
        raise ConfigError([_shorten(sentence) for sentence in error.errors]) from None
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:
            raise
        raise ConfigError([f"a name is too long for a file: {_shorten(str(error.filename))}"]) from None


def _shorten(sentence: str) -> str:
    """Return a sentence on one line, with the names of unknown variables and without the rest of endless words."""
    named = _UNKNOWN.sub(r"$\1", sentence)
    flat = " ".join(re.sub(r"[\x00-\x08\x0b-\x1f\x7f]", "?", named).split())
    return re.sub(rf"\S{{{2 * _SHOWN},}}", lambda word: f"{word[0][:_SHOWN]}... ({len(word[0])} characters)", flat)


def _import_command(project: SourceProject, text: str, settings: ImportSettings) -> Import:
    if unknown_names := sorted(settings.accepted - {*PLAN_NUMBERS}):
        raise ConfigError([f"--accept {', '.join(unknown_names)}: no number of a plan; they are {', '.join(PLAN_NUMBERS)}"])
    if "\0" in _UNKNOWN.sub("", text):
        raise ConfigError(["the command has a null byte, which no script has"])
    if is_program(text):
        raise ConfigError([f"this is a Python program, whose arguments are in its code: import the command or the script of "
                           f"{project.title} that starts it"])  # fmt: skip
    commands = [add_runtime_environment(item) for item in read_script(text, settings.variables, settings.folder)]
    # what the user says is known to all who read the command
    commands = [replace(item, environment={**item.environment, **settings.variables}) for item in commands]
    absent = list_absent_scripts(commands)
    try:
        command = project.read(commands, settings.devices)
    except ConfigError as error:
        raise ConfigError([*error.errors, *map(str, absent)]) from None
    for item in commands:
        if (changed := list_changed_files(item)) and _trains(project, item, settings.devices):
            raise ConfigError(changed)
    if parts := [script for script in absent if script.is_part]:
        raise ConfigError(map(str, parts))
    run, recipe = translate(project, command, settings)
    for script in absent:
        run.translate(f"line {script.line}", {}, str(script))
    if recipe is not None:
        _ask_planner(run, _compare_plans(run, recipe))
    return run


def _trains(project: SourceProject, command: Command, devices: int | None) -> bool:
    """Return whether the project reads a command alone; those before the training are programs of other kinds."""
    try:
        project.read([replace(command, changed={})], devices)
    except ConfigError:
        return False
    return True


def translate(project: SourceProject, command: SourceCommand, settings: ImportSettings) -> tuple[Import, Recipe | None]:
    """Return the run file of a command that was read, whose plan is not compared yet, and the record of the run.

    Raises:
        ConfigError: an option is unknown or needs a feature that is not available.
    """
    run = Import(project.title, settings, project.prefix, command.options)
    # the table of the program is what a project's own functions read defaults from
    table = command.table or project.tables[command.program]
    if command.loop:
        run.note("the loop of the script", command.loop)
    for name, feature in project.switches.items():
        if is_switched_on(command.environment, name):
            run.refuse(f"{name}={command.environment[name]}", feature)
    _request_unknown(command, table)
    if endless := [name for name, value in command.options.items() if _is_endless(value)]:
        raise ConfigError([f"{project.prefix}{name}: a whole number beyond 2^63, which no option has" for name in endless])
    for name, value in command.options.items():
        option = project.prefix + name
        record = table.get(name)
        if record is not None:
            _apply(run, option, record, value)
        elif settings.allow_unknown:
            run.note(option, f"not known in {project.title} {project.version}, and left out as --allow-unknown requests")
        else:
            similar = registry.find_similar(name, table)
            hint = f"; did you mean {project.prefix}{similar}?" if similar else ""
            run.refuse(option, f"no option of {project.title} {project.version}; --allow-unknown leaves it out{hint}")
    try:
        recipe = project.describe(run, command)
    except ConfigError as error:
        raise ConfigError([*_list_refused(run), *error.errors]) from None
    if recipe is not None:
        recipe = compare_folder_format(run, recipe.complete())
        write_recipe(run, recipe, table)
    if project.finish is not None:
        project.finish(run, command)
    for name, record in table.items():
        if record.default is not UNSET and name not in command.options and record.keys:
            here = record.values[record.default] if record.values else record.default  # type: ignore[index]
            for key in record.keys:
                run.add_default(key, here, f"the default of {project.title}")
    run.name_dropped()
    for name in command.options:
        if not run.is_noted(project.prefix + name):
            run.refuse(project.prefix + name, "this importer reads it in no place")
    if run.refused:
        raise ConfigError(_list_refused(run))
    return run, recipe


def _is_endless(value: object) -> bool:
    """Return True for a whole number, or a list with one, that is beyond every size."""
    if isinstance(value, list):
        return any(_is_endless(item) for item in value)
    return isinstance(value, int) and abs(value) >= _LARGEST_WHOLE


def _ask_planner(run: Import, resolved: Run) -> None:
    """Note a layout that does not fit a device, as one of FSDP may not that becomes Megatron's."""
    try:
        device = find_device(resolved)
        plan = plan_memory(resolved, device)
    except (ValueError, OSError):
        return  # the model's shapes are elsewhere
    if plan.verdict in ("fits", "tight"):
        return
    low, high = (f"{count / GIB:.0f}" for count in plan.fullest.peak.range)
    verdict, peak = plan.verdict.replace("over", "may not fit"), plan.fullest.peak
    size = f"{low} to {high} GiB in {peak.name} of {plan.capacity / GIB:.0f} GiB of a device"
    lines = [f"The layout {verdict}: {size} ({device.name}; mindspeed-rl plan memory --chip plans others)."]
    lines += plan.problems
    for change in find_changes_to_fit(run.tree, resolved, plan, device)[:2]:
        keys = ", ".join(f"{name}: {format_value(value)}" for name, value in change.values.items())
        lines.append(f"It {change.plan.verdict} with {keys} ({change.costs}).")
    run.memory = "\n".join(lines)


def _request_unknown(command: SourceCommand, table: Mapping[str, Option]) -> None:
    """Raise for values that only the machine of the script knows; in options without effect they do not matter."""
    unknown: list[tuple[str, int]] = []
    for name, value in command.options.items():
        record = table.get(name)
        found = list_unknown(value)
        # a word that is nothing but a variable may stand for several options
        words = [value] if isinstance(value, str) else value if isinstance(value, list) else []
        is_whole = any(isinstance(word, str) and word.startswith("\0") and word.count("\0") == 2 for word in words)
        if found and (is_whole or record is None or record.kind in ("mapped", "refused")):
            unknown += found
    for word in command.trailing:
        unknown += list_unknown(word)
    if unknown:
        raise request_variables(unknown)


def _list_refused(run: Import) -> list[str]:
    return [f"{option}: not available here: {feature}" for option, feature in run.refused.items()]


def _compare_plans(run: Import, there: Recipe) -> Run:
    """Compare the numbers of the command with its run file's, and return the run.

    Raises:
        ConfigError: the run file breaks a rule, needs what this version does not have, or numbers differ.
    """
    resolved = draft(build_run_config(run.tree))
    if violations := validate(resolved):
        raise ConfigError(str(violation) for violation in violations)
    if missing := unavailable(resolved):
        raise ConfigError(missing)
    here = plan_run(resolved, run.settings.rows)
    run.plans = (there, here)
    differences = find_differences(there, here, run.reasons)
    errors = [
        f"{name} would be {format_value(here_value)} here, but is {format_value(there_value)} in {run.project}; "
        f"--accept {name} takes the difference"
        for name, (there_value, here_value) in differences.items()
        if name not in run.settings.accepted
    ]
    if errors:
        raise ConfigError(errors)
    return resolved


def _apply(run: Import, option: str, record: Option, value: object) -> None:
    """Do what the record of an option says with its value."""
    if record.kind == "refused":
        if record.is_off(value):
            run.same[option] = f"{format_value(value)}: {record.text} is off"
        else:
            run.refused[option] = record.text
    elif record.kind != "mapped":
        if record.allowed and value not in record.allowed:
            listed = ", ".join(format_value(item) for item in record.allowed)
            run.refused[option] = f"{format_value(value)}; {record.text} ({listed})"
        else:
            (run.same if record.kind == "same" else run.without_effect)[option] = record.text
    elif record.translate is not None:
        record.translate(run, option, value)
    elif record.values and not _has_entry(record.values, value):
        listed = ", ".join(format_value(item) for item in record.values)
        run.refused[option] = f"{format_value(value)}; available are {listed}"
    elif record.keys:
        here = record.values[value] if record.values else value  # type: ignore[index]
        run.translate(option, dict.fromkeys(record.keys, here), record.text)


def _has_entry(values: Mapping[object, object], value: object) -> bool:
    return not isinstance(value, (list, dict)) and value in values
