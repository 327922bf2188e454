"""`mindspeed-rl new`: a folder with prompts, reward, run file and README of a task, ready to train and to be changed."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from string import Template

from mindspeed_rl import registry
from mindspeed_rl.cli.doctor.checks import computes_bfloat16
from mindspeed_rl.cli.new import made_rows
from mindspeed_rl.cli.new.given_rows import Given, Source, read_dataset, read_own, read_reasoning_gym, read_verifiers
from mindspeed_rl.cli.new.made_rows import Row
from mindspeed_rl.cli.new.tiny_model import MAX_LENGTH, TinyKind, save_tiny_model
from mindspeed_rl.cli.options import Parser, print_status, read_json_object
from mindspeed_rl.files import read_json, write_file
from mindspeed_rl.hub import fetch, parse_hub_name
from mindspeed_rl.models import has_layers

_NUM_HELD_OUT = 24
#: characters of the row that the README shows
_MAX_EXAMPLE = 300
_TEMPLATES = Path(__file__).parent.with_name("task_files")


@dataclass(frozen=True)
class _Kind:
    """A kind of task.

    Attributes:
        title: goal of the task, in a line.
        make_rows: function that makes the prompts or samples; None where `read` is the only way.
        read: function that reads them from outside; None for a kind that makes its own.
        run: template of the run file.
        stage: value of megatron_training.stage.
        scoring: template of its keys for rewards or the loss.
        actor: template of further keys of the actor.
        critic: template of the group of the critic; None without one.
        columns: further columns of a row that a sample needs.
        files: further files, with their templates.
        iterations: length of the run with the tiny model.
        advice: template of the hints in the README.
        options: further options for `evaluate`.
        first: command to run before the others.
        answer: longest answer of the tiny model, in tokens; few, so that the first right ones come soon.
        has_teacher: a second model teaches the first.
        make_pictures: function that makes images by path; None for a kind of texts.
    """

    title: str
    make_rows: Callable[[], list[Row]] | None = None
    read: Callable[[Source], Given] | None = None
    run: str = "rl_run.yaml"
    stage: str = "ray_grpo"
    scoring: str | None = "reward_keys.yaml"
    actor: str | None = None
    critic: str | None = None
    columns: tuple[str, ...] = ()
    files: Mapping[str, str] = field(default_factory=dict)
    iterations: int = 60
    advice: str = "rl_advice.md"
    options: str = "--input-key question --scorer $reward --external-plugins reward.py"
    first: str = ""
    answer: int = 16
    has_teacher: bool = False
    make_pictures: Callable[[], dict[str, bytes]] | None = None


_KINDS = {
    "maths": _Kind(
        "GRPO on sums with a checked answer", made_rows.make_maths, files={"reward.py": "number_reward.py"}, answer=3,
    ),
    "format": _Kind("GRPO on the form of an answer: JSON", made_rows.make_format, files={"reward.py": "format_reward.py"}),
    "tool": _Kind(
        "GRPO of an agent that calls a tool", made_rows.make_tool, scoring="tool_keys.yaml",
        files={"reward.py": "number_reward.py", "tools.yaml": "tools.yaml"},
        options="--input-key question --scorer $reward --external-plugins reward.py --tools tools.yaml",
    ),
    "environment": _Kind(
        "GRPO of an agent in an environment", made_rows.make_environment, scoring="environment_keys.yaml",
        files={"environment.py": "environment.py"},
        options="--input-key question --scorer exact_match --environment environment:GuessNumber", answer=2,
    ),
    "program": _Kind(
        "GRPO of an agent that is a program of its own", made_rows.make_maths, scoring="program_keys.yaml",
        columns=("question",), files={"play_sample.py": "play_sample.py"}, options="", answer=3,
    ),
    "ppo": _Kind(
        "PPO with a critic on sums with a checked answer", made_rows.make_maths, stage="ray_ppo", scoring="ppo_keys.yaml",
        critic="critic_keys.yaml", files={"reward.py": "number_reward.py"}, answer=3,
    ),
    "vision": _Kind(
        "GRPO on pictures with a checked answer", made_rows.make_vision, actor="vision_keys.yaml",
        files={"reward.py": "colour_reward.py"}, options="", answer=2, make_pictures=made_rows.draw_pictures,
    ),
    "judge": _Kind(
        "GRPO with a judge in place of a reward function", made_rows.make_maths, scoring="judge_keys.yaml",
        files={"judge_prompt.txt": "judge_prompt.txt", "judge_server.py": "judge_server.py"}, options="",
        first="python judge_server.py &",
    ),
    "distillation": _Kind(
        "on-policy distillation of a teacher", made_rows.make_maths, scoring="distillation_keys.yaml", options="",
        has_teacher=True,
    ),
    "own": _Kind(
        "GRPO on data and a reward of your own", made_rows.make_own, read_own, files={"reward.py": "own_reward.py"}, answer=12,
    ),
    "dataset": _Kind("GRPO on a data set, of a hub for example", read=read_dataset, options="", answer=2),
    "reasoning-gym": _Kind(
        "GRPO on a task of reasoning-gym with its checker, from easy to hard", read=read_reasoning_gym,
        files={"reward.py": "reasoning_gym_reward.py"}, options="", answer=2,
    ),
    "verifiers": _Kind(
        "GRPO of an agent in an environment of the verifiers library", read=read_verifiers, scoring="verifiers_keys.yaml",
        files={"environment.yaml": "verifiers_environment.yaml"}, options="", answer=64,
    ),
    **dict.fromkeys(("dpo", "preference"), _Kind(
        "DPO on pairs of a chosen and a rejected answer", made_rows.make_preference, run="supervised_run.yaml", stage="dpo",
        scoring="preference_keys.yaml", advice="supervised_advice.md", options="",
    )),
    "sft": _Kind(
        "Supervised fine-tuning on questions and answers", made_rows.make_sft, run="supervised_run.yaml", stage="sft",
        scoring=None, iterations=200, advice="supervised_advice.md",
        options="--input-key instruction --label-key output --scorer exact_match",
    ),
}  # fmt: skip
#: option -> kinds that take it
_TAKEN_BY = {
    "data": ("own", "dataset"),
    "teacher": ("distillation",),
    "task": ("reasoning-gym", "verifiers"),
    "arguments": ("reasoning-gym", "verifiers"),
    "levels": ("reasoning-gym",),
    "level": ("dataset",),
    "python": ("verifiers",),
}
#: kind -> option that it needs
_NEEDED = {"dataset": "data", "reasoning-gym": "task", "verifiers": "task"}


def main(argv: list[str]) -> int:
    """Write the folder; return 0, or 2 for a wrong option."""
    parser = Parser(prog="mindspeed-rl new", description="Write the files of a task: data, reward, run file, README.")
    parser.add_argument("name", help="folder to make")
    kinds = "; ".join(f"{name}: {kind.title}" for name, kind in _KINDS.items())
    parser.add_argument("--kind", choices=list(_KINDS), default="maths", help=f"{kinds}. Default: maths")
    parser.add_argument("--model", help="folder or name on a hub to start from; default: a random model of 0.8M parameters")
    parser.add_argument("--experts", action="store_true", help="the random model is a mixture of four experts")
    parser.add_argument("--teacher", help="distillation: folder or name on a hub of the teacher; needed with --model")
    parser.add_argument(
        "--data", help="own, dataset: file, folder or hf://owner/name with rows of questions and answers"
    )
    parser.add_argument("--level", metavar="COLUMN", help="dataset: column with the level of a row, low ones first")
    parser.add_argument("--task", help="reasoning-gym: name of a task; verifiers: name of an environment")
    parser.add_argument("--arguments", type=read_json_object, help="of the task or the environment, as a JSON object")
    parser.add_argument("--levels", type=int, help="reasoning-gym: number of levels, for tasks that have some; default: 4")
    parser.add_argument("--python", help="verifiers: interpreter that has the library; default: this one")
    try:
        arguments = parser.parse_args(argv)
        folder = Path(arguments.name).expanduser()
        for name, takers in _TAKEN_BY.items():
            if getattr(arguments, name) is not None and arguments.kind not in takers:
                raise ValueError(f"--{name} is for --kind {' or '.join(takers)}, not for {arguments.kind}")
        if (needed := _NEEDED.get(arguments.kind)) is not None and getattr(arguments, needed) is None:
            raise ValueError(f"--kind {arguments.kind} needs --{needed}; mindspeed-rl new --help says what it is")
        if arguments.levels is not None and arguments.levels < 1:
            raise ValueError(f"--levels is {arguments.levels}, but must be at least 1")
        if _KINDS[arguments.kind].has_teacher and (arguments.teacher is None) != (arguments.model is None):
            raise ValueError("--model and --teacher belong together: both have the same tokens; without them both are tiny")
        if arguments.experts and (arguments.model is not None or _KINDS[arguments.kind].make_pictures is not None):
            raise ValueError("--experts is for the random model of kinds without pictures: leave out --model and --kind vision")
        source = Source(
            arguments.kind,
            arguments.data,
            arguments.task,
            arguments.arguments or {},
            arguments.level,
            arguments.levels,
            arguments.python,
        )
        commands = _write(folder, source, arguments.model, arguments.teacher, has_experts=arguments.experts)
    except (ValueError, OSError) as error:
        print_status(f"error: {error}")
        return 2
    print(f"wrote {folder}/; now:\n\n  cd {folder}\n  " + commands.replace("\n", "\n  "))
    return 0


def _collect_rows(kind: _Kind, source: Source) -> Given:
    """Return the rows of a kind: those from outside where they are named, else its own."""
    if kind.make_rows is not None and source.data is None:
        return Given(kind.make_rows())
    assert kind.read is not None
    return kind.read(source)


def _write(folder: Path, source: Source, model: str | None, teacher: str | None, *, has_experts: bool) -> str:
    """Write all files and return the commands to run next.

    Raises:
        ValueError: the folder exists, its name is unusable, or the model or the data are none.
    """
    kind, reward = _KINDS[source.kind], re.sub(r"\W", "_", folder.name).strip("_").lower()
    if not reward or not re.fullmatch(r"[\w.-]+", folder.name):
        raise ValueError(f"{folder.name!r} is not a name for a task: letters, digits, _, - and . only")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} exists already; choose another name, or remove it")
    given = _collect_rows(kind, source)
    rows = list(given.rows)
    random.Random(0).shuffle(rows)
    makes_rows = kind.make_rows is not None and source.data is None
    num_held_out = _NUM_HELD_OUT if makes_rows else min(_NUM_HELD_OUT, len(rows) // 4)
    values = {
        "name": folder.name,
        "kind": source.kind,
        "title": f"{folder.name}: {kind.title}",
        "reward": reward,
        "teacher": "teacher" if teacher is None else _name_model(teacher, "--teacher"),
        "stage": kind.stage,
        "label": "answer",
        "columns": _format_columns(kind, given),
        "levels": _read("level_keys.yaml") + "\n" if given.has_levels else "",
        **_choose_sizes(kind, model, [] if makes_rows else rows),
        **given.values,
    }
    commands = _list_commands(kind, values)
    parts = {"scoring": given.scoring or kind.scoring, "actor": kind.actor, "critic": kind.critic}
    files = {**kind.files, **given.files}
    texts = {
        "train.jsonl": _format_rows(rows[num_held_out:]),
        "heldout.jsonl": _format_rows(rows[:num_held_out]),
        "run.yaml": _fill(_read(kind.run), {**values, **{name: _fill(_read(text), values) for name, text in parts.items()}}),
        "README.md": _fill(_read("README.md"), {**values, **_describe(kind, files, model, rows[0]), "commands": commands}),
        **{name: _fill(_read(template), values) for name, template in files.items()},
    }
    for name, text in texts.items():
        write_file(folder / name, text.rstrip("\n") + "\n", makes_folder=True)
    for name, content in ({} if kind.make_pictures is None else kind.make_pictures()).items():
        write_file(folder / name, content, makes_folder=True)
    if given.note:
        print_status(f"note: {given.note}")
    if model is None:
        tiny: TinyKind = "vision" if kind.make_pictures is not None else "experts" if has_experts else "dense"
        save_tiny_model(folder / "model", tiny)
        if kind.has_teacher:  # whose tokens differ more in their probabilities
            save_tiny_model(folder / "teacher", tiny, seed=11, spread=0.3)
    return commands


def _format_columns(kind: _Kind, given: Given) -> str:
    """Return the keys of the run file for further columns and for images."""
    names = (*kind.columns, *given.columns)
    columns = f"\n  dataset_additional_keys: [{', '.join(names)}]" if names else ""
    return columns + (f"\n  image_folder: {made_rows.PICTURES}" if kind.make_pictures is not None else "")


def _format_rows(rows: list[Row]) -> str:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def _read(template: str | None) -> str:
    """Return the text of a template without its last line break, "" for None."""
    if template is None:
        return ""
    return (_TEMPLATES / f"{template}.template").read_text(encoding="utf-8").removesuffix("\n")


def _fill(text: str, values: dict[str, str]) -> str:
    return Template(text).safe_substitute(values)


def _describe(kind: _Kind, files: Mapping[str, str], model: str | None, row: Row) -> dict[str, str]:
    """Return the parts of the README that the kind and the model decide."""
    tiny = (
        "The model in `model/` is random and tiny (0.8M parameters, one token a character): it trains in minutes on a laptop "
        "and shows that everything works, but it knows nothing. With `--model FOLDER` the run starts from a real one."
    )
    notes = {
        "reward.py": "the reward function: change it to your task",
        "tools.yaml": "the tools that the model may call",
        "environment.py": "the environment: what it answers, and its rewards",
        "judge_prompt.txt": "what the judge is asked, with the places of prompt, label and response",
        "judge_server.py": "a stand-in for the judge's server, until yours is ready",
        "play_sample.py": "the program that plays a sample and prints its reward",
        "environment.yaml": "the environment of the verifiers library, and the Python that runs it",
    }
    example = json.dumps(row, ensure_ascii=False)
    example = example if len(example) <= _MAX_EXAMPLE else f"{example[:_MAX_EXAMPLE]} ..."
    return {
        "model_note": tiny if model is None else f"The run starts from `{model}`.",
        "data_note": f"one JSON object a line, such as `{example}`",
        "file_rows": "".join(f"| `{name}` | {notes[name]} |\n" for name in files),
        "advice": _read(kind.advice),
    }


def _list_commands(kind: _Kind, values: dict[str, str]) -> str:
    commands = [*filter(None, [kind.first]), "mindspeed-rl explain --config run.yaml", "mindspeed-rl train --config run.yaml"]
    load = "--load result/hf/latest --max-new-tokens $answer"
    if kind.options:
        commands.append(f"mindspeed-rl evaluate {load} --task jsonl --task-data-path heldout.jsonl {kind.options}")
    commands.append(f"mindspeed-rl chat {load}")
    return _fill("\n".join(commands), values)


def _choose_sizes(kind: _Kind, model: str | None, rows: list[Row]) -> dict[str, str]:
    """Return the numbers of the run file for the tiny model, or for a real one.

    Args:
        rows: from outside, whose lengths the tiny model must have room for.

    Raises:
        ValueError: the folder holds no model, or the tiny one has no room for the rows.
    """
    supervised = kind.run == "supervised_run.yaml"
    if model is None:
        prompt, answer, length = _fit_tiny_model(rows, kind.answer)
        sizes: dict[str, float] = {"prompt": prompt, "answer": answer, "length": length, "micro": 128, "cache": 0.25}
        sizes["iterations"] = kind.iterations
        note = "for random weights; a model that has been trained needs 10 to 1000 times less"
        lr = "1.0e-3"
        chosen = {"model": "model", "engine": "", "bf16": "false", "dtype": "float32", "lr": lr, "lr_note": note}
        return chosen | _as_text(sizes)
    path = _find_model(model, "--model")
    try:
        config = read_json(path / "config.json")
        # the sizes of a model of images are in a part
        content = config | (config.get("text_config") or {})
        hidden, longest = int(content.get("hidden_size") or 4096), int(content.get("max_position_embeddings") or 1024)
    except (ValueError, AttributeError, TypeError) as error:
        raise ValueError(f"--model {model}: config.json is not a model's: {error}") from None
    is_small = hidden <= 1024
    lr = ("5.0e-5" if is_small else "1.0e-5") if supervised else ("2.0e-5" if is_small else "1.0e-6")
    length = min(1024, longest)
    prompt = min(256, length // 2)
    sizes = {"prompt": prompt, "answer": min(128, length - prompt), "length": length, "micro": 8, "cache": 2.0}
    sizes["iterations"] = 2 * kind.iterations
    by_module = "model_type" in config and not has_layers(config)
    if by_module and "auto_map" not in config:  # code of the folder runs only where a run file trusts it
        _check_module(path)
    # classes of transformers may keep weights in float32
    halves = "true" if computes_bfloat16() and not by_module else "false"
    note = "half of it where the reward or the loss is unstable"
    return {
        "model": _name_model(model, "--model"),
        "engine": "\n  engine: fsdp                 # Megatron has no layers of this family here" if by_module else "",
        "bf16": halves,
        "dtype": "bfloat16" if halves == "true" else "float32",
        "lr": lr,
        "lr_note": note,
    } | _as_text(sizes)


def _fit_tiny_model(rows: list[Row], answer: int) -> tuple[int, int, int]:
    """Return the limits of prompt, answer and both for the tiny model, which reads one character a token.

    Raises:
        ValueError: half of the questions are longer than it reads.
    """
    # a chat template adds a line break for each message
    questions = sorted(len(str(row["question"])) + 2 for row in rows) or [0]
    longest = max((len(str(row.get("answer") or "")) + 1 for row in rows), default=0)
    answer = min(max(longest, answer), MAX_LENGTH // 4)
    prompt = min(max(96, questions[-1] + 1), MAX_LENGTH - answer)
    if questions[len(questions) // 2] >= prompt:
        raise ValueError(
            f"half of the questions have more than {prompt} characters, and the random model reads {MAX_LENGTH} with the"
            " answer: start from a real one with --model"
        )
    return prompt, answer, min(max(192, prompt + 2 * answer), MAX_LENGTH)


def _find_model(model: str, option: str) -> Path:
    """Return the folder of a model, which is fetched where its name is one of a hub.

    Raises:
        ValueError: the folder holds no model.
    """
    name = parse_hub_name(model)
    path = Path(model).expanduser().resolve() if name is None else fetch(name, option, "tokenizer")
    if not (path / "config.json").is_file():
        raise ValueError(f"{option} {model} holds no config.json: give a Hugging Face folder")
    return path


def _check_module(path: Path) -> None:
    """Check that transformers computes the model of a folder, which no other engine has.

    Raises:
        ValueError: it does not.
    """
    # by name: it imports transformers' models, which a model of the support table does without
    read_any_model = registry.load("mindspeed_rl.models.plan:read_any_model", "new")
    try:
        read_any_model(path)
    except ValueError as error:
        raise ValueError(f"--model {error}") from None


def _name_model(model: str, option: str) -> str:
    """Return how a run file names a model: as on its hub, or the folder from the root on.

    Raises:
        ValueError: see `_find_model`.
    """
    path = _find_model(model, option)
    return str(path) if parse_hub_name(model) is None else model


def _as_text(sizes: dict[str, float]) -> dict[str, str]:
    return {name: str(value) for name, value in sizes.items()}
