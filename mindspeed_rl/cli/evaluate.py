"""`mindspeed-rl evaluate`: score a model on benchmark data of this machine."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mindspeed_rl import registry
from mindspeed_rl.cli.inference_options import (
    MOST_LIKELY,
    PENALTIES,
    SHAPE,
    add_agent_options,
    add_model_options,
    add_prompt_options,
    add_sampling_options,
    build_sampling,
    check_common,
    compute_agent_length,
    open_agents,
    open_session,
    run_command,
    running_engine,
)
from mindspeed_rl.cli.options import Parser, print_status, refuse_first
from mindspeed_rl.config import RLConfig
from mindspeed_rl.data.templates import HF_TEMPLATE
from mindspeed_rl.files import write_file
from mindspeed_rl.inference.batch_generation import write_jsonl
from mindspeed_rl.inference.engine_interface import Engine
from mindspeed_rl.inference.task_evaluation import (
    EvaluationSettings,
    PreparedTask,
    TaskScore,
    prepare_task,
    run_task,
    summary_table,
)
from mindspeed_rl.inference.tasks import TASKS, load_task_class
from mindspeed_rl.inference.tasks.task import Task, TaskOptions, fill_template
from mindspeed_rl.rewards.dry_run import dry_run_reward_functions
from mindspeed_rl.rewards.static_check import check_reward_functions

if TYPE_CHECKING:
    from mindspeed_rl.inference.agent_engine import AgentEngine
    from mindspeed_rl.inference.session import Session

_DESCRIPTION = (
    "Score a model on benchmarks. Data is read from local paths only, but by lm-eval's tasks, which may load their own; a task "
    "that fails makes the exit status 1."
)
_HARNESS = "lm-eval:"
#: name in --task -> task of lm-eval -> metric -> value
_Harness = dict[str, dict[str, dict[str, float]]]


def make_parser() -> Parser:
    """Build the argument parser."""
    parser = Parser(prog="mindspeed-rl evaluate", description=_DESCRIPTION, allow_abbrev=False)
    group = parser.add_argument_group("tasks")
    add = group.add_argument
    add(
        "--task", nargs="+", required=True, metavar="TASK",
        help=f"{', '.join(TASKS)}, module:Class of your own, or lm-eval:NAME for a task of the package lm-eval",
    )  # fmt: skip
    add(
        "--task-data-path", nargs="+", type=Path, required=True,
        help="file or folder of each task, in the order of --task; lm-eval: folder with more task definitions, or - for none",
    )  # fmt: skip
    add("--max-eval-samples", type=int, help="max questions of a task, spread over its subjects")
    add("--num-shots", type=int, help="worked examples before each question; default: the task's own number")
    add("--chain-of-thought", action="store_true", help="multiple choice: reason before answering")
    add("--num-return", type=int, default=1, help="answers to each question; the score is their mean")
    add("--scorer", help="reward function in place of the task's own; jsonl needs one")
    add("--external-plugins", nargs="+", default=[], help="Python files that register --scorer, as in run files")
    add("--input-key", help="jsonl: column of the prompt")
    add("--label-key", help="jsonl: column of the label")
    add("--output", type=Path, help="JSON file for all numbers")
    add("--answers", type=Path, help="JSON lines file for every prompt, answer and verdict")
    add("--greedy", action="store_true", help="the most likely answer (the default without --temperature)")
    add("--eval-language", choices=("en", "zh"), help="multiple choice, needlebench: language; default: as the data")
    add("--alternative-prompt", action="store_true", help="multiple choice: read the letter from an answer in words")
    add("--instruction-template", help="the prompt is put into it: {prompt}, or {question}, {subject}, {few_shot_examples}")
    add("--origin-postprocess", action="store_true", help=argparse.SUPPRESS)
    add("--context-lengths", nargs="+", type=int, default=[], help="needlebench: prompt tokens; default 1000 2000 4000")
    add(
        "--depths",
        nargs="+",
        type=int,
        default=[],
        help="needlebench: position of the needle, in percent; default 0 25 50 75 100",
    )
    add_sampling_options(parser, max_new_tokens=None)
    add_agent_options(parser)
    add_prompt_options(parser)
    add_model_options(parser)
    return parser


def _check(args: argparse.Namespace) -> None:
    check_common(args)
    no_needle = "needlebench" not in args.task
    sampled = any(value is not None for value in (args.top_k, args.top_p, args.min_p)) or bool(args.temperature)
    refuse_first(
        (
            len(args.task) != len(args.task_data_path),
            f"{len(args.task)} tasks need as many --task-data-path, not {len(args.task_data_path)}",
        ),
        (len(set(args.task)) < len(args.task), "--task names a task twice"),
        (
            args.max_eval_samples is not None and args.max_eval_samples < 1,
            f"--max-eval-samples is {args.max_eval_samples}; it must be at least 1",
        ),
        (no_needle and args.context_lengths, "--context-lengths is for --task needlebench"),
        (no_needle and args.depths, "--depths is for --task needlebench"),
        (any(length < 1 for length in args.context_lengths), "--context-lengths must be positive"),
        (any(not 0 <= depth <= 100 for depth in args.depths), "--depths are percent, from 0 to 100"),
        (
            args.alternative_prompt and args.chain_of_thought,
            "--alternative-prompt and --chain-of-thought are two ways to answer; choose one",
        ),
        (args.greedy and sampled, "--greedy samples nothing: drop --temperature, --top-k, --top-p and --min-p"),
        (
            args.num_return < 1 or (args.num_return > 1 and not args.temperature),
            f"--num-return {args.num_return}: several answers need a --temperature above 0",
        ),
        (sampled and not args.temperature, "--top-k, --top-p and --min-p need a --temperature above 0"),
    )
    if args.instruction_template is not None:  # before the model is read
        fill_template(args.instruction_template)
    _check_harness(args)
    if args.origin_postprocess:
        print_status("note: --origin-postprocess has no effect: answers are read by one rule for all labels")


def _check_harness(args: argparse.Namespace) -> None:
    """Raise ValueError for options that lm-eval's tasks do not support."""
    tasks = _list_harness_tasks(args)
    if not tasks:
        return
    if find_spec("lm_eval") is None:
        raise ValueError(f"--task {tasks[0][0]} needs the package lm-eval: pip install lm-eval")
    for name, path in tasks:
        if str(path) != "-" and not path.expanduser().is_dir():
            raise ValueError(f"{name}: --task-data-path {path} is not a folder; - stands for only lm-eval's own tasks")
    if given := [name for name in (*SHAPE, *PENALTIES) if vars(args)[name] is not None]:
        print_status(f"note: --{given[0].replace('_', '-')} has no effect on lm-eval's tasks, which set their own sampling")
    if args.prompt_type is not None:
        raise ValueError("lm-eval's tasks are put into the tokenizer's own template: --hf-chat-template, not --prompt-type")


def _open_tasks(args: argparse.Namespace) -> list[Task]:
    tasks = [(name, path) for name, path in zip(args.task, args.task_data_path) if not name.startswith(_HARNESS)]
    classes = [(load_task_class(name), path) for name, path in tasks]
    if args.external_plugins:
        if args.scorer is None:
            raise ValueError("--external-plugins register a reward function; name it with --scorer")
        rl = RLConfig(verifier_function=[args.scorer], external_plugins=args.external_plugins)
        if violations := check_reward_functions(rl) or dry_run_reward_functions(rl, {}).violations:
            texts = (text.removeprefix("rl_config.").replace("verifier_function:", "--scorer:") for text in violations)
            raise ValueError("; ".join(text.replace("external_plugins:", "--external-plugins:") for text in texts))
    options = TaskOptions(
        num_shots=args.num_shots,
        chain_of_thought=args.chain_of_thought,
        scorer=args.scorer,
        external_plugins=tuple(args.external_plugins),
        max_new_tokens=args.max_new_tokens,
        prompt_key=args.input_key,
        label_key=args.label_key,
        language=args.eval_language,
        alternative_prompt=args.alternative_prompt,
        instruction_template=args.instruction_template,
        context_lengths=tuple(args.context_lengths),
        depths=tuple(args.depths),
    )
    return [kind(path.expanduser(), options) for kind, path in classes]


def _settings(args: argparse.Namespace, session: Session) -> EvaluationSettings:
    sampling = build_sampling(args, MOST_LIKELY, session.prompt_format.stop_token_ids)
    return EvaluationSettings(sampling, session.settings.max_model_len, args.num_return, args.max_eval_samples, args.seed)


def _evaluate(argv: list[str]) -> int:
    args = make_parser().parse_args(argv)
    _check(args)
    tasks = _open_tasks(args)
    session = open_session(args)
    failures: dict[str, str] = {}
    with open_agents(session, args) as agents:
        scores, answers, harness = _run_tasks(args, session, agents, tasks, failures)
    if scores or failures:
        print(summary_table(scores, failures), flush=True)
    _show_harness(harness)
    if args.output is not None:
        _write_json(args, session, scores, failures, harness)
    if args.answers is not None:
        write_jsonl(args.answers, answers)
        print_status(f"wrote {len(answers)} answers to {args.answers}")
    return 1 if failures else 0


def _run_tasks(
    args: argparse.Namespace, session: Session, agents: AgentEngine | None, tasks: list[Task], failures: dict[str, str]
) -> tuple[list[TaskScore], list[dict[str, Any]], _Harness]:
    """Return scores, answers and the results of lm-eval; write failures to `failures`."""
    settings = _settings(args, session)
    prepared: list[PreparedTask] = []
    for task in tasks:
        try:
            prepared.append(prepare_task(task, session.prompt_format, settings))
        except (ValueError, OSError) as error:
            _note_failure(failures, task.name, error)
    scores: list[TaskScore] = []
    answers: list[dict[str, Any]] = []
    harness: _Harness = {}
    harness_tasks = _list_harness_tasks(args)
    if not prepared and not harness_tasks:
        return scores, answers, harness
    lengths = [session.needed_length(max(map(len, each.prompts)), each.max_new_tokens) for each in prepared]
    # the length of lm-eval's prompts is known only when they are built
    length = session.settings.max_model_len if harness_tasks else max(lengths)
    if agents is not None:  # --max-new-tokens limits one turn
        length = max(length, compute_agent_length(session, args))
    with running_engine(session, max_model_len=length, agents=agents) as engine:
        for each in prepared:
            try:
                score, records = run_task(engine, each, session.prompt_format, replace(settings, max_model_len=length))
            except (ValueError, RuntimeError, OSError) as error:
                _note_failure(failures, each.task.name, error)
                continue
            scores.append(score)
            answers += records
            _show_details(score)
        for name, path in harness_tasks:
            try:
                harness[name] = _run_harness(args, session, engine, name, path)
            except (ValueError, RuntimeError, OSError) as error:
                _note_failure(failures, name, error)
    return scores, answers, harness


def _list_harness_tasks(args: argparse.Namespace) -> list[tuple[str, Path]]:
    """Return the tasks of lm-eval, each with its path."""
    return [(name, path) for name, path in zip(args.task, args.task_data_path) if name.startswith(_HARNESS)]


def _show_harness(harness: _Harness) -> None:
    for name, results in harness.items():
        for task, metrics in results.items():
            values = ", ".join(f"{metric} {value:.4f}" for metric, value in metrics.items())
            print(f"{name}{'' if task == name.removeprefix(_HARNESS) else f' / {task}'}: {values}", flush=True)


def _run_harness(
    args: argparse.Namespace, session: Session, engine: Engine, name: str, path: Path
) -> dict[str, dict[str, float]]:
    # by name, because it imports an optional package
    run = registry.load("mindspeed_rl.inference.lm_harness:run_harness", f"--task {name}")
    return run(
        engine,
        session.tokenizer,
        name.removeprefix(_HARNESS),
        include_path=None if str(path) == "-" else path.expanduser(),
        num_shots=args.num_shots,
        max_samples=args.max_eval_samples,
        chat_template=session.prompt_format.name == HF_TEMPLATE,
        template_arguments=session.prompt_format.template_arguments,
        max_model_len=session.settings.max_model_len,
        stop_token_ids=session.prompt_format.stop_token_ids,
        seed=args.seed,
    )


def _note_failure(failures: dict[str, str], name: str, error: Exception) -> None:
    failures[name] = f"{error}".removeprefix(f"{name}: ")
    print_status(f"error: {name}: {failures[name]}")


def _show_details(score: TaskScore) -> None:
    if len(score.groups) > 1:
        print(f"{score.task} by subject\n{score.group_table()}\n", flush=True)
    if score.total > score.num_questions:
        print_status(f"{score.task}: {score.solved} of {score.num_questions} questions have a right answer among theirs")
    if score.pass_at:
        shares = [f"pass@{k} {share:.2%}" for k, share in score.pass_at.items()]
        vote = "" if score.majority is None else f", majority vote {score.majority:.2%}"
        print(f"{score.task}: {', '.join(shares)}{vote}", flush=True)
    if score.dropped_shots:
        print_status(f"note: {score.task}: {score.dropped_shots} examples were left out because prompts were too long")
    if score.unscored:
        reasons = ", ".join(f"{count} {reason}" for reason, count in score.unscored.items())
        print_status(f"note: {score.task}: answers that the scorer could not score count as wrong: {reasons}")
    for text in score.notes:
        print_status(f"note: {score.task}: {text}")


def _write_json(
    args: argparse.Namespace,
    session: Session,
    scores: list[TaskScore],
    failures: dict[str, str],
    harness: _Harness,
) -> None:
    content = {
        "model": session.model.describe(),
        "prompt_type": session.prompt_format.name,
        "chat_template_kwargs": session.prompt_format.template_arguments,
        "dtype": session.settings.dtype
        if session.settings.dtype != "auto"
        else str(session.model.source.dtype).removeprefix("torch."),
        "seed": args.seed,
        "temperature": args.temperature or 0.0,
        "tasks": {score.task: score.record() for score in scores},
        "lm_eval": {name.removeprefix(_HARNESS): results for name, results in harness.items()},
        "failed": failures,
    }
    path: Path = args.output
    write_file(path, json.dumps(content, indent=2, ensure_ascii=False) + "\n", makes_folder=True)
    print_status(f"wrote {path}")


def main(argv: list[str]) -> int:
    """Evaluate; return 0, 1 when a task failed, 2 for a wrong option or file, 130 after Ctrl-C."""
    return run_command(_evaluate, argv)
