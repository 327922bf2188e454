"""`mindspeed-rl new`: a folder with prompts, reward, run file and README of a task, ready to train and to be changed."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from string import Template

from mindspeed_rl.cli.options import Parser, print_status
from mindspeed_rl.data.conversation import MalformedRowError
from mindspeed_rl.data.forms import Reading, find_form
from mindspeed_rl.data.hub import fetch, parse_hub_name
from mindspeed_rl.data.sources import open_source, read_rows
from mindspeed_rl.files import read_json, write_file

#: column -> value
_Row = dict[str, str]
_NUM_HELD_OUT = 24
_MIN_ROWS = 8
#: handler of the forms with a question and an answer
_QUESTIONS = "AlpacaStyleInstructionHandler"
_TEMPLATES = Path(__file__).with_name("task_files")
_NOUNS = (
    "cat dog river mountain city teacher train book garden winter kitchen ocean forest robot market school planet bridge "
    "farmer doctor window letter piano engine island storm painter castle desert baker"
).split()
_ROMAN = {100: "C", 90: "XC", 50: "L", 40: "XL", 10: "X", 9: "IX", 5: "V", 4: "IV", 1: "I"}


def _make_format() -> list[_Row]:
    places = ("at home", "on a photo", "in a story")
    return [
        {"question": f"Describe a {noun} {place} as a JSON object with the key answer.", "answer": "answer"}
        for noun in _NOUNS
        for place in places
    ]


def _make_maths() -> list[_Row]:
    pairs = [(a, b) for a in range(1, 21) for b in range(1, 21)]
    return [{"question": f"What is {a} + {b}? Answer with the number only.", "answer": str(a + b)} for a, b in pairs]


def _make_tool() -> list[_Row]:
    pairs = [(a, b) for a in range(101, 999, 61) for b in range(103, 999, 67)]
    return [{"question": f"What is {a} * {b}? Use the calculator.", "answer": str(a * b)} for a, b in pairs]


def _make_environment() -> list[_Row]:
    openings = ("I think of", "Guess", "I have written down", "Find", "My secret is", "There is")
    question = "{} a number from 1 to 9. Answer with one digit."
    return [{"question": question.format(opening), "answer": str(number)} for opening in openings for number in range(1, 10)]


def _make_preference() -> list[_Row]:
    topics = [f"{verb} a {noun}" for verb in ("Draw", "Describe", "Find", "Buy", "Sell") for noun in _NOUNS]
    short, long = "Gladly: {}.", "Well, since you ask me, I could perhaps say {}, could I not?"
    return [
        {"instruction": f"{topic}.", "input": "", "chosen": short.format(answer), "rejected": long.format(answer)}
        for topic in topics
        for answer in [topic.rpartition(" ")[2]]
    ]


def _make_sft() -> list[_Row]:
    rows = []
    for number in range(1, 400):
        text, rest = "", number
        for value, letters in _ROMAN.items():
            text, rest = text + letters * (rest // value), rest % value
        rows.append({"instruction": f"Write {number} as a Roman numeral.", "input": "", "output": text})
    return rows



def _make_own() -> list[_Row]:
    orders = ("Write {} in capitals.", "What is {} in capital letters?", "Shout the word {}.")
    return [{"question": order.format(noun), "answer": noun.upper()} for noun in _NOUNS for order in orders]


@dataclass(frozen=True)
class _Kind:
    """A kind of task.

    Attributes:
        title: goal of the task, in a line.
        make_rows: function that makes the prompts or samples.
        run: template of the run file.
        stage: value of megatron_training.stage.
        scoring: template of its keys for rewards or the loss.
        critic: template of the group of the critic; None without one.
        columns: further columns of a row that a sample needs.
        files: further files, with their templates.
        iterations: length of the run with the tiny model.
        advice: template of the hints in the README.
        options: further options for `evaluate`.
        first: command to run before the others.
        has_teacher: a second model teaches the first.
    """

    title: str
    make_rows: Callable[[], list[_Row]]
    run: str = "rl_run.yaml"
    stage: str = "ray_grpo"
    scoring: str | None = "reward_keys.yaml"
    critic: str | None = None
    columns: tuple[str, ...] = ()
    files: Mapping[str, str] = field(default_factory=dict)
    iterations: int = 60
    advice: str = "rl_advice.md"
    options: str = "--input-key question --scorer $reward --external-plugins reward.py"
    first: str = ""
    has_teacher: bool = False


_KINDS = {
    "maths": _Kind("GRPO on sums with a checked answer", _make_maths, files={"reward.py": "number_reward.py"}),
    "format": _Kind("GRPO on the form of an answer: JSON", _make_format, files={"reward.py": "format_reward.py"}),
    "tool": _Kind(
        "GRPO of an agent that calls a tool", _make_tool, scoring="tool_keys.yaml",
        files={"reward.py": "number_reward.py", "tools.yaml": "tools.yaml"},
        options="--input-key question --scorer $reward --external-plugins reward.py --tools tools.yaml",
    ),
    "environment": _Kind(
        "GRPO of an agent in an environment", _make_environment, scoring="environment_keys.yaml",
        files={"environment.py": "environment.py"},
        options="--input-key question --scorer exact_match --environment environment:GuessNumber",
    ),
    "program": _Kind(
        "GRPO of an agent that is a program of its own", _make_maths, scoring="program_keys.yaml", columns=("question",),
        files={"play_sample.py": "play_sample.py"}, options="",
    ),
    "ppo": _Kind(
        "PPO with a critic on sums with a checked answer", _make_maths, stage="ray_ppo", scoring="ppo_keys.yaml",
        critic="critic_keys.yaml", files={"reward.py": "number_reward.py"},
    ),
    "judge": _Kind(
        "GRPO with a judge in place of a reward function", _make_maths, scoring="judge_keys.yaml",
        files={"judge_prompt.txt": "judge_prompt.txt", "judge_server.py": "judge_server.py"}, options="",
        first="python judge_server.py &",
    ),
    "distillation": _Kind(
        "on-policy distillation of a teacher", _make_maths, scoring="distillation_keys.yaml", options="", has_teacher=True,
    ),
    "own": _Kind("GRPO on data and a reward of your own", _make_own, files={"reward.py": "own_reward.py"}),
    **dict.fromkeys(("dpo", "preference"), _Kind(
        "DPO on pairs of a chosen and a rejected answer", _make_preference, run="supervised_run.yaml", stage="dpo",
        scoring="preference_keys.yaml", advice="supervised_advice.md", options="",
    )),
    "sft": _Kind(
        "Supervised fine-tuning on questions and answers", _make_sft, run="supervised_run.yaml", stage="sft", scoring=None,
        iterations=200, advice="supervised_advice.md",
        options="--input-key instruction --label-key output --scorer exact_match",
    ),
}  # fmt: skip
#: chat template of the tiny model: texts without marks, and tool calls as Hermes and Qwen write them
_CHAT_TEMPLATE = (
    "{% if tools %}<tools>{% for tool in tools %}{{ tool.function.name }}{% endfor %}</tools>{% endif %}"
    "{% for message in messages %}"
    "{% if message.role == 'tool' %}<tool_response>{{ message.content }}</tool_response>"
    "{% else %}{{ message.content }}{% for call in message.tool_calls or [] %}"
    '<tool_call>{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}</tool_call>'
    "{% endfor %}{% endif %}"
    "{% if message.role == 'assistant' %}{{ eos_token }}{% else %}\n{% endif %}{% endfor %}"
)


def main(argv: list[str]) -> int:
    """Write the folder; return 0, or 2 for a wrong option."""
    parser = Parser(prog="mindspeed-rl new", description="Write the files of a task: data, reward, run file, README.")
    parser.add_argument("name", help="folder to make")
    kinds = "; ".join(f"{name}: {kind.title}" for name, kind in _KINDS.items())
    parser.add_argument("--kind", choices=list(_KINDS), default="maths", help=f"{kinds}. Default: maths")
    parser.add_argument("--model", help="folder or name on a hub to start from; default: a random model of 0.8M parameters")
    parser.add_argument("--teacher", help="distillation: folder or name on a hub of the teacher; needed with --model")
    parser.add_argument("--data", help="own: file or folder with rows of questions and answers (jsonl, csv, parquet ...)")
    try:
        arguments = parser.parse_args(argv)
        folder = Path(arguments.name).expanduser()
        if arguments.data is not None and arguments.kind != "own":
            raise ValueError(f"--data is for --kind own; kind {arguments.kind} makes its own rows")
        has_teacher = _KINDS[arguments.kind].has_teacher
        if arguments.teacher is not None and not has_teacher:
            raise ValueError(f"--teacher is for --kind distillation, not for {arguments.kind}")
        if has_teacher and (arguments.teacher is None) != (arguments.model is None):
            raise ValueError("--model and --teacher belong together: both have the same tokens; without them both are tiny")
        commands = _write(folder, arguments.kind, arguments.model, arguments.data, arguments.teacher)
    except (ValueError, OSError) as error:
        print_status(f"error: {error}")
        return 2
    print(f"wrote {folder}/; now:\n\n  cd {folder}\n  " + commands.replace("\n", "\n  "))
    return 0


def _read_own(path: str) -> list[_Row]:
    """Read rows of a question and an answer from a file of the user.

    Raises:
        ValueError: the file cannot be read, or it has no columns of questions and answers.
    """
    rows: list[_Row] = []
    reading: Reading | None = None
    for file, number, row in read_rows(open_source(path)):
        if isinstance(row, MalformedRowError) or not isinstance(row, Mapping):
            raise ValueError(f"--data {file}, row {number}: {row if isinstance(row, MalformedRowError) else 'not an object'}")
        reading = reading or find_form(row, "samples")
        if reading is None or reading.handler != _QUESTIONS:
            raise ValueError(
                f"--data {path}: rows have the columns {', '.join(map(str, row))}, but question and answer, prompt and"
                " completion or instruction and output are needed: rename yours, or write the folder without --data and change"
                " map_keys"
            )
        question, answer = (str(row.get(name) or "").strip() for name in reading.columns)
        if not question or not answer:
            raise ValueError(f"--data {file}, row {number}: {' and '.join(reading.columns)} must not be empty")
        extra = str(row.get("input") or "").strip() if reading.form == "Alpaca" else ""
        rows.append({"question": "\n".join(filter(None, (question, extra))), "answer": answer})
    if len(rows) < _MIN_ROWS:
        raise ValueError(f"--data {path} has {len(rows)} rows; {_MIN_ROWS} or more are needed to train and to hold some out")
    return rows


def _write(
    folder: Path, name_of_kind: str, model: str | None, data: str | None = None, teacher: str | None = None
) -> str:
    """Write all files and return the commands to run next.

    Raises:
        ValueError: the folder exists, its name is unusable, or the model or the data are none.
    """
    kind, reward = _KINDS[name_of_kind], re.sub(r"\W", "_", folder.name).strip("_").lower()
    if not reward or not re.fullmatch(r"[\w.-]+", folder.name):
        raise ValueError(f"{folder.name!r} is not a name for a task: letters, digits, _, - and . only")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} exists already; choose another name, or remove it")
    sizes = _choose_sizes(kind, model)
    values = {
        "name": folder.name,
        "kind": name_of_kind,
        "title": f"{folder.name}: {kind.title}",
        "reward": reward,
        "teacher": "teacher" if teacher is None else str(_find_model(teacher, "--teacher")),
        "stage": kind.stage,
        "columns": f"\n  dataset_additional_keys: [{', '.join(kind.columns)}]" if kind.columns else "",
        **sizes,
    }
    rows = kind.make_rows() if data is None else _read_own(data)
    random.Random(0).shuffle(rows)
    num_held_out = _NUM_HELD_OUT if data is None else min(_NUM_HELD_OUT, len(rows) // 4)
    commands = _list_commands(kind, values)
    parts = {"scoring": kind.scoring, "critic": kind.critic}
    texts = {
        "train.jsonl": _format_rows(rows[num_held_out:]),
        "heldout.jsonl": _format_rows(rows[:num_held_out]),
        "run.yaml": _fill(_read(kind.run), {**values, **{name: _fill(_read(text), values) for name, text in parts.items()}}),
        "README.md": _fill(_read("README.md"), {**values, **_describe(kind, model, rows[0]), "commands": commands}),
        **{name: _fill(_read(template), values) for name, template in kind.files.items()},
    }
    for name, text in texts.items():
        write_file(folder / name, text.rstrip("\n") + "\n", makes_folder=True)
    if model is None:
        _save_tiny_model(folder / "model")
        if kind.has_teacher:  # whose tokens differ more in their probabilities
            _save_tiny_model(folder / "teacher", seed=11, spread=0.3)
    return commands


def _format_rows(rows: list[_Row]) -> str:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def _read(template: str | None) -> str:
    """Return the text of a template without its last line break, "" for None."""
    if template is None:
        return ""
    return (_TEMPLATES / f"{template}.template").read_text(encoding="utf-8").removesuffix("\n")


def _fill(text: str, values: dict[str, str]) -> str:
    return Template(text).safe_substitute(values)


def _describe(kind: _Kind, model: str | None, row: _Row) -> dict[str, str]:
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
    }
    example = json.dumps(row, ensure_ascii=False)
    return {
        "model_note": tiny if model is None else f"The run starts from `{model}`.",
        "data_note": f"one JSON object a line, such as `{example}`",
        "file_rows": "".join(f"| `{name}` | {notes[name]} |\n" for name in kind.files),
        "advice": _read(kind.advice),
    }


def _list_commands(kind: _Kind, values: dict[str, str]) -> str:
    commands = [*filter(None, [kind.first]), "mindspeed-rl explain --config run.yaml", "mindspeed-rl train --config run.yaml"]
    load = "--load result/hf/latest --max-new-tokens $answer"
    if kind.options:
        commands.append(f"mindspeed-rl evaluate {load} --task jsonl --task-data-path heldout.jsonl {kind.options}")
    commands.append(f"mindspeed-rl chat {load}")
    return _fill("\n".join(commands), values)


def _choose_sizes(kind: _Kind, model: str | None) -> dict[str, str]:
    """Return the numbers of the run file for the tiny model, or for a real one.

    Raises:
        ValueError: the folder holds no model.
    """
    supervised = kind.run == "supervised_run.yaml"
    if model is None:
        sizes = {"prompt": 96, "answer": 16, "length": 192, "micro": 128, "iterations": kind.iterations, "cache": 0.25}
        note = "for random weights; a model that has been trained needs 10 to 1000 times less"
        lr = "1.0e-3"
        return {"model": "model", "bf16": "false", "dtype": "float32", "lr": lr, "lr_note": note} | _as_text(sizes)
    name, path = parse_hub_name(model), _find_model(model, "--model")
    try:
        hidden = int(read_json(path / "config.json").get("hidden_size", 4096))
    except (ValueError, AttributeError) as error:
        raise ValueError(f"--model {model}: config.json is not a model's: {error}") from None
    is_small = hidden <= 1024
    lr = ("5.0e-5" if is_small else "1.0e-5") if supervised else ("2.0e-5" if is_small else "1.0e-6")
    sizes = {"prompt": 256, "answer": 128, "length": 1024, "micro": 8, "iterations": 2 * kind.iterations, "cache": 2.0}
    halves = "true" if computes_bfloat16() else "false"
    note = "half of it where the reward or the loss is unstable"
    return {
        "model": str(path) if name is None else model,
        "bf16": halves,
        "dtype": "bfloat16" if halves == "true" else "float32",
        "lr": lr,
        "lr_note": note,
    } | _as_text(sizes)


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


def _as_text(sizes: dict[str, float]) -> dict[str, str]:
    return {name: str(value) for name, value in sizes.items()}


def computes_bfloat16() -> bool:
    """Return True unless this machine has no other device than a processor that would emulate bfloat16."""
    try:
        flags = set(Path("/proc/cpuinfo").read_text().split())
    except OSError:
        return True
    return bool(flags & {"avx512_bf16", "amx_bf16", "bf16"}) or any(Path("/dev").glob("davinci*"))


def _save_tiny_model(folder: Path, seed: int = 7, spread: float = 0.05) -> None:
    """Save a random Qwen2.5 of 0.8M parameters with one token per printable ASCII character; the same bytes every time.

    Args:
        spread: standard deviation of the weights; larger, some tokens are far more probable than others.
    """
    import torch
    from tokenizers import Tokenizer, decoders, models
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen2Config
    from transformers.utils import logging

    logging.disable_progress_bar()

    special = ["<pad>", "<eos>", "<unk>"]
    vocabulary = {token: index for index, token in enumerate([*special, *map(chr, range(32, 127)), "\n"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>", unk_token="<unk>")
    fast.chat_template = _CHAT_TEMPLATE
    config = Qwen2Config(
        vocab_size=128,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        initializer_range=spread,
        bos_token_id=None,
        eos_token_id=fast.eos_token_id,
        pad_token_id=fast.pad_token_id,
    )
    torch.manual_seed(seed)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    fast.save_pretrained(folder)
