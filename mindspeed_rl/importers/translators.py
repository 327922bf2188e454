"""Options that several projects have alike: what turns one of them into keys, and how words and names of data are read."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from mindspeed_rl.config.errors import ConfigError
from mindspeed_rl.importers.options import Option, SourceCommand, by, read_count, read_scalar
from mindspeed_rl.importers.recipe import ACTOR, ENGINE, RL
from mindspeed_rl.importers.result import Import
from mindspeed_rl.importers.shell import Command, read_flags
from mindspeed_rl.importers.source_files import find_file
from mindspeed_rl.importers.writer import RECOMPUTE_LAYERS
from mindspeed_rl.importers.yaml_text import load_yaml_text

#: trackers by their names elsewhere
TRACKERS = ("tensorboard", "wandb", "swanlab", "mlflow", "trackio")


# --- optimizer states -------------------------------------------------------------------------------------------------


def offload_optimizer(group: str, default: float) -> dict[str, Option]:
    """Return the records of Megatron's options for optimizer states that the host updates.

    Args:
        group: group of the key.
        default: share of the states without the second option.
    """
    switch, share = "optimizer_cpu_offload", "optimizer_offload_fraction"

    def is_on(run: Import, option: str, name: str) -> bool:
        value = run.options.get(option.removeprefix(run.prefix).replace(name, switch), False)
        return value not in ("false", "False") and bool(value)

    def translate_switch(run: Import, option: str, value: object) -> None:
        if is_on(run, option, switch):
            fraction = run.options.get(option.removeprefix(run.prefix).replace(switch, share), default)
            run.translate(option, {f"{group}.{share}": fraction})
        else:
            run.note(option, "the states of the optimizer stay on the device", changes_nothing=False)

    def translate_share(run: Import, option: str, value: object) -> None:
        if is_on(run, option, share):
            run.note(option, f"see {switch}", changes_nothing=False)
        else:
            run.note(option, f"it is read with {switch}")

    return {
        switch: by(translate_switch, f"{share}, where it is on"),
        share: by(translate_share, f"see {switch}"),
    }


def note_remote_code(run: Import, option: str, value: object) -> None:
    """Note that the code of a model folder stays off, with the keys that a user who trusts it sets."""
    if value in (True, "True", "true", 1, "1"):
        text = "code of a model folder does not run: for a model that needs it and that you trust, set "
        text += f"{ACTOR}.trust_remote_code (engine: fsdp) and {ENGINE}.trust_remote_code"
        run.note(option, text, changes_nothing=False)
    else:
        run.note(option, "code of a model folder does not run")


# --- reading ----------------------------------------------------------------------------------------------------------


def join_words(flags: Mapping[str, list[str]]) -> dict[str, object]:
    """Return options by name: true without words, a list of several."""
    values = {name: [read_scalar(word) for word in words] for name, words in flags.items()}
    return {name: True if not items else items[0] if len(items) == 1 else items for name, items in values.items()}


def read_options(words: Iterable[str]) -> dict[str, object]:
    """Return the options of a command line."""
    return join_words(read_flags(tuple(words), has_blanks=True)[0])


#: sentence for a command that starts a process on each device of a machine
ALL_DEVICES = "the command takes all devices of a machine, and nothing says how many there are; write --devices N"


def count_accelerated(command: Command, launch: Mapping[str, object], known: Mapping[str, int] | None = None) -> int | None:
    """Return the processes that accelerate starts: of its option, else of its file; None where neither is given.

    Args:
        launch: options of the launcher by name.
        known: names of files that a project ships -> their processes.

    Raises:
        ConfigError: the file is not here, or does not say the number.
    """
    # further words belong to the program that it starts
    first = {name: value[0] if isinstance(value, list) else value for name, value in launch.items()}
    if "num_processes" in first:
        return read_count("num_processes", first["num_processes"])
    config = first.get("accelerate_config", first.get("config_file"))
    if config is None:
        return None
    if (found := find_file(command, str(config))) is not None:
        if (processes := read_option_file(found).get("num_processes")) is None:
            raise ConfigError([f"{config} has no num_processes; set the devices by --devices"])
        return read_count(f"num_processes of {config}", processes)
    path = Path(str(config))
    if known and path.stem in known and path.parent.name in ("", "accelerate_configs"):
        return known[path.stem]
    raise ConfigError([f"the number of processes is in {config}, which is not here; set it by --devices"])


def read_option_file(path: Path) -> dict[str, object]:
    """Return the options of a YAML or JSON file.

    Raises:
        ConfigError: it cannot be read, or holds something else than options.
    """
    try:
        text = path.expanduser().read_text(encoding="utf-8")
        content = json.loads(text) if path.suffix == ".json" else load_yaml_text(text)
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError([f"the file of options {path} cannot be read: {error}"]) from None
    if not isinstance(content, dict):
        raise ConfigError([f"the file of options {path} must hold names and values, and it is something else"])
    # YAML reads 1e-6 as a text
    return {str(name): read_scalar(value) if isinstance(value, str) else value for name, value in content.items()}


def choose_training(found: list[tuple[Command, int]], absent: str) -> tuple[Command, int]:
    """Return the only command that trains, with the place of its program.

    Raises:
        ConfigError: there is none, or the machine decides which one runs.
    """
    if not found:
        raise ConfigError([absent])
    if len(found) > 1 or found[0][0].uncertain:
        lines = ", ".join(str(command.line) for command, _ in found)
        conditions = _name_conditions([command for command, _ in found])
        raise ConfigError([f"lines {lines}: the machine decides which training runs{conditions}; keep one"])
    return found[0]


def require_one(trainings: Sequence[Command]) -> None:
    """Require that a script trains once; what its nodes run has the same words.

    Raises:
        ConfigError: it has several trainings, or the machine decides whether it runs.
    """
    different = {(item.words, tuple(sorted(_list_settings(item).items()))) for item in trainings}
    if len(different) > 1 or any(item.uncertain for item in trainings[:1]):
        lines = ", ".join(dict.fromkeys(str(item.line) for item in trainings))
        which = f"the script has several trainings, or one that may not run (lines {lines}{_name_conditions(trainings)})"
        raise ConfigError([f"{which}; import one of them"])


def _name_conditions(trainings: Sequence[Command]) -> str:
    """Return what decides whether trainings run, with the option that gives its value."""
    conditions = dict.fromkeys(item.uncertain for item in trainings if item.uncertain)
    return "".join(f"; {condition} decides" for condition in conditions)


def _list_settings(command: Command) -> dict[str, str]:
    return {name: value for name, value in command.environment.items() if "RANK" not in name}


def find_module(run: Import, command: SourceCommand, name: str) -> str:
    """Return the module of a Python file: by its path from the working directory, or by its name, with a note, elsewhere."""
    path = str(command.get(name)).removeprefix(f"{command.environment.get('PWD', '.')}/").removeprefix("./")
    if not path.endswith(".py"):
        run.refuse(f"{run.prefix}{name}", f"{path}, which is not a Python file; docs/rewards.md has rewards that ask a server")
    if path.startswith(("/", "~", "..")):
        folder = str(Path(path).parent)
        run.translate(f"{run.prefix}{name}", {}, f"a module of {folder}: start the run with PYTHONPATH={folder}")
        path = Path(path).name
    return path.removesuffix(".py").replace("/", ".")


def name_prompts(name: str) -> str:
    """Return data_path for prompts: a file or folder, or hf://NAME for a dataset of the hub."""
    # names of the hub may have a dot too, as NuminaMath-1.5, but after it no extension of only letters
    is_file = name.startswith(("/", ".", "~")) or Path(name).expanduser().exists() or Path(name).suffix[1:].isalpha()
    return f"hf://{name}" if name.count("/") == 1 and not is_file else name


def name_tokens(name: str, *, others: bool = False) -> str:
    """Return data_path for rows that preprocessing writes."""
    return f"./dataset/{Path(name).stem}{'_and_others' if others else ''}/data"


def describe_preprocessing(name: str, prefix: str, tokenizer: object, options: str) -> str:
    """Return the note of a prefix: the command that writes it."""
    head = f"mindspeed-rl preprocess --input {name} --output-prefix {prefix} --tokenizer-name-or-path {tokenizer}"
    return f"the prefix that is written by: {head}{options}"


def take_template_words(run: Import) -> str:
    """Return the options of preprocessing for the chat template, whose keys are for raw prompts."""
    names = ("enable_thinking", "chat_template_kwargs", "system_prompt")
    thinking, arguments, system = (
        run.take(f"{ACTOR}.{name}", f"--{name.replace('_', '-')} of preprocess") for name in names
    )
    words = f" --enable-thinking {str(thinking).lower()}" if isinstance(thinking, bool) else ""
    words += f" --chat-template-kwargs '{json.dumps(arguments)}'" if arguments else ""
    return words + (f" --system-prompt {shlex.quote(str(system))}" if system else "")


def read_mapping(option: str, value: object) -> dict[str, object]:
    """Return an option that is a mapping, or its text in JSON or in the form of Hydra's commands; nothing for None.

    Raises:
        ConfigError: the text is neither.
    """
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            try:
                value = OverridesParser.create().parse_override(f"value={value}").value()
            except HydraException:
                raise ConfigError([f"{option} is {value!r}, but must be JSON"]) from None
            if not isinstance(value, Mapping):
                raise ConfigError([f"{option} is {value!r}, but must be JSON"]) from None
    if not isinstance(value, Mapping) and value not in (None, "", [], False):
        raise ConfigError([f"{option} is {value!r}, but must be a mapping, in JSON"])
    return {str(name): item for name, item in value.items()} if isinstance(value, Mapping) else {}


# --- single options ---------------------------------------------------------------------------------------------------


def set_model(run: Import, option: str, value: object) -> None:
    """Set model and tokenizer, of which only the weights are read."""
    path = str(value)
    note = "" if Path(path).expanduser().exists() else f"a folder: hf download {path} --local-dir {path}"
    values = {f"{ACTOR}.load": path, f"{ACTOR}.tokenizer_name_or_path": path, f"{ACTOR}.finetune": True}
    run.translate(option, values, note)


def set_output(run: Import, option: str, value: object) -> None:
    """Set the folder of a run, and the folder of its checkpoints."""
    run.translate(option, {"run_dir": str(value), f"{ACTOR}.save": str(Path(str(value), "checkpoints"))})


def set_trackers(run: Import, option: str, value: object) -> None:
    """Set the trackers; the console is always there."""
    names = [str(item) for item in (value if isinstance(value, list) else [value])]
    taken = [name for name in (TRACKERS if names == ["all"] else names) if name in TRACKERS]
    others = ", ".join(name for name in names if name not in (*TRACKERS, "all", "none", "None"))
    run.translate(option, {f"{RL}.report_to": taken}, note_trackers(others))


def note_trackers(others: str) -> str:
    """Return the note of trackers that there are not."""
    return f"{others}: the console and metrics.jsonl are always there" if others else ""


def set_recomputation(run: Import, option: str, value: object) -> None:
    """Set the recomputation of whole layers."""
    if value:
        run.translate(option, RECOMPUTE_LAYERS, "each layer")
    else:
        run.note(option, "false: nothing is computed again", changes_nothing=False)


def set_tensorboard(run: Import, option: str, value: object) -> None:
    """Switch TensorBoard on for a folder."""
    run.translate(option, {f"{RL}.use_tensorboard": bool(value)}, "files go into the run folder")


def set_template_arguments(run: Import, option: str, value: object) -> None:
    """Set the arguments of the chat template; enable_thinking has a key of its own."""
    values = read_mapping(option, value)
    thinking = {f"{ACTOR}.enable_thinking": values.pop("enable_thinking")} if "enable_thinking" in values else {}
    run.translate(option, thinking | ({f"{ACTOR}.chat_template_kwargs": values} if values else {}))


def name_draft_method(name: object) -> object:
    """Return the method of drafts; methods that are named by a model are prediction layers."""
    return "mtp" if str(name).endswith("_mtp") else name


def negated(key: str) -> Option:
    """Return an option whose opposite is a key."""
    return by(lambda run, option, value: run.translate(option, {key: not value}), f"{key} = not value")


def interval(key: str) -> Option:
    """Return an option that is an interval, where -1 means never."""

    def translate(run: Import, option: str, value: object) -> None:
        if isinstance(value, int) and value > 0:
            run.translate(option, {key: value})
        else:
            run.note(option, f"{value}: only at the end")

    return by(translate, f"{key}; -1 is only at the end")


def texts(*keys: str) -> Option:
    """Return an option whose words are a list of texts."""

    def translate(run: Import, option: str, value: object) -> None:
        words = [str(item) for item in value] if isinstance(value, list) else [] if value is None else [str(value)]
        run.translate(option, dict.fromkeys(keys, words))

    return by(translate, f"{' = '.join(keys)} = the words")
