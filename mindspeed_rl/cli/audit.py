"""`mindspeed-rl audit`: what is wrong with the data or the reward of a run, before a device is claimed."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mindspeed_rl import registry
from mindspeed_rl.audit.data import audit_data, check_cleanable, name_dropped, write_clean, write_pass_rates
from mindspeed_rl.audit.judges import JudgeAudit, JudgedRow, ask_judges, read_judged_rows
from mindspeed_rl.audit.pass_rates import COLUMN, PassRates
from mindspeed_rl.audit.report import AuditReport
from mindspeed_rl.audit.rows import RowPart, find_tokenizer_folder, list_row_files, open_run_data, read_cases
from mindspeed_rl.cli.options import RunParser, print_status, report_failure
from mindspeed_rl.config.errors import ConfigError
from mindspeed_rl.config.loader import load_run_config
from mindspeed_rl.data.tokenizer import load_tokenizer
from mindspeed_rl.files import check_writable, describe_missing, write_file
from mindspeed_rl.hub import parse_hub_name
from mindspeed_rl.rewards.judge_addresses import list_judges
from mindspeed_rl.rewards.static_check import check_reward_functions
from mindspeed_rl.run import Run
from mindspeed_rl.run.draft import draft

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from mindspeed_rl.inference.session import Session

_USAGE = """usage: mindspeed-rl audit <kind> --config-name RUN [options] [key=value ...]

kinds:
  reward  cheats and wrong answers that the reward functions of the run would pay for
  judges  agreement of several judges about responses of a file, and with the marks of people
  data    duplicates, overlap with the evaluation sets, labels that no response can match, prompts that are cut

mindspeed-rl audit <kind> --help shows the options of one."""


_DTYPES = ("auto", "bfloat16", "float16", "float32")
#: options that need a model
_OF_SAMPLES = ("samples", "max_prompts", "dtype", "pass_rates", "drop_decided")


def main(argv: list[str]) -> int:
    """Print an audit; return 0 when it passes, 1 when it does not, 2 for a user's error.

    Args:
        argv: the arguments after `audit`, for example ["data", "--config-name", "grpo_tiny_cpu"].
    """
    if not argv or argv[0] in ("-h", "--help"):
        print(_USAGE)
        return 0 if argv else 2
    if argv[0] not in _AUDITS:
        hint = registry.did_you_mean(argv[0], _AUDITS) or "."
        print_status(f"error: audit has no kind '{argv[0]}'{hint} Known: {', '.join(_AUDITS)}.")
        return 2
    try:
        return _AUDITS[argv[0]](argv[1:])
    except (ValueError, KeyboardInterrupt, RuntimeError, OSError) as error:
        return report_failure(error)


def _make_parser(kind: str, description: str) -> RunParser:
    """Return a parser with the options that all audits have."""
    parser = RunParser(prog=f"mindspeed-rl audit {kind}", description=description)
    parser.add_argument("--config-name", "--config", required=True, help="run file, with or without .yaml")
    parser.add_argument("--config-dir", default=None, help="folder of the run file; default: the project's configs/")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("-o", "--output", type=Path, default=None, metavar="FILE", help="HTML page to write")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="overrides, as for training")
    return parser


def _read_run(arguments: Namespace) -> Run:
    """Return the run of the command line.

    Raises:
        ValueError: the run file has mistakes, or its stage has no prompts and rewards.
    """
    cfg = load_run_config(arguments.config_name, arguments.config_dir, arguments.overrides)
    if cfg.is_supervised or cfg.rl_config is None:
        raise ValueError(f"megatron_training.stage: {cfg.stage}; the audit is of runs with rollouts and rewards")
    registry.search_folders(cfg.plugin_folders)
    return draft(cfg)


def _read_bound(parser: RunParser, bound: float) -> float:
    if not 0 <= bound <= 1:
        parser.error(f"--bound {bound:g} must be a fraction between 0 and 1")
    return bound


def _finish(arguments: Namespace, report: AuditReport, values: dict[str, object]) -> int:
    """Print and write a report; return the exit code."""
    if arguments.output is not None:
        write_file(arguments.output, report.render())
    print(json.dumps(values, indent=2, ensure_ascii=False) if arguments.json else report.format(), flush=True)
    if arguments.output is not None:
        print_status(f"wrote {arguments.output}")
    return 0 if report.passes else 1


def _open_data(run: Run) -> tuple[PreTrainedTokenizerBase, tuple[RowPart, dict[str, RowPart]]]:
    """Return the tokenizer of a run, its prompts and its evaluation sets."""
    actor = run.config.actor_config
    tokenizer = load_tokenizer(find_tokenizer_folder(actor), use_fast=not actor.tokenizer_not_use_fast)
    tools = []
    if run.rl.multi_turn_enable:  # by name: it imports torch, which other audits do without
        read_tools = registry.load("mindspeed_rl.workers.agents:read_tool_schemas", "audit")
        tools = read_tools(run.rl, tokenizer)
    return tokenizer, open_run_data(run, tokenizer, tools)


def _audit_data(argv: list[str]) -> int:
    parser = _make_parser(
        "data",
        "Look at every prompt of a run: duplicates, overlap with its evaluation sets, answers in the prompt, labels that no"
        " response can match, prompts that are cut. Needs no model and no device.",
    )
    parser.add_argument("--bound", type=float, default=0.01, help="largest share of rows with a fault; default 0.01")
    parser.add_argument("--clean", type=Path, metavar="FILE", help="JSON lines to write: the rows without a fault")
    parser.add_argument("--model", metavar="FOLDER", help="model whose samples give each prompt a pass rate")
    parser.add_argument("--samples", type=int, help="--model: samples of each prompt; default 4")
    parser.add_argument("--max-prompts", type=int, help="--model: only the first so many prompts")
    parser.add_argument("--dtype", choices=_DTYPES, help="--model: format of the weights; default: the run's")
    parser.add_argument(
        "--pass-rates", type=Path, metavar="FILE", help="--model: JSON lines to write, the rows with a column pass_rate"
    )
    parser.add_argument(
        "--drop-decided",
        action="store_true",
        help="--model: --clean also leaves out the prompts that are never or always right",
    )
    arguments = parser.parse_intermixed_args(argv)
    bound = _read_bound(parser, arguments.bound)
    if arguments.drop_decided and arguments.clean is None:
        parser.error("--drop-decided leaves rows out of the file of --clean")
    _check_sampling(parser, arguments)
    outputs = _check_outputs(parser, arguments)
    run = _read_run(arguments)
    _, (train, held_out) = _open_data(run)
    _check_inputs(parser, outputs, _list_inputs(train, held_out))
    for option in ("clean", "pass_rates"):
        if getattr(arguments, option) is not None:
            check_cleanable(train, f"--{option.replace('_', '-')}")
    session = None
    if arguments.model is not None:  # both raise before the data are read
        registry.load("mindspeed_rl.audit.reward:select_functions", "audit")(run)
        session = _open_model(arguments, run)
    audit = audit_data(train, held_out, run, report=print_status)
    if session is not None:
        audit.pass_rates = _sample(arguments, run, train, session)
    if arguments.pass_rates is not None and audit.pass_rates is not None:
        count = write_pass_rates(audit.pass_rates, train, arguments.pass_rates)
        print_status(f"wrote {count:,} rows with a pass rate to {arguments.pass_rates}")
    if arguments.clean is not None:
        rates = audit.pass_rates
        columns = {} if rates is None else {index: {COLUMN: rate} for index, rate in rates.rates.items()}
        decided = dict[int, str]()
        if rates is not None and arguments.drop_decided:
            decided = dict.fromkeys(rates.never, "never") | dict.fromkeys(rates.always, "always")
        kept, dropped = write_clean(audit, train, arguments.clean, columns, decided)
        print_status(f"wrote {kept:,} rows to {arguments.clean}, and {dropped:,} reasons next to it")
    return _finish(arguments, audit.describe(bound), audit.encode(bound))


def _check_outputs(parser: RunParser, arguments: Namespace) -> dict[str, Path]:
    """Return the files that are written, by option; end with an error for one that cannot be, or that two options write."""
    outputs = {
        option: path
        for option, name in (("--output", "output"), ("--clean", "clean"), ("--pass-rates", "pass_rates"))
        if (path := getattr(arguments, name, None)) is not None
    }
    for option, path in outputs.items():
        if path.is_dir() or not path.parent.is_dir():
            folder = f"{path} is" if path.is_dir() else f"{path.parent} is not"
            parser.error(f"{option} {path}: {folder} a folder; write the name of a file")
        try:
            check_writable(path)
        except OSError as error:
            parser.error(f"{option} {error.strerror}")
    if "--clean" in outputs:
        outputs["--clean (its second file)"] = name_dropped(outputs["--clean"])
    options = dict[Path, str]()
    for option, path in outputs.items():
        other = options.setdefault(path.resolve(), option)
        if other != option:
            parser.error(f"{option} and {other} write the same file, {path}")
    return outputs


def _check_inputs(parser: RunParser, outputs: Mapping[str, Path], inputs: Mapping[str, Sequence[Path]]) -> None:
    """End with an error for a file that would take the place of one that is read.

    Args:
        inputs: key or option -> files that are read.
    """
    names = {path.resolve(): name for name, paths in inputs.items() for path in paths}
    for option, path in outputs.items():
        if (name := names.get(path.resolve())) is not None:
            parser.error(f"{option} {path} is a file of {name}; write another one")


def _list_inputs(train: RowPart, held_out: Mapping[str, RowPart]) -> dict[str, list[Path]]:
    """Return the files of raw data that a run reads, by key."""
    streams = [train.stream, *(part.stream for part in held_out.values())]
    return {f"megatron_training.{stream.key}": stream.list_files() for stream in streams}


def _check_sampling(parser: RunParser, arguments: Namespace) -> None:
    """End with an error for options of samples without a model, or that no sample can have."""
    given = {name: value for name, value in vars(arguments).items() if name in _OF_SAMPLES}
    for name, value in given.items():
        option = f"--{name.replace('_', '-')}"
        if value and arguments.model is None:
            parser.error(f"{option} needs --model, whose samples it is about")
        if name in ("samples", "max_prompts") and value is not None and value < 1:
            parser.error(f"{option} {value} must be at least 1")
    model = arguments.model
    if model is not None and parse_hub_name(model) is None and not Path(model).expanduser().exists():
        parser.error(f"--model: {describe_missing(model)}")


def _open_model(arguments: Namespace, run: Run) -> Session:
    """Return the model of `--model`, whose weights are not loaded yet."""
    open_model = registry.load("mindspeed_rl.cli.audit_samples:open_model", "audit")
    return open_model(run, arguments.model, arguments.dtype)


def _sample(arguments: Namespace, run: Run, train: RowPart, session: Session) -> PassRates:
    """Return the pass rates of the prompts from samples of a model, with the run's sampling and reward functions."""
    sample_run = registry.load("mindspeed_rl.cli.audit_samples:sample_run", "audit")
    return sample_run(
        run,
        train,
        session,
        num_samples=arguments.samples or 4,
        max_prompts=arguments.max_prompts,
        report=print_status,
    )


def _audit_reward(argv: list[str]) -> int:
    parser = _make_parser(
        "reward",
        "Score cheats, wrong answers and honest ones with the reward functions of a run, as the trainer would. Needs no model"
        " and no device; a judge is asked where it can be reached.",
    )
    parser.add_argument(
        "--bound", type=float, default=0.05, help="largest share of rows that a cheat may get through; default 0.05"
    )
    parser.add_argument("--rows", type=int, default=16, help="rows that are attacked; default 16")
    parser.add_argument(
        "--marked", metavar="FILE", help="rows of watch --label: responses that people call right or wrong are scored too"
    )
    parser.add_argument("--model", metavar="FOLDER", help="model whose samples are tried and recombined as well")
    parser.add_argument("--samples", type=int, help="--model: samples of each row; default 8")
    parser.add_argument("--dtype", choices=_DTYPES, help="--model: format of the weights; default: the run's")
    arguments = parser.parse_intermixed_args(argv)
    bound = _read_bound(parser, arguments.bound)
    _check_sampling(parser, arguments)
    if arguments.rows < 1:
        parser.error(f"--rows {arguments.rows} must be at least 1")
    outputs = _check_outputs(parser, arguments)
    run = _read_run(arguments)
    if violations := check_reward_functions(run.rl):
        raise ConfigError(violations)
    # by name: the check of the judge's address imports torch, which the audit of data does without
    names = ("select_functions", "list_cases", "audit_reward")
    select_functions, list_cases, audit_reward = (registry.load(f"mindspeed_rl.audit.reward:{name}", "audit") for name in names)
    select_functions(run)  # raises before the data are read
    marked = list[JudgedRow]()
    if arguments.marked is not None:
        marked = _read_marked(arguments.marked)
        _check_inputs(parser, outputs, {"--marked": list_row_files(arguments.marked)})
    tokenizer, (train, held_out) = _open_data(run)
    _check_inputs(parser, outputs, _list_inputs(train, held_out))
    columns = {}
    if run.rl.multi_turn_enable:
        columns = registry.load("mindspeed_rl.rollout.trajectory:make_trial_columns", "audit")()
    cases = list_cases(read_cases(train), arguments.rows)
    samples = None
    if arguments.model is not None:
        sample_cases = registry.load("mindspeed_rl.cli.audit_samples:sample_cases", "audit")
        samples = sample_cases(run, cases, _open_model(arguments, run), num_samples=arguments.samples or 8)
    audit = audit_reward(run, cases, tokenizer, columns=columns, samples=samples, marked=marked, report=print_status)
    return _finish(arguments, audit.describe(bound), audit.encode(bound))


def _read_marked(path: str) -> list[JudgedRow]:
    """Return the responses of a file that people have called right or wrong.

    Raises:
        ValueError: none is marked, or one by criteria.
    """
    rows = read_judged_rows(path, "human")
    for row in rows:
        if row.human is not None and len(row.human) > 1:
            raise ValueError(f"--marked: {row.where}: human must be one mark, not {len(row.human)}")
    return rows


def _audit_judges(argv: list[str]) -> int:
    parser = _make_parser(
        "judges",
        "Ask the judge of a run and further ones about the responses of a file; print how far they agree with each other and"
        " with people. Needs no model and no device.",
    )
    parser.add_argument(
        "--responses", required=True, metavar="FILE", help="rows with prompt and response, perhaps label, columns and marks"
    )
    parser.add_argument(
        "--judge", action="append", default=[], metavar="[MODEL@]URL", help="a further judge; may be given several times"
    )
    parser.add_argument("--human", metavar="COLUMN", help="marks of people: true or false, or a list of these per criterion")
    parser.add_argument(
        "--threshold", type=float, default=0.5, help="score from which a judge finds a response right; default 0.5"
    )
    parser.add_argument(
        "--bound", type=float, default=0.667, help="smallest alpha of the judges, and kappa of each with people; default 0.667"
    )
    arguments = parser.parse_intermixed_args(argv)
    bound = _read_bound(parser, arguments.bound)
    if not 0 < arguments.threshold <= 1:
        parser.error(f"--threshold {arguments.threshold:g} must be above 0 and at most 1")
    outputs = _check_outputs(parser, arguments)
    run = _read_run(arguments)
    # by name: the check of an address imports torch
    make_settings = registry.load("mindspeed_rl.audit.reward:make_settings", "audit")
    settings = make_settings(run)
    if settings.judge_url is None and not arguments.judge:
        raise ValueError("audit judges: the run has no rl_config.judge_url; name judges by --judge [MODEL@]URL")
    judges = list_judges(settings.judge_url, settings.judge_model, settings.judge_panel, arguments.judge)
    if len(judges) * settings.judge_repeats < 2 and arguments.human is None:
        parser.error("one judge agrees with itself; name a second one by --judge, or people's marks by --human")
    rows = read_judged_rows(arguments.responses, arguments.human)
    _check_inputs(parser, outputs, {"--responses": list_row_files(arguments.responses)})
    check_server = registry.load("mindspeed_rl.run.machine:check_server", "audit")
    for judge in judges:
        check_server(judge.url, judge.where)
    audit = JudgeAudit(rows, ask_judges(judges, settings, rows, print_status), arguments.threshold)
    return _finish(arguments, audit.describe(bound), audit.encode(bound))


_AUDITS: dict[str, Callable[[list[str]], int]] = {"reward": _audit_reward, "judges": _audit_judges, "data": _audit_data}

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
