"""The run file that a command of another project becomes, with a note about each of its options."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import yaml

from mindspeed_rl import registry
from mindspeed_rl.config.errors import ConfigError
from mindspeed_rl.config.keys import MegatronConfig
from mindspeed_rl.config.loader import build_run_config
from mindspeed_rl.config.model_metadata import ADAPTER_CONFIG
from mindspeed_rl.config.run_files import apply_values
from mindspeed_rl.importers.options import UNSET, Option, SourceCommand, SourceProject
from mindspeed_rl.importers.shell_text import list_unknown, read_script, request_variables
from mindspeed_rl.importers.source_plan import PLAN_NUMBERS, SourcePlan, find_differences, plan_run, render_plans
from mindspeed_rl.run.draft import draft
from mindspeed_rl.run.rules.validation import unavailable, validate
from mindspeed_rl.run.rules.violation import format_value

#: keys of megatron_training that belong to the actor alone: a critic has its own
_ACTOR_KEYS = ("load", "save", "finetune", "lr")
#: rows over which a length in epochs is compared where their number is not known; most batch sizes divide it, so that what a
#: project does with an incomplete last batch does not matter
ASSUMED_ROWS = 430_080
#: rank of adapters that a run file does not set, as it is the one of the adapter that training continues
UNSET_RANK = MegatronConfig.lora_r
#: recomputation of whole layers, as gradient checkpointing elsewhere does
RECOMPUTE_LAYERS = {
    "megatron_training.recompute_granularity": "full",
    "megatron_training.recompute_method": "uniform",
    "megatron_training.recompute_num_layers": 1,
}


@dataclass(frozen=True)
class ImportSettings:
    """Choices of the user for an import.

    Attributes:
        devices: devices of the run, where the command does not say them.
        variables: values of variables of the script.
        rewards: names of the reward functions that exist.
        allow_unknown: leave out options that no table has, instead of refusing them.
        accepted: names of plan numbers that may differ.
        rows: rows of the data, which a length in epochs is compared over.
        folder: of the script; files that it sources are read there.
    """

    devices: int | None = None
    variables: Mapping[str, str] = field(default_factory=dict)
    rewards: Collection[str] = ()
    allow_unknown: bool = False
    accepted: frozenset[str] = frozenset()
    rows: int = ASSUMED_ROWS
    folder: Path | None = None

    @property
    def knows_rows(self) -> bool:
        """True where the user says how many rows the data has."""
        return self.rows != ASSUMED_ROWS


@dataclass
class Import:
    """A run file in the making.

    Attributes:
        project: the project of the command, such as "ms-swift".
        settings: choices of the user.
        tree: the run file, groups and keys.
        translated: option as it was written -> its keys here.
        same: option -> the reason why nothing has to be set for it.
        without_effect: option -> the reason why it changes nothing here.
        refused: option -> the feature that is not available.
        added: key -> the reason why it is there although no option sets it.
        plans: the numbers of the command and of the run file; None for a command that does not train.
        next_command: the command that the run file is for.
    """

    project: str
    settings: ImportSettings = field(default_factory=ImportSettings)
    tree: dict[str, dict[str, object]] = field(default_factory=dict)
    translated: dict[str, str] = field(default_factory=dict)
    same: dict[str, str] = field(default_factory=dict)
    without_effect: dict[str, str] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    added: dict[str, str] = field(default_factory=dict)
    plans: tuple[SourcePlan, SourcePlan] | None = None
    next_command: str = "mindspeed-rl explain --config-name"
    _sources: dict[str, tuple[dict[str, object], str]] = field(default_factory=dict)

    def set(self, path: str, value: object) -> None:
        """Set the dotted key to the value."""
        self.tree = apply_values(self.tree, {_place(path): value})

    def get(self, path: str) -> object:
        """Return the value of a dotted key; None where it is not set."""
        value: object = self.tree
        for name in _place(path).split("."):
            value = value.get(name) if isinstance(value, Mapping) else None
        return value

    def translate(self, option: str, values: Mapping[str, object], note: str = "") -> None:
        """Set the dotted keys that an option becomes; without any, the note alone says what becomes of it."""
        for path, value in values.items():
            self.set(path, value)
        self._sources[option] = dict(values), note
        self.translated[option] = _describe(values, note)

    def name_dropped(self) -> None:
        """Name the keys that options set and that are not in the run file after all, as nothing in it reads them."""
        for option, (values, note) in self._sources.items():
            dropped = [path for path, value in values.items() if value is not None and self.get(path) is None]
            if not dropped or option not in self.translated:
                continue
            kept = {path: value for path, value in values.items() if path not in dropped}
            reason = f"nothing in this run reads {', '.join(map(_place, dropped))}"
            if kept:
                self.translated[option] = f"{_describe(kept, note)}; {reason}"
            else:
                del self.translated[option]
                self.without_effect.setdefault(option, reason)

    def note(self, option: str, reason: str, *, changes_nothing: bool = True) -> None:
        """Note why no key is set for an option: it has no effect here, or is the same by nature."""
        (self.without_effect if changes_nothing else self.same)[option] = reason

    def refuse(self, option: str, feature: str) -> None:
        """Note that an option needs a feature that is not available."""
        self.refused[option] = feature

    def add_default(self, path: str, value: object, reason: str) -> None:
        """Set a key that no option sets; keep it where one does."""
        if self.get(path) is None:
            self.set(path, value)
            self.added[_place(path)] = f"{format_value(value)}, {reason}"

    def apply(self, option: str, record: Option, value: object) -> None:
        """Do what the record of an option says with its value."""
        if record.kind == "refused":
            if record.is_off(value):
                self.same[option] = f"{format_value(value)}: {record.text} is off"
            else:
                self.refused[option] = record.text
        elif record.kind != "mapped":
            if record.allowed and value not in record.allowed:
                listed = ", ".join(format_value(item) for item in record.allowed)
                self.refused[option] = f"{format_value(value)}; {record.text} ({listed})"
            else:
                (self.same if record.kind == "same" else self.without_effect)[option] = record.text
        elif record.translate is not None:
            record.translate(self, option, value)
        elif record.values and not _has_entry(record.values, value):
            listed = ", ".join(format_value(item) for item in record.values)
            self.refused[option] = f"{format_value(value)}; available are {listed}"
        elif record.keys:
            here = record.values[value] if record.values else value  # type: ignore[index]
            self.translate(option, dict.fromkeys(record.keys, here), record.text)

    def render(self, command: str) -> str:
        """Return the text of the run file, after comments with its command and with the options that have no key."""
        lines = [line.strip() for line in command.replace("\\\n", "\n").splitlines() if line.strip()]
        head = [f"# From {self.project}:", *(f"#   {line}" for line in lines)]
        head += [f"# without effect here: {option}: {reason}" for option, reason in self.without_effect.items()]
        body = yaml.safe_dump(self.tree, sort_keys=False, allow_unicode=True, width=120)
        return "\n".join(head) + "\n" + body

    def summarize(self) -> str:
        """Return a table of all options, and of both plans, for a terminal."""
        parts = []
        for title, rows in (
            (f"Options of {self.project} and their keys", self.translated),
            ("Options that hold here by nature", self.same),
            ("Options without effect here", self.without_effect),
            ("Keys that no option sets", self.added),
        ):
            if rows:
                width = min(max(len(name) for name in rows), 44)
                parts.append(f"{title}\n" + "\n".join(f"  {name:<{width}}  {text}" for name, text in rows.items()))
        if self.plans is not None:
            table = render_plans(self.project, *self.plans, accepted=self.settings.accepted)
            parts.append(f"Plan, over {self.settings.rows} rows of data where it depends on them\n{table}")
        return "\n\n".join(parts)


def import_command(project: SourceProject, text: str, settings: ImportSettings) -> Import:
    """Return the run file of a command or script, whose plan is that of the command.

    Args:
        text: of a script, or a command; nothing of it is executed.

    Raises:
        ConfigError: a value is not in the script, an option is unknown or needs a feature that is not available, the run file
            breaks a rule, or a number of the two plans differs and is not accepted.
    """
    if unknown_names := sorted(settings.accepted - {*PLAN_NUMBERS}):
        raise ConfigError([f"--accept {', '.join(unknown_names)}: no number of a plan; they are {', '.join(PLAN_NUMBERS)}"])
    command = project.read(read_script(text, settings.variables, settings.folder), settings.devices)
    # what the user says is known to the formulas of the plan too
    command = replace(command, environment={**command.environment, **settings.variables})
    run = Import(project.title, settings)
    # the table of the program is what a project's own functions read defaults from
    table = command.table or project.tables[command.program]
    _request_unknown(command, table)
    for name, value in command.options.items():
        option = project.prefix + name
        record = table.get(name)
        if record is not None:
            run.apply(option, record, value)
        elif settings.allow_unknown:
            run.note(option, f"not known in {project.title} {project.version}, and left out as --allow-unknown requests")
        else:
            similar = registry.find_similar(name, table)
            hint = f"; did you mean {project.prefix}{similar}?" if similar else ""
            run.refuse(option, f"no option of {project.title} {project.version}; --allow-unknown leaves it out{hint}")
    project.build(run, command)
    for name, record in table.items():
        if record.default is not UNSET and name not in command.options and record.keys:
            here = record.values[record.default] if record.values else record.default  # type: ignore[index]
            for key in record.keys:
                run.add_default(key, here, f"the default of {project.title}")
    run.name_dropped()
    noted = (run.translated, run.same, run.without_effect, run.refused)
    for name in command.options:
        if not any(project.prefix + name in notes for notes in noted):
            run.refuse(project.prefix + name, "this importer reads it in no place")
    if run.refused:
        raise ConfigError(f"{option}: not available here: {feature}" for option, feature in run.refused.items())
    _compare_plans(run, project, command)
    return run


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


def _compare_plans(run: Import, project: SourceProject, command: SourceCommand) -> None:
    """Compare the numbers of the command with those of its run file.

    Raises:
        ConfigError: the run file breaks a rule, needs what this version does not have, or numbers differ.
    """
    there = project.plan(command, run.settings.rows)
    if there is None:
        return
    resolved = draft(build_run_config(run.tree))
    if violations := validate(resolved):
        raise ConfigError(str(violation) for violation in violations)
    if missing := unavailable(resolved):
        raise ConfigError(missing)
    here = plan_run(resolved, run.settings.rows)
    run.plans = (there, here)
    differences = find_differences(there, here)
    if errors := [
        f"{name} would be {format_value(here_value)} here, but is {format_value(there_value)} in {project.title}; "
        f"--accept {name} takes the difference"
        for name, (there_value, here_value) in differences.items()
        if name not in run.settings.accepted
    ]:
        raise ConfigError(errors)


def _describe(values: Mapping[str, object], note: str) -> str:
    """Return the keys that an option becomes with their values; without any, the note."""
    text = ", ".join(f"{_place(path)}: {format_value(value)}" for path, value in values.items())
    return f"{text} ({note})" if text and note else text or note


def _has_entry(values: Mapping[object, object], value: object) -> bool:
    return not isinstance(value, (list, dict)) and value in values


def _place(path: str) -> str:
    """Return the dotted name of a key in the run file."""
    group, _, name = path.partition(".")
    return f"actor_config.{name}" if group == "megatron_training" and name in _ACTOR_KEYS else path


def read_scalar(text: str) -> bool | int | float | str | list[object] | None:
    """Return a value of a command line as YAML reads it, with 1e-6 a number, None and "null" nothing, "True" true."""
    if text in ("None", "none", "null"):
        return None
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        return text
    if isinstance(value, str):
        try:
            number = float(value)
        except ValueError:
            return value
        # float takes "nan" and "infinity", which are names here
        return number if math.isfinite(number) else value
    # YAML makes dates and mappings of some texts, which no option means
    return value if isinstance(value, (bool, int, float, list)) else text


def read_count(name: str, value: object) -> int:
    """Return the value of an option that counts something.

    Raises:
        ConfigError: it is not a whole number, or below 1.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError([f"{name} is {value!r}, but must be a whole number, at least 1"])
    return value


def build_rollout_batch(group: int, step: int, rollout: int) -> dict[str, object]:
    """Return the keys of a batch that another project counts in completions.

    Args:
        group: responses of a prompt.
        step: completions of an optimizer step.
        rollout: completions of a rollout.
    """
    if step > group and step % group:
        return {
            "rl_config.num_generations": group,
            "megatron_training.global_batch_size": step,
            "rl_config.generation_batch_size": rollout,
        }
    return {
        "rl_config.n_samples_per_prompt": group,
        # a step of less than a prompt is not available: the plans differ, and name the numbers
        "rl_config.mini_batch_size": max(1, step // group),
        "megatron_training.global_batch_size": rollout // group,
    }


def start_from_adapter(run: Import, option: str, adapter: str, reference: str | None) -> None:
    """Train on the adapter in a PEFT folder, over the model that `load` names so far.

    Rank and scale are left to the folder, and so are layers and dropout where it is on this machine; elsewhere all projections
    have adapters.

    Args:
        reference: the adapter that the reference has; None where it is the base, as other projects turn adapters off for it.

    Raises:
        ConfigError: adapter_config.json of the folder is no JSON, or adapts no projection of attention or MLP.
    """
    path = Path(adapter, ADAPTER_CONFIG).expanduser()
    config: dict[str, object] = {}
    if path.is_file():
        try:
            config = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ConfigError([f"{option} {adapter}: {ADAPTER_CONFIG} is no JSON: {error}"]) from error
    listed = config.get("target_modules")
    names = [str(name).rpartition(".")[2] for name in listed] if isinstance(listed, list) else ["all-linear"]
    targets = find_lora_targets(names)
    if not targets:
        raise ConfigError([f"{option} {adapter}: it adapts {', '.join(names)}, no projection of attention or MLP"])
    base, actor = run.get("megatron_training.load"), "megatron_training."
    values: dict[str, object] = {f"{actor}load": adapter, **({f"{actor}base_model": base} if base else {})}
    values |= {f"{actor}lora_target_modules": targets}
    if "lora_dropout" in config:
        values |= {f"{actor}lora_dropout": config["lora_dropout"]}
    is_rl = str(run.get(f"{actor}stage")).startswith("ray")
    if is_rl and reference is None and run.get("rl_config.init_kl_coef"):
        values |= {"rl_config.share_backbone": True}
    elif reference not in (None, adapter):
        values |= {"rl_config.integrated_mode_config.ref_model_load_path" if is_rl else f"{actor}ref_model": reference}
    run.translate(option, values, "rank and scale are the adapter's")


def set_rollout_format(run: Import, option: str, value: object) -> None:
    """Set the format of the engine's matrices: int8, also by its names in vllm-ascend and SGLang; refuse others by name."""
    if value in ("int8", "ascend", "w8a8_int8"):
        run.translate(option, {"generate_config.quantization": "int8"}, "quantized at each weight sync")
    elif value in (None, "", "null", "None"):
        run.note(option, "the engine has the format of dtype")
    else:
        cache = ", and for keys and values alone kv_cache_dtype: fp8_e4m3" if "fp8" in str(value) else ""
        run.refuse(option, f"a rollout engine in {value}; int8 is available, quantized at each weight sync{cache}")


def train_prediction_layers(run: Import, options: Sequence[str], count: int, factor: float, *, detaches: bool) -> None:
    """Set the training of multi-token-prediction layers, under the first of the options that the command has for it.

    Where adapters train, which are read before, the layers have some too, as they have in Megatron there.

    Args:
        count: layers.
        factor: weight of their loss.
        detaches: their loss trains them alone there.
    """
    keys = {"mtp_num_layers": count, "mtp_loss_scaling_factor": factor, "mtp_detach_heads": detaches}
    values = {f"megatron_training.{name}": value for name, value in keys.items()}
    adapted = "; their adapters train" if run.get("megatron_training.lora_target_modules") else ""
    run.translate(options[0], values, f"their loss is a mean over the tokens of an optimizer step{adapted}")
    run.translated |= dict.fromkeys(options[1:], f"see {options[0]}")


def find_lora_targets(names: Iterable[str]) -> list[str]:
    """Return Megatron's layers for the projections that PEFT names; "all-linear" is all of them."""
    layers = {
        "linear_qkv": {"q_proj", "k_proj", "v_proj", "qkv_proj", "linear_qkv", "all-linear"},
        "linear_proj": {"o_proj", "linear_proj", "all-linear"},
        "linear_fc1": {"gate_proj", "up_proj", "linear_fc1", "all-linear"},
        "linear_fc2": {"down_proj", "linear_fc2", "all-linear"},
    }
    requested = set(names)
    return [layer for layer, projections in layers.items() if requested & projections]
